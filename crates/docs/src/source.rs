//! How a Markdown file of `docs/` becomes a page: its front matter, its route and its position.
//!
//! The build script includes this file; the library compiles it for tests only.
//!
//! A page begins with its front matter: a line `---`, one `key: value` per line, and a line `---`. `title` and
//! `description` are required, `order` is an integer and optional. Values are plain text without quotes. This is a
//! strict subset of YAML, so other tools read it too.
//!
//! Pages that are in no folder, and the index of each folder, name their `group`, which is a part of the contents. The
//! pages of a folder have the group of its index.

/// Whether a folder of `docs/` is for developers, and not for readers of the product.
pub(crate) fn is_for_developers(folder: &str) -> bool {
    ["dev", "decisions"].contains(&folder)
}

/// The parts of the contents, in the order in which readers come to them.
pub(crate) const GROUPS: [&str; 6] = ["Start", "Use sandboxes", "SDKs", "Operate", "Security", "Reference"];

/// Position of a page or folder without `order`: after those that have one.
const LAST: u32 = 1000;

/// The source of a page, as it is embedded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageSource {
    pub(crate) group: &'static str,
    pub(crate) route: String,
    pub(crate) file: String,
    pub(crate) title: String,
    pub(crate) description: String,
    pub(crate) body: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct FrontMatter {
    title: String,
    description: String,
    order: Option<u32>,
    group: Option<&'static str>,
}

/// The pages of files, given as path and text, in the order of a table of contents: by group, then depth first, `index.md`
/// first in its folder and its `order` that of the folder, siblings by `order` and then by name.
pub(crate) fn ordered(files: &[(String, String)]) -> Result<Vec<PageSource>, String> {
    let mut parsed = Vec::with_capacity(files.len());
    for (path, text) in files {
        let (matter, body) = split(text).map_err(|error| format!("docs/{path}: {error}"))?;
        parsed.push((path.as_str(), matter, body));
    }
    let order = |path: &str| {
        let found = parsed.iter().find(|(other, ..)| *other == path);
        found.and_then(|(_, matter, _)| matter.order).unwrap_or(LAST)
    };
    let group = |path: &str| {
        let named = match path.split_once('/') {
            Some((folder, _)) => format!("{folder}/index.md"),
            None => path.to_owned(),
        };
        let found = parsed.iter().find(|(other, ..)| *other == named);
        let group = found.and_then(|(_, matter, _)| matter.group);
        group.ok_or_else(|| {
            format!(
                "docs/{named}: front matter: group is missing; it is one of {}",
                GROUPS.join(", ")
            )
        })
    };
    for (path, matter, _) in &parsed {
        if matter.group.is_some()
            && path.contains('/')
            && (!path.ends_with("/index.md") || path.matches('/').count() > 1)
        {
            return Err(format!(
                "docs/{path}: front matter: the index of its folder names the group"
            ));
        }
    }
    // One step for each folder on the way and one for the page.
    let key = |path: &str| -> Vec<(u32, String)> {
        let mut folder = String::new();
        let mut steps = Vec::new();
        for segment in path.split_inclusive('/') {
            if let Some(name) = segment.strip_suffix('/') {
                folder.push_str(segment);
                steps.push((order(&format!("{folder}index.md")), name.to_owned()));
            } else if segment == "index.md" {
                steps.push((0, String::new()));
            } else {
                steps.push((order(path), segment.trim_end_matches(".md").to_owned()));
            }
        }
        steps
    };
    let mut keyed = Vec::with_capacity(parsed.len());
    for page in &parsed {
        let group = group(page.0)?;
        let place = GROUPS.iter().position(|other| *other == group);
        keyed.push(((place, key(page.0)), group, page));
    }
    keyed.sort_by(|(one, ..), (other, ..)| one.cmp(other));
    let page = |group, (path, matter, body): &(&str, FrontMatter, &str)| PageSource {
        group,
        route: route(path),
        file: format!("/{path}"),
        title: matter.title.clone(),
        description: matter.description.clone(),
        body: (*body).to_owned(),
    };
    Ok(keyed
        .into_iter()
        .map(|(_, group, parsed)| page(group, parsed))
        .collect())
}

/// `sandbox/network.md` is served as `/sandbox/network`, `sandbox/index.md` as `/sandbox`, `index.md` as `/`.
fn route(path: &str) -> String {
    let stem = path.strip_suffix(".md").unwrap_or(path);
    match stem.strip_suffix("index") {
        Some("") => "/".to_owned(),
        Some(folder) if folder.ends_with('/') => format!("/{}", folder.trim_end_matches('/')),
        _ => format!("/{stem}"),
    }
}

/// The front matter and the text after it.
fn split(text: &str) -> Result<(FrontMatter, &str), String> {
    let missing = "must begin with front matter: `---`, `title: ...`, `description: ...`, `---`";
    let mut rest = text.strip_prefix("---\n").ok_or(missing)?;
    let (mut title, mut description, mut order, mut group) = (None, None, None, None);
    loop {
        let (line, after) = rest.split_once('\n').ok_or("the front matter has no closing `---`")?;
        rest = after;
        if line == "---" {
            break;
        }
        let (key, value) = line
            .split_once(": ")
            .ok_or_else(|| format!("front matter: expected `key: value`, not {line:?}"))?;
        let value = value.trim();
        if value.is_empty() || value.starts_with(['"', '\'', '[', '{', '|', '>', '&', '*', '#']) || value.contains(": ")
        {
            return Err(format!(
                "front matter: {key} must be plain text without quotes and without `: `, not {value:?}"
            ));
        }
        let field = match key {
            "title" => &mut title,
            "description" => &mut description,
            "order" => &mut order,
            "group" => &mut group,
            _ => {
                return Err(format!(
                    "front matter: unknown key {key:?}; use title, description, order and group"
                ));
            }
        };
        if field.replace(value.to_owned()).is_some() {
            return Err(format!("front matter: {key} is there twice"));
        }
    }
    let order = match order.map(|order| order.parse::<u32>()) {
        None => None,
        Some(Ok(order)) if (1..LAST).contains(&order) => Some(order),
        Some(_) => return Err(format!("front matter: order must be an integer from 1 to {}", LAST - 1)),
    };
    let group = match group {
        None => None,
        Some(name) => {
            let known = GROUPS.into_iter().find(|known| *known == name);
            let told = || format!("front matter: group must be one of {}, not {name:?}", GROUPS.join(", "));
            Some(known.ok_or_else(told)?)
        }
    };
    let matter = FrontMatter {
        title: title.ok_or("front matter: title is missing")?,
        description: description.ok_or("front matter: description is missing")?,
        order,
        group,
    };
    Ok((matter, rest.trim_start_matches('\n')))
}

#[cfg(test)]
mod tests {
    use super::{PageSource, is_for_developers, ordered, route, split};

    fn page(matter: &str) -> String {
        format!("---\ntitle: T\ndescription: D\n{matter}---\n\n# T\n")
    }

    /// Pages of one group, unless they name another.
    fn grouped(path: &str, matter: &str) -> (String, String) {
        let names_one = !path.contains('/') || path.ends_with("/index.md");
        let group = if names_one && !matter.contains("group") {
            "group: Start\n"
        } else {
            ""
        };
        (path.to_owned(), page(&format!("{matter}{group}")))
    }

    fn routes(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> = files.iter().map(|(path, matter)| grouped(path, matter)).collect();
        ordered(&files)
            .expect("pages")
            .into_iter()
            .map(|page| page.route)
            .collect()
    }

    #[test]
    fn a_page() {
        let files = [grouped("a/b.md", "order: 3\n"), grouped("a/index.md", "group: SDKs\n")];
        let expected = PageSource {
            group: "SDKs",
            route: "/a/b".to_owned(),
            file: "/a/b.md".to_owned(),
            title: "T".to_owned(),
            description: "D".to_owned(),
            body: "# T\n".to_owned(),
        };
        assert_eq!(ordered(&files).expect("pages").pop(), Some(expected));
    }

    #[test]
    fn folders_for_developers() {
        assert!(is_for_developers("dev") && is_for_developers("decisions"));
        assert!(!is_for_developers("api") && !is_for_developers("api/dev"));
    }

    #[test]
    fn routes_of_files() {
        for (path, expected) in [
            ("index.md", "/"),
            ("network.md", "/network"),
            ("sandbox/index.md", "/sandbox"),
            ("sandbox/network.md", "/sandbox/network"),
            ("myindex.md", "/myindex"),
        ] {
            assert_eq!(route(path), expected);
        }
    }

    #[test]
    fn order_does_not_depend_on_the_file_system() {
        let files = [
            ("z.md", "order: 2\n"),
            ("a.md", ""),
            ("s/b.md", ""),
            ("s/c.md", "order: 1\n"),
            ("index.md", "order: 999\n"),
            ("b.md", ""),
            ("r.md", "order: 1\ngroup: Reference\n"),
            ("o/index.md", "group: Operate\n"),
            ("o/p.md", ""),
            ("s/index.md", "order: 1\n"),
        ];
        let expected = ["/", "/s", "/s/c", "/s/b", "/z", "/a", "/b", "/o", "/o/p", "/r"];
        assert_eq!(routes(&files), expected);
        let mut reversed = files;
        reversed.reverse();
        assert_eq!(routes(&reversed), expected);
    }

    #[test]
    fn the_group_is_named_in_one_place() {
        let told = |files: &[(&str, &str)]| {
            let files: Vec<_> = files
                .iter()
                .map(|(path, matter)| ((*path).to_owned(), page(matter)))
                .collect();
            ordered(&files).expect_err("refused")
        };
        assert!(told(&[("a.md", "")]).contains("docs/a.md: front matter: group is missing"));
        assert!(told(&[("a/b.md", "")]).contains("docs/a/index.md: front matter: group is missing"));
        let twice = told(&[("a/index.md", "group: Start\n"), ("a/b.md", "group: Start\n")]);
        assert!(
            twice.contains("docs/a/b.md: front matter: the index of its folder"),
            "{twice}"
        );
        assert!(told(&[("a.md", "group: Other\n")]).contains("must be one of Start, "));
    }

    #[test]
    fn front_matter_is_strict() {
        for (text, message) in [
            ("# T\n", "must begin with front matter"),
            ("---\ntitle: T\n", "no closing"),
            ("---\ntitle: T\n---\n", "description is missing"),
            ("---\ndescription: T\n---\n", "title is missing"),
            ("---\ntitle: T\ntitle: T\n---\n", "title is there twice"),
            ("---\ntitle: T\ndescription: D\ntags: T\n---\n", "unknown key \"tags\""),
            ("---\ntitle:\ndescription: D\n---\n", "expected `key: value`"),
            ("---\ntitle:  \ndescription: D\n---\n", "plain text"),
            ("---\ntitle: \"T\"\ndescription: D\n---\n", "plain text"),
            ("---\ntitle: A: b\ndescription: D\n---\n", "plain text"),
            ("---\ntitle: T\ndescription: D\norder: 0\n---\n", "from 1 to 999"),
            ("---\ntitle: T\ndescription: D\norder: 1000\n---\n", "from 1 to 999"),
            ("---\ntitle: T\ndescription: D\norder: x\n---\n", "from 1 to 999"),
        ] {
            let error = split(text).expect_err(text);
            assert!(error.contains(message), "{error:?} for {text:?}");
        }
        for order in ["1", "999"] {
            assert!(split(&page(&format!("order: {order}\n"))).is_ok());
        }
    }
}

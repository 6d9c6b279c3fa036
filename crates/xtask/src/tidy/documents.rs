//! What documents name exists: files of links, paths of the repository, and tests. Rows of the specification stay short.
//!
//! Pages that programs write are checked elsewhere. The changelog speaks of the past, and a word in capitals, as in
//! `docs/NAME.md`, stands for a name.

use std::collections::HashSet;

use super::breach::Breach;
use super::tree::Tree;

const RULE: &str = "documents";
/// Documents that are not checked.
const EXEMPT: [&str; 2] = ["CHANGELOG.md", "docs/api/"];
/// Directories of the repository. What begins with one of them is a path from its root.
const TOP: [&str; 5] = ["crates/", "conformance/", "scripts/", "docs/", "packaging/"];
/// The page with one line for each promise.
const SPECIFICATION: &str = "SPECIFICATION.md";
/// Maximum length of a row of the specification, in characters. What does not fit belongs to `docs/dev/measurements`.
const ROW_MAX: usize = 310;

/// Every breach in a document.
pub(super) fn check(tree: &Tree) -> Vec<Breach> {
    let known = Known::of(tree);
    let mut breaches = Vec::new();
    for (path, text) in tree.with_endings(&["md"]) {
        if EXEMPT.iter().any(|exempt| path.starts_with(exempt)) {
            continue;
        }
        let mut breach = |line: usize, message: String| {
            breaches.push(Breach {
                rule: RULE,
                subject: path.to_owned(),
                message: format!("line {line}: {message}"),
            });
        };
        for (number, line) in (1..).zip(text.lines()) {
            for target in links(line).filter(|target| !known.has_link(path, target)) {
                breach(number, format!("the link {target:?} leads to no file"));
            }
            for word in code(line).flat_map(str::split_whitespace) {
                let word = word.trim_matches(['(', ')', ',', ';', '"', '\'']);
                for word in alternatives(word).filter(|word| !known.has_word(word)) {
                    breach(number, format!("{word:?} does not exist: name what it is called now"));
                }
            }
            let length = line.chars().count();
            if path == SPECIFICATION && length > ROW_MAX {
                breach(
                    number,
                    format!("{length} characters, more than {ROW_MAX}: move the conditions to docs/dev/measurements"),
                );
            }
        }
    }
    breaches
}

/// What documents may name.
struct Known<'a> {
    /// Files and directories.
    paths: HashSet<&'a str>,
    /// Names of functions, whatever their language.
    functions: HashSet<&'a str>,
}

impl<'a> Known<'a> {
    fn of(tree: &'a Tree) -> Self {
        let mut paths = HashSet::new();
        for (mut path, _) in tree.files() {
            while paths.insert(path)
                && let Some((parent, _)) = path.rsplit_once('/')
            {
                path = parent;
            }
        }
        let is_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
        let functions = tree
            .with_endings(&["rs", "py", "go"])
            .flat_map(|(_, text)| text.lines())
            .filter_map(|line| {
                let (_, rest) = ["fn ", "def ", "func "].iter().find_map(|word| line.split_once(word))?;
                rest.split(|letter| !is_name(letter)).next()
            });
        Self {
            functions: functions.collect(),
            paths,
        }
    }

    /// Whether a link of a document leads to a file. Addresses, and links inside of a page, always do.
    fn has_link(&self, document: &str, target: &str) -> bool {
        let target = target.split(['#', '?', ' ']).next().unwrap_or_default();
        if target.is_empty() || target.contains(':') || target.starts_with('/') {
            return true;
        }
        let mut parts: Vec<&str> = document.split('/').collect();
        parts.pop();
        for part in target.split('/') {
            match part {
                "." | "" => {}
                ".." if parts.pop().is_some() => {}
                // Above the repository.
                ".." => return false,
                name => parts.push(name),
            }
        }
        parts.is_empty() || self.paths.contains(parts.join("/").as_str())
    }

    /// Whether a word of code exists, if it is a path of the repository or the name of a test.
    fn has_word(&self, word: &str) -> bool {
        let word = word.trim_start_matches("./").trim_end_matches('/');
        if word.starts_with("test_") {
            let is_file = || self.paths.iter().any(|path| path.rsplit('/').next() == Some(word));
            return self.functions.contains(word) || is_file();
        }
        let is_pattern = word.contains(['*', '<', '$', '=', ':', '{'])
            || word
                .split(['/', '.', '_'])
                .any(|part| part.len() > 1 && part.bytes().all(|letter| letter.is_ascii_uppercase()));
        is_pattern || !TOP.iter().any(|top| word.starts_with(top)) || self.paths.contains(word)
    }
}

/// The targets of the links of a line.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let named = line.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
    inline.chain(named.map(|(_, target)| target.trim()))
}

/// What is in backticks in a line.
fn code(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// The words that `crates/{node,proxy}/src` stands for.
fn alternatives(word: &str) -> impl Iterator<Item = String> {
    let parts = word
        .split_once('{')
        .and_then(|(before, rest)| Some((before, rest.split_once('}')?)));
    let (before, inner, after) = match parts {
        Some((before, (inner, after))) => (before, inner, after),
        None => (word, "", ""),
    };
    inner.split(',').map(move |choice| format!("{before}{choice}{after}"))
}

#[cfg(test)]
mod tests {
    use super::super::tree::Tree;
    use super::{ROW_MAX, check};

    fn found(path: &str, text: &str) -> Vec<String> {
        let tree = Tree::of(&[
            (path, text),
            ("crates/node/src/lib.rs", "pub fn start() {}"),
            ("crates/node/src/pause.rs", ""),
            ("conformance/crash/test_crash.py", "def test_a_kill():"),
            ("docs/network.md", "Text."),
        ]);
        check(&tree).iter().map(|breach| breach.message.clone()).collect()
    }

    #[test]
    fn what_exists_may_be_named() {
        let text = "See [it](network.md#ports), [that](../crates/node/src/lib.rs), [a page](https://example.com/x) and [here](#it).\n\
                    `crates/node/src/{lib,pause}.rs`, `crates/node/`, `test_a_kill`, `test_crash.py`, `crash/test_crash.py`,\n\
                    `docs/NAME.md`, `crates/*/src`, `/docs/absent`, `cargo test -p node`, `src/absent.rs`, crates/absent\n\
                    [day]: network.md\n";
        assert_eq!(found("docs/page.md", text), Vec::<String>::new());
    }

    #[test]
    fn what_does_not_exist_is_found_with_its_line() {
        let text =
            "\n[it](absent.md) `crates/node/src/{lib,gone}.rs`\n`test_gone` `pytest crates/gone`\n[day]: gone.md";
        assert_eq!(
            found("docs/page.md", text),
            [
                "line 2: the link \"absent.md\" leads to no file",
                "line 2: \"crates/node/src/gone.rs\" does not exist: name what it is called now",
                "line 3: \"test_gone\" does not exist: name what it is called now",
                "line 3: \"crates/gone\" does not exist: name what it is called now",
                "line 4: the link \"gone.md\" leads to no file",
            ]
        );
        assert_eq!(found("CHANGELOG.md", text), Vec::<String>::new());
        assert_eq!(found("docs/api/page.md", text), Vec::<String>::new());
        assert_eq!(found("notes.txt", text), Vec::<String>::new());
    }

    #[test]
    fn rows_of_the_specification_are_short() {
        let row = |length: usize| format!("|{}", "≤".repeat(length - 1));
        assert_eq!(found("SPECIFICATION.md", &row(ROW_MAX)), Vec::<String>::new());
        assert_eq!(found("SPECIFICATION.md", &row(ROW_MAX + 1)).len(), 1);
        assert_eq!(found("docs/page.md", &row(ROW_MAX + 1)), Vec::<String>::new());
    }
}

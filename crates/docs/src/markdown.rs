//! What search needs to know about Markdown: sections and their plain text.

/// A part of a page: a heading and the text up to the next one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Section {
    /// The headings above it and its own, without that of the page itself.
    pub(crate) path: Vec<String>,
    /// The text without markup, as one paragraph.
    pub(crate) text: String,
}

/// The sections of a page, in order. The first is what is below the title.
pub(crate) fn sections(body: &str) -> Vec<Section> {
    let mut sections = vec![Section {
        path: Vec::new(),
        text: String::new(),
    }];
    let mut open: Vec<(usize, String)> = Vec::new();
    let mut fence: Option<&str> = None;
    for line in body.lines() {
        let trimmed = line.trim_start();
        let marks = ["```", "~~~"].into_iter().find(|marks| trimmed.starts_with(marks));
        match (fence, marks) {
            (None, Some(_)) => {
                fence = marks;
                continue;
            }
            (Some(begun), Some(_)) if marks == Some(begun) => {
                fence = None;
                continue;
            }
            _ => {}
        }
        let heading = if fence.is_none() { heading(line) } else { None };
        match heading {
            Some((level, text)) => {
                open.retain(|(above, _)| *above < level);
                if level > 1 {
                    open.push((level, plain(text)));
                }
                if level > 1 || sections.len() > 1 {
                    sections.push(Section {
                        path: open.iter().map(|(_, text)| text.clone()).collect(),
                        text: String::new(),
                    });
                }
            }
            None => {
                let text = if fence.is_some() {
                    line.trim().to_owned()
                } else {
                    plain(line)
                };
                let section = sections.last_mut().expect("there is always a first section");
                if !text.is_empty() {
                    if !section.text.is_empty() {
                        section.text.push(' ');
                    }
                    section.text.push_str(&text);
                }
            }
        }
    }
    sections
}

/// Level and text of a heading.
fn heading(line: &str) -> Option<(usize, &str)> {
    let level = line.bytes().take_while(|byte| *byte == b'#').count();
    let text = line.get(level..)?.strip_prefix(' ')?;
    (1..=6).contains(&level).then(|| (level, text.trim()))
}

/// A line without markup: no list marks, table bars, emphasis, code marks or targets of links.
fn plain(line: &str) -> String {
    let line = line.trim();
    let is_rule = !line.is_empty()
        && line
            .chars()
            .all(|char| matches!(char, '|' | '-' | ':' | ' ' | '=' | '*'));
    if is_rule {
        return String::new();
    }
    let line = ["- ", "* ", "> "]
        .into_iter()
        .find_map(|mark| line.strip_prefix(mark))
        .unwrap_or(line);
    let mut text = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(char) = rest.chars().next() {
        rest = &rest[char.len_utf8()..];
        match char {
            '`' => {}
            '*' if rest.starts_with('*') => rest = &rest[1..],
            '|' => text.push(' '),
            // The target of a link follows its text.
            ']' if rest.starts_with('(') => {
                if let Some(end) = rest.find(')') {
                    rest = &rest[end + 1..];
                }
            }
            '[' | ']' => {}
            _ => text.push(char),
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The fragment of a heading in the address of a page, as the usual renderers derive it: lower case, spaces become
/// dashes, and punctuation is left out.
#[must_use]
pub fn anchor(heading: &str) -> String {
    heading
        .chars()
        .filter_map(|char| match char {
            ' ' | '-' => Some('-'),
            '_' => Some('_'),
            char if char.is_alphanumeric() => Some(char),
            _ => None,
        })
        .flat_map(char::to_lowercase)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{anchor, plain, sections};

    #[test]
    fn a_page_is_split_at_its_headings() {
        let body = "# T\nIntro\n\n## A `b`\nx\n### C\n```\n# not a heading\n```\ny\n## D\n";
        let found: Vec<(String, String)> = sections(body)
            .into_iter()
            .map(|section| (section.path.join("/"), section.text))
            .collect();
        let expected = [("", "Intro"), ("A b", "x"), ("A b/C", "# not a heading y"), ("D", "")];
        assert_eq!(found, expected.map(|(path, text)| (path.to_owned(), text.to_owned())));
    }

    #[test]
    fn markup_is_left_out() {
        for (line, expected) in [
            ("- see [the page](network.md#dns) **now**", "see the page now"),
            ("| `a` | b |", "a b"),
            ("|---|:-:|", ""),
            ("a * b [c] ](", "a * b c ("),
        ] {
            assert_eq!(plain(line), expected);
        }
    }

    #[test]
    fn anchors() {
        assert_eq!(
            anchor("Reaching sandboxes: from `other` machines"),
            "reaching-sandboxes-from-other-machines"
        );
        assert_eq!(anchor("max_lifetime_s"), "max_lifetime_s");
    }
}

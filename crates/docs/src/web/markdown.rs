//! Markdown as HTML.
//!
//! Headings get the identifiers that links use, and links to files become addresses. Links to files that are not served,
//! such as those for developers, become plain text. Pictures are those below `docs/pictures`. Cells of tables have the name of their column, because tables that are
//! wider than the screen are shown as lists. Keys of tables that list keys have identifiers as they are spelt, and lead to
//! themselves, so that a key can be linked.

use std::collections::HashMap;

use pulldown_cmark::{CowStr, Event, HeadingLevel, LinkType, Options, Parser, Tag, TagEnd, html};

use super::address::{BASE, address};
use crate::catalogue::{Catalogue, Page};
use crate::markdown::anchor;

/// Columns of a table that does not fit beside the contents.
const WIDE: usize = 5;

/// The first column of a table of keys.
const KEYS: &str = "Key in the file";

/// A section of a page, for the list of its sections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Heading {
    pub(super) id: String,
    pub(super) text: String,
}

/// A rendered page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rendered {
    pub(super) html: String,
    /// Its headings of the second level.
    pub(super) headings: Vec<Heading>,
}

/// Renders a page.
pub(super) fn render(page: &Page, catalogue: &Catalogue) -> Rendered {
    let mut events: Vec<Event<'static>> = Vec::new();
    let mut headings = Vec::new();
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut open: Option<(usize, String)> = None;
    let mut is_dropped = false;
    let (mut names, mut is_head, mut column): (Vec<String>, bool, usize) = (Vec::new(), false, 0);
    let mut parser = Parser::new_ext(page.body, Options::ENABLE_TABLES).peekable();
    let mut is_key = false;
    while let Some(event) = parser.next() {
        match event {
            Event::Start(Tag::Heading { level, .. }) => {
                open = Some((events.len(), String::new()));
                events.push(Event::Start(heading(level, None)));
            }
            Event::End(TagEnd::Heading(level)) => {
                if let Some((begin, text)) = open.take() {
                    let id = unique(anchor(&text), &mut seen);
                    events[begin] = Event::Start(heading(level, Some(id.clone())));
                    if level == HeadingLevel::H2 {
                        headings.push(Heading { id, text });
                    }
                }
                events.push(Event::End(TagEnd::Heading(level)));
            }
            Event::Start(Tag::Table(columns)) => {
                let class = if columns.len() >= WIDE { "table wide" } else { "table" };
                events.push(Event::Html(format!("<div class=\"{class}\">").into()));
                events.push(Event::Start(Tag::Table(columns)));
                names.clear();
            }
            Event::End(TagEnd::Table) => {
                events.push(Event::End(TagEnd::Table));
                events.push(Event::Html("</div>\n".into()));
            }
            Event::Start(Tag::TableHead) => {
                is_head = true;
                events.push(Event::Start(Tag::TableHead));
            }
            Event::End(TagEnd::TableHead) => {
                is_head = false;
                events.push(Event::End(TagEnd::TableHead));
            }
            Event::Start(Tag::TableRow) => {
                column = 0;
                events.push(Event::Start(Tag::TableRow));
            }
            Event::Start(Tag::TableCell) if is_head => {
                names.push(String::new());
                events.push(Event::Start(Tag::TableCell));
            }
            Event::Start(Tag::TableCell) => {
                let name = names.get(column).map_or("", String::as_str);
                let key = match parser.peek() {
                    Some(Event::Code(key)) if column == 0 && name == KEYS => Some(escaped(key)),
                    _ => None,
                };
                is_key = key.is_some();
                let cell = match key {
                    Some(key) => format!("<td id=\"{key}\" data-name=\"{name}\"><a href=\"#{key}\">"),
                    None => format!("<td data-name=\"{name}\">"),
                };
                events.push(Event::Html(cell.into()));
                column += 1;
            }
            Event::End(TagEnd::TableCell) if !is_head => {
                let end = if std::mem::take(&mut is_key) {
                    "</a></td>"
                } else {
                    "</td>"
                };
                events.push(Event::Html(end.into()));
            }
            Event::Start(Tag::Link { dest_url, .. }) => match target(page, &dest_url, catalogue) {
                Some(address) => events.push(Event::Start(Tag::Link {
                    link_type: LinkType::Inline,
                    dest_url: address.into(),
                    title: CowStr::Borrowed(""),
                    id: CowStr::Borrowed(""),
                })),
                None => is_dropped = true,
            },
            Event::Start(Tag::Image { dest_url, .. }) => {
                let address = picture(page, &dest_url, catalogue);
                events.push(Event::Start(Tag::Image {
                    link_type: LinkType::Inline,
                    dest_url: address.unwrap_or_else(|| dest_url.to_string()).into(),
                    title: CowStr::Borrowed(""),
                    id: CowStr::Borrowed(""),
                }));
            }
            Event::End(TagEnd::Link) if std::mem::take(&mut is_dropped) => {}
            // What looks like HTML is shown as it is written.
            Event::Html(text) | Event::InlineHtml(text) => events.push(Event::Text(text.into_static())),
            event => {
                if let Event::Text(part) | Event::Code(part) = &event {
                    if let Some((_, text)) = &mut open {
                        text.push_str(part);
                    }
                    if let Some(name) = names.last_mut().filter(|_| is_head) {
                        name.push_str(&escaped(part));
                    }
                }
                events.push(event.into_static());
            }
        }
    }
    let mut text = String::with_capacity(page.body.len() * 3 / 2);
    html::push_html(&mut text, events.into_iter());
    Rendered { html: text, headings }
}

fn heading(level: HeadingLevel, id: Option<String>) -> Tag<'static> {
    Tag::Heading {
        level,
        id: id.map(CowStr::from),
        classes: Vec::new(),
        attrs: Vec::new(),
    }
}

/// A text for an attribute in quotes.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('"', "&quot;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

/// A number is added where a page has several headings of one name.
fn unique(anchor: String, seen: &mut HashMap<String, usize>) -> String {
    let count = seen.entry(anchor.clone()).or_default();
    *count += 1;
    if *count == 1 {
        anchor
    } else {
        format!("{anchor}-{}", *count - 1)
    }
}

/// The address that a link of a page leads to, or nothing if its target is not served.
pub(super) fn target(page: &Page, link: &str, catalogue: &Catalogue) -> Option<String> {
    if link.starts_with('#') || link.starts_with("https://") || link.starts_with("http://") {
        return Some(link.to_owned());
    }
    let (path, fragment) = link.split_once('#').map_or((link, None), |(path, id)| (path, Some(id)));
    let file = resolved(page.file, path)?;
    let found = catalogue.pages().iter().find(|other| other.file == file)?;
    Some(match fragment {
        Some(id) => format!("{}#{id}", address(found)),
        None => address(found),
    })
}

/// The address of a picture of a page, if there is one.
pub(super) fn picture(page: &Page, link: &str, catalogue: &Catalogue) -> Option<String> {
    let file = resolved(page.file, link)?;
    let found = catalogue.pictures().iter().find(|picture| picture.file == file)?;
    Some(format!("{BASE}{}", found.file))
}

/// The file that a relative path names, seen from another file; nothing if it is outside.
fn resolved(from: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = from.trim_start_matches('/').split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    Some(format!("/{}", parts.join("/")))
}

#[cfg(test)]
mod tests {
    use super::{render, resolved, unique};
    use crate::catalogue::{Page, catalogue};

    fn page(body: &'static str) -> Page {
        Page {
            group: "Start",
            route: "/a/b",
            file: "/a/b.md",
            title: "T",
            description: "D",
            body,
        }
    }

    #[test]
    fn links_lead_to_addresses() {
        for (body, expected) in [
            ("[x](../network.md)", "<p><a href=\"/docs/network\">x</a></p>\n"),
            ("[x](../network.md#dns)", "<p><a href=\"/docs/network#dns\">x</a></p>\n"),
            ("[x](../index.md)", "<p><a href=\"/docs\">x</a></p>\n"),
            ("[x](#here)", "<p><a href=\"#here\">x</a></p>\n"),
            (
                "[x](https://example.com/)",
                "<p><a href=\"https://example.com/\">x</a></p>\n",
            ),
            ("[`x` y](../dev/api.md) z", "<p><code>x</code> y z</p>\n"),
            ("[x](../../CHANGELOG.md) z", "<p>x z</p>\n"),
            ("[x](javascript:alert)", "<p>x</p>\n"),
        ] {
            assert_eq!(render(&page(body), catalogue()).html, expected, "{body}");
        }
    }

    #[test]
    fn markup_in_a_page_is_shown_and_not_used() {
        let html = render(&page("<b onclick=x>a</b>\n\n<script>x</script>\n"), catalogue()).html;
        assert_eq!(
            html,
            "<p>&lt;b onclick=x&gt;a&lt;/b&gt;</p>\n&lt;script&gt;x&lt;/script&gt;\n"
        );
    }

    #[test]
    fn headings_have_identifiers() {
        let rendered = render(&page("# T\n## A `b_c`: d\n## A `b_c`: d\n### E\n"), catalogue());
        let ids: Vec<_> = rendered.headings.iter().map(|heading| heading.id.as_str()).collect();
        assert_eq!(ids, ["a-b_c-d", "a-b_c-d-1"]);
        assert!(rendered.html.contains("<h3 id=\"e\">E</h3>"), "{}", rendered.html);
    }

    #[test]
    fn cells_have_the_name_of_their_column() {
        let html = render(&page("| `A` \"b\" | C |\n|---|---|\n| 1 | 2 |\n"), catalogue()).html;
        assert!(html.contains("<div class=\"table\"><table>"), "{html}");
        assert!(
            html.contains("<td data-name=\"A &quot;b&quot;\">1</td><td data-name=\"C\">2</td>"),
            "{html}"
        );
        let html = render(&page("|A|B|C|D|E|\n|-|-|-|-|-|\n|1|2|3|4|5|\n"), catalogue()).html;
        assert!(html.contains("<div class=\"table wide\">"), "{html}");
    }

    #[test]
    fn keys_have_identifiers() {
        let html = render(
            &page("| Key in the file | B |\n|---|---|\n| `a.b_c` | 2 |\n| x | `y` |\n"),
            catalogue(),
        )
        .html;
        let cell = "<td id=\"a.b_c\" data-name=\"Key in the file\"><a href=\"#a.b_c\"><code>a.b_c</code></a></td>";
        assert!(html.contains(cell), "{html}");
        assert_eq!(html.matches(" id=").count(), 1, "{html}");
    }

    #[test]
    fn names_are_numbered_from_the_second() {
        let mut seen = std::collections::HashMap::new();
        let names: Vec<_> = (0..3).map(|_| unique("x".to_owned(), &mut seen)).collect();
        assert_eq!(names, ["x", "x-1", "x-2"]);
    }

    #[test]
    fn paths_stay_inside() {
        assert_eq!(resolved("/a/b.md", "../c.md").as_deref(), Some("/c.md"));
        assert_eq!(resolved("/a/b.md", "./c.md").as_deref(), Some("/a/c.md"));
        assert_eq!(resolved("/b.md", "../c.md"), None);
    }
}

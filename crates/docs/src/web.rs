//! The documentation as web pages, and as texts for agents.
//!
//! Pages work without scripts: the contents are links, and the search is a form. The only script adds buttons that copy a
//! block, and is a part of the page, so that a policy can allow it by its digest and nothing else. All that a page needs is
//! served from the same address. Texts of pages are escaped, also what looks like HTML in them, so that a page never contains
//! markup that this module did not write.

mod address;
mod contents;
mod markdown;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

pub use self::address::{BASE, address};
use self::contents::{Group, groups};
use self::markdown::{Heading, Rendered};
use crate::catalogue::{Catalogue, Page};

const STYLE: &str = include_str!("web/style.css");
/// The script of every page that has a block to copy, exactly as it is between the tags.
pub const SCRIPT: &str = include_str!("web/copy.js");
const ICON: &str = include_str!("web/icon.svg");

/// A file that the server sends for a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asset {
    /// The media type.
    pub content_type: &'static str,
    /// The value of the header `ETag`.
    pub etag: String,
    /// Whether the address changes with the content, so that clients may keep it for ever.
    pub is_immutable: bool,
    /// The content.
    pub body: Cow<'static, [u8]>,
}

impl Asset {
    fn new(content_type: &'static str, body: String) -> Self {
        Self::of_bytes(content_type, Cow::Owned(body.into_bytes()))
    }

    fn of_bytes(content_type: &'static str, body: Cow<'static, [u8]>) -> Self {
        Self {
            content_type,
            etag: format!("\"{}\"", digest(&body)),
            is_immutable: false,
            body,
        }
    }

    /// The content as text; empty for a picture.
    #[must_use]
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap_or_default()
    }

    fn html(body: String) -> Self {
        Self::new("text/html; charset=utf-8", body)
    }
}

/// A match of a search, as the page of results shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SearchResult {
    /// The page.
    pub page: &'static Page,
    /// The headings of the section, outermost first.
    pub headings: Vec<String>,
    /// The fragment of the section.
    pub anchor: Option<String>,
    /// The words around the matches.
    pub snippet: String,
}

/// The rendered documentation.
#[derive(Debug)]
pub struct RenderedPages {
    contents: Vec<Group>,
    style: String,
    assets: HashMap<String, Asset>,
}

/// What all pages have in common.
#[derive(askama::Template)]
#[template(path = "page.html")]
struct PageTemplate<'a> {
    title: &'a str,
    description: &'a str,
    style: &'a str,
    contents: &'a [Group],
    /// The route of this page, or nothing for pages that are not in the contents.
    route: &'a str,
    query: &'a str,
    sections: &'a [Heading],
    /// The content, as HTML.
    content: &'a str,
    source: Option<String>,
    /// The script, if there is something to copy.
    script: Option<&'static str>,
    previous: Option<&'static Page>,
    next: Option<&'static Page>,
}

#[derive(askama::Template)]
#[template(path = "results.html")]
struct ResultsTemplate<'a> {
    query: &'a str,
    results: &'a [SearchResult],
    note: Option<&'a str>,
}

#[derive(askama::Template)]
#[template(path = "missing.html")]
struct MissingTemplate;

impl RenderedPages {
    /// Renders all pages.
    #[must_use]
    pub fn new(catalogue: &Catalogue) -> Self {
        let mut site = Self {
            contents: groups(catalogue.pages()),
            style: format!("{BASE}/style.css?v={}", digest(STYLE.as_bytes())),
            assets: HashMap::new(),
        };
        let pages = catalogue.pages();
        for (place, page) in pages.iter().enumerate() {
            let Rendered { html, headings } = markdown::render(page, catalogue);
            let template = PageTemplate {
                title: page.title,
                description: page.description,
                sections: &headings,
                content: &html,
                script: html.contains("<pre>").then_some(SCRIPT),
                route: page.route,
                source: Some(format!("{BASE}{}", page.file)),
                previous: place.checked_sub(1).map(|place| &pages[place]),
                next: pages.get(place + 1),
                query: "",
                style: &site.style,
                contents: &site.contents,
            };
            let shown = Asset::html(rendered(&template));
            site.assets.insert(address(page), shown);
            let source = Asset::new("text/markdown; charset=utf-8", page.body.to_owned());
            site.assets.insert(format!("{BASE}{}", page.file), source);
        }
        let mut style = Asset::new("text/css; charset=utf-8", STYLE.to_owned());
        style.is_immutable = true;
        site.assets.insert(format!("{BASE}/style.css"), style);
        let icon = Asset::new("image/svg+xml", ICON.to_owned());
        site.assets.insert(format!("{BASE}/icon.svg"), icon);
        for picture in catalogue.pictures() {
            let shown = Asset::of_bytes("image/png", Cow::Borrowed(picture.body));
            site.assets.insert(format!("{BASE}{}", picture.file), shown);
        }
        let plain = |body| Asset::new("text/plain; charset=utf-8", body);
        site.assets
            .insert("/llms.txt".to_owned(), plain(list_for_agents(pages)));
        site.assets
            .insert("/llms-full.txt".to_owned(), plain(text_for_agents(pages)));
        site
    }

    /// What is served at a path, without a query.
    #[must_use]
    pub fn asset(&self, path: &str) -> Option<&Asset> {
        self.assets.get(path)
    }

    /// All paths, in no order.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        self.assets.keys().map(String::as_str)
    }

    /// The page with the results of a search, and what is said about words that no page has.
    #[must_use]
    pub fn results(&self, query: &str, results: &[SearchResult], note: Option<&str>) -> Asset {
        let content = rendered(&ResultsTemplate { query, results, note });
        self.page_outside("Search", query, &content)
    }

    /// The page for a path where there is none.
    #[must_use]
    pub fn missing(&self) -> Asset {
        self.page_outside("Page not found", "", &rendered(&MissingTemplate))
    }

    fn page_outside(&self, title: &str, query: &str, content: &str) -> Asset {
        let template = PageTemplate {
            title,
            description: "",
            sections: &[],
            content,
            route: "",
            source: None,
            script: None,
            previous: None,
            next: None,
            query,
            style: &self.style,
            contents: &self.contents,
        };
        Asset::html(rendered(&template))
    }
}

fn rendered(template: &impl askama::Template) -> String {
    template.render().expect("writing to a String does not fail")
}

/// A short digest of a content, the same in every run.
fn digest(content: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// The pages with their descriptions, in the form that agents look for at `/llms.txt`.
fn list_for_agents(pages: &[Page]) -> String {
    let mut text = String::from(
        "# Ringfence\n\n> Isolated Linux sandboxes for untrusted code, on your own machine. This is the documentation of the \
         version that serves it.\n\nAll pages in one file: [llms-full.txt](/llms-full.txt). The API: \
         [openapi.json](/openapi.json).\n",
    );
    let mut group = "";
    for page in pages {
        if page.group != group {
            group = page.group;
            let _ = write!(text, "\n## {group}\n\n");
        }
        let _ = writeln!(text, "- [{}]({BASE}{}): {}", page.title, page.file, page.description);
    }
    text
}

/// All pages in one text.
fn text_for_agents(pages: &[Page]) -> String {
    let mut text = String::new();
    for page in pages {
        let _ = write!(text, "<!-- {BASE}{} -->\n\n{}\n", page.file, page.body);
    }
    text
}

#[cfg(test)]
mod tests;

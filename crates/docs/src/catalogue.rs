//! The embedded pages.

/// One page of `docs/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// The group of the table of contents that the page belongs to.
    pub group: &'static str,
    /// Where the page is served below the documentation's address, without extension: `/sandbox/network`. The first page
    /// is `/`.
    pub route: &'static str,
    /// Path of its file relative to `docs/`, from the root: `/sandbox/network.md`, `/index.md`.
    pub file: &'static str,
    /// Title, plain text.
    pub title: &'static str,
    /// What the page is about, in one sentence of plain text.
    pub description: &'static str,
    /// The text in Markdown, without front matter. Links to other pages are relative paths of their files.
    pub body: &'static str,
}

/// A picture that pages show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Picture {
    /// Path of its file relative to `docs/`, from the root: `/pictures/dashboard.png`.
    pub file: &'static str,
    /// The file.
    pub body: &'static [u8],
}

/// All pages, in the order of a table of contents.
#[derive(Debug)]
pub struct Catalogue {
    pages: &'static [Page],
    pictures: &'static [Picture],
}

impl Catalogue {
    #[cfg(test)]
    pub(crate) fn of(pages: &'static [Page]) -> Self {
        Self { pages, pictures: &[] }
    }

    /// The pictures of all pages.
    #[must_use]
    pub fn pictures(&self) -> &'static [Picture] {
        self.pictures
    }

    /// The pages in order: depth first, the index of a folder first.
    #[must_use]
    pub fn pages(&self) -> &'static [Page] {
        self.pages
    }

    /// The page with this route.
    #[must_use]
    pub fn page(&self, route: &str) -> Option<&'static Page> {
        self.pages.iter().find(|page| page.route == route)
    }
}

static CATALOGUE: Catalogue = Catalogue {
    pages: include!(concat!(env!("OUT_DIR"), "/pages.rs")),
    pictures: include!(concat!(env!("OUT_DIR"), "/pictures.rs")),
};

/// The documentation of this version.
#[must_use]
pub fn catalogue() -> &'static Catalogue {
    &CATALOGUE
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::catalogue;

    #[test]
    fn every_page_is_complete_and_found_by_its_route() {
        let pages = catalogue().pages();
        assert!(pages.len() > 1);
        let routes: HashSet<_> = pages.iter().map(|page| page.route).collect();
        assert_eq!(routes.len(), pages.len());
        for page in pages {
            assert_eq!(catalogue().page(page.route), Some(page));
            assert!(page.body.starts_with("# "), "{} must begin with a heading", page.file);
            assert!(page.body.ends_with('\n'));
        }
    }

    #[test]
    fn pages_for_developers_are_not_embedded() {
        for page in catalogue().pages() {
            assert!(
                !page.route.starts_with("/dev") && !page.route.starts_with("/decisions"),
                "{}",
                page.route
            );
        }
        assert!(catalogue().page("/configuration").is_some());
        assert!(catalogue().page("/nothing").is_none());
    }
}

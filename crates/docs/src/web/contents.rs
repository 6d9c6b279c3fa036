//! The table of contents: groups of pages, and of folders with the pages in them.

use crate::catalogue::Page;

/// A part of the table of contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) name: &'static str,
    pub(super) entries: Vec<Entry>,
}

/// A page of the table of contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) page: &'static Page,
    /// The pages of the folder, if this page is its index.
    pub(super) children: Vec<&'static Page>,
}

impl Entry {
    /// Whether a route is that of the page or of one below it.
    pub(super) fn contains(&self, route: &str) -> bool {
        self.page.route == route || self.children.iter().any(|page| page.route == route)
    }
}

/// The groups of pages that are in the order of a table of contents. Folders have one level, and an index.
pub(super) fn groups(pages: &'static [Page]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for page in pages {
        if groups.last().is_none_or(|group| group.name != page.group) {
            groups.push(Group {
                name: page.group,
                entries: Vec::new(),
            });
        }
        let Some(Group { entries, .. }) = groups.last_mut() else {
            continue;
        };
        let is_below = |entry: &Entry| {
            let rest = page.route.strip_prefix(entry.page.route);
            entry.page.route != "/" && rest.is_some_and(|rest| rest.starts_with('/'))
        };
        match entries.last_mut() {
            Some(entry) if is_below(entry) => entry.children.push(page),
            _ => entries.push(Entry {
                page,
                children: Vec::new(),
            }),
        }
    }
    groups
}

//! The pages as a file system: directories are what the paths of the pages contain.

use std::collections::BTreeMap;

use super::error::{CommandError, shown};
use crate::catalogue::{Catalogue, Page};
use crate::nearest::nearest;

/// What a path leads to.
#[derive(Debug)]
pub(super) enum Entry {
    File(&'static Page),
    /// Its absolute path without a final slash, except for the root.
    Directory(String),
}

/// All pages by path.
#[derive(Debug)]
pub(super) struct Files(BTreeMap<&'static str, &'static Page>);

impl Files {
    pub(super) fn of(catalogue: &Catalogue) -> Self {
        Self(catalogue.pages().iter().map(|page| (page.file, page)).collect())
    }

    /// Finds a path, relative to the root. `..` stops at the root, as in any file system.
    pub(super) fn find(&self, command: &str, path: &str) -> Result<Entry, CommandError> {
        let mut segments: Vec<&str> = Vec::new();
        for segment in path.split('/') {
            match segment {
                "" | "." => {}
                ".." => {
                    segments.pop();
                }
                name => segments.push(name),
            }
        }
        let absolute = format!("/{}", segments.join("/"));
        if let Some(page) = self.0.get(absolute.as_str()) {
            if path.ends_with('/') {
                return Err(CommandError::new(format!(
                    "{command}: {}: not a directory",
                    shown(path)
                )));
            }
            return Ok(Entry::File(page));
        }
        if absolute == "/" || self.below(&absolute).next().is_some() {
            return Ok(Entry::Directory(absolute));
        }
        // A route without its ending, or a misspelt name.
        let near = nearest(&absolute, self.0.keys().copied());
        let hint = if near.is_empty() {
            "tree lists all files".to_owned()
        } else {
            format!("did you mean {}?", near.join(" or "))
        };
        Err(CommandError::new(format!(
            "{command}: {}: no such file or directory; {hint}",
            shown(path)
        )))
    }

    /// The pages below a directory, by path: siblings in the order of their names, and a directory where its name is.
    pub(super) fn below(&self, directory: &str) -> impl Iterator<Item = &'static Page> {
        let prefix = format!("{}/", directory.trim_end_matches('/'));
        let mut pages: Vec<&'static Page> = self
            .0
            .iter()
            .filter(|(path, _)| path.starts_with(&prefix))
            .map(|(_, page)| *page)
            .collect();
        pages.sort_by(|one, other| one.file.split('/').cmp(other.file.split('/')));
        pages.into_iter()
    }

    /// The names in a directory, each with whether it is a directory.
    pub(super) fn children(&self, directory: &str) -> Vec<(&'static str, bool)> {
        let skip = if directory == "/" { 1 } else { directory.len() + 1 };
        let mut names: BTreeMap<&'static str, bool> = BTreeMap::new();
        for page in self.below(directory) {
            match page.file[skip..].split_once('/') {
                Some((name, _)) => names.insert(name, true),
                None => names.insert(&page.file[skip..], false),
            };
        }
        names.into_iter().collect()
    }
}

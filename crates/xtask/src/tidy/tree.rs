//! The files of the repository, read once.
//!
//! Found by walking, not by asking git, so that the checks also run in an unpacked release.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

/// Directories that hold what tools left behind.
const NOT_OURS: [&str; 4] = ["target", "node_modules", "__pycache__", "venv"];

/// Every text file that people write, by its path relative to the repository.
#[derive(Debug, Default)]
pub(super) struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    /// Reads all files below `root`. What is not UTF-8, such as a picture, has an empty text.
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut files = BTreeMap::new();
        let mut directories = vec![root.to_path_buf()];
        while let Some(directory) = directories.pop() {
            for path in entries(&directory)? {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let hidden = name.starts_with('.') && name != ".github" && name != ".ci";
                if hidden || NOT_OURS.contains(&name.as_ref()) || path.is_symlink() {
                    continue;
                }
                if path.is_dir() {
                    directories.push(path);
                } else if let Ok(content) = std::fs::read(&path) {
                    let text = String::from_utf8(content).unwrap_or_default();
                    let relative = path.strip_prefix(root).unwrap_or(&path);
                    files.insert(relative.to_string_lossy().into_owned(), text);
                }
            }
        }
        Ok(Self { files })
    }

    /// A tree of given files, for tests of the checks.
    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let owned = |&(path, text): &(&str, &str)| (path.to_owned(), text.to_owned());
        Self {
            files: files.iter().map(owned).collect(),
        }
    }

    /// The text of one file.
    pub(super) fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// Path and text of every file.
    pub(super) fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Path and text of every file with one of these endings.
    pub(super) fn with_endings<'a>(&'a self, endings: &'a [&str]) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files().filter(|(path, _)| {
            let (_, ending) = path.rsplit_once('.').unwrap_or_default();
            endings.contains(&ending)
        })
    }
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let context = || format!("list {}", directory.display());
    std::fs::read_dir(directory)
        .with_context(context)?
        .map(|entry| Ok(entry.with_context(context)?.path()))
        .collect()
}

//! Metadata of files on disk: extended attributes of one prefix, which any process of the sandbox may set as well.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

/// What the attributes' names begin with.
pub(crate) const PREFIX: &str = "user.e2b.";
/// The longest value that is shown, in bytes. Uploads store none that is longer.
const VALUE_LIMIT: usize = 4096;
/// What is shown of one file's metadata, in bytes. Uploads store a page at most, others as much as they like.
const LIMIT: usize = 64 * 1024;

/// The file whose attributes are read.
#[derive(Clone, Copy)]
pub(crate) enum Subject<'a> {
    Open(&'a File),
    /// The file that the path leads to.
    At(&'a Path),
}

impl Subject<'_> {
    /// Names of all attributes, each ended by a NUL.
    fn names(self) -> rustix::io::Result<Vec<u8>> {
        let length = match self {
            Self::Open(file) => rustix::fs::flistxattr_query(file),
            Self::At(path) => rustix::fs::listxattr_query(path),
        }?;
        let mut names = vec![0; length];
        if length > 0 {
            let length = match self {
                Self::Open(file) => rustix::fs::flistxattr(file, &mut names[..]),
                Self::At(path) => rustix::fs::listxattr(path, &mut names[..]),
            }?;
            names.truncate(length);
        }
        Ok(names)
    }

    fn value(self, name: &str, buffer: &mut [u8]) -> rustix::io::Result<usize> {
        match self {
            Self::Open(file) => rustix::fs::fgetxattr(file, name, buffer),
            Self::At(path) => rustix::fs::getxattr(path, name, buffer),
        }
    }

    /// Keys of the metadata. What cannot be read is left out.
    pub(crate) fn keys(self) -> Vec<String> {
        let names = self.names().unwrap_or_default();
        let names = names.split(|byte| *byte == 0);
        names
            .filter_map(|name| std::str::from_utf8(name).ok()?.strip_prefix(PREFIX))
            .map(str::to_owned)
            .collect()
    }

    /// Reads the metadata that clients attached to the file. What cannot be read or shown is left out.
    pub(crate) fn metadata(self) -> BTreeMap<String, String> {
        let mut found = BTreeMap::new();
        let keys = self.keys();
        if keys.is_empty() {
            return found;
        }
        let mut value = vec![0; VALUE_LIMIT];
        let mut total = 0;
        for key in keys {
            let Ok(length) = self.value(&format!("{PREFIX}{key}"), &mut value) else {
                continue;
            };
            let Ok(text) = std::str::from_utf8(&value[..length]) else {
                continue;
            };
            total += key.len() + text.len();
            if total > LIMIT {
                break;
            }
            found.insert(key, text.to_owned());
        }
        found
    }
}

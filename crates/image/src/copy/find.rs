//! Sources of a COPY step that patterns select.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{AtFlags, FileType, OFlags, ResolveFlags};

use super::{Copy, Source};
use crate::files;
use crate::message::show;

/// Maximum number of files that patterns may match.
const MATCHES_MAX: usize = 100_000;

impl Copy {
    /// Everything that the patterns match, each in the order of names. Each must match something. The number of entries is
    /// that of an archive.
    pub(super) fn find(&self, patterns: &[String], entries: Option<u64>) -> Result<Vec<Source>> {
        // Links of an uploaded archive that lead out of it are not followed, and nothing is above a file system.
        let resolve = match entries {
            Some(_) => ResolveFlags::BENEATH,
            None => ResolveFlags::IN_ROOT,
        };
        let mut sources = Vec::new();
        for pattern in patterns {
            ensure!(!pattern.contains('\0'), "a source contains a NUL");
            let clean = match entries {
                Some(_) => dockerfile::clean(pattern),
                None => Some(within_root(pattern)),
            };
            let clean = clean.with_context(|| format!("source {pattern:?} leads out of the uploaded files"))?;
            let before = sources.len();
            for path in self.matches(clean.as_bytes(), resolve)? {
                sources.extend(self.look(path, resolve, pattern)?);
            }
            if sources.len() == before {
                match entries {
                    Some(entries) => bail!("source {pattern:?} is not in the uploaded files, which are {entries}"),
                    None => bail!("source {pattern:?} does not exist"),
                }
            }
        }
        Ok(sources)
    }

    /// Paths that a pattern can mean. The last component may not exist.
    fn matches(&self, pattern: &[u8], resolve: ResolveFlags) -> Result<Vec<Vec<u8>>> {
        let mut paths = vec![Vec::new()];
        for part in pattern.split(|byte| *byte == b'/').filter(|part| !part.is_empty()) {
            if !dockerfile::is_pattern(part) {
                paths = paths.iter().map(|path| files::join(path, part)).collect();
                continue;
            }
            let mut found = Vec::new();
            for path in &paths {
                let Ok(directory) = files::open_dir(&self.from, path, resolve) else {
                    continue;
                };
                let mut names = files::names(&directory, usize::MAX)?;
                names.retain(|name| dockerfile::matches(part, name));
                names.sort();
                found.extend(names.iter().map(|name| files::join(path, name)));
                ensure!(
                    found.len() <= MATCHES_MAX,
                    "a pattern matches more than {MATCHES_MAX} files"
                );
            }
            paths = found;
        }
        Ok(paths)
    }

    /// The source at a path; none if there is nothing. A link stands for what it leads to.
    fn look(&self, path: Vec<u8>, resolve: ResolveFlags, pattern: &str) -> Result<Option<Source>> {
        if path.is_empty() {
            let stat = rustix::fs::fstat(&self.from)?;
            return Ok(Some(Source::new(path, stat)));
        }
        let (directory, name) = files::split(&path);
        let Ok(directory) = files::open_dir(&self.from, directory, resolve) else {
            return Ok(None);
        };
        let Some(stat) = files::stat(&directory, name)? else {
            return Ok(None);
        };
        if files::kind(&stat) != FileType::Symlink {
            return Ok(Some(Source::new(path, stat)));
        }
        match open(&self.from, &path, OFlags::PATH, resolve) {
            Ok(target) => Ok(Some(Source {
                path,
                stat: rustix::fs::statat(&target, "", AtFlags::EMPTY_PATH)?,
                is_link: true,
            })),
            Err(_) if resolve == ResolveFlags::IN_ROOT => Ok(None),
            Err(_) => bail!(
                "source {pattern:?}: /{} is a link that leads out of the uploaded files, or to what is not among them",
                show(&path)
            ),
        }
    }
}

/// A source in a file system, whose root directory is its own parent.
fn within_root(pattern: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in pattern.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Opens a file of a file system. With `IN_ROOT`, links are followed as its own programs would.
pub(super) fn open(root: &OwnedFd, path: &[u8], flags: OFlags, resolve: ResolveFlags) -> rustix::io::Result<OwnedFd> {
    // A descriptor of a path takes no flags for reading.
    let flags = if flags.contains(OFlags::PATH) {
        flags
    } else {
        flags | OFlags::NONBLOCK | OFlags::NOCTTY
    };
    files::open(root, path, flags, resolve)
}

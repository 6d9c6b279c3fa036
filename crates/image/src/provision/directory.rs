//! Directories of the image: how paths to them are followed, and those that are made.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::fs::{Mode, ResolveFlags};

use crate::files;
use crate::message::show;

pub(super) const INSIDE: ResolveFlags = ResolveFlags::IN_ROOT;
pub(super) const STRICT: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

/// Opens a directory, links followed; makes it and those above it if they are missing.
pub(super) fn make(root: &OwnedFd, path: &[u8], mode: u32) -> Result<OwnedFd> {
    let name = || format!("make directory /{}", show(path));
    match files::open_dir(root, path, INSIDE) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        other => return other.with_context(name),
    }
    let (above, last) = files::split(path);
    let parent = if above.is_empty() {
        root.try_clone()?
    } else {
        make(root, above, 0o755)?
    };
    rustix::fs::mkdirat(&parent, last, Mode::RWXU).with_context(name)?;
    let made = files::open_dir(&parent, last, STRICT).with_context(name)?;
    rustix::fs::fchmod(&made, Mode::from_raw_mode(mode)).with_context(name)?;
    Ok(made)
}

//! How many files this process may have open: each WebSocket is one.

use anyhow::{Context as _, Result};
use rustix::process::Resource;

/// Raises the limit of open files as far as this process may.
pub(super) fn raise_open_files() -> Result<()> {
    let mut files = rustix::process::getrlimit(Resource::Nofile);
    files.current = files.maximum;
    rustix::process::setrlimit(Resource::Nofile, files).context("raise the limit of open files")
}

//! Lines of progress, of which the last one is the result, and where they go to.

use std::io::{self, Write};

use anyhow::{Context, Result};
use protocol::image::Progress;

/// Where lines of progress go to.
pub type Log<'a> = &'a mut (dyn FnMut(&Progress) -> Result<()> + Send);

/// Writes a line to stdout.
pub(crate) fn say(progress: &Progress) -> Result<()> {
    let mut line = serde_json::to_vec(progress)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line)
        .and_then(|()| out.flush())
        .context("write to stdout")
}

//! Job files.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use protocol::image::JOB_BYTES_MAX;
use serde::de::DeserializeOwned;

/// Reads a job and deletes its file, which may have credentials.
pub(crate) fn read<J: DeserializeOwned>(path: &Path) -> Result<J> {
    let name = path.display();
    let file = File::open(path).with_context(|| format!("open job {name}"))?;
    let mut text = Vec::new();
    let read = file.take(JOB_BYTES_MAX + 1).read_to_end(&mut text);
    std::fs::remove_file(path).with_context(|| format!("delete job {name}"))?;
    read.with_context(|| format!("read job {name}"))?;
    ensure!(
        text.len() as u64 <= JOB_BYTES_MAX,
        "job {name}: larger than {JOB_BYTES_MAX} bytes"
    );
    // The message of a parser may quote the text, so only its position is shown.
    serde_json::from_slice(&text)
        .map_err(|error| anyhow::anyhow!("job {name}: invalid at line {} column {}", error.line(), error.column()))
}

//! Job files, and jobs without secrets as words of a command line, which no process of the sandbox can change.

use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use protocol::image::JOB_BYTES_MAX;
use serde::de::DeserializeOwned;

/// Reads a job and deletes its file, which may have credentials. A path that begins with a brace is the job itself.
pub(crate) fn read<J: DeserializeOwned>(path: &Path) -> Result<J> {
    let words = path.as_os_str().as_bytes();
    if words.starts_with(b"{") {
        return parse("of the command line", words);
    }
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
    parse(&name.to_string(), &text)
}

fn parse<J: DeserializeOwned>(name: &str, text: &[u8]) -> Result<J> {
    // The message of a parser may quote the text, so only its position is shown.
    serde_json::from_slice(text)
        .map_err(|error| anyhow::anyhow!("job {name}: invalid at line {} column {}", error.line(), error.column()))
}

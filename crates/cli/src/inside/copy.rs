//! `ringfence sandbox cp`: files and folders into and out of a sandbox.
//!
//! The agent is asked for one folder and one file after the other, so nothing is needed in the sandbox and no archive is
//! parsed. What a sandbox answers is untrusted. Its names are single names or they are refused, they are created below a
//! folder that is held open and without following links (`host_files`), and depth, number and bytes have bounds.

mod download;
mod upload;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};

use super::agent::{Agent, CallError};
use super::entered::Inside;
use super::progress::Progress;
use crate::args::CopyArgs;
use crate::data_dir::DataDir;
use crate::signals::AllSignals;
use crate::{operator, output};

/// Folders inside each other.
const DEPTH_MAX: usize = 100;
/// Files and folders of a copy.
const ENTRIES_MAX: u64 = 1_000_000;
/// Failures that are told one by one; the others are counted.
const TOLD_MAX: u64 = 20;
const MIB: u64 = 1 << 20;

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side {
    Inside { id: String, path: String },
    Host(PathBuf),
    Stream,
}

impl Side {
    fn of(text: &str) -> Self {
        if text == "-" {
            return Self::Stream;
        }
        match text.split_once(':') {
            Some((id, path)) if operator::check_id(id).is_ok() && !path.is_empty() => Self::Inside {
                id: id.to_owned(),
                path: path.to_owned(),
            },
            _ => Self::Host(PathBuf::from(text)),
        }
    }
}

/// A copy that is under way.
#[derive(Debug)]
struct Copy<'a> {
    inside: &'a Inside<'a>,
    user: Option<&'a str>,
    agent: Agent,
    progress: Progress,
    /// Bytes that may still be copied to the host.
    left: u64,
    entries: u64,
    skipped: u64,
    failed: u64,
}

impl Copy<'_> {
    /// Counts an entry.
    ///
    /// # Errors
    /// When there are too many.
    fn count(&mut self) -> Result<()> {
        self.entries += 1;
        if self.entries > ENTRIES_MAX {
            bail!("more than {ENTRIES_MAX} files and folders: copy them in parts");
        }
        Ok(())
    }

    /// Tells that an entry is not copied.
    fn skip(&mut self, path: &str, why: &str) {
        self.skipped += 1;
        if self.skipped <= TOLD_MAX {
            self.tell(&format!("skipped {path}: {why}"));
        }
    }

    /// Tells that an entry could not be copied, and goes on if the sandbox still answers.
    async fn fail(&mut self, path: &str, error: CallError) -> Result<()> {
        self.failed += 1;
        let is_lost = matches!(error, CallError::Failed(_));
        if self.failed <= TOLD_MAX {
            let error = anyhow::Error::from(error);
            self.tell(&format!("{path}: {error:#}"));
        }
        if is_lost {
            self.agent = self.inside.agent(self.user).await?;
        }
        Ok(())
    }

    fn tell(&mut self, text: &str) {
        self.progress.clear();
        output::error(&anyhow::anyhow!("{}", output::printable(text)));
    }
}

/// Copies.
///
/// # Errors
/// When the arguments make no copy, the sandbox cannot be entered, or the copy has to be given up.
pub(super) async fn run(dir: &DataDir, args: &CopyArgs) -> Result<ExitCode> {
    let (source, target) = (Side::of(&args.source), Side::of(&args.target));
    let id = match (&source, &target) {
        (Side::Inside { .. }, Side::Inside { .. }) => bail!("one side must be on this host, or -"),
        (Side::Inside { id, .. }, _) | (_, Side::Inside { id, .. }) => id.clone(),
        _ => bail!("one side must be in a sandbox: ID:PATH; see `ringfence sandbox list`"),
    };
    let mut signals = AllSignals::listen()?;
    let inside = Inside::enter(dir, &id, "cp", args.enter.resume).await?;
    let user = args.enter.user.as_deref();
    let mut copy = Copy {
        inside: &inside,
        user,
        agent: inside.agent(user).await?,
        progress: Progress::new(args.quiet),
        left: args.max_size.unwrap_or(u64::from(inside.disk_mb)).saturating_mul(MIB),
        entries: 0,
        skipped: 0,
        failed: 0,
    };
    let work = async {
        match (&source, &target) {
            (Side::Inside { path, .. }, Side::Host(target)) => copy.download(path, target).await,
            (Side::Inside { path, .. }, _) => copy.download_to_stdout(path).await,
            (Side::Host(source), Side::Inside { path, .. }) => copy.upload(source, path).await,
            (_, Side::Inside { path, .. }) => copy.upload_stdin(path).await,
            // Refused above.
            (_, Side::Host(_) | Side::Stream) => Ok(()),
        }
    };
    // What is unfinished is removed when the work is dropped.
    let outcome = tokio::select! {
        outcome = Box::pin(work) => Ok(outcome),
        signal = signals.next() => Err(signal),
    };
    copy.progress.clear();
    match outcome {
        Ok(done) => done?,
        Err(signal) => return Ok(signal.exit_code()),
    }
    for (count, what) in [(copy.skipped, "skipped"), (copy.failed, "not copied")] {
        if count > TOLD_MAX {
            copy.tell(&format!(
                "{count} files and folders were {what}, the first {TOLD_MAX} are named above"
            ));
        }
    }
    copy.progress.sum_up();
    Ok(if copy.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The last name of a path that the operator has given.
fn last_name(path: &str) -> Result<&str> {
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    match name {
        "" | "." | ".." | "~" => {
            bail!("{path:?} has no name of its own: give the target a name that does not exist yet")
        }
        name => Ok(name),
    }
}

/// A path in a sandbox.
fn joined(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

/// The name of a path of the host, as text.
fn host_name(path: &Path) -> Result<&str> {
    let name = path.file_name().and_then(|name| name.to_str());
    match name {
        Some(name) => Ok(name),
        None => bail!("{path:?} has no name that is text: give the target a name"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_told_apart() {
        let inside = |id: &str, path: &str| Side::Inside {
            id: id.to_owned(),
            path: path.to_owned(),
        };
        assert_eq!(Side::of("iabc:/tmp/a:b"), inside("iabc", "/tmp/a:b"));
        assert_eq!(Side::of("iabc:file"), inside("iabc", "file"));
        assert_eq!(Side::of("-"), Side::Stream);
        for host in ["./iabc:x", "/a:b", "file", "iabc:", ":x", "a_b:c"] {
            assert_eq!(Side::of(host), Side::Host(PathBuf::from(host)), "{host}");
        }
    }

    #[test]
    fn only_names_are_names() {
        for (path, name) in [("/a/b", "b"), ("/a/b//", "b"), ("b", "b")] {
            assert_eq!(last_name(path).unwrap(), name);
        }
        for path in ["/", "", "..", "/a/..", "."] {
            assert!(last_name(path).is_err(), "{path}");
        }
    }
}

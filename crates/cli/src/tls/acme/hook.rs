//! The operator's program that adds and removes TXT records.
//!
//! It is run as `HOOK present|cleanup RECORD VALUE`, which is also how the `exec` provider of lego calls its programs.
//! It runs as the platform's user with an environment of its own, so nothing of the platform's leaks into it, and in a
//! process group of its own, which is killed as a whole when its time is over or the platform ends.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::fs::Access;
use rustix::process::{Pid, Signal};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

/// All of its environment.
const ENVIRONMENT: [(&str, &str); 2] = [
    ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
    ("LANG", "C.UTF-8"),
];
/// How much of what it writes to stderr is kept for an error: the end of it.
const KEPT: usize = 1024;
/// How long stderr may stay open after its end, by a process that it left behind.
const LINGER: Duration = Duration::from_secs(1);

/// A program of the operator that changes DNS records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hook {
    /// Its absolute path.
    pub(crate) path: PathBuf,
    /// How long the program may run.
    pub(crate) timeout: Duration,
}

/// What to do with a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// The record is added, beside others of the same name.
    Present,
    /// The record is removed.
    Cleanup,
}

/// Kills a process group unless its first process has been waited for. Until then its number cannot be another's.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            let _ = rustix::process::kill_process_group(pid, Signal::KILL);
        }
    }
}

impl Hook {
    /// Why the program cannot be run; none if it can.
    pub(crate) fn problem(&self) -> Option<String> {
        let path = self.path.display();
        match std::fs::metadata(&self.path) {
            Err(error) => Some(format!("the DNS hook {path}: {error}")),
            Ok(file) if !file.is_file() => Some(format!("the DNS hook {path} is not a file")),
            Ok(_) => rustix::fs::access(&self.path, Access::EXEC_OK)
                .is_err()
                .then(|| format!("the DNS hook {path} is not executable")),
        }
    }

    /// Why the program is not safe to run: users other than root can change it.
    pub(crate) fn exposure(&self) -> Option<String> {
        let file = std::fs::metadata(&self.path).ok()?;
        (file.mode() & 0o022 != 0 || file.uid() != 0)
            .then(|| format!("users other than root can change the DNS hook {}", self.path.display()))
    }

    /// Runs the program for one record.
    ///
    /// # Errors
    /// When it cannot be run, fails, or takes too long; with the end of what it wrote to stderr.
    pub(super) async fn run(&self, action: Action, record: &str, value: &str) -> Result<()> {
        let word = match action {
            Action::Present => "present",
            Action::Cleanup => "cleanup",
        };
        let said = || format!("the DNS hook {} {word} {record}", self.path.display());
        let mut child = Command::new(&self.path)
            .args([word, record, value])
            .env_clear()
            .envs(ENVIRONMENT)
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(said)?;
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
        let mut group = Group(pid.and_then(Pid::from_raw));
        let stderr = child.stderr.take().with_context(said)?;
        let mut tail = Vec::new();
        let status = {
            let mut reading = std::pin::pin!(read_tail(stderr, &mut tail));
            let mut read = false;
            let ended = async {
                loop {
                    tokio::select! {
                        status = child.wait() => break status,
                        () = &mut reading, if !read => read = true,
                    }
                }
            };
            let status = tokio::time::timeout(self.timeout, ended).await;
            if status.is_ok() {
                group.0 = None;
            }
            if !read && status.is_ok() {
                let _ = tokio::time::timeout(LINGER, reading).await;
            }
            status
        };
        match status {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => bail!("{}: {status}{}", said(), quoted(&tail)),
            Ok(Err(error)) => Err(error).with_context(said),
            Err(_) => bail!("{}: did not end within {:?}{}", said(), self.timeout, quoted(&tail)),
        }
    }
}

/// Reads to the end, and keeps the end.
async fn read_tail(mut from: impl AsyncRead + Unpin, tail: &mut Vec<u8>) {
    let mut part = [0; KEPT];
    while let Ok(length @ 1..) = from.read(&mut part).await {
        tail.extend_from_slice(&part[..length]);
        let excess = tail.len().saturating_sub(KEPT);
        tail.drain(..excess);
    }
}

/// The kept output as the end of a message, in one line and without control characters.
fn quoted(tail: &[u8]) -> String {
    let text = String::from_utf8_lossy(tail);
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.chars().filter(|c| !c.is_control()).collect::<String>())
        .filter(|line| !line.trim().is_empty())
        .collect();
    if lines.is_empty() {
        String::new()
    } else {
        format!(": {}", lines.join("; "))
    }
}

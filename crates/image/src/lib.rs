//! Programs that prepare the file system of a template: `image-pull`, `image-unpack`, `image-copy` and
//! `image-provision`. Jobs and results are in [`protocol::image`].
//!
//! They run inside a sandbox, so that what they parse is confined: manifests, archives and servers are untrusted.
//! They need no program or library of the image.
//!
//! Invariant: memory does not depend on the size of an image, and nothing is written outside the directories of the job.

mod copy;
mod decompress;
mod files;
mod job;
mod layers;
mod limits;
mod manifest;
mod message;
mod progress;
mod provision;
mod pull;
mod tar;
mod tree;
mod unpack;
mod users;

use std::ffi::OsStr;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use jiff::Timestamp;
use protocol::image::Progress;

use self::limits::{STACK, raise_limits};
pub use self::progress::Log;
use self::progress::say;

/// The programs that this crate provides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// COPY and ADD.
    Copy,
    /// Users and directories of a template.
    Provision,
    /// Images of registries.
    Pull,
    /// Images in files.
    Unpack,
}

impl Program {
    /// The program with this name, which is the first argument of the binary.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "image-copy" => Some(Self::Copy),
            "image-provision" => Some(Self::Provision),
            "image-pull" => Some(Self::Pull),
            "image-unpack" => Some(Self::Unpack),
            _ => None,
        }
    }
}

/// Runs a program with the path of its job, at a time with which requests to clouds are signed. The exit code is 0, or 1 with one line on stderr.
#[must_use]
pub fn run(program: Program, job: Option<&OsStr>, now: Timestamp) -> ExitCode {
    let done = job
        .context("missing argument: path of the job file")
        .and_then(|path| execute(program, Path::new(path), now, &mut say));
    match done.and_then(|result| say(&result)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // If stderr is closed, there is nowhere to report it.
            let text = format!("{error:#}").replace(['\n', '\r'], " ");
            let _ = writeln!(io::stderr().lock(), "{text}");
            ExitCode::FAILURE
        }
    }
}

/// Reads a job, deletes its file and runs the job. Lines of progress go to `log`; the result is the last one.
///
/// # Errors
/// When the job is invalid or cannot be done. The message is for the user of the build.
pub fn execute(program: Program, path: &Path, now: Timestamp, log: Log<'_>) -> Result<Progress> {
    raise_limits();
    let work = move || match program {
        Program::Copy => Ok(Progress::Copied(copy::run(&job::read(path)?)?)),
        Program::Provision => Ok(Progress::Provisioned(provision::run(&job::read(path)?)?)),
        Program::Pull => pull::run(&job::read(path)?, now, log),
        Program::Unpack => Ok(Progress::Unpacked(unpack::run(&job::read(path)?)?)),
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, work)
            .context("start a thread")?;
        match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

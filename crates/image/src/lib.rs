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
mod manifest;
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
use rustix::process::{Resource, Rlimit};

/// Directories are visited recursively, and a path has up to 2048 levels. Only pages that are used take memory.
const STACK: usize = 64 << 20;

/// The programs.
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

/// Where lines of progress go to.
pub type Log<'a> = &'a mut (dyn FnMut(&Progress) -> Result<()> + Send);

/// Reads a job, deletes its file and does it. Lines of progress go to `log`; the result is the last one.
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

/// Writes a line to stdout.
fn say(progress: &Progress) -> Result<()> {
    let mut line = serde_json::to_vec(progress)?;
    line.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&line)
        .and_then(|()| out.flush())
        .context("write to stdout")
}

/// Deep directories need a descriptor per level while they are removed.
fn raise_limits() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // The lower limit is enough for nearly all images.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
}

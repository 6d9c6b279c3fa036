//! What CRIU knows about the kernel, found out once.
//!
//! CRIU probes the kernel when it starts, which takes longer than most of what it does for a small sandbox, and caches the
//! result in `/run` where that is a tmpfs. So the platform has it write that cache once, when it starts: as root, without
//! any sandbox, in a root as every run has it ([`jail`]), where it finds out the same. Every run for a sandbox has a copy of
//! the cache; the copy ends with the run, so nothing that a sandbox causes can reach the next one. CRIU refuses a cache of
//! another version and probes then. After a reboot, the start of the platform writes a new one.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use super::jail::Jail;
use super::program::Program;
use super::vetted::PATH;
use crate::wire::{self, Reply, Request};

/// Name of the cache in the data directory.
pub(crate) const FILE: &str = "criu.kdat";
/// Where CRIU has its cache.
const PLACE: &str = "/run/criu.kdat";
/// How long a run may take. It takes a twentieth of a second.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two looks whether it has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// Has CRIU probe the kernel, and writes its cache to a file.
///
/// # Errors
/// Those of the socket. Others are replies.
pub(crate) fn serve(socket: &OwnedFd) -> io::Result<()> {
    super::sys::notice_children();
    wire::send_message(socket, &Reply::Ready, &[])?;
    let Some((Request::FindFacts { program, file }, _)) = wire::receive_message::<Request>(socket)? else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let reply = match find(&program, &file) {
        Ok(()) => Reply::Done,
        Err(error) => Reply::Failed(error.to_string()),
    };
    wire::send_message(socket, &reply, &[])
}

fn find(program: &Program, file: &Path) -> io::Result<()> {
    let directory = file.parent().ok_or(io::ErrorKind::InvalidInput)?;
    // The process leaves the mounts in which the path leads there.
    let directory = crate::files::open_dir(directory)?;
    let content = run(program)?;
    let (unfinished, name) = (format!("{FILE}.new"), file.file_name().unwrap_or_default());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
    let new = rustix::fs::openat(&directory, &unfinished, flags, Mode::from_raw_mode(0o600))?;
    File::from(new).write_all(&content)?;
    Ok(rustix::fs::renameat(&directory, &unfinished, &directory, name)?)
}

/// Runs CRIU without a sandbox, and returns its cache. Its verdict does not matter: it may miss a feature that no sandbox
/// needs.
fn run(program: &Program) -> io::Result<Vec<u8>> {
    Jail::new(&program.files, 0)?.enter()?;
    #[expect(clippy::disallowed_methods, reason = "the host's own program, without a sandbox")]
    let mut process = Command::new(&program.path)
        .arg("check")
        // Its children that stop themselves end with it.
        .process_group(0)
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let deadline = Instant::now() + TIMEOUT;
    while process.try_wait()?.is_none() {
        if Instant::now() >= deadline {
            process.kill()?;
            process.wait()?;
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(PAUSE);
    }
    fs::read(PLACE)
}

/// Whether the cache was written by this program, so that it is not refused: it is newer.
pub(crate) fn are_of(file: &Path, program: &Path) -> bool {
    let changed = |path| fs::metadata(path).map(|metadata| (metadata.ctime(), metadata.ctime_nsec()));
    matches!((changed(file), changed(program)), (Ok(file), Ok(program)) if file > program)
}

/// Puts the cache where CRIU looks for it, if it exists.
///
/// # Errors
/// When it cannot be read, and those of the kernel.
pub(crate) fn give(file: &Path, jail: &Jail) -> io::Result<()> {
    match fs::read(file) {
        Ok(content) => jail.write(PLACE, &content),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

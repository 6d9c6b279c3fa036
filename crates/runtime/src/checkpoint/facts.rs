//! What CRIU knows about the kernel, found out once.
//!
//! CRIU probes the kernel when it starts, which takes longer than most of what it does for a small sandbox, and caches the
//! result in `/run` where that is a tmpfs. So the platform has it write that cache once, when it starts: as root, without
//! any sandbox, and with a `/run` of its own. Every run for a sandbox also has a `/run` of its own, with a copy of the
//! cache; the copy ends with the run, so nothing that a sandbox causes can reach the next one. CRIU refuses a cache of another
//! version and probes then. After a reboot, the start of the platform writes a new one.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, MountPropagationFlags};

use crate::sys;
use crate::wire::{self, Reply, Request};

/// Name of the cache in the data directory.
pub(crate) const FILE: &str = "criu.kdat";
/// Where CRIU has its cache, and the name there.
pub(crate) const PLACE: &str = "/run";
const NAME: &str = "criu.kdat";
/// Where programs are that CRIU starts.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
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

fn find(program: &Path, file: &Path) -> io::Result<()> {
    let content = match is_possible([program]) {
        true => run(program)?,
        false => return Err(io::Error::other("CRIU is installed below /run, which its runs replace")),
    };
    let unfinished = file.with_extension("new");
    fs::write(&unfinished, content)?;
    fs::set_permissions(&unfinished, Permissions::from_mode(0o600))?;
    fs::rename(&unfinished, file)
}

/// Runs CRIU without a sandbox, and returns its cache. Its verdict does not matter: it may miss a feature that no sandbox
/// needs.
fn run(program: &Path) -> io::Result<Vec<u8>> {
    enter()?;
    #[expect(clippy::disallowed_methods, reason = "the host's own program, without a sandbox")]
    let mut process = Command::new(program)
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
    fs::read(Path::new(PLACE).join(NAME))
}

/// Whether CRIU can run with a `/run` of its own: none of the paths that it uses is there.
pub(crate) fn is_possible<'a>(used: impl IntoIterator<Item = &'a Path>) -> bool {
    used.into_iter().all(|path| !path.starts_with(PLACE))
}

/// Whether the cache was written by this program, so that it is not refused: it is newer.
pub(crate) fn are_of(file: &Path, program: &Path) -> bool {
    let changed = |path| fs::metadata(path).map(|metadata| (metadata.ctime(), metadata.ctime_nsec()));
    matches!((changed(file), changed(program)), (Ok(file), Ok(program)) if file > program)
}

/// Gives this process mounts of its own, with an empty `/run`.
fn enter() -> io::Result<()> {
    sys::unshare(libc::CLONE_NEWNS)?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(rustix::mount::mount("tmpfs", PLACE, "tmpfs", flags, Some(c"mode=755"))?)
}

/// Gives this process mounts of its own, with nothing in `/run` but a copy of this cache, if it exists.
pub(crate) fn enter_with(file: &Path) -> io::Result<()> {
    enter()?;
    copy(file, Path::new(PLACE))
}

/// Copies the cache, if it exists, to where CRIU looks for it.
pub(crate) fn copy(file: &Path, place: &Path) -> io::Result<()> {
    match fs::read(file) {
        Ok(content) => fs::write(place.join(NAME), content),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

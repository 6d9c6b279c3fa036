//! Copies of agent programs in memory, from which sandboxes execute their agents.
//!
//! A copy consists of huge pages where the kernel has them. The linker gives the parts of the program addresses that fit
//! (`crates/cli/build.rs`), so they are mapped as huge pages as well: a start of an agent then takes a few page faults instead of
//! hundreds, its end has as little to unmap, and an idle one has fewer page tables.
//!
//! A launcher for sandboxes executes its own copy itself ([`execute`]), for the processes that it clones: each of them would
//! otherwise map the pages of the program one by one. The file system of the copy becomes the root of the launcher.
//!
//! A copy is executable but not readable: the kernel then treats the memory of an agent as the host's, whatever its user id,
//! and keeps root inside from tracing it and from writing to its files in `/proc`.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;

use rustix::fs::{Mode, OFlags};

use crate::sys::{self, attr};
use crate::wire::COPIED;
use crate::{mounting, place};

/// Argument of a launcher that is executed from a copy.
const IN_MEMORY: &str = "in-memory";
/// Descriptor of the file system with the copy that a launcher is executed from.
const MEMORY_FD: i32 = 3;

/// The file system with the copy that this launcher is executed from; none if it is executed from another file. One that is
/// to be executed from a copy and is not yet executes it, and does not return unless that fails: then it works without.
pub(super) fn in_memory() -> Option<OwnedFd> {
    match std::env::args().nth(2).as_deref() {
        Some(IN_MEMORY) => sys::adopt(MEMORY_FD).ok(),
        Some(COPIED) => {
            let _ = execute();
            None
        }
        _ => None,
    }
}

/// Executes a copy of this program.
fn execute() -> io::Result<std::convert::Infallible> {
    let memory = memory()?;
    copy(File::open("/proc/self/exe")?, memory.as_fd(), file_name())?;
    let memory = sys::raise_fd(memory.as_raw_fd(), MEMORY_FD + 1)?;
    sys::place_fd(memory, MEMORY_FD)?;
    let path = std::ffi::CString::new(format!("/proc/self/fd/{MEMORY_FD}/{}", file_name()))?;
    let in_memory = std::ffi::CString::new(IN_MEMORY)?;
    Err(sys::exec(&path, &[c"/proc/self/exe", c"launcher", &in_memory]))
}

/// Name of a copy on its file system. It is in the mount table of sandboxes.
pub(super) fn file_name() -> &'static str {
    place::AGENT.trim_start_matches('/')
}

/// Creates a file system in memory, which is not attached yet. Its files consist of huge pages as far as they are large enough.
///
/// # Errors
/// Those of the kernel.
pub(super) fn memory() -> io::Result<OwnedFd> {
    const PLAIN: [(&str, &str); 2] = [("source", "tmpfs"), ("mode", "755")];
    let [source, mode] = PLAIN;
    let huge = mounting::create("tmpfs", &[source, mode, ("huge", "within_size")], attr::NOSUID);
    // Kernels without huge pages do not know the option.
    huge.or_else(|_| mounting::create("tmpfs", &PLAIN, attr::NOSUID))
}

/// Copies a program to such a file system.
///
/// # Errors
/// When it cannot be read, and when there is no memory.
pub(super) fn copy(mut program: File, memory: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::CLOEXEC;
    let mut copy = File::from(rustix::fs::openat(memory, name, flags, Mode::from_raw_mode(0o600))?);
    // Before the content: the kernel takes a huge page only where the file is as long.
    copy.set_len(program.metadata()?.len())?;
    io::copy(&mut program, &mut copy)?;
    make_unreadable(&copy)
}

/// Lets a copy be executed, and read by nobody but the host's root.
///
/// # Errors
/// Those of the kernel.
pub(super) fn make_unreadable(copy: &File) -> io::Result<()> {
    copy.set_permissions(Permissions::from_mode(0o711))?;
    std::os::unix::fs::fchown(copy, None, Some(0))
}

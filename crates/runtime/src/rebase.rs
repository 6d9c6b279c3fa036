//! The process that prepares a kept disk for another version of the layers below it.
//!
//! Overlayfs notes in each directory that it copied up which directory of a layer that was, and shows the two as one only
//! as long as that is so. When `base` was made anew, because the host's packages have changed or the host was restarted,
//! the directories are others: a sandbox would find only what it had written itself. So the notes are removed, and with
//! them the index of all of them; overlayfs makes both anew, by name, from what it finds.
//!
//! It is a process of its own for the same reasons as that of a commit: it holds a mount that nothing else may see, takes
//! as long as a sandbox has files, and is killed at its deadline. The names in the tree are hostile, but it no longer
//! changes. Interrupted at any point, it can be repeated.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use model::id::DiskId;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountPropagationFlags;

use crate::commit::OPEN_FILES;
use crate::disk::{self, Loops};
use crate::files::{if_there, open_dir, open_dir_at};
use crate::sys;
use crate::wire::{self, Reply, Request};

/// What overlayfs notes about what lies below a file. Attributes that say what is hidden or deleted stay.
const NOTES: [&CStr; 3] = [
    c"trusted.overlay.origin",
    c"trusted.overlay.nlink",
    c"trusted.overlay.upper",
];
/// Files after which the process looks whether the platform still runs.
const CHECK_AFTER: u32 = 4096;

/// Serves one request.
pub(crate) fn serve(socket: &OwnedFd, data_dir: &Path) -> io::Result<()> {
    sys::unshare(libc::CLONE_NEWNS)?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    sys::limit(libc::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)?;
    let data = open_dir(data_dir)?;
    wire::send_message(socket, &Reply::Ready, &[])?;
    let request = wire::receive_message::<Request>(socket)?.map(|(request, _)| request);
    let Some(Request::Rebase { disk }) = request else {
        return Ok(());
    };
    let reply = match rebase(data.as_fd(), &disk, socket.as_fd()) {
        Ok(()) => Reply::Done,
        Err(error) => Reply::Failed(error.to_string()),
    };
    wire::send_message(socket, &reply, &[])
}

fn rebase(data: BorrowedFd<'_>, disk: &DiskId, platform: BorrowedFd<'_>) -> io::Result<()> {
    let image = disk::open(data, disk)?;
    let mount = Loops::open(Path::new("/dev"))?.mount(image.as_fd(), false)?;
    // A mount that is not attached cannot be read through its own descriptor.
    let mount = open_dir_at(mount.as_fd(), ".")?;
    drop(image);
    let mut walk = Walk { platform, files: 0 };
    for (name, is_dir) in entries(&mount)? {
        if !is_dir || name.as_bytes() == b"lost+found" {
            continue;
        }
        let upper = open_below(mount.as_fd(), &name)?;
        walk.strip(open_dir_at(upper.as_fd(), "upper")?)?;
        // The kernel makes the other directory in `work` anew at every mount.
        if let Some(index) = if_there(open_dir_at(upper.as_fd(), "work/index"))? {
            walk.empty(&index)?;
        }
    }
    Ok(rustix::fs::syncfs(&mount)?)
}

struct Walk<'a> {
    /// The socket of the request. Its other end closes with the platform.
    platform: BorrowedFd<'a>,
    files: u32,
}

impl Walk<'_> {
    fn count(&mut self) -> io::Result<()> {
        self.files += 1;
        if self.files.is_multiple_of(CHECK_AFTER) {
            let mut platform = [PollFd::from_borrowed_fd(self.platform, PollFlags::empty())];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if !matches!(rustix::event::poll(&mut platform, Some(&now)), Ok(0)) {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the platform ended"));
            }
        }
        Ok(())
    }

    /// Removes the notes of a tree. Directories are opened one in the other, so no link is followed, and files are named
    /// in the current directory, because there is no other way to their attributes without opening them.
    fn strip(&mut self, top: OwnedFd) -> io::Result<()> {
        rustix::process::fchdir(&top)?;
        remove_notes(c".")?;
        let mut open = vec![(entries(&top)?, top)];
        while let Some((left, dir)) = open.last_mut() {
            let Some((name, is_dir)) = left.pop() else {
                open.pop();
                if let Some((_, above)) = open.last() {
                    rustix::process::fchdir(above)?;
                }
                continue;
            };
            self.count()?;
            remove_notes(&name)?;
            if is_dir {
                let below = open_below(dir.as_fd(), &name)?;
                rustix::process::fchdir(&below)?;
                open.push((entries(&below)?, below));
            }
        }
        Ok(())
    }

    /// Removes what is in an index: links to files, and empty directories.
    fn empty(&mut self, index: &OwnedFd) -> io::Result<()> {
        for (name, is_dir) in entries(index)? {
            self.count()?;
            let flags = if is_dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            rustix::fs::unlinkat(index, &name, flags)?;
        }
        Ok(())
    }
}

fn open_below(dir: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(dir, name, flags, Mode::empty())?)
}

/// The names in a directory, and which of them are directories.
fn entries(dir: &OwnedFd) -> io::Result<Vec<(CString, bool)>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push((entry.file_name().to_owned(), entry.file_type() == FileType::Directory));
        }
    }
    Ok(names)
}

fn remove_notes(name: &CStr) -> io::Result<()> {
    for note in NOTES {
        match rustix::fs::lremovexattr(name, note) {
            Err(Errno::NODATA) => {}
            removed => removed?,
        }
    }
    Ok(())
}

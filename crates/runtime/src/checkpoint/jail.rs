//! The root file system that CRIU runs in, instead of the host's.
//!
//! CRIU follows paths that a sandbox has chosen, in processes that have rights on the host: it makes files again that have
//! no name any more, links them, and removes what it has made ([`super::ghosts`]). Links in such a path are resolved from
//! the root of the process that follows them, and not from the root of the sandbox. So there is nothing of the host below
//! this root but what CRIU is made of, read-only:
//!
//! ```text
//!   /usr/sbin/criu, /lib/..., /usr/bin/tar ...   the program, what it loads, and the programs that it starts
//!   /proc                                        processes of the host; their files and roots cannot be entered (`criu`)
//!   /dev/null, /dev/pts                          of this root's own
//!   /run, /tmp                                   empty, but for what CRIU knows about the kernel
//!   /ringfence/image                             the checkpoint, which only a dump may write
//!   /ringfence/work                              empty
//!   /ringfence/freezer                           at a dump, the control group of the sandbox
//!   /ringfence/root, mounts, figures             at a restore, the file systems of the sandbox
//! ```
//!
//! What is not the host's has names that no program of the host has: CRIU may be installed anywhere.
//!
//! All of it is in a file system in memory that ends with the last process in it. `docs/decisions/confined-criu.md` lists
//! the paths that CRIU uses.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, OpenTreeFlags};

use crate::mounting;
use crate::sys::{self, attr};

/// Where the checkpoint is.
pub(crate) const CHECKPOINT: &str = "/ringfence/image";
/// Where CRIU has its cache of facts about the kernel.
pub(crate) const RUN: &str = "/run";
/// Directory in which CRIU starts. It leaves statistics there.
pub(crate) const WORK: &str = "/ringfence/work";
/// Where the control group of the sandbox is.
pub(crate) const FREEZER: &str = "/ringfence/freezer";
/// Where the mount of the sandbox's root is.
pub(crate) const ROOT: &str = "/ringfence/root";
/// Where the sources of its other mounts are.
pub(crate) const MOUNTS: &str = "/ringfence/mounts";
/// Where its `/proc` files are.
pub(crate) const FIGURES: &str = "/ringfence/figures";

/// Where the file system is attached until it becomes the root: at a directory that every host has. What is there is needed
/// only through descriptors meanwhile.
const UNFINISHED: &str = "/proc";
/// Size of the file system. What CRIU knows about the kernel takes 8 KiB.
const SIZE: &str = "4m";
/// Attributes of what comes from the host.
const OF_HOST: u64 = attr::RDONLY | attr::NOSUID | attr::NODEV;

/// A root that is being made. The process that makes it has mounts of its own.
#[derive(Debug)]
pub(crate) struct Jail {
    top: OwnedFd,
}

impl Jail {
    /// Gives the calling process mounts of its own, and makes a root with these files of the host in it. CRIU, as user
    /// `owner`, may write to the directories that it needs for itself.
    ///
    /// # Errors
    /// When one of the files does not exist, and those of the kernel.
    pub(crate) fn new(files: &[PathBuf], owner: u32) -> io::Result<Self> {
        sys::unshare(libc::CLONE_NEWNS)?;
        rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        let options = [("mode", "755"), ("size", SIZE)];
        let mount = mounting::create("tmpfs", &options, attr::NOSUID | attr::NOEXEC)?;
        mounting::attach(mount.as_fd(), CWD, UNFINISHED)?;
        let jail = Self { top: mount };
        for (directory, mode) in [(RUN, 0o755), (WORK, 0o755), ("/tmp", 0o1777)] {
            jail.make_directory(directory, mode)?;
            jail.give(directory, owner)?;
        }
        // Where the sysfs of a network is attached for a moment.
        jail.make_directory("/sys", 0o555)?;
        jail.make_null()?;
        // CRIU compares the terminals of a sandbox with those that it has here, to tell them from the host's.
        jail.attach(
            mounting::create("devpts", &[], attr::NOSUID | attr::NOEXEC)?.as_fd(),
            "/dev/pts",
        )?;
        let harmless = attr::NOSUID | attr::NODEV | attr::NOEXEC;
        jail.attach(mounting::create("proc", &[], harmless)?.as_fd(), "/proc")?;
        for file in files {
            jail.show(file, &plain(file)?, OF_HOST)?;
        }
        Ok(jail)
    }

    /// Attaches a mount at `path`.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn attach(&self, mount: BorrowedFd<'_>, path: &str) -> io::Result<()> {
        let kind = FileType::from_raw_mode(rustix::fs::fstat(mount)?.st_mode);
        if kind.is_dir() {
            return self.attach_directory(mount, path);
        }
        self.write(path, &[])?;
        mounting::attach(mount, self.top.as_fd(), inside(path))
    }

    /// Attaches a mount that is known to be a directory. Nothing is asked of its file system, which this process may have to
    /// answer itself.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn attach_directory(&self, mount: BorrowedFd<'_>, path: &str) -> io::Result<()> {
        self.make_directory(path, 0o755)?;
        mounting::attach(mount, self.top.as_fd(), inside(path))
    }

    /// Shows what is at `source` on the host at `path`, with these attributes of a mount.
    ///
    /// # Errors
    /// When there is no such file, and those of the kernel.
    pub(crate) fn show(&self, source: &Path, path: &str, attributes: u64) -> io::Result<()> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        let tree = rustix::mount::open_tree(CWD, source, flags)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", source.display())))?;
        mounting::protect(tree.as_fd(), attributes)?;
        self.attach(tree.as_fd(), path)
    }

    /// Writes a file that everybody may read.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn write(&self, path: &str, content: &[u8]) -> io::Result<()> {
        if let Some((above, _)) = path.rsplit_once('/') {
            self.make_directory(above, 0o755)?;
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.top, inside(path), flags, Mode::from_raw_mode(0o644))?;
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o644))?;
        io::Write::write_all(&mut std::fs::File::from(file), content)
    }

    /// Attaches one file over another one that is there already.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn cover(&self, path: &str, by: &str) -> io::Result<()> {
        let tree = mounting::clone(self.top.as_fd(), inside(by))?;
        mounting::protect(tree.as_fd(), OF_HOST)?;
        mounting::attach(tree.as_fd(), self.top.as_fd(), inside(path))
    }

    /// Makes it the root of the calling process, which leaves the host's.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(crate) fn enter(self) -> io::Result<()> {
        rustix::process::fchdir(&self.top)?;
        sys::pivot_to_current_directory()
    }

    /// Makes a directory, and those above it, which everybody may read. One that exists stays as it is.
    fn make_directory(&self, path: &str, mode: u32) -> io::Result<()> {
        let mut made = PathBuf::new();
        let parts: Vec<_> = Path::new(inside(path)).components().collect();
        for (index, part) in parts.iter().enumerate() {
            made.push(part);
            let mode = Mode::from_raw_mode(if index + 1 == parts.len() { mode } else { 0o755 });
            match rustix::fs::mkdirat(&self.top, &made, mode) {
                Ok(()) => rustix::fs::chmodat(&self.top, &made, mode, AtFlags::empty())?,
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn give(&self, path: &str, owner: u32) -> io::Result<()> {
        let (user, group) = (Uid::from_raw(owner), Gid::from_raw(owner));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        Ok(rustix::fs::chownat(
            &self.top,
            inside(path),
            Some(user),
            Some(group),
            flags,
        )?)
    }

    fn make_null(&self) -> io::Result<()> {
        self.make_directory("/dev", 0o755)?;
        let (mode, device) = (Mode::from_raw_mode(0o666), rustix::fs::makedev(1, 3));
        rustix::fs::mknodat(&self.top, "dev/null", FileType::CharacterDevice, mode, device)?;
        Ok(rustix::fs::chmodat(&self.top, "dev/null", mode, AtFlags::empty())?)
    }
}

/// A path from the top of the root on.
fn inside(path: &str) -> &str {
    path.trim_start_matches('/')
}

/// An absolute path without `.` and `..`. A loader names libraries in other ways as well.
fn plain(path: &Path) -> io::Result<String> {
    let mut plain = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => plain.push(name),
            Component::ParentDir => {
                plain.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    let text = plain.into_os_string().into_string();
    text.map_err(|path| io::Error::new(io::ErrorKind::InvalidInput, format!("{} is not UTF-8", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_a_loader_are_made_plain() {
        for (path, want) in [
            ("/lib/x86_64-linux-gnu/libc.so.6", "/lib/x86_64-linux-gnu/libc.so.6"),
            ("/opt/criu/bin/../lib//./libnl.so", "/opt/criu/lib/libnl.so"),
            ("/../../etc", "/etc"),
        ] {
            assert_eq!(plain(Path::new(path)).unwrap(), want);
        }
    }
}

//! Whether the mounts of a file system can have mapped ids, as the layers of sandboxes have.
//!
//! The kernel has a list of file systems for this, which grew over the years, and nothing shows it: ext4, XFS and btrfs are on it, tmpfs
//! is since Linux 6.3, overlayfs and most network file systems are not. So it is tried, on a mount that is attached nowhere.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Signal, WaitId, WaitIdOptions};

use crate::slot::FIRST_ID;
use crate::sys::{self, Cloned, attr};
use crate::{files, mounting};

/// Whether the directory at `path` can be a layer of a sandbox where it is.
///
/// # Errors
/// When that cannot be tried: the directory is missing, or this process may neither make user namespaces nor mounts.
pub(crate) fn can_map_ids(path: &Path) -> io::Result<bool> {
    let user = user_namespace()?;
    let mount = mounting::clone(files::open_dir(path)?.as_fd(), "")?;
    match sys::mount_setattr(mount.as_fd(), false, attr::IDMAP | attr::RDONLY, Some(user.as_fd())) {
        Ok(()) => Ok(true),
        // EINVAL is a file system that cannot; EPERM is a mount that has mapped ids already, which cannot be mapped again.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EPERM)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A user namespace with one id of sandboxes. The kernel accepts none without ids for a mount.
fn user_namespace() -> io::Result<OwnedFd> {
    let (wait, hold) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    match sys::clone3(libc::CLONE_NEWUSER, None)? {
        Cloned::Child => {
            // A child of a process with threads: system calls alone. It ends with its parent, if not before.
            drop(hold);
            let _ = rustix::io::read(&wait, &mut [0_u8; 1]);
            sys::exit_now(0)
        }
        Cloned::Parent { pid, pidfd } => {
            let made = map_and_open(pid);
            let _ = rustix::process::pidfd_send_signal(&pidfd, Signal::KILL);
            match rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED) {
                // Reaped by the kernel, where this process ignores its children.
                Ok(_) | Err(Errno::CHILD) => {}
                Err(error) => return Err(error.into()),
            }
            made
        }
    }
}

fn map_and_open(pid: i32) -> io::Result<OwnedFd> {
    let map = format!("0 {FIRST_ID} 1\n");
    for file in ["uid_map", "gid_map"] {
        files::write_at(CWD, &format!("/proc/{pid}/{file}"), &map)?;
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(format!("/proc/{pid}/ns/user"), flags, Mode::empty())?)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;

    use rustix::mount::MountPropagationFlags;

    use super::*;

    /// Runs `test` on a thread with mounts of its own, with an overlay above `lower` mounted there. What is written lies in `beside`.
    pub(crate) fn with_overlay(lower: &Path, beside: &Path, test: impl FnOnce() + Send) {
        let run = || {
            sys::unshare(libc::CLONE_NEWNS).unwrap();
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            for name in ["upper", "work"] {
                fs::create_dir(beside.join(name)).unwrap();
            }
            let path = |path: &Path| path.to_str().unwrap().to_owned();
            let options = [
                ("lowerdir", path(lower)),
                ("upperdir", path(&beside.join("upper"))),
                ("workdir", path(&beside.join("work"))),
            ];
            let options: Vec<(&str, &str)> = options.iter().map(|(key, value)| (*key, value.as_str())).collect();
            let overlay = mounting::create("overlay", &options, 0).unwrap();
            mounting::attach(overlay.as_fd(), CWD, lower.to_str().unwrap()).unwrap();
            test();
        };
        std::thread::scope(|scope| {
            if let Err(panic) = scope.spawn(run).join() {
                std::panic::resume_unwind(panic);
            }
        });
    }

    #[test]
    fn an_overlay_cannot_have_mapped_ids_and_what_it_is_made_of_can() {
        let (lower, beside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert!(can_map_ids(lower.path()).unwrap());
        with_overlay(lower.path(), beside.path(), || {
            assert!(!can_map_ids(lower.path()).unwrap());
            assert!(can_map_ids(beside.path()).unwrap());
        });
        assert!(can_map_ids(lower.path()).unwrap());
    }

    #[test]
    fn a_mount_with_mapped_ids_cannot_have_other_ones() {
        let dir = tempfile::tempdir().unwrap();
        let user = user_namespace().unwrap();
        let test = || {
            sys::unshare(libc::CLONE_NEWNS).unwrap();
            let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            let mount = mounting::clone(files::open_dir(dir.path()).unwrap().as_fd(), "").unwrap();
            sys::mount_setattr(mount.as_fd(), false, attr::IDMAP, Some(user.as_fd())).unwrap();
            mounting::attach(mount.as_fd(), CWD, dir.path().to_str().unwrap()).unwrap();
            assert!(!can_map_ids(dir.path()).unwrap());
        };
        std::thread::scope(|scope| scope.spawn(test).join()).unwrap();
    }

    #[test]
    fn what_cannot_be_tried_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let error = can_map_ids(&dir.path().join("missing")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

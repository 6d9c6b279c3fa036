//! Finds the processes that hold the lock of a file by their descriptors, and kills them through pidfds.
//!
//! A pid stored in a file may belong to an unrelated process by now. An open descriptor cannot: only processes that
//! were given the locked descriptor have it, and they are checked and signalled through a pidfd that was taken before.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{Pid, PidfdFlags, Signal};

/// Kills every other process that holds the lock of this open file. Returns their pids.
///
/// # Errors
/// When the file or `/proc` cannot be read.
pub(crate) fn kill(file: &OwnedFd) -> io::Result<Vec<i32>> {
    let file = rustix::fs::fstat(file)?;
    let itself = std::process::id();
    let mut killed = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        if u32::try_from(pid).is_ok_and(|pid| pid == itself) {
            continue;
        }
        let pidfd = Pid::from_raw(pid).and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
        let Some(pidfd) = pidfd else { continue };
        if holds(pid, file.st_dev, file.st_ino).unwrap_or(false)
            && rustix::process::pidfd_send_signal(pidfd.as_fd(), Signal::KILL).is_ok()
        {
            killed.push(pid);
        }
    }
    Ok(killed)
}

/// Whether a descriptor of this process holds a lock on this file. Merely having it open is not enough.
fn holds(pid: i32, device: u64, inode: u64) -> io::Result<bool> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Ok(target) = rustix::fs::stat(entry.path()) else {
            continue;
        };
        if (target.st_dev, target.st_ino) != (device, inode) {
            continue;
        }
        let info = format!("/proc/{pid}/fdinfo/{}", entry.file_name().display());
        let locked = fs::read_to_string(info)
            .unwrap_or_default()
            .lines()
            .any(|line| line.starts_with("lock:") && line.contains(" FLOCK "));
        if locked {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    use rustix::fs::FlockOperation;

    use super::*;
    use crate::alone::is_alone;

    #[test]
    fn only_lock_holders_are_killed() {
        if !is_alone("holders::tests::only_lock_holders_are_killed") {
            return;
        }
        let file = tempfile::tempfile().unwrap();
        let path = format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            std::os::fd::AsRawFd::as_raw_fd(&file)
        );
        let locked = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        rustix::fs::flock(&locked, FlockOperation::LockShared).unwrap();
        let open = fs::OpenOptions::new().read(true).open(&path).unwrap();
        let child = |file: fs::File| {
            Command::new("sleep")
                .arg("600")
                .stdout(Stdio::from(file))
                .spawn()
                .unwrap()
        };
        let (mut holder, mut reader) = (child(locked), child(open));
        assert_eq!(kill(&file.into()).unwrap(), [i32::try_from(holder.id()).unwrap()]);
        assert_eq!(holder.wait().unwrap().signal(), Some(9));
        assert!(
            reader.try_wait().unwrap().is_none(),
            "a process that only reads the file lives on"
        );
        reader.kill().unwrap();
        reader.wait().unwrap();
    }
}

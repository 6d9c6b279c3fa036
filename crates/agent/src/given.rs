//! The values of the request for the sandbox, in a file for programs inside.
//!
//! A sandbox that was kept ready has its servers before there is a request, so nothing of it can be in their environment.
//! They read a file instead, whenever they need it. It is there before the request is answered, and each change of it
//! happens at once: it gets its name when it is complete.
//!
//! Environments have secrets. Commands run as the sandbox's own user unless a client says something else, so the file is
//! readable for this user, and for root, who can become any user; for nobody else. It is on the disk, which is the
//! sandbox's alone; where that becomes a layer, the file is left out.

use std::io;
use std::path::Path;

use protocol::agent::SANDBOX_FILE;
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use crate::trust::files;
use crate::users::{User, Users};

/// Writes the file below `root`, for the user of that name.
///
/// # Errors
/// When it cannot be written. One with something else in it is not left then.
pub(crate) fn publish(root: &Path, given: &[u8], user: &str) -> io::Result<()> {
    // Of a user that does not exist, no process is started either.
    let owner = Users::default().find(user);
    publish_for(root, given, owner.as_ref())
}

/// Removes the file below `root`, which an image may have: before there is a request, there is none.
///
/// # Errors
/// When it cannot be removed.
pub(crate) fn withdraw(root: &Path) -> io::Result<()> {
    let root = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let (directory, name) = files::parent(&root, SANDBOX_FILE, false)?;
    match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        removed => Ok(removed?),
    }
}

fn publish_for(root: &Path, given: &[u8], owner: Option<&User>) -> io::Result<()> {
    let root = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let owner = owner.map(|user| (Uid::from_raw(user.uid), Gid::from_raw(user.gid)));
    let (directory, name) = files::parent(&root, SANDBOX_FILE, true)?;
    let written = files::replace_for(&directory, name, given, Mode::RUSR, owner);
    if written.is_err() && files::read(&root, SANDBOX_FILE).is_ok_and(|(before, _)| before != given) {
        let _ = rustix::fs::unlinkat(&directory, name, AtFlags::empty());
    }
    written
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    #[test]
    fn the_file_is_replaced_and_its_owners_alone() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("run/ringfence");
        let file = root.path().join(SANDBOX_FILE);
        let uid = rustix::process::getuid().as_raw();
        let owner = User {
            name: "user".to_owned(),
            uid,
            gid: rustix::process::getgid().as_raw(),
            home: "/".into(),
            has_one_group: false,
        };
        fs::create_dir_all(&directory).unwrap();
        // What leads elsewhere is not followed.
        let victim = root.path().join("victim");
        fs::write(&victim, "untouched").unwrap();
        symlink(&victim, &file).unwrap();
        symlink(&victim, directory.join(protocol::agent::UNFINISHED_FILE)).unwrap();
        for content in ["one", "two", "two"] {
            publish_for(root.path(), content.as_bytes(), Some(&owner)).unwrap();
            let metadata = fs::symlink_metadata(&file).unwrap();
            assert_eq!((metadata.mode() & 0o7777, metadata.uid()), (0o400, uid));
            assert_eq!(fs::read_to_string(&file).unwrap(), content);
            assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
        }
        assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
        // What cannot be replaced is not left with what another request gave.
        fs::create_dir(directory.join(protocol::agent::UNFINISHED_FILE)).unwrap();
        assert!(publish_for(root.path(), b"two", Some(&owner)).is_err());
        assert_eq!(fs::read_to_string(&file).unwrap(), "two");
        assert!(publish_for(root.path(), b"three", Some(&owner)).is_err());
        assert!(!file.exists());
        symlink(&victim, &file).unwrap();
        withdraw(root.path()).unwrap();
        withdraw(root.path()).unwrap();
        assert!(victim.exists() && fs::symlink_metadata(&file).is_err());
    }
}

//! The skeleton of file systems without `base`: the directories between which the layers of an image lie.
//!
//! An image may have nothing but one program, or something else where a sandbox needs a directory. So the mount points,
//! and the files that name the sandbox's host and resolver, are in a layer above all others, where the image cannot
//! replace them; programs of a sandbox can change the files like any. Below all others is what images usually have
//! themselves.
//!
//! The content never changes under one version; sandboxes of an earlier version keep theirs.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::base::{AGENT, HOST_NAME, hosts, resolver};
use crate::files::if_there;
use crate::rootfs::Skeleton;

/// Version of the content.
const VERSION: &str = "1";
/// A version that is not complete.
const UNFINISHED: &str = "unfinished";

/// Directories above the layers of an image.
const TOP: [(&str, u32); 7] = [
    ("", 0o755),
    ("dev", 0o755),
    ("etc", 0o755),
    ("proc", 0o555),
    ("run", 0o755),
    ("run/ringfence", 0o755),
    ("sys", 0o555),
];
/// Directories of the lower part of the skeleton, with their modes.
const BOTTOM: [(&str, u32); 7] = [
    ("", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("root", 0o700),
    ("tmp", 0o1777),
    ("var", 0o755),
    ("var/tmp", 0o1777),
];

/// Path of the skeleton for this version of the program.
pub(crate) fn path(data_dir: &Path) -> PathBuf {
    data_dir.join("skeleton").join(VERSION)
}

/// Name of a directory of the skeleton.
pub(crate) const fn name(part: Skeleton) -> &'static str {
    match part {
        Skeleton::Top => "top",
        Skeleton::Bottom => "bottom",
        Skeleton::Empty => "empty",
    }
}

/// Creates the skeleton, unless it exists.
///
/// # Errors
/// When the data directory cannot be written.
pub(crate) fn create(data_dir: &Path) -> io::Result<()> {
    let path = path(data_dir);
    if path.is_dir() {
        return Ok(());
    }
    let unfinished = path.with_file_name(UNFINISHED);
    if_there(fs::remove_dir_all(&unfinished))?;
    fs::create_dir_all(&unfinished)?;
    let (top, bottom) = (
        unfinished.join(name(Skeleton::Top)),
        unfinished.join(name(Skeleton::Bottom)),
    );
    directories(&top, &TOP)?;
    directories(&bottom, &BOTTOM)?;
    directories(&unfinished.join(name(Skeleton::Empty)), &[("", 0o755)])?;
    for (file, text) in [
        (AGENT, String::new()),
        ("etc/hostname", format!("{HOST_NAME}\n")),
        ("etc/hosts", hosts()),
        ("etc/resolv.conf", resolver()),
    ] {
        put(&top.join(file), &text)?;
    }
    // A process needs a user with a name. Images have these files, or get them when a template is built.
    for (file, text) in [
        ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
        ("etc/group", "root:x:0:\n"),
    ] {
        put(&bottom.join(file), text)?;
    }
    // Before it has its name: unlike `base`, it is not created again at the next start.
    rustix::fs::syncfs(crate::files::open_dir(&unfinished)?)?;
    fs::rename(&unfinished, &path)
}

fn directories(root: &Path, directories: &[(&str, u32)]) -> io::Result<()> {
    for (directory, mode) in directories {
        let path = root.join(directory);
        fs::create_dir(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(*mode))?;
    }
    Ok(())
}

fn put(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text)?;
    fs::set_permissions(path, Permissions::from_mode(0o644))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_created_once() {
        let dir = tempfile::tempdir().unwrap();
        let unfinished = dir.path().join("skeleton").join(UNFINISHED);
        fs::create_dir_all(unfinished.join("top/left over")).unwrap();
        create(dir.path()).unwrap();
        create(dir.path()).unwrap();
        assert!(!unfinished.exists());
        let path = path(dir.path());
        let text = |file: &str| fs::read_to_string(path.join(file)).unwrap();
        assert!(text("top/etc/resolv.conf").starts_with("nameserver "));
        assert!(text("top/etc/hosts").contains("\tsandbox\n"));
        assert_eq!(text("top/run/ringfence/agent"), "");
        let mode = fs::metadata(path.join("bottom/tmp")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o1777);
        assert_eq!(fs::read_dir(path.join("empty")).unwrap().count(), 0);
    }
}

//! Calls of the kernel's mount API, by descriptors.
//!
//! Paths in the tree of a sandbox are resolved from an open descriptor ([`inside`]), without leaving the tree and without
//! following links.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};

use crate::sys;

/// Creates a file system whose mount has these attributes ([`sys::attr`]) and is not attached yet. An option with an empty
/// value is a flag.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn create(kind: &str, options: &[(&str, &str)], attributes: u64) -> io::Result<OwnedFd> {
    let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        if value.is_empty() {
            rustix::mount::fsconfig_set_flag(&fs, *key)?;
        } else {
            rustix::mount::fsconfig_set_string(&fs, *key, *value)?;
        }
    }
    rustix::mount::fsconfig_create(&fs)?;
    mount(&fs, attributes)
}

/// Mounts a file system that is configured and created.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn mount(fs: &OwnedFd, attributes: u64) -> io::Result<OwnedFd> {
    let attributes = u32::try_from(attributes).map_err(io::Error::other)?;
    let attributes = MountAttrFlags::from_bits_retain(attributes);
    Ok(rustix::mount::fsmount(fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Clones the mount at a path, without those below it. With an empty path it is the mount that `dir` is of, from `dir` on.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn clone(dir: BorrowedFd<'_>, path: &str) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if path.is_empty() {
        flags |= OpenTreeFlags::AT_EMPTY_PATH;
    }
    Ok(rustix::mount::open_tree(dir, path, flags)?)
}

/// Sets attributes of a mount, in addition to those that it has.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn protect(mount: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    sys::mount_setattr(mount, false, attributes, None)
}

/// Attaches a mount at a path below `dir`, or with an empty path at `dir` itself.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn attach(mount: BorrowedFd<'_>, dir: BorrowedFd<'_>, path: &str) -> io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    }
    Ok(rustix::mount::move_mount(mount, "", dir, path, flags)?)
}

/// Mounts what is at a path at another path as well, with the attributes that it has there: one system call, where a clone that is
/// attached takes five. Follows links, so both paths must be the platform's or the kernel's own.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn bind(from: &str, to: &str) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(from, to)?)
}

/// Opens an absolute path as it is in a tree, without leaving the tree and without following any link.
///
/// # Errors
/// When there is no such file, and those of the kernel.
pub(crate) fn inside(root: BorrowedFd<'_>, path: &str) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)?)
}

//! The ids of a sandbox: who clones its processes, and the maps of its user namespace.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::CWD;

use crate::files::write_at;
use crate::slot::IDS_PER_SLOT;
use crate::sys::{self, Cloned};

/// Clones a process as the user whose id is the first of a sandbox's range: what a user namespace holds of some resources is
/// charged to its creator. `group` is the control group of version 2 that the process is born in.
///
/// # Errors
/// Those of the kernel.
pub(super) fn clone_as(base_id: u32, flags: libc::c_int, group: Option<BorrowedFd<'_>>) -> io::Result<Cloned> {
    sys::set_ids(base_id, base_id, 0)?;
    let cloned = sys::clone3(flags, group);
    if !matches!(cloned, Ok(Cloned::Child)) {
        sys::set_ids(0, 0, 0)?;
    }
    cloned
}

/// Maps the ids in the user namespace of a process to a sandbox's range.
///
/// # Errors
/// When the process is gone, and those of the kernel.
pub(super) fn map_ids(pid: i32, base_id: u32) -> io::Result<()> {
    let map = format!("0 {base_id} {IDS_PER_SLOT}\n");
    ["uid_map", "gid_map"]
        .into_iter()
        .try_for_each(|file| write_at(CWD, &format!("/proc/{pid}/{file}"), &map))
}

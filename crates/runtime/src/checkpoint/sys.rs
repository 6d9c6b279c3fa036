//! System calls for starting CRIU, and for writing out what it has written.

#![expect(unsafe_code, reason = "raw system calls; each block says why it is sound")]

use std::ffi::{CStr, c_int};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::sys::check;

/// Lets the next program that is executed keep these of the permitted capabilities, whatever the user id is, and no other: it
/// cannot get one back either.
pub(crate) fn keep_capabilities_at_exec(kept: u64) -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: c_int,
    }
    #[repr(C)]
    #[derive(Clone, Copy, Default)]
    struct Data {
        effective: u32,
        permitted: u32,
        inheritable: u32,
    }
    let header = Header {
        version: 0x2008_0522, // _LINUX_CAPABILITY_VERSION_3
        pid: 0,
    };
    let mut data = [Data::default(); 2];
    // SAFETY: both structures have the layout the kernel wants, and `data` has room for the two words per set.
    check(unsafe { libc::syscall(libc::SYS_capget, &raw const header, data.as_mut_ptr()) })?;
    for capability in (0..64u32).filter(|number| kept & (1 << number) == 0) {
        // SAFETY: takes numbers only. The kernel refuses numbers that it does not know.
        unsafe {
            libc::syscall(
                libc::SYS_prctl,
                libc::PR_CAPBSET_DROP,
                u64::from(capability),
                0usize,
                0usize,
                0usize,
            )
        };
    }
    let halves = [kept, kept >> 32].map(|bits| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or_default());
    for (word, half) in data.iter_mut().zip(halves) {
        word.permitted &= half;
        word.inheritable = word.permitted;
        word.effective = word.permitted;
    }
    // SAFETY: as above; the kernel only reads.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, data.as_ptr()) })?;
    for capability in 0..64u64 {
        const RAISE: usize = 2; // PR_CAP_AMBIENT_RAISE
        // SAFETY: takes numbers only. The kernel refuses capabilities that are not permitted.
        unsafe { libc::syscall(libc::SYS_prctl, libc::PR_CAP_AMBIENT, RAISE, capability, 0usize, 0usize) };
    }
    Ok(())
}

/// Replaces this process. Returns only the error.
pub(crate) fn exec_with(path: &CStr, arguments: &[&CStr], environment: &[&CStr]) -> io::Error {
    let list = |strings: &[&CStr]| {
        let mut list: Vec<*const libc::c_char> = strings.iter().map(|string| string.as_ptr()).collect();
        list.push(std::ptr::null());
        list
    };
    let (argv, envp) = (list(arguments), list(environment));
    // SAFETY: both arrays end with a null pointer and everything they point to outlives the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    io::Error::last_os_error()
}

/// A descriptor of another process, duplicated into this one.
pub(crate) fn descriptor_of(process: BorrowedFd<'_>, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = check(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) })?;
    let fd = RawFd::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether two threads differ in what `kcmp` calls by this number; `false` where the kernel does not say.
pub(super) fn differs(one: i32, other: i32, kind: c_int) -> bool {
    // SAFETY: takes numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, one, other, kind, 0usize, 0usize) > 0 }
}

/// Has writes beyond the maximum size of files fail, here and in programs that are executed, instead of ending the process.
pub(crate) fn ignore_file_size_signal() {
    // SAFETY: SIG_IGN is a valid handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Lets this process wait for its children again.
pub(crate) fn notice_children() {
    // SAFETY: SIG_DFL is a valid handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Has the disk write a range of a file, and does not wait for it unless the disk has too much to write already.
///
/// # Errors
/// When it cannot be written. A later `fsync` of this descriptor does not report that again.
pub(crate) fn begin_write_out(file: &File, range: Range<u64>) -> io::Result<()> {
    sync_file_range(file, range, libc::SYNC_FILE_RANGE_WRITE)
}

/// Waits until the disk has written what was begun in a range of a file.
///
/// # Errors
/// As [`begin_write_out`].
pub(crate) fn wait_for_write_out(file: &File, range: Range<u64>) -> io::Result<()> {
    if range.is_empty() {
        // To the kernel, an empty one goes to the end of the file.
        Ok(())
    } else {
        sync_file_range(file, range, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
    }
}

fn sync_file_range(file: &File, range: Range<u64>, flags: libc::c_uint) -> io::Result<()> {
    let number = |bytes: u64| i64::try_from(bytes).map_err(io::Error::other);
    let (offset, length) = (number(range.start)?, number(range.end - range.start)?);
    // SAFETY: takes numbers only.
    check(i64::from(unsafe {
        libc::sync_file_range(file.as_raw_fd(), offset, length, flags)
    }))?;
    Ok(())
}

//! The system call `bpf`, one function for each use.

#![expect(unsafe_code, reason = "raw system calls; each block says why it is sound")]

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU64;

use libc::{c_int, c_long};

/// `BPF_MAP_CREATE`: a map of `entries` sockets by number.
pub(crate) fn socket_map(entries: u32) -> io::Result<OwnedFd> {
    const BPF_MAP_TYPE_SOCKMAP: u32 = 15;
    map(BPF_MAP_TYPE_SOCKMAP, 4, entries)
}

/// `BPF_MAP_CREATE`: a map of `entries` counters by 64-bit number.
pub(crate) fn counter_map(entries: u32) -> io::Result<OwnedFd> {
    const BPF_MAP_TYPE_HASH: u32 = 1;
    map(BPF_MAP_TYPE_HASH, 8, entries)
}

/// A map of 64-bit values.
fn map(kind: u32, key_size: u32, entries: u32) -> io::Result<OwnedFd> {
    const BPF_MAP_CREATE: c_int = 0;
    let mut attributes = BpfAttributes::default();
    // map_type, key_size, value_size, max_entries
    attributes.0[0] = pack(kind, key_size);
    attributes.0[1] = pack(8, entries);
    bpf_fd(BPF_MAP_CREATE, &attributes)
}

/// `BPF_MAP_UPDATE_ELEM` on a map of sockets.
pub(crate) fn set_socket(map: BorrowedFd<'_>, key: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
    let value = u64::from(socket.as_raw_fd().cast_unsigned());
    element(BPF_MAP_UPDATE_ELEM, map, (&raw const key).expose_provenance(), &value)
}

/// `BPF_MAP_UPDATE_ELEM` on a map of counters.
pub(crate) fn set_counter(map: BorrowedFd<'_>, key: u64, value: u64) -> io::Result<()> {
    element(BPF_MAP_UPDATE_ELEM, map, (&raw const key).expose_provenance(), &value)
}

/// `BPF_MAP_LOOKUP_ELEM` on a map of counters.
pub(crate) fn counter(map: BorrowedFd<'_>, key: u64) -> io::Result<u64> {
    const BPF_MAP_LOOKUP_ELEM: c_int = 1;
    let value = AtomicU64::new(0);
    element(BPF_MAP_LOOKUP_ELEM, map, (&raw const key).expose_provenance(), &value)?;
    Ok(value.into_inner())
}

/// `BPF_MAP_DELETE_ELEM` on a map of counters.
pub(crate) fn remove_counter(map: BorrowedFd<'_>, key: u64) -> io::Result<()> {
    const BPF_MAP_DELETE_ELEM: c_int = 3;
    let mut attributes = BpfAttributes::default();
    // map_fd, key; the kernel refuses anything behind them.
    attributes.0[0] = u64::from(map.as_raw_fd().cast_unsigned());
    attributes.0[1] = (&raw const key).expose_provenance() as u64;
    bpf(BPF_MAP_DELETE_ELEM, &attributes).map(drop)
}

const BPF_MAP_UPDATE_ELEM: c_int = 2;

/// A command on one element of a map. `key` is the address of a key of the map, `value` 64 bits.
fn element<T>(command: c_int, map: BorrowedFd<'_>, key: usize, value: &T) -> io::Result<()> {
    const { assert!(size_of::<T>() == 8) };
    let mut attributes = BpfAttributes::default();
    // map_fd, key, value, flags
    attributes.0[0] = u64::from(map.as_raw_fd().cast_unsigned());
    attributes.0[1] = key as u64;
    attributes.0[2] = (&raw const *value).expose_provenance() as u64;
    bpf(command, &attributes).map(drop)
}

/// `BPF_PROG_LOAD`: a program that chooses the socket of a packet.
pub(crate) fn load_sk_lookup(instructions: &[u64]) -> io::Result<OwnedFd> {
    const BPF_PROG_TYPE_SK_LOOKUP: u32 = 30;
    load(BPF_PROG_TYPE_SK_LOOKUP, BPF_SK_LOOKUP, instructions)
}

/// `BPF_PROG_LOAD`: a program that runs at a tracepoint.
pub(crate) fn load_tracepoint(instructions: &[u64]) -> io::Result<OwnedFd> {
    const BPF_PROG_TYPE_RAW_TRACEPOINT: u32 = 17;
    load(BPF_PROG_TYPE_RAW_TRACEPOINT, 0, instructions)
}

fn load(kind: u32, attach: u32, instructions: &[u64]) -> io::Result<OwnedFd> {
    const BPF_PROG_LOAD: c_int = 5;
    const LICENSE: &CStr = c"Apache-2.0";
    let number = u32::try_from(instructions.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut attributes = BpfAttributes::default();
    // prog_type, insn_cnt; insns; license; log_level, log_size; log_buf; kern_version, prog_flags; prog_name (16 bytes);
    // prog_ifindex, expected_attach_type
    attributes.0[0] = pack(kind, number);
    attributes.0[1] = instructions.as_ptr().addr() as u64;
    attributes.0[2] = LICENSE.as_ptr().addr() as u64;
    attributes.0[8] = pack(0, attach);
    bpf_fd(BPF_PROG_LOAD, &attributes)
}

/// `BPF_RAW_TRACEPOINT_OPEN`: runs a program at a tracepoint, until the descriptor is closed.
pub(crate) fn attach_tracepoint(program: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    const BPF_RAW_TRACEPOINT_OPEN: c_int = 17;
    let mut attributes = BpfAttributes::default();
    // name, prog_fd
    attributes.0[0] = name.as_ptr().addr() as u64;
    attributes.0[1] = u64::from(program.as_raw_fd().cast_unsigned());
    bpf_fd(BPF_RAW_TRACEPOINT_OPEN, &attributes)
}

/// `BPF_LINK_CREATE`: lets a program choose the sockets of packets in a network namespace, until the link is closed.
pub(crate) fn attach(program: BorrowedFd<'_>, namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const BPF_LINK_CREATE: c_int = 28;
    let mut attributes = BpfAttributes::default();
    // prog_fd, target_fd, attach_type, flags
    attributes.0[0] = pack(
        program.as_raw_fd().cast_unsigned(),
        namespace.as_raw_fd().cast_unsigned(),
    );
    attributes.0[1] = pack(BPF_SK_LOOKUP, 0);
    bpf_fd(BPF_LINK_CREATE, &attributes)
}

/// `BPF_SK_LOOKUP` of `enum bpf_attach_type`.
const BPF_SK_LOOKUP: u32 = 36;

/// The beginning of `union bpf_attr`; the kernel takes the rest as zero.
#[derive(Debug, Default)]
#[repr(C)]
struct BpfAttributes([u64; 16]);

/// Two 32-bit fields that follow each other.
const fn pack(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}

fn bpf(command: c_int, attributes: &BpfAttributes) -> io::Result<c_long> {
    // SAFETY: the kernel reads `attributes` by its size. The memory that they point to outlives this call, is as long
    // as they say, and is only read; except for the value of a lookup, which is an atomic integer.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            &raw const *attributes,
            size_of::<BpfAttributes>(),
        )
    };
    match result {
        ..0 => Err(io::Error::last_os_error()),
        _ => Ok(result),
    }
}

fn bpf_fd(command: c_int, attributes: &BpfAttributes) -> io::Result<OwnedFd> {
    let fd = bpf(command, attributes)?;
    let fd = RawFd::try_from(fd).map_err(|_| io::ErrorKind::InvalidData)?;
    // SAFETY: these commands return a new descriptor, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

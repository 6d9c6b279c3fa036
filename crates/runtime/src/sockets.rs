//! Memory in the sockets of a sandbox that is not charged to its control group.
//!
//! The kernel charges unread and unacknowledged data in TCP and UDP sockets, and data in UNIX sockets. It does not
//! charge netlink replies, data received by raw sockets, reports in error queues (refused packets, timestamps),
//! datagrams held back to grow, and connections that are not accepted yet. Each socket is limited by its buffer sizes,
//! up to `net.core.rmem_max`; the number of sockets is limited only by the few kilobytes charged for each. A sandbox
//! can thus take a hundred times its memory from the host.
//!
//! It can only be bounded by measuring it: the sum of what all sockets of a network namespace hold, read from socket
//! diagnosis and, for the kinds that diagnosis does not support everywhere, from /proc, minus what the sandbox's group
//! is charged for. Sockets that the platform created in the namespace do not count.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use protocol::sockets::{Columns, held as held_in};
use rustix::net::{RecvFlags, SendFlags};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`
const DUMP: u16 = 0x301;
const INET_DIAG_SKMEMINFO: u16 = 7;
/// Bytes of `struct nlmsghdr`, `struct inet_diag_sockid` and `struct inet_diag_msg`.
const HEADER: usize = 16;
const SOCKET_ID: usize = 48;
const ANSWER: usize = 72;
/// Offsets of the state, the user id and the inode in `struct inet_diag_msg`.
const STATE: usize = 1;
const UID: usize = 64;
const INODE: usize = 68;
/// Maximum size of a reply of the kernel, in bytes.
const REPLY: usize = 32 * 1024;
/// States of TCP.
const ESTABLISHED: u8 = 1;
const CLOSE_WAIT: u8 = 8;
/// Memory of an unaccepted connection besides its buffers, in bytes.
const UNACCEPTED: u64 = 4096;

/// Bytes that all TCP and UDP sockets hold in the namespace of this `NETLINK_SOCK_DIAG` socket, charged or not.
pub(crate) fn held_by_inet(diagnosis: &OwnedFd) -> io::Result<u64> {
    let mut sum = 0;
    for family in [libc::AF_INET, libc::AF_INET6] {
        for protocol in [libc::IPPROTO_TCP, libc::IPPROTO_UDP] {
            let [family, protocol] = [family, protocol].map(|number| u8::try_from(number).unwrap_or_default());
            sum += dump(diagnosis, &request(family, protocol))?;
        }
    }
    Ok(sum)
}

/// Bytes that raw and netlink sockets hold in the network namespace of a process. They are never charged.
pub(crate) fn held_by_others(pid: i32) -> io::Result<u64> {
    let table = |name: &str, columns| match fs::File::open(format!("/proc/{pid}/net/{name}")) {
        // No IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound && name == "raw6" => Ok(0),
        table => held_in(table?, columns, u64::MAX),
    };
    Ok(table("raw", Columns::Queues)? + table("raw6", Columns::Queues)? + table("netlink", Columns::Buffers)?)
}

/// Upper bound of the uncharged memory of TCP and UDP sockets in the network namespace of a process, from their number.
pub(crate) fn most_of_inet(pid: i32) -> io::Result<u64> {
    let mut number = 0;
    for table in ["sockstat", "sockstat6"] {
        match fs::read_to_string(format!("/proc/{pid}/net/{table}")) {
            Ok(text) => number += in_use(&text),
            // No IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && table == "sockstat6" => {}
            Err(error) => return Err(error),
        }
    }
    let largest: u64 = fs::read_to_string("/proc/sys/net/core/rmem_max")?
        .trim()
        .parse()
        .map_err(|_| io::ErrorKind::InvalidData)?;
    // The kernel doubles the size that a program requests.
    Ok(number.saturating_mul(largest).saturating_mul(2))
}

/// TCP and UDP sockets in `/proc/net/sockstat` or `sockstat6`.
fn in_use(table: &str) -> u64 {
    let number = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        matches!(words.next()?, "TCP:" | "UDP:" | "TCP6:" | "UDP6:").then(|| words.nth(1)?.parse::<u64>().ok())?
    };
    table.lines().filter_map(number).sum()
}

/// Request for all sockets of a kind, with their memory.
fn request(family: u8, protocol: u8) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + 8 + SOCKET_ID);
    let length = u32::try_from(HEADER + 8 + SOCKET_ID).unwrap_or_default();
    bytes.extend(length.to_ne_bytes());
    bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    bytes.extend(DUMP.to_ne_bytes());
    bytes.extend([0; 8]); // sequence number and port id
    bytes.extend([family, protocol, 1 << (INET_DIAG_SKMEMINFO - 1), 0]);
    bytes.extend(u32::MAX.to_ne_bytes()); // in any state
    bytes.extend([0; SOCKET_ID]);
    bytes
}

fn dump(diagnosis: &OwnedFd, request: &[u8]) -> io::Result<u64> {
    rustix::net::send(diagnosis.as_fd(), request, SendFlags::empty())?;
    let mut buffer = vec![0; REPLY];
    let mut sum = 0;
    loop {
        let (_, length) = rustix::net::recv(diagnosis.as_fd(), &mut buffer[..], RecvFlags::empty())?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match add(&buffer[..length.min(REPLY)])? {
            (part, true) => return Ok(sum + part),
            (part, false) => sum += part,
        }
    }
}

/// Bytes held by the sockets of one reply, and whether it is the last.
fn add(mut reply: &[u8]) -> io::Result<(u64, bool)> {
    let broken = || io::Error::from(io::ErrorKind::InvalidData);
    let mut sum = 0;
    while !reply.is_empty() {
        let length = word(reply, 0).ok_or_else(broken)? as usize;
        let kind = half(reply, 4).ok_or_else(broken)?;
        let message = reply.get(HEADER..length).ok_or_else(broken)?;
        match kind {
            NLMSG_DONE => return Ok((sum, true)),
            NLMSG_ERROR => {
                let error = word(message, 0).ok_or_else(broken)?.cast_signed();
                return Err(io::Error::from_raw_os_error(-error));
            }
            _ => sum += held(message).ok_or_else(broken)?,
        }
        reply = reply.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok((sum, false))
}

/// Bytes held by one socket.
fn held(message: &[u8]) -> Option<u64> {
    let (state, uid, inode) = (*message.get(STATE)?, word(message, UID)?, word(message, INODE)?);
    // The platform's own end of a connection; or a closed end with data still to be sent, which is charged to the
    // process that closed it. Before 6.17 the kernel forgets the owner on close, and does not report an owner of an
    // unaccepted connection either.
    if uid == 0 && (inode != 0 || !matches!(state, ESTABLISHED | CLOSE_WAIT)) {
        return Some(0);
    }
    let mut attributes = message.get(ANSWER..)?;
    while let (Some(length), Some(kind)) = (half(attributes, 0), half(attributes, 2)) {
        let length = usize::from(length);
        let value = attributes.get(4..length)?;
        if kind == INET_DIAG_SKMEMINFO {
            // Received; being sent; reserved; waiting to be sent or acknowledged. TCP counts data being sent as waiting
            // as well, so the larger one counts.
            let [received, sending, aside, waiting] =
                [word(value, 0)?, word(value, 8)?, word(value, 16)?, word(value, 20)?];
            let own = if inode == 0 { UNACCEPTED } else { 0 };
            return Some(u64::from(received) + u64::from(aside) + u64::from(sending.max(waiting)) + own);
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(0)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_counted() {
        let table = "sockets: used 70\nTCP: inuse 5 orphan 1 tw 2 alloc 9 mem 1\nUDP: inuse 3 mem 2\nUDPLITE: inuse 9\n\
                     RAW: inuse 8\nFRAG: inuse 0 memory 0\n";
        assert_eq!(in_use(table), 8);
        assert_eq!(in_use("TCP6: inuse 4\nUDP6: inuse 1\nRAW6: inuse 7\n"), 5);
        assert_eq!(in_use("TCP: inuse\nUDP:\n"), 0);
    }

    fn socket(state: u8, uid: u32, inode: u32, memory: Option<[u32; 9]>) -> Vec<u8> {
        let mut message = vec![0; ANSWER];
        message[STATE] = state;
        message[UID..UID + 4].copy_from_slice(&uid.to_ne_bytes());
        message[INODE..INODE + 4].copy_from_slice(&inode.to_ne_bytes());
        message.extend([8, 0, 1, 0, 0, 0, 0, 0]);
        if let Some(memory) = memory {
            message.extend(40u16.to_ne_bytes());
            message.extend(INET_DIAG_SKMEMINFO.to_ne_bytes());
            message.extend(memory.iter().flat_map(|word| word.to_ne_bytes()));
        }
        let length = u32::try_from(message.len() + HEADER).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        bytes.extend([0; 10]);
        bytes.extend(message);
        bytes
    }

    #[test]
    fn replies_are_summed_and_malformed_ones_rejected() {
        let memory = Some([100, 9999, 20, 9999, 3, 50, 9999, 9999, 9999]);
        let done = {
            let mut bytes = vec![0; 20];
            bytes[0] = 20;
            bytes[4] = 3;
            bytes
        };
        let check = |reply: &[u8], want| assert_eq!(add(reply).unwrap(), want);
        let (fin_wait, time_wait) = (4, 6);
        check(&socket(ESTABLISHED, 1000, 7, memory), (153, false));
        check(&socket(fin_wait, 1000, 0, memory), (153 + UNACCEPTED, false));
        for unaccepted in [ESTABLISHED, CLOSE_WAIT] {
            check(&socket(unaccepted, 0, 0, memory), (153 + UNACCEPTED, false));
        }
        // Sockets of the platform, open and closed.
        check(&socket(ESTABLISHED, 0, 7, memory), (0, false));
        check(&socket(fin_wait, 0, 0, memory), (0, false));
        check(&socket(time_wait, 0, 0, None), (0, false));
        let reply = socket(ESTABLISHED, 1000, 7, memory);
        check(&[reply.clone(), done.clone()].concat(), (153, true));
        for cut in [1, 15, 20, 100, reply.len() - 1] {
            assert!(add(&reply[..cut]).is_err(), "{cut}");
        }
        let mut refused = done;
        refused[4] = 2;
        refused[16..20].copy_from_slice(&(-libc::ENOENT).to_ne_bytes());
        assert_eq!(add(&refused).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    }
}

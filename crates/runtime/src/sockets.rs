//! Memory in the sockets of a sandbox that is not charged to its control group.
//!
//! The kernel charges unread and unacknowledged data in TCP and UDP sockets, and data in UNIX sockets. It does not
//! charge netlink replies, data received by raw sockets, reports in error queues (refused packets, timestamps),
//! datagrams held back to grow, connections that are not accepted yet, netlink sockets themselves, and memberships in
//! multicast groups. Each socket is limited by its buffer sizes,
//! up to `net.core.rmem_max`; the number of sockets is limited only by the few kilobytes charged for each. A sandbox
//! can thus take a hundred times its memory from the host.
//!
//! It can only be bounded by measuring it: the sum of what all sockets of a network namespace hold, read from socket
//! diagnosis and, for the kinds that diagnosis does not support everywhere, from /proc, minus what the sandbox's group
//! is charged for. Sockets that the platform created in the namespace do not count.
//!
//! Diagnosis also ends the connections of a restored sandbox whose other ends were not restored.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use protocol::sockets::{Columns, NETLINK_SOCKET, held as held_in, held_by_groups, netlink_sockets};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_REQUEST | NLM_F_DUMP`
const DUMP: u16 = 0x301;
/// `NLM_F_REQUEST | NLM_F_ACK`
const ACKNOWLEDGED: u16 = 0x5;
const INET_DIAG_SKMEMINFO: u16 = 7;
/// Bytes of `struct nlmsghdr`, `struct inet_diag_sockid` and `struct inet_diag_msg`.
const HEADER: usize = 16;
const SOCKET_ID: usize = 48;
const ANSWER: usize = 72;
/// Offsets of the family, the state, the identity of the socket, the user id and the inode in `struct inet_diag_msg`.
const FAMILY: usize = 0;
const STATE: usize = 1;
const IDENTITY: usize = 4;
const UID: usize = 64;
const INODE: usize = 68;
/// Maximum size of a reply of the kernel, in bytes.
const REPLY: usize = 32 * 1024;
/// States of TCP.
const ESTABLISHED: u8 = 1;
const TIME_WAIT: u8 = 6;
const CLOSE: u8 = 7;
const CLOSE_WAIT: u8 = 8;
const LISTEN: u8 = 10;
/// Memory of an unaccepted connection besides its buffers, in bytes.
const UNACCEPTED: u64 = 4096;

/// Bytes that all TCP and UDP sockets hold in the namespace of this `NETLINK_SOCK_DIAG` socket, charged or not.
pub(crate) fn held_by_inet(diagnosis: &OwnedFd) -> io::Result<u64> {
    let mut sum = 0;
    for family in [libc::AF_INET, libc::AF_INET6] {
        for protocol in [libc::IPPROTO_TCP, libc::IPPROTO_UDP] {
            let [family, protocol] = [family, protocol].map(|number| u8::try_from(number).unwrap_or_default());
            dump(diagnosis, &request(family, protocol), &mut |message| {
                sum += held(message)?;
                Some(())
            })?;
        }
    }
    Ok(sum)
}

/// Ends the TCP connections in the network namespace of the caller whose other ends are not in it. Programs get
/// `ECONNABORTED`. Does nothing where the kernel cannot do it (without `CONFIG_INET_DIAG_DESTROY`).
pub(crate) fn end_halves() -> io::Result<()> {
    let diagnosis = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(rustix::net::netlink::SOCK_DIAG),
    )?;
    let tcp = u8::try_from(libc::IPPROTO_TCP).unwrap_or_default();
    let mut connections = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let family = u8::try_from(family).unwrap_or_default();
        dump(&diagnosis, &request(family, tcp), &mut |message| {
            connections.extend(Connection::of(message)?);
            Some(())
        })?;
    }
    let ends: HashSet<_> = connections.iter().map(|connection| connection.ends).collect();
    let halves = connections.iter().filter(|connection| {
        let (own, other) = connection.ends;
        !ends.contains(&(other, own))
    });
    for half in halves {
        rustix::net::send(diagnosis.as_fd(), &half.end(tcp), SendFlags::empty())?;
        let mut reply = [0; 256];
        let (_, length) = rustix::net::recv(diagnosis.as_fd(), &mut reply[..], RecvFlags::empty())?;
        match read(&reply[..length.min(256)], &mut |_| Some(())) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => return Ok(()),
            // It has ended by itself.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            outcome => drop(outcome?),
        }
    }
    Ok(())
}

/// A TCP socket that is connected, or about to be.
#[derive(Debug, PartialEq, Eq)]
struct Connection {
    family: u8,
    identity: [u8; SOCKET_ID],
    /// Address of the socket, and that of the other end.
    ends: (SocketAddr, SocketAddr),
}

impl Connection {
    /// From an answer of the kernel; no connection if the socket is in another state.
    fn of(message: &[u8]) -> Option<Option<Self>> {
        let (family, state) = (*message.get(FAMILY)?, *message.get(STATE)?);
        if matches!(state, TIME_WAIT | CLOSE | LISTEN) {
            return Some(None);
        }
        let identity: [u8; SOCKET_ID] = message.get(IDENTITY..IDENTITY + SOCKET_ID)?.try_into().ok()?;
        let address = |port: usize, at: usize| {
            let port = u16::from_be_bytes(identity[port..port + 2].try_into().ok()?);
            let bytes: [u8; 16] = identity[at..at + 16].try_into().ok()?;
            let address: IpAddr = match i32::from(family) {
                libc::AF_INET => Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into(),
                _ => Ipv6Addr::from(bytes).to_canonical(),
            };
            Some(SocketAddr::new(address, port))
        };
        let ends = (address(0, 4)?, address(2, 20)?);
        Some(Some(Self { family, identity, ends }))
    }

    /// The request that ends the connection.
    fn end(&self, protocol: u8) -> Vec<u8> {
        let mut bytes = request_header(SOCK_DESTROY, ACKNOWLEDGED, [self.family, protocol, 0]);
        bytes.extend(self.identity);
        bytes
    }
}

/// What a sandbox holds that no limit counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Uncharged {
    /// Memory of the host in its sockets, in bytes. Not all of it, if there are more netlink sockets than
    /// [`NETLINK_SOCKETS_MAX`].
    pub bytes: u64,
    /// Memory behind the other open files of the sandbox, in bytes, if there are very many.
    pub files_bytes: u64,
    /// Netlink sockets, also those that are not bound. Their own memory is in `bytes`.
    pub netlink_sockets: u64,
    /// Open files of all processes of the workload. One that several have counts for each.
    pub open_files: u64,
}

/// Files that the processes of a sandbox may have open together. Each has up to 90 bytes that nobody is charged for, such as
/// the owner of its signals (`F_SETOWN`), so this is 47 MiB. 512 processes with the usual limit of 1,024 have no more.
pub const OPEN_FILES_MAX: u64 = 524_288;

/// Netlink sockets that a sandbox may have: 16 MiB. That is less than a sandbox may hold otherwise, because they can be made
/// faster than anything else: 100,000 in a second on one core. Programs have one or two each.
pub const NETLINK_SOCKETS_MAX: u64 = 8_192;

/// What netlink and raw sockets, and memberships in groups, hold in the network namespace of a process. It is never charged.
/// Stops once that is more than `enough`, or there are more netlink sockets than [`NETLINK_SOCKETS_MAX`]: tables of so many
/// lines take too long.
pub(crate) fn held_by_others(pid: i32, enough: u64) -> io::Result<Uncharged> {
    let table = |name: &str, read: &dyn Fn(fs::File) -> io::Result<u64>| {
        match fs::File::open(format!("/proc/{pid}/net/{name}")) {
            // No IPv6, or no multicast.
            Err(error) if error.kind() == io::ErrorKind::NotFound && matches!(name, "raw6" | "igmp") => Ok(0),
            table => read(table?),
        }
    };
    let netlink_sockets = netlink_sockets(&fs::read_to_string(format!("/proc/{pid}/net/protocols"))?);
    let mut bytes = netlink_sockets.saturating_mul(NETLINK_SOCKET);
    if netlink_sockets <= NETLINK_SOCKETS_MAX {
        for (name, columns) in [
            ("netlink", Columns::Buffers),
            ("raw", Columns::Queues),
            ("raw6", Columns::Queues),
        ] {
            bytes = bytes.saturating_add(table(name, &|table| held_in(table, columns, enough))?);
        }
        bytes = bytes.saturating_add(table("igmp", &|table| held_by_groups(table, enough))?);
    }
    Ok(Uncharged {
        bytes,
        files_bytes: 0,
        netlink_sockets,
        open_files: 0,
    })
}

/// All sockets of the network namespace of a process, also those that are not bound.
pub(crate) fn allocated(pid: i32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/net/sockstat"))?;
    let used = text
        .lines()
        .find_map(|line| line.strip_prefix("sockets: used ")?.parse().ok());
    used.ok_or(io::ErrorKind::InvalidData.into())
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
    let asked_for = 1 << (INET_DIAG_SKMEMINFO - 1);
    let mut bytes = request_header(SOCK_DIAG_BY_FAMILY, DUMP, [family, protocol, asked_for]);
    bytes.extend([0; SOCKET_ID]);
    bytes
}

/// A request about sockets, up to the identity of one: family, protocol, and what is asked for.
fn request_header(kind: u16, flags: u16, what: [u8; 3]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + 8 + SOCKET_ID);
    let length = u32::try_from(HEADER + 8 + SOCKET_ID).unwrap_or_default();
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend([0; 8]); // sequence number and port id
    bytes.extend(what);
    bytes.push(0);
    bytes.extend(u32::MAX.to_ne_bytes()); // in any state
    bytes
}

/// Has `each` look at the answers to a request.
fn dump(diagnosis: &OwnedFd, request: &[u8], each: &mut dyn FnMut(&[u8]) -> Option<()>) -> io::Result<()> {
    rustix::net::send(diagnosis.as_fd(), request, SendFlags::empty())?;
    let mut buffer = vec![0; REPLY];
    loop {
        let (_, length) = rustix::net::recv(diagnosis.as_fd(), &mut buffer[..], RecvFlags::empty())?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if read(&buffer[..length.min(REPLY)], each)? {
            return Ok(());
        }
    }
}

/// Has `each` look at the messages of one reply, and returns whether it is the last.
fn read(mut reply: &[u8], each: &mut dyn FnMut(&[u8]) -> Option<()>) -> io::Result<bool> {
    let broken = || io::Error::from(io::ErrorKind::InvalidData);
    while !reply.is_empty() {
        let length = word(reply, 0).ok_or_else(broken)? as usize;
        let kind = half(reply, 4).ok_or_else(broken)?;
        let message = reply.get(HEADER..length).ok_or_else(broken)?;
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => match word(message, 0).ok_or_else(broken)?.cast_signed() {
                0 => return Ok(true),
                error => return Err(io::Error::from_raw_os_error(-error)),
            },
            _ => each(message).ok_or_else(broken)?,
        }
        reply = reply.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
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
            // Received; being sent; reserved; waiting to be sent or acknowledged; of options. TCP counts data being sent
            // as waiting as well, so the larger one counts.
            let [received, sending, waiting, options] = [0, 8, 20, 24].map(|at| word(value, at).map(u64::from));
            let own = if inode == 0 { UNACCEPTED } else { 0 };
            // What is reserved is less than nothing while the kernel has merged segments of a full buffer.
            let aside = word(value, 16)?.cast_signed().max(0).unsigned_abs();
            return Some(received? + u64::from(aside) + sending?.max(waiting?) + options? + own);
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
        let memory = Some([100, 9999, 15, 9999, 3, 45, 5, 9999, 9999]);
        let done = {
            let mut bytes = vec![0; 20];
            bytes[0] = 20;
            bytes[4] = 3;
            bytes
        };
        let add = |reply: &[u8]| {
            let mut sum = 0;
            let is_last = read(reply, &mut |message| {
                sum += held(message)?;
                Some(())
            })?;
            io::Result::Ok((sum, is_last))
        };
        let check = |reply: &[u8], want| assert_eq!(add(reply).unwrap(), want);
        let (fin_wait, time_wait) = (4, 6);
        check(&socket(ESTABLISHED, 1000, 7, memory), (153, false));
        check(&socket(fin_wait, 1000, 0, memory), (153 + UNACCEPTED, false));
        for unaccepted in [ESTABLISHED, CLOSE_WAIT] {
            check(&socket(unaccepted, 0, 0, memory), (153 + UNACCEPTED, false));
        }
        let below = Some([100, 9999, 20, 9999, (-300i32).cast_unsigned(), 45, 5, 9999, 9999]);
        check(&socket(ESTABLISHED, 1000, 7, below), (150, false));
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

    #[test]
    fn connections_are_named_by_their_ends() {
        let message = |family: i32, state: u8, ends: [(&[u8], u16); 2]| {
            let mut message = vec![0; ANSWER];
            message[FAMILY] = u8::try_from(family).unwrap();
            message[STATE] = state;
            for (index, (address, port)) in ends.into_iter().enumerate() {
                message[IDENTITY + index * 2..][..2].copy_from_slice(&port.to_be_bytes());
                message[IDENTITY + 4 + index * 16..][..address.len()].copy_from_slice(address);
            }
            message
        };
        let check = |message: &[u8], want: Option<(&str, &str)>| {
            let ends = Connection::of(message).unwrap().map(|connection| connection.ends);
            assert_eq!(
                ends,
                want.map(|(own, other)| (own.parse().unwrap(), other.parse().unwrap()))
            );
        };
        let (own, other) = ([10, 0, 0, 2], [93, 190, 0, 1]);
        let ends: [(&[u8], u16); 2] = [(&own, 40_000), (&other, 443)];
        let (syn_sent, fin_wait) = (2, 5);
        for state in [ESTABLISHED, CLOSE_WAIT, syn_sent, fin_wait] {
            check(
                &message(libc::AF_INET, state, ends),
                Some(("10.0.0.2:40000", "93.190.0.1:443")),
            );
        }
        for state in [TIME_WAIT, CLOSE, LISTEN] {
            check(&message(libc::AF_INET, state, ends), None);
        }
        // One of IPv4 on a socket of IPv6 is the other end of one on a socket of IPv4.
        let mapped = [own, other].map(|address| Ipv4Addr::from(address).to_ipv6_mapped().octets());
        check(
            &message(libc::AF_INET6, ESTABLISHED, [(&mapped[1], 443), (&mapped[0], 40_000)]),
            Some(("93.190.0.1:443", "10.0.0.2:40000")),
        );
        assert_eq!(Connection::of(&[0; 20]), None);
    }
}

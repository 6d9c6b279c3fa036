//! The network of a sandbox, set up over netlink from inside its namespace.
//!
//! `lo`, and an `eth0` without a connection: an interface with an address, because some programs consider themselves
//! offline with `lo` alone. There is no other route, so a connection to the outside fails immediately with ENETUNREACH.

use std::io;
use std::mem::size_of;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Address of `eth0`, the same in every sandbox: it is visible only inside the sandbox.
pub(crate) const ADDRESS: [u8; 4] = [10, 0, 0, 2];

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const NLA_F_NESTED: u16 = 0x8000;
const IFF_UP: u32 = 1;
/// Kinds of interface that can be used as `eth0`, best first. All of them drop every packet. A bridge is in every
/// kernel, but creating and removing one takes milliseconds of a host-wide lock under load.
pub(crate) const KINDS: [&str; 3] = ["dummy", "ifb", "bridge"];
/// Index of `lo` in every network namespace.
const LOOPBACK: i32 = 1;
/// Requested index of `eth0`, so that no reply has to be read to learn it.
const ETH0: i32 = 2;

/// A request under construction.
#[derive(Debug)]
struct Message(Vec<u8>);

impl Message {
    fn new(kind: u16, flags: u16) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((flags | NLM_F_REQUEST | NLM_F_ACK).to_ne_bytes());
        bytes.extend([0; 8]); // sequence number and port id
        Self(bytes)
    }

    /// `struct ifinfomsg`
    fn link(mut self, index: i32, flags: u32) -> Self {
        self.0.extend([0; 4]); // family, padding, device type
        self.0.extend(index.to_ne_bytes());
        self.0.extend(flags.to_ne_bytes());
        self.0.extend(flags.to_ne_bytes()); // which flags change
        self
    }

    /// `struct ifaddrmsg`
    fn address(mut self, prefix: u8, index: i32) -> Self {
        let family = u8::try_from(libc::AF_INET).unwrap_or_default();
        self.0.extend([family, prefix, 0, 0]); // flags, scope
        self.0.extend(index.to_ne_bytes());
        self
    }

    fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        while !self.0.len().is_multiple_of(4) {
            self.0.push(0);
        }
        self
    }

    fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        self.0[..size_of::<u32>()].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

fn nested(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
    [&length.to_ne_bytes()[..], &kind.to_ne_bytes()[..], value].concat()
}

/// The requests that create a sandbox's network with an `eth0` of `kind`, in order.
fn requests(kind: &str) -> [Vec<u8>; 3] {
    [
        Message::new(RTM_NEWLINK, 0).link(LOOPBACK, IFF_UP).finish(),
        Message::new(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL)
            .link(ETH0, IFF_UP)
            .attribute(IFLA_IFNAME, b"eth0\0")
            .attribute(IFLA_LINKINFO | NLA_F_NESTED, &nested(IFLA_INFO_KIND, kind.as_bytes()))
            .finish(),
        Message::new(RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL)
            .address(32, ETH0)
            .attribute(IFA_LOCAL, &ADDRESS)
            .attribute(IFA_ADDRESS, &ADDRESS)
            .finish(),
    ]
}

/// Sets up the network of the namespace that the caller is in, with capability NET_ADMIN over it.
pub(crate) fn configure(kind: &str) -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None, // NETLINK_ROUTE is protocol 0
    )?;
    let mut reply = [0; 4096];
    for (request, what) in requests(kind)
        .iter()
        .zip(["lo up", "create eth0", "set the address of eth0"])
    {
        rustix::net::send(&socket, request, SendFlags::empty())?;
        let (_, length) = rustix::net::recv(&socket, &mut reply[..], RecvFlags::empty())?;
        acknowledged(&reply[..length]).map_err(|error| io::Error::new(error.kind(), format!("{what}: {error}")))?;
    }
    Ok(())
}

/// The first of [`KINDS`] that this kernel has, found by trying in the namespace that the caller is in.
pub(crate) fn first_kind() -> io::Result<usize> {
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for (index, kind) in KINDS.iter().enumerate() {
        match configure(kind) {
            Ok(()) => return Ok(index),
            Err(error) => last = error,
        }
    }
    let kinds = KINDS.join(", ");
    Err(io::Error::other(format!(
        "cannot create an interface of type {kinds}, last error: {last} (fix: modprobe {})",
        KINDS[0]
    )))
}

/// Reads the error number that every acknowledgement carries.
fn acknowledged(reply: &[u8]) -> io::Result<()> {
    let kind = reply
        .get(4..6)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u16::from_ne_bytes);
    let error = reply
        .get(16..20)
        .and_then(|bytes| bytes.try_into().ok())
        .map(i32::from_ne_bytes);
    match (kind, error) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(error)) => Err(io::Error::from_raw_os_error(-error)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "not an acknowledgement")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_contain_their_length_and_are_aligned() {
        for request in requests(KINDS[0]) {
            assert_eq!(
                u32::from_ne_bytes(request[..4].try_into().unwrap()) as usize,
                request.len()
            );
            assert_eq!(request.len() % 4, 0);
        }
    }

    #[test]
    fn malformed_replies_are_rejected() {
        let ack = |error: i32| {
            let mut reply = vec![0; 16];
            reply[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
            reply.extend(error.to_ne_bytes());
            reply
        };
        assert!(acknowledged(&ack(0)).is_ok());
        assert_eq!(
            acknowledged(&ack(-libc::EEXIST)).unwrap_err().raw_os_error(),
            Some(libc::EEXIST)
        );
        assert!(acknowledged(&[]).is_err());
        assert!(acknowledged(&ack(0)[..18]).is_err());
    }
}

//! The network of a sandbox, set up over netlink from inside its namespace.
//!
//! `lo`, and an `eth0` without a connection: an interface with addresses and a default route, because some programs
//! consider themselves offline without. Nothing is ever sent through it: rules make every address local for TCP and
//! UDP, so that packets to the outside are delivered in this namespace, to the sockets of the gateway (`crate::egress`).
//! While it has none there, nothing answers. ICMP to the outside is refused by a rule. There is no connection tracking
//! and no packet filter, whose memory would be charged to nobody.

use std::io;
use std::mem::size_of;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Addresses of `eth0`, the same in every sandbox: they are visible only inside the sandbox.
pub(crate) const ADDRESS: [u8; 4] = [10, 0, 0, 2];
pub(crate) const ADDRESS6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2];

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_EXCL: u16 = 0x200;
const NLM_F_CREATE: u16 = 0x400;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_NEWRULE: u16 = 32;
const NLMSG_ERROR: u16 = 2;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const NLA_F_NESTED: u16 = 0x8000;
const IFA_FLAGS: u16 = 8;
const IFA_F_NODAD: u32 = 2;
const FRA_PRIORITY: u16 = 6;
const FRA_TABLE: u16 = 15;
const FRA_IP_PROTO: u16 = 22;
const FR_ACT_TO_TBL: u8 = 1;
const FR_ACT_UNREACHABLE: u8 = 7;
const RTA_OIF: u16 = 4;
const RTA_PREFSRC: u16 = 7;
const RTN_UNICAST: u8 = 1;
const RTN_LOCAL: u8 = 2;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_LINK: u8 = 253;
const RT_SCOPE_HOST: u8 = 254;
const RT_TABLE_MAIN: u8 = 254;
const RT_TABLE_LOCAL: u8 = 255;
/// The routing table in which every address is local.
const ALL_LOCAL: u8 = 100;
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
    fn address(mut self, family: u8, prefix: u8, index: i32) -> Self {
        self.0.extend([family, prefix, 0, 0]); // flags, scope
        self.0.extend(index.to_ne_bytes());
        self
    }

    /// `struct rtmsg` of a default route
    fn default_route(mut self, family: u8, table: u8, scope: u8, kind: u8) -> Self {
        self.0.extend([family, 0, 0, 0, table, RTPROT_STATIC, scope, kind]);
        self.0.extend([0; 4]); // flags
        self
    }

    /// `struct fib_rule_hdr`
    fn rule(mut self, family: u8, table: u8, action: u8) -> Self {
        self.0.extend([family, 0, 0, 0, table, 0, 0, action]);
        self.0.extend([0; 4]); // flags
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

/// A request and what it does. Those for IPv6 may fail: some hosts have disabled it.
#[derive(Debug)]
struct Request {
    bytes: Vec<u8>,
    what: &'static str,
    may_fail: bool,
}

/// How many of the first requests are about interfaces.
const LINKS: usize = 2;

/// The requests that create a sandbox's network with an `eth0` of `kind`, in order.
fn requests(kind: &str) -> Vec<Request> {
    let request = |what, message: Message| Request {
        bytes: message.finish(),
        what,
        may_fail: false,
    };
    let mut requests = vec![
        request("lo up", Message::new(RTM_NEWLINK, 0).link(LOOPBACK, IFF_UP)),
        request(
            "create eth0",
            Message::new(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL)
                .link(ETH0, IFF_UP)
                .attribute(IFLA_IFNAME, b"eth0\0")
                .attribute(IFLA_LINKINFO | NLA_F_NESTED, &nested(IFLA_INFO_KIND, kind.as_bytes())),
        ),
    ];
    let protocols = |icmp| [libc::IPPROTO_TCP, libc::IPPROTO_UDP, icmp];
    let families = [
        (libc::AF_INET, &ADDRESS[..], protocols(libc::IPPROTO_ICMP)),
        (libc::AF_INET6, &ADDRESS6[..], protocols(libc::IPPROTO_ICMPV6)),
    ];
    for (family, address, protocols) in families {
        let new = |kind| Message::new(kind, NLM_F_CREATE | NLM_F_EXCL);
        let family_byte = u8::try_from(family).unwrap_or_default();
        let prefix = u8::try_from(address.len() * 8).unwrap_or_default();
        let mut add = |what, message: Message| {
            requests.push(Request {
                may_fail: family == libc::AF_INET6,
                ..request(what, message)
            });
        };
        add(
            "set an address of eth0",
            new(RTM_NEWADDR)
                .address(family_byte, prefix, ETH0)
                .attribute(IFA_LOCAL, address)
                .attribute(IFA_ADDRESS, address)
                .attribute(IFA_FLAGS, &IFA_F_NODAD.to_ne_bytes()),
        );
        add(
            "set the default route",
            new(RTM_NEWROUTE)
                .default_route(family_byte, RT_TABLE_MAIN, RT_SCOPE_LINK, RTN_UNICAST)
                .attribute(RTA_OIF, &ETH0.to_ne_bytes())
                .attribute(RTA_PREFSRC, address),
        );
        add(
            "make all addresses local",
            new(RTM_NEWROUTE)
                .default_route(family_byte, ALL_LOCAL, RT_SCOPE_HOST, RTN_LOCAL)
                .attribute(RTA_OIF, &LOOPBACK.to_ne_bytes())
                .attribute(RTA_PREFSRC, address),
        );
        for (priority, protocol) in (100u32..).zip(protocols) {
            let (table, action) = match protocol {
                libc::IPPROTO_TCP | libc::IPPROTO_UDP => (ALL_LOCAL, FR_ACT_TO_TBL),
                _ => (0, FR_ACT_UNREACHABLE),
            };
            let mut message = new(RTM_NEWRULE)
                .rule(family_byte, table, action)
                .attribute(FRA_PRIORITY, &priority.to_ne_bytes())
                .attribute(FRA_IP_PROTO, &[u8::try_from(protocol).unwrap_or_default()]);
            if action == FR_ACT_TO_TBL {
                message = message.attribute(FRA_TABLE, &u32::from(table).to_ne_bytes());
            }
            add("add a routing rule", message);
        }
    }
    requests
}

/// Sets up the network of the namespace that the caller is in, with capability NET_ADMIN over it.
pub(crate) fn configure(kind: &str) -> io::Result<()> {
    perform(requests(kind))
}

/// Lets the kernel answer for every address in the namespace that the caller is in, or ends that. While nothing listens for
/// the outside, it refuses what arrives for an address outside only if that is in the table of local addresses: the
/// refusal has that address as its source.
pub(crate) fn answer_for_all(is_on: bool) -> io::Result<()> {
    let (kind, flags, what) = if is_on {
        (RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, "answer for all addresses")
    } else {
        (RTM_DELROUTE, 0, "answer for own addresses alone")
    };
    let families = [libc::AF_INET, libc::AF_INET6];
    let requests = families.map(|family| Request {
        bytes: Message::new(kind, flags)
            .default_route(
                u8::try_from(family).unwrap_or_default(),
                RT_TABLE_LOCAL,
                RT_SCOPE_HOST,
                RTN_LOCAL,
            )
            .attribute(RTA_OIF, &LOOPBACK.to_ne_bytes())
            .finish(),
        what,
        may_fail: family == libc::AF_INET6,
    });
    perform(requests.into())
}

fn perform(requests: Vec<Request>) -> io::Result<()> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None, // NETLINK_ROUTE is protocol 0
    )?;
    // One message for all: the kernel handles them in order and acknowledges each.
    let all: Vec<u8> = requests.iter().flat_map(|request| &request.bytes).copied().collect();
    rustix::net::send(&socket, &all, SendFlags::empty())?;
    let mut reply = [0; 4096];
    for Request { what, may_fail, .. } in requests {
        let (_, length) = rustix::net::recv(&socket, &mut reply[..], RecvFlags::empty())?;
        match acknowledged(&reply[..length]) {
            Err(error) if !may_fail => return Err(io::Error::new(error.kind(), format!("{what}: {error}"))),
            _ => {}
        }
    }
    Ok(())
}

/// The first of [`KINDS`] that this kernel has, found by trying in the namespace that the caller is in.
pub(crate) fn first_kind() -> io::Result<usize> {
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for (index, kind) in KINDS.iter().enumerate() {
        let mut links = requests(kind);
        links.truncate(LINKS);
        match perform(links) {
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
        for Request { bytes, .. } in requests(KINDS[0]) {
            assert_eq!(u32::from_ne_bytes(bytes[..4].try_into().unwrap()) as usize, bytes.len());
            assert_eq!(bytes.len() % 4, 0);
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

//! What a gateway needs in the network of a sandbox: sockets to which everything is delivered that is sent to other
//! addresses than the sandbox's own.
//!
//! Inside, all addresses are local for TCP and UDP (see `crate::netlink`). A small program in the kernel, attached to
//! the network namespace, chooses the gateway's socket for each new connection and each datagram to an address that is
//! not the sandbox's own. It takes precedence over sockets of the sandbox, so no program inside can be in the way of the
//! gateway or pretend to be it. The destination is the local address of an accepted connection.
//!
//! The program is plumbing and not the boundary: there is no other way out of the namespace. When the platform ends, the
//! kernel detaches it, and nothing answers any more.
//!
//! Answers to datagrams are sent through raw sockets, with the address of the server as the source. Sockets that are
//! bound to it would occupy its port for the programs inside.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, sockopt};

use crate::bpf;
use crate::netlink::{ADDRESS, ADDRESS6};
use crate::netns::SocketMaker;
use crate::sys;

/// Address that the gateway's sockets are bound to, and at which its resolver answers. It belongs to no interface.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// A port that programs do not use: it is not available to them.
const PORT: u16 = 1;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// Largest payload of a UDP datagram over IPv4, in bytes. Over IPv6, loopback carries 19 bytes less.
pub const DATAGRAM_MAX: usize = 65_507;
const IPV4_HEADER: usize = 20;
const IPV6_HEADER: usize = 40;
const UDP_HEADER: usize = 8;
const ICMP_HEADER: usize = 8;
const TTL: u8 = 64;

/// The gateway's sockets in the network of a sandbox. They and the program that delivers to them are removed on drop.
#[derive(Debug)]
pub struct EgressSockets {
    tcp: TcpListener,
    udp: OwnedFd,
    raw: OwnedFd,
    /// None where IPv6 is disabled.
    raw6: Option<OwnedFd>,
    _link: OwnedFd,
}

impl EgressSockets {
    /// Opens the sockets in this network namespace.
    ///
    /// # Errors
    /// When the kernel does not support it, or port 1 of the namespace is in use.
    pub(crate) fn open(maker: &SocketMaker, namespace: BorrowedFd<'_>) -> io::Result<Self> {
        let sockets = maker.run(namespace, Sockets::open)?;
        let map = bpf::sys::socket_map(2)?;
        bpf::sys::set_socket(map.as_fd(), TCP_KEY, sockets.tcp.as_fd())?;
        bpf::sys::set_socket(map.as_fd(), UDP_KEY, sockets.udp.as_fd())?;
        let program = bpf::sys::load_sk_lookup(&program(map.as_fd()))?;
        let link = bpf::sys::attach(program.as_fd(), namespace)?;
        Ok(Self {
            tcp: sockets.tcp.into(),
            udp: sockets.udp,
            raw: sockets.raw,
            raw6: sockets.raw6,
            _link: link,
        })
    }

    /// Whether the kernel supports all that is needed, tried in the network namespace of the calling thread.
    ///
    /// # Errors
    /// With the step that failed.
    pub(crate) fn probe() -> io::Result<()> {
        let map = bpf::sys::socket_map(2)?;
        bpf::sys::load_sk_lookup(&program(map.as_fd())).map(drop)
    }

    /// The non-blocking socket that accepts TCP connections. The local address of a connection is its destination.
    ///
    /// # Errors
    /// When the descriptor cannot be duplicated.
    pub fn tcp(&self) -> io::Result<TcpListener> {
        self.tcp.try_clone()
    }

    /// The socket that becomes readable when datagrams wait for [`Self::receive`].
    #[must_use]
    pub fn udp(&self) -> BorrowedFd<'_> {
        self.udp.as_fd()
    }

    /// Receives a datagram of the sandbox without waiting. Returns its length, its source and its destination.
    ///
    /// # Errors
    /// With [`io::ErrorKind::WouldBlock`] when none waits.
    pub fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)> {
        sys::receive_with_destination(self.udp.as_fd(), buffer)
    }

    /// Sends a datagram to the sandbox as if it came from `from`.
    ///
    /// # Errors
    /// When the families differ, the payload is too long, or the kernel refuses it.
    pub fn send(&self, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.send_raw(&udp_packet(from, to, payload)?, to)
    }

    /// Tells the sender of a datagram that it was refused by policy, as a router does: with an ICMP error.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn refuse(&self, source: SocketAddr, destination: SocketAddr) -> io::Result<()> {
        self.send_raw(&refusal(source, destination)?, source)
    }

    fn send_raw(&self, packet: &[u8], to: SocketAddr) -> io::Result<()> {
        let unsupported = io::ErrorKind::Unsupported;
        let (socket, to) = match to {
            SocketAddr::V4(to) => (&self.raw, SocketAddr::new(IpAddr::V4(*to.ip()), 0)),
            SocketAddr::V6(to) => (
                self.raw6.as_ref().ok_or(unsupported)?,
                SocketAddr::new(IpAddr::V6(*to.ip()), 0),
            ),
        };
        rustix::net::sendto(socket, packet, SendFlags::DONTWAIT, &to)?;
        Ok(())
    }
}

/// The sockets, made in the namespace of the calling thread.
#[derive(Debug)]
struct Sockets {
    tcp: OwnedFd,
    udp: OwnedFd,
    raw: OwnedFd,
    raw6: Option<OwnedFd>,
}

impl Sockets {
    fn open() -> io::Result<Self> {
        let raw6 = socket(AddressFamily::INET6, SocketType::RAW, Some(rustix::net::ipproto::RAW));
        let (family, address) = match &raw6 {
            // It accepts IPv4 too.
            Ok(_) => (
                AddressFamily::INET6,
                SocketAddr::V6(SocketAddrV6::new(GATEWAY.to_ipv6_mapped(), PORT, 0, 0)),
            ),
            Err(_) => (AddressFamily::INET, SocketAddr::from((GATEWAY, PORT))),
        };
        let tcp = socket(family, SocketType::STREAM, None)?;
        let udp = socket(family, SocketType::DGRAM, None)?;
        for socket in [&tcp, &udp] {
            sys::set_transparent(socket.as_fd())?;
            // Connections occupy the port of their destination only for servers inside that do not share ports.
            sockopt::set_socket_reuseaddr(socket, true)?;
        }
        sys::set_receive_destinations(udp.as_fd(), raw6.is_ok())?;
        rustix::net::bind(&tcp, &address)?;
        rustix::net::bind(&udp, &address)?;
        rustix::net::listen(&tcp, BACKLOG)?;
        let raw = socket(AddressFamily::INET, SocketType::RAW, Some(rustix::net::ipproto::RAW))?;
        if let Ok(raw6) = &raw6 {
            sys::set_ipv6_header_included(raw6.as_fd())?;
        }
        Ok(Self {
            tcp,
            udp,
            raw,
            raw6: raw6.ok(),
        })
    }
}

fn socket(
    family: AddressFamily,
    kind: SocketType,
    protocol: Option<rustix::net::Protocol>,
) -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, protocol)
}

const TCP_KEY: u32 = 0;
const UDP_KEY: u32 = 1;

/// The program that chooses the socket of a packet: none of the gateway's for addresses of the sandbox itself, which are
/// loopback, those of `eth0` and link-local ones.
fn program(map: BorrowedFd<'_>) -> Vec<u64> {
    use std::os::fd::AsRawFd;

    use crate::bpf::Instruction;
    use crate::bpf::op::{
        ADD, AND, CALL, COPY, EXIT, IF_EQUAL, IF_NOT_EQUAL, JUMP, LOAD, LOAD_MAP, MOVE, OR_REGISTER, STORE,
    };
    // Offsets in `struct bpf_sk_lookup`.
    const FAMILY: i16 = 8;
    const PROTOCOL: i16 = 12;
    const LOCAL_IP4: i16 = 40;
    const LOCAL_IP6: i16 = 44;
    // Helpers.
    const MAP_LOOKUP: i32 = 1;
    const SK_RELEASE: i32 = 86;
    const SK_ASSIGN: i32 = 124;
    const SK_PASS: i32 = 1;
    // Marks of jump targets, as offsets that are resolved at the end.
    const V4: i16 = 1000;
    const NOT_OWN: i16 = 1001;
    const LINK_LOCAL: i16 = 1002;
    const GATEWAY: i16 = 1003;
    const PASS: i16 = 1004;
    const MARK: u8 = 0;

    let net = |bytes: [u8; 4]| i32::from_ne_bytes(bytes);
    let word = |at: usize| net([ADDRESS6[at], ADDRESS6[at + 1], ADDRESS6[at + 2], ADDRESS6[at + 3]]);
    let (r0, r1, r2, r3, r4, r5, r6, r7, r10) = (0, 1, 2, 3, 4, 5, 6, 7, 10);
    let code: [Instruction; 46] = [
        Instruction(COPY, r6, r1, 0, 0),
        // The key: on the stack, because lookups take a pointer.
        Instruction(LOAD, r2, r6, PROTOCOL, 0),
        Instruction(MOVE, r3, 0, 0, TCP_KEY.cast_signed()),
        Instruction(IF_EQUAL, r2, 0, 1, libc::IPPROTO_TCP),
        Instruction(MOVE, r3, 0, 0, UDP_KEY.cast_signed()),
        Instruction(STORE, r10, r3, -4, 0),
        Instruction(LOAD, r2, r6, FAMILY, 0),
        Instruction(IF_EQUAL, r2, 0, V4, libc::AF_INET),
        Instruction(LOAD, r2, r6, LOCAL_IP6, 0),
        Instruction(LOAD, r3, r6, LOCAL_IP6 + 4, 0),
        Instruction(LOAD, r4, r6, LOCAL_IP6 + 8, 0),
        Instruction(LOAD, r5, r6, LOCAL_IP6 + 12, 0),
        // ::1
        Instruction(COPY, r7, r2, 0, 0),
        Instruction(OR_REGISTER, r7, r3, 0, 0),
        Instruction(OR_REGISTER, r7, r4, 0, 0),
        Instruction(IF_NOT_EQUAL, r7, 0, NOT_OWN, 0),
        Instruction(IF_EQUAL, r5, 0, PASS, net([0, 0, 0, 1])),
        Instruction(JUMP, 0, 0, GATEWAY, 0),
        // eth0
        Instruction(MARK, 0, 0, NOT_OWN, 0),
        Instruction(IF_NOT_EQUAL, r2, 0, LINK_LOCAL, word(0)),
        Instruction(IF_NOT_EQUAL, r3, 0, LINK_LOCAL, word(4)),
        Instruction(IF_NOT_EQUAL, r4, 0, LINK_LOCAL, word(8)),
        Instruction(IF_EQUAL, r5, 0, PASS, word(12)),
        // fe80::/10
        Instruction(MARK, 0, 0, LINK_LOCAL, 0),
        Instruction(AND, r2, 0, 0, net([0xff, 0xc0, 0, 0])),
        Instruction(IF_EQUAL, r2, 0, PASS, net([0xfe, 0x80, 0, 0])),
        Instruction(JUMP, 0, 0, GATEWAY, 0),
        Instruction(MARK, 0, 0, V4, 0),
        Instruction(LOAD, r2, r6, LOCAL_IP4, 0),
        Instruction(IF_EQUAL, r2, 0, PASS, net(ADDRESS)),
        // 127.0.0.0/8
        Instruction(AND, r2, 0, 0, net([0xff, 0, 0, 0])),
        Instruction(IF_EQUAL, r2, 0, PASS, net([127, 0, 0, 0])),
        Instruction(MARK, 0, 0, GATEWAY, 0),
        Instruction(LOAD_MAP, r1, 1, 0, map.as_raw_fd()),
        Instruction(COPY, r2, r10, 0, 0),
        Instruction(ADD, r2, 0, 0, -4),
        Instruction(CALL, 0, 0, 0, MAP_LOOKUP),
        Instruction(IF_EQUAL, r0, 0, PASS, 0),
        Instruction(COPY, r7, r0, 0, 0),
        Instruction(COPY, r1, r6, 0, 0),
        Instruction(COPY, r2, r0, 0, 0),
        Instruction(MOVE, r3, 0, 0, 0),
        Instruction(CALL, 0, 0, 0, SK_ASSIGN),
        Instruction(COPY, r1, r7, 0, 0),
        Instruction(CALL, 0, 0, 0, SK_RELEASE),
        Instruction(MARK, 0, 0, PASS, 0),
    ];
    let end = [Instruction(MOVE, r0, 0, 0, SK_PASS), Instruction(EXIT, 0, 0, 0, 0)];
    let code: Vec<_> = code.into_iter().chain(end).collect();
    // Marks vanish, and loading a map takes two instructions.
    let length = |opcode: u8| match opcode {
        MARK => 0,
        LOAD_MAP => 2,
        _ => 1,
    };
    let position = |end: usize| {
        code.iter()
            .take(end)
            .map(|Instruction(opcode, ..)| length(*opcode))
            .sum::<i16>()
    };
    let target = |mark: i16| {
        let at = code
            .iter()
            .position(|Instruction(opcode, _, _, offset, _)| *opcode == MARK && *offset == mark);
        position(at.unwrap_or(code.len()))
    };
    let mut instructions = Vec::with_capacity(code.len() + 1);
    for (index, &Instruction(opcode, dst, src, offset, immediate)) in code.iter().enumerate() {
        let offset = match opcode {
            MARK => continue,
            JUMP | IF_EQUAL | IF_NOT_EQUAL if offset >= V4 => target(offset) - position(index) - 1,
            _ => offset,
        };
        bpf::push(&mut instructions, Instruction(opcode, dst, src, offset, immediate));
    }
    instructions
}

/// A UDP datagram with its IP header.
fn udp_packet(from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<Vec<u8>> {
    let length = u16::try_from(UDP_HEADER + payload.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut datagram = Vec::with_capacity(IPV6_HEADER + usize::from(length));
    datagram.extend(from.port().to_be_bytes());
    datagram.extend(to.port().to_be_bytes());
    datagram.extend(length.to_be_bytes());
    datagram.extend([0; 2]);
    datagram.extend(payload);
    let protocol = u8::try_from(libc::IPPROTO_UDP).unwrap_or_default();
    let sum = match checksum(
        &pseudo_header(from.ip(), to.ip(), protocol, u32::from(length)),
        &datagram,
    ) {
        0 => u16::MAX, // zero means none
        sum => sum,
    };
    datagram[6..8].copy_from_slice(&sum.to_be_bytes());
    packet(from.ip(), to.ip(), protocol, &datagram)
}

/// An ICMP error for a datagram: communication administratively prohibited (RFC 1812 section 5.2.7.1, RFC 4443 section
/// 3.1). The receiver is found by the addresses and ports in it.
fn refusal(source: SocketAddr, destination: SocketAddr) -> io::Result<Vec<u8>> {
    let mut refused = Vec::with_capacity(UDP_HEADER);
    refused.extend(source.port().to_be_bytes());
    refused.extend(destination.port().to_be_bytes());
    refused.extend(u16::try_from(UDP_HEADER).unwrap_or_default().to_be_bytes());
    refused.extend([0; 2]);
    let udp = u8::try_from(libc::IPPROTO_UDP).unwrap_or_default();
    let refused = packet(source.ip(), destination.ip(), udp, &refused)?;
    let (protocol, kind, code) = match source {
        SocketAddr::V4(_) => (libc::IPPROTO_ICMP, 3, 13),
        SocketAddr::V6(_) => (libc::IPPROTO_ICMPV6, 1, 1),
    };
    let protocol = u8::try_from(protocol).unwrap_or_default();
    let mut message = vec![kind, code, 0, 0, 0, 0, 0, 0];
    debug_assert_eq!(message.len(), ICMP_HEADER);
    message.extend(refused);
    let length = u32::try_from(message.len()).unwrap_or_default();
    let pseudo = match source {
        SocketAddr::V4(_) => Vec::new(),
        SocketAddr::V6(_) => pseudo_header(destination.ip(), source.ip(), protocol, length),
    };
    let sum = checksum(&pseudo, &message);
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    packet(destination.ip(), source.ip(), protocol, &message)
}

/// An IP packet.
fn packet(from: IpAddr, to: IpAddr, protocol: u8, content: &[u8]) -> io::Result<Vec<u8>> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let mut packet = Vec::with_capacity(IPV6_HEADER + content.len());
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let length = u16::try_from(IPV4_HEADER + content.len()).map_err(invalid)?;
            packet.extend([0x45, 0]);
            packet.extend(length.to_be_bytes());
            packet.extend([0; 4]); // identification, flags, fragment
            packet.extend([TTL, protocol, 0, 0]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            let sum = checksum(&[], &packet);
            packet[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let length = u16::try_from(content.len()).map_err(invalid)?;
            packet.extend([0x60, 0, 0, 0]);
            packet.extend(length.to_be_bytes());
            packet.extend([protocol, TTL]);
            packet.extend(from.octets());
            packet.extend(to.octets());
        }
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    }
    packet.extend(content);
    Ok(packet)
}

/// The addresses, protocol and length that the checksums of UDP and ICMPv6 cover (RFC 768, RFC 8200 section 8.1).
fn pseudo_header(from: IpAddr, to: IpAddr, protocol: u8, length: u32) -> Vec<u8> {
    let mut header = Vec::with_capacity(40);
    for address in [from, to] {
        match address {
            IpAddr::V4(address) => header.extend(address.octets()),
            IpAddr::V6(address) => header.extend(address.octets()),
        }
    }
    header.extend(length.to_be_bytes());
    header.extend(u32::from(protocol).to_be_bytes());
    header
}

/// The internet checksum (RFC 1071) of two parts, the first of even length.
fn checksum(first: &[u8], second: &[u8]) -> u16 {
    let sum = |part: &[u8]| -> u64 {
        let words = part.chunks(2).map(|pair| match pair {
            [high, low] => u64::from(u16::from_be_bytes([*high, *low])),
            [high] => u64::from(*high) << 8,
            _ => 0,
        });
        words.sum()
    };
    let mut sum = sum(first) + sum(second);
    while sum > u64::from(u16::MAX) {
        sum = (sum & u64::from(u16::MAX)) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_verify() {
        // The example of RFC 1071 section 3.
        assert_eq!(
            checksum(&[], &[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]),
            !0xddf2
        );
        assert_eq!(checksum(&[0x00, 0x01], &[0xf2]), !0xf201);
        let addresses = |a: &str, b: &str| (a.parse::<SocketAddr>().unwrap(), b.parse::<SocketAddr>().unwrap());
        for (from, to) in [
            addresses("1.2.3.4:53", "10.0.0.2:4000"),
            addresses("[2001:4860::8]:443", "[fd00::2]:9"),
        ] {
            let packet = udp_packet(from, to, b"odd").unwrap();
            let header = if from.is_ipv4() { IPV4_HEADER } else { IPV6_HEADER };
            let pseudo = pseudo_header(from.ip(), to.ip(), 17, 11);
            assert_eq!(checksum(&pseudo, &packet[header..]), 0);
            assert_eq!(&packet[header + UDP_HEADER..], b"odd");
            let refused = refusal(to, from).unwrap();
            let pseudo = match from {
                SocketAddr::V4(_) => Vec::new(),
                SocketAddr::V6(_) => pseudo_header(from.ip(), to.ip(), 58, 56),
            };
            assert_eq!(checksum(&pseudo, &refused[header..]), 0);
        }
        assert!(udp_packet("1.1.1.1:1".parse().unwrap(), "[::1]:1".parse().unwrap(), b"").is_err());
        assert!(udp_packet("1.1.1.1:1".parse().unwrap(), "1.1.1.1:1".parse().unwrap(), &[0; 65_536]).is_err());
    }

    #[test]
    fn jumps_of_the_program_stay_inside() {
        let map = std::fs::File::open("/dev/null").unwrap();
        let program = program(map.as_fd());
        let length = i64::try_from(program.len()).unwrap();
        for (at, instruction) in (0i64..).zip(&program) {
            let bytes = instruction.to_ne_bytes();
            if matches!(bytes[0], 0x05 | 0x15 | 0x55) {
                let target = at + 1 + i64::from(i16::from_ne_bytes([bytes[2], bytes[3]]));
                assert!(target > at && target < length, "instruction {at} jumps to {target}");
            }
        }
    }
}

//! Whether the host would deliver packets for an address itself.
//!
//! The routing table is asked for each connection, so addresses that the host gets later are known at once, and so are
//! those that belong to no interface.

use std::io;
use std::net::IpAddr;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const RTA_DST: u16 = 1;
const RTN_UNICAST: u8 = 1;
/// Bytes of `struct nlmsghdr`, and offset of `rtm_type` behind it.
const HEADER: usize = 16;
const TYPE: usize = 7;

/// Whether packets to the address leave the host, or would if there were a route. An address of which that is not known
/// is not remote.
pub(super) fn is_remote(address: IpAddr) -> bool {
    match route_type(address) {
        Ok(kind) => kind == RTN_UNICAST,
        Err(error) => {
            let no_route = [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EACCES, libc::EINVAL];
            error.raw_os_error().is_some_and(|number| no_route.contains(&number))
        }
    }
}

/// The type of the route to an address, by number of the kernel.
fn route_type(address: IpAddr) -> io::Result<u8> {
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None, // NETLINK_ROUTE is protocol 0
    )?;
    rustix::net::send(&socket, &request(address), SendFlags::empty())?;
    let mut reply = [0; 1024];
    // The kernel answers during the call before.
    let (_, length) = rustix::net::recv(&socket, &mut reply[..], RecvFlags::DONTWAIT)?;
    answer(&reply[..length])
}

fn request(address: IpAddr) -> Vec<u8> {
    let (family, octets) = match address {
        IpAddr::V4(address) => (libc::AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6, address.octets().to_vec()),
    };
    let mut message = Vec::with_capacity(HEADER + 32);
    message.extend([0; 4]);
    message.extend(RTM_GETROUTE.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    message.extend([0; 8]); // sequence number and port id
    message.push(u8::try_from(family).unwrap_or_default());
    message.push(u8::try_from(octets.len() * 8).unwrap_or_default());
    message.extend([0; 10]);
    message.extend(u16::try_from(octets.len() + 4).unwrap_or_default().to_ne_bytes());
    message.extend(RTA_DST.to_ne_bytes());
    message.extend(octets);
    let length = u32::try_from(message.len()).unwrap_or_default();
    message[..4].copy_from_slice(&length.to_ne_bytes());
    message
}

fn answer(reply: &[u8]) -> io::Result<u8> {
    let malformed = || io::Error::from(io::ErrorKind::InvalidData);
    let kind = reply
        .get(4..6)
        .and_then(|bytes| bytes.try_into().ok())
        .map(u16::from_ne_bytes);
    match kind.ok_or_else(malformed)? {
        RTM_NEWROUTE => reply.get(HEADER + TYPE).copied().ok_or_else(malformed),
        NLMSG_ERROR => {
            let number = reply.get(HEADER..HEADER + 4).and_then(|bytes| bytes.try_into().ok());
            Err(io::Error::from_raw_os_error(
                -number.map(i32::from_ne_bytes).ok_or_else(malformed)?,
            ))
        }
        _ => Err(malformed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_host_are_not_remote() {
        for own in ["127.0.0.1", "127.1.2.3", "::1"] {
            assert!(!is_remote(own.parse().unwrap()), "{own}");
        }
        // There may be no route to them here, but they do not belong to the host.
        for other in ["8.8.8.8", "2606:4700::1111"] {
            assert!(is_remote(other.parse().unwrap()), "{other}");
        }
    }

    #[test]
    fn malformed_replies_are_errors() {
        for reply in [&[][..], &[0; 5], &[0; 16], &[0; 40]] {
            assert!(answer(reply).is_err());
        }
        let mut reply = [0; HEADER + 12];
        reply[4..6].copy_from_slice(&RTM_NEWROUTE.to_ne_bytes());
        reply[HEADER + TYPE] = 2;
        assert_eq!(answer(&reply).unwrap(), 2);
        assert!(answer(&reply[..HEADER]).is_err());
    }
}

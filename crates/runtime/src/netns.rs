//! Sockets inside a sandbox's network namespace.
//!
//! A socket stays in the namespace it was made in, so the host needs no interface, no address and no route to reach
//! a server in a sandbox, not even one that listens on 127.0.0.1 only. Making one costs about 3 µs.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::sys;

/// Makes sockets in other network namespaces.
///
/// The calling thread is in the other namespace for the length of two system calls and nothing else runs on it
/// meanwhile, so any thread will do, a worker of an async runtime included.
#[derive(Debug)]
pub(crate) struct SocketMaker {
    home: OwnedFd,
}

impl SocketMaker {
    /// For threads whose home is the namespace of the calling one.
    ///
    /// # Errors
    /// When that namespace cannot be opened.
    pub(crate) fn new() -> io::Result<Self> {
        let home = rustix::fs::open(
            "/proc/thread-self/ns/net",
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Self { home })
    }

    /// A non-blocking stream socket in `namespace`.
    ///
    /// # Errors
    /// When the namespace cannot be entered or the family is not available in it.
    pub(crate) fn stream(&self, namespace: BorrowedFd<'_>, family: AddressFamily) -> io::Result<OwnedFd> {
        sys::in_namespace(namespace, self.home.as_fd(), || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?)
        })
    }

    /// A socket that asks for the sockets of `namespace`.
    pub(crate) fn diagnosis(&self, namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        sys::in_namespace(namespace, self.home.as_fd(), || {
            let protocol = Some(rustix::net::netlink::SOCK_DIAG);
            Ok(rustix::net::socket_with(
                AddressFamily::NETLINK,
                SocketType::RAW,
                SocketFlags::CLOEXEC,
                protocol,
            )?)
        })
    }
}

/// Address of the sandbox's own `eth0`, the same in every sandbox.
pub(crate) const ETH0_ADDRESS: std::net::Ipv4Addr = {
    let [a, b, c, d] = crate::netlink::ADDRESS;
    std::net::Ipv4Addr::new(a, b, c, d)
};

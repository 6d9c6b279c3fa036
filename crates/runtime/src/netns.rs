//! Sockets inside a sandbox's network namespace.
//!
//! A socket stays in the namespace where it was created, so the host needs no interface, address or route to reach a
//! server in a sandbox, not even one that listens on 127.0.0.1 only. Creating one takes about 3 µs.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::sys;

/// Creates sockets in other network namespaces.
///
/// The calling thread is in the other namespace for two system calls and runs nothing else meanwhile, so it may be any
/// thread, including a worker of an async runtime.
#[derive(Debug)]
pub(crate) struct SocketMaker {
    home: OwnedFd,
}

impl SocketMaker {
    /// For threads whose own namespace is that of the calling thread.
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

    /// Runs `open` in `namespace`. It must only make sockets.
    pub(crate) fn run<T>(&self, namespace: BorrowedFd<'_>, open: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        sys::in_namespace(namespace, self.home.as_fd(), open)
    }

    /// A socket that lists the sockets of `namespace`.
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

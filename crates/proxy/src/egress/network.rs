//! What the gateway needs of the network of a sandbox.

use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::BorrowedFd;

/// The gateway's sockets in the network of a sandbox.
pub trait SandboxNetwork: Debug + Send + Sync + 'static {
    /// A non-blocking listener that accepts every TCP connection to other addresses than the sandbox's own. The local
    /// address of a connection is its destination.
    ///
    /// # Errors
    /// When it cannot be duplicated.
    fn tcp(&self) -> io::Result<TcpListener>;

    /// The descriptor that becomes readable when datagrams wait for [`Self::receive`].
    fn udp(&self) -> BorrowedFd<'_>;

    /// Receives a datagram of the sandbox without waiting. Returns its length, its source and its destination.
    ///
    /// # Errors
    /// With [`io::ErrorKind::WouldBlock`] when none waits.
    fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)>;

    /// Sends a datagram to the sandbox as if it came from `from`.
    ///
    /// # Errors
    /// When it is too long, or the kernel refuses it.
    fn send(&self, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()>;

    /// The address at which the resolver answers.
    fn resolver(&self) -> IpAddr;

    /// Tells the sender of a datagram that it was refused.
    ///
    /// # Errors
    /// As [`Self::send`].
    fn refuse(&self, source: SocketAddr, destination: SocketAddr) -> io::Result<()>;
}

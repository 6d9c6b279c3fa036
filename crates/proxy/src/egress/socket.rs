//! TCP sockets of the gateway: how they are connected to the outside, and what their close tells the other side.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::sizes::Sizes;

/// How long a destination may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long one of several addresses of a domain may take.
const CONNECT_NEXT: Duration = Duration::from_secs(5);
/// Addresses of a domain that are tried.
pub(super) const ADDRESSES_MAX: usize = 4;
/// Idle time after which a silent destination is checked, interval and number of checks: a destination that vanished
/// resets the connection after two minutes and a half.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(15), 6);

/// Connects to the first address that accepts.
pub(super) async fn connect(addresses: &[SocketAddr], sizes: Sizes) -> io::Result<TcpStream> {
    let patience = if addresses.len() > 1 {
        CONNECT_NEXT
    } else {
        CONNECT_TIMEOUT
    };
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match timeout(patience, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                stream.set_nodelay(true)?;
                let (idle, interval, count) = KEEPALIVE;
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, idle)?;
                sockopt::set_tcp_keepintvl(&stream, interval)?;
                sockopt::set_tcp_keepcnt(&stream, count)?;
                sizes.bound_outside(&stream)?;
                return Ok(stream);
            }
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

/// Lets the close of a connection be a reset, also if this process is killed: a clean end would mean that all data was
/// delivered.
pub(super) fn reset_on_close(stream: &TcpStream) {
    if let Err(error) = stream.set_zero_linger() {
        tracing::debug!("reset a connection: {error}");
    }
}

/// Lets the close of a connection deliver what was sent.
pub(super) fn close_cleanly(stream: &TcpStream) {
    if let Err(error) = sockopt::set_socket_linger(stream, None) {
        tracing::debug!("close a connection: {error}");
    }
}

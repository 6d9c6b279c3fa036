//! Streams to ports inside a sandbox, through sockets created in its network namespace.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::net::AddressFamily;
use tokio::net::TcpStream;

use crate::netns::{ETH0_ADDRESS, SocketMaker};

/// Addresses that are tried, in this order. The sockets are created inside the sandbox, so a server that listens on
/// loopback only is reachable, too.
const ADDRESSES: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
    IpAddr::V4(ETH0_ADDRESS),
];

/// How long a connection may wait in a full backlog.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Connects to a port in a network namespace.
pub(crate) async fn dial(maker: &SocketMaker, namespace: BorrowedFd<'_>, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::ConnectionRefused);
    if port == 0 {
        return Err(last);
    }
    for address in ADDRESSES {
        let connecting = connect(maker, namespace, SocketAddr::new(address, port));
        match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(error) => last = error.into(),
        }
    }
    Err(last)
}

async fn connect(maker: &SocketMaker, namespace: BorrowedFd<'_>, address: SocketAddr) -> io::Result<TcpStream> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = maker.stream(namespace, family)?;
    // On loopback this connects or is refused immediately, except when the backlog is full.
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let stream = TcpStream::from_std(std::net::TcpStream::from(socket))?;
    stream.writable().await?;
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    stream.set_nodelay(true)?;
    // A socket that connects to an unused port on its own address can become its own peer (TCP self-connect).
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

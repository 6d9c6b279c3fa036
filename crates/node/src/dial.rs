//! Streams to ports inside a sandbox.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use protocol::node::{DialError, SandboxStream};
use runtime::driver::Sandbox;
use runtime::netns::{ETH0_ADDRESS, SocketMaker};
use tokio::net::TcpStream;

/// Where a server inside may listen, in the order tried. The sockets are made inside the sandbox, so one that is bound
/// to loopback only is reached as well as one that is bound to everything.
const ADDRESSES: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
    IpAddr::V4(ETH0_ADDRESS),
];

/// How long a server may leave a connection unaccepted in a full backlog.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Connects to a port of a sandbox.
pub(crate) async fn dial(
    maker: &SocketMaker,
    sandbox: &Arc<dyn Sandbox>,
    port: u16,
) -> Result<SandboxStream, DialError> {
    if port == 0 {
        return Err(DialError::PortClosed);
    }
    for address in ADDRESSES {
        let connecting = connect(maker, sandbox, SocketAddr::new(address, port));
        if let Ok(Ok(stream)) = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
            return Ok(stream);
        }
    }
    Err(DialError::PortClosed)
}

async fn connect(maker: &SocketMaker, sandbox: &Arc<dyn Sandbox>, address: SocketAddr) -> io::Result<TcpStream> {
    let socket = sandbox.tcp_socket(maker, address.is_ipv6())?;
    // On loopback this connects or is refused at once, except when the backlog is full.
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
    // A server that connects to itself on an unused port would be its own peer.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

//! Listening, and connections: each request on one goes to the [`Handler`].

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdUnixListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use protocol::agent::{CONTROL_SOCKET, PORT};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use super::http::Body;
use crate::quiet::{Held, Quiet};
use crate::sys;

/// Client connections at a time. An SDK opens at most 210.
const CONNECTIONS: usize = 1024;
/// How long a connection may be idle. Proxies keep theirs up to 620 s and must be the ones to close them.
const IDLE: Duration = Duration::from_secs(640);
/// Bytes of a connection's buffer each way, and the limit of a request's head. All connections together may hold
/// `CONNECTIONS` times twice this, which is the price of being called by hostile code.
const BUFFER: usize = 64 * 1024;

/// Who is at the other end of a connection.
#[derive(Debug, Clone)]
pub(crate) enum Peer {
    /// Clients through the ingress, and code in the sandbox.
    Client,
    /// The host, on this connection. It needs no token, and may use the control routes.
    Host(Rc<OwnedFd>),
}

/// What answers requests.
pub(crate) trait Handler: 'static {
    /// Answers one request.
    async fn answer(&self, peer: &Peer, request: Request<Incoming>) -> Response<Body>;
}

/// The clients' port on every address, of both families where there are two.
///
/// # Errors
/// Those of the system calls; without IPv6 only those of IPv4 count.
pub(crate) fn listen_tcp() -> io::Result<TcpListener> {
    let bind = |family| -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if family == AddressFamily::INET6 {
            sockopt::set_ipv6_v6only(&socket, false)?;
            rustix::net::bind(&socket, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, PORT, 0, 0))?;
        } else {
            rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, PORT))?;
        }
        rustix::net::listen(&socket, 1024)?;
        Ok(socket)
    };
    let socket = bind(AddressFamily::INET6).or_else(|_| bind(AddressFamily::INET))?;
    TcpListener::from_std(socket.into())
}

/// The socket on which the host finds the agent again.
///
/// # Errors
/// Those of the system calls.
pub(crate) fn listen_control() -> io::Result<UnixListener> {
    let listener = StdUnixListener::bind_addr(&SocketAddr::from_abstract_name(CONTROL_SOCKET)?)?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Serves clients, forever.
pub(crate) async fn serve_tcp(handler: Rc<impl Handler>, tasks: TaskTracker, quiet: Rc<Quiet>, listener: TcpListener) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        quiet.until_loud().await;
        // The permit comes before the connection, so that a flood waits in the kernel's queue.
        let Ok(permit) = connections.clone().acquire_owned().await else {
            return;
        };
        let Ok((stream, _)) = listener.accept().await else {
            wait_for_descriptors().await;
            continue;
        };
        // Small messages are sent one at a time and waited for.
        let _ = stream.set_nodelay(true);
        let (handler, held) = (handler.clone(), quiet.hold_client());
        tasks.spawn_local(async move {
            serve_connection(handler, held, stream, Peer::Client).await;
            drop(permit);
        });
    }
}

/// Serves the host on the control socket, forever.
pub(crate) async fn serve_control(
    handler: Rc<impl Handler>,
    tasks: TaskTracker,
    quiet: Rc<Quiet>,
    listener: UnixListener,
) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            wait_for_descriptors().await;
            continue;
        };
        // Pid 0 is a process that has no pid in here. The address is open to everyone in this network namespace.
        if matches!(sys::peer_credentials(stream.as_fd()), Ok((0, _))) {
            tasks.spawn_local(serve_host(handler.clone(), quiet.hold(), stream));
        }
    }
}

/// Serves the host on one connection to its end.
pub(crate) async fn serve_host(handler: Rc<impl Handler>, held: Held, stream: UnixStream) {
    let Ok(connection) = stream.as_fd().try_clone_to_owned() else {
        return;
    };
    serve_connection(handler, held, stream, Peer::Host(Rc::new(connection))).await;
}

/// Accepting fails when descriptors or memory ran out; trying again at once would only spin.
async fn wait_for_descriptors() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

async fn serve_connection(
    handler: Rc<impl Handler>,
    mut held: Held,
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    peer: Peer,
) {
    let service = service_fn(move |request| {
        let (handler, peer) = (handler.clone(), peer.clone());
        async move { Ok::<_, Infallible>(handler.answer(&peer, request).await) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), service);
    // A broken connection is the peer's affair, and it knows. Dropped with all that it has before `held` is.
    tokio::select! {
        _ = served => {}
        () = held.until_quiet() => {}
    }
}

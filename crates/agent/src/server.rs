//! Listening, and the way of a request: cross-origin rules, token gate, Basic user, route.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdUnixListener};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{self, HeaderMap};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use protocol::agent::{CONTROL_SOCKET, PORT};
use protocol::connect::{Code, Error};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use crate::agent::{Agent, Caller};
use crate::http::{self as answers, Body, Query, header_text};
use crate::{control, events, files, filesystem, metrics, process, rpc, sys};

/// Client connections at a time. An SDK opens at most 210.
const CONNECTIONS: usize = 1024;
/// How long a connection may be idle. Proxies keep theirs up to 620 s and must be the ones to close them.
const IDLE: Duration = Duration::from_secs(640);
/// Bytes of a connection's buffer each way, and the limit of a request's head. All connections together may hold
/// `CONNECTIONS` times twice this, which is the price of being called by code that means harm.
const BUFFER: usize = 64 * 1024;

/// Who is at the other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Anybody: clients through the ingress, and code in the sandbox.
    Client,
    /// The host. It needs no token, and may use the control routes.
    Host,
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
pub(crate) async fn serve_tcp(agent: Rc<Agent>, listener: TcpListener) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
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
        let agent_of_it = agent.clone();
        agent.tasks.spawn_local(async move {
            serve_connection(agent_of_it, stream, Peer::Client).await;
            drop(permit);
        });
    }
}

/// Serves the host on the control socket, forever.
pub(crate) async fn serve_control(agent: Rc<Agent>, listener: UnixListener) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            wait_for_descriptors().await;
            continue;
        };
        // Pid 0 is a process that has no pid in here. The address is open to everyone in this network namespace.
        if matches!(sys::peer_credentials(stream.as_fd()), Ok((0, _))) {
            agent
                .tasks
                .spawn_local(serve_connection(agent.clone(), stream, Peer::Host));
        }
    }
}

/// Accepting fails when descriptors or memory ran out; trying again at once would only spin.
async fn wait_for_descriptors() {
    tokio::time::sleep(Duration::from_millis(10)).await;
}

/// Serves one connection to its end.
pub(crate) async fn serve_connection(
    agent: Rc<Agent>,
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    peer: Peer,
) {
    let service = service_fn(move |request| {
        let agent = agent.clone();
        async move { Ok::<_, Infallible>(answer(&agent, peer, request).await) }
    });
    // A broken connection is the peer's affair, and it knows.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn answer(agent: &Rc<Agent>, peer: Peer, request: Request<Incoming>) -> Response<Body> {
    if let Some(response) = answers::preflight(&request) {
        return response;
    }
    let cross_origin = request.headers().contains_key(header::ORIGIN);
    let mut response = match admit(agent, peer, &request) {
        Ok(caller) => Box::pin(route(agent, peer, caller, request)).await,
        Err(refusal) => {
            answers::read_on(request.into_body()).await;
            *refusal
        }
    };
    if cross_origin {
        answers::allow_any_origin(response.headers_mut());
    }
    response
}

/// The gate, and who the caller is. A refusal is boxed because it is rare and large.
fn admit(agent: &Agent, peer: Peer, request: &Request<Incoming>) -> Result<Caller, Box<Response<Body>>> {
    const REFUSAL: &str = "unauthorized access, please provide a valid access token or method signing if supported";
    let path = request.uri().path();
    if peer == Peer::Client {
        if control::is_reserved(path) {
            return Err(Box::new(not_found()));
        }
        let exempt = matches!(
            (request.method(), path),
            (&Method::GET, "/health" | "/files") | (&Method::POST, "/files")
        );
        let token = request
            .headers()
            .get("x-access-token")
            .map(header::HeaderValue::as_bytes);
        if !exempt && !agent.settings.borrow().admits(token) {
            return Err(Box::new(answers::error(StatusCode::UNAUTHORIZED, REFUSAL)));
        }
    }
    let Some(name) = basic_user(request.headers()) else {
        return Ok(Caller::default());
    };
    match agent.users.find(&name) {
        Some(user) => Ok(Caller { user: Some(user) }),
        None => {
            let error = Error::new(Code::Unauthenticated, format!("invalid username: '{name}'"));
            Err(Box::new(rpc::error_for(request.headers(), &error)))
        }
    }
}

/// The name in a Basic authorization; the password is nobody's.
fn basic_user(headers: &HeaderMap) -> Option<String> {
    let (scheme, encoded) = header_text(headers, header::AUTHORIZATION)?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
    decoded.split_once(':').map(|(name, _)| name.to_owned())
}

async fn route(agent: &Rc<Agent>, peer: Peer, caller: Caller, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    if let Some(method) = path.strip_prefix(protocol::process::SERVICE) {
        return process::serve(agent, caller, method, request)
            .await
            .unwrap_or_else(not_found);
    }
    if let Some(method) = path.strip_prefix(protocol::filesystem::SERVICE) {
        return filesystem::serve(agent, caller, method, request)
            .await
            .unwrap_or_else(not_found);
    }
    match (path.as_str(), request.method()) {
        ("/health", &Method::GET) => answers::no_content(),
        ("/envs", &Method::GET) => answers::json(StatusCode::OK, &agent.settings.borrow().env()),
        ("/files", &Method::GET | &Method::POST) => {
            let query = Query::parse(request.uri().query());
            files::serve(agent, peer, &query, request).await
        }
        ("/metrics", &Method::GET) => metrics::serve(agent).await,
        ("/files/compose", &Method::POST) => files::compose::serve(agent, request).await,
        ("/init", &Method::POST) if peer == Peer::Host => control::init(agent, request).await,
        ("/events", &Method::GET) if peer == Peer::Host => events::serve(agent),
        ("/health" | "/envs" | "/metrics", _) => wrong_method("GET"),
        ("/files", _) => wrong_method("GET, POST"),
        ("/files/compose", _) => wrong_method("POST"),
        _ => not_found(),
    }
}

fn not_found() -> Response<Body> {
    answers::text(StatusCode::NOT_FOUND, "404 page not found")
}

fn wrong_method(allowed: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::Empty);
    *response.status_mut() = StatusCode::METHOD_NOT_ALLOWED;
    response
        .headers_mut()
        .insert(header::ALLOW, header::HeaderValue::from_static(allowed));
    response
}

//! Interception of HTTPS connections to the hosts of injection rules, so that requests get headers that the sandbox does
//! not know.
//!
//! A connection is intercepted if its first bytes name a host that a rule is for, on the port of that rule; all others are
//! never decrypted. The network policy decides first, and interception opens nothing. The host is resolved here, and its
//! server must prove with a certificate that it is the host: neither the address that the program chose nor what it
//! claims can lead a secret elsewhere. There is one connection to the server for each of a program, with the HTTP version
//! that both support ([`upstream`]). Every request is judged by the rules of that moment ([`request`]).
//!
//! HTTP is read and written again by a library on both sides, so that both have the same idea of where a message ends.
//! Heads about which others could have another idea are refused ([`framing`]).

mod alpn;
mod authority;
mod body;
mod budget;
mod decode;
mod error;
mod framing;
mod io;
mod limits;
mod mask;
mod request;
mod rules;
mod state;
mod upstream;

use std::io as std_io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use model::injection::Interception;
use rustls::server::Acceptor;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::counters::Counters;
use super::outside::Outside;
use super::relay::Counts;
use super::sandbox::Sandbox;
use alpn::Alpn;
use framing::CheckedStream;
use io::ProgramStream;
use limits::{HEAD_BYTES, HEADERS, windows};
use request::Session;
use state::Activity;
use upstream::{Sender, Tasks};

pub use authority::{AuthorityError, authority_certificate};
pub(super) use rules::is_intercepted;
pub(super) use state::Interceptor;
pub(super) use upstream::UpstreamTls;

/// How long a program may take for its part of a handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a program may take for the head of a request, and may leave a connection unused.
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// How often idle connections are checked.
const IDLE_CHECK: Duration = Duration::from_secs(10);
/// How long a connection that is being closed may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Requests at a time on a connection with HTTP/2, and how many may have been reset without being answered.
const STREAMS: u32 = 100;
const RESETS: usize = 20;
const LOCAL_RESETS: usize = 100;
/// What a program may send ahead on a connection with HTTP/2: as much per stream, and four times that in all.
const WINDOW_BYTES: u32 = 128 << 10;
/// Bytes that HTTP/2 buffers per stream before they are sent.
const SEND_BYTES: usize = 64 << 10;

/// A connection that is to be intercepted.
pub(super) struct Intercepted {
    /// The name in its first bytes.
    pub(super) host: String,
    /// The address that the program chose.
    pub(super) destination: SocketAddr,
    /// Bytes that were read already.
    pub(super) first: Vec<u8>,
    /// Whether the sandbox has so many connections that each gets little memory.
    pub(super) is_of_many: bool,
}

/// Serves an intercepted connection until it ends.
///
/// # Errors
/// When there is no connection to the server, or the handshake with one of both sides fails.
pub(super) async fn serve(
    sandbox: &Arc<Sandbox>,
    interception: &Interception,
    stream: TcpStream,
    connection: Intercepted,
    connect: impl Future<Output = std_io::Result<Outside>>,
    counts: &Arc<Counts>,
) -> std_io::Result<()> {
    let Intercepted {
        host,
        destination,
        first,
        is_of_many,
    } = connection;
    let settings = &sandbox.shared.settings;
    let cut = CancellationToken::new();
    // Whatever belongs to this connection ends with this future.
    let _cut = cut.clone().drop_guard();
    let tasks = Tasks {
        tasks: sandbox.shared.tasks.clone(),
        cut,
    };
    let authority = sandbox
        .interceptor
        .authority(&interception.ca_seed)
        .map_err(std_io::Error::other)?;
    let stream = ProgramStream::new(stream, first, Arc::clone(sandbox), Arc::clone(counts));
    let accept = timeout(HANDSHAKE_TIMEOUT, LazyConfigAcceptor::new(Acceptor::default(), stream));
    let (accepted, outside) = tokio::join!(accept, connect);
    let (accepted, outside) = (accepted??, outside?);
    let hello = accepted.client_hello();
    // What was decided about is the name that was found; TLS must have found the same.
    if !hello.server_name().is_some_and(|name| {
        let name = name.strip_suffix('.').unwrap_or(name);
        name.eq_ignore_ascii_case(&host)
    }) {
        return Err(std_io::Error::other("the server name is ambiguous"));
    }
    let offered: Vec<&[u8]> = hello.alpn().into_iter().flatten().collect();
    let offered: Vec<Alpn> = [Alpn::Http2, Alpn::Http1]
        .into_iter()
        .filter(|alpn| alpn.name().is_some_and(|name| offered.contains(&name)))
        .collect();
    let tls = &sandbox.shared.upstream_tls;
    let gone = CancellationToken::new();
    let (sender, alpn, failure) = match tls.connect(settings, &host, &offered, outside).await {
        Ok(upstream) => {
            let chosen = upstream.get_ref().1.alpn_protocol();
            let alpn = offered.iter().copied().find(|alpn| alpn.name() == chosen);
            let sender = Sender::new(upstream, &tasks, gone.clone(), is_of_many)
                .await
                .map_err(std_io::Error::other)?;
            (sender, alpn.unwrap_or(Alpn::None), None)
        }
        // The program is told over the protocol that it prefers.
        Err(error) => {
            let why = format!("no TLS with {host}: {error}");
            let alpn = offered.first().copied().unwrap_or(Alpn::None);
            (Sender::Failed(why.clone()), alpn, Some(why))
        }
    };
    let config = authority.config(&host, alpn).map_err(std_io::Error::other)?;
    let stream = timeout(HANDSHAKE_TIMEOUT, accepted.into_stream(config)).await??;
    sandbox.shared.counters.intercepted();
    let session = Arc::new(Session {
        sandbox: Arc::clone(sandbox),
        host,
        destination,
        sender,
        activity: Activity::new(),
        tasks,
        upgraded: TaskTracker::new(),
    });
    let upgraded = session.upgraded.clone();
    let ended = serve_http(stream, alpn, is_of_many, session, &gone, counts).await;
    tracing::trace!(?ended, "intercepted connection");
    upgraded.close();
    upgraded.wait().await;
    match failure {
        Some(why) => Err(std_io::Error::other(why)),
        None => Ok(()),
    }
}

/// Serves the requests of a program.
async fn serve_http(
    stream: TlsStream<ProgramStream>,
    alpn: Alpn,
    is_of_many: bool,
    session: Arc<Session>,
    gone: &CancellationToken,
    counts: &Counts,
) -> hyper::Result<()> {
    let (tasks, activity) = (session.tasks.clone(), Arc::clone(&session.activity));
    let counters: Arc<Counters> = Arc::clone(&session.sandbox.shared.counters);
    let service = service_fn(move |request| request::handle(Arc::clone(&session), request));
    // Both kinds of connection are driven in the same way, but have no common type.
    macro_rules! drive {
        ($connection:expr) => {{
            let mut connection = pin!($connection);
            let mut closing: Option<tokio::time::Instant> = None;
            loop {
                let close = tokio::select! {
                    biased;
                    ended = connection.as_mut() => break ended,
                    () = gone.cancelled(), if closing.is_none() => true,
                    () = tokio::time::sleep(IDLE_CHECK) => activity.idle() > IDLE_TIMEOUT,
                };
                // A connection that is being closed ends with its requests, or soon.
                // The program may take its time for what was sent already.
                let is_late = |since: tokio::time::Instant| {
                    since.elapsed() > CLOSE_TIMEOUT && activity.idle() > CLOSE_TIMEOUT && !counts.is_ending()
                };
                if closing.is_some_and(is_late) {
                    break Ok(());
                }
                if close && closing.is_none() {
                    closing = Some(tokio::time::Instant::now());
                    connection.as_mut().graceful_shutdown();
                }
            }
        }};
    }
    let (window, connection_window) = windows(WINDOW_BYTES, is_of_many);
    match alpn {
        Alpn::Http2 => drive!(
            http2::Builder::new(tasks.clone())
                .timer(TokioTimer::new())
                .auto_date_header(false)
                .max_header_list_size(HEAD_BYTES)
                .max_concurrent_streams(STREAMS)
                .max_pending_accept_reset_streams(RESETS)
                .max_local_error_reset_streams(LOCAL_RESETS)
                .initial_stream_window_size(window)
                .initial_connection_window_size(connection_window)
                .max_send_buf_size(SEND_BYTES)
                .serve_connection(TokioIo::new(stream), service)
        ),
        Alpn::Http1 | Alpn::None => drive!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .auto_date_header(false)
                .header_read_timeout(IDLE_TIMEOUT)
                .max_headers(HEADERS)
                .max_buf_size(HEAD_BYTES as usize)
                .preserve_header_case(true)
                .serve_connection(TokioIo::new(CheckedStream::new(stream, counters)), service)
                .with_upgrades()
        ),
    }
}

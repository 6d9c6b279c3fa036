//! The one port: accepts connections, tells TLS from plain HTTP and HTTP/1.1 from HTTP/2, and sends each request to a
//! sandbox or to the API.

mod malformed;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use proxy::ingress::Ingress;
use proxy::ingress::answer::Answer;
use proxy::ingress::client::ClientConnection;
use proxy::ingress::route::{Route, Target, route};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;
use tracing::Instrument as _;

use self::malformed::{Turn, WholeAnswers};
use crate::lifecycle::Platform;
use crate::tls::{self, Tls};

/// How long a new connection may take until its first request is there.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// How long a connection may idle between requests: longer than any client keeps one, so that the client closes first
/// and never sends a request into a closing connection.
const IDLE: Duration = Duration::from_secs(620);
/// Interval and patience of HTTP/2 pings, which find clients that vanished.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(15));
/// HTTP/2 window of a stream, in bytes: it must be able to carry a file at the speed of loopback.
const WINDOW_BYTES: u32 = 2 * 1024 * 1024;
/// HTTP/2 streams of one connection; SDKs open one per running command.
const STREAMS: u32 = 1000;
/// Pause after the system refused a connection, most likely for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Header that carries the id of an API request.
const REQUEST_ID: &str = "x-request-id";

/// What the server answers requests with at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Nothing yet: it does not know which sandboxes live.
    Starting,
    /// Everything.
    Ready,
    /// Only what is already on its way.
    Draining,
}

/// Where requests go.
#[derive(Debug)]
pub(crate) struct Site {
    platform: Arc<Platform>,
    api: Router,
    ingress: Ingress,
    tls: Option<Tls>,
    phase: AtomicU8,
    /// API requests that are being answered.
    pub(crate) requests: TaskTracker,
}

impl Site {
    pub(crate) fn new(platform: Arc<Platform>, api: Router, ingress: Ingress, tls: Option<Tls>) -> Self {
        Self {
            platform,
            api,
            ingress,
            tls,
            phase: AtomicU8::new(Phase::Starting as u8),
            requests: TaskTracker::new(),
        }
    }

    pub(crate) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    fn is_ready(&self) -> bool {
        self.phase.load(Ordering::Acquire) == Phase::Ready as u8
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let route = route(&parts);
        let request = Request::from_parts(parts, body);
        match route {
            Ok(Route::Api) => self.answer_from_api(request).await,
            Ok(_) if !self.is_ready() => self.own(request, &Answer::Unavailable),
            Ok(Route::Sandbox(target)) => self.answer_from_sandbox(request, target).await,
            Ok(Route::SignedFile(signed)) => match self.platform.live.signer(&signed) {
                Some(id) => {
                    let port = protocol::agent::PORT;
                    self.answer_from_sandbox(request, Target { id, port }).await
                }
                None => self.own(request, &Answer::BadSignature),
            },
            Err(bad) => self.own(request, &Answer::BadRequest(bad.message())),
        }
    }

    async fn answer_from_sandbox(&self, request: Request<Incoming>, target: Target) -> Response<Body> {
        let find = |id: &_| self.platform.live.access(id);
        let method = request.method().clone();
        let response = self.ingress.serve(request, &target, find).await;
        self.platform.metrics.proxied(response.status());
        // Neither path nor query: both are the client's business with the sandbox, and signatures are in them.
        tracing::debug!(
            sandbox.id = %target.id,
            port = target.port,
            %method,
            status = response.status().as_u16(),
            "sandbox traffic"
        );
        response.map(Body::new)
    }

    /// An answer of the proxy's own to a request that no sandbox gets.
    fn own(&self, request: Request<Incoming>, answer: &Answer) -> Response<Body> {
        self.ingress.answer(request, answer).map(Body::new)
    }

    async fn answer_from_api(&self, request: Request<Incoming>) -> Response<Body> {
        let begun = Instant::now();
        let id = uuid::Uuid::now_v7().simple().to_string();
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let span = tracing::info_span!("request", request.id = %id, team.id = tracing::field::Empty);
        let mut response = if self.is_ready() {
            let _answering = self.requests.token();
            let answer = self.api.clone().oneshot(request.map(Body::new));
            match answer.instrument(span.clone()).await {
                Ok(response) => response,
                Err(infallible) => match infallible {},
            }
        } else {
            crate::api::unavailable()
        };
        if let Ok(id) = HeaderValue::try_from(id) {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        let status = response.status().as_u16();
        let duration_ms = begun.elapsed().as_secs_f64() * 1000.0;
        span.in_scope(|| tracing::info!(%method, path, status, duration_ms, "answered"));
        response
    }
}

/// Accepts connections until `stop`, and serves each on `tasks` until it is done or `abort`.
pub(crate) async fn accept(
    listener: TcpListener,
    site: Arc<Site>,
    tasks: TaskTracker,
    (stop, abort): (CancellationToken, CancellationToken),
) {
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((tcp, _)) => {
                // An answer must not wait for the acknowledgement of the one before.
                let _ = tcp.set_nodelay(true);
                let both = (stop.clone(), abort.clone());
                tasks.spawn(serve(tcp, Arc::clone(&site), tasks.clone(), both));
            }
            Err(error) if is_about_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

/// Serves one connection, with TLS or without.
async fn serve(
    tcp: TcpStream,
    site: Arc<Site>,
    tasks: TaskTracker,
    (stop, abort): (CancellationToken, CancellationToken),
) {
    let deadline = tokio::time::Instant::now() + FIRST_REQUEST;
    let Some(tls) = site.tls.clone() else {
        let (stream, client) = ClientConnection::new(tcp);
        return serve_stream(stream, client, site, tasks, deadline, (stop, abort)).await;
    };
    let greeting = async {
        match tokio::time::timeout_at(deadline, tls::begins(&tcp)).await {
            Ok(Ok(is_tls)) => Some(is_tls),
            // Gone, or silent for too long.
            Ok(Err(_)) | Err(_) => None,
        }
    };
    let is_tls = tokio::select! {
        biased;
        () = stop.cancelled() => return,
        greeting = greeting => greeting,
    };
    let (stream, client) = ClientConnection::new(tcp);
    match is_tls {
        None => {}
        Some(false) => serve_stream(stream, client, site, tasks, deadline, (stop, abort)).await,
        Some(true) => {
            let accepted = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                accepted = tls.accept(stream) => accepted,
            };
            match accepted {
                // Boxed, so that plain connections do not carry the room for its state.
                Ok(stream) => Box::pin(serve_stream(stream, client, site, tasks, deadline, (stop, abort))).await,
                Err(error) => tracing::debug!(%error, "TLS handshake"),
            }
        }
    }
}

/// Serves the requests of one connection, the first of which must come before `deadline`. Dropping its stream after a
/// cut resets it, so every way out of here is one.
async fn serve_stream<S>(
    stream: S,
    client: ClientConnection,
    site: Arc<Site>,
    tasks: TaskTracker,
    deadline: tokio::time::Instant,
    (stop, abort): (CancellationToken, CancellationToken),
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let began = CancellationToken::new();
    let turn = Turn::default();
    let stream = WholeAnswers::new(stream, turn.clone());
    let service = {
        let (client, began) = (client.clone(), began.clone());
        service_fn(move |mut request: Request<Incoming>| {
            began.cancel();
            turn.begin();
            request.extensions_mut().insert(client.clone());
            let (site, turn) = (Arc::clone(&site), turn.clone());
            async move { Ok::<_, Infallible>(turn.follow(Box::pin(site.answer(request)).await)) }
        })
    };
    let mut builder = auto::Builder::new(OnTracker(tasks));
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1)
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(2 * WINDOW_BYTES)
        .max_concurrent_streams(STREAMS);
    let mut connection = Box::pin(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let mut first_request = Box::pin(async {
        if tokio::time::timeout_at(deadline, began.cancelled()).await.is_ok() {
            std::future::pending::<()>().await;
        }
    });
    let mut draining = false;
    loop {
        tokio::select! {
            biased;
            () = client.was_cut() => return,
            () = abort.cancelled() => {
                client.cut();
                return;
            }
            () = stop.cancelled(), if !draining => {
                draining = true;
                connection.as_mut().graceful_shutdown();
            }
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(%error, "connection");
                }
                return;
            }
            () = first_request.as_mut() => return,
        }
    }
}

/// Runs the streams of an HTTP/2 connection on a tracker.
#[derive(Debug, Clone)]
struct OnTracker(TaskTracker);

impl<F> Executor<F> for OnTracker
where
    F: Future<Output: Send + 'static> + Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

//! The gateway: accepts connections, detects TLS, HTTP/1.1 and HTTP/2 on one port, and routes each request to a sandbox
//! or to the API.

pub(crate) mod connections;
mod credentials;
mod forward;
pub(crate) mod forwarding;
pub(crate) mod from_others;
pub(crate) mod lanes;
mod links;
mod malformed;

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, ready};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use http::header::Entry;
use http::{HeaderValue, Request, Response, Version, header};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use model::id::SandboxId;
use protocol::node::NodeError;
use proxy::ingress::answer::Answer;
use proxy::ingress::client::ClientConnection;
use proxy::ingress::route::{BadRoute, Route, SignedFile, Target, route};
use proxy::ingress::{Access, ClientBody, Ingress, refusal};
use store::Store;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tower::ServiceExt as _;
use tracing::Instrument as _;

use self::connections::{Connection, Connections};
use self::credentials::CredentialFilter;
use self::forwarding::Forwarding;
use self::links::{Elsewhere, SignedLinks};
use self::malformed::{ErrorBodyStream, ResponseState};
use crate::api::ApiAddress;
use crate::authentication::Authenticator;
use crate::builds::Builds;
use crate::dashboard::{self, Dashboard, Visit};
use crate::metrics::Metrics;
use crate::peers::{ClientPeer, PeerRates};
use crate::sandboxes::Sandboxes;
use crate::sandboxes::pause::PauseError;
use crate::sandboxes::registry::Registry;
use crate::signature::Signatures;
use crate::telemetry::RequestId;
use crate::tls::{self, Tls};

/// Interval and timeout of HTTP/2 pings, which detect vanished clients.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(15));
/// HTTP/2 windows of a stream and of a connection, in bytes: a stream must be able to transfer a file at the speed of
/// loopback, and what a sandbox does not read is buffered up to the second.
const WINDOW_BYTES: (u32, u32) = (1024 * 1024, 2 * 1024 * 1024);
/// Send buffer of one HTTP/2 stream for a client that does not read, in bytes.
const SEND_BYTES: usize = 64 * 1024;
/// Maximum size of a request head, in bytes: over HTTP/1 a little more than the 64 KiB that its target may have, so
/// that a longer target gets a proper error.
const HEAD_BYTES: (usize, u32) = (80 * 1024, 64 * 1024);
/// Burst and refill interval of TLS handshakes of one peer: they are the most expensive operation for clients without
/// credentials. Further handshakes wait.
const HANDSHAKES: (u32, Duration) = (256, Duration::from_millis(20));
/// HTTP/2 streams of one connection; SDKs open one per running command.
const STREAMS: u32 = 1000;
/// Pause after `accept` failed, most likely because there are no file descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How many bodies of create requests are held at the same time whose clients are not known before they are read, as they sign
/// them.
const UNKNOWN_BODIES: usize = 64;

/// How long a request waits for the sandbox that it resumes.
const WAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// Header that carries the id of an API request.
const REQUEST_ID: &str = "x-request-id";

/// The requests that the server serves at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// No requests: the takeover of existing sandboxes is in progress.
    Starting,
    /// All requests.
    Ready,
    /// Only requests in progress.
    Draining,
}

/// Services that the gateway uses.
#[derive(Debug)]
pub(crate) struct GatewayServices {
    /// To recognize the platform's credentials, which are not forwarded to sandboxes.
    pub(crate) store: Store,
    /// The sandboxes, which traffic may resume.
    pub(crate) sandboxes: Arc<Sandboxes>,
    /// The builds, which keep what children of forks are started from.
    pub(crate) builds: Arc<Builds>,
    /// The sandboxes and the credentials that their traffic requires.
    pub(crate) registry: Arc<Registry>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) dashboard: Arc<Dashboard>,
    /// To know clients before what they send is held for another server.
    pub(crate) authenticator: Arc<Authenticator>,
    pub(crate) signatures: Arc<Signatures>,
    /// Client connections.
    pub(crate) connections: Arc<Connections>,
    /// The certificate, if the port also serves HTTPS.
    pub(crate) tls: Option<Tls>,
}

/// What answers requests that are not for sandboxes.
#[derive(Debug)]
pub(crate) struct Routers {
    pub(crate) api: Router,
    pub(crate) operator: Router,
}

/// Routes requests to the API and to sandboxes.
#[derive(Debug)]
pub(crate) struct Gateway {
    services: GatewayServices,
    api: Router,
    /// The operator API, for sessions of the operator.
    operator: Router,
    address: ApiAddress,
    ingress: Ingress,
    /// To other servers; none where this one works alone.
    forwarding: OnceLock<Arc<Forwarding>>,
    links: SignedLinks,
    credentials: CredentialFilter,
    handshakes: PeerRates,
    /// Runtime of API requests: separate from connections, so that sandbox traffic cannot delay them.
    control: Handle,
    /// Turns of create requests whose bodies are held before their clients are known.
    unknown_bodies: Arc<Semaphore>,
    phase: AtomicU8,
    /// API requests in progress.
    pub(crate) requests: TaskTracker,
}

impl Gateway {
    /// A gateway whose API runs on the runtime of the caller.
    pub(crate) fn new(services: GatewayServices, routers: Routers, address: ApiAddress, ingress: Ingress) -> Self {
        let Routers { api, operator } = routers;
        Self {
            services,
            api,
            operator,
            address,
            ingress,
            forwarding: OnceLock::new(),
            links: SignedLinks::default(),
            credentials: CredentialFilter::default(),
            handshakes: PeerRates::new(HANDSHAKES.0, HANDSHAKES.1),
            control: Handle::current(),
            unknown_bodies: Arc::new(Semaphore::new(UNKNOWN_BODIES)),
            phase: AtomicU8::new(Phase::Starting as u8),
            requests: TaskTracker::new(),
        }
    }

    /// Forwards what is about sandboxes of other servers from now on.
    pub(crate) fn forward_with(&self, forwarding: Arc<Forwarding>) {
        // Only the start of a server does, once.
        let _ = self.forwarding.set(forwarding);
    }

    pub(crate) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.phase.load(Ordering::Acquire) == Phase::Ready as u8
    }

    async fn answer(&self, request: Request<Incoming>, client: ClientPeer) -> Response<Body> {
        let (mut parts, body) = request.into_parts();
        let route = route(&parts, &self.address);
        parts.extensions.insert(client);
        let mut body = self.ingress.body(parts.version, &parts.headers, body);
        let rest = if parts.version == Version::HTTP_2 {
            body.pending_upload()
        } else {
            None
        };
        let waits = parts.headers.contains_key(header::EXPECT);
        let response = self
            .answer_routed(route, Request::from_parts(parts, body), client)
            .await;
        match rest {
            Some(rest) if response.status().as_u16() >= 400 && !waits => {
                rest.finished().await;
                response
            }
            Some(rest) => response.map(|body| Body::new(rest.delay_end(body))),
            None => response,
        }
    }

    async fn answer_routed(
        &self,
        route: Result<Route, BadRoute>,
        request: Request<ClientBody>,
        client: ClientPeer,
    ) -> Response<Body> {
        match route {
            Ok(Route::Api) if self.services.dashboard.takes(&request, client) => {
                Box::pin(self.answer_from_dashboard(request, client)).await
            }
            Ok(Route::Api) => self.answer_from_api(request).await,
            Ok(_) if !self.is_ready() => self.proxy_answer(&request, &Answer::Unavailable),
            Ok(Route::Sandbox(target)) => match self.forward_traffic(request, &target, client).await {
                Ok(response) => response,
                Err(request) => self.answer_from_sandbox(request, target).await,
            },
            Ok(Route::SignedFile(signed)) => match self.sandbox_of(&signed, client).await {
                Ok(id) => {
                    let port = protocol::agent::PORT;
                    let target = Target { id, port };
                    let mut response = match self.forward_traffic(request, &target, client).await {
                        Ok(response) => response,
                        Err(request) => self.answer_from_sandbox(request, target).await,
                    };
                    dashboard::at_own_origin(response.headers_mut());
                    response
                }
                Err(answer) => self.proxy_answer(&request, &answer),
            },
            Err(bad) => self.proxy_answer(&request, &Answer::BadRequest(bad.message())),
        }
    }

    /// The sandbox whose token has made the signature of a link.
    async fn sandbox_of(&self, signed: &SignedFile, client: ClientPeer) -> Result<SandboxId, Answer> {
        let elsewhere = self.forwarding.get().map(|forwarding| Elsewhere {
            others: forwarding.others(),
            tokens: &self.services.sandboxes.policies.tokens,
        });
        let found = self.links.find(&self.services.registry, signed, client.peer, elsewhere);
        found.await
    }

    async fn answer_from_dashboard(&self, request: Request<ClientBody>, client: ClientPeer) -> Response<Body> {
        let dashboard = &self.services.dashboard;
        match dashboard.admit(request, client, self.is_ready()).await {
            Visit::Answered(response) => response,
            Visit::Api(request) => dashboard.cleaned(self.answer_from_api(request).await).await,
            Visit::Operator(request) => match self.operator.clone().oneshot(request.map(Body::new)).await {
                Ok(response) => dashboard.cleaned(response).await,
                Err(infallible) => match infallible {},
            },
            Visit::Agent(call) => {
                let find = |id: &_| self.services.registry.access(id);
                let request = match self.forward_traffic(call.request, &call.target, client).await {
                    Ok(response) => return dashboard::from_agent(response, &call.reading),
                    Err(request) => request,
                };
                let response = self.ingress.serve(request, &call.target, find).await;
                self.services.metrics.proxy_request(response.status().as_u16());
                dashboard::from_agent(response.map(Body::new), &call.reading)
            }
        }
    }

    async fn answer_from_sandbox(&self, mut request: Request<ClientBody>, target: Target) -> Response<Body> {
        self.credentials
            .strip(&self.services.store, request.headers_mut())
            .await;
        dashboard::without_cookies(request.headers_mut());
        self.recall(&request, &target).await;
        if let Some(answer) = self.wake(&request, &target).await {
            self.services.metrics.proxy_request(answer.status().as_u16());
            return self.proxy_answer(&request, &answer);
        }
        if self.is_on_absent_node(&target.id) {
            self.services
                .metrics
                .proxy_request(Answer::Unavailable.status().as_u16());
            return self.proxy_answer(&request, &Answer::Unavailable);
        }
        let find = |id: &_| self.services.registry.access(id);
        let method = request.method().clone();
        let response = self.ingress.serve(request, &target, find).await;
        self.services.metrics.proxy_request(response.status().as_u16());
        // Neither path nor query: both are private to the client and the sandbox, and may contain signatures.
        tracing::debug!(
            sandbox.id = %target.id,
            port = target.port,
            %method,
            status = response.status().as_u16(),
            "sandbox traffic"
        );
        response.map(Body::new)
    }

    /// Whether a sandbox is on a node that is not served, where it goes on.
    fn is_on_absent_node(&self, id: &SandboxId) -> bool {
        self.services.registry.get(id).is_none() && self.services.sandboxes.nodes.is_absent(id)
    }

    /// Brings a paused sandbox of a node that is not served to another one, if its client wants traffic to resume it.
    async fn recall(&self, request: &Request<ClientBody>, target: &Target) {
        let sandboxes = &self.services.sandboxes;
        if sandboxes.parcels.is_none() || !self.is_on_absent_node(&target.id) || refusal(request, target).is_some() {
            return;
        }
        let Ok(Some(row)) = self.services.store.sandbox_by_id(&target.id).await else {
            return;
        };
        let may_resume = |access: Access| access.may_resume(request.headers(), target.port, row.secure);
        if sandboxes.access_to_recall(&row).is_some_and(may_resume) {
            let recalling = sandboxes.recall(row);
            // It goes on without this request.
            let _ = tokio::time::timeout(WAKE_TIMEOUT, recalling).await;
        }
    }

    /// Resumes a paused sandbox, if its client wants traffic to do so, and waits for it. Returns the answer where the
    /// request is not to be forwarded then.
    async fn wake(&self, request: &Request<ClientBody>, target: &Target) -> Option<Answer> {
        let entry = self.services.registry.asleep(&target.id)?;
        if let Some(refusal) = refusal(request, target) {
            return Some(refusal);
        }
        let (access, is_secure) = entry.required();
        if !access.may_resume(request.headers(), target.port, is_secure) {
            return Some(Answer::ResumeRefused(target.id.clone()));
        }
        let sandboxes = Arc::clone(&self.services.sandboxes);
        let waking = AbortOnDropHandle::new(self.control.spawn(async move { sandboxes.wake(&entry).await }));
        let id = target.id.clone();
        match tokio::time::timeout(WAKE_TIMEOUT, waking).await {
            Ok(Ok(Ok(()))) => None,
            // The answer is that for any sandbox that does not run.
            Ok(Ok(Err(PauseError::Gone | PauseError::Stopping | PauseError::Unsupported(_)))) => None,
            Ok(Ok(Err(PauseError::OverQuota(over)))) => Some(Answer::ResumeLimited {
                id,
                why: format!("Sandbox limit reached: {over}"),
            }),
            Ok(Ok(Err(PauseError::Node(NodeError::Busy {
                owner_limit: Some(limit),
            })))) => Some(Answer::ResumeLimited {
                id,
                why: format!("Restore limit reached: {limit} sandboxes of the team at the same time"),
            }),
            Ok(Ok(Err(PauseError::Lost(_)))) => Some(Answer::ResumeImpossible(id)),
            Ok(Ok(Err(PauseError::TooEarly(early)))) => Some(Answer::ResumeDelayed {
                id,
                seconds: early.wait_s,
            }),
            Ok(Ok(Err(_)) | Err(_)) | Err(_) => Some(Answer::Transitioning(id)),
        }
    }

    /// A response of the proxy itself to a request that is not forwarded to a sandbox.
    fn proxy_answer(&self, request: &Request<ClientBody>, answer: &Answer) -> Response<Body> {
        self.ingress.answer(request.headers(), answer).map(Body::new)
    }

    async fn answer_from_api(&self, request: Request<ClientBody>) -> Response<Body> {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let mut response = match self.forward_api(request).await {
            Ok(response) => response,
            Err(request) => return self.answer_from_api_here(request).await,
        };
        // What another server has answered has an id. What is answered here in its place gets one.
        if let Entry::Vacant(vacant) = response.headers_mut().entry(REQUEST_ID)
            && let id = uuid::Uuid::now_v7().simple().to_string()
            && let Ok(value) = HeaderValue::try_from(&id)
        {
            vacant.insert(value);
            let status = response.status().as_u16();
            tracing::info!(request.id = %id, %method, path, status, "not forwarded: answered in place of another server");
        }
        response
    }

    async fn answer_from_api_here(&self, mut request: Request<ClientBody>) -> Response<Body> {
        let begun = Instant::now();
        let id = uuid::Uuid::now_v7().simple().to_string();
        request.extensions_mut().insert(RequestId(id.as_str().into()));
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let span = tracing::info_span!("request", request.id = %id, team.id = tracing::field::Empty);
        let mut response = if self.is_ready() {
            let answering = self.requests.token();
            let answer = self
                .api
                .clone()
                .oneshot(request.map(Body::new))
                .instrument(span.clone());
            // When the client disconnects, its request is aborted.
            let answered = AbortOnDropHandle::new(self.control.spawn(async move {
                let _answering = answering;
                answer.await
            }));
            match answered.await {
                Ok(Ok(response)) => response,
                Ok(Err(infallible)) => match infallible {},
                // The router catches panics of handlers, so this means that the runtime is shutting down.
                Err(error) => {
                    tracing::error!(%error, "the task of a request failed");
                    crate::api::unavailable()
                }
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

/// How the bytes of a connection arrive.
#[derive(Debug, Clone, Copy)]
struct Transport {
    /// From this machine.
    is_loopback: bool,
    /// Encrypted.
    is_tls: bool,
}

/// What ends connections of clients that would stay.
#[derive(Debug, Clone)]
struct End {
    /// Requests in progress are still answered.
    drain: CancellationToken,
    /// The connection is cut.
    abort: CancellationToken,
}

/// Accepts connections until `stop` is cancelled, and serves each on `tasks` until it is closed or `abort` is
/// cancelled.
pub(crate) async fn accept(
    listener: TcpListener,
    gateway: Arc<Gateway>,
    tasks: TaskTracker,
    stop: CancellationToken,
    abort: CancellationToken,
) {
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((tcp, address)) => {
                let connections = &gateway.services.connections;
                let Some(connection) = connections.admit(connections.peer(address.ip())) else {
                    // A reset leaves no connection state that would have to time out.
                    let _ = tcp.set_zero_linger();
                    continue;
                };
                // A response must not wait for the acknowledgement of the previous one.
                let _ = tcp.set_nodelay(true);
                let runtime = connection.runtime().clone();
                let tcp = match moved(tcp, &runtime) {
                    Ok(tcp) => tcp,
                    Err(error) => {
                        tracing::error!(%error, "cannot give a connection to its thread, so it is closed");
                        continue;
                    }
                };
                let end = End {
                    drain: stop.clone(),
                    abort: abort.clone(),
                };
                tasks.spawn_on(
                    serve(tcp, connection, Arc::clone(&gateway), tasks.clone(), end),
                    &runtime,
                );
            }
            Err(error) if is_about_one_connection(&error) => {}
            Err(error) => {
                tracing::error!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The connection, polled by another runtime.
fn moved(tcp: TcpStream, runtime: &Handle) -> io::Result<TcpStream> {
    let tcp = tcp.into_std()?;
    let _entered = runtime.enter();
    TcpStream::from_std(tcp)
}

fn is_about_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

/// Serves one connection, with TLS or without.
async fn serve(tcp: TcpStream, connection: Arc<Connection>, gateway: Arc<Gateway>, tasks: TaskTracker, end: End) {
    let deadline = connection.deadline();
    let transport = Transport {
        is_loopback: tcp
            .peer_addr()
            .is_ok_and(|address| address.ip().to_canonical().is_loopback()),
        is_tls: false,
    };
    let Some(tls) = gateway.services.tls.clone() else {
        let (stream, client) = ClientConnection::new(tcp);
        return serve_stream(stream, transport, client, connection, gateway, tasks, end).await;
    };
    let protocol = async {
        match tokio::time::timeout_at(deadline, tls::starts_with_tls(&tcp)).await {
            Ok(Ok(is_tls)) => Some(is_tls),
            // Closed, or silent for too long.
            Ok(Err(_)) | Err(_) => None,
        }
    };
    let is_tls = tokio::select! {
        biased;
        () = end.drain.cancelled() => return,
        () = connection.evicted() => return,
        protocol = protocol => protocol,
    };
    let (stream, client) = ClientConnection::new(tcp);
    match is_tls {
        None => {}
        Some(false) => serve_stream(stream, transport, client, connection, gateway, tasks, end).await,
        Some(true) => {
            let turn = async {
                while let Some(Err(wait)) = connection.peer().map(|peer| gateway.handshakes.take(peer)) {
                    tokio::time::sleep(wait).await;
                }
            };
            let accepted = tokio::select! {
                biased;
                () = end.drain.cancelled() => return,
                () = connection.evicted() => return,
                accepted = tls.accept(stream, turn) => accepted,
            };
            match accepted {
                // Boxed, so that the futures of plain connections stay small.
                Ok(stream) => {
                    let transport = Transport {
                        is_tls: true,
                        ..transport
                    };
                    Box::pin(serve_stream(stream, transport, client, connection, gateway, tasks, end)).await;
                }
                Err(error) => tracing::debug!(%error, "TLS handshake failed"),
            }
        }
    }
}

/// Serves the requests of one connection. After a cut, dropping the stream resets the connection, so every return path
/// handles it.
async fn serve_stream<S>(
    stream: S,
    transport: Transport,
    client: ClientConnection,
    tracked: Arc<Connection>,
    gateway: Arc<Gateway>,
    tasks: TaskTracker,
    end: End,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let state = ResponseState::default();
    let stream = ErrorBodyStream::new(stream, state.clone(), Arc::clone(&tracked));
    let service = {
        let (client, tracked) = (client.clone(), Arc::clone(&tracked));
        service_fn(move |mut request: Request<Incoming>| {
            let in_progress = tracked.begin_request(request.version() < Version::HTTP_2);
            state.begin();
            request.extensions_mut().insert(client.clone());
            let peer = ClientPeer {
                peer: tracked.peer(),
                is_loopback: transport.is_loopback,
                is_tls: transport.is_tls,
            };
            let (gateway, state) = (Arc::clone(&gateway), state.clone());
            async move {
                let response = Box::pin(gateway.answer(request, peer)).await;
                if response.status().as_u16() < 400 {
                    in_progress.mark_good();
                }
                Ok::<_, Infallible>(state.track(response, in_progress))
            }
        })
    };
    let builder = http(tasks, None, HEAD_BYTES);
    let mut connection = Box::pin(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let mut overdue = Box::pin(overdue(Arc::clone(&tracked)));
    let mut draining = false;
    let mut evicted = false;
    loop {
        tokio::select! {
            biased;
            () = client.was_cut() => return,
            () = end.abort.cancelled() => {
                client.cut();
                return;
            }
            () = end.drain.cancelled(), if !draining => {
                draining = true;
                connection.as_mut().graceful_shutdown();
            }
            () = tracked.evicted(), if !evicted => {
                evicted = true;
                // A request that arrived at the same time is answered.
                if !tracked.is_busy() {
                    return;
                }
                connection.as_mut().graceful_shutdown();
            }
            result = connection.as_mut() => {
                if let Err(error) = result {
                    tracing::debug!(%error, "connection failed");
                }
                return;
            }
            // After the connection, because its reads extend the deadline.
            () = overdue.as_mut() => return,
        }
    }
}

/// HTTP on one connection: with a time for the head of a request over HTTP/1.1, if that has one, and with the most that a head may
/// have, in bytes.
fn http(tasks: TaskTracker, head_bound: Option<Duration>, head_bytes: (usize, u32)) -> auto::Builder<OnTracker> {
    let mut builder = auto::Builder::new(OnTracker(tasks));
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(head_bound)
        .preserve_header_case(true)
        .max_buf_size(head_bytes.0);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1)
        .initial_stream_window_size(WINDOW_BYTES.0)
        .initial_connection_window_size(WINDOW_BYTES.1)
        .max_send_buf_size(SEND_BYTES)
        .max_header_list_size(head_bytes.1)
        .max_concurrent_streams(STREAMS);
    builder
}

/// Returns once a connection has exceeded its deadline.
async fn overdue(tracked: Arc<Connection>) {
    let mut sleep = Box::pin(tokio::time::sleep_until(tracked.deadline()));
    std::future::poll_fn(|cx| {
        loop {
            let deadline = tracked.deadline();
            // A later deadline is only checked when the earlier one has passed, which saves resetting the timer for
            // each request.
            if deadline < sleep.deadline() {
                sleep.as_mut().reset(deadline);
            }
            ready!(sleep.as_mut().poll(cx));
            if deadline <= tokio::time::Instant::now() {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(deadline);
        }
    })
    .await;
}

/// Runs the streams of an HTTP/2 connection on a task tracker.
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

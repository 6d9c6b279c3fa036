//! Connections between two servers, over which one forwards requests to the other.
//!
//! The server that forwards opens the connection, to the port of nodes of the other one: mutual TLS 1.3, in which both show
//! certificates with the ids of servers, and HTTP/2. A stream carries the bytes of a connection of HTTP, and its path says what
//! it is about: so the other server says that it cannot answer before anything of a request was sent. Both have their own
//! connections for what they forward.
//!
//! Invariants: whoever has no certificate of a server opens no stream. A stream that was cut never looks as if it had ended. A
//! server that does not answer is noticed by pings, and until then nothing waits longer than [`OPEN_BOUND`] for a stream.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use h2::client::SendRequest;
use http::{Method, Request, Response, StatusCode};
use model::id::NodeId;
use parking_lot::Mutex;
use protocol::node::SandboxStream;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use crate::connection::{self, STREAMS_BETWEEN_SERVERS};
use crate::dialer::Address;
use crate::held::Held;
use crate::serve::Calls;
use crate::stream::LinkStream;
use crate::trust::{Authority, name_between_servers};

/// How long opening a stream may take, a connection included: whoever waits is a client with a request.
const OPEN_BOUND: Duration = Duration::from_secs(5);
/// How long a server that was not reached is not tried again. Requests meanwhile fail at once.
const PAUSE: Duration = Duration::from_millis(200);

/// Why no stream was opened to another server. Nothing was begun there.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The other server does not answer for what the stream was to be about.
    #[error("the other server says that it is not there")]
    NotThere,
    /// The other server takes no streams at the moment.
    #[error("the other server is starting, stopping or busy")]
    Busy,
    /// The other server was not reached.
    #[error("cannot reach the other server at {address}")]
    Unreachable {
        /// Its address.
        address: Address,
        /// Why.
        #[source]
        error: io::Error,
    },
}

/// What a stream carries. Neither takes the places of the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carried {
    /// Traffic of a sandbox.
    Traffic,
    /// Requests to the API.
    Api,
}

/// The answer of a server to a stream that is to be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// The stream is served.
    Yes,
    /// What it is about is not here.
    NotHere,
    /// No stream is served at the moment.
    Busy,
}

/// A boxed future of [`Answers`].
pub type ServedFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What serves the streams of other servers.
pub trait Answers: fmt::Debug + Send + Sync + 'static {
    /// Whether this server answers for what is at a path. It must not block.
    fn takes(&self, path: &str) -> Taken;

    /// Serves a stream of the server with this id, whose path it takes.
    fn serve(self: Arc<Self>, from: NodeId, stream: SandboxStream) -> ServedFuture;
}

#[derive(Default)]
struct State {
    current: Option<Current>,
    /// When the server was not reached last.
    failed: Option<Instant>,
}

struct Current {
    requests: SendRequest<Bytes>,
    /// Cancelled when the connection is lost.
    lost: CancellationToken,
    /// Ends the task of the connection.
    _end: DropGuard,
}

/// The way to another server. Its connection is opened when it is first needed.
pub struct ServerLink {
    authority: Arc<Authority>,
    own: NodeId,
    other: NodeId,
    address: Address,
    now: fn() -> SystemTime,
    /// The tasks of connections, and what ends them.
    tasks: TaskTracker,
    stop: CancellationToken,
    state: Mutex<State>,
    /// Held by the one that opens a connection.
    opening: tokio::sync::Mutex<()>,
    /// Places for streams with traffic.
    traffic: Arc<Semaphore>,
    /// Places for streams with requests to the API.
    api: Arc<Semaphore>,
}

impl fmt::Debug for ServerLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerLink")
            .field("other", &self.other)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

impl ServerLink {
    /// The way from the server `own` to `other`, which is at an address. Its connections are tasks, which end with the signal.
    #[must_use]
    pub fn new(
        authority: Arc<Authority>,
        own: NodeId,
        other: NodeId,
        address: Address,
        now: fn() -> SystemTime,
        (tasks, stop): (TaskTracker, CancellationToken),
    ) -> Self {
        Self {
            authority,
            own,
            other,
            address,
            now,
            tasks,
            stop,
            state: Mutex::default(),
            opening: tokio::sync::Mutex::default(),
            traffic: Arc::new(Semaphore::new(STREAMS_BETWEEN_SERVERS.0)),
            api: Arc::new(Semaphore::new(STREAMS_BETWEEN_SERVERS.1)),
        }
    }

    /// The other server.
    #[must_use]
    pub fn other(&self) -> &NodeId {
        &self.other
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Opens a stream about what is at a path.
    ///
    /// # Errors
    /// When the other server does not answer for it, or is not reached.
    pub async fn open(&self, path: &str, carried: Carried) -> Result<SandboxStream, OpenError> {
        let opened = tokio::time::timeout(OPEN_BOUND, self.open_unbounded(path, carried)).await;
        opened.unwrap_or_else(|elapsed| Err(self.unreachable(elapsed.into())))
    }

    fn unreachable(&self, error: io::Error) -> OpenError {
        OpenError::Unreachable {
            address: self.address.clone(),
            error,
        }
    }

    async fn open_unbounded(&self, path: &str, carried: Carried) -> Result<SandboxStream, OpenError> {
        let failed = |error: h2::Error| {
            if self.current().is_none() {
                // Whoever comes next must not connect at once again.
                self.state.lock().failed = Some(Instant::now());
            }
            self.unreachable(io::Error::other(error))
        };
        let places = match carried {
            Carried::Traffic => &self.traffic,
            Carried::Api => &self.api,
        };
        let place = Arc::clone(places).try_acquire_owned();
        let place = place.map_err(|_| OpenError::Busy)?;
        let mut requests = self.requests().await?.ready().await.map_err(failed)?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("https://server{path}"))
            .body(())
            .map_err(|error| self.unreachable(io::Error::other(error)))?;
        let (response, send) = requests.send_request(request, false).map_err(failed)?;
        let response = response.await.map_err(failed)?;
        match response.status() {
            StatusCode::OK => {
                let stream = LinkStream::of_answered(response.into_body(), send);
                Ok(SandboxStream::remote(Held::new(stream, place)))
            }
            StatusCode::NOT_FOUND => Err(OpenError::NotThere),
            _ => Err(OpenError::Busy),
        }
    }

    /// The connection that is there.
    fn current(&self) -> Option<SendRequest<Bytes>> {
        let state = self.state.lock();
        let current = state.current.as_ref().filter(|current| !current.lost.is_cancelled())?;
        Some(current.requests.clone())
    }

    async fn requests(&self) -> Result<SendRequest<Bytes>, OpenError> {
        if let Some(requests) = self.current() {
            return Ok(requests);
        }
        let _opening = self.opening.lock().await;
        if let Some(requests) = self.current() {
            return Ok(requests);
        }
        if self.state.lock().failed.is_some_and(|at| at.elapsed() < PAUSE) {
            let why = io::Error::new(io::ErrorKind::NotConnected, "it was not reached a moment ago");
            return Err(self.unreachable(why));
        }
        // Whoever waits gives up after a time; what follows is noted nevertheless.
        let noted = Noted(Some(&self.state));
        let connected = self.connect().await;
        noted.done();
        match connected {
            Ok(current) => {
                let requests = current.requests.clone();
                let mut state = self.state.lock();
                state.failed = None;
                state.current = Some(current);
                Ok(requests)
            }
            Err(error) => {
                self.state.lock().failed = Some(Instant::now());
                Err(self.unreachable(error))
            }
        }
    }

    async fn connect(&self) -> io::Result<Current> {
        let config = self.authority.between_servers(&self.own, (self.now)());
        let config = config.map_err(io::Error::other)?;
        let name = name_between_servers(&self.other).map_err(io::Error::other)?;
        let socket = TcpStream::connect(self.address.target()).await?;
        let tls = TlsConnector::from(config)
            .connect(name, connection::socket(socket)?)
            .await?;
        let handshake = connection::caller().handshake::<_, Bytes>(tls).await;
        let (requests, mut connection) = handshake.map_err(io::Error::other)?;
        let (lost, end) = (CancellationToken::new(), CancellationToken::new());
        let watch = connection::watch(connection.ping_pong());
        let (told, ended, other, stop) = (lost.clone(), end.clone(), self.other.clone(), self.stop.clone());
        self.tasks.spawn(async move {
            let why = tokio::select! {
                ended = connection => match ended {
                    Ok(()) => "it was closed".to_owned(),
                    Err(error) => error.to_string(),
                },
                why = watch => why.to_owned(),
                () = ended.cancelled() => "it is not needed any more".to_owned(),
                () = stop.cancelled() => "this server is being stopped".to_owned(),
            };
            told.cancel();
            tracing::info!(server.id = %other, "the connection to another server has ended: {why}");
        });
        tracing::info!(server.id = %self.other, address = %self.address, "connected to another server");
        Ok(Current {
            requests,
            lost,
            _end: end.drop_guard(),
        })
    }
}

/// Notes that a connection has failed if nobody waits for it any more.
struct Noted<'a>(Option<&'a Mutex<State>>);

impl Noted<'_> {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.0.take() {
            state.lock().failed = Some(Instant::now());
        }
    }
}

/// Serves the streams of another server on a connection until that is lost, and returns why. What it has begun is cut then. Requests
/// are answered on the runtime of `calls`, so that those of a busy server have more than one thread.
pub(crate) async fn serve<S>(answers: Arc<dyn Answers>, from: &NodeId, connection: S, calls: &Calls) -> io::Error
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut connection = match connection::between_servers().handshake::<_, Bytes>(connection).await {
        Ok(connection) => connection,
        Err(error) => return io::Error::other(error),
    };
    let watch = connection::watch(connection.ping_pong());
    let accepting = async {
        loop {
            let (request, mut respond) = match connection.accept().await {
                None => {
                    return io::Error::new(
                        io::ErrorKind::ConnectionAborted,
                        "the other server closed the connection",
                    );
                }
                Some(Err(error)) => return io::Error::other(error),
                Some(Ok(accepted)) => accepted,
            };
            let taken = answers.takes(request.uri().path());
            let mut response = Response::new(());
            *response.status_mut() = match taken {
                Taken::Yes => StatusCode::OK,
                Taken::NotHere => StatusCode::NOT_FOUND,
                Taken::Busy => StatusCode::SERVICE_UNAVAILABLE,
            };
            // Fails only if the stream was reset meanwhile.
            let Ok(send) = respond.send_response(response, taken != Taken::Yes) else {
                continue;
            };
            if taken == Taken::Yes {
                let stream = LinkStream::of_response(BytesMut::new(), request.into_body(), send);
                calls.spawn(Arc::clone(&answers).serve(from.clone(), SandboxStream::remote(stream)));
            }
        }
    };
    tokio::select! {
        error = accepting => error,
        why = watch => io::Error::new(io::ErrorKind::TimedOut, why),
    }
}

//! A front server like the platform's before a fake node, and ways to talk to both.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request, Response};
use http_body_util::{Either, Full};
use hyper::body::{Body, Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::agent;
use protocol::node::NodeApi;
use proxy::ingress::client::ClientConnection;
use proxy::ingress::route::{Api, Route, route};
use proxy::ingress::{Access, Ingress};
use testkit::node::FakeNode;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// The one sandbox there is.
pub(crate) const ID: &str = "iabc";

/// The platform's port with one sandbox behind it.
pub(crate) struct Front {
    pub(crate) addr: SocketAddr,
    pub(crate) node: Arc<FakeNode>,
    /// What the platform is told once the sandbox begins to end.
    pub(crate) ending: CancellationToken,
    pub(crate) stop: CancellationToken,
    /// What new connections are told about the sandbox.
    pub(crate) access: Arc<Mutex<Arc<Access>>>,
}

/// Starts a front; `ports` are the servers in the sandbox.
pub(crate) async fn front<const N: usize>(ports: [(u16, SocketAddr); N]) -> Front {
    front_with(ports, Access::default()).await
}

pub(crate) async fn front_with<const N: usize>(ports: [(u16, SocketAddr); N], access: Access) -> Front {
    front_of(ports, access, |ingress| ingress).await
}

/// Starts a front with limits on its connections into sandboxes, in total and per sandbox.
pub(crate) async fn front_limited<const N: usize>(
    ports: [(u16, SocketAddr); N],
    total: usize,
    per_sandbox: usize,
) -> Front {
    front_of(ports, Access::default(), |ingress| ingress.limited(total, per_sandbox)).await
}

async fn front_of<const N: usize>(
    ports: [(u16, SocketAddr); N],
    access: Access,
    adjust: impl FnOnce(Ingress) -> Ingress,
) -> Front {
    let mut ports = HashMap::from(ports);
    if let Entry::Vacant(port) = ports.entry(agent::PORT) {
        port.insert(origin(healthy).await);
    }
    let node = FakeNode::new();
    node.running.lock().insert(ID.parse().expect("an id"));
    *node.ports.lock() = ports;
    let ending = access.ending.clone();
    let access = Arc::new(Mutex::new(Arc::new(access)));
    let current = Arc::clone(&access);
    let stop = CancellationToken::new();
    let ingress = Ingress::new(Arc::clone(&node) as Arc<dyn NodeApi>, TaskTracker::new(), stop.clone());
    let ingress = adjust(ingress);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let access = Arc::clone(&*current.lock());
            tokio::spawn(serve(tcp, ingress.clone(), access));
        }
    });
    Front {
        addr,
        node,
        ending,
        stop,
        access,
    }
}

/// Answers one request like an agent that is running.
pub(crate) async fn healthy(mut wire: Wire) {
    wire.head().await;
    wire.write("HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n").await;
}

/// Nothing is for an API here.
struct NoApi;

impl Api for NoApi {
    fn is_at(&self, _: &str) -> bool {
        false
    }

    fn takes(&self, _: &Parts) -> bool {
        false
    }
}

async fn serve(tcp: TcpStream, ingress: Ingress, access: Arc<Access>) {
    let (stream, client) = ClientConnection::new(tcp);
    let connection = client.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(connection.clone());
        let (ingress, access) = (ingress.clone(), Arc::clone(&access));
        async move {
            let (parts, body) = request.into_parts();
            let target = match route(&parts, &NoApi) {
                Ok(Route::Sandbox(target)) => target,
                other => panic!("not for a sandbox: {other:?}"),
            };
            let mut body = ingress.body(parts.version, &parts.headers, body);
            let rest = body.pending_upload().filter(|_| parts.version == http::Version::HTTP_2);
            let request = Request::from_parts(parts, body);
            let find = |id: &SandboxId| (id.as_str() != "iunknown").then_some(access);
            let response = ingress.serve(request, &target, find).await;
            Ok::<_, Infallible>(match rest {
                Some(rest) => response.map(|body| Either::Left(rest.delay_end(body))),
                None => response.map(Either::Right),
            })
        }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().preserve_header_case(true);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::select! {
        () = client.was_cut() => {}
        _ = connection => {}
    }
}

/// A server in the sandbox that runs `script` on each connection.
pub(crate) async fn origin<F, Fut>(script: F) -> SocketAddr
where
    F: Fn(Wire) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            tokio::spawn(script(Wire::new(tcp)));
        }
    });
    addr
}

/// A server in the sandbox that speaks HTTP through hyper.
pub(crate) async fn http_origin<F, Fut>(answer: F) -> SocketAddr
where
    F: Fn(Request<Incoming>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let answer = answer.clone();
            let service = service_fn(move |request| {
                let answered = answer(request);
                async move { Ok::<_, Infallible>(answered.await) }
            });
            tokio::spawn(async move {
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(tcp), service)
                    .await;
            });
        }
    });
    addr
}

/// A connection that is read and written as bytes, with a bound on every wait.
pub(crate) struct Wire {
    pub(crate) tcp: TcpStream,
    read: Vec<u8>,
}

impl Wire {
    pub(crate) fn new(tcp: TcpStream) -> Self {
        Self { tcp, read: Vec::new() }
    }

    pub(crate) async fn connect(addr: SocketAddr) -> Self {
        Self::new(TcpStream::connect(addr).await.expect("connect"))
    }

    pub(crate) async fn write(&mut self, text: &str) {
        self.tcp.write_all(text.as_bytes()).await.expect("write");
    }

    /// Reads until `end` was read and returns everything up to it, the end included.
    pub(crate) async fn until(&mut self, end: &str) -> String {
        loop {
            if let Some(at) = find(&self.read, end.as_bytes()) {
                let rest = self.read.split_off(at + end.len());
                let head = std::mem::replace(&mut self.read, rest);
                return String::from_utf8(head).expect("text");
            }
            let mut buffer = [0; 4096];
            let got = within(self.tcp.read(&mut buffer)).await.expect("read");
            assert_ne!(
                got,
                0,
                "ended before {end:?}, after {:?}",
                String::from_utf8_lossy(&self.read)
            );
            self.read.extend_from_slice(&buffer[..got]);
        }
    }

    /// The head of the next message; none if the connection ends before it.
    pub(crate) async fn next_head(&mut self) -> Option<String> {
        if self.read.is_empty() {
            let mut buffer = [0; 4096];
            // Without a bound, because idle connections wait here.
            let got = self.tcp.read(&mut buffer).await.unwrap_or(0);
            if got == 0 {
                return None;
            }
            self.read.extend_from_slice(&buffer[..got]);
        }
        Some(self.head().await)
    }

    /// Reads that many bytes.
    pub(crate) async fn exactly(&mut self, bytes: usize) -> String {
        while self.read.len() < bytes {
            let mut buffer = [0; 4096];
            let got = within(self.tcp.read(&mut buffer)).await.expect("read");
            assert_ne!(got, 0, "ended before {bytes} bytes");
            self.read.extend_from_slice(&buffer[..got]);
        }
        let rest = self.read.split_off(bytes);
        String::from_utf8(std::mem::replace(&mut self.read, rest)).expect("text")
    }

    /// The head of a message.
    pub(crate) async fn head(&mut self) -> String {
        self.until("\r\n\r\n").await
    }

    /// Reads to the end: what came, and the error in place of a clean end.
    pub(crate) async fn rest(&mut self) -> (String, std::io::Result<()>) {
        let mut bytes = std::mem::take(&mut self.read);
        let mut buffer = [0; 4096];
        loop {
            match within(self.tcp.read(&mut buffer)).await {
                Ok(0) => return (String::from_utf8_lossy(&bytes).into_owned(), Ok(())),
                Ok(got) => bytes.extend_from_slice(&buffer[..got]),
                Err(error) => return (String::from_utf8_lossy(&bytes).into_owned(), Err(error)),
            }
        }
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

/// Fails a test that would hang.
pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(20), future)
        .await
        .expect("not within 20 s")
}

/// Sends one request as text, to be answered with a connection that closes.
pub(crate) async fn exchange(addr: SocketAddr, request: &str) -> String {
    let mut wire = Wire::connect(addr).await;
    wire.write(request).await;
    let (text, end) = wire.rest().await;
    end.expect("a clean end");
    text
}

/// `GET /` to a port of the sandbox, on a connection that closes.
pub(crate) fn get(port: u16) -> String {
    format!("GET / HTTP/1.1\r\nHost: {port}-{ID}.example.com\r\nConnection: close\r\n\r\n")
}

/// A body whose parts come over a channel, or none at all.
pub(crate) struct ChannelBody(Option<mpsc::Receiver<Frame<Bytes>>>);

impl ChannelBody {
    pub(crate) fn new() -> (mpsc::Sender<Frame<Bytes>>, Self) {
        let (parts, receiver) = mpsc::channel(8);
        (parts, Self(Some(receiver)))
    }

    pub(crate) fn empty() -> Self {
        Self(None)
    }
}

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.0 {
            Some(parts) => parts.poll_recv(cx).map(|part| part.map(Ok)),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

/// A client that speaks HTTP/2 without asking first.
pub(crate) async fn h2_client(front: &Front) -> hyper::client::conn::http2::SendRequest<ChannelBody> {
    let tcp = TcpStream::connect(front.addr).await.expect("connect");
    let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tcp))
        .await
        .expect("handshake");
    tokio::spawn(connection);
    sender
}

/// A request to port 3000 of the sandbox, by its host.
pub(crate) fn h2_request(method: Method, body: ChannelBody) -> Request<ChannelBody> {
    Request::builder()
        .method(method)
        .uri(format!("http://3000-{ID}.example.com/path?q=1"))
        .header("te", "trailers")
        .body(body)
        .expect("a request")
}

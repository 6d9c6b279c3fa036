//! A gateway with one sandbox on loopback, and servers behind it.
//!
//! The sandbox's side listens on 127.0.0.1, servers on the same port of other loopback addresses, and names lead to
//! these.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use model::injection::{HeaderChoice, InjectedHeader, InjectionRule, Interception, PathPattern};
use model::network::EgressPolicy;
use model::secret::Secret;
use parking_lot::Mutex;
use protocol::node::Traffic;
use proxy::egress::{
    Attachment, EgressGateway, EgressReport, EgressSettings, InjectedRequest, SandboxNetwork, authority_certificate,
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose, date_time_ymd};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The token of the rules, and the header in which it is sent.
pub(crate) const SECRET: &str = "sk-0123456789-abcdef-secret";
pub(crate) const BEARER: &str = "Bearer sk-0123456789-abcdef-secret";
/// The host of the rules.
pub(crate) const HOST: &str = "api.example";
/// A host of the same issuer without rules.
pub(crate) const OTHER: &str = "other.example";
/// Names of the servers, and the addresses that they lead to.
const SERVERS: [(&str, &str); 2] = [(HOST, "127.0.0.2"), (OTHER, "127.0.0.3")];

/// The socket of a sandbox's side.
#[derive(Debug)]
struct Loopback {
    tcp: std::net::TcpListener,
    udp: UdpSocket,
}

impl SandboxNetwork for Loopback {
    fn tcp(&self) -> io::Result<std::net::TcpListener> {
        self.tcp.try_clone()
    }

    fn udp(&self) -> BorrowedFd<'_> {
        self.udp.as_fd()
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)> {
        let (length, from) = self.udp.recv_from(buffer)?;
        Ok((length, from, from))
    }

    fn send(&self, _: SocketAddr, _: SocketAddr, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn resolver(&self) -> IpAddr {
        [10, 0, 0, 1].into()
    }

    fn refuse(&self, _: SocketAddr, _: SocketAddr) -> io::Result<()> {
        Ok(())
    }
}

/// A sandbox and the issuer of the servers' certificates.
pub(crate) struct World {
    pub(crate) gateway: Arc<EgressGateway>,
    pub(crate) attachment: Attachment,
    pub(crate) port: u16,
    pub(crate) issuer: Arc<Issuer<'static, KeyPair>>,
    /// The addresses of the servers, bound so that no other test takes them.
    reserved: Mutex<BTreeMap<&'static str, TcpSocket>>,
    reports: Arc<Mutex<Vec<EgressReport>>>,
    pub(crate) traffic: Arc<Traffic>,
    seed: Secret,
}

pub(crate) fn seed(digit: char) -> Secret {
    Secret::new(digit.to_string().repeat(64))
}

pub(crate) fn rule(path: PathPattern) -> InjectionRule {
    InjectionRule {
        name: "injections[0]".to_owned(),
        host: HOST.parse().unwrap(),
        port: 443,
        path,
        if_headers: BTreeMap::new(),
        if_queries: BTreeMap::new(),
        headers: vec![InjectedHeader {
            name: "authorization".to_owned(),
            value: Secret::new(BEARER.to_owned()),
        }],
        set: HeaderChoice::All,
        secrets: vec![Secret::new(SECRET.to_owned())],
    }
}

impl World {
    /// With one rule for the whole host.
    pub(crate) async fn new() -> Self {
        Self::with(vec![rule(PathPattern::Any)], |_, _| {}).await
    }

    /// Creates a world with rules, whose ports become that of the servers.
    pub(crate) async fn with(
        rules: Vec<InjectionRule>,
        change: impl FnOnce(&mut EgressSettings, &mut EgressPolicy),
    ) -> Self {
        let (tcp, reserved) = reserve_port();
        tcp.set_nonblocking(true).unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        udp.set_nonblocking(true).unwrap();
        let port = tcp.local_addr().unwrap().port();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let root = params.self_signed(&key).unwrap();
        let mut settings = EgressSettings {
            allow_private: vec!["127.0.0.0/8".parse().unwrap()],
            upstream_roots: vec![root.der().clone()],
            ..EgressSettings::default()
        };
        for (name, address) in SERVERS {
            let address: IpAddr = address.parse().unwrap();
            settings.hosts.insert(name.to_owned(), vec![address]);
        }
        let mut policy = policy(rules, port);
        change(&mut settings, &mut policy);
        let gateway = Arc::new(EgressGateway::new(settings, tokio::runtime::Handle::current()));
        let reports: Arc<Mutex<Vec<EgressReport>>> = Arc::default();
        let sink = Arc::clone(&reports);
        let traffic = Arc::new(Traffic::new(0));
        let attachment = gateway
            .attach(
                Arc::new(Loopback { tcp, udp }),
                policy,
                Box::new(move |report| sink.lock().push(report)),
                Arc::clone(&traffic),
            )
            .unwrap();
        Self {
            gateway,
            attachment,
            port,
            issuer: Arc::new(Issuer::new(params, key)),
            reserved: Mutex::new(reserved),
            reports,
            traffic,
            seed: seed('1'),
        }
    }

    /// Replaces the rules.
    pub(crate) fn set_rules(&self, rules: Vec<InjectionRule>) {
        self.attachment.set_policy(policy(rules, self.port));
    }

    /// The requests that were reported, once there are that many.
    pub(crate) async fn requests(&self, count: usize) -> Vec<InjectedRequest> {
        for _ in 0..500 {
            let found: Vec<_> = self
                .reports
                .lock()
                .iter()
                .filter_map(|report| match report {
                    EgressReport::Request(request) => Some((**request).clone()),
                    _ => None,
                })
                .collect();
            if found.len() >= count {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("fewer than {count} requests were reported: {:?}", self.reports.lock());
    }

    /// All reports, as text.
    pub(crate) fn reported(&self) -> String {
        format!("{:?}", self.reports.lock())
    }

    pub(crate) fn authority(&self) -> String {
        format!("{HOST}:{}", self.port)
    }

    /// A plain connection of a program.
    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).await.unwrap()
    }

    /// A connection with TLS, which trusts the sandbox's authority and the servers' issuer.
    pub(crate) async fn tls(&self, name: &str, alpn: &[&str]) -> io::Result<TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        let own = authority_certificate(&self.seed).unwrap();
        roots
            .add(CertificateDer::from_pem_slice(own.as_bytes()).unwrap())
            .unwrap();
        let mut config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        TlsConnector::from(Arc::new(config))
            .connect(name, self.connect().await)
            .await
    }

    /// Sends bytes over HTTP/1.1 and returns what comes back within a second of silence.
    pub(crate) async fn raw(&self, request: &[u8]) -> String {
        let mut stream = self.tls(HOST, &["http/1.1"]).await.unwrap();
        stream.write_all(request).await.unwrap();
        read_available(&mut stream).await
    }

    /// A client of HTTP/2.
    pub(crate) async fn http2(&self) -> hyper::client::conn::http2::SendRequest<Full<Bytes>> {
        let stream = self.tls(HOST, &["h2"]).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let (sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        sender
    }

    /// A client of HTTP/1.1.
    pub(crate) async fn http1(&self) -> hyper::client::conn::http1::SendRequest<Full<Bytes>> {
        let stream = self.tls(HOST, &["http/1.1"]).await.unwrap();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection.with_upgrades());
        sender
    }

    /// A certificate for a name, valid between two years.
    pub(crate) fn certificate(&self, name: &str, years: (i32, i32)) -> ServerConfig {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(years.0, 1, 1);
        params.not_after = date_time_ymd(years.1, 1, 1);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        server_config(certificate.der().clone(), &key)
    }

    /// Starts to listen at the address of a name, once for each name.
    pub(crate) async fn listen(&self, host: &str) -> TcpListener {
        let socket = self.reserved.lock().remove(host).expect("one server per name");
        socket.listen(128).unwrap()
    }

    /// A server that records what it gets, and answers every head with these bytes.
    pub(crate) async fn record(&self, host: &str, answer: &'static str) -> Record {
        self.record_with(host, self.certificate(host, (2020, 2049)), answer)
            .await
    }

    pub(crate) async fn record_with(&self, host: &str, mut config: ServerConfig, answer: &'static str) -> Record {
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let listener = self.listen(host).await;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let record = Record::default();
        let shared = record.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                *shared.connections.lock() += 1;
                let (acceptor, shared) = (acceptor.clone(), shared.clone());
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else {
                        return;
                    };
                    let mut head = Vec::new();
                    let mut part = [0; 4096];
                    while let Ok(length @ 1..) = stream.read(&mut part).await {
                        shared.bytes.lock().extend_from_slice(&part[..length]);
                        for byte in &part[..length] {
                            head.push(*byte);
                            if head.ends_with(b"\r\n\r\n") {
                                head.clear();
                                let _ = stream.write_all(answer.as_bytes()).await;
                            }
                        }
                    }
                });
            }
        });
        record
    }

    /// A server of HTTP/1.1 and HTTP/2 that answers with what it got.
    pub(crate) async fn echo(&self) -> Record {
        let mut config = self.certificate(HOST, (2020, 2049));
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let listener = self.listen(HOST).await;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let record = Record::default();
        let shared = record.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                *shared.connections.lock() += 1;
                let (acceptor, shared) = (acceptor.clone(), shared.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else {
                        return;
                    };
                    let service = hyper::service::service_fn(move |request| echo(request, shared.clone()));
                    let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = builder
                        .serve_connection_with_upgrades(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        record
    }
}

/// A listener of the sandbox's side, and sockets that are bound to its port at the addresses of the servers. They refuse
/// connections until a server listens. Connections of other tests can have the port at one of the addresses, so this
/// tries again.
fn reserve_port() -> (std::net::TcpListener, BTreeMap<&'static str, TcpSocket>) {
    for _ in 0..100 {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let bind = |(name, address): (&'static str, &str)| {
            let socket = TcpSocket::new_v4()?;
            socket.bind(SocketAddr::new(address.parse().unwrap(), port))?;
            Ok((name, socket))
        };
        let reserved: io::Result<_> = SERVERS.into_iter().map(bind).collect();
        if let Ok(reserved) = reserved {
            return (listener, reserved);
        }
    }
    panic!("no port is free at three loopback addresses");
}

fn policy(mut rules: Vec<InjectionRule>, port: u16) -> EgressPolicy {
    for rule in &mut rules {
        rule.port = port;
    }
    EgressPolicy {
        interception: Some(Box::new(Interception {
            ca_seed: seed('1'),
            rules,
        })),
        ..EgressPolicy::default()
    }
}

pub(crate) fn server_config(certificate: CertificateDer<'static>, key: &KeyPair) -> ServerConfig {
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap()
}

/// What a server got.
#[derive(Debug, Clone, Default)]
pub(crate) struct Record {
    pub(crate) bytes: Arc<Mutex<Vec<u8>>>,
    pub(crate) connections: Arc<Mutex<usize>>,
}

impl Record {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes.lock()).into_owned()
    }

    pub(crate) fn has_secret(&self) -> bool {
        self.text().contains(SECRET)
    }
}

/// Answers with the request: its head as text, then its body and trailers. The head is recorded too.
async fn echo(
    mut request: http::Request<hyper::body::Incoming>,
    record: Record,
) -> Result<http::Response<http_body_util::combinators::BoxBody<Bytes, hyper::Error>>, hyper::Error> {
    let mut head = format!("{} {} {:?}\n", request.method(), request.uri(), request.version());
    for (name, value) in request.headers() {
        head.push_str(&format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())));
    }
    record.bytes.lock().extend_from_slice(head.as_bytes());
    if request.uri().path() == "/upgrade" {
        let upgrade = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut stream = TokioIo::new(upgrade.await.unwrap());
            let mut part = [0; 1024];
            while let Ok(length @ 1..) = stream.read(&mut part).await {
                if stream.write_all(&part[..length]).await.is_err() {
                    return;
                }
            }
        });
        let response = http::Response::builder()
            .status(101)
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .body(Full::default().map_err(|never| match never {}).boxed())
            .unwrap();
        return Ok(response);
    }
    let response = http::Response::builder().header("x-echo", head.replace('\n', " "));
    let body = match request.uri().path() {
        // The request as a stream, chunk by chunk, with its trailers.
        "/stream" => request.into_body().boxed(),
        _ => {
            let body = request.into_body().collect().await?;
            let trailers = format!("{:?}", body.trailers());
            let mut all = head.into_bytes();
            all.extend_from_slice(&body.to_bytes());
            all.extend_from_slice(trailers.as_bytes());
            Full::new(Bytes::from(all)).map_err(|never| match never {}).boxed()
        }
    };
    Ok(response.body(body).unwrap())
}

/// What this becomes within a second. That is a hundred waits, so that a machine that stands still costs one of them: between
/// two, all tasks go on.
pub(crate) async fn before_silence<T>(work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    for _ in 0..100 {
        if let Ok(done) = tokio::time::timeout(Duration::from_millis(10), work.as_mut()).await {
            return Some(done);
        }
    }
    None
}

/// What comes until the end, or a second of silence.
pub(crate) async fn read_available(stream: &mut TlsStream<TcpStream>) -> String {
    let mut all = Vec::new();
    let mut part = [0; 4096];
    while let Some(Ok(length @ 1..)) = before_silence(stream.read(&mut part)).await {
        all.extend_from_slice(&part[..length]);
    }
    String::from_utf8_lossy(&all).into_owned()
}

/// Waits for what the gateway does a moment later.
pub(crate) async fn until(mut condition: impl AsyncFnMut() -> bool, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition().await {
        assert!(Instant::now() < deadline, "still not so: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The body of a response as text.
pub(crate) async fn text(response: http::Response<hyper::body::Incoming>) -> String {
    let body = response.into_body().collect().await.unwrap();
    String::from_utf8_lossy(&body.to_bytes()).into_owned()
}

//! What interception costs: new connections, requests on a kept connection, processor time and memory, beside a
//! connection without the gateway, a connection that the gateway relays, and mitmproxy.
//!
//! `cargo bench -p proxy --bench injection -- [WAY...]`, of which all are measured by default. With
//! `MITMDUMP=/path/to/mitmdump`, mitmproxy is one. Client and server are in this process too, on threads of their own. The
//! memory is theirs too, unless the proxy is a process of its own: measure one way in a run, and compare with `direct`.

#![expect(
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark is a program of its own"
)]

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use model::injection::{HeaderChoice, InjectedHeader, InjectionRule, Interception, PathPattern};
use model::network::{Cidr, EgressPolicy};
use model::secret::Secret;
use protocol::node::Traffic;
use proxy::egress::{Attachment, EgressGateway, EgressSettings, SandboxNetwork, authority_certificate};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::{TlsAcceptor, TlsConnector};

const HOST: &str = "api.example";
/// Thread name of the gateway, whose processor time is counted.
const GATEWAY: &str = "bench-gateway";
const NEW: usize = 500;
/// Between new connections: as many as a sandbox may resolve names for.
const PACE: Duration = Duration::from_millis(12);
const KEPT: usize = 10_000;
const PARALLEL: usize = 16;
const RATE: Duration = Duration::from_secs(5);
const IDLE: usize = 1000;

#[derive(Debug)]
struct Loopback(std::net::TcpListener, UdpSocket);

impl SandboxNetwork for Loopback {
    fn tcp(&self) -> io::Result<std::net::TcpListener> {
        self.0.try_clone()
    }

    fn udp(&self) -> BorrowedFd<'_> {
        self.1.as_fd()
    }

    fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)> {
        let (length, from) = self.1.recv_from(buffer)?;
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

/// A way to the server.
struct Way {
    name: &'static str,
    address: SocketAddr,
    tls: TlsConnector,
    /// The process of the proxy, if it is not this one.
    proxy: Option<Child>,
}

impl Drop for Way {
    fn drop(&mut self) {
        if let Some(proxy) = &mut self.proxy {
            let _ = proxy.kill();
            let _ = proxy.wait();
        }
    }
}

impl Way {
    async fn open(&self) -> SendRequest<Full<Bytes>> {
        let stream = TcpStream::connect(self.address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let name = ServerName::try_from(HOST).unwrap();
        let stream = self.tls.connect(name, stream).await.unwrap();
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    }

    async fn request(&self, sender: &mut SendRequest<Full<Bytes>>, port: u16) {
        sender.ready().await.unwrap();
        let request = Request::get("/v1/models").header("host", format!("{HOST}:{port}"));
        let response = sender
            .send_request(request.body(Full::default()).unwrap())
            .await
            .unwrap();
        assert_eq!(response.status(), 200, "{}", self.name);
        response.into_body().collect().await.unwrap();
    }

    /// Processor time of the gateway or the proxy, in seconds.
    fn cpu(&self) -> f64 {
        let of = |path: &str| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
            let ticks = |at: usize| fields.get(at).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
            (ticks(11) + ticks(12)) / 100.0
        };
        if let Some(proxy) = &self.proxy {
            return of(&format!("/proc/{}/stat", proxy.id()));
        }
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let paths = tasks.map(|task| task.unwrap().path());
        let gateway = paths.filter(|path| std::fs::read_to_string(path.join("comm")).unwrap().starts_with(GATEWAY));
        gateway.map(|path| of(path.join("stat").to_str().unwrap())).sum()
    }
}

/// Resident memory of a process in KiB.
fn memory(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn quantile(times: &mut [f64], part: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )]
    let at = (part * (times.len() - 1) as f64) as usize;
    times[at]
}

fn main() {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let gateway = Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name(GATEWAY)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(measure(&gateway));
    gateway.shutdown_background();
}

async fn measure(runtime: &Runtime) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().unwrap();
    let root = params.self_signed(&key).unwrap();
    serve(port, &Issuer::new(params, key)).await;
    let seed = Secret::new("1".repeat(64));
    let begun = Instant::now();
    for _ in 0..1000 {
        authority_certificate(&seed).unwrap();
    }
    println!(
        "certificate of a sandbox's authority: {:.0} µs",
        begun.elapsed().as_secs_f64() * 1e3
    );
    let own = authority_certificate(&seed).unwrap();
    let own = CertificateDer::from_pem_slice(own.as_bytes()).unwrap();

    let mut settings = EgressSettings {
        allow_private: vec!["127.0.0.0/8".parse().unwrap()],
        upstream_roots: vec![root.der().clone()],
        ..EgressSettings::default()
    };
    let address: IpAddr = "127.0.0.2".parse().unwrap();
    settings.hosts.insert(HOST.to_owned(), vec![address]);
    settings.limits.connections = 10_000;
    settings.limits.connections_per_s = 100_000;
    settings.limits.intercepted = 10_000;
    settings.limits.requests_per_s = u32::MAX;
    let gateway = EgressGateway::new(settings, runtime.handle().clone());
    let rules = EgressPolicy {
        interception: Some(Box::new(Interception {
            ca_seed: seed,
            rules: vec![rule(port)],
        })),
        ..EgressPolicy::default()
    };
    let by_domain = EgressPolicy {
        deny: vec![Cidr::ALL],
        allow_domains: vec![HOST.parse().unwrap()],
        ..EgressPolicy::default()
    };
    let relayed = std::net::TcpListener::bind(("127.0.0.4", port)).unwrap();
    let _attached = [attach(&gateway, listener, rules), attach(&gateway, relayed, by_domain)];
    let mut ways = vec![
        way("direct", ("127.0.0.2", port), root.der()),
        way("relayed", ("127.0.0.4", port), root.der()),
        way("intercepted", ("127.0.0.1", port), &own),
    ];
    ways.extend(mitmproxy(port));
    println!(
        "| way | new p50 / p99 | kept p50 / p99 | requests/s | proxy CPU per request | memory per 1,000 connections |"
    );
    println!("|---|---|---|---|---|---|");
    let chosen: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    for way in ways
        .iter()
        .filter(|way| chosen.is_empty() || chosen.iter().any(|name| name == way.name))
    {
        println!("{}", line(way, port).await);
    }
}

async fn line(way: &Way, port: u16) -> String {
    let milliseconds = |begun: Instant| begun.elapsed().as_secs_f64() * 1e3;
    let mut new = Vec::new();
    for _ in 0..NEW {
        let begun = Instant::now();
        let mut sender = way.open().await;
        way.request(&mut sender, port).await;
        new.push(milliseconds(begun));
        tokio::time::sleep(PACE).await;
    }
    let mut kept = Vec::new();
    let mut sender = way.open().await;
    for _ in 0..KEPT {
        let begun = Instant::now();
        way.request(&mut sender, port).await;
        kept.push(milliseconds(begun));
    }
    let before = way.cpu();
    let end = Instant::now() + RATE;
    let mut clients = Vec::new();
    for _ in 0..PARALLEL {
        let (mut sender, name) = (way.open().await, way.name);
        clients.push(tokio::spawn(async move {
            let mut count = 0u32;
            while Instant::now() < end {
                sender.ready().await.unwrap();
                let request = Request::get("/").header("host", format!("{HOST}:{port}"));
                let response = sender
                    .send_request(request.body(Full::default()).unwrap())
                    .await
                    .unwrap();
                assert_eq!(response.status(), 200, "{name}");
                response.into_body().collect().await.unwrap();
                count += 1;
            }
            count
        }));
    }
    let mut count = 0;
    for client in clients {
        count += client.await.unwrap();
    }
    let cpu = way.cpu() - before;
    let pid = way.proxy.as_ref().map_or(std::process::id(), Child::id);
    let before = memory(pid);
    let mut idle = Vec::new();
    for _ in 0..IDLE {
        let mut sender = way.open().await;
        way.request(&mut sender, port).await;
        idle.push(sender);
        tokio::time::sleep(PACE).await;
    }
    let grown = memory(pid) - before;
    drop(idle);
    tokio::time::sleep(Duration::from_secs(1)).await;
    format!(
        "| {} | {:.2} / {:.2} ms | {:.3} / {:.3} ms | {:.0} | {:.0} µs | {:.1} MiB |",
        way.name,
        quantile(&mut new, 0.5),
        quantile(&mut new, 0.99),
        quantile(&mut kept, 0.5),
        quantile(&mut kept, 0.99),
        f64::from(count) / RATE.as_secs_f64(),
        cpu * 1e6 / f64::from(count),
        grown / 1024.0,
    )
}

fn rule(port: u16) -> InjectionRule {
    let token = "sk-0123456789-abcdef-0123456789-abcdef-0123456789";
    InjectionRule {
        name: "bench".to_owned(),
        host: HOST.parse().unwrap(),
        port,
        path: PathPattern::Any,
        if_headers: BTreeMap::new(),
        if_queries: BTreeMap::new(),
        headers: vec![InjectedHeader {
            name: "authorization".to_owned(),
            value: Secret::new(format!("Bearer {token}")),
        }],
        set: HeaderChoice::All,
        secrets: vec![Secret::new(token.to_owned())],
    }
}

fn attach(gateway: &EgressGateway, tcp: std::net::TcpListener, policy: EgressPolicy) -> Attachment {
    tcp.set_nonblocking(true).unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.set_nonblocking(true).unwrap();
    let network = Arc::new(Loopback(tcp, udp));
    gateway
        .attach(network, policy, Box::new(drop), Arc::new(Traffic::new(0)))
        .unwrap()
}

fn way(name: &'static str, address: (&str, u16), root: &CertificateDer<'_>) -> Way {
    let mut roots = RootCertStore::empty();
    roots.add(root.clone().into_owned()).unwrap();
    let config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Way {
        name,
        address: format!("{}:{}", address.0, address.1).parse().unwrap(),
        tls: TlsConnector::from(Arc::new(without_resumption(config))),
        proxy: None,
    }
}

fn without_resumption(mut config: ClientConfig) -> ClientConfig {
    config.resumption = rustls::client::Resumption::disabled();
    config
}

/// A server that answers every request with a few bytes.
async fn serve(port: u16, issuer: &Issuer<'static, KeyPair>) {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec![HOST.to_owned()])
        .unwrap()
        .signed_by(&key, issuer)
        .unwrap();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind(("127.0.0.2", port)).await.unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                stream.set_nodelay(true).unwrap();
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let service = hyper::service::service_fn(async |_: Request<hyper::body::Incoming>| {
                    Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from_static(
                        b"{\"object\": \"list\"}",
                    ))))
                });
                let connection = hyper::server::conn::http1::Builder::new();
                let _ = connection.serve_connection(TokioIo::new(stream), service).await;
            });
        }
    });
}

/// mitmproxy before the same server, setting the same header.
fn mitmproxy(port: u16) -> Option<Way> {
    let program = std::env::var_os("MITMDUMP")?;
    let listen = std::net::TcpListener::bind("127.0.0.5:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let proxy = Command::new(program)
        .args(["--quiet", "--ssl-insecure", "--set", "keep_host_header=true"])
        .args([
            "--set",
            "flow_detail=0",
            "--modify-headers",
            "/~q/authorization/Bearer x",
        ])
        .args(["--mode", &format!("reverse:https://127.0.0.2:{port}")])
        .args([
            "--listen-host",
            "127.0.0.5",
            "--listen-port",
            &listen.port().to_string(),
        ])
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while std::net::TcpStream::connect(listen).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(30), "mitmproxy does not listen");
        std::thread::sleep(Duration::from_millis(100));
    }
    let config = ClientConfig::builder()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Any))
        .with_no_client_auth();
    Some(Way {
        name: "mitmproxy",
        address: listen,
        tls: TlsConnector::from(Arc::new(without_resumption(config))),
        proxy: Some(proxy),
    })
}

/// Accepts the certificates that mitmproxy issues.
#[derive(Debug)]
struct Any;

impl ServerCertVerifier for Any {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::aws_lc_rs::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

//! HTTPS on the same port as HTTP, with a rustls client: protocols, names, failed handshakes, timeouts and cuts.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Version};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, HandshakeKind, RootCertStore, SupportedProtocolVersion};
use server::tls::{Tls, TlsError, provider};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::platform::{KEY, TestPlatform, send, within};

/// A certificate authority with a certificate for `sandbox.test` and its wildcard.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    leaf: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority");
        let key = KeyPair::generate().expect("a key");
        let names = ["sandbox.test", "*.sandbox.test"].map(str::to_owned);
        let mut params = CertificateParams::new(names).expect("names");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.signed_by(&key, &issuer).expect("a certificate");
        Self {
            leaf: leaf.pem(),
            key: key.serialize_pem(),
            issuer,
        }
    }

    fn tls(&self) -> Tls {
        Tls::from_pem(self.leaf.as_bytes(), self.key.as_bytes()).expect("usable")
    }

    async fn platform(&self) -> TestPlatform {
        TestPlatform::start_with(Some(self.tls())).await
    }

    /// A client that trusts this authority.
    fn client(&self, versions: &[&'static SupportedProtocolVersion]) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).expect("a root");
        ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(versions)
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth()
    }

    /// A connection of a client that trusts this authority and offers `protocols`.
    async fn connect(&self, addr: SocketAddr, name: &str, protocols: &[&str]) -> io::Result<TlsStream<TcpStream>> {
        let mut config = self.client(rustls::DEFAULT_VERSIONS);
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        connect(&Arc::new(config), addr, name).await
    }
}

async fn connect(config: &Arc<ClientConfig>, addr: SocketAddr, name: &str) -> io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(addr).await?;
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    within(TlsConnector::from(Arc::clone(config)).connect(name, tcp)).await
}

/// A server in every sandbox that accepts an upgrade or begins a body, and then echoes what it receives.
async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = vec![0; 8192];
                let got = tcp.read(&mut buffer).await.unwrap_or(0);
                let head = String::from_utf8_lossy(&buffer[..got]).to_ascii_lowercase();
                let answer: &[u8] = if head.contains("upgrade: websocket") {
                    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
                } else {
                    b"HTTP/1.1 200 OK\r\n\r\nbegun"
                };
                let _ = tcp.write_all(answer).await;
                let (mut read, mut write) = tcp.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    addr
}

/// Reads until the text ends with `end`.
async fn read_until(stream: &mut TlsStream<TcpStream>, end: &str) -> String {
    let mut text = String::new();
    let mut buffer = [0; 1024];
    while !text.ends_with(end) {
        let got = within(stream.read(&mut buffer)).await.expect("read");
        assert_ne!(got, 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..got]));
    }
    text
}

#[tokio::test]
async fn one_port_serves_http_and_https_in_both_versions() {
    let authority = Authority::new();
    let platform = authority.platform().await;
    assert_eq!(platform.call("GET", "/v2/sandboxes", "").await.status, 200);

    let request = |uri: &str| {
        Request::get(uri)
            .header("host", "api.sandbox.test")
            .header("x-api-key", KEY)
            .body(Full::<Bytes>::default())
            .expect("a request")
    };
    let name = "api.sandbox.test";
    for protocols in [&["http/1.1"][..], &[]] {
        let stream = authority
            .connect(platform.addr, name, protocols)
            .await
            .expect("a handshake");
        assert_eq!(
            stream.get_ref().1.alpn_protocol(),
            protocols.first().map(|name| name.as_bytes())
        );
        let (mut client, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .expect("h1");
        tokio::spawn(connection);
        for _ in 0..2 {
            let response = within(client.send_request(request("/v2/sandboxes")))
                .await
                .expect("a response");
            assert_eq!(
                (response.status().as_u16(), response.version()),
                (200, Version::HTTP_11)
            );
            within(response.into_body().collect()).await.expect("a body");
        }
    }
    let stream = authority
        .connect(platform.addr, name, &["h2", "http/1.1"])
        .await
        .expect("a handshake");
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut client, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .expect("h2");
    tokio::spawn(connection);
    let response = within(client.send_request(request("https://api.sandbox.test/v2/sandboxes")))
        .await
        .expect("a response");
    assert_eq!((response.status().as_u16(), response.version()), (200, Version::HTTP_2));
    within(response.into_body().collect()).await.expect("a body");

    // Without a common protocol, the handshake fails.
    authority
        .connect(platform.addr, name, &["spdy/1"])
        .await
        .expect_err("no protocol");
}

#[tokio::test]
async fn the_wildcard_covers_sandboxes_and_nothing_else() {
    let authority = Authority::new();
    let platform = authority.platform().await;
    *platform.node.origin.lock() = Some(echo().await);
    let id = platform.create("").await;
    let host = format!("3000-{id}.sandbox.test");
    let mut stream = authority
        .connect(platform.addr, &host, &["http/1.1"])
        .await
        .expect("a handshake");
    let request = format!("GET / HTTP/1.1\r\nHost: {host}:{}\r\n\r\n", platform.addr.port());
    stream.write_all(request.as_bytes()).await.expect("written");
    let answer = read_until(&mut stream, "begun\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for name in ["a.b.sandbox.test", "sandbox.example", "127.0.0.1"] {
        let error = authority
            .connect(platform.addr, name, &[])
            .await
            .expect_err("another name");
        assert!(error.to_string().contains("certificate not valid for name"), "{error}");
    }
    let error = Authority::new()
        .connect(platform.addr, &host, &[])
        .await
        .expect_err("another authority");
    assert!(error.to_string().contains("invalid peer certificate"), "{error}");
    assert_eq!(platform.call("GET", "/health", "").await.status, 200);
}

#[tokio::test]
async fn ending_a_sandbox_resets_tls_connections() {
    let authority = Authority::new();
    let platform = authority.platform().await;
    *platform.node.origin.lock() = Some(echo().await);
    let id = platform.create("").await;
    let host = format!("3000-{id}.sandbox.test");

    let connect = || authority.connect(platform.addr, &host, &["http/1.1"]);
    let mut socket = connect().await.expect("a handshake");
    let request = format!("GET /ws HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n");
    socket.write_all(request.as_bytes()).await.expect("written");
    let answer = read_until(&mut socket, "\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 101"), "{answer}");
    for message in ["one", "two"] {
        socket.write_all(message.as_bytes()).await.expect("written");
        assert_eq!(read_until(&mut socket, message).await, message);
    }

    let mut body = connect().await.expect("a handshake");
    let request = format!("GET / HTTP/1.0\r\nHost: {host}\r\n\r\n");
    body.write_all(request.as_bytes()).await.expect("written");
    read_until(&mut body, "begun").await;

    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
    for mut stream in [socket, body] {
        let error = within(stream.read(&mut [0; 64])).await.expect_err("no clean end");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn silent_connections_time_out_at_every_stage() {
    let authority = Authority::new();
    let platform = authority.platform().await;
    for (greeting, seconds) in [
        ("", 10),
        ("GET / HT", 10),
        ("\x16", 10),
        ("\x16\x03\x01\x02\x00\x01\x00", 10),
    ] {
        let begun = Instant::now();
        let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
        tcp.write_all(greeting.as_bytes()).await.expect("written");
        tokio::time::pause();
        let got = tcp.read(&mut [0; 64]).await.unwrap_or(0);
        assert_eq!(got, 0, "{greeting:?}");
        let waited = begun.elapsed();
        let bound = Duration::from_secs(seconds);
        assert!(
            (bound - Duration::from_secs(1)..bound + Duration::from_secs(9)).contains(&waited),
            "{greeting:?}: {waited:?}"
        );
        tokio::time::resume();
    }
}

#[tokio::test]
async fn failed_handshakes_do_not_affect_other_clients() {
    let authority = Authority::new();
    let platform = authority.platform().await;
    for garbage in [
        &b"\x16\x16\x16\x16\x16\x16\x16\x16"[..],
        b"\x16\x03\x01\xff\xff\x01\x00\x01",
        b"\x16\x03\x01\x00\x05hello",
        b"\x15\x03\x01\x00\x02\x01\x00",
        b"\x80\x2e\x01\x00\x02",
        b"\0",
    ] {
        let mut tcp = TcpStream::connect(platform.addr).await.expect("connect");
        // The server may read it, answer it or close the connection.
        let _ = tcp.write_all(garbage).await;
        let _ = tcp.shutdown().await;
        let _ = within(tcp.read_to_end(&mut Vec::new())).await;
        assert_eq!(platform.call("GET", "/health", "").await.status, 200, "{garbage:?}");
    }
    let open = TcpStream::connect(platform.addr).await.expect("connect");
    let mut begun = TcpStream::connect(platform.addr).await.expect("connect");
    begun.write_all(b"\x16\x03").await.expect("written");
    let idle = authority
        .connect(platform.addr, "api.sandbox.test", &["h2"])
        .await
        .expect("a handshake");
    // None of them delays the drain.
    platform.stop.cancel();
    let stopping = Instant::now();
    within(platform.server.drained()).await;
    // A handshake may take ten seconds.
    assert!(stopping.elapsed() < Duration::from_secs(9));
    drop((open, begun, idle));
}

#[tokio::test]
async fn a_replaced_certificate_is_used_from_the_next_handshake() {
    let (first, second) = (Authority::new(), Authority::new());
    let tls = first.tls();
    let platform = TestPlatform::start_with(Some(tls.clone())).await;
    let name = "api.sandbox.test";
    let mut standing = first.connect(platform.addr, name, &[]).await.expect("a handshake");
    tls.replace(second.leaf.as_bytes(), first.key.as_bytes())
        .expect_err("a key of another certificate");
    first
        .connect(platform.addr, name, &[])
        .await
        .expect("the first one still");
    tls.replace(second.leaf.as_bytes(), second.key.as_bytes())
        .expect("usable");
    second.connect(platform.addr, name, &[]).await.expect("the second one");
    first.connect(platform.addr, name, &[]).await.expect_err("no longer");
    let request = format!("GET /health HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
    standing.write_all(request.as_bytes()).await.expect("written");
    let mut answer = String::new();
    within(standing.read_to_string(&mut answer))
        .await
        .expect("a proper end");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn sessions_are_resumed_also_after_the_certificate_was_replaced() {
    let (first, second) = (Authority::new(), Authority::new());
    let name = "api.sandbox.test";
    for version in [&rustls::version::TLS13, &rustls::version::TLS12] {
        let tls = first.tls();
        let platform = TestPlatform::start_with(Some(tls.clone())).await;
        let client = Arc::new(first.client(&[version]));
        let kind = async || {
            let mut stream = connect(&client, platform.addr, name).await.expect("a handshake");
            let request = format!("GET /health HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.expect("written");
            // Tickets of TLS 1.3 come after the handshake.
            let mut answer = String::new();
            within(stream.read_to_string(&mut answer)).await.expect("an answer");
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            let connection = stream.get_ref().1;
            assert_eq!(connection.protocol_version(), Some(version.version));
            connection.handshake_kind().expect("a finished handshake")
        };
        assert_eq!(kind().await, HandshakeKind::Full);
        for _ in 0..3 {
            assert_eq!(kind().await, HandshakeKind::Resumed, "{version:?}");
        }
        tls.replace(second.leaf.as_bytes(), second.key.as_bytes())
            .expect("usable");
        assert_eq!(kind().await, HandshakeKind::Resumed, "{version:?}");
        // One without a ticket meets the new certificate.
        let other = Arc::new(second.client(&[version]));
        let stream = connect(&other, platform.addr, name).await.expect("a handshake");
        assert_eq!(stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Full));

        // Tickets are of one server only: another one, with the same certificate, makes a full handshake.
        let elsewhere = TestPlatform::start_with(Some(first.tls())).await;
        let stream = connect(&client, elsewhere.addr, name).await.expect("a handshake");
        assert_eq!(stream.get_ref().1.handshake_kind(), Some(HandshakeKind::Full));
    }
}

#[tokio::test]
async fn metrics_tell_when_the_certificate_expires() {
    let expiry = async |platform: &TestPlatform| {
        let headers = [("host", "localhost")];
        let reply = send(platform.metrics, "GET", "/metrics", &headers, Bytes::new()).await;
        let line = reply
            .text
            .lines()
            .find_map(|line| line.strip_prefix("ringfence_tls_certificate_expiry_timestamp_seconds "));
        line.expect("a value").parse::<f64>().expect("a number")
    };
    assert!(expiry(&TestPlatform::start_with(None).await).await.is_nan());
    let tls = Authority::new().tls();
    let platform = TestPlatform::start_with(Some(tls.clone())).await;
    // What rcgen makes of no end.
    assert!((expiry(&platform).await - 67_090_000_000.0).abs() < 1e9);
    let mut params = CertificateParams::new(["sandbox.test".to_owned()]).expect("a name");
    params.not_after = rcgen::date_time_ymd(2033, 5, 18);
    let key = KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate");
    tls.replace(certificate.pem().as_bytes(), key.serialize_pem().as_bytes())
        .expect("usable");
    assert!((expiry(&platform).await - 1_999_987_200.0).abs() < f64::EPSILON);
}

#[test]
fn errors_name_unusable_files_without_their_content() {
    let (one, other) = (Authority::new(), Authority::new());
    let refuse = |certificates: &str, key: &str| {
        Tls::from_pem(certificates.as_bytes(), key.as_bytes()).expect_err("cannot be used")
    };
    assert!(matches!(refuse("", &one.key), TlsError::NoCertificate));
    assert!(matches!(refuse(&one.key, &one.key), TlsError::NoCertificate));
    assert!(matches!(refuse(&one.leaf, &one.leaf), TlsError::Key(_)));
    assert!(matches!(refuse(&one.leaf, ""), TlsError::Key(_)));
    assert!(matches!(refuse(&one.leaf, &other.key), TlsError::Unusable(_)));
    let broken = one.key.replace("PRIVATE KEY-----\n", "PRIVATE KEY-----\n!");
    let said = refuse(&one.leaf, &broken).to_string();
    let secret = one.key.lines().nth(1).expect("a line");
    assert!(!said.contains(&secret[..16]), "{said}");
    assert!(!format!("{:?}", one.tls()).contains("key"));
}

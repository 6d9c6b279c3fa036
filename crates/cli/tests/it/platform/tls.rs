//! HTTPS from the first start on, for a client with nothing but `credentials-tls.env`.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use super::{TestDir, Up, cannot_run, get};

/// The variables of `credentials-tls.env`.
fn variable(place: &TestDir, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(place.data_dir().join("credentials-tls.env")).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
    Some(line.to_owned())
}

/// A client that trusts one authority.
fn trusting(authority: &Path) -> ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(authority).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth()
}

/// The status of a GET by a client that trusts `authority`, or why it does not talk to who answers.
fn status(address: &str, authority: &Path, name: &str, key: &str) -> std::io::Result<u16> {
    let server = ServerName::try_from(name.to_owned()).unwrap();
    let client = ClientConnection::new(Arc::new(trusting(authority)), server).unwrap();
    let mut stream = StreamOwned::new(client, TcpStream::connect(address)?);
    write!(
        stream,
        "GET /v2/sandboxes HTTP/1.1\r\nHost: {name}\r\nX-API-Key: {key}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.split(' ').nth(1).unwrap().parse().unwrap())
}

fn stop(mut up: Up<'_>) {
    up.signal(Signal::TERM);
    assert_eq!(up.wait(), Some(0), "{}", up.log());
}

#[test]
fn https_stays_trusted_over_restarts_and_domains() {
    if cannot_run() {
        return;
    }
    let place = TestDir::new();
    let up = Up::start(&place, &["--listen", "127.0.0.1:0", "--tls"]);
    let address = up.address().to_owned();
    let port = address.rsplit(':').next().unwrap();
    let file = place.data_dir().join("credentials-tls.env");
    assert_eq!(std::fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
    let key = variable(&place, "E2B_API_KEY").unwrap();
    let authority = variable(&place, "SSL_CERT_FILE").unwrap();
    assert_eq!(variable(&place, "NODE_EXTRA_CA_CERTS").as_ref(), Some(&authority));
    assert_eq!(
        variable(&place, "E2B_DOMAIN").unwrap(),
        format!("sandbox.localhost:{port}")
    );
    assert_eq!(
        (variable(&place, "E2B_API_URL"), variable(&place, "E2B_SANDBOX_URL")),
        (None, None)
    );
    let authority = Path::new(&authority);
    assert_eq!(status(&address, authority, "api.sandbox.localhost", &key).unwrap(), 200);
    assert_eq!(status(&address, authority, "127.0.0.1", "e2b_00").unwrap(), 401);
    assert_eq!(get(&address, "/v2/sandboxes", &key), 200);
    status(&address, authority, "api.box.example", &key).unwrap_err();
    stop(up);

    // Clients that were told to trust it once need not be told again.
    let trusted = place.file("trusted.pem", &std::fs::read_to_string(authority).unwrap());
    let up = Up::start(
        &place,
        &["--listen", "127.0.0.1:0", "--tls", "--domain", "box.example:443"],
    );
    assert_eq!(status(up.address(), &trusted, "api.box.example", &key).unwrap(), 200);
    status(up.address(), &trusted, "api.sandbox.localhost", &key).unwrap_err();
    stop(up);

    let up = Up::start(&place, &["--listen", "127.0.0.1:0"]);
    status(up.address(), &trusted, "localhost", &key).unwrap_err();
    assert_eq!(get(up.address(), "/v2/sandboxes", &key), 200);
    assert!(!file.exists());
}

/// A connection that stays open, to a platform whose authority is `authority`.
fn standing(address: &str, authority: &Path) -> StreamOwned<ClientConnection, TcpStream> {
    let server = ServerName::try_from("localhost").unwrap();
    let client = ClientConnection::new(Arc::new(trusting(authority)), server).unwrap();
    let mut stream = StreamOwned::new(client, TcpStream::connect(address).unwrap());
    health(&mut stream);
    stream
}

/// Sends a request on a connection, and reads the answer.
fn health(stream: &mut StreamOwned<ClientConnection, TcpStream>) {
    write!(stream, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let mut part = [0; 1024];
    while !answer.windows(4).any(|end| end == b"\r\n\r\n") {
        let length = stream.read(&mut part).unwrap();
        assert!(length > 0, "closed");
        answer.extend_from_slice(&part[..length]);
    }
    assert!(answer.starts_with(b"HTTP/1.1 200"));
}

#[test]
fn files_are_read_again_when_they_change() {
    if cannot_run() {
        return;
    }
    let made = [TestDir::new(), TestDir::new(), TestDir::new()];
    for place in &made {
        stop(Up::start(place, &["--listen", "127.0.0.1:0", "--tls"]));
    }
    let source = |at: usize, name: &str| made[at].data_dir().join("tls").join(name);
    // As certbot and Kubernetes do: the paths lead through a symlink to a directory.
    let place = TestDir::new();
    let live = place.temp.path().join("live");
    let swap = |at: usize| {
        let next = place.temp.path().join("next");
        std::os::unix::fs::symlink(made[at].data_dir().join("tls"), &next).unwrap();
        std::fs::rename(&next, &live).unwrap();
    };
    swap(0);
    let [certificates, key] = ["server.pem", "server.key"].map(|name| live.join(name));
    let files = [
        "--tls-cert",
        certificates.to_str().unwrap(),
        "--tls-key",
        key.to_str().unwrap(),
    ];
    let up = Up::start(&place, &[&["--listen", "127.0.0.1:0"], &files[..]].concat());
    let api_key = variable(&place, "E2B_API_KEY").unwrap();
    let talks =
        |at: usize| status(up.address(), &source(at, "ca.pem"), "localhost", &api_key).is_ok_and(|code| code == 200);
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !done() {
            assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {}", up.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    assert!(talks(0) && !talks(1));
    let mut open = standing(up.address(), &source(0, "ca.pem"));

    swap(1);
    wait("a symlink", &|| talks(1));
    assert!(!talks(0));
    health(&mut open);

    // A directory of its own from here on; the swap alone changes nothing that clients see.
    let own = place.temp.path().join("own");
    std::fs::create_dir(&own).unwrap();
    let put = |at: usize, name: &str, by_rename: bool| {
        let content = std::fs::read(source(at, name)).unwrap();
        if by_rename {
            std::fs::write(own.join("temporary"), content).unwrap();
            std::fs::rename(own.join("temporary"), own.join(name)).unwrap();
        } else {
            std::fs::write(own.join(name), content).unwrap();
        }
    };
    put(1, "server.pem", true);
    put(1, "server.key", true);
    let next = place.temp.path().join("next");
    std::os::unix::fs::symlink(&own, &next).unwrap();
    std::fs::rename(&next, &live).unwrap();
    let reloads = || up.log().matches("the files have changed: reloaded").count();
    wait("another directory", &|| reloads() == 2);

    // Half of a renewal: the present certificate stays, and one line says why.
    let failed = || up.log().matches("the files have changed: reload failed").count();
    assert_eq!(failed(), 0, "{}", up.log());
    put(2, "server.pem", true);
    wait("half", &|| failed() == 1);
    assert!(talks(1) && !talks(2));
    put(2, "server.key", false);
    wait("the other half", &|| talks(2));
    assert_eq!(failed(), 1, "{}", up.log());
    assert!(!talks(1));

    // A part of a file, and none.
    std::fs::write(&certificates, "-----BEGIN CERTIFICATE-----\nMII").unwrap();
    wait("a part", &|| failed() == 2);
    std::fs::remove_file(&key).unwrap();
    wait("none", &|| failed() == 3);
    assert!(talks(2));
    put(0, "server.key", true);
    put(0, "server.pem", false);
    wait("in place", &|| talks(0));
    health(&mut open);
    let log = up.log();
    assert!(!log.contains("PRIVATE KEY-----"), "{log}");
}

#[test]
fn files_are_read_again_at_sighup() {
    if cannot_run() {
        return;
    }
    // Two platforms make a certificate each.
    let made = [TestDir::new(), TestDir::new()];
    for place in &made {
        stop(Up::start(place, &["--listen", "127.0.0.1:0", "--tls"]));
    }
    let content = |at: usize, name: &str| std::fs::read_to_string(made[at].data_dir().join("tls").join(name)).unwrap();
    let place = TestDir::new();
    let put = |at: usize| {
        let key = place.file("key.pem", &content(at, "server.key"));
        (place.file("cert.pem", &content(at, "server.pem")), key)
    };
    let (certificates, key) = put(0);
    let files = [
        "--tls-cert",
        certificates.to_str().unwrap(),
        "--tls-key",
        key.to_str().unwrap(),
    ];
    place
        .run(&[&["doctor", "--listen", "127.0.0.1:0"], &files[..]].concat())
        .expect(0);
    place
        .run(&["doctor", files[0], files[1]])
        .expect(2)
        .complains_of(&["tls_key"]);
    let up = Up::start(&place, &[&["--listen", "127.0.0.1:0"], &files[..]].concat());
    let authority = |at: usize| made[at].data_dir().join("tls/ca.pem");
    assert_eq!(variable(&place, "SSL_CERT_FILE"), None);
    let api_key = variable(&place, "E2B_API_KEY").unwrap();
    let talks = |at: usize| status(up.address(), &authority(at), "localhost", &api_key).is_ok_and(|code| code == 200);
    assert!(talks(0) && !talks(1));

    put(1);
    up.signal(Signal::HUP);
    let begun = Instant::now();
    while !talks(1) {
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", up.log());
    }
    assert!(!talks(0));

    std::fs::write(&certificates, "no certificate").unwrap();
    up.signal(Signal::HUP);
    while !up.log().contains("keeping the current certificate") {
        assert!(begun.elapsed() < Duration::from_secs(120), "{}", up.log());
    }
    assert!(talks(1));
    std::fs::remove_file(&key).unwrap();
    drop(up);
    place
        .run(&[&["up", "--listen", "127.0.0.1:0"], &files[..]].concat())
        .expect(1)
        .complains_of(&["key.pem"]);
}

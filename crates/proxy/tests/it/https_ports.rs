//! Servers inside that speak TLS.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use proxy::ingress::Access;
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::clock::Clock;
use super::support::{Front, ID, Wire, exchange, front_with, get, origin, within};

/// A server with a certificate of its own, for a name that nobody asks for.
async fn tls_origin<F, Fut>(script: F) -> SocketAddr
where
    F: Fn(TlsStream<TcpStream>) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let made = rcgen::generate_simple_self_signed(["nobody.example".to_owned()]).expect("a certificate");
    let chain: Vec<CertificateDer<'static>> = vec![made.cert.der().clone()];
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("a configuration");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            if let Ok(stream) = acceptor.accept(tcp).await {
                assert_eq!(stream.get_ref().1.server_name(), None);
                tokio::spawn(script(stream));
            }
        }
    });
    addr
}

/// Reads a head; `false` at the end.
async fn read_head(stream: &mut TlsStream<TcpStream>) -> bool {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return false,
        }
    }
    true
}

async fn https_front<const N: usize>(ports: [(u16, SocketAddr); N]) -> Front {
    let access = Access {
        https_ports: Arc::new([8443, protocol::agent::PORT]),
        ..Access::default()
    };
    front_with(ports, access).await
}

#[tokio::test(start_paused = true)]
async fn listed_ports_get_tls_on_kept_connections_and_others_none() {
    let _clock = Clock::hold();
    let secure = tls_origin(|mut stream| async move {
        while read_head(&mut stream).await {
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecure")
                .await;
        }
    })
    .await;
    let plain = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nplain")
            .await;
    })
    .await;
    let front = https_front([(8443, secure), (3000, plain)]).await;
    for _ in 0..3 {
        let text = exchange(front.addr, &get(8443)).await;
        assert!(text.ends_with("secure"), "{text}");
    }
    assert_eq!(front.node.dials.load(Ordering::SeqCst), 1);
    let text = exchange(front.addr, &get(3000)).await;
    assert!(text.ends_with("plain"), "{text}");
    // The agent speaks no TLS, even if its port is listed.
    let text = exchange(front.addr, &get(protocol::agent::PORT)).await;
    assert!(text.starts_with("HTTP/1.1 204"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_kept_connection_is_not_used_when_tls_of_its_port_has_changed() {
    let _clock = Clock::hold();
    let secure = tls_origin(|mut stream| async move {
        while read_head(&mut stream).await {
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecure")
                .await;
        }
    })
    .await;
    let plain = origin(|mut wire| async move {
        while wire.next_head().await.is_some() {
            wire.write("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nplain").await;
        }
    })
    .await;
    let front = front_with([(8443, plain)], Access::default()).await;
    for _ in 0..2 {
        let text = exchange(front.addr, &get(8443)).await;
        assert!(text.ends_with("plain"), "{text}");
    }
    assert_eq!(front.node.dials.load(Ordering::SeqCst), 1);
    *front.access.lock() = Arc::new(Access {
        https_ports: Arc::new([8443]),
        ..Access::default()
    });
    front.node.ports.lock().insert(8443, secure);
    for _ in 0..2 {
        let text = exchange(front.addr, &get(8443)).await;
        assert!(text.ends_with("secure"), "{text}");
    }
    assert_eq!(front.node.dials.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_server_without_tls_is_reported_as_such() {
    let plain = origin(|mut wire| async move {
        wire.write("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            .await;
    })
    .await;
    let front = https_front([(8443, plain)]).await;
    let text = exchange(front.addr, &get(8443)).await;
    assert!(text.starts_with("HTTP/1.1 502"), "{text}");
    assert!(text.contains("does not speak TLS") && text.contains("8443"), "{text}");
}

#[tokio::test]
async fn a_body_that_ends_with_the_connection_needs_no_end_of_tls() {
    let secure = tls_origin(|mut stream| async move {
        read_head(&mut stream).await;
        let _ = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nto the end").await;
        let _ = stream.flush().await;
        // Without the message that ends TLS.
        let _ = stream.get_mut().0.shutdown().await;
    })
    .await;
    let front = https_front([(8443, secure)]).await;
    let text = exchange(front.addr, &get(8443)).await;
    assert!(text.contains("to the end") && text.ends_with("0\r\n\r\n"), "{text}");
}

#[tokio::test]
async fn upgrades_are_relayed_through_tls() {
    let secure = tls_origin(|mut stream| async move {
        read_head(&mut stream).await;
        let _ = stream
            .write_all(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n")
            .await;
        let mut data = [0; 5];
        let _ = stream.read_exact(&mut data).await;
        let _ = stream.write_all(&data).await;
        let _ = stream.shutdown().await;
    })
    .await;
    let front = https_front([(8443, secure)]).await;
    let mut wire = Wire::connect(front.addr).await;
    wire.write(&format!(
        "GET / HTTP/1.1\r\nHost: 8443-{ID}.x\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n"
    ))
    .await;
    within(wire.until("\r\n\r\n")).await;
    wire.write("hello").await;
    within(wire.until("hello")).await;
}

#[tokio::test(start_paused = true)]
async fn servers_with_tls_on_other_ports_are_recognized() {
    let _clock = Clock::hold();
    // It closes what is not TLS without a word, as OpenSSL does.
    let secure = tls_origin(|_| async {}).await;
    let quiet = relay_of(secure).await;
    let front = https_front([(3000, quiet)]).await;
    for method in ["GET", "POST"] {
        let text = exchange(front.addr, &get(3000).replacen("GET", method, 1)).await;
        assert!(text.starts_with("HTTP/1.1 502"), "{text}");
        assert!(text.contains("this port speaks TLS"), "{text}");
        assert!(text.contains("httpsPorts"), "{text}");
    }
}

/// A server that passes on what begins as TLS does, and closes other connections.
async fn relay_of(secure: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut first = [0];
                if tcp.peek(&mut first).await.is_ok() && first == [22] {
                    let mut to = TcpStream::connect(secure).await.expect("connect");
                    let _ = tokio::io::copy_bidirectional(&mut tcp, &mut to).await;
                } else {
                    // All of it is read, so that the end is clean.
                    let _ = tcp.read(&mut [0; 4096]).await;
                }
            });
        }
    });
    addr
}

//! Servers that cannot prove that they are the host, and limits.

use model::injection::PathPattern;
use rcgen::{CertificateParams, KeyPair};

use crate::support::{HOST, OTHER, Record, World, read_available, rule, seed, server_config, until};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

async fn refused(world: &World, server: &Record, expected: &str) {
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority());
    let answer = world.raw(request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    assert!(answer.contains(expected), "{answer}");
    assert_eq!(server.text(), "", "nothing was sent");
}

#[tokio::test]
async fn an_expired_certificate_is_refused() {
    let world = World::new().await;
    let config = world.certificate(HOST, (2020, 2021));
    let server = world.record_with(HOST, config, OK).await;
    refused(&world, &server, "xpired").await;
}

#[tokio::test]
async fn a_certificate_of_the_future_is_refused() {
    let world = World::new().await;
    let config = world.certificate(HOST, (2048, 2049));
    let server = world.record_with(HOST, config, OK).await;
    refused(&world, &server, "not valid yet").await;
}

#[tokio::test]
async fn a_certificate_of_another_host_is_refused() {
    let world = World::new().await;
    let config = world.certificate(OTHER, (2020, 2049));
    let server = world.record_with(HOST, config, OK).await;
    refused(&world, &server, "not valid for name").await;
}

#[tokio::test]
async fn a_certificate_without_an_issuer_is_refused() {
    let world = World::new().await;
    let key = KeyPair::generate().unwrap();
    let own = CertificateParams::new(vec![HOST.to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    let server = world
        .record_with(HOST, server_config(own.der().clone(), &key), OK)
        .await;
    refused(&world, &server, "no TLS with api.example").await;
}

#[tokio::test]
async fn a_certificate_of_another_issuer_is_refused() {
    let world = World::new().await;
    let another = World::new().await;
    let config = another.certificate(HOST, (2020, 2049));
    let server = world.record_with(HOST, config, OK).await;
    refused(&world, &server, "no TLS with api.example").await;
}

#[tokio::test]
async fn a_server_without_tls_gets_nothing() {
    let world = World::new().await;
    let listener = world.listen(HOST).await;
    let plain = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let _ = stream.try_write(b"HTTP/1.1 200 OK\r\n\r\n");
        stream
    });
    let server = Record::default();
    refused(&world, &server, "no TLS with").await;
    // Until here the connection was open: its end was not the reason.
    drop(plain.await.unwrap());
}

#[tokio::test]
async fn a_server_that_is_not_there_is_a_reset() {
    let world = World::new().await;
    assert!(world.tls(HOST, &["h2"]).await.is_err());
    until(async || world.reported().contains("Failed"), "the failure is reported").await;
}

#[tokio::test]
async fn a_failed_handshake_is_told_over_http2_too() {
    let world = World::new().await;
    let config = world.certificate(OTHER, (2020, 2049));
    world.record_with(HOST, config, OK).await;
    let uri = format!("https://{}/", world.authority());
    let request = http::Request::get(uri).body(Default::default()).unwrap();
    let response = world.http2().await.send_request(request).await.unwrap();
    assert_eq!(response.status(), 502);
}

#[tokio::test]
async fn connections_that_are_intercepted_are_limited() {
    let world = World::with(vec![rule(PathPattern::Any)], |settings, _| {
        settings.limits.intercepted = 2
    })
    .await;
    world.record(HOST, OK).await;
    let first = world.tls(HOST, &[]).await.unwrap();
    let _second = world.tls(HOST, &[]).await.unwrap();
    assert!(world.tls(HOST, &[]).await.is_err());
    drop(first);
    until(
        async || world.tls(HOST, &[]).await.is_ok(),
        "another connection is intercepted",
    )
    .await;
}

#[tokio::test]
async fn the_authority_of_another_sandbox_is_not_trusted() {
    let world = World::with(vec![rule(PathPattern::Any)], |_, policy| {
        if let Some(interception) = &mut policy.interception {
            interception.ca_seed = seed('2');
        }
    })
    .await;
    world.record(HOST, OK).await;
    // The client trusts that of seed 1.
    assert!(world.tls(HOST, &[]).await.is_err());
}

#[tokio::test]
async fn rules_of_one_sandbox_are_for_no_other() {
    let with = World::new().await;
    let without = World::with(Vec::new(), |_, policy| {
        policy.deny = vec![model::network::Cidr::ALL];
        policy.allow_domains = vec![HOST.parse().unwrap()];
    })
    .await;
    let server = without.record(HOST, OK).await;
    let other = with.record(HOST, OK).await;
    // Not intercepted: the server's own certificate, which this client does not trust.
    assert!(without.tls(HOST, &[]).await.is_err());
    let mut stream = with.tls(HOST, &[]).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(
        &mut stream,
        format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", with.authority()).as_bytes(),
    )
    .await
    .unwrap();
    read_available(&mut stream).await;
    assert!(other.has_secret());
    assert!(!server.has_secret());
    assert_eq!(without.gateway.counters().intercepted, 0);
}

#[tokio::test]
async fn an_idle_sandbox_keeps_its_authority_over_attachments() {
    let one = World::new().await;
    let two = World::new().await;
    for world in [&one, &two] {
        world.record(HOST, OK).await;
        // One client configuration trusts both.
        assert!(world.tls(HOST, &[]).await.is_ok());
    }
}

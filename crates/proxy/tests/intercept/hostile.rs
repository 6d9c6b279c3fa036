//! Programs that want the secret to go elsewhere, over HTTP/1.1.

use std::time::Duration;

use model::injection::PathPattern;
use tokio::io::AsyncWriteExt;

use crate::support::{HOST, OTHER, SECRET, World, read_available, rule};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Sends a request, in which `@` is the authority of the host. Returns the statuses that came back, and what the server
/// got.
async fn attack(world: &World, request: &str) -> (Vec<u16>, String) {
    let server = world.record(HOST, OK).await;
    let other = world.record(OTHER, OK).await;
    let request = request.replace('@', &world.authority());
    let answer = world.raw(request.as_bytes()).await;
    let statuses = answer
        .match_indices("HTTP/1.")
        .map(|(at, _)| answer[at + 9..at + 12].parse().unwrap());
    assert!(!answer.contains(SECRET), "{request:?}: {answer}");
    assert_eq!(*other.connections.lock(), 0, "{request:?}");
    let counters = world.gateway.counters();
    assert_eq!(counters.intercepted, 1, "{request:?}");
    (statuses.collect(), server.text())
}

#[track_caller]
fn assert_no_secret(request: &str, seen: &str) {
    assert!(!seen.contains(SECRET), "{request:?}: {seen}");
}

/// Requests that are for another host, or for none that is clear.
#[tokio::test]
async fn requests_for_other_hosts_are_not_forwarded() {
    for (request, status) in [
        ("GET / HTTP/1.1\r\nHost: other.example\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: api.example\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: api.example:1\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: @\r\nHost: other.example\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: other.example\r\nHost: @\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: @\r\nHost: @\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: @, other.example\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: user:@\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: @/../other.example\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: @#other.example\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost: @\tother.example\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\nHost:\r\n\r\n", 421),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.0\r\n\r\n", 400),
        ("GET https://other.example/ HTTP/1.1\r\nHost: @\r\n\r\n", 421),
        ("GET https://@/ HTTP/1.1\r\nHost: other.example\r\n\r\n", 421),
        ("GET http://@/ HTTP/1.1\r\nHost: @\r\n\r\n", 421),
        (
            "GET https://user:x@other.example/ HTTP/1.1\r\nHost: other.example\r\n\r\n",
            421,
        ),
        (
            "CONNECT other.example:443 HTTP/1.1\r\nHost: other.example:443\r\n\r\n",
            405,
        ),
        ("CONNECT @ HTTP/1.1\r\nHost: @\r\n\r\n", 405),
        ("OPTIONS * HTTP/1.1\r\nHost: other.example\r\n\r\n", 421),
    ] {
        let request = &request.replace("user:x@", "user:x%40").replace("user:@", "user%40");
        let (statuses, seen) = attack(&World::new().await, request).await;
        assert!(
            statuses.iter().all(|have| *have == status || *have == 400),
            "{request:?}: {statuses:?}"
        );
        assert_eq!(statuses.len(), 1, "{request:?}: {statuses:?}");
        assert_eq!(seen, "", "{request:?}");
    }
}

/// Messages that two readers could understand differently.
#[tokio::test]
async fn malformed_requests_are_refused() {
    for request in [
        // A folded header.
        "GET / HTTP/1.1\r\nHost: @\r\nX-A: 1\r\n b: 2\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: @\r\n\tX-A: 1\r\n\r\n",
        // White space before the colon.
        "GET / HTTP/1.1\r\nHost: @\r\nX-A : 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : @\r\n\r\n",
        // Not a token.
        "GET / HTTP/1.1\r\nHost: @\r\nX A: 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: @\r\nAuthorization\0: 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: @\r\n: 1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: @\r\nno colon\r\n\r\n",
        // Control characters in values.
        "GET / HTTP/1.1\r\nHost: @\r\nX-A: 1\0b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: @\r\nX-A: 1\rX-B: 2\r\n\r\n",
        // Lengths.
        "POST / HTTP/1.1\r\nHost: @\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        "POST / HTTP/1.1\r\nHost: @\r\nContent-Length: 1, 2\r\n\r\nab",
        "POST / HTTP/1.1\r\nHost: @\r\nContent-Length: +1\r\n\r\na",
        "POST / HTTP/1.1\r\nHost: @\r\nContent-Length: 0x1\r\n\r\na",
        "POST / HTTP/1.1\r\nHost: @\r\nContent-Length: -1\r\n\r\na",
        "POST / HTTP/1.1\r\nHost: @\r\nContent-Length: 99999999999999999999999\r\n\r\na",
        // Codings.
        "POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: identity\r\n\r\na",
        "POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.0\r\nHost: @\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        // Request lines.
        "GET  / HTTP/1.1\r\nHost: @\r\n\r\n",
        "GET / HTTP/1.1 \r\nHost: @\r\n\r\n",
        "GET /\tHTTP/1.1\r\nHost: @\r\n\r\n",
        "GET / HTTP/2.0\r\nHost: @\r\n\r\n",
        "GET / HTTP/1.1\rHost: @\r\n\r\n",
        "GET /\r\nHost: @\r\n\r\n",
        "G\0T / HTTP/1.1\r\nHost: @\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET other HTTP/1.1\r\nHost: @\r\n\r\n",
    ] {
        let (statuses, seen) = attack(&World::new().await, request).await;
        assert!(
            statuses.len() <= 1 && statuses.iter().all(|status| *status >= 400),
            "{request:?}: {statuses:?}"
        );
        assert_eq!(seen, "", "{request:?}");
    }
}

/// Messages with a second one inside. What the server gets is framed anew, so it sees as many as the gateway did.
#[tokio::test]
async fn hidden_requests_stay_hidden() {
    let inner = "GET /inner HTTP/1.1\r\nHost: @\r\n\r\n";
    let chunk = format!("{:x}\r\n{inner}\r\n0\r\n\r\n", inner.len());
    for (request, heads) in [
        (
            format!("POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: Chunked\r\n\r\n{chunk}"),
            Some(1),
        ),
        (
            format!("POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding:\tchunked\r\n\r\n{chunk}"),
            Some(1),
        ),
        (
            format!(
                "GET / HTTP/1.1\r\nHost: @\r\nContent-Length: {}\r\n\r\n{inner}",
                inner.len()
            ),
            Some(1),
        ),
        (
            format!("POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: chunked\r\n\r\n0;x=\"\r\n\r\n{inner}"),
            None,
        ),
        (
            format!(
                "POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nAuthorization: mine\r\n\r\n{inner}"
            ),
            None,
        ),
        (
            format!("POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff1\r\n{inner}"),
            Some(1),
        ),
        (
            format!("POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n{inner}"),
            Some(1),
        ),
        (
            format!("POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: chunked\r\n\r\n2 2\r\n{inner}"),
            Some(1),
        ),
    ] {
        let world = World::with(vec![rule(PathPattern::Prefix("/inner".to_owned()))], |_, _| {}).await;
        let length = world.authority().len();
        // Lengths were computed with `@` for the authority.
        let inner_length = inner.len() - 1 + length;
        let request = request
            .replace(
                &format!("Content-Length: {}\r\n\r\nGET", inner.len()),
                &format!("Content-Length: {inner_length}\r\n\r\nGET"),
            )
            .replace(
                &format!("{:x}\r\nGET", inner.len()),
                &format!("{inner_length:x}\r\nGET"),
            );
        let (statuses, seen) = attack(&world, &request).await;
        // The inner request counts if the gateway saw it as one: then it has the header, and is a message of its own.
        let seen_heads = seen.matches(" HTTP/1.1\r\n").count();
        let injected = usize::try_from(world.gateway.counters().injected).unwrap();
        assert!(seen.matches(SECRET).count() <= injected, "{request:?}: {seen}");
        assert!(statuses.len() <= 2, "{request:?}: {statuses:?}");
        if heads == Some(1) {
            assert_eq!(injected, 0, "{request:?}: {seen}");
        } else {
            assert!(seen_heads <= 1 + injected, "{request:?}: {seen}");
        }
        for head in seen
            .split("\r\n\r\n")
            .filter(|part| part.contains(" HTTP/1.1\r\n") && !part.starts_with("GET /inner"))
        {
            let lower = head.to_lowercase();
            assert!(
                !(lower.contains("content-length:") && lower.contains("transfer-encoding:")),
                "{request:?}: {seen}"
            );
        }
    }
}

/// Paths that are not those of the rule, whatever way a server may read them.
#[tokio::test]
async fn paths_do_not_lead_around_a_rule() {
    for path in [
        "/",
        "/v1",
        "/v2/",
        "/V1/a",
        "//v1/a",
        "/v1/../admin",
        "/v1/%2e%2e/admin",
        "/v1/.%2E/admin",
        "/v1/..%2fadmin",
        "/v1/..%2Fadmin",
        "/v1/..%5cadmin",
        "/v1/..\\admin",
        "/v1/..;/admin",
        "/v1/..;x=y/admin",
        "/v1/%252e%252e/admin",
        "/v1/a/..//../admin",
        "/v1/%",
        "/v1/%zz",
        "/v1/%00",
        "/v1/%0d%0aX:y",
        "/./v2/../v2/a",
        "/v1%2fa",
        "/x/..%2fv1/a",
        "?/v1/a",
    ] {
        let world = World::with(vec![rule(PathPattern::Prefix("/v1/".to_owned()))], |_, _| {}).await;
        let request = format!("GET {path} HTTP/1.1\r\nHost: @\r\n\r\n");
        let (_, seen) = attack(&world, &request).await;
        assert_no_secret(&request, &seen);
        assert_eq!(world.gateway.counters().injected, 0, "{path}");
    }
    for path in [
        "/v1/",
        "/v1/a",
        "/v1/%61",
        "/v1/x/../a",
        "/./v1/a",
        "/v1/a?x=/../../admin",
        "/v1/a//b",
    ] {
        let world = World::with(vec![rule(PathPattern::Prefix("/v1/".to_owned()))], |_, _| {}).await;
        let (_, seen) = attack(&world, &format!("GET {path} HTTP/1.1\r\nHost: @\r\n\r\n")).await;
        assert!(seen.contains(SECRET), "{path}");
    }
}

/// Headers with which a program wants to keep its own value, or have ours removed.
#[tokio::test]
async fn headers_of_the_program_do_not_survive() {
    for headers in [
        "Authorization: mine",
        "AUTHORIZATION: mine",
        "authorization: mine\r\nAuthorization: mine",
        "Connection: authorization\r\nAuthorization: mine",
        "Connection: close, Authorization",
        "Connection: keep-alive\r\nConnection: authorization",
        "Proxy-Connection: authorization\r\nAuthorization: mine",
        "Connection: upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nAuthorization: mine",
        "Connection: upgrade\r\nUpgrade: websocket\r\nAuthorization: mine",
        "Connection: upgrade, authorization\r\nUpgrade: TLS/1.0",
        "TE: trailers, gzip\r\nAuthorization: mine",
    ] {
        let request = format!("GET / HTTP/1.1\r\nHost: @\r\n{headers}\r\n\r\n");
        let (statuses, seen) = attack(&World::new().await, &request).await;
        assert_eq!(statuses, [200], "{request:?}");
        assert_eq!(seen.matches(SECRET).count(), 1, "{request:?}: {seen}");
        assert!(
            !seen.contains("mine") && !seen.contains("h2c") && !seen.contains("TLS/1.0"),
            "{request:?}: {seen}"
        );
        assert_eq!(
            seen.to_lowercase().matches("authorization").count(),
            1,
            "{request:?}: {seen}"
        );
    }
}

/// Heads that the library accepts and that other servers understand differently. Requests before them are answered.
#[tokio::test]
async fn ambiguous_heads_are_refused() {
    let inner = "GET /inner HTTP/1.1\r\nHost: @\r\n\r\n";
    let lengths = "Content-Length: 5\r\nTransfer-Encoding: chunked";
    let reversed = "transfer-encoding:\tChunked\r\nX-A: 1\r\nCONTENT-LENGTH:5";
    for request in [
        format!("POST / HTTP/1.1\r\nHost: @\r\n{lengths}\r\n\r\n0\r\n\r\n{inner}"),
        format!("POST / HTTP/1.1\r\nHost: @\r\n{reversed}\r\n\r\n0\r\n\r\n{inner}"),
        format!("POST / HTTP/1.1\r\n{lengths}\r\nHost: @\r\n\r\n0\r\n\r\n{inner}"),
        format!("POST / HTTP/1.1\r\nHost: @\r\nTransfer-Encoding: identity\r\nContent-Length: 0\r\n\r\n{inner}"),
        "GET / HTTP/1.1\nHost: @\n\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: @\nX-A: 1\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nHost: @\r\n\n".to_owned(),
        "\nGET / HTTP/1.1\r\nHost: @\r\n\r\n".to_owned(),
    ] {
        let world = World::new().await;
        let (statuses, seen) = attack(&world, &request).await;
        assert_eq!((statuses.as_slice(), seen.as_str()), (&[400][..], ""), "{request:?}");
        assert_eq!(world.gateway.counters().requests_refused, 1, "{request:?}");

        for before in [
            "GET /a HTTP/1.1\r\nHost: @\r\n\r\n",
            "POST /a HTTP/1.1\r\nHost: @\r\nContent-Length: 4\r\n\r\na\n\nb",
        ] {
            let request = format!("{before}{request}");
            let (statuses, seen) = attack(&World::new().await, &request).await;
            assert_eq!(statuses, [200, 400], "{request:?}");
            assert_eq!(seen.matches(" HTTP/1.1\r\n").count(), 1, "{request:?}: {seen}");
        }
    }
    // Its twin: empty lines before a request, and the same bytes in a body.
    let request = "\r\n\r\nPOST / HTTP/1.1\r\nHost: @\r\nContent-Length: 19\r\n\r\nContent-Length: 5\n\n";
    let (statuses, seen) = attack(&World::new().await, request).await;
    assert_eq!(statuses, [200]);
    assert!(seen.ends_with("Content-Length: 5\n\n"), "{seen:?}");
}

/// What follows an upgrade is not checked, so it must not be a request.
#[tokio::test]
async fn nothing_follows_a_refused_upgrade() {
    for upgrade in [
        "Connection: upgrade\r\nUpgrade: websocket",
        "Upgrade: WebSocket",
        "Upgrade: h2c\r\nUpgrade: h2c, websocket",
    ] {
        let request = format!("GET / HTTP/1.1\r\nHost: @\r\n{upgrade}\r\n\r\nGET /inner HTTP/1.1\nHost: @\n\n");
        let (statuses, seen) = attack(&World::new().await, &request).await;
        assert_eq!(statuses, [200], "{request:?}");
        assert_eq!(seen.matches(" HTTP/1.1\r\n").count(), 1, "{request:?}: {seen}");
    }
}

#[tokio::test]
async fn heads_are_bounded() {
    // The bound is checked after each read, which can have as many bytes again.
    let long = format!("GET /{} HTTP/1.1\r\nHost: @\r\n\r\n", "a".repeat(160 << 10));
    let value = format!("GET / HTTP/1.1\r\nHost: @\r\nX-A: {}\r\n\r\n", "a".repeat(160 << 10));
    let many = format!("GET / HTTP/1.1\r\nHost: @\r\n{}\r\n", "X-A: 1\r\n".repeat(300));
    for request in [long, value, many] {
        let (statuses, seen) = attack(&World::new().await, &request).await;
        assert!(
            statuses.iter().all(|status| [414, 431, 400].contains(status)),
            "{statuses:?}"
        );
        assert_eq!(seen, "");
    }
}

#[tokio::test]
async fn requests_in_a_row_are_each_judged() {
    let world = World::with(vec![rule(PathPattern::Exact("/v1".to_owned()))], |_, _| {}).await;
    let request = "GET /a HTTP/1.1\r\nHost: @\r\n\r\nGET /v1 HTTP/1.1\r\nHost: @\r\n\r\n\
                   GET /b HTTP/1.1\r\nHost: @\r\n\r\nGET /v1 HTTP/1.1\r\nHost: other.example\r\n\r\n";
    let (statuses, seen) = attack(&world, request).await;
    assert_eq!(statuses, [200, 200, 200, 421]);
    assert_eq!(seen.matches(SECRET).count(), 1);
    assert!(!seen.contains("other.example"));
}

/// The name in the handshake decides. One that is not clear is no name.
#[tokio::test]
async fn a_handshake_that_never_ends_is_not_intercepted() {
    let world = World::new().await;
    let server = world.record(HOST, OK).await;
    let mut stream = world.connect().await;
    // The head of a record of a handshake, and nothing else.
    stream.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 252]).await.unwrap();
    // Gives what must not happen the time to happen.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(*server.connections.lock(), 0);
    assert_eq!(world.gateway.counters().intercepted, 0);
}

/// A server name that differs from the host of the request only in what is not compared.
#[tokio::test]
async fn names_are_compared_without_case() {
    let world = World::new().await;
    let server = world.record(HOST, OK).await;
    let mut stream = world.tls("API.Example", &[]).await.unwrap();
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority().to_uppercase());
    stream.write_all(request.as_bytes()).await.unwrap();
    let answer = read_available(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(server.has_secret());
}

#[tokio::test]
async fn plain_http_is_not_intercepted() {
    let world = World::with(vec![rule(PathPattern::Any)], |_, policy| {
        policy.deny = vec![model::network::Cidr::ALL];
        policy.allow_domains = vec![HOST.parse().unwrap()];
    })
    .await;
    let listener = world.listen(HOST).await;
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut part = [0; 1024];
        let length = tokio::io::AsyncReadExt::read(&mut stream, &mut part).await.unwrap();
        String::from_utf8_lossy(&part[..length]).into_owned()
    });
    let mut stream = world.connect().await;
    let request = format!("GET / HTTP/1.1\r\nHost: {}\r\n\r\n", world.authority());
    stream.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(server.await.unwrap(), request);
}

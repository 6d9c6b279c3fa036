//! What the proxy answers in place of a sandbox.

use http::{HeaderMap, HeaderName, HeaderValue};
use http_body_util::BodyExt as _;
use proxy::ingress::answer::Answer;
use proxy::ingress::{Access, Unanswered};
use serde_json::{Value, json};

use super::support::{ID, exchange, front, front_with, get, http_origin, origin};

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    pairs
        .iter()
        .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
        .collect()
}

async fn body(answer: &Answer, request: &HeaderMap) -> (String, String) {
    let response = answer.response(request);
    let content_type = response.headers()["content-type"].to_str().expect("text").to_owned();
    let bytes = response.into_body().collect().await.expect("a body").to_bytes();
    (content_type, String::from_utf8(bytes.to_vec()).expect("text"))
}

#[tokio::test]
async fn programs_get_json_with_the_fragments_that_clients_read() {
    let id = || ID.parse().expect("an id");
    for (answer, status, want) in [
        (Answer::NotFound(id()), 502, json!({"sandboxId": ID, "code": 502})),
        (
            Answer::PortClosed(id(), 3000),
            502,
            json!({"sandboxId": ID, "code": 502, "port": 3000}),
        ),
        (
            Answer::NoTls(id(), 8443),
            502,
            json!({"sandboxId": ID, "code": 502, "port": 8443}),
        ),
        (
            Answer::Unanswered(id(), 22, Unanswered::Ssh),
            502,
            json!({"sandboxId": ID, "code": 502, "port": 22}),
        ),
        (Answer::TokenMissing(id()), 403, json!({"sandboxId": ID, "code": 403})),
        (Answer::TokenWrong(id()), 403, json!({"sandboxId": ID, "code": 403})),
        (
            Answer::Reserved("/in\"it".to_owned()),
            404,
            json!({"path": "/in\"it", "code": 404}),
        ),
        (Answer::BadRequest("no".to_owned()), 400, json!({"code": 400})),
        (Answer::BadSignature, 401, json!({"code": 401})),
        (Answer::RateLimited { seconds: 3 }, 429, json!({"code": 429})),
        (
            Answer::TooManyConnections { id: id(), limit: 7 },
            429,
            json!({"sandboxId": ID, "code": 429, "connectionLimit": 7}),
        ),
        (Answer::ResumeRefused(id()), 403, json!({"sandboxId": ID, "code": 403})),
        (Answer::Transitioning(id()), 409, json!({"sandboxId": ID, "code": 409})),
        (
            Answer::ResumeImpossible(id()),
            503,
            json!({"sandboxId": ID, "code": 503}),
        ),
        (
            Answer::ResumeDelayed { id: id(), seconds: 4 },
            409,
            json!({"sandboxId": ID, "code": 409}),
        ),
        (
            Answer::ResumeLimited {
                id: id(),
                why: "full".to_owned(),
            },
            429,
            json!({"sandboxId": ID, "code": 429}),
        ),
        (Answer::Unavailable, 503, json!({"code": 503})),
    ] {
        assert_eq!(answer.status(), status);
        let (content_type, text) = body(&answer, &HeaderMap::new()).await;
        assert_eq!(content_type, "application/json; charset=utf-8");
        let mut got: Value = serde_json::from_str(&text).expect("JSON");
        let message = got["message"].take().as_str().expect("a message").to_owned();
        let got_keys = got.as_object_mut().expect("an object");
        got_keys.remove("message");
        let detail = got_keys.remove("detail");
        assert_eq!(got, want);
        // Word for word: some clients compare the whole text, and what else there is to say is in `detail`.
        let whole = match answer {
            Answer::NotFound(_) => "The sandbox was not found",
            Answer::PortClosed(..) => "The sandbox is running but port is not open",
            Answer::NoTls(..) => "The sandbox is running but the server on this port does not speak TLS",
            Answer::Unanswered(..) => "The sandbox is running but the server on this port speaks SSH",
            Answer::TokenMissing(_) => {
                "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
            }
            Answer::TokenWrong(_) => {
                "Sandbox is secured with traffic access token. Provided token in header 'e2b-traffic-access-token' is \
                 invalid"
            }
            Answer::Reserved(_) => {
                "This endpoint is reserved for the E2B control plane and is not reachable through the sandbox URL"
            }
            Answer::BadRequest(_) => "no",
            Answer::BadSignature => "The signature matches no running sandbox",
            Answer::RateLimited { .. } => "Too many invalid signatures, try again in 3 s",
            Answer::TooManyConnections { .. } => "The sandbox has too many concurrent incoming connections (limit: 7)",
            Answer::ResumeRefused(_) => {
                "This sandbox can't be resumed with the credentials provided. Check your access token and try again."
            }
            Answer::Transitioning(_) | Answer::ResumeDelayed { .. } => {
                "The sandbox is still transitioning. Try again in a moment."
            }
            Answer::ResumeImpossible(_) => "The sandbox is paused, and cannot be resumed at present",
            Answer::ResumeLimited { .. } => "full",
            Answer::Unavailable => "The platform is not ready, try again later",
        };
        assert_eq!(message, whole);
        let is_plain = matches!(
            answer,
            Answer::Reserved(_)
                | Answer::BadRequest(_)
                | Answer::RateLimited { .. }
                | Answer::TooManyConnections { .. }
                | Answer::Transitioning(_)
                | Answer::ResumeLimited { .. }
                | Answer::Unavailable
        );
        assert_eq!(detail.is_none(), is_plain, "{detail:?}");
    }
}

#[tokio::test]
async fn people_get_a_page_and_scripts_do_not() {
    const BROWSER: (&str, &str) = ("user-agent", "Mozilla/5.0 (X11) Firefox/140");
    let answer = Answer::PortClosed(ID.parse().expect("an id"), 3000);
    for (request, page) in [
        (headers(&[]), false),
        (headers(&[BROWSER]), true),
        (headers(&[("user-agent", "curl/8")]), false),
        (headers(&[BROWSER, ("accept", "application/json")]), false),
        (headers(&[BROWSER, ("accept", "text/html,application/json")]), true),
        (headers(&[BROWSER, ("sec-fetch-mode", "cors")]), false),
        (headers(&[BROWSER, ("sec-fetch-mode", "websocket")]), false),
        (headers(&[BROWSER, ("x-requested-with", "XMLHttpRequest")]), false),
        (
            headers(&[BROWSER, ("sec-fetch-mode", "navigate"), ("x-requested-with", "x")]),
            true,
        ),
    ] {
        let (content_type, text) = body(&answer, &request).await;
        assert_eq!(content_type.starts_with("text/html"), page, "{request:?}");
        if page {
            assert!(text.starts_with("<html") && text.ends_with("</html>"), "{text}");
            assert!(text.contains("Closed Port Error") && text.contains(ID));
            assert!(text.contains("no service running on port 3000"));
        }
    }
    let hostile = Answer::Reserved("/<script>alert('&\"')</script>".to_owned());
    let (_, text) = body(&hostile, &headers(&[BROWSER])).await;
    assert!(!text.contains("<script>"), "{text}");
    assert!(text.contains("&lt;script&gt;alert(&#39;&amp;&quot;&#39;)&lt;/script&gt;"));
}

#[tokio::test]
async fn control_routes_of_the_agent_are_nowhere_from_outside() {
    let guest = http_origin(|_| async { http::Response::default() }).await;
    let front = front([(49983, guest), (3000, guest)]).await;
    // Before the sandbox is looked for, and for every method.
    for host in [format!("49983-{ID}.x"), "49983-iunknown.x".to_owned()] {
        for line in ["POST /init", "GET /%69nit", "DELETE /a/../freeze"] {
            let text = exchange(
                front.addr,
                &format!("{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"),
            )
            .await;
            assert!(text.starts_with("HTTP/1.1 404 "), "{line}: {text}");
        }
    }
    for (host, line) in [("49983", "GET /health"), ("3000", "POST /init")] {
        let text = exchange(
            front.addr,
            &format!("{line} HTTP/1.1\r\nHost: {host}-{ID}.x\r\nConnection: close\r\n\r\n"),
        )
        .await;
        assert!(text.starts_with("HTTP/1.1 200 "), "{line}: {text}");
    }
}

#[tokio::test]
async fn a_private_sandbox_asks_for_its_token_except_on_the_agents_port() {
    let guest = http_origin(|_| async { http::Response::default() }).await;
    let access = Access {
        traffic_token: Some("secret".to_owned().into()),
        ..Access::default()
    };
    let front = front_with([(49983, guest), (3000, guest)], access).await;
    for (port, token, status) in [
        (3000, None, "403"),
        (3000, Some("wrong"), "403"),
        (3000, Some("secre"), "403"),
        (3000, Some(""), "403"),
        (3000, Some("secret"), "200"),
        (49983, None, "200"),
        (49983, Some("wrong"), "200"),
    ] {
        let header = token.map_or(String::new(), |token| format!("E2b-Traffic-Access-Token: {token}\r\n"));
        let request = format!("GET / HTTP/1.1\r\nHost: {port}-{ID}.x\r\n{header}Connection: close\r\n\r\n");
        let text = exchange(front.addr, &request).await;
        assert_eq!(&text[9..12], status, "{port} {token:?}");
    }
}

#[tokio::test]
async fn gone_sandboxes_and_broken_servers_are_told_apart() {
    let hangs_up = origin(|mut wire| async move {
        wire.head().await;
    })
    .await;
    let babbles = origin(|mut wire| async move {
        wire.head().await;
        wire.write("220 smtp.example.com ESMTP\r\n").await;
    })
    .await;
    let switches = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
            .await;
        wire.rest().await.1.ok();
    })
    .await;
    let secure_shell = origin(|mut wire| async move {
        wire.write("SSH-2.0-OpenSSH_10.0\r\n").await;
        wire.rest().await.1.ok();
    })
    .await;
    let breaks_off = origin(|mut wire| async move {
        wire.head().await;
        wire.write("HTTP/1.1 200 OK\r\nContent-").await;
    })
    .await;
    // As some do with what is not TLS. Others close the connection: see `https_ports`.
    let alerts = origin(|mut wire| async move {
        wire.head().await;
        wire.write("\x15\x03\x03\x00\x02\x02\x32").await;
    })
    .await;
    let front = front([
        (1, hangs_up),
        (2, babbles),
        (3, switches),
        (4, secure_shell),
        (5, breaks_off),
        (6, alerts),
        (protocol::agent::PORT, hangs_up),
    ])
    .await;
    for (request, fragment) in [
        (get(1), "closed the connection without an answer"),
        (get(2), "does not speak HTTP\""),
        (get(3), "sent an invalid answer"),
        (get(4), "speaks SSH"),
        (get(5), "sent an invalid answer"),
        (get(6), "speaks TLS"),
        (get(7), "port is not open"),
        // Its clients know two answers.
        (get(protocol::agent::PORT), "port is not open"),
        (get(1).replace(ID, "iunknown"), "was not found"),
        (get(1).replace(ID, "igone"), "was not found"),
        (get(1).replace(ID, "inowhere"), "was not found"),
    ] {
        let text = exchange(front.addr, &request).await;
        assert!(text.starts_with("HTTP/1.1 502 "), "{text}");
        assert!(text.contains(fragment), "{text}");
    }
    let connect = format!("CONNECT 3000-{ID}.x:80 HTTP/1.1\r\nHost: 3000-{ID}.x\r\nConnection: close\r\n\r\n");
    assert!(exchange(front.addr, &connect).await.starts_with("HTTP/1.1 400 "));
}

#[tokio::test]
async fn an_answer_reaches_a_client_that_is_still_sending() {
    let front = front([]).await;
    let body = "x".repeat(8 * 1024 * 1024);
    let request = get(3000).replace(ID, "igone").replace(
        "GET / HTTP/1.1",
        &format!("POST / HTTP/1.1\r\nContent-Length: {}", body.len()),
    );
    for _ in 0..20 {
        // Like most clients: everything is written before anything is read.
        let text = exchange(front.addr, &format!("{request}{body}")).await;
        assert!(text.contains("was not found"), "{text}");
    }
}

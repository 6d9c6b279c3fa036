//! Webhooks: `/events/webhooks`, and what receivers get.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use parking_lot::Mutex;
use serde_json::{Value, json};
use server::settings::{ServerSettings, WebhookSettings};
use sha2::{Digest as _, Sha256};
use store::keys::SealedSecret;
use store::webhooks::WebhookRow;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::platform::{TestPlatform, pause, team, within};

const SECRET: &str = "a secret of the team";

/// Allows receivers of these tests, which are on loopback and without TLS.
fn local(settings: &mut ServerSettings) {
    settings.webhooks.allow_private = vec!["127.0.0.0/8".parse().expect("a network")];
    settings.webhooks.allow_http = true;
}

/// What a receiver got.
#[derive(Debug, Clone)]
struct Received {
    head: String,
    body: String,
}

impl Received {
    fn header(&self, name: &str) -> &str {
        let line = self
            .head
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.unwrap_or_else(|| panic!("no {name} in {}", self.head))
    }

    fn event(&self) -> Value {
        serde_json::from_str(&self.body).expect("JSON")
    }
}

/// A receiver, which answers with a text of its own; with none it never answers.
struct Receiver {
    address: SocketAddr,
    received: Arc<Mutex<Vec<Received>>>,
}

impl Receiver {
    async fn start(answer: impl Fn(usize) -> Option<String> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("an address");
        let received: Arc<Mutex<Vec<Received>>> = Arc::default();
        let (all, answer) = (Arc::clone(&received), Arc::new(answer));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (all, answer) = (Arc::clone(&all), Arc::clone(&answer));
                tokio::spawn(async move {
                    let (mut stream, one) = read(stream).await;
                    let n = {
                        let mut all = all.lock();
                        all.push(one);
                        all.len() - 1
                    };
                    match answer(n) {
                        Some(text) => {
                            let _ = stream.write_all(text.as_bytes()).await;
                        }
                        None => {
                            let _ = stream.read(&mut [0]).await;
                        }
                    }
                });
            }
        });
        Self { address, received }
    }

    fn url(&self) -> String {
        format!("http://{}/hook?x=1", self.address)
    }

    fn count(&self) -> usize {
        self.received.lock().len()
    }

    async fn until(&self, count: usize) -> Vec<Received> {
        within(async {
            while self.count() < count {
                pause().await;
            }
        })
        .await;
        self.received.lock().clone()
    }
}

/// Reads a request.
async fn read(mut stream: TcpStream) -> (TcpStream, Received) {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let (head, body) = (head.to_owned(), body.to_owned());
            let one = Received { head, body };
            let length: usize = one.header("content-length").parse().expect("a number");
            if one.body.len() >= length {
                return (stream, one);
            }
        }
        let mut part = [0; 4096];
        let count = stream.read(&mut part).await.expect("a request");
        assert!(count > 0, "the request is not complete: {text}");
        bytes.extend_from_slice(&part[..count]);
    }
}

#[expect(clippy::unnecessary_wraps, reason = "an answer of a receiver")]
fn answer(status: u16) -> Option<String> {
    Some(format!("HTTP/1.1 {status} X\r\ncontent-length: 2\r\n\r\nok"))
}

async fn hook(platform: &TestPlatform, url: &str, events: &[&str]) -> String {
    let events: Vec<String> = events.iter().map(|word| format!("sandbox.lifecycle.{word}")).collect();
    let body = json!({"name": "a hook", "url": url, "events": events, "signatureSecret": SECRET});
    let reply = platform.call("POST", "/events/webhooks", &body.to_string()).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    assert!(!reply.text.contains(SECRET), "{reply:?}");
    reply.json["id"].as_str().expect("an id").to_owned()
}

/// Attempts of a webhook, oldest first.
async fn deliveries(platform: &TestPlatform, id: &str) -> Vec<Value> {
    let reply = platform
        .call("GET", &format!("/events/webhooks/{id}/deliveries?limit=100"), "")
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let mut all = reply.json.as_array().expect("a list").clone();
    all.reverse();
    all
}

async fn until_attempts(platform: &TestPlatform, id: &str, count: usize) -> Vec<Value> {
    within(async {
        loop {
            let all = deliveries(platform, id).await;
            if all.len() >= count {
                return all;
            }
            pause().await;
        }
    })
    .await
}

#[tokio::test]
async fn a_webhook_is_created_read_changed_and_deleted() {
    let platform = TestPlatform::start().await;
    let id = hook(&platform, "https://example.com/hook", &["killed", "created"]).await;
    let path = format!("/events/webhooks/{id}");
    let own = platform.call("GET", &path, "").await.json;
    assert_eq!(own["teamId"], team(1).as_str());
    assert_eq!(
        own["events"],
        json!(["sandbox.lifecycle.created", "sandbox.lifecycle.killed"])
    );
    assert_eq!(
        (&own["enabled"], &own["url"]),
        (&json!(true), &json!("https://example.com/hook"))
    );
    assert_eq!(platform.call("GET", "/events/webhooks", "").await.json, json!([own]));
    let change = json!({"enabled": false, "url": "https://example.com/other", "signatureSecret": "another"});
    let changed = platform.call("PATCH", &path, &change.to_string()).await;
    assert!(!changed.text.contains("another"), "{changed:?}");
    let want = json!({"enabled": false, "url": "https://example.com/other"});
    let mut all = own.clone();
    for (key, value) in want.as_object().expect("an object") {
        all[key] = value.clone();
    }
    assert_eq!(changed.json, all);
    for bad in [
        json!({"url": "http://example.com"}),
        json!({"url": "https://169.254.169.254/latest"}),
        json!({"url": "https://localhost/"}),
        json!({"url": format!("https://example.com/{}", "a".repeat(2048))}),
        json!({"name": ""}),
        json!({"events": []}),
        json!({"events": ["created"]}),
        json!({"signatureSecret": ""}),
    ] {
        let reply = platform.call("PATCH", &path, &bad.to_string()).await;
        reply.error(400);
    }
    assert_eq!(platform.call("GET", &path, "").await.json, all);
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
    platform.call("GET", &path, "").await.error(404);
    platform.call("DELETE", &path, "").await.error(404);
}

#[tokio::test]
async fn a_team_has_a_limited_number_of_webhooks() {
    let platform = TestPlatform::start_adjusted(|settings| settings.webhooks = WebhookSettings::default()).await;
    let mut last = String::new();
    for _ in 0..10 {
        last = hook(&platform, "https://example.com/hook", &["killed"]).await;
    }
    let body = json!({
        "name": "one more", "url": "https://example.com/", "events": ["sandbox.lifecycle.killed"], "signatureSecret": "s"
    });
    let reply = platform.call("POST", "/events/webhooks", &body.to_string()).await;
    assert!(reply.error(429).contains("10 webhooks"), "{reply:?}");
    assert_eq!(reply.json["error_code"], "webhook_limit_reached");
    platform.call("DELETE", &format!("/events/webhooks/{last}"), "").await;
    hook(&platform, "https://example.com/hook", &["killed"]).await;

    let off = TestPlatform::start_adjusted(|settings| settings.webhooks.per_team = 0).await;
    let reply = off.call("POST", "/events/webhooks", &body.to_string()).await;
    assert!(reply.error(403).contains("switched"), "{reply:?}");
}

#[tokio::test]
async fn events_are_sent_signed() {
    let platform = TestPlatform::start_adjusted(local).await;
    let receiver = Receiver::start(|_| answer(204)).await;
    let id = hook(&platform, &receiver.url(), &["created", "killed"]).await;
    let sandbox = platform.create(r#","metadata":{"a":"b"}"#).await;
    platform
        .call("POST", &format!("/sandboxes/{sandbox}/timeout"), r#"{"timeout":50}"#)
        .await;
    platform.call("DELETE", &format!("/sandboxes/{sandbox}"), "").await;
    let mut all = receiver.until(2).await;
    // They may be sent at the same time.
    all.sort_by_key(|one| one.event()["timestamp"].as_str().map(str::to_owned));
    for one in &all {
        assert!(one.head.starts_with("POST /hook?x=1 HTTP/1.1\r\n"), "{}", one.head);
        assert_eq!(one.header("host"), receiver.address.to_string());
        assert_eq!(one.header("content-type"), "application/json");
        assert_eq!(one.header("e2b-webhook-id"), id);
        assert_eq!(one.header("e2b-signature-version"), "v1");
        let hash = Sha256::digest(format!("{SECRET}{}", one.body));
        assert_eq!(one.header("e2b-signature"), STANDARD_NO_PAD.encode(hash));
    }
    let listed = platform
        .call(
            "GET",
            "/events/sandboxes?types=sandbox.lifecycle.created,sandbox.lifecycle.killed",
            "",
        )
        .await
        .json;
    let mut kinds: Vec<Value> = all.iter().map(Received::event).collect();
    kinds.sort_by_key(|event| event["id"].as_str().map(str::to_owned));
    let mut listed = listed.as_array().expect("a list").clone();
    listed.sort_by_key(|event| event["id"].as_str().map(str::to_owned));
    // What was sent is what is listed, and nothing else was sent.
    assert_eq!(kinds, listed);
    let log = until_attempts(&platform, &id, 2).await;
    for one in &log {
        assert_eq!(
            (&one["status"], &one["error"], &one["attempt"]),
            (&json!(204), &Value::Null, &json!(1))
        );
        assert_eq!(one["nextAttemptAt"], Value::Null);
        assert!(
            all.iter().any(|sent| one["id"] == sent.header("e2b-delivery-id")),
            "{one}"
        );
    }
    assert_eq!(receiver.count(), 2);
}

#[tokio::test]
async fn an_event_is_sent_again_until_it_is_received() {
    let platform = TestPlatform::start_adjusted(local).await;
    let receiver = Receiver::start(|n| answer(if n < 2 { 500 } else { 200 })).await;
    let id = hook(&platform, &receiver.url(), &["created"]).await;
    platform.create("").await;
    let first = until_attempts(&platform, &id, 1).await;
    assert_eq!(
        (&first[0]["status"], &first[0]["error"]),
        (&json!(500), &json!("status"))
    );
    // Not before its time: the second attempt is due after ten seconds at least.
    platform.clock.advance(9);
    let sandbox = platform.create("").await;
    platform.clock.advance(4);
    until_attempts(&platform, &id, 3).await;
    platform.clock.advance(37);
    let log = until_attempts(&platform, &id, 4).await;
    let of_first = |one: &&Value| one["eventId"] == first[0]["eventId"];
    let own: Vec<&Value> = log.iter().filter(of_first).collect();
    let attempts: Vec<&Value> = own.iter().map(|one| &one["attempt"]).collect();
    assert!(attempts == [1, 2] || attempts == [1, 2, 3], "{log:?}");
    assert_eq!(
        own.last().map(|one| &one["error"]),
        Some(&Value::Null),
        "{log:?} {sandbox}"
    );
    let ids: std::collections::BTreeSet<&str> = log.iter().filter_map(|one| one["id"].as_str()).collect();
    assert_eq!(ids.len(), log.len());
}

#[tokio::test]
async fn attempts_end() {
    let platform = TestPlatform::start_adjusted(local).await;
    let receiver = Receiver::start(|_| answer(503)).await;
    let id = hook(&platform, &receiver.url(), &["created"]).await;
    platform.create("").await;
    for count in 1..=6 {
        let log = until_attempts(&platform, &id, count).await;
        assert_eq!(log[count - 1]["nextAttemptAt"].is_string(), count < 6, "{log:?}");
        platform.clock.advance(1000);
    }
    assert!(platform.store.webhooks_waiting().await.expect("a database").is_empty());
}

#[tokio::test]
async fn attempts_are_kept_for_seven_days() {
    const DAYS_7_S: i64 = 7 * 24 * 3600;
    // Everything but how often is as without a configuration.
    let platform = TestPlatform::start_adjusted(|settings| {
        local(settings);
        settings.records.purge_interval = Duration::from_millis(10);
    })
    .await;
    let receiver = Receiver::start(|_| answer(200)).await;
    let id = hook(&platform, &receiver.url(), &["created"]).await;
    platform.create("").await;
    let old = until_attempts(&platform, &id, 1).await;
    platform.clock.advance(1);
    platform.create("").await;
    let both = until_attempts(&platform, &id, 2).await;
    // The first is as old as one may be, and the second a second younger.
    platform.clock.advance(DAYS_7_S - 1);
    let left = within(async {
        loop {
            let left = deliveries(&platform, &id).await;
            if !left.contains(&old[0]) {
                return left;
            }
            pause().await;
        }
    })
    .await;
    assert_eq!(left, both[1..]);
    platform.clock.advance(1);
    within(async {
        while !deliveries(&platform, &id).await.is_empty() {
            pause().await;
        }
    })
    .await;
    assert_eq!(receiver.count(), 2);
}

#[tokio::test]
async fn redirects_are_not_followed() {
    let platform = TestPlatform::start_adjusted(local).await;
    let inner = Receiver::start(|_| answer(200)).await;
    let place = inner.url();
    let outer = Receiver::start(move |_| {
        Some(format!(
            "HTTP/1.1 307 X\r\nlocation: {place}\r\ncontent-length: 0\r\n\r\n"
        ))
    })
    .await;
    let id = hook(&platform, &outer.url(), &["created"]).await;
    platform.create("").await;
    let log = until_attempts(&platform, &id, 1).await;
    assert_eq!((&log[0]["status"], &log[0]["error"]), (&json!(307), &json!("redirect")));
    assert_eq!(inner.count(), 0);
}

#[tokio::test]
async fn what_is_no_answer_is_an_error() {
    let platform = TestPlatform::start_adjusted(local).await;
    let endless = "HTTP/1.1 200 OK\r\n".to_owned() + &"x: y\r\n".repeat(20_000);
    for (text, error) in [
        ("nonsense\r\n\r\n".to_owned(), "answer"),
        (endless, "answer"),
        (String::new(), "answer"),
    ] {
        let receiver = Receiver::start(move |_| Some(text.clone())).await;
        let id = hook(&platform, &receiver.url(), &["created"]).await;
        platform.create("").await;
        let log = until_attempts(&platform, &id, 1).await;
        assert_eq!((&log[0]["status"], &log[0]["error"]), (&Value::Null, &json!(error)));
        platform.call("DELETE", &format!("/events/webhooks/{id}"), "").await;
    }
    // A port that is taken, at which nothing listens.
    let held = TcpSocket::new_v4().expect("a socket");
    held.bind("127.0.0.1:0".parse().expect("an address")).expect("bind");
    let closed = held.local_addr().expect("an address");
    let id = hook(&platform, &format!("http://{closed}/"), &["created"]).await;
    platform.create("").await;
    assert_eq!(until_attempts(&platform, &id, 1).await[0]["error"], "connect");
    // A port without TLS, of which the first bytes are no handshake.
    let plain = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = plain.local_addr().expect("an address");
    let id = hook(&platform, &format!("https://{address}/"), &["created"]).await;
    platform.create("").await;
    let (mut stream, _) = within(plain.accept()).await.expect("a connection");
    stream
        .write_all(b"220 mail.example.com ESMTP\r\n")
        .await
        .expect("written");
    assert_eq!(until_attempts(&platform, &id, 1).await[0]["error"], "tls");
}

#[tokio::test]
async fn addresses_are_judged_at_each_attempt() {
    let platform = TestPlatform::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = listener.local_addr().expect("an address").port();
    // As if the name had led elsewhere when the webhook was created.
    for (n, host) in ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"].into_iter().enumerate() {
        let row = WebhookRow {
            id: format!("00000000-0000-4000-8000-00000000000{n}"),
            team_id: team(1),
            name: "n".to_owned(),
            url: format!("https://{host}:{port}/"),
            enabled: true,
            types: model::event::EventTypes::ALL,
            secret_sealed: SealedSecret::new(
                server::seal::Sealer::new([8; 32])
                    .seal(&format!("webhook/00000000-0000-4000-8000-00000000000{n}"), "s")
                    .expect("sealed"),
            ),
            dropped: 0,
            created_us: 0,
        };
        platform.store.webhook_insert(&row).await.expect("a database");
        platform.create("").await;
        let log = until_attempts(&platform, &row.id, 1).await;
        assert_eq!(
            (&log[0]["status"], &log[0]["error"]),
            (&Value::Null, &json!("address")),
            "{host}"
        );
    }
    let connected = tokio::time::timeout(Duration::from_millis(1), listener.accept()).await;
    assert!(connected.is_err(), "something was sent to a closed address");
}

#[tokio::test]
async fn a_receiver_that_hangs_delays_no_other() {
    let platform = TestPlatform::start_adjusted(local).await;
    let slow = Receiver::start(|_| None).await;
    let quick = Receiver::start(|_| answer(200)).await;
    let id = hook(&platform, &slow.url(), &["created"]).await;
    hook(&platform, &quick.url(), &["created"]).await;
    for _ in 0..8 {
        platform.create("").await;
    }
    quick.until(8).await;
    slow.until(4).await;
    // No more are in flight to one webhook. Those that took too long are not any more.
    let sent = slow.count();
    assert!(sent - deliveries(&platform, &id).await.len() <= 4, "{sent}");
}

#[tokio::test]
async fn what_does_not_fit_in_the_queue_is_counted() {
    let platform = TestPlatform::start_adjusted(|settings| {
        local(settings);
        settings.records.delivery_limits.per_webhook = 5;
    })
    .await;
    let slow = Receiver::start(|_| None).await;
    let id = hook(&platform, &slow.url(), &["created"]).await;
    let dropped =
        async || platform.call("GET", &format!("/events/webhooks/{id}"), "").await.json["droppedEvents"].clone();
    for _ in 0..5 {
        platform.create("").await;
    }
    platform.call("GET", "/events/sandboxes", "").await;
    assert_eq!(dropped().await, 0);
    platform.create("").await;
    platform.call("GET", "/events/sandboxes", "").await;
    assert_eq!(dropped().await, 1);
}

#[tokio::test]
async fn events_survive_a_restart_and_the_secret_is_nowhere() {
    let platform = TestPlatform::start_adjusted(local).await;
    let slow = Receiver::start(|n| if n == 0 { None } else { answer(200) }).await;
    let id = hook(&platform, &slow.url(), &["created"]).await;
    platform.create("").await;
    slow.until(1).await;
    let platform = platform.restart().await;
    let all = slow.until(2).await;
    assert_eq!(all[0].body, all[1].body);
    assert_ne!(all[0].header("e2b-delivery-id"), all[1].header("e2b-delivery-id"));
    until_attempts(&platform, &id, 1).await;
    for file in std::fs::read_dir(platform.directory.path()).expect("a directory") {
        let path = file.expect("a file").path();
        let Ok(bytes) = std::fs::read(&path) else { continue };
        let found = bytes.windows(SECRET.len()).any(|window| window == SECRET.as_bytes());
        assert!(!found, "{}", path.display());
    }
}

#[tokio::test]
async fn of_two_servers_one_sends_an_event() {
    let platform = TestPlatform::start_adjusted(local).await;
    let beside = platform.start_beside(2).await;
    let receiver = Receiver::start(|_| answer(200)).await;
    let id = hook(&platform, &receiver.url(), &["created"]).await;
    for _ in 0..10 {
        platform.create("").await;
        beside.create("").await;
    }
    let log = until_attempts(&platform, &id, 20).await;
    assert_eq!((log.len(), receiver.count()), (20, 20));
}

#[tokio::test]
async fn a_webhook_that_is_off_gets_nothing() {
    let platform = TestPlatform::start_adjusted(local).await;
    let receiver = Receiver::start(|_| answer(200)).await;
    let off = hook(&platform, &receiver.url(), &["created"]).await;
    let reply = platform
        .call("PATCH", &format!("/events/webhooks/{off}"), r#"{"enabled":false}"#)
        .await;
    assert_eq!(reply.json["enabled"], false, "{reply:?}");
    let on = Receiver::start(|_| answer(200)).await;
    hook(&platform, &on.url(), &["created"]).await;
    platform.create("").await;
    on.until(1).await;
    assert!(deliveries(&platform, &off).await.is_empty());
    assert_eq!(receiver.count(), 0);
}

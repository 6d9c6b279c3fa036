//! Several servers on one database, each with a node of its own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use secrecy::SecretBox;
use server::clock::Clock;
use server::lease::{LeaseError, NodeIdentity, NodeLease};
use server::seal::Sealer;
use server::server::Server;
use server::settings::ServerSettings;
use store::Store;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::platform::{Behaviour, FakeNode, KEY, OTHER_KEY, Reply, TestClock, TestPlatform, host, within};

fn id(text: &str) -> SandboxId {
    text.parse().expect("an id")
}

async fn running(platform: &TestPlatform) -> Vec<String> {
    let rows = platform.rows().sandbox_list_live().await.expect("a database");
    rows.into_iter().map(|row| row.id.to_string()).collect()
}

async fn listed(platform: &TestPlatform) -> Vec<String> {
    let reply = platform.call("GET", "/v2/sandboxes", "").await;
    let all = reply.json.as_array().expect("a list").iter();
    let mut ids: Vec<String> = all
        .map(|one| one["sandboxID"].as_str().expect("an id").to_owned())
        .collect();
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn rows_of_other_nodes_survive_start_restart_and_removal() {
    let first = TestPlatform::start().await;
    let theirs = first.create(r#","timeout":1000"#).await;
    let row = first.store.sandbox_by_id(&id(&theirs)).await.expect("a database");

    let second = first.start_beside(2).await;
    assert_eq!(*second.node.wanted.lock(), []);
    let own = second.create(r#","timeout":1000"#).await;
    let second = second.restart().await;
    let wanted: Vec<String> = second
        .node
        .wanted
        .lock()
        .iter()
        .map(|wanted| wanted.id.to_string())
        .collect();
    assert_eq!(wanted, [&*own]);

    // Both list both sandboxes, and each node has its own.
    let mut both = vec![theirs.clone(), own.clone()];
    both.sort_unstable();
    for (platform, one) in [(&first, &theirs), (&second, &own)] {
        assert_eq!(listed(platform).await, both);
        assert_eq!(running(platform).await, [&**one]);
    }

    // As `down` does: removes the node and its rows, and nothing else.
    second.stop.cancel();
    within(second.server.drained()).await;
    let lease = NodeLease::take(&first.store, host(2), Clock::system())
        .await
        .expect("a lease");
    assert_eq!(lease.remove_node().await.expect("a database"), 1);
    assert_eq!(first.store.node_by_id(&host(2).id).await.expect("a database"), None);

    assert_eq!(listed(&first).await, [&*theirs]);
    assert_eq!(first.store.sandbox_by_id(&id(&theirs)).await.expect("a database"), row);
    let first = first.restart().await;
    assert_eq!(running(&first).await, [&*theirs]);
    assert_eq!(
        first.call("DELETE", &format!("/sandboxes/{theirs}"), "").await.status,
        204
    );
}

#[tokio::test]
async fn changes_to_a_sandbox_on_another_node_name_that_node() {
    let first = TestPlatform::start().await;
    let second = first.start_beside(2).await;
    let sandbox = first.create(r#","timeout":1000"#).await;
    let path = format!("/sandboxes/{sandbox}");
    let changes = [
        ("DELETE", path.clone(), ""),
        ("POST", format!("{path}/timeout"), r#"{"timeout":5}"#),
        ("POST", format!("{path}/refreshes"), ""),
        ("POST", format!("{path}/connect"), r#"{"timeout":5}"#),
        ("POST", format!("/v2{path}/connect"), ""),
        ("POST", format!("{path}/resume"), ""),
        ("POST", format!("{path}/pause"), ""),
        ("PUT", format!("{path}/network"), "{}"),
    ];
    for (method, path, body) in &changes {
        let reply = second.call(method, path, body).await;
        let message = reply.error(503);
        assert!(message.contains("on node \"host-1\""), "{method} {path}: {message}");
        assert_eq!(reply.json["error_code"], "sandbox_on_other_node", "{method} {path}");
        // Another team still gets a plain 404.
        second.call_as(Some(OTHER_KEY), method, path, body).await.error(404);
    }
    // Nothing was changed, and everything can be read.
    for platform in [&first, &second] {
        let detail = platform.call("GET", &path, "").await;
        assert_eq!(detail.status, 200, "{detail:?}");
        assert_eq!(detail.json["sandboxID"], sandbox);
        assert_eq!(platform.call("GET", &format!("{path}/logs"), "").await.status, 200);
    }
    second.call_as(Some(OTHER_KEY), "GET", &path, "").await.error(404);
    assert_eq!(first.seconds_left(&sandbox).await, 1000);
    // A sandbox that is being created is not found on any node.
    *first.node.start.lock() = Behaviour::Waits;
    let creating = tokio::spawn({
        let addr = first.addr;
        let headers = [
            ("host", "localhost"),
            ("x-api-key", KEY),
            ("content-type", "application/json"),
        ];
        async move { super::platform::send(addr, "POST", "/sandboxes", &headers, r#"{"templateID":"base"}"#.into()).await }
    });
    within(first.node.waiting.notified()).await;
    let creating_id = first.node.starting.lock().clone().expect("a start");
    second
        .call("DELETE", &format!("/sandboxes/{creating_id}"), "")
        .await
        .error(404);
    first.node.go.notify_one();
    assert_eq!(within(creating).await.expect("no panic").status, 201);
}

async fn create_keyed(platform: &TestPlatform) -> Reply {
    let headers = [
        ("host", "localhost"),
        ("x-api-key", KEY),
        ("content-type", "application/json"),
        ("idempotency-key", "one"),
    ];
    platform
        .send("POST", "/sandboxes", &headers, r#"{"templateID":"base"}"#.to_owned())
        .await
}

#[tokio::test]
async fn a_key_claimed_by_another_node_is_in_progress() {
    let first = Arc::new(TestPlatform::start().await);
    *first.node.start.lock() = Behaviour::Waits;
    let creating = tokio::spawn({
        let first = Arc::clone(&first);
        async move { create_keyed(&first).await }
    });
    within(first.node.waiting.notified()).await;
    // Neither its start nor a request resolves a claim that the first server is working on.
    let second = first.start_beside(2).await;
    let reply = create_keyed(&second).await;
    reply.error(409);
    assert_eq!(reply.json["error_code"], "idempotency_in_progress");
    first.node.go.notify_one();
    let made = within(creating).await.expect("no panic");
    assert_eq!(made.status, 201);
    let again = create_keyed(&second).await;
    assert_eq!(
        (again.status, &again.json["sandboxID"]),
        (made.status, &made.json["sandboxID"])
    );
}

async fn database() -> (TempDir, Store) {
    let directory = TempDir::new().expect("a directory");
    let url = format!("sqlite:{}", directory.path().join("test.db").display());
    (directory, Store::open(&url).await.expect("a database"))
}

/// The identity of a node with another owner, as from a copy of its data directory.
fn copy_of(n: u8) -> NodeIdentity {
    NodeIdentity {
        owner: host(n + 100).owner,
        name: "copy".to_owned(),
        ..host(n)
    }
}

#[tokio::test]
async fn a_renewed_lease_cannot_be_taken() {
    let (_directory, store) = database().await;
    // Slow, so that no lease expires while the machine stands still: it is renewed every three seconds of the machine.
    let begun = Instant::now();
    let time =
        || Clock::new(move || 1_700_000_000_000_000 + i64::try_from(begun.elapsed().as_micros()).expect("a time") / 10);
    let lease = NodeLease::take(&store, host(1), time()).await.expect("a lease");
    let refused = within(NodeLease::take(&store, copy_of(1), time())).await;
    let Err(error @ LeaseError::Held { .. }) = refused else {
        panic!("{refused:?}");
    };
    assert!(error.to_string().contains("host-1"), "{error}");
    assert!(error.to_string().contains("node.json"), "{error}");
    // After its release it is free immediately, and other nodes are never affected.
    NodeLease::take(&store, host(2), time())
        .await
        .expect("a lease")
        .release()
        .await;
    lease.release().await;
    NodeLease::take(&store, copy_of(1), time()).await.expect("a lease");
}

#[tokio::test]
async fn only_the_same_owner_takes_an_unreleased_lease_immediately() {
    let (_directory, store) = database().await;
    let clock = TestClock::new();
    let time = || {
        let clock = clock.clone();
        Clock::new(move || clock.now_us())
    };
    drop(NodeLease::take(&store, host(1), time()).await.expect("a lease"));
    drop(NodeLease::take(&store, host(1), time()).await.expect("a lease"));
    // Any other owner waits until it expires.
    let waiting = tokio::spawn({
        let (store, time) = (store.clone(), time());
        async move { NodeLease::take(&store, copy_of(1), time).await }
    });
    // Gives what must not happen the time to happen: it looks at the lease every 200 ms.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!waiting.is_finished());
    clock.advance(10);
    within(waiting).await.expect("no panic").expect("a lease");
}

#[tokio::test]
async fn a_server_stops_when_it_loses_its_lease() {
    let (_directory, store) = database().await;
    let clock = TestClock::new();
    let time = || {
        let clock = clock.clone();
        Clock::new(move || clock.now_us())
    };
    let lease = NodeLease::take(&store, host(1), time()).await.expect("a lease");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let settings = ServerSettings::new(
        "sandbox.test".to_owned(),
        SecretBox::new(Box::new([7; 32])),
        Sealer::new([8; 32]),
    );
    let stop = CancellationToken::new();
    let node = FakeNode::new();
    let server = Server::start(listener, lease, super::reached(&node), settings, stop.clone())
        .await
        .expect("a server");
    let stopping = server.stopping();
    // As if the server had been suspended.
    clock.advance(10);
    let other = NodeLease::take(&store, copy_of(1), time()).await.expect("a lease");
    within(stopping).await;
    assert!(!stop.is_cancelled());
    within(server.drained()).await;
    // Its stop did not release the lease of the other owner.
    let row = store
        .node_by_id(&host(1).id)
        .await
        .expect("a database")
        .expect("a node");
    assert_eq!(row.lease.map(|lease| lease.owner), Some(copy_of(1).owner));
    other.release().await;
}

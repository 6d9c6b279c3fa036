//! Two servers on one database that know little of each other: with wrong clocks, with names for each other's templates, with
//! clients that are not known yet, and with what one has left when it died.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobs::{Blobs, S3Settings};
use bytes::Bytes;
use model::lifecycle::State;
use model::secret::Secret;
use serde_json::json;
use server::clock::Clock;
use server::settings::{BlobSettings, ServerSettings};
use store::Store;
use store::builds::{BuildRow, BuildStatus};
use store::nodes::{Lease, LeaseOutcome, LeaseRequest};
use store::servers::ServerRow;
use tempfile::TempDir;
use testkit::node::{Behaviour, FakeNode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::platform::{KEY, host, open, pause, seed, send, within};
use crate::postgres;
use crate::servers::{Two, two, two_on};
use crate::several::{Several, authority, has};

fn now_us() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    i64::try_from(now.as_micros()).expect("before 292278")
}

fn an_hour_ahead(settings: &mut ServerSettings) {
    settings.clock = Clock::new(|| now_us() + 3600 * 1_000_000);
}

fn an_hour_behind(settings: &mut ServerSettings) {
    settings.clock = Clock::new(|| now_us() - 3600 * 1_000_000);
}

#[tokio::test]
async fn servers_with_wrong_clocks_see_each_other() {
    // On this thread: the database ends with the one that has started it.
    let database = postgres::Server::start();
    let url = database.url("postgres");
    let open = async || Store::open(&url).await.expect("a database");
    let directory = TempDir::new().expect("a directory");
    let two = two_on([open().await, open().await], directory, [an_hour_ahead, an_hour_behind]).await;
    let ids = two.one_of_each().await;
    for (server, id) in [(0, 1), (1, 0)] {
        let path = format!("/sandboxes/{}", ids[id]);
        let reply = two.servers[server].call("GET", &path, "").await;
        assert_eq!(reply.status, 200, "{reply:?}");
    }
    for (full, other) in [(0, 1), (1, 0)] {
        *two.nodes[full].start.lock() = Behaviour::Full;
        let id = two.servers[full].created().await;
        assert!(has(&two.nodes[other], &id));
        *two.nodes[full].start.lock() = Behaviour::Works;
    }
    // A lease that was written by a clock of their own would be good for an hour less or more.
    let stores = two.servers.each_ref().map(|server| server.store.clone());
    let listed = stores[0].server_list().await.expect("a database");
    let time_us = stores[0].lease_time_us(0).await.expect("a database");
    for server in &listed {
        let until_us = server.lease.as_ref().expect("a lease").until_us;
        assert!(
            (-60_000_000..=10_000_000).contains(&(until_us - time_us)),
            "{until_us} {time_us}"
        );
        assert!(server.seen_us.abs_diff(time_us) < 60_000_000, "{server:?}");
    }
    two.close().await;
    for store in stores {
        store.close().await;
    }
    drop(database);
}

/// Two servers that know of each other, and that the other one has a node.
async fn two_together() -> Two {
    let two = two().await;
    let store = &two.servers[0].store;
    let has_node = |server: &ServerRow| {
        let said = server.room_json.as_deref();
        said.is_some_and(|said| said.contains(r#""has_nodes":true"#))
    };
    let knowing = async {
        // Each says so, reads what the other one has said, and says something again.
        let mut since_us = 0;
        for _ in 0..3 {
            since_us = loop {
                let servers = store.server_list().await.expect("a list");
                let is_new = |server: &ServerRow| server.seen_us > since_us && has_node(server);
                if servers.len() == 2 && servers.iter().all(is_new) {
                    break servers.iter().map(|server| server.seen_us).max().expect("two");
                }
                pause().await;
            };
        }
    };
    within(knowing).await;
    two
}

/// Sends the head of a request whose body does not come, and returns the first line of the answer.
async fn first_line(server: &Several, path: &str, key: &str) -> String {
    let mut tcp = TcpStream::connect(server.addr).await.expect("connect");
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Type: application/json\r\nContent-Length: 60000\r\n\r\n"
    );
    tcp.write_all(head.as_bytes()).await.expect("written");
    let mut answer = vec![0; 4096];
    let got = tcp.read(&mut answer).await.expect("an answer");
    let answer = String::from_utf8_lossy(&answer[..got]).into_owned();
    answer.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn what_a_client_without_a_key_sends_is_not_read() {
    let two = two_together().await;
    let unknown = format!("X-API-Key: e2b_{}\r\n", "0".repeat(40));
    for key in ["", "X-API-Key: x\r\n", &unknown] {
        let line = within(first_line(&two.servers[0], "/sandboxes", key)).await;
        assert_eq!(line, "HTTP/1.1 401 Unauthorized", "{key:?}");
    }
    // One that is known may take its time.
    let known = format!("X-API-Key: {KEY}\r\n");
    let waiting = tokio::time::timeout(
        Duration::from_millis(500),
        first_line(&two.servers[0], "/sandboxes", &known),
    )
    .await;
    assert!(waiting.is_err(), "{waiting:?}");
    two.close().await;
}

/// A new template of a name, with its id and that of its build.
async fn template(server: &Several, name: &str) -> (String, String) {
    let reply = server
        .call("POST", "/v3/templates", &format!(r#"{{"name":"{name}"}}"#))
        .await;
    assert_eq!(reply.status, 202, "{reply:?}");
    let text = |key: &str| reply.json[key].as_str().expect("a text").to_owned();
    (text("templateID"), text("buildID"))
}

#[tokio::test]
async fn a_template_has_one_server_by_each_of_its_names() {
    let two = two_together().await;
    for number in 0..6 {
        let name = format!("template-{number}");
        let hash = format!("{number}").repeat(64);
        let (id, _) = template(&two.servers[0], &name).await;
        let asked = two.servers[0]
            .call("GET", &format!("/templates/{name}/files/{hash}"), "")
            .await;
        let url = asked.json["url"].as_str().expect("an address");
        let target = url.strip_prefix("http://localhost").expect("this platform");
        let put = send(
            two.servers[1].addr,
            "PUT",
            target,
            &[("host", "localhost")],
            Bytes::from("archive"),
        )
        .await;
        assert_eq!(put.status, 200, "{put:?}");
        for server in &two.servers {
            for text in [&name, &id, &format!("{name}:default")] {
                let path = format!("/templates/{text}/files/{hash}");
                let asked = server.call("GET", &path, "").await;
                assert_eq!(asked.json["present"], json!(true), "{text}: {asked:?}");
            }
        }
    }
    two.close().await;
}

#[tokio::test]
async fn a_template_can_be_built_from_one_that_another_server_has_built() {
    let two = two_together().await;
    let store = &two.servers[0].store;
    let (parent, build) = template(&two.servers[0], "parent").await;
    let (parent, build) = (parent.parse().expect("an id"), build.parse().expect("an id"));
    let row = store
        .build_by_id(&parent, &build)
        .await
        .expect("a database")
        .expect("a build");
    let ready = BuildRow {
        id: host(9).id.as_str().parse().expect("an id"),
        status: BuildStatus::Ready,
        spec_json: Some(r#"{"image":"base","env":{}}"#.to_owned()),
        node_id: Some(host(1).id),
        ..row
    };
    store.build_insert(&ready).await.expect("a database");
    store
        .tags_assign(&parent, &ready.id, &["default".to_owned()], now_us())
        .await
        .expect("a database");
    for number in 0..6 {
        let (id, build) = template(&two.servers[0], &format!("child-{number}")).await;
        let path = format!("/v2/templates/{id}/builds/{build}");
        let begun = two.servers[0].call("POST", &path, r#"{"fromTemplate":"parent"}"#).await;
        assert_eq!(begun.status, 202, "{begun:?}");
        let (id, build) = (id.parse().expect("an id"), build.parse().expect("an id"));
        let row = store
            .build_by_id(&id, &build)
            .await
            .expect("a database")
            .expect("a build");
        let reason = row.reason.map(|reason| reason.message).unwrap_or_default();
        assert!(!reason.contains("another node"), "{reason}");
    }
    two.close().await;
}

#[tokio::test]
async fn a_forgotten_node_is_settled_by_any_server() {
    let two = two().await;
    let ids = two.one_of_each().await;
    let [one, other] = two.servers;
    let [of_one, of_other] = two.connected;
    let (store, node) = (one.store.clone(), of_other.credentials.node().expect("an id"));
    drop(of_other);
    other.close().await;
    // The server that was asked to forget it, and had its lease, has noted no more than that.
    assert!(store.joined_node_forget(&node, 1).await.expect("a database"));
    let request = LeaseRequest {
        node: node.clone(),
        name: "a third host".to_owned(),
        lease: Lease {
            owner: host(3).owner,
            until_us: now_us() + 1_000_000,
        },
        now_us: 0,
        expired_us: i64::MAX,
        last_epoch: None,
    };
    let taken = store.node_lease_acquire(&request).await.expect("a database");
    assert!(matches!(taken, LeaseOutcome::Acquired { .. }), "{taken:?}");
    let settled = async {
        while store.node_by_id(&node).await.expect("a database").is_some() {
            pause().await;
        }
    };
    within(settled).await;
    let row = store.sandbox_by_id(&ids[1]).await.expect("a database");
    assert!(row.is_none_or(|row| row.state == State::Gone));
    assert_eq!(one.call("GET", &format!("/sandboxes/{}", ids[1]), "").await.status, 404);
    drop(of_one);
    one.close().await;
}

/// Settings with a blob store that nobody reaches.
fn with_copies(settings: &mut ServerSettings) {
    copies_at(settings, "http://127.0.0.1:9".to_owned());
}

/// Settings with a blob store at this address.
pub(crate) fn copies_at(settings: &mut ServerSettings, endpoint: String) {
    let directory = settings.builds.directory.clone().expect("a directory");
    let store = Blobs::open(&S3Settings {
        bucket: "copies".to_owned(),
        endpoint: Some(endpoint),
        region: "us-east-1".to_owned(),
        prefix: String::new(),
        access_key_id: "a".to_owned(),
        secret_access_key: Secret::new("b".to_owned()),
        allow_http: true,
        path_style: true,
        authority: None,
        journal: directory.join("journal"),
    });
    settings.pause.copies = true;
    settings.blobs = Some(BlobSettings {
        store: Arc::new(store.expect("a client")),
        owner: "a database".to_owned(),
        cache_bytes: None,
        grace_s: 3600,
    });
}

/// Whoever brings a sandbox to another node relies on that nobody acquires the lease of the one that has it.
#[tokio::test]
async fn what_is_kept_of_a_forgotten_node_stays_and_its_lease_is_left_alone() {
    let directory = TempDir::new().expect("a directory");
    let store = open(directory.path()).await;
    let two = two_on([store.clone(), store.clone()], directory, [with_copies, with_copies]).await;
    let ids = two.one_of_each().await;
    let id = &ids[1];
    let row = async || store.sandbox_by_id(id).await.expect("a database").expect("a row");
    let path = format!("/sandboxes/{id}/pause");
    let paused = two.servers[1].call("POST", &path, r#"{"memory":false}"#).await;
    assert_eq!(paused.status, 204, "{paused:?}");
    let node = two.connected[1].credentials.node().expect("an id");
    let lease = async || store.node_by_id(&node).await.expect("a database").expect("a row");
    let rows = store.of_node(node.clone(), lease().await.epoch);
    let packed = rows.sandbox_packed(id, &row().await.execution_id, "p1").await;
    assert!(packed.expect("a database"));
    // The others on that node have no copy, and are lost.
    assert!(store.joined_node_forget(&node, 1).await.expect("a database"));
    let is_let_go = async || {
        let live = rows.sandbox_list_live().await.expect("a database");
        live.len() == 1 && lease().await.lease.is_none()
    };
    within(async { while !is_let_go().await {} }).await;
    let epoch = lease().await.epoch;
    // Longer than the servers look around, twice each.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!((lease().await.epoch, row().await.state), (epoch, State::Paused));

    // It is at no server, and what a client without a key sends about it is not read either.
    let path = format!("/sandboxes/{id}/connect");
    for server in &two.servers {
        let unknown = format!("X-API-Key: e2b_{}\r\n", "0".repeat(40));
        for key in ["", &unknown] {
            let line = within(first_line(server, &path, key)).await;
            assert_eq!(line, "HTTP/1.1 401 Unauthorized", "{key:?}");
        }
    }
    two.close().await;
}

#[tokio::test]
async fn a_node_that_has_lost_a_sandbox_is_not_said_to_be_away() {
    let directory = TempDir::new().expect("a directory");
    let store = open(directory.path()).await;
    seed(&store).await;
    let server = Several::one_of(directory, store.clone(), 1, authority(), Some(with_copies)).await;
    let (server, node) = (server.expect("a server"), FakeNode::new());
    let connected = server.join(&node).await;
    let id = server.created().await;
    let path = format!("/sandboxes/{id}");
    let paused = server
        .call("POST", &format!("{path}/pause"), r#"{"memory":false}"#)
        .await;
    assert_eq!(paused.status, 204, "{paused:?}");
    // A copy whose key nobody has.
    let joined = connected.credentials.node().expect("an id");
    let lease = store.node_by_id(&joined).await.expect("a database").expect("a row");
    let row = store.sandbox_by_id(&id).await.expect("a database").expect("a row");
    let rows = store.of_node(joined, lease.epoch);
    let packed = rows.sandbox_packed(&id, &row.execution_id, "p1").await;
    assert!(packed.expect("a database"));

    node.kept.lock().remove(&id);
    node.lost.lock().insert(id.clone());
    let credentials = connected.credentials.clone();
    drop(connected);
    let connected = server.connect(&node, &credentials).await;
    let resumed = async {
        loop {
            let reply = server
                .call("POST", &format!("{path}/connect"), r#"{"timeout":60}"#)
                .await;
            assert_eq!(reply.status, 503, "{reply:?}");
            // Until its session has begun.
            if reply.json["error_code"] != "node_away" {
                return reply;
            }
            pause().await;
        }
    };
    let reply = within(resumed).await;
    assert_eq!(reply.json["error_code"], "node_lost_sandbox", "{reply:?}");
    let why = format!(
        "sandbox \"{id}\" is still paused: its node is connected and has lost the sandbox, and the blob store has no usable copy"
    );
    assert_eq!(reply.error(503), why);
    assert_eq!(server.call("GET", &path, "").await.json["state"], "paused");
    drop(connected);
    server.close().await;
}

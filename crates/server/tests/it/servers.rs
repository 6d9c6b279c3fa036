//! Two servers on one database, each with a node: whatever a client asks for, either of them answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use model::id::SandboxId;
use protocol::node::HostCapacity;
use server::server::{OthersError, StartError};
use server::settings::ServerSettings;
use store::Store;
use store::nodes::{Lease, LeaseOutcome, LeaseRequest};
use tempfile::TempDir;
use testkit::node::{Behaviour, FakeNode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::platform::{KEY, OTHER_KEY, Reply, host, open, pause, seed, send, within};
use crate::several::{Connected, Several, authority, has};

/// Two servers, and the node of each.
pub(crate) struct Two {
    pub(crate) servers: [Several; 2],
    pub(crate) nodes: [Arc<FakeNode>; 2],
    pub(crate) connected: [Connected; 2],
}

fn as_they_are(_: &mut ServerSettings) {}

/// A directory with a database, and another one for a second server.
pub(crate) async fn two_with(adjust: fn(&mut ServerSettings)) -> Two {
    let directory = TempDir::new().expect("a directory");
    let store = open(directory.path()).await;
    two_on([store.clone(), store], directory, [adjust, adjust]).await
}

/// Two servers, each with its own connections to a database, and its own settings.
pub(crate) async fn two_on(stores: [Store; 2], directory: TempDir, adjust: [fn(&mut ServerSettings); 2]) -> Two {
    let second = TempDir::new().expect("a directory");
    let [store, of_second] = stores;
    seed(&store).await;
    let authority = authority();
    let one = Several::one_of(directory, store, 1, Arc::clone(&authority), Some(adjust[0])).await;
    let one = one.expect("a server");
    let two = Several::one_of(second, of_second, 2, authority, Some(adjust[1])).await;
    let two = two.expect("a server");
    let nodes = [FakeNode::new(), FakeNode::new()];
    for node in &nodes {
        *node.origin.lock() = Some(origin().await);
        *node.room.lock() = Some(HostCapacity {
            memory_available_bytes: 1 << 36,
            disk_available_bytes: 1 << 40,
        });
    }
    let connected = [one.join(&nodes[0]).await, two.join(&nodes[1]).await];
    Two {
        servers: [one, two],
        nodes,
        connected,
    }
}

pub(crate) async fn two() -> Two {
    two_with(as_they_are).await
}

/// A server in every sandbox that responds with the first line and the headers of a request, and echoes after an upgrade.
async fn origin() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut buffer = vec![0; 16 << 10];
                let got = tcp.read(&mut buffer).await.unwrap_or(0);
                let head = String::from_utf8_lossy(&buffer[..got]).into_owned();
                if head.contains("/stream") {
                    let _ = tcp.write_all(b"HTTP/1.1 200 OK\r\n\r\npart").await;
                    let _ = tcp.read(&mut buffer).await;
                    return;
                }
                if head.to_ascii_lowercase().contains("upgrade: echo") {
                    let answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: echo\r\n\r\n";
                    let _ = tcp.write_all(answer).await;
                    while let Ok(count @ 1..) = tcp.read(&mut buffer).await {
                        let _ = tcp.write_all(&buffer[..count]).await;
                    }
                    return;
                }
                let more = "x-ringfence-answered: not-here\r\n";
                let answer = format!("HTTP/1.1 200 OK\r\n{more}Content-Length: {}\r\n\r\n{head}", head.len());
                let _ = tcp.write_all(answer.as_bytes()).await;
            });
        }
    });
    addr
}

impl Two {
    pub(crate) async fn close(self) {
        drop(self.connected);
        for server in self.servers {
            server.close().await;
        }
    }

    /// A sandbox on the node of each server.
    pub(crate) async fn one_of_each(&self) -> [SandboxId; 2] {
        let mut found: [Option<SandboxId>; 2] = [None, None];
        let creating = async {
            for at in [0, 1] {
                while found[at].is_none() {
                    let id = self.servers[at].created().await;
                    for (node, found) in self.nodes.iter().zip(&mut found) {
                        if has(node, &id) {
                            found.get_or_insert(id.clone());
                        }
                    }
                }
            }
        };
        within(creating).await;
        found.map(|id| id.expect("created"))
    }
}

async fn traffic(server: &Several, id: &SandboxId, path: &str, headers: &[(&str, &str)]) -> Reply {
    let host = format!("3000-{id}.sandbox.test:3000");
    let mut all = vec![("host", host.as_str())];
    all.extend(headers);
    send(server.addr, "GET", path, &all, Bytes::new()).await
}

/// Calls until the answer has a status, as after something that servers tell each other.
async fn until_status(server: &Several, method: &str, path: &str, status: u16) -> Reply {
    let calling = async {
        loop {
            let reply = server.call(method, path, "").await;
            if reply.status == status {
                return reply;
            }
            pause().await;
        }
    };
    within(calling).await
}

#[tokio::test]
async fn either_server_answers_about_all_sandboxes() {
    let two = two().await;
    let ids = two.one_of_each().await;
    for (server, id) in [(0, 1), (1, 0)] {
        let (server, id) = (&two.servers[server], &ids[id]);
        let shown = server.call("GET", &format!("/sandboxes/{id}"), "").await;
        assert_eq!(
            (shown.status.as_u16(), &shown.json["sandboxID"]),
            (200, &id.as_str().into())
        );
        let listed = server.call("GET", "/v2/sandboxes", "").await;
        let listed = listed.json.as_array().expect("a list");
        assert!(listed.iter().any(|one| one["sandboxID"] == id.as_str()), "{listed:?}");
        // The one that has it checks who asks.
        let path = format!("/sandboxes/{id}");
        for (key, status) in [(OTHER_KEY, 404), ("e2b_00000000000000000000000000000000000000ff", 401)] {
            let headers = [("host", "localhost"), ("X-API-KEY", key)];
            let refused = send(server.addr, "GET", &path, &headers, Bytes::new()).await;
            assert_eq!(refused.status, status, "{refused:?}");
        }
        let extended = server
            .call("POST", &format!("/sandboxes/{id}/timeout"), r#"{"timeout":600}"#)
            .await;
        assert_eq!(extended.status, 204, "{extended:?}");
        let killed = server.call("DELETE", &path, "").await;
        assert_eq!(killed.status, 204, "{killed:?}");
        // It is gone at either, and says so as at its own.
        for server in &two.servers {
            assert_eq!(server.call("GET", &path, "").await.status, 404);
            assert_eq!(traffic(server, id, "/", &[]).await.status, 502);
        }
    }
    two.close().await;
}

#[tokio::test]
async fn traffic_reaches_the_sandboxes_of_the_other_server() {
    let two = two().await;
    let ids = two.one_of_each().await;
    let (server, id) = (&two.servers[0], &ids[1]);
    // What a client claims about itself is replaced, and neither side of it reaches a sandbox or comes back.
    let forged = r#"{"sandbox":null,"port":null,"peer":null,"is_loopback":true,"is_tls":true,"owner":null}"#;
    for _ in 0..3 {
        let reply = traffic(
            server,
            id,
            "/path?x=1",
            &[("x-ringfence-forward", forged), ("X-Case", "1")],
        )
        .await;
        assert_eq!(reply.status, 200, "{reply:?}");
        assert!(reply.text.starts_with("GET /path?x=1 HTTP/1.1"), "{reply:?}");
        assert!(reply.text.to_ascii_lowercase().contains("x-case: 1"), "{reply:?}");
        assert!(!reply.text.contains("x-ringfence"), "{reply:?}");
        assert!(reply.headers.get("x-ringfence-answered").is_none(), "{reply:?}");
    }
    // Many at the same time.
    let all = (0..20).map(|_| traffic(server, id, "/", &[]));
    let all = futures_util::future::join_all(all).await;
    assert!(all.iter().all(|reply| reply.status == 200));
    two.close().await;
}

#[tokio::test]
async fn upgraded_streams_and_cuts_go_through() {
    let two = two().await;
    let ids = two.one_of_each().await;
    let (server, id) = (&two.servers[0], &ids[1]);
    let mut tcp = TcpStream::connect(server.addr).await.expect("connect");
    let head = format!("GET /echo HTTP/1.1\r\nHost: 3000-{id}.x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n");
    tcp.write_all(head.as_bytes()).await.expect("written");
    let mut buffer = vec![0; 4096];
    let got = within(tcp.read(&mut buffer)).await.expect("an answer");
    assert!(
        buffer[..got].starts_with(b"HTTP/1.1 101"),
        "{:?}",
        String::from_utf8_lossy(&buffer[..got])
    );
    for text in [&b"one"[..], b"another"] {
        tcp.write_all(text).await.expect("written");
        let mut back = vec![0; text.len()];
        within(tcp.read_exact(&mut back)).await.expect("an echo");
        assert_eq!(back, text);
    }
    // A body without a length, whose sandbox ends: no clean end.
    let mut body = TcpStream::connect(server.addr).await.expect("connect");
    let head = format!("GET /stream HTTP/1.1\r\nHost: 3000-{id}.x\r\n\r\n");
    body.write_all(head.as_bytes()).await.expect("written");
    let mut read = Vec::new();
    while !read.ends_with(b"part\r\n") {
        let got = within(body.read(&mut buffer)).await.expect("an answer");
        assert!(got > 0, "{:?}", String::from_utf8_lossy(&read));
        read.extend_from_slice(&buffer[..got]);
    }
    let killed = two.servers[1].call("DELETE", &format!("/sandboxes/{id}"), "").await;
    assert_eq!(killed.status, 204);
    let mut rest = Vec::new();
    let ended = within(body.read_to_end(&mut rest)).await;
    assert!(ended.is_err() || !rest.ends_with(b"0\r\n\r\n"), "{rest:?}");
    let ended = within(tcp.read_to_end(&mut rest)).await;
    ended.expect_err("the stream is cut");
    two.close().await;
}

#[tokio::test]
async fn a_create_goes_where_there_is_room() {
    let two = two().await;
    two.one_of_each().await;
    *two.nodes[0].start.lock() = Behaviour::Full;
    let before = two.nodes[1].running.lock().len();
    for count in 1..4 {
        let id = two.servers[0].created().await;
        assert!(has(&two.nodes[1], &id));
        assert_eq!(two.nodes[1].running.lock().len(), before + count);
        let shown = two.servers[0].call("GET", &format!("/sandboxes/{id}"), "").await;
        assert_eq!(shown.status, 200, "{shown:?}");
    }
    *two.nodes[1].start.lock() = Behaviour::Full;
    for server in &two.servers {
        let refused = server.create().await;
        assert_eq!(refused.status, 503, "{refused:?}");
        assert_eq!(refused.json["error_code"], "sandbox_capacity_unavailable");
    }
    // What is wrong with a request is told at once.
    let invalid = two.servers[0].call("POST", "/sandboxes", r#"{"templateID":7}"#).await;
    assert_eq!(invalid.status, 400);
    two.close().await;
}

/// Sends a create request in chunks, as clients of JavaScript do, and returns the answer.
async fn create_in_chunks(server: &Several, metadata: usize) -> String {
    let body = format!(
        r#"{{"templateID":"base","metadata":{{"a":"{}"}}}}"#,
        "x".repeat(metadata)
    );
    let head = "POST /sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n";
    let rest = format!(
        "X-API-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
        body.len()
    );
    let mut tcp = TcpStream::connect(server.addr).await.expect("connect");
    tcp.write_all(format!("{head}{rest}").as_bytes())
        .await
        .expect("written");
    let mut answer = String::new();
    within(tcp.read_to_string(&mut answer)).await.expect("an answer");
    answer
}

#[tokio::test]
async fn a_create_whose_length_is_not_told_goes_where_there_is_room() {
    let two = two().await;
    two.one_of_each().await;
    *two.nodes[0].start.lock() = Behaviour::Full;
    two.servers[0].created().await;
    for metadata in [1, 100 << 10] {
        let answer = create_in_chunks(&two.servers[0], metadata).await;
        assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    }
    let answer = create_in_chunks(&two.servers[0], 17 << 20).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    two.close().await;
}

/// Two servers, of which the second alone has a node.
async fn one_without_nodes(node: &Arc<FakeNode>) -> ([Several; 2], Connected) {
    let (first, second) = (
        TempDir::new().expect("a directory"),
        TempDir::new().expect("a directory"),
    );
    let store = open(first.path()).await;
    seed(&store).await;
    let authority = authority();
    let one = Several::one_of(first, store.clone(), 1, Arc::clone(&authority), Some(as_they_are)).await;
    let other = Several::one_of(second, store, 2, authority, Some(as_they_are)).await;
    let servers = [one.expect("a server"), other.expect("a server")];
    let connected = servers[1].join(node).await;
    (servers, connected)
}

#[tokio::test]
async fn what_is_not_known_of_the_nodes_of_others_is_no_reason_to_refuse() {
    // One that cannot tell what it has left.
    let node = FakeNode::new();
    *node.room.lock() = None;
    let (servers, connected) = one_without_nodes(&node).await;
    servers[0].created().await;
    for _ in 0..10 {
        let reply = servers[0].create().await;
        assert_eq!(reply.status, 201, "{reply:?}");
    }
    // They say why they refuse, and when to try again.
    *node.start.lock() = Behaviour::Full;
    let refused = servers[0].create().await;
    assert_eq!(refused.status, 503, "{refused:?}");
    assert_eq!(refused.json["error_code"], "sandbox_capacity_unavailable");
    assert_ne!(refused.header("retry-after"), "");
    drop(connected);
    for server in servers {
        server.close().await;
    }
}

#[tokio::test]
async fn limits_of_teams_hold_over_both() {
    let two = two_with(|settings| settings.limits.default.sandboxes = Some(8)).await;
    let ids = two.one_of_each().await;
    let filling = async {
        loop {
            let replies = [two.servers[0].create().await, two.servers[1].create().await];
            if replies.iter().all(|reply| reply.status == 429) {
                return;
            }
            pause().await;
        }
    };
    within(filling).await;
    let used = |server: usize| two.servers[server].call("GET", "/v2/sandboxes", "");
    let count = used(0).await.json.as_array().map_or(0, Vec::len);
    assert_eq!(count, 8);
    for id in &ids {
        assert_eq!(
            two.servers[0]
                .call("DELETE", &format!("/sandboxes/{id}"), "")
                .await
                .status,
            204
        );
    }
    two.close().await;
}

#[tokio::test]
async fn a_node_goes_to_the_other_server_with_its_sandboxes() {
    let two = two().await;
    let ids = two.one_of_each().await;
    let [one, other] = two.servers;
    let [of_one, of_other] = two.connected;
    two.nodes[1].adopts_all.store(true, Ordering::SeqCst);
    // The other way first, so that the first server remembers where it was.
    let path = format!("/sandboxes/{}", ids[1]);
    assert_eq!(one.call("GET", &path, "").await.status, 200);
    // It closes one connection before it opens the next.
    let credentials = of_other.credentials.clone();
    drop(of_other);
    let moved = one.connect(&two.nodes[1], &credentials).await;
    until_status(&one, "GET", &path, 200).await;
    until_status(&other, "GET", &path, 200).await;
    assert!(has(&two.nodes[1], &ids[1]));
    let reached = async {
        // The first server takes the node over meanwhile.
        while traffic(&other, &ids[1], "/", &[]).await.status != 200 {
            pause().await;
        }
    };
    within(reached).await;
    // The one that had it is gone, and what it served is served.
    other.close().await;
    assert_eq!(one.call("DELETE", &path, "").await.status, 204);
    drop((of_one, moved));
    one.close().await;
}

/// Whether what a server has sent has the head of a call.
fn has_call(sent: &[u8]) -> bool {
    // Frames of HTTP/2 follow its preface: a length, a type, flags and a stream.
    let mut rest = sent.get(24..).unwrap_or_default();
    while let [a, b, c, kind, ..] = *rest {
        if kind == 1 {
            return true;
        }
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        rest = rest.get(9 + length..).unwrap_or_default();
    }
    false
}

#[tokio::test]
async fn a_server_that_was_stopped_takes_no_node_from_another() {
    let two = two().await;
    let ids = two.one_of_each().await;
    let [one, other] = two.servers;
    let [of_one, of_other] = two.connected;
    let node = Arc::clone(&two.nodes[1]);
    node.adopts_all.store(true, Ordering::SeqCst);
    let credentials = of_other.credentials.clone();
    drop(of_other);
    // The node comes to the first server, which is stopped once it has begun with it: no call of it arrives.
    let hello = link::hello("a host".to_owned(), "1".to_owned());
    let connected = within(link::connect(&one.address(), &credentials, &hello)).await;
    let (_, mut connection) = connected.expect("connected");
    let mut sent = Vec::new();
    while !has_call(&sent) {
        let got = within(connection.read_buf(&mut sent)).await.expect("what it sends");
        assert!(got > 0);
    }
    let id = credentials.node().expect("an id");
    let epoch = async || {
        one.store
            .node_by_id(&id)
            .await
            .expect("a database")
            .expect("a node")
            .epoch
    };
    // So it goes back, and is taken over once more. The sandbox is found before that, too.
    let before = epoch().await;
    let _of_other = other.connect(&node, &credentials).await;
    let taking = async {
        loop {
            let epoch = epoch().await;
            if epoch > before {
                break epoch;
            }
            pause().await;
        }
    };
    let taken = within(taking).await;
    let path = format!("/sandboxes/{}", ids[1]);
    until_status(&other, "GET", &path, 200).await;
    // The first one goes on, and finds out that it is too late.
    let (mut to_node, of_server) = tokio::io::duplex(1 << 16);
    let served =
        tokio::spawn(
            async move { link::serve(node, of_server, &link::Calls::on(tokio::runtime::Handle::current())).await },
        );
    let passing = async {
        to_node.write_all(&sent).await.expect("written");
        let _ = tokio::io::copy_bidirectional(&mut connection, &mut to_node).await;
    };
    within(passing).await;
    drop(to_node);
    within(served).await.expect("it has ended");
    assert_eq!(epoch().await, taken);
    assert_eq!(other.call("GET", &path, "").await.status, 200);
    assert_eq!(one.call("GET", &path, "").await.status, 200);
    drop(of_one);
    for server in [one, other] {
        server.close().await;
    }
}

#[tokio::test]
async fn what_another_server_has_forgotten_counts_no_more() {
    let two = two_with(|settings| settings.limits.default.sandboxes = Some(1)).await;
    *two.nodes[0].start.lock() = Behaviour::Full;
    let id = two.servers[1].created().await;
    assert!(has(&two.nodes[1], &id));
    *two.nodes[0].start.lock() = Behaviour::Works;
    let [one, other] = two.servers;
    let [of_one, of_other] = two.connected;
    let node = of_other.credentials.node().expect("an id");
    drop(of_other);
    other.close().await;
    // Nobody serves its node, so it counts here, once this server has looked around.
    let store = &one.store;
    let looked = async || {
        let servers = store.server_list().await.expect("a database");
        let own = servers.iter().find(|server| server.id == host(1).id);
        own.expect("a row").seen_us
    };
    for _ in 0..2 {
        let before = looked().await;
        within(async { while looked().await == before {} }).await;
    }
    assert_eq!(one.create().await.status, 429);
    // A third server forgets the node, and removes what it had.
    assert!(store.joined_node_forget(&node, 1).await.expect("a database"));
    let request = LeaseRequest {
        node: node.clone(),
        name: "a third host".to_owned(),
        lease: Lease {
            owner: host(3).owner,
            until_us: i64::MAX,
        },
        now_us: 0,
        expired_us: i64::MAX,
        last_epoch: None,
    };
    let LeaseOutcome::Acquired { epoch } = store.node_lease_acquire(&request).await.expect("a database") else {
        panic!("the lease is held");
    };
    let rows = store.of_node(node, epoch);
    rows.sandbox_delete(&id).await.expect("a database");
    within(async { while one.create().await.status != 201 {} }).await;
    drop(of_one);
    one.close().await;
}

#[tokio::test]
async fn a_server_that_is_being_stopped_waits_for_what_it_has_forwarded() {
    let two = two().await;
    two.one_of_each().await;
    *two.nodes[0].start.lock() = Behaviour::Full;
    let before = two.servers[0].created().await;
    assert!(has(&two.nodes[1], &before));
    *two.nodes[1].start.lock() = Behaviour::Waits;
    let [one, other] = two.servers;
    let addr = one.addr;
    let creating = tokio::spawn(async move {
        let headers = [
            ("host", "localhost"),
            ("X-API-KEY", KEY),
            ("content-type", "application/json"),
        ];
        send(
            addr,
            "POST",
            "/sandboxes",
            &headers,
            Bytes::from(r#"{"templateID":"base"}"#),
        )
        .await
    });
    within(two.nodes[1].waiting.notified()).await;
    let mut closing = Box::pin(one.close());
    // Longer than it takes if nothing is in progress.
    let closed = tokio::time::timeout(Duration::from_secs(1), &mut closing).await;
    assert!(closed.is_err(), "it has not waited");
    two.nodes[1].go.notify_one();
    let (reply, ()) = tokio::join!(within(creating), closing);
    assert_eq!(reply.expect("a task").status, 201);
    drop(two.connected);
    other.close().await;
}

#[tokio::test]
async fn the_dashboard_reaches_the_agents_of_the_other_server() {
    let two = two().await;
    let ids = two.one_of_each().await;
    let server = &two.servers[0];
    // What other servers serve is told about once a second.
    for (key, status) in [(KEY, 200), (OTHER_KEY, 404)] {
        let headers = [
            ("host", "localhost"),
            ("content-type", "application/json"),
            ("x-ringfence-dashboard", "1"),
        ];
        let body = format!("{{\"credential\":\"{key}\"}}");
        let reply = send(server.addr, "POST", "/dashboard/session", &headers, Bytes::from(body)).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let cookie = reply
            .header("set-cookie")
            .split(';')
            .next()
            .unwrap_or_default()
            .to_owned();
        let headers = [
            ("host", "localhost"),
            ("x-ringfence-dashboard", "1"),
            ("cookie", cookie.as_str()),
        ];
        let path = format!("/dashboard/agent/{}/health", ids[1]);
        let asking = async {
            while send(server.addr, "GET", &path, &headers, Bytes::new()).await.status != status {
                pause().await;
            }
        };
        within(asking).await;
    }
    two.close().await;
}

#[tokio::test]
async fn a_server_that_is_gone_is_no_hang() {
    let two = two().await;
    let ids = two.one_of_each().await;
    let [one, other] = two.servers;
    let [of_one, of_other] = two.connected;
    let path = format!("/sandboxes/{}", ids[1]);
    assert_eq!(one.call("GET", &path, "").await.status, 200);
    other.close().await;
    let refused = one.call("GET", &path, "").await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json["error_code"]),
        (503, &"node_away".into())
    );
    // What is told in place of another server has an id, too.
    assert_eq!(refused.header("x-request-id").len(), 32, "{refused:?}");
    assert_eq!(traffic(&one, &ids[1], "/", &[]).await.status, 503);
    // All else goes on.
    one.created().await;
    drop((of_one, of_other));
    one.close().await;
}

#[tokio::test]
async fn servers_that_cannot_reach_each_other_do_not_start() {
    let directory = || TempDir::new().expect("a directory");
    let first = directory();
    let store = open(first.path()).await;
    seed(&store).await;
    let authority = authority();
    let start = async |number: u8, store: Store, adjust: fn(&mut ServerSettings)| {
        Several::one_of(directory(), store, number, Arc::clone(&authority), Some(adjust)).await
    };
    let without: fn(&mut ServerSettings) = |settings| {
        if let Some(servers) = &mut settings.servers {
            servers.address = None;
        }
    };
    let of_a_file: fn(&mut ServerSettings) = |settings| {
        if let Some(servers) = &mut settings.servers {
            servers.can_share = false;
        }
    };
    let refused = start(1, store.clone(), of_a_file).await.err();
    assert!(
        matches!(refused, Some(StartError::Others(OthersError::NeedsPostgres))),
        "{refused:?}"
    );
    let one = start(1, store.clone(), without).await.expect("a server that is alone");
    let refused = start(2, store.clone(), as_they_are).await.err();
    assert!(
        matches!(
            refused,
            Some(StartError::Others(OthersError::OtherWithoutAddress { .. }))
        ),
        "{refused:?}"
    );
    let refused = start(2, store.clone(), without).await.err();
    assert!(
        matches!(refused, Some(StartError::Others(OthersError::NoAddress { .. }))),
        "{refused:?}"
    );
    one.close().await;
    // Once it is gone, there is room for others, even if it could not say that it goes.
    let starting = async {
        loop {
            match Box::pin(start(2, store.clone(), as_they_are)).await {
                Err(StartError::Others(OthersError::OtherWithoutAddress { .. })) => {}
                started => return started,
            }
        }
    };
    within(starting).await.expect("a server").close().await;
    drop(first);
}

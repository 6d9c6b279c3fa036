//! A server with several nodes, which connect to it as processes of their own do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use link::{Address, Authority, Calls, Credentials, Hub, Port};
use model::id::SandboxId;
use model::lifecycle::State;
use protocol::node::{HostCapacity, WantedState};
use serde_json::Value;
use server::chance::Chance;
use server::clock::Clock;
use server::lease::NodeLease;
use server::members::NodeMembers;
use server::operator::OperatorSocket;
use server::server::{Server, StartError};
use server::settings::{ServerSettings, ServersSettings};
use store::Store;
use tempfile::TempDir;
use testkit::node::{Behaviour, FakeNode};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::platform::{KEY, Reply, TestClock, host, open, seed, send, settings, within};

/// The settings of a server that is alone.
const UNCHANGED: Option<fn(&mut ServerSettings)> = None;

/// A server, and what its nodes need to connect.
pub(crate) struct Several {
    pub(crate) addr: SocketAddr,
    nodes: SocketAddr,
    pub(crate) authority: Arc<Authority>,
    pub(crate) store: Store,
    server: Server,
    tasks: JoinSet<()>,
    stop: CancellationToken,
    pub(crate) directory: TempDir,
}

/// A node that is connected until this is dropped.
pub(crate) struct Connected {
    pub(crate) credentials: Credentials,
    serving: JoinHandle<()>,
}

/// A new authority of nodes.
pub(crate) fn authority() -> Arc<Authority> {
    let key = Authority::make_key().expect("a key");
    let certificate = Authority::make_certificate(&key).expect("a certificate");
    Arc::new(Authority::load(&key, &certificate).expect("an authority"))
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Several {
    pub(crate) async fn start() -> Self {
        let directory = TempDir::new().expect("a directory");
        let store = open(directory.path()).await;
        seed(&store).await;
        Self::over(directory, store).await
    }

    async fn over(directory: TempDir, store: Store) -> Self {
        Self::one_of(directory, store, 1, authority(), UNCHANGED)
            .await
            .expect("a server")
    }

    /// The server with this number, which works with others if `adjust` is given, that changes how.
    pub(crate) async fn one_of(
        directory: TempDir,
        store: Store,
        number: u8,
        authority: Arc<Authority>,
        adjust: Option<impl FnOnce(&mut ServerSettings)>,
    ) -> Result<Self, StartError> {
        let mut settings = settings(&TestClock::new());
        // What nodes have said becomes old, so time goes on.
        settings.clock = Clock::system();
        settings.builds.directory = Some(directory.path().join("builds"));
        // Of nodes that are alike, the same one always comes first.
        settings.chance = Chance::new(|_| 0);
        let hub = Arc::new(Hub::default());
        let members = NodeMembers::new(
            store.clone(),
            settings.clock.clone(),
            Arc::clone(&authority),
            Arc::clone(&hub),
        );
        let members = Arc::new(members);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let for_nodes = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let (addr, nodes) = (listener.local_addr().expect("an address"), for_nodes.local_addr());
        let stop = CancellationToken::new();
        if let Some(adjust) = adjust {
            let nodes = nodes.as_ref().expect("an address");
            settings.servers = Some(ServersSettings {
                name: format!("host {number}"),
                address: Some(format!("https://{nodes}").parse().expect("an address")),
                can_share: true,
                authority: Arc::clone(&authority),
                now: SystemTime::now,
            });
            adjust(&mut settings);
        }
        let lease = NodeLease::take(&store, host(number), settings.clock.clone())
            .await
            .expect("a lease");
        let socket = OperatorSocket::bind(directory.path()).expect("a socket");
        let operator = (socket, Arc::clone(&members));
        let started = Server::start_without_node(listener, operator, lease, settings, stop.child_token()).await;
        let (server, sessions) = started?;
        let port = Port {
            id: host(number).id,
            authority: Arc::clone(&authority),
            members,
            hub,
            now: SystemTime::now,
            version: "1".to_owned(),
            lanes: Vec::new(),
        };
        let mut tasks = JoinSet::new();
        let serving = port.serve(for_nodes, stop.clone());
        tasks.spawn(async move { serving.await.expect("a port") });
        tasks.spawn(sessions.serve());
        Ok(Self {
            addr,
            nodes: nodes.expect("an address"),
            authority,
            store,
            server,
            tasks,
            stop,
            directory,
        })
    }

    pub(crate) fn address(&self) -> Address {
        format!("https://{}", self.nodes).parse().expect("an address")
    }

    /// Makes a node join, and connects it.
    pub(crate) async fn join(&self, node: &Arc<FakeNode>) -> Connected {
        let token = self.authority.make_token().expect("a token");
        let inserted = self.store.node_token_insert(&token.hash(), 0, i64::MAX).await;
        inserted.expect("a database");
        let joined = link::join(&self.address(), &token, "a host").await;
        self.connect(node, &joined.expect("credentials")).await
    }

    /// Connects a node as one that was just started.
    pub(crate) async fn connect(&self, node: &Arc<FakeNode>, credentials: &Credentials) -> Connected {
        // Refused until its session before was let go.
        let connecting = async {
            loop {
                let mut hello = link::hello("a host".to_owned(), "1".to_owned());
                hello.capabilities.keeps_deadlines = node.deadlines.are_kept.load(Ordering::Relaxed);
                hello.capabilities.makes_parcels = node.makes_parcels.load(Ordering::Relaxed);
                hello.capabilities.copies_memories = node.copies_memory.load(Ordering::Relaxed);
                hello.capabilities.admits_with_start = node.permits.come_with_starts.load(Ordering::Relaxed);
                if let Ok((_, connection)) = link::connect(&self.address(), credentials, &hello).await {
                    return connection;
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        let connection = within(connecting).await;
        let served = Arc::clone(node);
        let serving = tokio::spawn(async move {
            link::serve(served, connection, &Calls::on(tokio::runtime::Handle::current())).await;
        });
        Connected {
            credentials: credentials.clone(),
            serving,
        }
    }

    /// A request of the operator: the status of the response, and its body.
    pub(crate) async fn operator(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let stream = OperatorSocket::connect(self.directory.path()).await.expect("a socket");
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("handshake");
        tokio::spawn(connection);
        let request = Request::builder().method(method).uri(path).header("host", "operator");
        let request = request
            .body(Full::new(Bytes::from(body.to_owned())))
            .expect("a request");
        let response = within(sender.send_request(request)).await.expect("a response");
        let status = response.status().as_u16();
        let body = within(response.into_body().collect()).await.expect("a body").to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    pub(crate) async fn call(&self, method: &str, path: &str, body: &str) -> Reply {
        let mut headers = vec![("host", "localhost"), ("X-API-KEY", KEY)];
        if !body.is_empty() {
            headers.push(("content-type", "application/json"));
        }
        send(self.addr, method, path, &headers, Bytes::from(body.to_owned())).await
    }

    pub(crate) async fn create(&self) -> Reply {
        self.call("POST", "/sandboxes", r#"{"templateID":"base"}"#).await
    }

    /// Creates a sandbox, once a node is there that does.
    pub(crate) async fn created(&self) -> SandboxId {
        let creating = async {
            loop {
                let reply = self.create().await;
                if reply.status == 201 {
                    return reply.json["sandboxID"].as_str().expect("an id").parse().expect("an id");
                }
                assert_eq!(reply.status, 503, "{reply:?}");
            }
        };
        within(creating).await
    }

    /// Creates sandboxes until as many in a row came to a node as never would if it were not preferred.
    async fn prefers(&self, node: &FakeNode) {
        let preferring = async {
            let mut in_a_row = 0;
            while in_a_row < 8 {
                let id = self.created().await;
                in_a_row = if has(node, &id) { in_a_row + 1 } else { 0 };
            }
        };
        within(preferring).await;
    }

    /// Stops the server and starts it again on its database, with the same authority.
    pub(crate) async fn restarted(self) -> Self {
        let (directory, store, authority) = self.end().await;
        let again = Self::one_of(directory, store, 1, authority, UNCHANGED).await;
        again.expect("a server")
    }

    pub(crate) async fn close(self) {
        self.end().await;
    }

    async fn end(mut self) -> (TempDir, Store, Arc<Authority>) {
        self.stop.cancel();
        within(self.server.drained()).await;
        within(async { while self.tasks.join_next().await.is_some() {} }).await;
        (self.directory, self.store, self.authority)
    }
}

pub(crate) fn has(node: &FakeNode, id: &SandboxId) -> bool {
    node.running.lock().contains(id)
}

pub(crate) fn room(memory_available_bytes: u64) -> HostCapacity {
    HostCapacity {
        memory_available_bytes,
        disk_available_bytes: 1 << 40,
    }
}

#[tokio::test]
async fn without_a_node_creates_are_refused_and_all_else_is_answered() {
    let several = Several::start().await;
    let refused = several.create().await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json["error_code"]),
        (503, &"node_away".into())
    );
    assert_eq!(several.call("GET", "/sandboxes", "").await.status, 200);
    several.close().await;
}

#[tokio::test]
async fn sandboxes_are_spread_and_a_full_node_passes_them_on() {
    let several = Several::start().await;
    let (one, other) = (FakeNode::new(), FakeNode::new());
    for node in [&one, &other] {
        *node.room.lock() = Some(room(1 << 36));
    }
    let (_one, _other) = (several.join(&one).await, several.join(&other).await);
    several.created().await;
    // Reports of both have come once each of them has something.
    let spread = async {
        while one.running.lock().is_empty() || other.running.lock().is_empty() {
            several.created().await;
        }
    };
    within(spread).await;
    *other.start.lock() = Behaviour::Full;
    let before = other.running.lock().len();
    for _ in 0..4 {
        let id = several.created().await;
        assert!(has(&one, &id));
        assert_eq!(several.call("GET", &format!("/sandboxes/{id}"), "").await.status, 200);
    }
    assert_eq!(other.running.lock().len(), before);
    // Nothing is left of what was passed on.
    *one.start.lock() = Behaviour::Full;
    let refused = several.create().await;
    assert_eq!(refused.status, 503, "{refused:?}");
    let listed = several.call("GET", "/sandboxes", "").await;
    let running = one.running.lock().len() + before;
    assert_eq!(listed.json.as_array().map(Vec::len), Some(running));
    several.close().await;
}

#[tokio::test]
async fn the_node_that_is_less_busy_comes_first() {
    let several = Several::start().await;
    let (one, other) = (FakeNode::new(), FakeNode::new());
    for node in [&one, &other] {
        // So large that what is created here is no load.
        *node.room.lock() = Some(room(1 << 60));
        if let Some(load) = &mut *node.permits.load.lock() {
            load.memory_bytes = 1 << 60;
            load.cores = 1 << 20;
        }
    }
    let (_one, _other) = (several.join(&one).await, several.join(&other).await);
    let press = |node: &FakeNode, pressure| {
        if let Some(load) = &mut *node.permits.load.lock() {
            load.pressure = pressure;
        }
    };
    press(&one, 100);
    several.prefers(&other).await;
    press(&one, 0);
    press(&other, 100);
    several.prefers(&one).await;
    several.close().await;
}

#[tokio::test]
async fn a_node_that_says_nothing_of_its_load_is_placed_on_like_the_others() {
    let several = Several::start().await;
    let (older, other) = (FakeNode::new(), FakeNode::new());
    *older.permits.load.lock() = None;
    let (_older, _other) = (several.join(&older).await, several.join(&other).await);
    let both = async {
        while older.running.lock().len() < 4 || other.running.lock().len() < 4 {
            several.created().await;
        }
    };
    within(both).await;
    several.close().await;
}

#[tokio::test]
async fn nodes_that_are_full_say_so_and_get_sandboxes_again_when_they_are_not() {
    let several = Several::start().await;
    let nodes = [FakeNode::new(), FakeNode::new(), FakeNode::new()];
    let limit = |max_sandboxes| {
        for node in &nodes {
            if let Some(load) = &mut *node.permits.load.lock() {
                load.bounds.max_sandboxes = max_sandboxes;
            }
        }
    };
    limit(Some(2));
    let mut connected = Vec::new();
    for node in &nodes {
        connected.push(several.join(node).await);
    }
    // Each place is found, whatever is known of the nodes.
    for _ in 0..6 {
        several.created().await;
    }
    for _ in 0..8 {
        let refused = several.create().await;
        // A node was asked, and has refused.
        assert_eq!(refused.status, 503, "{refused:?}");
        assert_eq!(refused.json["error_code"], "sandbox_capacity_unavailable");
        assert!(nodes.iter().all(|node| node.running.lock().len() == 2));
    }
    limit(Some(3));
    for _ in 0..3 {
        several.created().await;
    }
    assert!(nodes.iter().all(|node| node.running.lock().len() == 3));
    several.close().await;
}

#[tokio::test]
async fn a_node_that_is_restarted_disturbs_no_other() {
    let several = Several::start().await;
    let (one, other) = (FakeNode::new(), FakeNode::new());
    let first = several.join(&one).await;
    let on_one = several.created().await;
    assert!(has(&one, &on_one));
    let _second = several.join(&other).await;
    *one.start.lock() = Behaviour::Full;
    let on_other = several.created().await;
    assert!(has(&other, &on_other));

    let credentials = first.credentials.clone();
    drop(first);
    // The same node again, as after a restart: it knows no session.
    let again = FakeNode::new();
    again.adoptable.lock().extend(one.running.lock().clone());
    let connecting = several.connect(&again, &credentials);
    let _first = within(connecting).await;
    let path = format!("/sandboxes/{on_one}");
    within(async { while several.call("DELETE", &path, "").await.status != 204 {} }).await;
    assert!(!has(&again, &on_one));
    // The other has noticed nothing.
    assert_eq!(other.wanted.lock().len(), 0);
    assert_eq!(
        several
            .call("DELETE", &format!("/sandboxes/{on_other}"), "")
            .await
            .status,
        204
    );
    several.close().await;
}

#[tokio::test]
async fn sandboxes_of_a_node_that_is_away_are_listed_and_answered_503() {
    let several = Several::start().await;
    let (one, other) = (FakeNode::new(), FakeNode::new());
    let first = several.join(&one).await;
    let on_one = several.created().await;
    let _second = several.join(&other).await;
    let Several {
        directory,
        store,
        server,
        mut tasks,
        stop,
        ..
    } = several;
    stop.cancel();
    within(server.drained()).await;
    within(async { while tasks.join_next().await.is_some() {} }).await;
    drop(first);

    // Its certificate is that of another authority here, which is what a node that is away looks like.
    let several = Several::over(directory, store).await;
    let path = format!("/sandboxes/{on_one}");
    assert_eq!(several.call("GET", &path, "").await.status, 200);
    let refused = several.call("DELETE", &path, "").await;
    assert_eq!(
        (refused.status.as_u16(), &refused.json["error_code"]),
        (503, &"node_away".into())
    );
    let host = format!("49983-{on_one}.sandbox.test");
    let traffic = send(several.addr, "GET", "/health", &[("host", &host)], Bytes::new()).await;
    assert_eq!(traffic.status, 503, "{traffic:?}");
    let listed = several.call("GET", "/sandboxes", "").await;
    let mut ids = listed
        .json
        .as_array()
        .into_iter()
        .flatten()
        .map(|one| &one["sandboxID"]);
    assert!(ids.any(|id| id == on_one.as_str()));
    several.close().await;
}

/// A node that is lost while it pauses or resumes a sandbox has done it, or not: what is written of that must keep either.
#[tokio::test]
async fn a_pause_and_a_resume_that_a_lost_node_has_not_answered_stay_open() {
    let several = Several::start().await;
    let node = FakeNode::new();
    let mut connected = several.join(&node).await;
    let id = several.created().await;
    node.adoptable.lock().insert(id.clone());
    for (way, before, state) in [("pause", 204, State::Pausing), ("connect", 201, State::Resuming)] {
        for behaviour in [&node.pause, &node.pause_to_disk, &node.write, &node.resume] {
            *behaviour.lock() = Behaviour::Waits;
        }
        let path = format!("/sandboxes/{id}/{way}");
        let body = if way == "connect" { r#"{"timeout":60}"# } else { "" };
        let lost = async {
            node.waiting.notified().await;
            connected.serving.abort();
        };
        let (reply, ()) = tokio::join!(several.call("POST", &path, body), within(lost));
        assert_eq!(reply.status, 503, "{reply:?}");
        let row = several
            .store
            .sandbox_by_id(&id)
            .await
            .expect("a database")
            .expect("a row");
        assert_eq!(row.state, state);

        // What the node has of it decides, and it has not done anything here.
        for behaviour in [&node.pause, &node.pause_to_disk, &node.write, &node.resume] {
            *behaviour.lock() = Behaviour::Works;
        }
        connected = several.connect(&node, &connected.credentials.clone()).await;
        let again = async {
            loop {
                let reply = several.call("POST", &path, body).await;
                if reply.status != 503 {
                    return reply;
                }
            }
        };
        assert_eq!(within(again).await.status, before);
        let wanted = node
            .wanted
            .lock()
            .iter()
            .find(|wanted| wanted.id == id)
            .map(|wanted| wanted.state);
        assert!(matches!(wanted, Some(WantedState::RunningOrPaused(_))), "{wanted:?}");
    }
    several.close().await;
}

//! The test platform: a server on a free port, SQLite in a temporary directory, a fake node.

use std::collections::{BTreeMap, HashSet};
use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use model::id::{SandboxId, TeamId, UserId};
use secrecy::SecretBox;
use serde_json::Value;
use server::clock::Clock;
use server::keys::hash_api_key;
use server::lease::{NodeIdentity, NodeLease};
use server::seal::Sealer;
use server::server::Server;
use server::settings::{
    Limits, McpSettings, PoolSettings, RecordSettings, ServerSettings, TeamLimits, WebhookSettings,
};
use server::tls::Tls;
use store::Store;
use store::builds::{BuildRow, BuildStatus};
use store::keys::{ApiKeyRow, KeyMask};
use store::nodes::NodeRows;
use store::teams::{TeamRow, UserRow};
use store::templates::TemplateRow;
use tempfile::TempDir;
pub(crate) use testkit::node::{Behaviour, FakeNode};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

/// Maximum lifetime of a sandbox on this platform, in seconds.
pub(crate) const MAX_LIFETIME_S: u32 = 7200;
/// The key of the team that most tests use.
pub(crate) const KEY: &str = "e2b_0000000000000000000000000000000000000001";
/// The key of another team.
pub(crate) const OTHER_KEY: &str = "e2b_0000000000000000000000000000000000000002";

/// Node `n`, and the owner of its lease.
pub(crate) fn host(n: u8) -> NodeIdentity {
    let id = format!("00000000-0000-4000-8000-0000000000{n:02x}");
    NodeIdentity {
        id: id.parse().expect("an id"),
        name: format!("host-{n}"),
        owner: id.parse().expect("an id"),
    }
}

/// A clock that stands still until it is advanced.
#[derive(Clone)]
pub(crate) struct TestClock(Arc<AtomicI64>);

impl TestClock {
    pub(crate) fn new() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        Self(Arc::new(AtomicI64::new(
            i64::try_from(now.as_micros()).expect("before 292278"),
        )))
    }

    pub(crate) fn now_us(&self) -> i64 {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) fn advance(&self, seconds: i64) {
        self.0.fetch_add(seconds * 1_000_000, Ordering::SeqCst);
    }
}

/// A running server with its database, fake node and clock.
pub(crate) struct TestPlatform {
    pub(crate) addr: SocketAddr,
    pub(crate) store: Store,
    pub(crate) node: Arc<FakeNode>,
    pub(crate) clock: TestClock,
    pub(crate) stop: CancellationToken,
    /// The address of the metrics.
    pub(crate) metrics: SocketAddr,
    pub(crate) server: Server,
    pub(crate) directory: TempDir,
    adjust: fn(&mut ServerSettings),
    /// The number of its node.
    n: u8,
    /// The number of the acquisition of its lease.
    epoch: i64,
}

pub(crate) fn team(n: u8) -> TeamId {
    format!("00000000-0000-4000-8000-00000000000{n}")
        .parse()
        .expect("an id")
}

pub(crate) fn user(n: u8) -> UserId {
    format!("00000000-0000-4000-9000-00000000000{n}")
        .parse()
        .expect("an id")
}

/// The id of the template `base`.
pub(crate) const BASE: &str = "base0000000000000000";

pub(crate) async fn open(directory: &Path) -> Store {
    let url = format!("sqlite:{}", directory.join("test.db").display());
    Store::open(&url).await.expect("a database")
}

pub(crate) async fn seed(store: &Store) {
    for (n, key) in [(1, KEY), (2, OTHER_KEY)] {
        let name = format!("team{n}");
        store
            .team_insert(&TeamRow {
                id: team(n),
                name: name.clone(),
                created_us: 0,
            })
            .await
            .expect("a team");
        store
            .user_insert(&UserRow {
                id: user(n),
                team_id: team(n),
                name: name.clone(),
                created_us: 0,
            })
            .await
            .expect("a user");
        let row = ApiKeyRow {
            id: format!("key{n}"),
            team_id: team(n),
            user_id: user(n),
            name,
            mask: KeyMask::of("e2b_", &key[4..]),
            created_us: 0,
            revoked_us: None,
            last_used_us: None,
        };
        let hash = hash_api_key(key).expect("a key");
        store.api_key_insert(&row, &hash).await.expect("a key");
    }
    template(store, BASE, None, &["base"], Some(BuildStatus::Ready)).await;
    template(
        store,
        "unbuilt0000000000000",
        None,
        &["unbuilt"],
        Some(BuildStatus::Building),
    )
    .await;
    template(
        store,
        "private0000000000000",
        Some(team(2)),
        &["private"],
        Some(BuildStatus::Ready),
    )
    .await;
    template(
        store,
        "own00000000000000000",
        Some(team(1)),
        &["own", "mine"],
        Some(BuildStatus::Ready),
    )
    .await;
}

async fn template(store: &Store, id: &str, team: Option<TeamId>, aliases: &[&str], build: Option<BuildStatus>) {
    let id: model::id::TemplateId = id.parse().expect("an id");
    store
        .template_insert(&TemplateRow {
            id: id.clone(),
            team_id: team,
            public: false,
            spawn_count: 0,
            last_spawned_us: None,
            created_us: 0,
            aliases: aliases.iter().map(|alias| (*alias).to_owned()).collect(),
        })
        .await
        .expect("a template");
    let Some(status) = build else { return };
    store
        .build_insert(&BuildRow {
            id: uuid::Uuid::new_v4().to_string().parse().expect("an id"),
            template_id: id,
            status,
            cpu_count: 2,
            memory_mb: 1024,
            disk_mb: 10240,
            agent_version: None,
            spec_json: None,
            created_us: 0,
            started_us: None,
            finished_us: None,
            node_id: None,
            reason: None,
        })
        .await
        .expect("a build");
}

pub(crate) fn settings(clock: &TestClock) -> ServerSettings {
    let clock = clock.clone();
    ServerSettings {
        limits: Limits {
            default: TeamLimits {
                max_lifetime_s: MAX_LIFETIME_S,
                // Tests request many.
                builds: 100_000,
                ..TeamLimits::default()
            },
            teams: BTreeMap::new(),
        },
        clock: Clock::new(move || clock.now_us()),
        webhooks: WebhookSettings {
            // Tests create many.
            per_team: 100_000,
            ..WebhookSettings::default()
        },
        // Tests of the pool switch it on.
        pool: PoolSettings {
            per_template: 0,
            ..PoolSettings::default()
        },
        // A slow disk must not make readers read too early.
        records: RecordSettings {
            settle: Duration::from_secs(20),
            ..RecordSettings::default()
        },
        // Commands run at the lowest priority, beside other tests.
        mcp: McpSettings {
            command_wait: Duration::from_secs(600),
            ..McpSettings::default()
        },
        ..ServerSettings::new(
            "sandbox.test:3000".to_owned(),
            SecretBox::new(Box::new([7; 32])),
            Sealer::new([8; 32]),
        )
    }
}

impl TestPlatform {
    pub(crate) async fn start() -> Self {
        Self::start_with(None).await
    }

    /// A platform with a certificate.
    pub(crate) async fn start_with(tls: Option<Tls>) -> Self {
        let directory = TempDir::new().expect("a directory");
        let store = open(directory.path()).await;
        seed(&store).await;
        Self::over(directory, store, FakeNode::new(), TestClock::new(), tls, |_| {}, 1).await
    }

    /// A platform with adjusted settings, which also apply after a restart.
    pub(crate) async fn start_adjusted(adjust: fn(&mut ServerSettings)) -> Self {
        let directory = TempDir::new().expect("a directory");
        let store = open(directory.path()).await;
        seed(&store).await;
        Self::over(directory, store, FakeNode::new(), TestClock::new(), None, adjust, 1).await
    }

    async fn over(
        directory: TempDir,
        store: Store,
        node: Arc<FakeNode>,
        clock: TestClock,
        tls: Option<Tls>,
        adjust: fn(&mut ServerSettings),
        n: u8,
    ) -> Self {
        let mut settings = ServerSettings {
            tls,
            ..settings(&clock)
        };
        settings.builds.directory = Some(directory.path().join("builds"));
        adjust(&mut settings);
        let node_clock = clock.clone();
        node.permits.follow(move || node_clock.now_us());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let addr = listener.local_addr().expect("address");
        let stop = CancellationToken::new();
        let lease = NodeLease::take(&store, host(n), settings.clock.clone()).await;
        let lease = lease.expect("a lease");
        let row = store.node_by_id(&host(n).id).await.expect("a database");
        let epoch = row.expect("a row of the node").epoch;
        let server = Server::start(listener, lease, super::reached(&node), settings, stop.clone())
            .await
            .expect("a server");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let metrics = listener.local_addr().expect("address");
        server.serve_metrics(listener);
        Self {
            addr,
            metrics,
            store,
            node,
            clock,
            stop,
            server,
            directory,
            adjust,
            n,
            epoch,
        }
    }

    /// Another platform, of node `n`, on the same database.
    pub(crate) async fn start_beside(&self, n: u8) -> Self {
        let directory = TempDir::new().expect("a directory");
        let (store, clock) = (self.store.clone(), self.clock.clone());
        Self::over(directory, store, FakeNode::new(), clock, None, self.adjust, n).await
    }

    /// The rows of this platform's node.
    pub(crate) fn rows(&self) -> NodeRows {
        self.store.of_node(host(self.n).id, self.epoch)
    }

    /// Stops the server and starts another one on the same database. Running sandboxes keep running.
    pub(crate) async fn restart(self) -> Self {
        self.restart_on(FakeNode::new()).await
    }

    /// Restarts the server on a new node, whose behaviour does not affect what the server does before its end.
    pub(crate) async fn restart_on(self, node: Arc<FakeNode>) -> Self {
        let running: HashSet<SandboxId> = self.node.running.lock().iter().cloned().collect();
        self.stop.cancel();
        within(self.server.drained()).await;
        *node.adoptable.lock() = running;
        node.paused.lock().clone_from(&self.node.paused.lock());
        node.lost.lock().clone_from(&self.node.lost.lock());
        Self::over(self.directory, self.store, node, self.clock, None, self.adjust, self.n).await
    }

    pub(crate) async fn call(&self, method: &str, path: &str, body: &str) -> Reply {
        self.call_as(Some(KEY), method, path, body).await
    }

    pub(crate) async fn call_as(&self, key: Option<&str>, method: &str, path: &str, body: &str) -> Reply {
        let mut headers = vec![("host", "localhost")];
        headers.extend(key.map(|key| ("X-API-KEY", key)));
        if !body.is_empty() {
            headers.push(("content-type", "application/json"));
        }
        self.send(method, path, &headers, body.to_owned()).await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Reply {
        send(self.addr, method, path, headers, body.into()).await
    }

    /// Creates a sandbox from `base` with additional keys and returns its id.
    pub(crate) async fn create(&self, keys: &str) -> String {
        let reply = self
            .call("POST", "/sandboxes", &format!("{{\"templateID\":\"base\"{keys}}}"))
            .await;
        assert_eq!(reply.status, 201, "{reply:?}");
        reply.json["sandboxID"].as_str().expect("an id").to_owned()
    }

    /// Seconds from now until a sandbox ends.
    pub(crate) async fn seconds_left(&self, id: &str) -> i64 {
        let id = id.parse().expect("an id");
        let row = self.store.sandbox_by_id(&id).await.expect("a database");
        (row.expect("a row").end_us - self.clock.now_us()) / 1_000_000
    }

    /// Waits until clients get a 404 for a sandbox.
    pub(crate) async fn until_gone(&self, id: &str) {
        let path = format!("/sandboxes/{id}");
        within(async { while self.call("GET", &path, "").await.status != 404 {} }).await;
    }
}

pub(crate) async fn send(addr: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Reply {
    let tcp = TcpStream::connect(addr).await.expect("connect");
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(tcp))
        .await
        .expect("handshake");
    tokio::spawn(connection);
    let mut request = Request::builder()
        .method(Method::from_bytes(method.as_bytes()).expect("a method"))
        .uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body)).expect("a request");
    let response = within(sender.send_request(request)).await.expect("a response");
    let (parts, body) = response.into_parts();
    let bytes = within(body.collect()).await.expect("a body").to_bytes();
    Reply {
        status: parts.status,
        headers: parts.headers,
        json: serde_json::from_slice(&bytes).unwrap_or(Value::Null),
        text: String::from_utf8_lossy(&bytes).into_owned(),
    }
}

/// A response of the server.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) json: Value,
    pub(crate) text: String,
}

impl Reply {
    /// A header as text, empty when absent.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("text"))
    }

    /// Asserts that this is an error response with `status`, and returns its message.
    pub(crate) fn error(&self, status: u16) -> &str {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/json; charset=utf-8");
        assert_eq!(self.json["code"], status);
        self.json["message"].as_str().expect("a message")
    }
}

/// Waits before a condition is checked again. A loop that queries a database without a pause takes processor time from what it
/// waits for.
pub(crate) async fn pause() {
    tokio::time::sleep(Duration::from_millis(5)).await;
}

/// Fails the test if the future takes longer than two minutes.
pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(120), future)
        .await
        .expect("not within two minutes")
}

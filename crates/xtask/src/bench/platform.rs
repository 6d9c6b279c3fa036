//! A platform without sandboxes: a real server on a free port, SQLite in a temporary directory, a fake node.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use jiff::Timestamp;
use model::id::{SandboxId, TeamId, TemplateId, UserId};
use model::lifecycle::row::RowChange;
use protocol::node::NodeApi;
use secrecy::SecretBox;
use server::clock::Clock;
use server::keys::hash_api_key;
use server::lease::{NodeIdentity, NodeLease};
use server::seal::Sealer;
use server::server::Server;
use server::settings::ServerSettings;
use store::Store;
use store::keys::{ApiKeyRow, KeyMask};
use store::nodes::{Lease, LeaseOutcome, LeaseRequest, NodeRows};
use store::sandboxes::{NewSandbox, SandboxRow};
use store::teams::{TeamRow, UserRow};
use store::templates::TemplateRow;
use tempfile::TempDir;
use testkit::node::FakeNode;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// The epoch of the lease of a node that is new.
const FIRST_EPOCH: i64 = 1;

/// The key of the one team.
pub(super) const KEY: &str = "e2b_00000000000000000000000000000000000000b5";
/// Microseconds in a second.
pub(super) const SECOND_US: i64 = 1_000_000;

/// The database before the server starts.
pub(super) struct Rows {
    pub(super) store: Store,
    team: TeamId,
    user: UserId,
    template: TemplateId,
    node: NodeIdentity,
    /// Removed with the value.
    directory: TempDir,
}

/// A running server.
pub(super) struct BenchPlatform {
    pub(super) address: SocketAddr,
    pub(super) node: Arc<FakeNode>,
    server: Server,
    stop: CancellationToken,
    _directory: TempDir,
}

impl Rows {
    /// A new database in a new directory below `parent`, with a team, its key and a template.
    pub(super) async fn new(parent: &Path) -> Result<Self> {
        let directory = TempDir::with_prefix_in("ringfence-bench-", parent).context("make a directory")?;
        let store = Store::open(&format!("sqlite:{}", directory.path().join("bench.db").display())).await?;
        let rows = Self {
            store,
            team: Uuid::new_v4().to_string().parse()?,
            user: Uuid::new_v4().to_string().parse()?,
            template: "base0000000000000000".parse()?,
            node: NodeIdentity {
                id: Uuid::new_v4().to_string().parse()?,
                name: "bench".to_owned(),
                owner: Uuid::new_v4().to_string().parse()?,
            },
            directory,
        };
        let (store, name) = (&rows.store, "bench".to_owned());
        store
            .team_insert(&TeamRow {
                id: rows.team.clone(),
                name: name.clone(),
                created_us: 0,
            })
            .await?;
        store
            .user_insert(&UserRow {
                id: rows.user.clone(),
                team_id: rows.team.clone(),
                name: name.clone(),
                created_us: 0,
            })
            .await?;
        let key = ApiKeyRow {
            id: Uuid::new_v4().to_string(),
            team_id: rows.team.clone(),
            user_id: rows.user.clone(),
            name,
            mask: KeyMask::of("e2b_", &KEY[4..]),
            created_us: 0,
            revoked_us: None,
            last_used_us: None,
        };
        store.api_key_insert(&key, &hash_api_key(KEY)?).await?;
        store
            .template_insert(&TemplateRow {
                id: rows.template.clone(),
                team_id: None,
                public: false,
                spawn_count: 0,
                last_spawned_us: None,
                created_us: 0,
                aliases: vec!["base".to_owned()],
            })
            .await?;
        rows.lease().await?;
        Ok(rows)
    }

    /// Acquires the lease of the node, for the time until the server has it.
    async fn lease(&self) -> Result<()> {
        let request = LeaseRequest {
            node: self.node.id.clone(),
            name: self.node.name.clone(),
            lease: Lease {
                owner: self.node.owner.clone(),
                until_us: 0,
            },
            now_us: 0,
            expired_us: 0,
            last_epoch: None,
        };
        let outcome = self.store.node_lease_acquire(&request).await?;
        ensure!(
            outcome == LeaseOutcome::Acquired { epoch: FIRST_EPOCH },
            "a new node has a lease"
        );
        Ok(())
    }

    /// The rows of the node that the server will be for.
    pub(super) fn of_node(&self) -> NodeRows {
        self.store.of_node(self.node.id.clone(), FIRST_EPOCH)
    }

    /// Sandbox number `n`, which started at `started_us` and ends at `end_us`, or has ended already.
    pub(super) async fn sandbox(&self, n: usize, is_running: bool, started_us: i64, end_us: i64) -> Result<SandboxId> {
        let id: SandboxId = format!("i{n:019}").parse()?;
        let mut metadata = std::collections::BTreeMap::new();
        metadata.insert("customer".to_owned(), format!("customer-{}", n % 97));
        metadata.insert("purpose".to_owned(), "a label of an ordinary length".to_owned());
        let new = NewSandbox {
            id: id.clone(),
            team_id: self.team.clone(),
            user_id: self.user.clone(),
            template_id: self.template.clone(),
            build_id: Uuid::new_v4().to_string().parse()?,
            alias: Some("base".to_owned()),
            execution_id: Uuid::new_v4().to_string(),
            end_us,
            max_end_us: end_us + 86_400 * SECOND_US,
            cpu_count: 2,
            memory_mb: 1024,
            disk_mb: 10240,
            agent_version: protocol::agent::VERSION.to_owned(),
            metadata,
            secure: true,
            allow_public_traffic: true,
            allow_internet_access: None,
            network_json: None,
            lifecycle_json: None,
            injections_sealed: None,
            environment_sealed: None,
            authority_of: None,
            created_us: started_us,
        };
        let rows = self.of_node();
        let row = rows.sandbox_insert(new).await?;
        let change = rows.sandbox_started(&id, row.version, started_us, end_us, protocol::agent::VERSION);
        let row: SandboxRow = change
            .await?
            .applied()
            .context("a row that was just made has changed")?;
        if !is_running {
            let change = rows.sandbox_change_state(&id, row.version, RowChange::Gone);
            change
                .await?
                .applied()
                .context("a row that was just made has changed")?;
        }
        Ok(id)
    }
}

impl BenchPlatform {
    /// Starts a server over these rows, which adopts those that run.
    pub(super) async fn start(rows: Rows) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("bind a port")?;
        let address = listener.local_addr()?;
        let node = FakeNode::new();
        node.adopts_all.store(true, Ordering::Relaxed);
        let stop = CancellationToken::new();
        let settings = ServerSettings::new(
            "sandbox.localhost".to_owned(),
            SecretBox::new(Box::new([7; 32])),
            Sealer::new([8; 32]),
        );
        let api: Arc<dyn NodeApi> = node.clone();
        let lease = NodeLease::take(&rows.store, rows.node, Clock::system()).await?;
        let server = Server::start(listener, lease, api, settings, stop.clone()).await?;
        Ok(Self {
            address,
            node,
            server,
            stop,
            _directory: rows.directory,
        })
    }

    /// Ends the server.
    pub(super) async fn stop(self) {
        self.stop.cancel();
        self.server.drained().await;
    }
}

/// Starts an event loop like that of `ringfence up`.
pub(super) fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("server")
        .build()
        .context("start the server's event loop")
}

/// A time in microseconds since the Unix epoch.
pub(super) fn unix_us(time: SystemTime) -> Option<i64> {
    let since = time.duration_since(UNIX_EPOCH).ok()?;
    i64::try_from(since.as_micros()).ok()
}

/// Now, in microseconds since the Unix epoch.
pub(super) fn now_us() -> i64 {
    Timestamp::now().as_microsecond()
}

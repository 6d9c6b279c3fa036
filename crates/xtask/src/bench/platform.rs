//! A platform without sandboxes: a real server on a free port, SQLite in a temporary directory, a pretended node.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use jiff::Timestamp;
use model::id::{SandboxId, TeamId, TemplateId, UserId};
use model::lifecycle::State;
use protocol::node::NodeApi;
use secrecy::SecretBox;
use server::keys::hash_api_key;
use server::server::Server;
use server::settings::Settings;
use store::Store;
use store::keys::{ApiKeyRow, KeyMask};
use store::sandboxes::{NewSandbox, SandboxRow};
use store::teams::{TeamRow, UserRow};
use store::templates::TemplateRow;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::node::PretendNode;

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
    /// Removed with the value.
    directory: TempDir,
}

/// A running server.
pub(super) struct Platform {
    pub(super) address: SocketAddr,
    pub(super) node: Arc<PretendNode>,
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
        Ok(rows)
    }

    /// Sandbox number `n`, which started at `started_us` and ends at `end_us`, in that state.
    pub(super) async fn sandbox(&self, n: usize, state: State, started_us: i64, end_us: i64) -> Result<SandboxId> {
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
            created_us: started_us,
        };
        let row = self.store.sandbox_insert(new).await?;
        let change = self
            .store
            .sandbox_started(&id, row.version, started_us, end_us, protocol::agent::VERSION);
        let row: SandboxRow = change
            .await?
            .applied()
            .context("a row that was just made has changed")?;
        if state != State::Running {
            let change = self.store.sandbox_set_state(&id, row.version, state);
            change
                .await?
                .applied()
                .context("a row that was just made has changed")?;
        }
        Ok(id)
    }
}

impl Platform {
    /// Starts a server over these rows, which adopts those that run.
    pub(super) async fn start(rows: Rows) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.context("bind a port")?;
        let address = listener.local_addr()?;
        let node = PretendNode::new();
        let stop = CancellationToken::new();
        let settings = Settings::new("sandbox.localhost".to_owned(), SecretBox::new(Box::new([7; 32])));
        let api: Arc<dyn NodeApi> = node.clone();
        let server = Server::start(listener, rows.store, api, settings, stop.clone()).await?;
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

/// An event loop like that of `ringfence up`.
pub(super) fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("server")
        .build()
        .context("start the server's event loop")
}

/// Now, in microseconds since the Unix epoch.
pub(super) fn now_us() -> i64 {
    Timestamp::now().as_microsecond()
}

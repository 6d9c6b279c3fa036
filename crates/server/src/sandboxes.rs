//! The life of sandboxes: making, extending, ending and adopting them. Row first, then the node, then memory.
//!
//! Whatever a crash interrupts is undone at the next start, because a row that is not `running` names something that
//! no client was told to live. Creating and ending run on tasks of their own: a client that hangs up changes nothing.
//!
//! Nothing here knows HTTP: errors say what happened, and [`crate::api`] translates them.

pub(crate) mod adopt;
pub(crate) mod create;
pub(crate) mod deadline;
pub(crate) mod elsewhere;
pub(crate) mod idempotency;
pub(crate) mod node_events;
pub(crate) mod registry;
mod stop;

use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::resources::Resources;
use protocol::node::NodeError;
use store::Store;
use store::error::StoreError;
use store::nodes::NodeRows;
use store::sandboxes::SandboxRow;
use tokio_util::task::TaskTracker;

use self::registry::{Registry, SandboxEntry};
use crate::admission::Admission;
use crate::chain::Chain;
use crate::clock::Clock;
use crate::deadlines::Deadlines;
use crate::keys::TokenSeed;
use crate::metrics::Metrics;
use crate::node::NodeHandle;
use crate::records::Records;

/// Pause before a sandbox that failed to start, and could not be ended, is ended again.
const DISCARD_RETRY: Duration = Duration::from_secs(1);

/// The sandboxes of one server, and everything that changes one.
#[derive(Debug)]
pub(crate) struct Sandboxes {
    pub(crate) store: Store,
    /// The rows of this server's node, which nothing else changes.
    pub(crate) rows: NodeRows,
    pub(crate) node: NodeHandle,
    pub(crate) registry: Arc<Registry>,
    pub(crate) deadlines: Arc<Deadlines>,
    /// Logs and metrics of sandboxes. Nothing here ever waits for them.
    pub(crate) records: Arc<Records>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) tokens: TokenSeed,
    pub(crate) defaults: Defaults,
    pub(crate) clock: Clock,
    /// Work that a request began and that outlives it.
    pub(crate) work: TaskTracker,
}

/// What the operator decides for every sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    /// What a sandbox may use, as far as its build leaves it open.
    pub(crate) resources: Resources,
    /// Every agent asks for its token, whatever a client wants.
    pub(crate) always_secure: bool,
}

impl Sandboxes {
    /// Puts a row into memory.
    fn register(&self, row: &SandboxRow, admission: Admission) -> Arc<SandboxEntry> {
        let traffic_token = (!row.allow_public_traffic).then(|| self.tokens.traffic_token(&row.id));
        let entry = SandboxEntry::new(row, admission, self.tokens.access_token(&row.id), traffic_token);
        self.registry.insert(Arc::clone(&entry));
        self.records.track(row);
        entry
    }

    /// Removes a sandbox that no client knows: from the node, then from the rows and memory. While the node fails, that
    /// goes on in the background, and the sandbox keeps what it takes of the limits.
    async fn discard(self: &Arc<Self>, id: &SandboxId) {
        if self.kill_unannounced(id).await {
            return self.forget(id).await;
        }
        let (sandboxes, id) = (Arc::clone(self), id.clone());
        self.work.spawn(async move {
            loop {
                tokio::time::sleep(DISCARD_RETRY).await;
                if sandboxes.kill_unannounced(&id).await {
                    return sandboxes.forget(&id).await;
                }
            }
        });
    }

    /// Ends a sandbox that no client knows, and says whether nothing of it runs.
    async fn kill_unannounced(&self, id: &SandboxId) -> bool {
        match self.node.kill(id).await {
            Ok(()) | Err(NodeError::NotFound(_)) => true,
            Err(error) => {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "end a sandbox that failed to start");
                false
            }
        }
    }

    /// Removes what is known of a sandbox that does not run.
    async fn forget(&self, id: &SandboxId) {
        self.deadlines.remove(id);
        self.registry.remove(id);
        self.records.end(id);
        if let Err(error) = self.rows.sandbox_delete(id).await {
            // The row is of no sandbox that runs, so the next start removes it.
            self.log_store_error(&error, id, "remove the row of an ended sandbox");
        }
    }

    /// Counts and logs an error of the database that no client is told.
    fn log_store_error(&self, error: &StoreError, id: &SandboxId, what: &str) {
        self.metrics.store_error();
        tracing::error!(sandbox.id = %id, error = %Chain(error), "{what}");
    }
}

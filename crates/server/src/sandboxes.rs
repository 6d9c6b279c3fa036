//! The lifecycle of sandboxes: creating, extending, ending and adopting them. Row first, then the node, then memory.
//!
//! Work interrupted by a crash is undone at the next start, because a row that is not `running` is of a sandbox that no
//! client knows to run. Creating and ending run on tasks of their own: a client disconnect changes nothing.
//!
//! Nothing here depends on HTTP: [`crate::api`] translates the errors.

pub(crate) mod adopt;
pub(crate) mod backoff;
pub(crate) mod change;
pub(crate) mod copies;
pub(crate) mod create;
pub(crate) mod deadline;
pub(crate) mod elsewhere;
pub(crate) mod entry;
pub(crate) mod fork;
pub(crate) mod header_rules;
pub(crate) mod idempotency;
pub(crate) mod injections;
pub(crate) mod lifecycle;
pub(crate) mod network;
pub(crate) mod node_events;
pub(crate) mod pause;
pub(crate) mod policy;
mod pooled;
pub(crate) mod registry;
pub(crate) mod repositories;
mod restart;
pub(crate) mod resume;
mod shutdown;
pub(crate) mod snapshot;
mod start_command;
mod stop;
mod unrecorded;
pub(crate) mod write;

use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use model::resources::Resources;
use protocol::node::NodeError;
use store::Store;
use store::error::StoreError;
use store::nodes::NodeRows;
use store::sandboxes::SandboxRow;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::entry::SandboxEntry;
use self::policy::Policies;
use self::registry::Registry;
use crate::admission::Admission;
use crate::chain::Chain;
use crate::clock::Clock;
use crate::deadlines::Deadlines;
use crate::injections::{Injections, SandboxInjections};
use crate::keys::TokenSeed;
use crate::metrics::Metrics;
use crate::node::NodeHandle;
use crate::pool::Pool;
use crate::records::Records;
use crate::repositories::Repositories;
use crate::settings::PauseAnswer;
use copies::Copies;

/// Pause before another attempt to end a sandbox that failed to start.
const DISCARD_RETRY: Duration = Duration::from_secs(1);

/// The operations on the sandboxes of one server.
#[derive(Debug)]
pub(crate) struct Sandboxes {
    pub(crate) store: Store,
    /// The rows of this server's node, which only this server changes.
    pub(crate) rows: NodeRows,
    pub(crate) node: NodeHandle,
    pub(crate) registry: Arc<Registry>,
    pub(crate) deadlines: Arc<Deadlines>,
    /// Logs and metrics of sandboxes. Operations never wait for them.
    pub(crate) records: Arc<Records>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) tokens: TokenSeed,
    pub(crate) defaults: Defaults,
    /// What sandboxes may reach.
    pub(crate) policies: Policies,
    /// What is injected into their requests.
    pub(crate) injections: Arc<Injections>,
    /// Sandboxes that are started in advance.
    pub(crate) pool: Arc<Pool>,
    /// Prepares their repositories.
    pub(crate) repositories: Repositories,
    /// Whose disk is copied next.
    pub(crate) copies: Copies,
    /// Held while what is paused in memory is written to disk.
    pub(crate) writes: Semaphore,
    pub(crate) clock: Clock,
    /// Work that a request started and that outlives it.
    pub(crate) work: TaskTracker,
    /// Cancelled when the server is stopped: nothing waits for better times from then on.
    pub(crate) stopping: CancellationToken,
    /// Cancelled when the server is stopped and no time is left to write processes to disk.
    pub(crate) checkpoint_deadline: CancellationToken,
}

/// Settings of the operator for every sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    /// Limits that the build of a sandbox does not set.
    pub(crate) resources: Resources,
    /// Every agent requires its token, even if a client asked for an open one.
    pub(crate) always_secure: bool,
    /// How long a sandbox may be paused, in seconds; none for any time.
    pub(crate) retention_s: Option<u32>,
    /// Whether the processes of paused sandboxes are written to disk.
    pub(crate) processes_on_disk: bool,
    /// When a pause is answered that does so.
    pub(crate) answer: PauseAnswer,
}

impl Sandboxes {
    /// Adds a sandbox to the registry and the records.
    fn register(
        &self,
        row: &SandboxRow,
        admission: Admission,
        injections: Option<&SandboxInjections>,
    ) -> Arc<SandboxEntry> {
        let traffic_token = (!row.allow_public_traffic).then(|| self.tokens.traffic_token(&row.id));
        let access_token = self.tokens.access_token(&row.id);
        let saved_rules = injections.map(SandboxInjections::saved_rules).unwrap_or_default();
        let entry = SandboxEntry::new(row, admission, access_token, traffic_token, saved_rules);
        self.registry.insert(Arc::clone(&entry));
        self.records.track(row);
        entry
    }

    /// Removes a sandbox that no client knows: from the node, then from the rows and memory. While the node fails, this
    /// is retried in the background, and the sandbox keeps its share of the limits.
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

    /// Ends a sandbox that no client knows. Returns `true` if nothing of it runs any more.
    async fn kill_unannounced(&self, id: &SandboxId) -> bool {
        match self.node.kill(id).await {
            Ok(()) | Err(NodeError::NotFound(_)) => true,
            Err(error) => {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot end a sandbox that failed to start");
                false
            }
        }
    }

    /// Removes a sandbox that does not run any more from memory and the rows.
    async fn forget(&self, id: &SandboxId) {
        self.deadlines.remove(id);
        self.registry.remove(id);
        self.records.end(id);
        if let Err(error) = self.rows.sandbox_delete(id).await {
            // The row belongs to no running sandbox, so the next start removes it.
            self.log_store_error(&error, id, "cannot remove the row of an ended sandbox");
        }
    }

    /// Counts and logs a database error that is not reported to a client.
    fn log_store_error(&self, error: &StoreError, id: &SandboxId, what: &str) {
        self.metrics.store_error();
        tracing::error!(sandbox.id = %id, error = %Chain(error), "{what}");
    }
}

//! The lifecycle of sandboxes: creating, extending, ending and adopting them. Row first, then the node, then memory; but a
//! create inserts its row last, and the end of one that runs has its row removed at once, so each is one write.
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
mod memories;
mod memory_limit;
mod moving;
pub(crate) mod network;
mod node_deadlines;
pub(crate) mod node_events;
mod packing;
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
mod started;
mod stop;
pub(crate) mod tracked;
pub(crate) mod unrecorded;
pub(crate) mod work;
mod write;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use model::id::{NodeId, SandboxId};
use model::resources::Resources;
use protocol::node::NodeError;
use store::Store;
use store::error::StoreError;
use store::sandboxes::SandboxRow;

use self::entry::SandboxEntry;
use self::fork::peers::ForkPeers;
use self::policy::Policies;
use self::tracked::Tracked;
use self::unrecorded::Recording;
use self::work::Work;
use crate::admission::Admission;
use crate::agent::Agent;
use crate::chain::Chain;
use crate::clock::Clock;
use crate::injections::SandboxInjections;
use crate::nodes::{Nodes, ServedNode};
use crate::parcels::Parcels;
use crate::repositories::Repositories;
use crate::settings::PauseSettings;

/// Pause before another attempt to end a sandbox that failed to start.
const DISCARD_RETRY: Duration = Duration::from_secs(1);

/// The operations on the sandboxes of one server.
#[derive(Debug)]
pub(crate) struct Sandboxes {
    /// The database, to read from it. Rows are changed through the node of their sandbox.
    pub(crate) store: Store,
    /// The id under which this server keeps what is not on a node, such as builds.
    pub(crate) home: NodeId,
    /// The nodes that sandboxes are on.
    pub(crate) nodes: Arc<Nodes>,
    /// Brings rows in line with what nodes have done.
    pub(crate) recording: Arc<Recording>,
    /// What follows the rows.
    pub(crate) tracked: Arc<Tracked>,
    pub(crate) defaults: Defaults,
    /// What sandboxes may reach, and what is injected into their requests.
    pub(crate) policies: Policies,
    /// Prepares their repositories.
    pub(crate) repositories: Repositories,
    /// Copies of those that are paused; none where they are on their nodes alone.
    pub(crate) parcels: Option<Arc<Parcels>>,
    /// The other servers, on whose nodes children of forks can be; none where this one works alone.
    pub(crate) fork_peers: OnceLock<Arc<dyn ForkPeers>>,
    pub(crate) clock: Clock,
    /// Work that a request started and that outlives it.
    pub(crate) work: Arc<Work>,
}

/// Settings of the operator for every sandbox.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defaults {
    /// Limits that the build of a sandbox does not set.
    pub(crate) resources: Resources,
    /// Every agent requires its token, even if a client asked for an open one.
    pub(crate) always_secure: bool,
    /// What becomes of those that are paused.
    pub(crate) pause: PauseSettings,
}

impl Sandboxes {
    /// The database, to read from it.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// The rows of all sandboxes on the nodes that this server serves.
    pub(crate) async fn rows_served(&self) -> Result<Vec<SandboxRow>, StoreError> {
        let mut rows = Vec::new();
        for node in self.nodes.all() {
            rows.extend(node.rows.sandbox_list_live().await?);
        }
        Ok(rows)
    }

    /// Runs work of the operator on a task, which goes on when its request is cut. None if the task panicked or was cancelled.
    pub(crate) async fn on_own_task<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        self.work.spawn(task).await.ok()
    }

    /// The agent of a sandbox that no client knows yet, or that nobody uses at the moment.
    fn agent<'a>(&'a self, node: &'a ServedNode, id: &'a SandboxId) -> Agent<'a> {
        Agent {
            node: &node.handle,
            id,
            token: self.policies.tokens.access_token(id),
            work: &self.work.tasks,
        }
    }

    /// Adds a sandbox to the registry and the records.
    fn register(
        &self,
        row: &SandboxRow,
        node: &Arc<ServedNode>,
        admission: Admission,
        injections: Option<&SandboxInjections>,
    ) -> Arc<SandboxEntry> {
        let traffic_token = (!row.allow_public_traffic).then(|| self.policies.tokens.traffic_token(&row.id));
        let access_token = self.policies.tokens.access_token(&row.id);
        let saved_rules = injections.map(SandboxInjections::saved_rules).unwrap_or_default();
        let entry = SandboxEntry::new(row, node, admission, access_token, traffic_token, saved_rules);
        self.tracked.add(row, &entry);
        entry
    }

    /// Removes a sandbox that no client knows: from the node, then from the rows and memory. While the node fails, this
    /// is retried in the background, and the sandbox keeps its share of the limits.
    async fn discard(self: &Arc<Self>, node: &Arc<ServedNode>, id: &SandboxId) {
        if self.kill_unannounced(node, id).await {
            return self.forget(node, id).await;
        }
        let (sandboxes, node, id) = (Arc::clone(self), Arc::clone(node), id.clone());
        self.work.spawn(async move {
            // The next session of the node finds it, and ends it.
            while !node.over.is_cancelled() {
                tokio::time::sleep(DISCARD_RETRY).await;
                if sandboxes.kill_unannounced(&node, &id).await {
                    return sandboxes.forget(&node, &id).await;
                }
            }
        });
    }

    /// Ends a sandbox that no client knows. Returns `true` if nothing of it runs any more.
    async fn kill_unannounced(&self, node: &ServedNode, id: &SandboxId) -> bool {
        match node.handle.kill(id).await {
            Ok(()) | Err(NodeError::NotFound(_)) => true,
            Err(error) => {
                tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot end a sandbox that failed to start");
                false
            }
        }
    }

    /// Removes a sandbox that does not run any more from memory and the rows.
    async fn forget(&self, node: &Arc<ServedNode>, id: &SandboxId) {
        self.tracked.remove(node, id);
        match node.rows.sandbox_delete(id).await {
            Ok(Some(row)) => self.remove_parcels(&row),
            // It is on no node of this server, or was removed before.
            Ok(None) => {}
            // The row belongs to no running sandbox, so the next start removes it.
            Err(error) => self
                .tracked
                .store_failed(&error, id, "cannot remove the row of an ended sandbox"),
        }
    }
}

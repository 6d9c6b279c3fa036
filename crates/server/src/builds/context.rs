//! Operations of a running build: start and commit sandboxes, look up and keep layers, write its log.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use model::id::{LayerId, SandboxId, TeamId, TemplateId};
use model::log::Level;
use model::network::EgressPolicy;
use model::resources::Resources;
use parking_lot::Mutex;
use protocol::node::{Committed, NoCapacity, NodeError, StartSandbox, StartedSandbox};
use store::builds::CachedLayerRow;
use store::nodes::NodeRows;
use tokio_util::task::TaskTracker;

use super::files::BuildFiles;
use super::log::BuildLog;
use crate::chain::Chain;
use crate::clock::Clock;
use crate::keys::TokenSeed;
use crate::node::NodeHandle;
use crate::nodes::{HostShare, Needs, Nodes};
use crate::settings::BuildSettings;
use crate::telemetry::WorkSpan;

/// A layer that an earlier build wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CachedLayer {
    pub(crate) layer: LayerId,
    /// State that was stored with the layer.
    pub(crate) state_json: String,
}

/// How long a step waits for capacity of the host, and how often it asks.
const CAPACITY_WAIT: Duration = Duration::from_secs(300);
const CAPACITY_RETRY: Duration = Duration::from_secs(1);

/// A sandbox of a build, which runs or is starting.
#[derive(Debug)]
pub(super) struct StepSandbox {
    pub(super) template: TemplateId,
    pub(super) resources: Resources,
    pub(super) started_us: i64,
    /// Its share of the host.
    _capacity: HostShare,
}

/// The sandboxes of a build that have not ended, by their ids.
pub(super) type StepSandboxes = Arc<Mutex<HashMap<SandboxId, StepSandbox>>>;

/// Why a sandbox of a build did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    #[error("the host has no capacity: {0}")]
    NoCapacity(#[from] NoCapacity),
    #[error(transparent)]
    Node(#[from] NodeError),
}

/// Layers that builds in progress use, so that they are not removed. Cleared when the build has ended.
pub(crate) type Pins = Arc<Mutex<HashSet<LayerId>>>;

/// Operations of a running build. Sandboxes that it started and did not end are ended after it, also when it was
/// cancelled by dropping its future.
#[derive(Debug)]
pub(crate) struct BuildContext {
    pub(crate) node: NodeHandle,
    /// Of which the tokens of agents are derived.
    pub(crate) tokens: TokenSeed,
    /// Tracker of the tasks that drive connections to agents.
    pub(crate) work: TaskTracker,
    pub(crate) clock: Clock,
    pub(crate) settings: Arc<BuildSettings>,
    /// The limits of the sandboxes in which steps run.
    pub(crate) resources: Resources,
    /// What these sandboxes may reach.
    pub(crate) egress: EgressPolicy,
    /// The span of the build, if it is recorded.
    pub(super) span: Option<WorkSpan>,
    pub(super) team: TeamId,
    pub(super) rows: NodeRows,
    pub(super) files: Arc<BuildFiles>,
    pub(super) log: Arc<BuildLog>,
    pub(super) pins: Pins,
    /// Removals of layers exclude commits, because a layer may be committed again that is about to be removed.
    pub(super) removal: Arc<tokio::sync::RwLock<()>>,
    /// Decides whether the host has capacity for another sandbox.
    pub(super) nodes: Arc<Nodes>,
    /// Sandboxes that were started and have not ended.
    pub(super) sandboxes: StepSandboxes,
}

impl BuildContext {
    /// Begins the span of a part of the build, if it is recorded.
    pub(super) fn begin_part(&self, name: &'static str) -> Option<WorkSpan> {
        self.span.as_ref()?.child(name)
    }

    /// Starts a sandbox, which has no row: no client can see it, and a restart of the platform ends it. It counts as one
    /// of the host, and waits while the host has no capacity for it, or no node is connected.
    pub(crate) async fn start(&self, request: StartSandbox) -> Result<StartedSandbox, StartError> {
        let mut waited = Duration::ZERO;
        loop {
            let why = match self.start_at_once(&request).await {
                Err(StartError::NoCapacity(why)) if waited < CAPACITY_WAIT => why.to_string(),
                // Nothing was begun.
                Err(StartError::Node(away @ NodeError::Away)) if waited < CAPACITY_WAIT => away.to_string(),
                done => return done,
            };
            if waited.is_zero() {
                self.log(Level::Warn, None, format!("the step waits for the host: {why}"));
            }
            tokio::time::sleep(CAPACITY_RETRY).await;
            waited += CAPACITY_RETRY;
        }
    }

    async fn start_at_once(&self, request: &StartSandbox) -> Result<StartedSandbox, StartError> {
        let id = &request.id;
        let needs = Needs {
            image: &request.image,
            memory: None,
            memory_mb: request.resources.memory_mb,
            pool: None,
        };
        let sandbox = StepSandbox {
            template: request.template.clone(),
            resources: request.resources,
            started_us: self.clock.now_us(),
            _capacity: self.nodes.admit_to_any(id, needs).await?,
        };
        self.sandboxes.lock().insert(id.clone(), sandbox);
        let started = self
            .node
            .start_patiently(&Some(self.team.clone()), request.clone())
            .await;
        if started.is_err() && !matches!(started, Err(NodeError::Unreachable(_))) {
            self.sandboxes.lock().remove(id);
        }
        Ok(started?)
    }

    /// Ends a sandbox and keeps what it wrote as a layer.
    pub(crate) async fn commit(&self, id: &SandboxId, merge: bool) -> Result<Committed, NodeError> {
        let _removal = self.removal.read().await;
        let committed = self.node.commit(id, merge).await?;
        self.pins.lock().insert(committed.layer.clone());
        self.sandboxes.lock().remove(id);
        Ok(committed)
    }

    /// Ends a sandbox.
    pub(crate) async fn kill(&self, id: &SandboxId) -> Result<(), NodeError> {
        match self.node.kill(id).await {
            Ok(()) | Err(NodeError::NotFound(_)) => {
                self.sandboxes.lock().remove(id);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// The layer that an earlier build of the team kept under this key.
    pub(crate) async fn cached(&self, key: &str) -> Option<CachedLayer> {
        let _removal = self.removal.read().await;
        match self.rows.layer_cache_find(&self.team, key, self.clock.now_us()).await {
            Ok(found) => found.map(|row| {
                self.pins.lock().insert(row.layer.clone());
                CachedLayer {
                    layer: row.layer,
                    state_json: row.state_json,
                }
            }),
            Err(error) => {
                tracing::error!(error = %Chain(&error), "cannot look for a cached layer");
                None
            }
        }
    }

    /// Keeps a layer for later builds of the team. A failure only costs them time.
    pub(crate) async fn put_cached(&self, key: &str, layer: &LayerId, bytes: u64, state_json: &str) {
        let row = CachedLayerRow {
            layer: layer.clone(),
            bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
            state_json: state_json.to_owned(),
        };
        let put = self.rows.layer_cache_put(&self.team, key, &row, self.clock.now_us());
        if let Err(error) = put.await {
            tracing::error!(error = %Chain(&error), "cannot keep a cached layer");
        }
    }

    /// Forgets a layer that the node does not have any more.
    pub(crate) async fn forget_layer(&self, layer: &LayerId) {
        if let Err(error) = self.rows.layer_cache_forget(layer).await {
            tracing::error!(error = %Chain(&error), "cannot forget a cached layer");
        }
    }

    /// Keeps layers from being removed while the build runs.
    pub(crate) fn pin(&self, layers: &[LayerId]) {
        self.pins.lock().extend(layers.iter().cloned());
    }

    /// The archive that the team uploaded under this hash.
    pub(crate) async fn file(&self, hash: &str) -> Option<PathBuf> {
        match self.files.find(&self.team, hash).await {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(error = %Chain(&error), "cannot read an uploaded file");
                self.log(
                    Level::Error,
                    None,
                    format!("uploaded files cannot be read: {}", Chain(&error)),
                );
                None
            }
        }
    }

    /// Writes a line to the log of the build, which is bounded; whether it is there. It must not have secrets.
    pub(crate) fn log(&self, level: Level, step: Option<&str>, message: impl Into<String>) -> bool {
        self.log.write(level, step, message.into())
    }
}

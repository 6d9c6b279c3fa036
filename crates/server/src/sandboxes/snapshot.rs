//! Snapshots of running sandboxes: templates with their files, and with their processes where the host can keep them.
//!
//! ```text
//!   copy the disk ─▶ make a layer of the copy ─▶ store it ─▶ a template and a build that is ready
//!   └ the sandbox ┘  └──────────────────── the sandbox runs, or has ended ──────────────────────┘
//!     stands still
//! ```
//!
//! Only the copy excludes changes of the sandbox: whoever pauses or ends it meanwhile waits for that. What follows needs
//! nothing of the sandbox any more. Nothing refers to a snapshot before it is complete, so there is nothing to undo: a copy
//! and a layer that a crash leaves are removed as any other that nothing has.

use std::sync::Arc;
use std::time::Duration;

use model::id::{BuildId, TemplateId};
use model::lifecycle::State;
use model::lifecycle::command::{Command, Refusal};
use protocol::node::{CopiedMemory, NodeError};
use store::error::StoreError;
use store::snapshots::NameUse;
use uuid::Uuid;

use super::Sandboxes;
use super::change::ChangeError;
use super::entry::SandboxEntry;
use super::pause::within;
use crate::builds::Builds;
use crate::builds::recipe::BuildSpec;
use crate::builds::snapshot::{SnapshotBuildError, SnapshotSource};
use crate::records::LifecycleEvent;
use crate::templates::TemplateName;

/// How long the node may take to copy a disk. The sandbox cannot be changed meanwhile.
const COPY_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// How long a request waits for another snapshot of the sandbox before it is refused because of that.
const OTHER_WAIT: Duration = Duration::from_secs(30);

/// The only snapshot of a sandbox that is being made.
const SNAPSHOT: Command = Command::Snapshot { is_other_made: false };

/// A snapshot to make.
#[derive(Debug)]
pub(crate) struct SnapshotRequest {
    /// Its name in the team.
    pub(crate) name: Option<TemplateName>,
    /// Its tag.
    pub(crate) tag: String,
    /// Whether it has the processes of the sandbox, if they can be kept.
    pub(crate) memory: bool,
}

/// Why no snapshot was made. The sandbox runs on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    State(ChangeError),
    #[error("another snapshot of the sandbox is being made")]
    InProgress,
    #[error("the name of the snapshot is taken")]
    NameTaken(NameUse),
    #[error("the template has too many tags")]
    TooManyTags,
    /// The files cannot be stored, for a reason that is for the client.
    #[error("{0}")]
    Refused(String),
    #[error("{0}")]
    Unsupported(String),
    #[error("the team makes other snapshots")]
    TooMany,
    /// The host has no space, or is busy.
    #[error("{0}")]
    NoCapacity(String),
    #[error("the snapshot failed")]
    Failed(#[source] SnapshotBuildError),
    #[error("the server is being stopped")]
    ServerStopping,
    #[error("the task panicked or was cancelled")]
    TaskFailed,
}

impl From<Refusal> for SnapshotError {
    fn from(why: Refusal) -> Self {
        Self::State(why.into())
    }
}

impl From<NodeError> for SnapshotError {
    fn from(error: NodeError) -> Self {
        match error {
            NodeError::NotFound(_) => Self::State(ChangeError::Gone),
            NodeError::Capacity(why) => Self::NoCapacity(why),
            NodeError::Refused(why) => Self::Refused(why),
            NodeError::Unsupported(why) => Self::Unsupported(why),
            error @ (NodeError::NoLayer(_)
            | NodeError::Unavailable(_)
            | NodeError::Busy { .. }
            | NodeError::Cancelled
            | NodeError::Failed(_)
            | NodeError::Away
            | NodeError::Unreachable(_)) => Self::Failed(error.into()),
        }
    }
}

impl From<SnapshotBuildError> for SnapshotError {
    fn from(error: SnapshotBuildError) -> Self {
        match error {
            SnapshotBuildError::Store(error) => error.into(),
            SnapshotBuildError::Node(error) => error.into(),
            SnapshotBuildError::NameTaken(taken) => Self::NameTaken(taken),
            SnapshotBuildError::TooManyTags => Self::TooManyTags,
            error @ (SnapshotBuildError::Objects(_) | SnapshotBuildError::Random(_) | SnapshotBuildError::Invalid) => {
                Self::Failed(error)
            }
        }
    }
}

impl Sandboxes {
    /// Makes a snapshot of a running sandbox and returns its template, once sandboxes can be created from it. Runs on a task
    /// of its own: a client disconnect changes nothing.
    pub(crate) async fn snapshot(
        self: &Arc<Self>,
        builds: &Arc<Builds>,
        entry: &Arc<SandboxEntry>,
        request: SnapshotRequest,
    ) -> Result<TemplateId, SnapshotError> {
        entry.check(SNAPSHOT)?;
        let (sandboxes, builds, entry) = (Arc::clone(self), Arc::clone(builds), Arc::clone(entry));
        let task = self.work.spawn(async move {
            let _only = match entry.begin_snapshot() {
                Ok(only) => only,
                Err(Refusal::InSnapshot) => {
                    let _ = tokio::time::timeout(OTHER_WAIT, entry.snapshot_ended()).await;
                    return Err(SnapshotError::InProgress);
                }
                Err(why) => return Err(why.into()),
            };
            sandboxes.snapshot_on_task(&builds, &entry, request).await
        });
        task.await.unwrap_or(Err(SnapshotError::TaskFailed))
    }

    async fn snapshot_on_task(
        self: &Arc<Self>,
        builds: &Builds,
        entry: &Arc<SandboxEntry>,
        request: SnapshotRequest,
    ) -> Result<TemplateId, SnapshotError> {
        let alias = request.name.map(|name| name.name);
        if let Some(alias) = &alias {
            // Again when it is stored; here before the sandbox stands still for nothing.
            match self.store().snapshot_name_use(&entry.team, alias).await? {
                NameUse::Free | NameUse::Snapshot => {}
                taken @ (NameUse::Template | NameUse::Id) => return Err(SnapshotError::NameTaken(taken)),
            }
        }
        let place = self.work.copies.place(&entry.team).ok_or(SnapshotError::TooMany)?;
        // Before the turn of this sandbox: nothing else of this sandbox waits for the copies of others.
        let turn = tokio::select! {
            biased;
            turn = place.turn() => turn,
            () = self.work.stopping().cancelled() => return Err(SnapshotError::ServerStopping),
        };
        let started_us = self.clock.now_us();
        let turn_of_sandbox = entry.turn_of(SNAPSHOT).await;
        turn_of_sandbox.check(SNAPSHOT)?;
        let row = self.store().sandbox_by_id(&entry.id).await?;
        let row = row.ok_or(SnapshotError::State(ChangeError::Gone))?;
        let build = self.store().build_by_id(&row.template_id, &row.build_id).await?;
        let spec = build.as_ref().and_then(BuildSpec::of);
        let spec = spec.ok_or(SnapshotError::Failed(SnapshotBuildError::Invalid))?;
        let copied = within(COPY_TIMEOUT, entry.node.handle.copy_disk(&entry.id, request.memory)).await;
        drop((turn_of_sandbox, turn));
        let copied = match copied {
            // Its end was requested while it stood still.
            Err(NodeError::NotFound(_)) if entry.state() == State::Stopping => {
                return Err(SnapshotError::State(ChangeError::Stopping));
            }
            copied => copied?,
        };
        let build = BuildId::try_from(Uuid::new_v4().to_string());
        let build = build.map_err(|_| SnapshotError::Failed(SnapshotBuildError::Invalid))?;
        let source = SnapshotSource {
            origin: self.origin_of_memory(&entry.node, &build),
            build,
            node: entry.node.handle.clone(),
            copied,
            spec,
            authority: row.authority_of.unwrap_or_else(|| row.id.clone()),
            sandbox: row.id,
            team: row.team_id,
            cpu_count: row.cpu_count,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
            alias,
            tag: request.tag,
            started_us,
        };
        let (template, memory) = tokio::select! {
            biased;
            made = builds.snapshot(source) => made?,
            // What is left of it is removed by the node, or by the next start.
            () = self.work.stopping().cancelled() => return Err(SnapshotError::ServerStopping),
        };
        entry.node.changed.notify_one();
        if matches!(memory, CopiedMemory::Copied) {
            self.copy_memories(&entry.node);
        }
        self.tracked
            .log(&entry.id, &LifecycleEvent::Snapshotted(&template, &memory));
        Ok(template)
    }
}

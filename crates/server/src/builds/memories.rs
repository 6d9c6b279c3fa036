//! The memory of snapshots on the node: which is needed, how much space it takes, and removing the rest.
//!
//! The node keeps a copy by the build of its snapshot before there is a row for that, and until it is told to remove it. So
//! what a crash leaves between the two, and what belonged to a deleted template, is found by comparing.

use std::collections::HashSet;

use blobs::CopyOf;
use model::id::{BuildId, TeamId};
use protocol::node::{CopiedDisk, CopiedMemory, NodeError};
use store::error::StoreError;

use super::Builds;
use super::recipe::BuildSpec;
use crate::chain::Chain;
use crate::node::NodeHandle;

/// How long the row of a fork's memory stays whose server was lost, in seconds. No fork takes as long.
pub(super) const FORK_MEMORY_FOR_S: i64 = 2 * 60 * 60;

/// A memory that is being kept, or is that of a fork: it is not removed, although no template refers to it.
#[derive(Debug)]
pub(crate) struct PendingMemory<'a> {
    builds: &'a Builds,
    build: BuildId,
}

impl Drop for PendingMemory<'_> {
    fn drop(&mut self) {
        self.builds.pending_memories.lock().remove(&self.build);
        // If the snapshot was not stored.
        self.builds.memories_changed.notify_one();
    }
}

impl Builds {
    /// Expects the memory of a snapshot, until the result is dropped.
    pub(crate) fn expect_memory(&self, build: &BuildId) -> PendingMemory<'_> {
        self.pending_memories.lock().insert(build.clone());
        PendingMemory {
            builds: self,
            build: build.clone(),
        }
    }

    /// Has a node keep a copy with processes as the memory of a fork, under an id that no build has. It is removed from all nodes,
    /// and from the blob store, once the result is dropped.
    ///
    /// # Errors
    /// [`NodeError::Refused`], with a reason for the client, when the copy has no processes; and when the node fails.
    pub(crate) async fn keep_fork_memory(
        &self,
        node: &NodeHandle,
        copied: &CopiedDisk,
        build: &BuildId,
    ) -> Result<PendingMemory<'_>, NodeError> {
        let pending = self.expect_memory(build);
        let wanted = matches!(copied.memory, CopiedMemory::Copied).then_some(build);
        let bytes = match node.keep_copy(&copied.disk, wanted).await {
            // A node of the version before makes a layer of it, too, which is used by nobody, and collected.
            Err(NodeError::Unsupported(_)) => {
                let _removal = self.removal.read().await;
                node.commit_copy(&copied.disk, false, wanted).await?.memory_bytes
            }
            bytes => bytes?,
        };
        match (&copied.memory, bytes) {
            (CopiedMemory::Missing(why), _) => Err(NodeError::Refused(why.clone())),
            (CopiedMemory::Copied, Some(_)) => Ok(pending),
            (CopiedMemory::Copied | CopiedMemory::Unwanted, _) => Err(NodeError::failed("it keeps no memory")),
        }
    }

    /// Notes that a template was deleted, whose memory is removed soon.
    pub(crate) fn note_deleted(&self) {
        self.memories_changed.notify_one();
    }

    /// Removes the memory of snapshots that are not there any more.
    pub(super) async fn collect_memories(&self) {
        let Some(_may_remove) = self.may_remove() else {
            return;
        };
        let kept = match self.node.memories().await {
            Ok(kept) => kept,
            Err(error) => {
                tracing::error!(error = %Chain(&error), "cannot list the memory of snapshots");
                return;
            }
        };
        if kept.is_empty() {
            return;
        }
        // In this order: one that is stored between the two is in the second.
        let pending = self.pending_memories.lock().clone();
        let needed: HashSet<BuildId> = match self.memories_of_teams().await {
            Ok(Some(memories)) => memories.into_iter().map(|(_, build)| build).collect(),
            Ok(None) => {
                tracing::error!("no memory of a snapshot is removed: the spec of a build is invalid");
                return;
            }
            Err(error) => {
                tracing::error!(error = %Chain(&error), "cannot list snapshots");
                return;
            }
        };
        for memory in kept {
            if pending.contains(&memory.build) || needed.contains(&memory.build) {
                continue;
            }
            match self.node.remove_memory(&memory.build).await {
                Ok(()) => {
                    tracing::info!(build.id = %memory.build, bytes = memory.bytes, "removed the memory of a snapshot");
                    self.remove_unused_copy(memory.build).await;
                }
                Err(error) => {
                    tracing::error!(build.id = %memory.build, error = %Chain(&error), "cannot remove the memory of a snapshot");
                }
            }
        }
    }

    /// Removes the copy of a memory that is not there any more, unless another server still uses it for a fork. What fails is found by
    /// the next round of all objects.
    async fn remove_unused_copy(&self, build: BuildId) {
        let Some(stored) = self.node.stored() else { return };
        let removed = match self.rows.store().memory(&build).await {
            Ok(Some(_)) => return,
            Ok(None) => stored
                .blobs
                .delete_of(&CopyOf::Memory(build.clone()))
                .await
                .map_err(|error| Chain(&error).to_string()),
            Err(error) => Err(Chain(&error).to_string()),
        };
        if let Err(error) = removed {
            tracing::warn!(build.id = %build, error, "cannot remove the copy of the memory of a snapshot yet");
        }
    }

    /// The builds of this server, or of all of the service, that have memory, with the teams that own them; none if a spec cannot be read.
    pub(super) async fn memories_of_teams(&self) -> Result<Option<Vec<(TeamId, BuildId)>>, StoreError> {
        let mut found = Vec::new();
        for (team, json) in self.references_by_team().await? {
            let Ok(spec) = serde_json::from_str::<BuildSpec>(&json) else {
                return Ok(None);
            };
            found.extend(spec.memory.map(|memory| (team, memory.build)));
        }
        Ok(Some(found))
    }
}

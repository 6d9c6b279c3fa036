//! Copies of the memory of snapshots in the blob store: made after a snapshot by the node that has it, and brought to another node
//! before a sandbox is started from it there.
//!
//! ```text
//!   snapshot ──▶ answer ──▶ chunks ──▶ manifest           in the background, again and again until it is there
//!   create on a node without it ──▶ manifest ──▶ chunks ──▶ the node keeps it ──▶ start
//!                                   └──── takes too long, or fails: files alone ────┘
//! ```
//!
//! A memory never changes, so it has one copy, which counts once its manifest is there: no row says so. The row of the snapshot says
//! which node has made the memory, and no other one is asked for a copy: a node that was broken into cannot pass anything off as
//! the memory of a snapshot that it never had.

use std::sync::Arc;
use std::time::Duration;

use blobs::{CopyOf, Name};
use model::id::BuildId;
use model::secret::Secret;
use protocol::node::{NodeError, PackMemory, UnpackMemory};
use sha2::{Digest as _, Sha256};
use store::snapshots::{MemoryOrigin, MemoryRow};
use tokio::sync::watch;

use super::Sandboxes;
use super::packing::RETRY;
use crate::chain::Chain;
use crate::layers::turns::Payer;
use crate::nodes::ServedNode;
use crate::outcome::CopyOutcome;
use crate::parcels::{ParcelError, Parcels, most_of};

/// How long a create request waits for a memory. It arrives nevertheless, for the next one.
const FETCH_WAIT: Duration = Duration::from_secs(20);
/// Length of the id of a copy, in bytes.
const PARCEL: usize = 16;

/// The id of the copy under this key.
pub(super) fn parcel_of(key: &Secret) -> String {
    let hash = Sha256::new()
        .chain_update("ringfence/memory-parcel/1/")
        .chain_update(key.expose())
        .finalize();
    hex::encode(&hash[..PARCEL])
}

impl Sandboxes {
    /// Copies the memories of a node that have no copy, in the background.
    pub(crate) fn copy_memories(self: &Arc<Self>, node: &Arc<ServedNode>) {
        let Some(parcels) = self.parcels.clone().filter(|_| node.copies_memories) else {
            return;
        };
        match &mut *node.memories.copying.lock() {
            Some(again) => {
                *again = true;
                return;
            }
            copying => *copying = Some(false),
        }
        let (sandboxes, node) = (Arc::clone(self), Arc::clone(node));
        self.work.spawn(async move {
            let mut pause = RETRY.0;
            loop {
                let copied = tokio::select! {
                    biased;
                    () = node.over.cancelled() => return,
                    () = sandboxes.work.stopping().cancelled() => return,
                    copied = sandboxes.copy_all_memories(&parcels, &node) => copied,
                };
                if let Err(error) = copied {
                    parcels.metrics.copy_upload(CopyOutcome::Failed, sandboxes.clock.now_us());
                    if pause == RETRY.0 {
                        tracing::warn!(node.id = %node.id(), error = %Chain(&error), "cannot copy the memory of a snapshot to the blob store yet, it is tried again");
                    } else {
                        tracing::debug!(node.id = %node.id(), error = %Chain(&error), "cannot copy the memory of a snapshot yet");
                    }
                    // The next session of the node waits for this one to end.
                    tokio::select! {
                        biased;
                        () = node.over.cancelled() => return,
                        goes_on = sandboxes.work.pause(pause) => if !goes_on { return },
                    }
                    pause = (pause * 2).min(RETRY.1);
                    continue;
                }
                let mut copying = node.memories.copying.lock();
                if *copying == Some(false) {
                    *copying = None;
                    return;
                }
                *copying = Some(false);
                pause = RETRY.0;
            }
        });
    }

    /// What the copy of a memory needs that this node makes; none where memories are not copied.
    pub(super) fn origin_of_memory(&self, node: &ServedNode, build: &BuildId) -> Option<MemoryOrigin> {
        let parcels = self.parcels.as_ref().filter(|_| node.copies_memories)?;
        match parcels.new_key(&CopyOf::Memory(build.clone())) {
            Ok(key) => Some(MemoryOrigin {
                node: node.id().clone(),
                key,
            }),
            Err(error) => {
                tracing::error!(build.id = %build, "the memory of a snapshot is not copied: {error}");
                None
            }
        }
    }

    async fn copy_all_memories(&self, parcels: &Parcels, node: &ServedNode) -> Result<(), ParcelError> {
        // One that cannot be copied keeps none of others from it.
        let mut copied = Ok(());
        for memory in node.handle.memories().await? {
            let row = self.store().snapshot_memory(&memory.build).await?;
            // Another node that says that it has the memory may have got the copy, and is not believed otherwise. Without a row the
            // snapshot is stored a moment later, or was deleted.
            let Some(row) = row.filter(|row| row.origin.node == *node.id()) else {
                continue;
            };
            let _turn = parcels.upload_turn(&Some(row.team.clone())).await;
            match self.copy_memory(parcels, node, &row).await {
                Ok(Some(bytes)) => {
                    parcels.metrics.copy_upload(CopyOutcome::Complete, self.clock.now_us());
                    tracing::info!(build.id = %row.build, bytes, "the memory of a snapshot was copied to the blob store");
                }
                Ok(None) => {}
                // It would be the same again.
                Err(error @ ParcelError::Invalid(_)) => {
                    tracing::error!(build.id = %row.build, error = %Chain(&error), "the memory of a snapshot is not copied to the blob store");
                }
                Err(error) => copied = Err(error),
            }
        }
        copied
    }

    /// Copies a memory, unless there is a copy. Returns how much was sent, in bytes; none if there was nothing to do.
    pub(super) async fn copy_memory(
        &self,
        parcels: &Parcels,
        node: &ServedNode,
        row: &MemoryRow,
    ) -> Result<Option<u64>, ParcelError> {
        let of = CopyOf::Memory(row.build.clone());
        let key = parcels.open_key(&of, &row.origin.key)?;
        let parcel = parcel_of(&key);
        if parcels.has(&Name::Manifest(of.clone(), parcel.clone())).await? {
            return Ok(None);
        }
        let most = most_of(row.disk_mb, row.memory_mb);
        let stored = parcels.store(&of, &parcel, most, false, |known| {
            let request = PackMemory {
                build: row.build.clone(),
                parcel: parcel.clone(),
                key: key.clone(),
                known,
            };
            node.handle.pack_memory(request)
        });
        let stored = stored.await?;
        if self.store().memory(&row.build).await?.is_none() {
            // Deleted meanwhile: whoever has removed what there was did not see all of this.
            parcels.remove(&of).await?;
            return Ok(None);
        }
        parcels.settle(stored, true).await
    }

    /// Brings the memory of a snapshot to a node from which a sandbox is about to be started there, if the node lacks it and there is
    /// a copy. Without it the sandbox starts with its files alone, and the node says so in its log.
    pub(super) async fn bring_memory(self: &Arc<Self>, node: &Arc<ServedNode>, payer: &Payer, build: &BuildId) {
        let Some(parcels) = self.parcels.clone().filter(|_| node.copies_memories) else {
            return;
        };
        if node.holdings.lock().memories.begin_use(build, self.clock.now_us()) {
            return;
        }
        let mut ended = self.begin_to_bring(parcels, node, payer, build);
        if tokio::time::timeout(FETCH_WAIT, ended.wait_for(|ended| *ended))
            .await
            .is_err()
        {
            tracing::warn!(build.id = %build, node.id = %node.id(), "the memory of a snapshot is still being fetched from the blob store");
        }
    }

    /// Begins to bring a memory to a node on a task of its own, unless that has begun.
    pub(super) fn begin_to_bring(
        self: &Arc<Self>,
        parcels: Arc<Parcels>,
        node: &Arc<ServedNode>,
        payer: &Payer,
        build: &BuildId,
    ) -> watch::Receiver<bool> {
        let mut arriving = node.memories.arriving.lock();
        if let Some(ended) = arriving.get(build) {
            return ended.clone();
        }
        let (tell, ended) = watch::channel(false);
        arriving.insert(build.clone(), ended.clone());
        let leaves = node.memories.leaves(build);
        let (sandboxes, node, payer, build) = (Arc::clone(self), Arc::clone(node), payer.clone(), build.clone());
        self.work.spawn(async move {
            let bringing = async {
                if let Some(mut leaves) = leaves {
                    // An error means that it has left.
                    while leaves.changed().await.is_ok() {}
                }
                sandboxes.bring_once(&parcels, &node, &payer, &build).await
            };
            let brought = tokio::select! {
                biased;
                () = node.over.cancelled() => Ok(None),
                () = sandboxes.work.stopping().cancelled() => Ok(None),
                brought = bringing => brought,
            };
            match brought {
                Ok(Some(bytes)) => {
                    tracing::info!(build.id = %build, node.id = %node.id(), bytes, "brought the memory of a snapshot to a node");
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(build.id = %build, node.id = %node.id(), error = %Chain(&error), "cannot bring the memory of a snapshot to a node");
                }
            }
            // First, so that whoever begins afterwards finds what is true then.
            node.memories.arriving.lock().remove(&build);
            tell.send_replace(true);
        });
        ended
    }

    /// Returns the space that it takes on the node, in bytes; none if the node has it, or there is no copy.
    async fn bring_once(
        self: &Arc<Self>,
        parcels: &Parcels,
        node: &Arc<ServedNode>,
        payer: &Payer,
        build: &BuildId,
    ) -> Result<Option<u64>, ParcelError> {
        let Some(row) = self.store().memory(build).await? else {
            return Ok(None);
        };
        if node
            .handle
            .memories()
            .await?
            .iter()
            .any(|memory| memory.build == *build)
        {
            node.holdings.lock().memories.insert(build.clone(), self.clock.now_us());
            return Ok(None);
        }
        let of = CopyOf::Memory(build.clone());
        let key = parcels.open_key(&of, &row.origin.key)?;
        let parcel = parcel_of(&key);
        let manifest = Name::Manifest(of.clone(), parcel.clone());
        if !parcels.has(&manifest).await? {
            return Ok(None);
        }
        let _turn = parcels.download_turn(payer).await?;
        let unpacked = parcels.fetch(node, payer, &of, &parcel, |stream| {
            let request = UnpackMemory {
                build: build.clone(),
                parcel: parcel.clone(),
                key: key.clone(),
            };
            node.handle.unpack_memory(request, stream)
        });
        let unpacked = unpacked.await;
        parcels.metrics.copy_download(match &unpacked {
            // The copy is complete, and its processes fit another host.
            Ok(_) | Err(ParcelError::Node(NodeError::Unsupported(_))) => CopyOutcome::Complete,
            Err(error) if error.is_damage() => CopyOutcome::Damaged,
            Err(_) => CopyOutcome::Failed,
        });
        match unpacked {
            Ok(memory) => {
                node.holdings.lock().memories.insert(memory.build, self.clock.now_us());
                Ok(Some(memory.bytes))
            }
            Err(error) => {
                // Without it, the node that has made the memory makes another one. Where that was forgotten, nobody could, and one node
                // that says so may be wrong.
                if error.is_damage() && self.store().node_by_id(&row.origin.node).await?.is_some() {
                    parcels.remove(&of).await?;
                    self.nodes.all().iter().for_each(|node| self.copy_memories(node));
                }
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_belongs_to_its_key() {
        let [one, other] = ["a1", "b2"].map(|byte| parcel_of(&Secret::new(byte.repeat(32))));
        assert_ne!(one, other);
        let build: BuildId = "11111111-2222-4333-8444-555555555555".parse().unwrap();
        let name = Name::Manifest(CopyOf::Memory(build), one);
        assert_eq!(Name::parse(&name.to_string()), Some(name));
    }
}

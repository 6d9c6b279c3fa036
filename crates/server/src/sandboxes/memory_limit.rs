//! The space that the memory of snapshots takes on nodes that did not make it.
//!
//! A node keeps what it has fetched for the next sandboxes. If its layers and memories together are larger than `blobs.cache_mb`,
//! memories are removed from it that were not used for the longest time, and that the blob store has. Those that it has made itself
//! stay: of them it makes another copy if that in the blob store is damaged.

use std::sync::Arc;
use std::time::Duration;

use blobs::{CopyOf, Name};
use model::id::BuildId;
use tokio_util::sync::CancellationToken;

use super::Sandboxes;
use super::memories::parcel_of;
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::nodes::ServedNode;
use crate::parcels::{ParcelError, Parcels};

/// How long a memory stays that a sandbox was started from, in microseconds: what one has just fetched, another may be about to use.
const USED_US: i64 = 600 * SECOND_US;

impl Sandboxes {
    /// Removes memories from nodes where they take too much space, at intervals until `stop` is cancelled.
    pub(crate) async fn limit_memories_at_intervals(self: Arc<Self>, interval: Duration, stop: CancellationToken) {
        if self.parcels.is_none() {
            return;
        }
        let mut next = tokio::time::Instant::now() + interval;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep_until(next) => {}
            }
            next = tokio::time::Instant::now() + interval;
            self.limit_memories().await;
        }
    }

    /// Removes memories from nodes where they take too much space. What fails is tried the next time.
    pub(crate) async fn limit_memories(&self) {
        let Some(parcels) = &self.parcels else { return };
        for node in self.nodes.all().iter().filter(|node| node.copies_memories) {
            let Some(most) = node.handle.stored().and_then(|stored| stored.cache_bytes) else {
                continue;
            };
            if let Err(error) = self.limit_memories_of(parcels, node, most).await {
                tracing::error!(node.id = %node.id(), error = %Chain(&error), "cannot remove memory of snapshots beyond blobs.cache_mb from a node, it is tried again");
            }
        }
    }

    async fn limit_memories_of(&self, parcels: &Parcels, node: &ServedNode, most: u64) -> Result<(), ParcelError> {
        let mut memories = node.handle.memories().await?;
        if memories.is_empty() {
            return Ok(());
        }
        let layers = node.handle.layers().await?;
        let sizes = layers.iter().map(|layer| layer.bytes);
        let sizes = sizes.chain(memories.iter().map(|memory| memory.bytes));
        let mut over = sizes.fold(0, u64::saturating_add).saturating_sub(most);
        let since_us = self.clock.now_us() - USED_US;
        {
            let holdings = node.holdings.lock();
            memories.retain(|memory| holdings.memories.used_us(&memory.build) < since_us);
            memories.sort_by_key(|memory| holdings.memories.used_us(&memory.build));
        }
        for memory in memories {
            if over == 0 {
                break;
            }
            if !self.can_come_back(parcels, node, &memory.build).await? {
                continue;
            }
            // Otherwise one is on its way to the node.
            let Ok(_alone) = node.memories.changing.try_write() else {
                break;
            };
            {
                // Whoever looks afterwards does not find it.
                let mut holdings = node.holdings.lock();
                if holdings.memories.used_us(&memory.build) >= since_us {
                    continue;
                }
                holdings.memories.remove(&memory.build);
            }
            node.handle.remove_memory(&memory.build).await?;
            over = over.saturating_sub(memory.bytes);
            let bytes = memory.bytes;
            tracing::info!(build.id = %memory.build, node.id = %node.id(), bytes, "removed the memory of a snapshot that is in the blob store from a node");
        }
        Ok(())
    }

    /// Whether a node gets this memory again when it needs it: it is that of a snapshot, another node has made it, and its copy is
    /// complete.
    async fn can_come_back(&self, parcels: &Parcels, node: &ServedNode, build: &BuildId) -> Result<bool, ParcelError> {
        let row = self.store().snapshot_memory(build).await?;
        let Some(row) = row.filter(|row| row.origin.node != *node.id()) else {
            return Ok(false);
        };
        let of = CopyOf::Memory(build.clone());
        let key = parcels.open_key(&of, &row.origin.key)?;
        Ok(parcels.has(&Name::Manifest(of, parcel_of(&key))).await?)
    }
}

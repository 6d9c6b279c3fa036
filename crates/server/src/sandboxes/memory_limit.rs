//! The space that the memory of snapshots takes on nodes that did not make it.
//!
//! A node keeps what it has fetched for the next sandboxes. If that is more than `blobs.cache_mb`, it loses memories that have a copy
//! in the blob store, the longest unused first. What it has made itself stays and does not count: if the copy in the blob store is
//! damaged, it makes another one.
//!
//! Nobody finds a memory on a node that is about to lose it: it is not among those that the node is known to have, and whoever brings
//! it there again waits until it is gone.

use std::sync::Arc;
use std::time::Duration;

use blobs::{CopyOf, Name};
use model::id::BuildId;
use store::snapshots::MemoryRow;
use tokio_util::sync::CancellationToken;

use super::Sandboxes;
use super::memories::parcel_of;
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::nodes::ServedNode;
use crate::parcels::{ParcelError, Parcels};

/// How long a memory stays that a sandbox was started from, in microseconds: what one has just fetched, another may be about to use.
const USED_US: i64 = 600 * SECOND_US;

/// A memory that a node has fetched.
struct Fetched {
    build: BuildId,
    row: MemoryRow,
    bytes: u64,
    /// When it was used last.
    used_us: i64,
}

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
            // It is in the log.
            let _ = self.limit_memories().await;
        }
    }

    /// Removes memories from nodes where they take too much space. What fails is tried the next time.
    ///
    /// # Errors
    /// The first failure.
    pub(crate) async fn limit_memories(&self) -> Result<(), ParcelError> {
        let Some(parcels) = &self.parcels else { return Ok(()) };
        let mut limited = Ok(());
        for node in self.nodes.all().iter().filter(|node| node.copies_memories) {
            let Some(most) = node.handle.stored().and_then(|stored| stored.cache_bytes) else {
                continue;
            };
            if let Err(error) = self.limit_memories_of(parcels, node, most).await {
                tracing::error!(node.id = %node.id(), error = %Chain(&error), "cannot remove memory of snapshots beyond blobs.cache_mb from a node, it is tried again");
                limited = limited.and(Err(error));
            }
        }
        limited
    }

    async fn limit_memories_of(&self, parcels: &Parcels, node: &ServedNode, most: u64) -> Result<(), ParcelError> {
        let since_us = self.clock.now_us() - USED_US;
        let mut fetched = self.fetched_by(node).await?;
        let total = fetched
            .iter()
            .fold(0_u64, |sum, memory| sum.saturating_add(memory.bytes));
        let mut over = total.saturating_sub(most);
        fetched.retain(|memory| memory.used_us < since_us);
        fetched.sort_by_key(|memory| memory.used_us);
        // One that cannot be removed keeps no other one.
        let mut limited = Ok(());
        for memory in fetched {
            if over == 0 {
                break;
            }
            match self.remove_if_unused(parcels, node, &memory, since_us).await {
                Ok(true) => over = over.saturating_sub(memory.bytes),
                Ok(false) => {}
                Err(error) => limited = limited.and(Err(error)),
            }
        }
        limited
    }

    /// The memories of snapshots that a node has fetched from those that have made them, which are nodes of the service still: they
    /// can make another copy.
    async fn fetched_by(&self, node: &ServedNode) -> Result<Vec<Fetched>, ParcelError> {
        let mut fetched = Vec::new();
        for memory in node.handle.memories().await? {
            let row = self.store().snapshot_memory(&memory.build).await?;
            let Some(row) = row.filter(|row| row.origin.node != *node.id()) else {
                continue;
            };
            if self.store().node_by_id(&row.origin.node).await?.is_some() {
                fetched.push(Fetched {
                    used_us: node.holdings.lock().memories.used_us(&memory.build),
                    build: memory.build,
                    row,
                    bytes: memory.bytes,
                });
            }
        }
        Ok(fetched)
    }

    /// Removes a memory from a node if its copy is complete and nobody uses it. Returns whether it did.
    async fn remove_if_unused(
        &self,
        parcels: &Parcels,
        node: &ServedNode,
        memory: &Fetched,
        since_us: i64,
    ) -> Result<bool, ParcelError> {
        let Fetched { build, row, bytes, .. } = memory;
        let of = CopyOf::Memory(build.clone());
        let key = parcels.open_key(&of, &row.origin.key)?;
        if !parcels.has(&Name::Manifest(of, parcel_of(&key))).await? {
            return Ok(false);
        }
        // What the node is known to have is not read meanwhile, or this memory would be among it again.
        let _listing = node.memories.listing.lock().await;
        let Some(_leaving) = node.memories.begin_to_leave(build) else {
            return Ok(false);
        };
        {
            let mut holdings = node.holdings.lock();
            if holdings.memories.used_us(build) >= since_us {
                return Ok(false);
            }
            holdings.memories.remove(build);
        }
        node.handle.remove_memory(build).await?;
        tracing::info!(build.id = %build, node.id = %node.id(), bytes, "removed the memory of a snapshot that is in the blob store from a node");
        Ok(true)
    }
}

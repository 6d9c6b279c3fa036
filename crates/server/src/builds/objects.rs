//! The objects of builds in the blob store: layers of final builds and uploaded files.
//!
//! The database says which of them are needed. A build is final only once its layers are stored, and an upload once its
//! file is. What nothing refers to is removed when its object is old, so that what a build of another node has just
//! stored stays until its row says so, and other nodes are told before; what is missing is stored again by the node that has it.

use std::collections::HashSet;

use blobs::{BlobError, Claim, CopyOf, Name, Object};
use futures_util::StreamExt as _;
use model::id::LayerId;
use protocol::node::NodeError;
use store::error::StoreError;

use super::Builds;
use super::collect::{DELETED_FOR_S, layers_in};
use super::memories::FORK_MEMORY_FOR_S;
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::layers::{KeepError, StoredLayers};

/// How many objects are removed after one look at what is needed.
const REMOVED_TOGETHER: usize = 100;

/// Why layers or files of builds were not stored, or their objects not removed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ObjectError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Blobs(#[from] BlobError),
    #[error(transparent)]
    Keep(#[from] KeepError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("the objects with the prefix belong to another database: choose another blobs.prefix")]
    Foreign,
    #[error("invalid spec or recipe of a build")]
    Invalid(#[from] serde_json::Error),
}

/// Counts of the objects of a round.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) removed: usize,
    pub(crate) stored: usize,
}

impl Builds {
    /// Stores layers of the node, those that are stored already excepted. Without a blob store there is nothing to do.
    pub(super) async fn keep_layers(&self, layers: &[LayerId]) -> Result<(), ObjectError> {
        let Some(stored) = self.node.stored() else {
            return Ok(());
        };
        let referenced = self.referenced(i64::MAX).await?;
        for layer in layers {
            stored.keep(layer, referenced.contains(layer)).await?;
        }
        Ok(())
    }

    /// The layers that the builds of all nodes refer to, those of templates that were deleted before excepted.
    async fn referenced(&self, deleted_us: i64) -> Result<HashSet<LayerId>, ObjectError> {
        let mut referenced = HashSet::new();
        for json in self.rows.store().layer_references_of_all(deleted_us).await? {
            layers_in(&json, &mut referenced)?;
        }
        Ok(referenced)
    }

    /// Removes objects that nothing refers to, and stores layers that are missing.
    pub(crate) async fn collect_objects(&self) -> Result<Round, ObjectError> {
        let Some(stored) = self.node.stored() else {
            return Ok(Round::default());
        };
        if stored.blobs.claim(&stored.owner).await? == Claim::Foreign {
            return Err(ObjectError::Foreign);
        }
        let aborted = stored.blobs.abort_left().await?;
        if aborted > 0 {
            tracing::info!(
                aborted,
                "aborted uploads to the blob store that an earlier process left"
            );
        }
        // The objects first: what is stored after this is skipped.
        let mut old = Vec::new();
        let mut layers = HashSet::new();
        let before_us = self.clock.now_us() - i64::from(stored.grace_s) * SECOND_US;
        let mut objects = Box::pin(stored.blobs.list());
        while let Some(object) = objects.next().await {
            let (name, object) = object?;
            if let Name::Layer(layer) = &name {
                layers.insert(layer.clone());
            }
            if object.written_us < before_us {
                old.push((name, object));
            }
        }
        drop(objects);
        let deleted_us = self.clock.now_us() - DELETED_FOR_S * SECOND_US;
        let mut used = self.referenced(deleted_us).await?;
        let mut round = Round {
            stored: self.store_missing(stored, &used, &layers).await?,
            removed: self.remove_copies(stored).await?,
        };
        used.extend(self.pinned());
        let files: HashSet<_> = self.rows.store().template_file_names().await?.into_iter().collect();
        old.retain(|(name, _)| match name {
            Name::Layer(layer) => !used.contains(layer),
            Name::File(team, hash) => !files.contains(&(team.clone(), hash.clone())),
            Name::Chunk(..) | Name::Manifest(..) => false,
        });
        for unused in old.chunks(REMOVED_TOGETHER) {
            round.removed += self.remove(stored, unused).await?;
        }
        stored.forget_removals().await?;
        Ok(round)
    }

    /// Removes the copies of sandboxes that have ended, and of the memory of snapshots that were deleted and of forks that are over. These were listed before, and
    /// each has a row before it has any object; so one without a row has ended, on whichever server. A copy has thousands of objects:
    /// those of what is there are not listed, and the others are removed as they come, so that none is held in memory.
    async fn remove_copies(&self, stored: &StoredLayers) -> Result<usize, ObjectError> {
        let lost_us = self.clock.now_us() - FORK_MEMORY_FOR_S * SECOND_US;
        self.rows.store().fork_memory_purge(lost_us).await?;
        let mut removed = 0;
        for id in stored.blobs.sandboxes().await? {
            if self.rows.store().sandbox_by_id(&id).await?.is_some() {
                continue;
            }
            let objects = stored.blobs.delete_of(&CopyOf::Sandbox(id.clone())).await?;
            removed += objects;
            tracing::info!(sandbox.id = %id, objects, "removed copies of a sandbox that has ended from the blob store");
        }
        for build in stored.blobs.memories().await? {
            if self.rows.store().memory(&build).await?.is_none() {
                removed += stored.blobs.delete_of(&CopyOf::Memory(build)).await?;
            }
        }
        Ok(removed)
    }

    /// Removes objects that nothing referred to, except those that were stored again or are referred to meanwhile. Other
    /// nodes know of it before: see [`store::removals`]. If it fails, some of the objects may be deleted yet, so the
    /// announcements stay until their time is over.
    async fn remove(&self, stored: &StoredLayers, unused: &[(Name, Object)]) -> Result<usize, ObjectError> {
        let mut announced = Vec::with_capacity(unused.len());
        for (name, seen) in unused {
            if let Some(removing) = stored.begin_removal(name).await? {
                announced.push((name, *seen, removing));
            }
        }
        let mut needed = self.referenced(self.clock.now_us() - DELETED_FOR_S * SECOND_US).await?;
        needed.extend(self.pinned());
        let mut removed = 0;
        for (name, seen, removing) in announced {
            let is_needed = match name {
                Name::Layer(layer) => needed.contains(layer),
                Name::File(team, hash) => self.rows.store().template_file_exists(team, hash).await?,
                Name::Chunk(..) | Name::Manifest(..) => true,
            };
            if !is_needed && stored.blobs.head(name).await? == Some(seen) && !stored.is_late(&removing) {
                stored.blobs.delete(name).await?;
                tracing::info!(object = %name, "removed an object of the blob store that nothing refers to");
                removed += 1;
            }
            stored.end_removal(removing).await?;
        }
        Ok(removed)
    }

    /// Removes layers of the node that are in the blob store, if all together are larger than they may be. Returns how
    /// many.
    pub(crate) async fn limit_copies(&self) -> Result<usize, ObjectError> {
        let Some(stored) = self.node.stored().filter(|stored| stored.cache_bytes.is_some()) else {
            return Ok(0);
        };
        let mut needed = HashSet::new();
        for json in self.rows.layer_references_of_sandboxes().await? {
            layers_in(&json, &mut needed)?;
        }
        needed.extend(self.pinned());
        // What is in no object cannot come back.
        let known = self.node.layers().await?;
        let mut lost = HashSet::new();
        let mut copies = Vec::new();
        loop {
            let excess = stored.excess(known.clone(), &(&needed | &lost));
            let Some(layer) = excess.get(copies.len()) else { break };
            match stored.blobs.head(&Name::Layer(layer.id.clone())).await? {
                Some(_) => copies.push(layer.id.clone()),
                None => {
                    lost.insert(layer.id.clone());
                }
            }
        }
        let _removal = self.removal.write().await;
        needed.extend(self.pinned());
        copies.retain(|layer| !needed.contains(layer));
        for layer in &copies {
            self.node.remove_layer(layer).await?;
        }
        if !copies.is_empty() {
            let layers = copies.len();
            tracing::info!(
                layers,
                "removed layers from the data directory that are in the blob store"
            );
        }
        Ok(copies.len())
    }

    /// Stores the layers that are referred to, are on this node and are not in the blob store: those of before it was
    /// configured, for example.
    async fn store_missing(
        &self,
        stored: &StoredLayers,
        used: &HashSet<LayerId>,
        known: &HashSet<LayerId>,
    ) -> Result<usize, ObjectError> {
        let mut count = 0;
        for layer in self.node.layers().await? {
            if used.contains(&layer.id) && !known.contains(&layer.id) {
                // It may have been removed from the node meanwhile.
                match stored.keep(&layer.id, true).await {
                    Ok(is_new) => count += usize::from(is_new),
                    Err(KeepError::Node(NodeError::NoLayer(_))) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(count)
    }

    /// A round, whose failure is only logged.
    pub(super) async fn tidy_objects(&self) {
        let Some(_may_remove) = self.may_remove() else {
            return;
        };
        match self.collect_objects().await {
            Ok(Round { removed: 0, stored: 0 }) => {}
            Ok(Round { removed, stored }) => {
                tracing::info!(removed, stored, "the blob store has what is needed");
            }
            Err(error) => tracing::error!(error = %Chain(&error), "cannot tidy the blob store, it is tried again"),
        }
        if let Err(error) = self.limit_copies().await {
            tracing::error!(error = %Chain(&error), "cannot remove layers beyond blobs.cache_mb from the data directory, it is tried again");
        }
    }
}

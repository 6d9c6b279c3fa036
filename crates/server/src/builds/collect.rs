//! Removing layers that nothing refers to, cache entries and uploaded files that were not used for long.
//!
//! A layer is removed if neither a build, nor a sandbox, nor a cache entry, nor a build in progress refers to it, and if
//! that was so at the time before, too. Commits wait while layers are removed.

use std::collections::HashSet;
use std::time::Duration;

use model::id::LayerId;
use protocol::node::{LayerInfo, NodeError};
use serde_json::Value;
use store::error::StoreError;
use tokio_util::sync::CancellationToken;

use super::Builds;
use crate::chain::Chain;
use crate::clock::SECOND_US;

/// How long the layers of a deleted template stay, for create requests that have found it before.
pub(super) const DELETED_FOR_S: i64 = 600;

/// How long ago what is kept for later builds was used at the latest, if the operator has it removed. Files that were
/// uploaded for a build that waits are newer.
const UNUSED_FOR_S: i64 = 3600;

/// Counts of what one collection removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Collected {
    pub(crate) layers: usize,
    pub(crate) bytes: u64,
    pub(crate) files: usize,
}

/// The layers that a JSON text names, wherever it does: specs and recipes name them in images only.
pub(super) fn layers_in(json: &str, found: &mut HashSet<LayerId>) -> Result<(), serde_json::Error> {
    fn walk(value: &Value, found: &mut HashSet<LayerId>) {
        match value {
            Value::String(text) => found.extend(text.parse::<LayerId>().ok()),
            Value::Array(items) => items.iter().for_each(|item| walk(item, found)),
            Value::Object(map) => map.values().for_each(|item| walk(item, found)),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    walk(&serde_json::from_str(json)?, found);
    Ok(())
}

impl Builds {
    /// Collects at intervals until `stop` is cancelled.
    pub(super) async fn collect_at_intervals(&self, stop: CancellationToken) {
        let mut before = HashSet::new();
        // What an earlier process left, and what is not in the blob store because there was none.
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = async {
                self.collect_memories().await;
                self.tidy_objects().await;
            } => {}
        }
        let interval = Duration::from_secs(self.settings.collect_interval_s.into());
        let mut next = tokio::time::Instant::now() + interval;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.memories_changed.notified() => {
                    self.collect_memories().await;
                    continue;
                }
                () = self.nodes.node_arrived() => {
                    self.collect_memories().await;
                    continue;
                }
                () = tokio::time::sleep_until(next) => {}
            }
            next = tokio::time::Instant::now() + interval;
            self.collect_memories().await;
            match self.collect(&mut before).await {
                Ok(Collected {
                    layers: 0, files: 0, ..
                }) => {}
                Ok(Collected { layers, bytes, files }) => {
                    tracing::info!(
                        layers,
                        bytes,
                        files,
                        "removed layers and files of builds that nothing uses"
                    );
                }
                Err(error) => tracing::error!(error = %Chain(&error), "cannot remove unused layers, it is tried again"),
            }
            self.tidy_objects().await;
        }
    }

    /// Removes what nothing uses. `before` are the layers that nothing used the last time.
    pub(crate) async fn collect(&self, before: &mut HashSet<LayerId>) -> Result<Collected, StoreError> {
        let Some(_may_remove) = self.may_remove() else {
            return Ok(Collected::default());
        };
        let now_us = self.clock.now_us();
        let ago = |seconds: i64| now_us.saturating_sub(seconds.saturating_mul(SECOND_US));
        let settings = &self.settings;
        let files = self.files.purge(ago(settings.file_age_s.into())).await?;
        let most = i64::try_from(settings.cache_bytes).unwrap_or(i64::MAX);
        self.rows
            .layer_cache_purge(ago(settings.cache_age_s.into()), most)
            .await?;

        let mut collected = Collected {
            files,
            ..Collected::default()
        };
        let removal = self.removal.write().await;
        let unused = match self.unused().await? {
            Ok(unused) => unused,
            Err(why) => {
                tracing::error!("no layer is removed: {why}");
                return Ok(collected);
            }
        };
        for layer in unused.iter().filter(|layer| before.contains(&layer.id)) {
            match self.node.remove_layer(&layer.id).await {
                Ok(()) => {
                    collected.layers += 1;
                    collected.bytes = collected.bytes.saturating_add(layer.bytes);
                }
                Err(error) => tracing::warn!(error = %Chain(&error), "cannot remove a layer"),
            }
        }
        drop(removal);
        *before = unused.into_iter().map(|layer| layer.id).collect();
        Ok(collected)
    }

    /// The layers that nothing uses, or why that is not known. Nothing may be committed meanwhile.
    async fn unused(&self) -> Result<Result<Vec<LayerInfo>, String>, StoreError> {
        let ago = |seconds: i64| self.clock.now_us().saturating_sub(seconds.saturating_mul(SECOND_US));
        // A node that another server serves has what builds of any server use, and is the other's to tidy.
        let stored = match self.nodes.layers_here().await {
            Ok(stored) => stored,
            Err(error) => return Ok(Err(format!("cannot list the layers of the node: {}", Chain(&error)))),
        };
        let known: HashSet<&LayerId> = stored.iter().map(|layer| &layer.id).collect();
        let mut used = self.pinned();
        // Nodes go from one server to another, with what they have.
        let are_several = self.nodes.have_several_servers();
        if are_several {
            let of_all = self.rows.store().layer_cache_layers_of_all().await?;
            used.extend(of_all.iter().filter_map(|layer| layer.parse::<LayerId>().ok()));
        }
        for layer in self.rows.layer_cache_layers().await? {
            if let Ok(layer) = layer.parse::<LayerId>() {
                if !known.contains(&layer) && !are_several {
                    self.rows.layer_cache_forget(&layer).await?;
                }
                used.insert(layer);
            }
        }
        let references = if are_several {
            self.rows.store().layer_references_of_all(ago(DELETED_FOR_S)).await?
        } else {
            self.rows.layer_references(ago(DELETED_FOR_S)).await?
        };
        for json in references {
            if let Err(error) = layers_in(&json, &mut used) {
                // What it refers to is not known, so nothing may be removed.
                return Ok(Err(format!("invalid spec or recipe of a build: {error}")));
            }
        }
        Ok(Ok(stored
            .into_iter()
            .filter(|layer| !used.contains(&layer.id))
            .collect()))
    }

    /// For the operator: removes results of steps and uploaded files that no build has used lately, and returns the number
    /// of each.
    pub(crate) async fn forget_unused(&self) -> Result<(u64, usize), StoreError> {
        let Some(_may_remove) = self.may_remove() else {
            return Ok((0, 0));
        };
        let since_us = self.clock.now_us() - UNUSED_FOR_S * SECOND_US;
        let results = self.rows.layer_cache_purge(since_us, i64::MAX).await?;
        Ok((results, self.files.purge(since_us).await?))
    }

    /// For the operator: removes the layers that nothing uses now, or only returns them.
    pub(crate) async fn collect_now(&self, is_dry: bool) -> Result<Result<Vec<LayerInfo>, String>, StoreError> {
        let removal = self.removal.write().await;
        let unused = match self.unused().await? {
            Ok(unused) => unused,
            Err(why) => return Ok(Err(why)),
        };
        if is_dry {
            return Ok(Ok(unused));
        }
        let Some(_may_remove) = self.may_remove() else {
            return Ok(Err("a backup is being made: try again when it has ended".to_owned()));
        };
        let mut removed = Vec::new();
        for layer in unused {
            match self.node.remove_layer(&layer.id).await {
                Ok(()) => removed.push(layer),
                Err(error) => return Ok(Err(format!("cannot remove layer {}: {}", layer.id, Chain(&error)))),
            }
        }
        drop(removal);
        if let Err(error) = self.collect_objects().await {
            return Ok(Err(format!("cannot tidy the blob store: {}", Chain(&error))));
        }
        if let Err(error) = self.limit_copies().await {
            return Ok(Err(format!("cannot limit the layers of the node: {}", Chain(&error))));
        }
        Ok(Ok(removed))
    }

    /// The layers of the node.
    pub(crate) async fn layers(&self) -> Result<Vec<LayerInfo>, NodeError> {
        self.node.layers().await
    }
}

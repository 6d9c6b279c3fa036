//! Builds that cannot be used because layers of them are gone: removed by hand, or left out when the data directory was
//! copied.

use std::collections::{HashMap, HashSet};

use model::id::{BuildId, LayerId};
use store::builds::{BuildRow, BuildStatus};

use super::Builds;
use super::recipe::{BuildSpec, layers_of};
use crate::chain::Chain;

impl Builds {
    /// Finds the builds that lack a layer, with the first that each lacks. With a blob store, none is known to: it may
    /// have what the node does not.
    pub(crate) async fn lost<'a>(&self, rows: impl IntoIterator<Item = &'a BuildRow>) -> HashMap<BuildId, LayerId> {
        if self.node.stored().is_some() {
            return HashMap::new();
        }
        let own = self.rows.node();
        let mut needed: Vec<(BuildId, Vec<LayerId>)> = Vec::new();
        for row in rows {
            let built_by = row.node_id.as_ref();
            let is_own = built_by.is_none_or(|node| node == own || self.nodes.has_server(node));
            let spec = row
                .spec_json
                .as_deref()
                .filter(|_| row.status == BuildStatus::Ready && is_own);
            // A spec that cannot be read has an error of its own when a sandbox is created.
            let Some(Ok(spec)) = spec.map(serde_json::from_str::<BuildSpec>) else {
                continue;
            };
            let layers = layers_of(&spec.image);
            if !layers.is_empty() {
                needed.push((row.id.clone(), layers.to_vec()));
            }
        }
        if needed.is_empty() {
            return HashMap::new();
        }
        let known: HashSet<LayerId> = match self.nodes.layers().await {
            Ok(layers) => layers.into_iter().map(|layer| layer.id).collect(),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "cannot list the layers of the node");
                return HashMap::new();
            }
        };
        let lost = needed.into_iter().filter_map(|(build, layers)| {
            let layer = layers.into_iter().find(|layer| !known.contains(layer))?;
            Some((build, layer))
        });
        lost.collect()
    }
}

/// What clients are told of a layer that is gone.
pub(crate) fn lost_layer(layer: &LayerId) -> String {
    format!(
        "layer {layer} of the template is no longer on the host: build the template again, or ask the operator to restore \
         it from a backup"
    )
}

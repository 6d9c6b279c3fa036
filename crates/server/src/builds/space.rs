//! Space that templates and snapshots of teams take.
//!
//! It is what they took when they were made, as their specs say, because the layers and the memory of a snapshot may be on nodes of
//! other servers, on a node that is away, or in the blob store alone. The builds of earlier versions do not say it: for them the
//! nodes of this server are asked.

use std::collections::{HashMap, HashSet};

use model::id::{BuildId, LayerId, TeamId};
use protocol::node::NodeError;
use store::error::StoreError;

use super::Builds;
use super::collect::layers_in;
use super::recipe::BuildSpec;

/// Why the space of a team's templates is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TemplateBytesError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot list the layers of the node")]
    Node(#[from] NodeError),
}

/// Layers and memories of several specs, with the space that each takes, in bytes, if a spec says it.
#[derive(Debug, Default)]
struct Taken {
    layers: HashMap<LayerId, Option<u64>>,
    memories: HashMap<BuildId, Option<u64>>,
}

impl Taken {
    /// Adds what a spec names. What cannot be read has no size; a collection reports it.
    fn add(&mut self, json: &str) {
        let mut named = HashSet::new();
        let _ = layers_in(json, &mut named);
        let spec: Option<BuildSpec> = serde_json::from_str(json).ok();
        for layer in named {
            let said = spec.as_ref().and_then(|spec| spec.layer_bytes.get(&layer).copied());
            let bytes = self.layers.entry(layer).or_default();
            *bytes = bytes.or(said);
        }
        if let Some(memory) = spec.and_then(|spec| spec.memory) {
            self.memories.insert(memory.build, memory.bytes);
        }
    }

    /// The sum of what is known, in bytes.
    fn bytes(&self) -> u64 {
        let sizes = self.layers.values().chain(self.memories.values());
        sizes.flatten().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}

/// Fills in what is not known.
fn complete<K: std::hash::Hash + Eq>(
    sizes: &mut HashMap<K, Option<u64>>,
    of_nodes: impl IntoIterator<Item = (K, u64)>,
) {
    for (id, bytes) in of_nodes {
        if let Some(size) = sizes.get_mut(&id) {
            size.get_or_insert(bytes);
        }
    }
}

impl Builds {
    /// Space that the layers of the finished builds of a team take, and the memory of its snapshots, in bytes. What several of them
    /// have counts once.
    pub(crate) async fn template_bytes(&self, team: &TeamId) -> Result<u64, TemplateBytesError> {
        let mut taken = Taken::default();
        for (_, json) in self
            .references_by_team()
            .await?
            .iter()
            .filter(|(owner, _)| owner == team)
        {
            taken.add(json);
        }
        if taken.layers.values().any(Option::is_none) {
            let layers = self.node.layers().await?;
            complete(
                &mut taken.layers,
                layers.into_iter().map(|layer| (layer.id, layer.bytes)),
            );
        }
        if taken.memories.values().any(Option::is_none) {
            let memories = self.node.memories().await?;
            let memories = memories.into_iter().map(|memory| (memory.build, memory.bytes));
            complete(&mut taken.memories, memories);
        }
        Ok(taken.bytes())
    }

    /// Space that the memory of the snapshots of each team takes on the nodes of this server, in bytes.
    pub(crate) async fn memory_bytes(&self) -> Result<HashMap<TeamId, u64>, TemplateBytesError> {
        let kept = self.node.memories().await?;
        let sizes: HashMap<BuildId, u64> = kept.into_iter().map(|memory| (memory.build, memory.bytes)).collect();
        let mut teams: HashMap<TeamId, u64> = HashMap::new();
        if !sizes.is_empty() {
            // What cannot be read has no size; a collection reports it.
            for (team, build) in self.memories_of_teams().await?.unwrap_or_default() {
                let bytes = teams.entry(team).or_default();
                *bytes = bytes.saturating_add(sizes.get(&build).copied().unwrap_or(0));
            }
        }
        Ok(teams)
    }

    /// The specs of the finished builds of each team, of all servers of the service.
    pub(super) async fn references_by_team(&self) -> Result<Vec<(TeamId, String)>, StoreError> {
        if self.nodes.have_several_servers() {
            self.rows.store().layer_references_by_team_of_all().await
        } else {
            self.rows.layer_references_by_team().await
        }
    }

    /// The layers of the finished builds of each team.
    pub(crate) async fn template_layers(&self) -> Result<Vec<(TeamId, HashSet<LayerId>)>, StoreError> {
        let specs = self.references_by_team().await?;
        let layers = specs.into_iter().map(|(team, json)| {
            let mut layers = HashSet::new();
            // What cannot be read has no size; a collection reports it.
            let _ = layers_in(&json, &mut layers);
            (team, layers)
        });
        Ok(layers.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(n: u8) -> LayerId {
        LayerId::from_hash(&[n; 32])
    }

    /// The second spec is one of the version before, and shares a layer with the first.
    #[test]
    fn what_several_specs_have_counts_once_and_what_none_says_is_asked_for() {
        let build = "11111111-2222-4333-8444-555555555555";
        let image = |layers: &[u8]| {
            let layers: Vec<LayerId> = layers.iter().map(|n| layer(*n)).collect();
            serde_json::json!({"layers": {"base": true, "layers": layers}})
        };
        let first = serde_json::json!({
            "image": image(&[1, 2]),
            "layer_bytes": {layer(1).as_str(): 10, layer(2).as_str(): 200, layer(9).as_str(): 1},
            "memory": {"build": build, "image": image(&[1]), "authority": "i0123456789abcdef0123", "bytes": 3000},
        });
        let second = serde_json::json!({"image": image(&[1, 3])});
        for specs in [[&first, &second], [&second, &first]] {
            let mut taken = Taken::default();
            for spec in specs {
                taken.add(&spec.to_string());
            }
            assert_eq!(taken.bytes(), 3210, "{taken:?}");
            assert_eq!(taken.layers.get(&layer(3)), Some(&None));
            let of_nodes = [(layer(1), 7), (layer(3), 40_000), (layer(4), 1 << 40)];
            complete(&mut taken.layers, of_nodes);
            assert_eq!(taken.bytes(), 43_210);
        }
    }
}

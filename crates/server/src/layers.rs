//! Layers in the blob store: brought to the node when it lacks them, and stored when a build is final. What a build has made that has
//! not ended is brought from the node that has it.
//!
//! A layer is fetched once for all who wait for it, on a task of its own, so that it arrives also if they do not wait to
//! its end. Some are fetched at the same time, and teams take turns ([`turns`]). The node checks that what arrives is the layer: the id is the hash of the content. Objects of layers are
//! never changed, so a layer that is stored already is not stored again, unless its object is so old that it may be about
//! to be removed.

pub(crate) mod turns;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use blobs::{BlobError, Blobs, Name};
use model::id::LayerId;
use parking_lot::Mutex;
use protocol::node::{Failure, LayerInfo, LayerStream, NodeApi, NodeError};
use store::Store;
use store::error::StoreError;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use self::turns::{Payer, QueueFull, Turn, Turns};
use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::settings::BlobSettings;

/// Maximum size of a layer, unpacked, in bytes. What the host keeps free is the limit before that, on most hosts.
pub(crate) const LAYER_MAX: u64 = 256 << 30;
/// How often a layer is uploaded, and the pause before the next time.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(2);
/// How many layers are fetched at the same time. Each takes a process that unpacks it, and a part in memory.
const FETCHES: usize = 4;
/// How many layers of a team may wait for their turn.
const WAITING_MAX: usize = 64;
/// How long a layer stays on the node after it was used, in microseconds, so that a limit which is too small does not make
/// every start wait.
const USED_US: i64 = 600 * SECOND_US;
/// How long the removal of an object can take at most, in microseconds: more than any request of [`Blobs`].
const REMOVAL_MAX_US: i64 = 600 * SECOND_US;
/// How long removals are remembered, in microseconds: longer than storing an object takes.
const REMEMBERED_US: i64 = 7 * 24 * 3600 * SECOND_US;

/// How a fetch ended; none while it lasts.
type Outcome = Option<Result<(), NodeError>>;

/// The layers of the blob store.
pub(crate) struct StoredLayers {
    node: Arc<dyn NodeApi>,
    pub(crate) blobs: Arc<Blobs>,
    /// To whom the objects must belong.
    pub(crate) owner: String,
    clock: Clock,
    work: TaskTracker,
    /// How long an object that nothing refers to is kept.
    pub(crate) grace_s: u32,
    /// Maximum size of the layers on the node, in bytes.
    pub(crate) cache_bytes: Option<u64>,
    /// When layers were used last by a sandbox or a step, as far as it was since the start.
    used: Arc<Mutex<HashMap<LayerId, i64>>>,
    /// The layers that are on their way to the node.
    fetching: Mutex<HashMap<LayerId, watch::Receiver<Outcome>>>,
    turns: Arc<Turns>,
    store: Store,
}

/// Why a layer was not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeepError {
    #[error(transparent)]
    Blobs(#[from] BlobError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// An announcement that an object is about to be removed.
#[derive(Debug)]
pub(crate) struct Removing {
    name: String,
    id: i64,
    begun_us: i64,
}

impl fmt::Debug for StoredLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredLayers")
            .field("blobs", &self.blobs)
            .finish_non_exhaustive()
    }
}

impl StoredLayers {
    pub(crate) fn new(
        settings: BlobSettings,
        store: Store,
        node: Arc<dyn NodeApi>,
        clock: Clock,
        work: TaskTracker,
    ) -> Self {
        Self {
            store,
            turns: Turns::new(FETCHES, WAITING_MAX),
            node,
            blobs: settings.store,
            owner: settings.owner,
            clock,
            work,
            grace_s: settings.grace_s,
            cache_bytes: settings.cache_bytes,
            used: Arc::default(),
            fetching: Mutex::default(),
        }
    }

    /// Makes layers of the same blob store available to another node. Teams take turns over all nodes.
    pub(crate) fn on(&self, node: Arc<dyn NodeApi>) -> Self {
        Self {
            store: self.store.clone(),
            turns: Arc::clone(&self.turns),
            node,
            blobs: Arc::clone(&self.blobs),
            owner: self.owner.clone(),
            clock: self.clock.clone(),
            work: self.work.clone(),
            grace_s: self.grace_s,
            cache_bytes: self.cache_bytes,
            used: Arc::clone(&self.used),
            fetching: Mutex::default(),
        }
    }

    /// Layers are used now.
    pub(crate) fn note_used(&self, layers: &[LayerId]) {
        if self.cache_bytes.is_some() && !layers.is_empty() {
            let now_us = self.clock.now_us();
            self.used
                .lock()
                .extend(layers.iter().map(|layer| (layer.clone(), now_us)));
        }
    }

    /// Selects layers of the node to remove, the one that was not used for the longest first: so many that the rest is
    /// not larger than it may be. Those in `needed` stay, and those that were used just now.
    pub(crate) fn excess(&self, mut layers: Vec<LayerInfo>, needed: &HashSet<LayerId>) -> Vec<LayerInfo> {
        let Some(most) = self.cache_bytes else {
            return Vec::new();
        };
        let before_us = self.clock.now_us() - USED_US;
        let mut used = self.used.lock();
        let known: HashSet<&LayerId> = layers.iter().map(|layer| &layer.id).collect();
        used.retain(|layer, _| known.contains(layer));
        drop(known);
        least_used(&mut layers, most, |layer| {
            let last_us = used.get(layer).copied().unwrap_or(0);
            (!needed.contains(layer) && last_us < before_us).then_some(last_us)
        });
        layers
    }

    /// Brings a layer to the node, in its turn. It goes on if this is dropped.
    ///
    /// [`NodeError::NoLayer`] if neither the blob store nor a node has it, [`NodeError::Unavailable`] if the store does not work,
    /// or many layers of the team wait already.
    pub(crate) async fn fetch(self: &Arc<Self>, payer: &Payer, layer: &LayerId) -> Result<(), NodeError> {
        let mut outcome = self.begin(payer, layer).map_err(|QueueFull| {
            let why = format!("{WAITING_MAX} layers of the team are waiting to be fetched from the blob store");
            NodeError::Unavailable(why)
        })?;
        let ended = outcome.wait_for(Option::is_some).await;
        match ended.map(|outcome| outcome.clone()) {
            Ok(Some(outcome)) => outcome,
            Ok(None) | Err(_) => Err(NodeError::failed("the task that fetches a layer has ended")),
        }
    }

    /// Begins to fetch a layer, unless that has begun.
    fn begin(self: &Arc<Self>, payer: &Payer, layer: &LayerId) -> Result<watch::Receiver<Outcome>, QueueFull> {
        let mut fetching = self.fetching.lock();
        if let Some(outcome) = fetching.get(layer) {
            return Ok(outcome.clone());
        }
        let place = self.turns.queue(payer)?;
        let (tell, outcome) = watch::channel(None);
        fetching.insert(layer.clone(), outcome.clone());
        let (layers, layer) = (Arc::clone(self), layer.clone());
        self.work.spawn(async move {
            let turn: Turn = place.turn().await;
            let fetched = layers.fetch_now(&layer).await;
            drop(turn);
            match &fetched {
                Ok(bytes) => tracing::info!(layer = %layer, bytes, "fetched a layer"),
                Err(error) => {
                    tracing::error!(layer = %layer, error = %Chain(error), "cannot fetch a layer");
                }
            }
            // First, so that whoever begins another one afterwards finds what is true then.
            layers.fetching.lock().remove(&layer);
            tell.send_replace(Some(fetched.map(|_| ())));
        });
        Ok(outcome)
    }

    async fn fetch_now(&self, layer: &LayerId) -> Result<u64, NodeError> {
        let name = Name::Layer(layer.clone());
        let (archive, source) = match self.blobs.get(&name).await {
            Ok((_, archive)) => (LayerStream::new(archive), format!("object {name} of the blob store")),
            // A step of a build that has not ended has made it, on another node.
            Err(BlobError::NotFound(_)) => {
                let archive = self.node.export_layer(layer).await?;
                (archive, format!("layer {layer} of another node"))
            }
            Err(error) => return Err(NodeError::Unavailable(error.to_string())),
        };
        match self.node.import_layer(layer, LAYER_MAX, archive).await {
            Ok(imported) => Ok(imported.bytes),
            Err(NodeError::Refused(why)) => Err(NodeError::Failed(Failure::new(format!("{source} is damaged: {why}")))),
            Err(error) => Err(error),
        }
    }

    /// Stores a layer of the node, unless it is stored. Returns whether it was not. `is_referenced` says that something
    /// refers to it already, so that its object is not removed meanwhile.
    pub(crate) async fn keep(&self, layer: &LayerId, is_referenced: bool) -> Result<bool, KeepError> {
        let mut attempt = 1;
        loop {
            match self.keep_once(layer, is_referenced).await {
                Err(KeepError::Blobs(error)) if attempt < ATTEMPTS && !error.is_lasting() => {
                    tracing::warn!(layer = %layer, error = %Chain(&error), "cannot store a layer in the blob store yet");
                }
                kept => return kept,
            }
            attempt += 1;
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn keep_once(&self, layer: &LayerId, is_referenced: bool) -> Result<bool, KeepError> {
        let name = Name::Layer(layer.clone());
        let mut removal = self.last_removal(&name).await?;
        let mut is_new = false;
        loop {
            is_new |= self.put_layer(&name, layer, is_referenced).await?;
            if !self.was_removed(&name, &mut removal).await? {
                return Ok(is_new);
            }
        }
    }

    async fn put_layer(&self, name: &Name, layer: &LayerId, is_referenced: bool) -> Result<bool, KeepError> {
        if let Some(object) = self.blobs.head(name).await? {
            let age_us = self.clock.now_us().saturating_sub(object.written_us);
            if is_referenced || age_us < i64::from(self.grace_s) * SECOND_US / 2 {
                return Ok(false);
            }
        }
        let archive = self.node.export_layer(layer).await?;
        let bytes = self.blobs.put(name, archive).await?;
        tracing::info!(layer = %layer, bytes, "stored a layer in the blob store");
        Ok(true)
    }

    /// Whether a node has removed an object since `before`, which is the last removal of before, and becomes that of now.
    /// What was stored or found meanwhile may be gone then.
    pub(crate) async fn was_removed(&self, name: &Name, before: &mut Option<i64>) -> Result<bool, StoreError> {
        let after = self.last_removal(name).await?;
        Ok(std::mem::replace(before, after) != after)
    }

    /// The number of the last removal of an object, once it has ended.
    pub(crate) async fn last_removal(&self, name: &Name) -> Result<Option<i64>, StoreError> {
        let name = name.to_string();
        loop {
            let Some(removal) = self.store.removal_find(&name).await? else {
                return Ok(None);
            };
            let age_us = self.clock.now_us().saturating_sub(removal.begun_us);
            if removal.ended_us.is_some() || age_us > REMOVAL_MAX_US {
                return Ok(Some(removal.id));
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Announces that an object is about to be removed; none while another node removes it. Only what is found to be
    /// unused after this may be removed.
    pub(crate) async fn begin_removal(&self, name: &Name) -> Result<Option<Removing>, StoreError> {
        let now_us = self.clock.now_us();
        let (id, _) = uuid::Uuid::new_v4().as_u64_pair();
        let removing = Removing {
            name: name.to_string(),
            id: (id >> 1).cast_signed(),
            begun_us: now_us,
        };
        let begun = self
            .store
            .removal_begin(&removing.name, removing.id, now_us, now_us - REMOVAL_MAX_US);
        Ok(begun.await?.then_some(removing))
    }

    /// Whether it is so long since an announcement that other nodes may count it as ended.
    pub(crate) fn is_late(&self, removing: &Removing) -> bool {
        // A request may take another part of it.
        self.clock.now_us().saturating_sub(removing.begun_us) > REMOVAL_MAX_US / 2
    }

    /// The removal has ended, or nothing was removed.
    pub(crate) async fn end_removal(&self, removing: Removing) -> Result<(), StoreError> {
        let Removing { name, id, .. } = removing;
        self.store.removal_end(&name, id, self.clock.now_us()).await
    }

    /// Forgets removals of long ago.
    pub(crate) async fn forget_removals(&self) -> Result<(), StoreError> {
        self.store.removal_purge(self.clock.now_us() - REMEMBERED_US).await
    }
}

/// Leaves those of `layers` that have to go, so that the others have `most` bytes: by when they were used last, the longest
/// ago first. Those without a time stay.
fn least_used(layers: &mut Vec<LayerInfo>, most: u64, last_us: impl Fn(&LayerId) -> Option<i64>) {
    let total = layers.iter().fold(0_u64, |sum, layer| sum.saturating_add(layer.bytes));
    let mut over = total.saturating_sub(most);
    layers.retain(|layer| last_us(&layer.id).is_some());
    layers.sort_by_key(|layer| last_us(&layer.id));
    layers.retain(|layer| {
        let goes = over > 0;
        over = over.saturating_sub(layer.bytes);
        goes
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_were_not_used_for_long_go_first() {
        let id = |n: u8| LayerId::from_hash(&[n; 32]);
        let all: Vec<LayerInfo> = (1..=4).map(|n| LayerInfo { id: id(n), bytes: 10 }).collect();
        // The first is needed, and the third was used before the second.
        let last_us = |layer: &LayerId| match layer {
            layer if *layer == id(1) => None,
            layer if *layer == id(2) => Some(20),
            layer if *layer == id(3) => Some(10),
            _ => Some(30),
        };
        for (most, want) in [
            (40, vec![]),
            (39, vec![3]),
            (30, vec![3]),
            (29, vec![3, 2]),
            (10, vec![3, 2, 4]),
            (0, vec![3, 2, 4]),
        ] {
            let mut layers = all.clone();
            least_used(&mut layers, most, last_us);
            let went: Vec<LayerId> = layers.into_iter().map(|layer| layer.id).collect();
            assert_eq!(went, want.into_iter().map(id).collect::<Vec<_>>(), "{most}");
        }
    }
}

//! Layers in the blob store: brought to the node when it lacks them, and stored when a build is final.
//!
//! A layer is fetched once for all who wait for it, on a task of its own, so that it arrives also if they do not wait to
//! its end. The node checks that what arrives is the layer: the id is the hash of the content. Objects of layers are
//! never changed, so a layer that is stored already is not stored again, unless its object is so old that it may be about
//! to be removed.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use blobs::{BlobError, Blobs, Name};
use model::id::LayerId;
use parking_lot::Mutex;
use protocol::node::{Failure, LayerStream, NodeApi, NodeError};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::settings::BlobSettings;

/// Maximum size of a layer, unpacked, in bytes. What the host keeps free is the limit before that, on most hosts.
pub(crate) const LAYER_MAX: u64 = 256 << 30;
/// How often a layer is uploaded, and the pause before the next time.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(2);

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
    /// The layers that are on their way to the node.
    fetching: Mutex<HashMap<LayerId, watch::Receiver<Outcome>>>,
}

/// Why a layer was not stored.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeepError {
    #[error(transparent)]
    Blobs(#[from] BlobError),
    #[error(transparent)]
    Node(#[from] NodeError),
}

impl fmt::Debug for StoredLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoredLayers")
            .field("blobs", &self.blobs)
            .finish_non_exhaustive()
    }
}

impl StoredLayers {
    pub(crate) fn new(settings: BlobSettings, (node, clock, work): (Arc<dyn NodeApi>, Clock, TaskTracker)) -> Self {
        Self {
            node,
            blobs: settings.store,
            owner: settings.owner,
            clock,
            work,
            grace_s: settings.grace_s,
            fetching: Mutex::default(),
        }
    }

    /// Brings a layer to the node. It goes on if this is dropped.
    ///
    /// [`NodeError::NoLayer`] if the blob store does not have it either, [`NodeError::Unavailable`] if it does not work.
    pub(crate) async fn fetch(self: &Arc<Self>, layer: &LayerId) -> Result<(), NodeError> {
        let mut outcome = self.begin(layer);
        let ended = outcome.wait_for(Option::is_some).await;
        match ended.map(|outcome| outcome.clone()) {
            Ok(Some(outcome)) => outcome,
            Ok(None) | Err(_) => Err(NodeError::failed("the task that fetches a layer has ended")),
        }
    }

    /// Begins to fetch a layer, unless that has begun.
    fn begin(self: &Arc<Self>, layer: &LayerId) -> watch::Receiver<Outcome> {
        let mut fetching = self.fetching.lock();
        if let Some(outcome) = fetching.get(layer) {
            return outcome.clone();
        }
        let (tell, outcome) = watch::channel(None);
        fetching.insert(layer.clone(), outcome.clone());
        let (layers, layer) = (Arc::clone(self), layer.clone());
        self.work.spawn(async move {
            let fetched = layers.fetch_now(&layer).await;
            match &fetched {
                Ok(bytes) => tracing::info!(layer = %layer, bytes, "fetched a layer from the blob store"),
                Err(error) => {
                    tracing::error!(layer = %layer, error = %Chain(error), "cannot fetch a layer from the blob store");
                }
            }
            // First, so that whoever begins another one afterwards finds what is true then.
            layers.fetching.lock().remove(&layer);
            tell.send_replace(Some(fetched.map(|_| ())));
        });
        outcome
    }

    async fn fetch_now(&self, layer: &LayerId) -> Result<u64, NodeError> {
        let name = Name::Layer(layer.clone());
        let (_, archive) = match self.blobs.get(&name).await {
            Ok(found) => found,
            Err(BlobError::NotFound(_)) => return Err(NodeError::NoLayer(layer.clone())),
            Err(error) => return Err(NodeError::Unavailable(error.to_string())),
        };
        match self
            .node
            .import_layer(layer, LAYER_MAX, LayerStream::new(archive))
            .await
        {
            Ok(imported) => Ok(imported.bytes),
            Err(NodeError::Refused(why)) => {
                let what = format!("object {name} of the blob store is damaged: {why}");
                Err(NodeError::Failed(Failure::new(what)))
            }
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
        if let Some(object) = self.blobs.head(&name).await? {
            let age_us = self.clock.now_us().saturating_sub(object.written_us);
            if is_referenced || age_us < i64::from(self.grace_s) * SECOND_US / 2 {
                return Ok(false);
            }
        }
        let archive = self.node.export_layer(layer).await?;
        let bytes = self.blobs.put(&name, archive).await?;
        tracing::info!(layer = %layer, bytes, "stored a layer in the blob store");
        Ok(true)
    }
}

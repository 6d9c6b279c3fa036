//! The shared handle of the node.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use model::id::LayerId;
use protocol::node::{Image, NodeApi, NodeError, StartSandbox, StartedSandbox};
use tokio::time::Instant;

use crate::layers::StoredLayers;
use crate::layers::turns::Payer;

/// How long a start waits for layers of the blob store. They arrive nevertheless, for another try.
const FETCH_WAIT: Duration = Duration::from_secs(20);

/// The most that a sandbox is believed to take on the disk of its host while it is paused, in bytes: 1 PiB.
const KEPT_BYTES_MAX: u64 = 1 << 50;

/// What a node says that a paused sandbox takes on its disk, bounded: it is added up over all sandboxes of a team, on all servers.
pub(crate) fn kept_bytes(said: u64) -> u64 {
    said.min(KEPT_BYTES_MAX)
}

/// A shared [`NodeApi`] that implements `Debug`, with the blob store, if there is one.
#[derive(Clone)]
pub(crate) struct NodeHandle {
    node: Arc<dyn NodeApi>,
    stored: Option<Arc<StoredLayers>>,
}

impl NodeHandle {
    pub(crate) fn new(node: Arc<dyn NodeApi>, stored: Option<Arc<StoredLayers>>) -> Self {
        Self { node, stored }
    }

    /// The handle of another node, with the same blob store.
    pub(crate) fn on(&self, node: Arc<dyn NodeApi>) -> Self {
        let stored = self.stored.as_ref();
        let stored = stored.map(|stored| Arc::new(stored.on(Arc::clone(&node))));
        Self { node, stored }
    }

    /// The layers of the blob store, if there is one.
    pub(crate) fn stored(&self) -> Option<&Arc<StoredLayers>> {
        self.stored.as_ref()
    }

    /// Starts a sandbox as [`NodeApi::start`] does. Layers that the node lacks are fetched from the blob store before,
    /// for as long as a client waits: [`NodeError::Unavailable`] when that takes longer.
    pub(crate) async fn start(&self, payer: &Payer, request: StartSandbox) -> Result<StartedSandbox, NodeError> {
        self.start_until(payer, request, Some(Instant::now() + FETCH_WAIT))
            .await
    }

    /// As [`Self::start`], for callers that wait for as long as it takes.
    pub(crate) async fn start_patiently(
        &self,
        payer: &Payer,
        request: StartSandbox,
    ) -> Result<StartedSandbox, NodeError> {
        self.start_until(payer, request, None).await
    }

    async fn start_until(
        &self,
        payer: &Payer,
        mut request: StartSandbox,
        end: Option<Instant>,
    ) -> Result<StartedSandbox, NodeError> {
        let Some(stored) = &self.stored else {
            return self.node.start(request).await;
        };
        if let Image::Layers { layers, .. } = &request.image {
            stored.note_used(layers);
        }
        // The node says one at a time, and each may be missing once.
        for _ in 0..Image::LAYERS_MAX {
            match (self.node.start(request.clone()).await, end) {
                (Err(NodeError::NoLayer(layer)), None) => stored.fetch(payer, &layer).await?,
                (Err(NodeError::NoLayer(layer)), Some(end)) => {
                    let fetched = tokio::time::timeout_at(end, stored.fetch(payer, &layer)).await;
                    fetched.unwrap_or_else(|_| {
                        let why = format!("layer {layer} is still being fetched from the blob store");
                        Err(NodeError::Unavailable(why))
                    })?;
                }
                (started, _) => return started,
            }
            // The node has given it out, and keeps it for another attempt.
            request.permit = None;
        }
        self.node.start(request).await
    }

    /// Brings layers to the node that it lacks, if there is a blob store.
    pub(crate) async fn fetch_missing(&self, payer: &Payer, layers: &[LayerId]) -> Result<(), NodeError> {
        let Some(stored) = &self.stored else {
            return Ok(());
        };
        let known = self.node.layers().await?;
        for layer in layers {
            if !known.iter().any(|known| known.id == *layer) {
                stored.fetch(payer, layer).await?;
            }
        }
        Ok(())
    }
}

impl Deref for NodeHandle {
    type Target = dyn NodeApi;

    fn deref(&self) -> &Self::Target {
        &*self.node
    }
}

impl fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeHandle")
    }
}

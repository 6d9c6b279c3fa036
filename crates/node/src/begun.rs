//! A start of a sandbox, from its permit until it has processes or does not get any.

use std::sync::Arc;

use model::id::SandboxId;
use protocol::node::{HostCapacity, NoCapacity, NodeError, PermitRequest};

use crate::shared::Shared;
use crate::work::{blocking, failed};

/// A start that has a permit. When this is dropped, the start is over: its sandbox has processes and is one of those of
/// the node, or there is none.
#[derive(Debug)]
pub(crate) struct Begun {
    shared: Arc<Shared>,
    id: SandboxId,
}

impl Begun {
    /// Begins the start of a sandbox, before anything of it exists.
    ///
    /// # Errors
    /// [`NodeError::Capacity`] when it has no permit, and the host may have no more sandboxes.
    pub(crate) fn start(shared: &Arc<Shared>, id: &SandboxId) -> Result<Self, NodeError> {
        Self::of(shared, id, shared.permits.begin(&shared.sandboxes, id))
    }

    /// Begins the start of a sandbox that brings the request for its permit, if it does. Nothing is left of a refusal, and
    /// a caller must not be dropped meanwhile: the permit would stay until it ends by itself.
    ///
    /// # Errors
    /// [`NodeError::Capacity`] when the host has no capacity for it.
    pub(crate) async fn start_with(
        shared: &Arc<Shared>,
        id: &SandboxId,
        permit: Option<&PermitRequest>,
    ) -> Result<Self, NodeError> {
        let Some(request) = permit else {
            return Self::start(shared, id);
        };
        if request.id != *id {
            return Err(NodeError::failed(format!(
                "the start of sandbox {id} has the permit of sandbox {}",
                request.id
            )));
        }
        let Shared { permits, sandboxes, .. } = &**shared;
        let begun = permits.give_and_begin(sandboxes, request, || left(shared)).await;
        Self::of(shared, id, begun)
    }

    fn of(shared: &Arc<Shared>, id: &SandboxId, begun: Result<(), NoCapacity>) -> Result<Self, NodeError> {
        begun.map_err(|why| NodeError::Capacity(why.to_string()))?;
        Ok(Self {
            shared: Arc::clone(shared),
            id: id.clone(),
        })
    }
}

/// What the host has left.
pub(crate) async fn left(shared: &Shared) -> Result<HostCapacity, NodeError> {
    shared.teardowns.settled_for_capacity().await;
    let driver = Arc::clone(&shared.driver);
    let free = blocking(move || driver.capacity())
        .await
        .map_err(failed)?
        .map_err(failed)?;
    Ok(HostCapacity {
        memory_available_bytes: free.memory_available_bytes,
        // Space promised to sandboxes is not available, even if it is not written yet.
        disk_available_bytes: free.disk_available_bytes.saturating_sub(shared.disk.owed()),
    })
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.shared.permits.settle(&self.shared.sandboxes, &self.id);
    }
}

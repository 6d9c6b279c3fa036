//! A start of a sandbox, from its permit until it has processes or does not get any.

use std::sync::Arc;

use model::id::SandboxId;
use protocol::node::NodeError;

use crate::shared::Shared;

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
        let begun = shared.permits.begin(&shared.sandboxes, id);
        begun.map_err(|why| NodeError::Capacity(why.to_string()))?;
        Ok(Self {
            shared: Arc::clone(shared),
            id: id.clone(),
        })
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.shared.permits.settle(&self.shared.sandboxes, &self.id);
    }
}

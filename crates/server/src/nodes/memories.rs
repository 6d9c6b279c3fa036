//! What goes on with the memory of snapshots of one node, apart from what is done with it.

use std::collections::HashMap;

use model::id::BuildId;
use parking_lot::Mutex;
use tokio::sync::watch;

/// What goes on with the memories of a node.
#[derive(Debug, Default)]
pub(crate) struct NodeMemories {
    /// Whether they are being copied, and have to be looked at again afterwards.
    pub(crate) copying: Mutex<Option<bool>>,
    /// The memories that are on their way to the node: whether that has ended.
    pub(crate) arriving: Mutex<HashMap<BuildId, watch::Receiver<bool>>>,
}

//! The shared handle of the node.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use protocol::node::NodeApi;

/// A shared [`NodeApi`] that implements `Debug`.
#[derive(Clone)]
pub(crate) struct NodeHandle(Arc<dyn NodeApi>);

impl NodeHandle {
    pub(crate) fn new(node: Arc<dyn NodeApi>) -> Self {
        Self(node)
    }
}

impl Deref for NodeHandle {
    type Target = dyn NodeApi;

    fn deref(&self) -> &Self::Target {
        &*self.0
    }
}

impl fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeHandle")
    }
}

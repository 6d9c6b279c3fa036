//! What servers say to each other about children of forks.

use std::fmt;
use std::sync::Arc;

use link::ServerLink;
use model::id::{BuildId, SandboxId, UserId};
use protocol::node::{Image, NodeFuture};
use serde::{Deserialize, Serialize};

/// What a server asks of another one.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct ChildrenWanted {
    /// The sandbox that is forked.
    pub(crate) parent: SandboxId,
    /// The user that sent the request.
    pub(crate) user: UserId,
    /// Seconds until the deadline of each child.
    pub(crate) timeout_s: u32,
    /// The id of the memory that the children are started from.
    pub(crate) memory: BuildId,
    /// The image below the files of the parent.
    pub(crate) image: Image,
    /// The ids of the children.
    pub(crate) ids: Vec<SandboxId>,
}

/// Why another server has not started a child. Its texts are for clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub(crate) enum NotStarted {
    /// Its nodes have no room, and nothing was begun.
    #[error("no node of another server has room")]
    NoRoom,
    /// The team has as many sandboxes as it may.
    #[error("{0}")]
    OverQuota(String),
    /// The server has tried to start it.
    #[error("{0}")]
    Failed(String),
    /// The server has not said what became of it.
    #[error(
        "the server that was to start it does not answer, and whether it runs is not known: see the list of sandboxes"
    )]
    Unknown,
}

/// What became of the children that another server was asked for.
#[derive(Debug)]
pub(crate) enum Asked {
    /// The answer for each child, in their order.
    Answered(Vec<Result<(), NotStarted>>),
    /// The server was not reached, or cannot do it: nothing was begun.
    Unbegun,
    /// The server has not answered: what became of them is not known.
    Unknown,
}

/// The other servers, which can start children.
pub(crate) trait ForkPeers: fmt::Debug + Send + Sync {
    /// The servers whose nodes had room for forks when they said so last, the best first.
    fn with_room(&self) -> Vec<Arc<ServerLink>>;

    /// Asks one of them.
    fn start<'a>(&'a self, server: &'a Arc<ServerLink>, wanted: ChildrenWanted) -> NodeFuture<'a, Asked>;
}

//! The seam between a node and whatever isolates its sandboxes.
//!
//! Nothing above it may assume that the host sees a sandbox's processes or files: a sandbox can be started, reached
//! by socket, measured, given a new spawner, watched for its end and killed, and that is all.

use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use model::resources::Resources;

use crate::netns::SocketMaker;
use crate::slot::Name;
use crate::usage::{Room, Usage};

/// One way to isolate sandboxes.
pub trait Driver: Debug + Send + Sync {
    /// Makes a sandbox and returns once its agent was executed. Blocks for milliseconds.
    ///
    /// # Errors
    /// With the step that failed. Call [`Driver::clean`] then; nothing runs any more.
    fn start(&self, name: &Name, resources: &Resources) -> io::Result<Started>;

    /// Every sandbox of this data directory that left something, and the living among them.
    ///
    /// # Errors
    /// When the host cannot be searched.
    fn find(&self) -> io::Result<Vec<Found>>;

    /// Removes what a sandbox that does not run any more left. `false` when something still runs in it: kill what is
    /// left and try again.
    fn clean(&self, name: &Name) -> bool;

    /// Removes what no sandbox in `keep` needs.
    ///
    /// # Errors
    /// When the data directory cannot be read.
    fn sweep(&self, keep: &[Name]) -> io::Result<()>;

    /// What is free on the host for more sandboxes.
    ///
    /// # Errors
    /// When the host cannot be asked.
    fn room(&self) -> io::Result<Room>;
}

/// A sandbox that an earlier platform left.
#[derive(Debug)]
pub struct Found {
    /// Which one.
    pub name: Name,
    /// The sandbox, if its agent lives.
    pub alive: Option<Arc<dyn Sandbox>>,
}

/// A sandbox that was just made.
#[derive(Debug)]
pub struct Started {
    /// The sandbox.
    pub sandbox: Arc<dyn Sandbox>,
    /// The agent's control connection: a stream socket on which it serves HTTP/1.1.
    pub boot: OwnedFd,
    /// How long each stage took, in order.
    pub stages: Vec<(&'static str, Duration)>,
}

/// A sandbox that runs, or did until a moment ago.
pub trait Sandbox: Debug + Send + Sync {
    /// A descriptor that polls readable once no process of the sandbox runs any more.
    fn ended(&self) -> BorrowedFd<'_>;

    /// A non-blocking TCP socket inside the sandbox's network.
    ///
    /// # Errors
    /// When the sandbox is gone.
    fn tcp_socket(&self, maker: &SocketMaker, ipv6: bool) -> io::Result<OwnedFd>;

    /// A connection to the agent's control socket, after making sure that the agent is who listens.
    ///
    /// # Errors
    /// When the agent does not listen, or somebody else does.
    fn control(&self, maker: &SocketMaker) -> io::Result<OwnedFd>;

    /// Gives the sandbox a new spawner in place of the one it has, which is killed if it is there still: it was given
    /// up because it does not answer. Blocks for milliseconds.
    ///
    /// # Errors
    /// With the step that failed.
    fn respawn(&self) -> io::Result<()>;

    /// What the sandbox uses at this moment. Takes tens of microseconds and waits for nothing inside the sandbox.
    ///
    /// # Errors
    /// When the sandbox is gone, and with [`io::ErrorKind::Unsupported`] where the host does not count.
    fn usage(&self) -> io::Result<Usage>;

    /// How many processes of the workload the kernel has killed so far because the sandbox had used up its memory.
    ///
    /// # Errors
    /// As [`Sandbox::usage`].
    fn memory_kills(&self) -> io::Result<u64>;

    /// Kills every process of the sandbox and waits until none is left. Blocks for milliseconds.
    fn kill(&self);
}

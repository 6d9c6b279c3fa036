//! What a process reads: a pipe, a terminal, or nothing.

use std::os::fd::OwnedFd;
use std::rc::Rc;

use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::Mutex;

/// The agent's end of a process's input.
pub(crate) enum Input {
    /// `/dev/null` from the start.
    Nothing,
    /// A pipe; none once it was closed. Writers queue here, so that inputs stay whole and in order.
    Pipe(Mutex<Option<pipe::Sender>>),
    /// The master side of a terminal. Writers queue as well.
    Terminal(Rc<AsyncFd<OwnedFd>>, Mutex<()>),
}

impl Input {
    /// The terminal, if it is one.
    pub(crate) fn terminal(&self) -> Option<&AsyncFd<OwnedFd>> {
        match self {
            Self::Terminal(terminal, _) => Some(terminal),
            Self::Nothing | Self::Pipe(_) => None,
        }
    }
}

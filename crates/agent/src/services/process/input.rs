//! What a process reads: a pipe, a terminal, or nothing.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;

/// The agent's end of a process's input.
pub(crate) enum Input {
    /// `/dev/null` from the start.
    Nothing,
    /// A pipe; none once it was closed. Writers queue, so that inputs stay whole and in order.
    Pipe(RefCell<Option<Rc<AsyncFd<OwnedFd>>>>, Mutex<()>),
    /// The master side of a terminal. Writers queue as well.
    Terminal(Rc<AsyncFd<OwnedFd>>, Mutex<()>),
}

impl Input {
    /// A pipe that is open.
    pub(crate) fn open_pipe(writer: AsyncFd<OwnedFd>) -> Self {
        Self::Pipe(RefCell::new(Some(Rc::new(writer))), Mutex::new(()))
    }

    /// The pipe, if the input is one that was not closed.
    pub(crate) fn pipe(&self) -> Option<Rc<AsyncFd<OwnedFd>>> {
        match self {
            Self::Pipe(pipe, _) => pipe.borrow().clone(),
            Self::Nothing | Self::Terminal(..) => None,
        }
    }

    /// The terminal, if the input is one.
    pub(crate) fn terminal(&self) -> Option<&AsyncFd<OwnedFd>> {
        match self {
            Self::Terminal(terminal, _) => Some(terminal),
            Self::Nothing | Self::Pipe(..) => None,
        }
    }
}

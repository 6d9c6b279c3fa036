//! The state that all requests share. One thread runs it all, so it is plain cells and `Rc`.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use protocol::connect::{Code, Error};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;

use crate::events::Journal;
use crate::files::Transfers;
use crate::filesystem::Filesystem;
use crate::launcher::Launcher;
use crate::metrics::Metrics;
use crate::process::table::Table;
use crate::settings::Settings;
use crate::users::{User, Users};

/// The longest message that is read, in bytes. Arguments and environment of a process end at about 2 MiB.
pub(crate) const MESSAGE_LIMIT: usize = 16 * 1024 * 1024;
/// What all messages in memory may come to, in bytes. The agent's memory is not limited by the sandbox's cgroup, so
/// that the workload cannot starve it; hence it must not grow at the workload's will.
const MEMORY_LIMIT: usize = 64 * 1024 * 1024;

/// The agent.
pub(crate) struct Agent {
    pub(crate) settings: RefCell<Settings>,
    /// Held while an `/init` is applied.
    pub(crate) initializing: tokio::sync::Mutex<()>,
    pub(crate) users: Users,
    pub(crate) launcher: Launcher,
    pub(crate) events: Journal,
    pub(crate) processes: Table,
    pub(crate) transfers: Transfers,
    pub(crate) filesystem: Filesystem,
    pub(crate) metrics: Metrics,
    /// Work that outlives the request that began it.
    pub(crate) tasks: TaskTracker,
    memory: Arc<Semaphore>,
}

/// A message and its share of the memory that messages may take.
pub(crate) struct Message {
    pub(crate) bytes: Bytes,
    pub(crate) share: OwnedSemaphorePermit,
}

impl Agent {
    /// An agent whose spawner is at the other end of this socket.
    ///
    /// # Errors
    /// Those of registering the socket with the event loop, and of opening `/proc`.
    pub(crate) fn new(spawner: Option<OwnedFd>) -> std::io::Result<Self> {
        Ok(Self {
            settings: RefCell::default(),
            initializing: tokio::sync::Mutex::default(),
            users: Users::default(),
            launcher: Launcher::new(spawner)?,
            events: Journal::default(),
            processes: Table::default(),
            transfers: Transfers::default(),
            filesystem: Filesystem::default(),
            metrics: Metrics::new()?,
            tasks: TaskTracker::new(),
            memory: Arc::new(Semaphore::new(MEMORY_LIMIT)),
        })
    }

    /// Takes a share of the memory for messages, given back when it is dropped.
    ///
    /// # Errors
    /// `resource_exhausted` when there is not that much.
    pub(crate) fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Error> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let full = |_| Error::new(Code::ResourceExhausted, "too many large requests at once");
        self.memory.clone().try_acquire_many_owned(bytes).map_err(full)
    }

    /// Reads a whole request body of at most [`MESSAGE_LIMIT`] bytes.
    ///
    /// # Errors
    /// `resource_exhausted` when it is longer, or when too much is being read at once; `invalid_argument` when the
    /// connection ends first.
    pub(crate) async fn read_message(&self, mut body: Incoming) -> Result<Message, Error> {
        let mut share = self.reserve(0)?;
        let mut bytes = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| Error::new(Code::InvalidArgument, format!("read request: {error}")))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > MESSAGE_LIMIT {
                let message = format!("message is larger than the limit of {MESSAGE_LIMIT} bytes");
                return Err(Error::new(Code::ResourceExhausted, message));
            }
            share.merge(self.reserve(data.len())?);
            if bytes.is_empty() {
                // The usual small request is one frame, which need not be copied.
                bytes = BytesMut::from(data);
            } else {
                bytes.extend_from_slice(&data);
            }
        }
        Ok(Message {
            bytes: bytes.freeze(),
            share,
        })
    }
}

/// Who calls: the user of the Basic header, if there was one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    pub(crate) user: Option<User>,
}

impl Caller {
    /// The user to act as: the caller's, or the default one.
    ///
    /// # Errors
    /// `unauthenticated` when the default user does not exist.
    pub(crate) fn user(&self, agent: &Agent) -> Result<User, Error> {
        if let Some(user) = &self.user {
            return Ok(user.clone());
        }
        let name = agent.settings.borrow().default_user.clone();
        let unknown = || Error::new(Code::Unauthenticated, format!("invalid default user: '{name}'"));
        agent.users.find(&name).ok_or_else(unknown)
    }
}

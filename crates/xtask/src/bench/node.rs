//! A node that only pretends: it has every sandbox that the server believes in, and notes when it is told to kill one.

use std::collections::HashMap;
use std::sync::Arc;

use jiff::Timestamp;
use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::node::{
    DialError, HostRoom, NodeApi, NodeError, NodeFuture, SandboxExit, SandboxLog, SandboxSample, SandboxStream,
    StartSandbox, StartedSandbox,
};
use tokio::sync::{mpsc, watch};

/// See the module.
pub(super) struct PretendNode {
    kills: Mutex<HashMap<SandboxId, i64>>,
    exits: Mutex<Option<mpsc::Receiver<SandboxExit>>>,
    logs: Mutex<Option<mpsc::Receiver<SandboxLog>>>,
    /// Kept, because a server may take the end of a channel for the end of its node.
    _senders: (mpsc::Sender<SandboxExit>, mpsc::Sender<SandboxLog>),
}

impl PretendNode {
    pub(super) fn new() -> Arc<Self> {
        let (exits, exits_receiver) = mpsc::channel(1);
        let (logs, logs_receiver) = mpsc::channel(1);
        Arc::new(Self {
            kills: Mutex::default(),
            exits: Mutex::new(Some(exits_receiver)),
            logs: Mutex::new(Some(logs_receiver)),
            _senders: (exits, logs),
        })
    }

    /// When each kill came, in microseconds since the Unix epoch.
    pub(super) fn kills(&self) -> HashMap<SandboxId, i64> {
        self.kills.lock().clone()
    }
}

impl NodeApi for PretendNode {
    fn start(&self, _: StartSandbox) -> NodeFuture<'_, Result<StartedSandbox, NodeError>> {
        Box::pin(async {
            Ok(StartedSandbox {
                agent_version: protocol::agent::VERSION.to_owned(),
                stages: Vec::new(),
            })
        })
    }

    fn kill<'a>(&'a self, id: &'a SandboxId) -> NodeFuture<'a, Result<(), NodeError>> {
        self.kills.lock().insert(id.clone(), Timestamp::now().as_microsecond());
        Box::pin(async { Ok(()) })
    }

    fn dial<'a>(&'a self, _: &'a SandboxId, _: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(async { Err(DialError::PortClosed) })
    }

    fn ending(&self, _: &SandboxId) -> Option<watch::Receiver<bool>> {
        None
    }

    fn reconcile(&self, wanted: Vec<SandboxId>) -> NodeFuture<'_, Result<Vec<SandboxId>, NodeError>> {
        Box::pin(async { Ok(wanted) })
    }

    fn exits(&self) -> Option<mpsc::Receiver<SandboxExit>> {
        self.exits.lock().take()
    }

    fn logs(&self) -> Option<mpsc::Receiver<SandboxLog>> {
        self.logs.lock().take()
    }

    fn samples(&self) -> NodeFuture<'_, Result<Vec<SandboxSample>, NodeError>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn room(&self) -> NodeFuture<'_, Result<HostRoom, NodeError>> {
        Box::pin(async {
            Ok(HostRoom {
                memory_available_bytes: 64 << 30,
                disk_available_bytes: 1 << 40,
            })
        })
    }
}

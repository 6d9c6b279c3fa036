//! The calls of a link: each method of [`protocol::node::NodeApi`] as a value.

use std::time::Duration;

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use model::network::EgressPolicy;
use protocol::node::{
    ClaimSandbox, ForkSandbox, NodeDeadline, PackMemory, PackSandbox, PauseSandbox, PermitRequest, ResumeSandbox,
    StartSandbox, UnpackMemory, UnpackSandbox, Wanted,
};
use serde::{Deserialize, Serialize};

/// How long a call may take that reads or changes little.
const SHORT: Duration = Duration::from_secs(60);
/// How long a call may take that moves files or memory of a sandbox. What the server waits for it is less, and ends before.
const LONG: Duration = Duration::from_secs(60 * 60);

/// A call of the server to its node. A stream begins with it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "call", content = "request", rename_all = "snake_case")]
pub(crate) enum Call {
    Permit(Box<PermitRequest>),
    GiveBack(SandboxId, u64),
    Start(Box<StartSandbox>),
    Kill(SandboxId),
    Freeze(SandboxId),
    Claim(Box<ClaimSandbox>),
    Pause(PauseSandbox),
    Resume(Box<ResumeSandbox>),
    Fork(Box<ForkSandbox>),
    Commit(SandboxId, bool),
    CopyDisk(SandboxId, bool),
    CommitCopy(DiskId, bool, Option<BuildId>),
    /// Nodes of the version before do not know it, and say so.
    KeepCopy(DiskId, Option<BuildId>),
    Memories,
    RemoveMemory(BuildId),
    Layers,
    RemoveLayer(LayerId),
    ExportLayer(LayerId),
    ImportLayer(LayerId, u64),
    /// Nodes that do not say so in their hello do not know it, and [`Self::UnpackSandbox`].
    PackSandbox(Box<PackSandbox>),
    UnpackSandbox(Box<UnpackSandbox>),
    /// Nodes that do not say so in their hello do not know it, and [`Self::UnpackMemory`].
    PackMemory(Box<PackMemory>),
    UnpackMemory(Box<UnpackMemory>),
    BaseVersion,
    Dial(SandboxId, u16),
    SetEgress(SandboxId, EgressPolicy),
    SetDeadline(SandboxId, NodeDeadline),
    Expired,
    ForgetExpired(Vec<SandboxId>),
    Reconcile(Vec<Wanted>),
    /// With how many events may be on their way that the subscriber has not used yet.
    Subscribe(u32),
    Samples,
    Capacity,
    EgressCounters,
}

impl Call {
    /// How long the caller waits for the first frame of the answer. A connection that is lost ends the wait before: this
    /// bounds a node that answers pings and nothing else.
    pub(crate) const fn bound(&self) -> Duration {
        match self {
            Self::Permit(_)
            | Self::GiveBack(..)
            | Self::Kill(_)
            | Self::Freeze(_)
            | Self::Claim(_)
            | Self::Memories
            | Self::Layers
            | Self::BaseVersion
            | Self::Dial(..)
            | Self::SetEgress(..)
            | Self::SetDeadline(..)
            | Self::Expired
            | Self::ForgetExpired(_)
            | Self::Subscribe(_)
            | Self::Samples
            | Self::Capacity
            | Self::EgressCounters => SHORT,
            Self::Start(_)
            | Self::Pause(_)
            | Self::Resume(_)
            | Self::Fork(_)
            | Self::Commit(..)
            | Self::CopyDisk(..)
            | Self::CommitCopy(..)
            | Self::KeepCopy(..)
            | Self::RemoveMemory(_)
            | Self::RemoveLayer(_)
            | Self::ExportLayer(_)
            | Self::ImportLayer(..)
            | Self::PackSandbox(_)
            | Self::UnpackSandbox(_)
            | Self::PackMemory(_)
            | Self::UnpackMemory(_)
            | Self::Reconcile(_) => LONG,
        }
    }
}

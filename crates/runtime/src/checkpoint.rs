//! Checkpoints: the processes of a sandbox on disk, written and restored by CRIU, a separate program that is found at run time.
//!
//! A sandbox is written while all of its processes are frozen and its agent is quiet (`protocol::agent::quiet`), and its
//! processes are ended only when the checkpoint and the disk are complete and written out. A restore is a start (`launcher`)
//! in which CRIU makes the processes. CRIU runs as the first user of the sandbox's id range (`preload`), because what it
//! makes belongs to that user then, as in every other sandbox.
//!
//! Facts about CRIU that this relies on:
//!
//! - With the network namespace left empty (`--empty-ns net`), connections within the sandbox survive: the script step
//!   `setup-namespaces` sets up the interfaces before sockets are restored.
//! - Of ids, only the map of the user namespace is in terms of the host (`ids`).
//! - `--manage-cgroups=ignore`: what it restores is in the groups in which it runs, so memory is charged to the workload.
//! - A tree that is frozen by version 2 can be written only with `--freeze-cgroup` on a group above all processes.

pub(crate) mod agents;
pub(crate) mod criu;
pub(crate) mod dump;
pub(crate) mod facts;
pub(crate) mod ghosts;
pub(crate) mod host;
pub(crate) mod ids;
pub(crate) mod jail;
pub(crate) mod lost;
pub(crate) mod mounts;
mod preload;
pub(crate) mod program;
pub(crate) mod rpc;
pub(crate) mod save;
pub(crate) mod sums;
pub(crate) mod sys;
mod threads;
mod vetted;

use std::io;
use std::path::Path;

use model::id::SandboxId;
use serde::{Deserialize, Serialize};

use self::host::HostFeatures;
use crate::boot_id::{self, BootId};

/// File in the directory of a checkpoint that says what it was written from.
pub(crate) const ABOUT: &str = "about.json";

/// What a checkpoint was written from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct About {
    /// Features of the host on which the checkpoint was written.
    #[serde(flatten)]
    pub(crate) host: HostFeatures,
    /// Hash of the agent's program.
    pub(crate) agent: String,
    /// Mount points, in the order of their names in the checkpoint.
    pub(crate) mounts: Vec<String>,
    /// The run of the sandbox that was written. Earlier versions noted none.
    #[serde(default)]
    pub(crate) run: Option<Run>,
}

/// A run of a sandbox: its processes, from their start on, wherever they continue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Run {
    sandbox: String,
    boot_id: BootId,
}

impl Run {
    /// The run of a sandbox with this agent and these mounts; `None` where it was started by an earlier version, and has
    /// the boot id of the host.
    pub(crate) fn of(sandbox: &SandboxId, agent: i32, mounts: &[String]) -> io::Result<Option<Self>> {
        if !mounts.iter().any(|point| point == boot_id::POINT) {
            return Ok(None);
        }
        Ok(Some(Self {
            sandbox: sandbox.to_string(),
            boot_id: BootId::of(agent)?,
        }))
    }
}

impl About {
    /// Reads what is known of a checkpoint.
    ///
    /// # Errors
    /// When it is not there or damaged.
    pub(crate) fn of(checkpoint: &Path) -> io::Result<Self> {
        Ok(serde_json::from_slice(&std::fs::read(checkpoint.join(ABOUT))?)?)
    }

    /// Boot id for a restore: the one from before, or a new one if it is a copy of the sandbox that was written.
    pub(crate) fn boot_id(&self, of: &SandboxId) -> io::Result<BootId> {
        match &self.run {
            Some(run) if run.sandbox == of.to_string() => Ok(run.boot_id.clone()),
            _ => BootId::new(),
        }
    }

    fn write(&self, checkpoint: &Path) -> io::Result<()> {
        std::fs::write(checkpoint.join(ABOUT), serde_json::to_vec(self)?)
    }
}

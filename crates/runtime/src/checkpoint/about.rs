//! What a checkpoint was written from.

use std::io;
use std::path::Path;

use model::id::SandboxId;
use serde::{Deserialize, Serialize};

use super::host::HostFeatures;
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

    /// Writes what is known of a checkpoint.
    ///
    /// # Errors
    /// When its directory cannot be written.
    pub(super) fn write(&self, checkpoint: &Path) -> io::Result<()> {
        std::fs::write(checkpoint.join(ABOUT), serde_json::to_vec(self)?)
    }
}

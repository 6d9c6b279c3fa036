//! Entries of the logs of sandboxes, as a node writes them.

use std::collections::BTreeMap;

use model::id::SandboxId;
use model::log::Level;
use serde::{Deserialize, Serialize};

/// The part of the platform that writes an entry into a sandbox's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logger {
    /// The host reports about the sandbox.
    Sandbox,
    /// The agent inside the sandbox reports about its processes. Its reports are untrusted.
    Process,
    /// The egress gateway, about connections to the outside.
    Egress,
}

impl Logger {
    /// Name in the log.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Sandbox => "sandbox",
            Self::Process => "process",
            Self::Egress => "egress",
        }
    }
}

/// A log entry of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxLog {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// Time, in microseconds since 1970, by the host's clock.
    pub at_us: i64,
    /// Severity.
    pub level: Level,
    /// The part of the platform that reports the entry.
    pub logger: Logger,
    /// The entry as one sentence for people. The node bounds its length.
    pub message: String,
    /// The entry as structured fields for programs. The node bounds keys and values.
    pub fields: BTreeMap<String, String>,
}

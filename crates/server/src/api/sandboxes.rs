//! Sandboxes in requests and responses.
//!
//! Keys without a value are absent and never `null`: some SDK versions fail on `null` and others on absence, and this
//! form works with all of them.

pub(super) mod create;
mod error;
pub(super) mod fork;
mod idempotency;
pub(super) mod injections;
pub(super) mod lifetime;
pub(super) mod list;
pub(super) mod logs;
pub(super) mod metrics;
pub(super) mod network;
pub(super) mod pause;
pub(super) mod single;
pub(super) mod snapshots;

use std::collections::BTreeMap;

use model::lifecycle::{Kept, State};
use secrecy::ExposeSecret as _;
use serde::Serialize;
use store::sandboxes::SandboxRow;
use utoipa::ToSchema;

use self::network::SandboxNetwork;
use super::state::SandboxAccess;
use crate::clock::rfc3339;
use crate::sandboxes::idempotency::StoredSandbox;
use crate::sandboxes::lifecycle::lifecycle_of;
use crate::sandboxes::policy::spec_of;

/// The client id of every sandbox; required by SDKs that still read it.
const CLIENT_ID: &str = "6532622b";

/// The state of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum SandboxState {
    Running,
    Paused,
}

impl SandboxState {
    /// The state for clients of a sandbox that they know.
    fn of(state: State) -> Self {
        match state {
            State::Pausing | State::Paused | State::Resuming => Self::Paused,
            State::Creating | State::Running | State::Stopping | State::Gone => Self::Running,
        }
    }
}

/// How much of a paused sandbox is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum PauseMode {
    /// Its processes and its files.
    Full,
    /// Its files.
    Filesystem,
}

/// Where a paused sandbox is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum PauseStorage {
    /// Its processes are in the memory of the host, which frees nothing. A restart of the host ends it.
    Memory,
    /// On the disk of the host. It survives a restart of the host.
    Disk,
}

/// What a client needs to reach a sandbox.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ConnectionInfo {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    alias: Option<String>,
    envd_version: String,
    envd_access_token: String,
    /// The token that traffic must send as header `e2b-traffic-access-token` if the sandbox was created with
    /// `allowPublicTraffic: false`. Any other sandbox has one too, but does not require it.
    traffic_access_token: String,
    domain: String,
}

impl ConnectionInfo {
    fn new(row: SandboxRow, access: &SandboxAccess) -> Self {
        Self::from_stored(row.into(), access)
    }

    /// The response of a repeated request, from the stored sandbox.
    fn from_stored(stored: StoredSandbox, access: &SandboxAccess) -> Self {
        let id = &stored.sandbox_id;
        Self {
            envd_access_token: access.agent_token(id).expose_secret().to_owned(),
            traffic_access_token: access.traffic_token(id).expose_secret().to_owned(),
            domain: access.domain.clone(),
            template_id: stored.template_id.into(),
            sandbox_id: stored.sandbox_id.into(),
            client_id: CLIENT_ID,
            alias: stored.alias,
            envd_version: stored.agent_version,
        }
    }
}

/// The fields that lists and details have in common.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SandboxFacts {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "sandboxID")]
    sandbox_id: String,
    #[serde(rename = "clientID")]
    client_id: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    alias: Option<String>,
    /// When it started.
    #[schema(format = DateTime)]
    started_at: String,
    /// Its deadline; of a paused sandbox, which has none, when it was paused.
    #[schema(format = DateTime)]
    end_at: String,
    cpu_count: u32,
    #[serde(rename = "memoryMB")]
    memory_mb: u32,
    #[serde(rename = "diskSizeMB")]
    disk_mb: u32,
    metadata: BTreeMap<String, String>,
    state: SandboxState,
    envd_version: String,
    #[schema(value_type = Vec<Object>, max_items = 0)]
    volume_mounts: [(); 0],
}

impl SandboxFacts {
    fn new(row: SandboxRow) -> Self {
        let state = SandboxState::of(row.state);
        let end_us = match state {
            SandboxState::Running => row.end_us,
            SandboxState::Paused => row.paused_us.unwrap_or(row.end_us),
        };
        Self {
            template_id: row.template_id.into(),
            sandbox_id: row.id.into(),
            client_id: CLIENT_ID,
            alias: row.alias,
            started_at: rfc3339(row.started_us),
            end_at: rfc3339(end_us),
            cpu_count: row.cpu_count,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
            metadata: row.metadata,
            state,
            envd_version: row.agent_version,
            volume_mounts: [],
        }
    }
}

/// A sandbox in a list.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ListedSandbox {
    #[serde(flatten)]
    facts: SandboxFacts,
    execution_id: String,
    uid: String,
}

impl ListedSandbox {
    fn new(mut row: SandboxRow) -> Self {
        Self {
            execution_id: std::mem::take(&mut row.execution_id),
            uid: row.user_id.as_str().to_owned(),
            facts: SandboxFacts::new(row),
        }
    }
}

/// The details of a sandbox.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SandboxDetail {
    #[serde(flatten)]
    facts: SandboxFacts,
    envd_access_token: String,
    domain: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    allow_internet_access: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    network: Option<SandboxNetwork>,
    lifecycle: Lifecycle,
    /// How much of it is kept, while it is paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pause_mode: Option<PauseMode>,
    /// Where it is kept, while it is paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pause_storage: Option<PauseStorage>,
    /// Space that it takes on the disk of the host, in bytes, while it is paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pause_disk_bytes: Option<i64>,
    /// Why it could not be resumed the last time, while it is paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    resume_error: Option<String>,
}

/// What happens to a sandbox at its deadline, and on traffic after that.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Lifecycle {
    /// Whether traffic resumes it while it is paused.
    auto_resume: bool,
    on_timeout: OnTimeout,
}

/// What happens to a sandbox at its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum OnTimeout {
    Kill,
    Pause,
}

impl SandboxDetail {
    fn new(row: SandboxRow, access: &SandboxAccess) -> Self {
        let token = access.agent_token(&row.id);
        let lifecycle = lifecycle_of(&row);
        let is_paused = SandboxState::of(row.state) == SandboxState::Paused;
        let kept = row.kept.filter(|_| is_paused);
        Self {
            envd_access_token: token.expose_secret().to_owned(),
            domain: access.domain.clone(),
            allow_internet_access: row.allow_internet_access,
            // Written by this crate; invalid content is left out.
            network: spec_of(&row).ok().flatten().map(SandboxNetwork::from),
            lifecycle: Lifecycle {
                auto_resume: lifecycle.auto_resume,
                on_timeout: if lifecycle.auto_pause {
                    OnTimeout::Pause
                } else {
                    OnTimeout::Kill
                },
            },
            pause_mode: kept.map(|kept| match kept {
                Kept::Memory | Kept::Checkpoint => PauseMode::Full,
                Kept::Filesystem => PauseMode::Filesystem,
            }),
            pause_storage: kept.map(|kept| match kept {
                Kept::Memory => PauseStorage::Memory,
                Kept::Checkpoint | Kept::Filesystem => PauseStorage::Disk,
            }),
            pause_disk_bytes: row.kept_bytes.filter(|bytes| is_paused && *bytes > 0),
            resume_error: row.resume_error.clone().filter(|_| is_paused),
            facts: SandboxFacts::new(row),
        }
    }
}

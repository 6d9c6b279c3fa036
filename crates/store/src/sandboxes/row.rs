//! The row of a sandbox.

use std::collections::BTreeMap;

use model::id::{BuildId, NodeId, SandboxId, TeamId, TemplateId, UserId};
use model::lifecycle::{Kept, State};

use crate::error::StoreError;
use crate::row::{Columns, FromColumns};

/// A stored sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxRow {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// The node that the sandbox runs on; none in a row of a version that did not know nodes, until a node adopts the
    /// row.
    pub node_id: Option<NodeId>,
    /// The owning team.
    pub team_id: TeamId,
    /// The user that requested the sandbox.
    pub user_id: UserId,
    /// The template that the sandbox was created from.
    pub template_id: TemplateId,
    /// The build of the template.
    pub build_id: BuildId,
    /// The template's alias, shown to clients.
    pub alias: Option<String>,
    /// Its state in the lifecycle.
    pub state: State,
    /// Incremented by every change of the row, from 1.
    pub version: i64,
    /// This run of the sandbox: a UUID.
    pub execution_id: String,
    /// When its agent first responded, in microseconds since the Unix epoch; `created_us` until then.
    pub started_us: i64,
    /// Its deadline, in microseconds since the Unix epoch.
    pub end_us: i64,
    /// The latest possible deadline, in microseconds since the Unix epoch. The caller enforces it.
    pub max_end_us: i64,
    /// Cores.
    pub cpu_count: u32,
    /// Memory, in MiB.
    pub memory_mb: u32,
    /// Disk, in MiB.
    pub disk_mb: u32,
    /// The agent's version.
    pub agent_version: String,
    /// Labels that the client chose.
    pub metadata: BTreeMap<String, String>,
    /// Whether the agent requires a token.
    pub secure: bool,
    /// Whether ports can be reached without a token.
    pub allow_public_traffic: bool,
    /// The requested internet access; none when the request did not set it.
    pub allow_internet_access: Option<bool>,
    /// The network settings of the client, in a format of the caller.
    pub network_json: Option<String>,
    /// The lifecycle settings of the client, in a format of the caller.
    pub lifecycle_json: Option<String>,
    /// When it was requested, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When it was last paused, in microseconds since the Unix epoch. Only of meaning while it is paused.
    pub paused_us: Option<i64>,
    /// What is kept of it while it is being paused, is paused, or is being resumed. Otherwise without meaning.
    pub kept: Option<Kept>,
    /// Space that it takes on the disk of its host while it is paused, in bytes. Otherwise without meaning.
    pub kept_bytes: Option<i64>,
    /// Why it could not be resumed the last time, while it is paused. Otherwise without meaning.
    pub resume_error: Option<String>,
    /// The sandbox whose certificate authority this one shares; none if it has one of its own.
    pub authority_of: Option<SandboxId>,
}

/// The columns of a [`SandboxRow`].
macro_rules! columns {
    () => {
        "id, team_id, user_id, template_id, build_id, alias, state, version, execution_id, started_us, end_us, \
         max_end_us, cpu_count, memory_mb, disk_mb, agent_version, metadata_json, secure, allow_public_traffic, \
         allow_internet_access, network_json, lifecycle_json, created_us, node_id, \
         paused_us, kept, kept_bytes, resume_error, authority_of"
    };
}
pub(super) use columns;

impl FromColumns for SandboxRow {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            node_id: columns.id_opt("node_id")?,
            team_id: columns.id("team_id")?,
            user_id: columns.id("user_id")?,
            template_id: columns.id("template_id")?,
            build_id: columns.id("build_id")?,
            alias: columns.text_opt("alias")?,
            state: State::from_column(&columns.text("state")?).ok_or_else(|| columns.corrupt("state"))?,
            version: columns.int("version")?,
            execution_id: columns.text("execution_id")?,
            started_us: columns.int("started_us")?,
            end_us: columns.int("end_us")?,
            max_end_us: columns.int("max_end_us")?,
            cpu_count: columns.count("cpu_count")?,
            memory_mb: columns.count("memory_mb")?,
            disk_mb: columns.count("disk_mb")?,
            agent_version: columns.text("agent_version")?,
            metadata: metadata(columns)?,
            secure: columns.flag("secure")?,
            allow_public_traffic: columns.flag("allow_public_traffic")?,
            allow_internet_access: columns.flag_opt("allow_internet_access")?,
            network_json: columns.text_opt("network_json")?,
            lifecycle_json: columns.text_opt("lifecycle_json")?,
            created_us: columns.int("created_us")?,
            paused_us: columns.int_opt("paused_us")?,
            kept: match columns.text_opt("kept")? {
                None => None,
                Some(word) => Some(Kept::from_column(&word).ok_or_else(|| columns.corrupt("kept"))?),
            },
            kept_bytes: columns.int_opt("kept_bytes")?,
            resume_error: columns.text_opt("resume_error")?,
            authority_of: columns.id_opt("authority_of")?,
        })
    }
}

/// Decodes the labels of a row.
pub(super) fn metadata(columns: &Columns<'_>) -> Result<BTreeMap<String, String>, StoreError> {
    serde_json::from_str(&columns.text("metadata_json")?).map_err(|_| columns.corrupt("metadata_json"))
}

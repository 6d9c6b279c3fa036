//! The rows of sandboxes that are paused and resumed.
//!
//! Each change names the version that was read, so that of two callers one succeeds. The states in which it is made are
//! those of [`RowChange`].

use model::id::SandboxId;
use model::lifecycle::Kept;
use model::lifecycle::row::RowChange;

use super::row::SandboxRow;
use crate::Change;
use crate::error::StoreError;
use crate::nodes::NodeRows;
use crate::row::storable;
use crate::statement::Query;

/// The columns that describe a paused sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pause<'a> {
    /// What is kept of the sandbox.
    pub kept: Kept,
    /// Space that it takes on the disk of its host, in bytes.
    pub kept_bytes: i64,
    /// When it was paused, in microseconds since the Unix epoch.
    pub paused_us: i64,
    /// Why the last attempt to resume the sandbox failed; none if there was no such attempt.
    pub resume_error: Option<&'a str>,
}

/// The deadlines and settings of a sandbox that is being resumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resumption {
    /// Its deadline, in microseconds since the Unix epoch. It counts if a crash interrupts the resume and it runs.
    pub end_us: i64,
    /// The latest possible deadline, in microseconds since the Unix epoch.
    pub max_end_us: i64,
    /// Its new run: a UUID.
    pub execution_id: String,
    /// Its lifecycle settings from now on, in a format of the caller.
    pub lifecycle_json: Option<String>,
}

impl Resumption {
    /// Binds the columns of [`RowChange::Resuming`].
    pub(super) fn bind(&self, query: Query) -> Query {
        query
            .bind(self.end_us)
            .bind(self.max_end_us)
            .bind(self.execution_id.clone())
            .bind(self.lifecycle_json.clone())
    }
}

impl NodeRows {
    /// Marks a sandbox as being paused, at `version`. `kept` is what there is of it if that is interrupted when its
    /// processes are stopped. With `lifecycle_json`, it has these settings from now on.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_pausing(
        &self,
        id: &SandboxId,
        version: i64,
        kept: Kept,
        lifecycle_json: Option<&str>,
    ) -> Result<Change<SandboxRow>, StoreError> {
        self.change_state(id, version, RowChange::Pausing, |query| {
            query.bind(kept.as_str()).bind(lifecycle_json)
        })
        .await
    }

    /// Marks a sandbox as paused, at `version`.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_paused(
        &self,
        id: &SandboxId,
        version: i64,
        pause: Pause<'_>,
    ) -> Result<Change<SandboxRow>, StoreError> {
        self.change_state(id, version, RowChange::Paused, |query| {
            query
                .bind(pause.kept.as_str())
                .bind(pause.paused_us)
                .bind(pause.kept_bytes)
                .bind(pause.resume_error)
        })
        .await
    }

    /// Marks a sandbox as being resumed, at `version`.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_resuming(
        &self,
        id: &SandboxId,
        version: i64,
        resumption: &Resumption,
    ) -> Result<Change<SandboxRow>, StoreError> {
        self.change_state(id, version, RowChange::Resuming, |query| resumption.bind(query))
            .await
    }

    /// Marks a sandbox as running again, at `version`, with the times that the client is sent,
    /// and the version of its agent if that is another one.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_resumed(
        &self,
        id: &SandboxId,
        version: i64,
        started_us: i64,
        end_us: i64,
        agent_version: Option<&str>,
    ) -> Result<Change<SandboxRow>, StoreError> {
        if let Some(agent_version) = agent_version {
            storable("agent version", agent_version)?;
        }
        self.change_state(id, version, RowChange::Running, |query| {
            query.bind(started_us).bind(end_us).bind(agent_version)
        })
        .await
    }
}

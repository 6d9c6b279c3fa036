//! The rows of sandboxes that are paused and resumed.
//!
//! Each change goes from one state to the next and names the version that was read, so that of two callers one succeeds.

use model::id::SandboxId;
use model::lifecycle::Kept;

use super::row::{SandboxRow, columns};
use crate::Change;
use crate::error::StoreError;
use crate::nodes::NodeRows;
use crate::row::storable;

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

impl NodeRows {
    /// Marks a sandbox as being paused, from `running` at `version`, or from a state that could not be stored as
    /// `running`. `kept` is what there is of it if that is interrupted when its processes are stopped. With
    /// `lifecycle_json`, it has these settings from now on.
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
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET state = 'pausing', version = version + 1, kept = $3, \
             lifecycle_json = COALESCE($5, lifecycle_json) \
             WHERE id = $1 AND version = $2 AND state IN ('running', 'pausing', 'resuming') AND node_id = $4 RETURNING ",
            columns!()
        ))
        .bind(id.as_str())
        .bind(version)
        .bind(kept.as_str())
        .bind(self.node.as_str())
        .bind(lifecycle_json);
        self.sandbox_change(id, "mark a sandbox as being paused", query).await
    }

    /// Marks a sandbox as paused, from `pausing`, `resuming` or `paused` at `version`.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_paused(
        &self,
        id: &SandboxId,
        version: i64,
        pause: Pause<'_>,
    ) -> Result<Change<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET state = 'paused', version = version + 1, kept = $3, paused_us = $4, kept_bytes = $5, \
             resume_error = $6 \
             WHERE id = $1 AND version = $2 AND state IN ('pausing', 'resuming', 'paused') AND node_id = $7 RETURNING ",
            columns!()
        ))
        .bind(id.as_str())
        .bind(version)
        .bind(pause.kept.as_str())
        .bind(pause.paused_us)
        .bind(pause.kept_bytes)
        .bind(pause.resume_error)
        .bind(self.node.as_str());
        self.sandbox_change(id, "mark a sandbox as paused", query).await
    }

    /// Marks a sandbox as being resumed, from `paused` at `version`, or from `pausing` if that could not be stored as
    /// `paused`.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_resuming(
        &self,
        id: &SandboxId,
        version: i64,
        resumption: &Resumption,
    ) -> Result<Change<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET state = 'resuming', version = version + 1, end_us = $3, max_end_us = $4, \
             execution_id = $5, lifecycle_json = $6 \
             WHERE id = $1 AND version = $2 AND state IN ('paused', 'pausing') AND node_id = $7 RETURNING ",
            columns!()
        ))
        .bind(id.as_str())
        .bind(version)
        .bind(resumption.end_us)
        .bind(resumption.max_end_us)
        .bind(resumption.execution_id.as_str())
        .bind(resumption.lifecycle_json.as_deref())
        .bind(self.node.as_str());
        self.sandbox_change(id, "mark a sandbox as being resumed", query).await
    }

    /// Marks a sandbox as running again, from `resuming` or `pausing` at `version`, with the times that the client is sent,
    /// and the version of its agent if that is another one.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_resumed(
        &self,
        id: &SandboxId,
        version: i64,
        (started_us, end_us): (i64, i64),
        agent_version: Option<&str>,
    ) -> Result<Change<SandboxRow>, StoreError> {
        if let Some(agent_version) = agent_version {
            storable("agent version", agent_version)?;
        }
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET state = 'running', version = version + 1, started_us = $3, end_us = $4, \
             agent_version = COALESCE($5, agent_version) \
             WHERE id = $1 AND version = $2 AND state IN ('pausing', 'resuming') AND node_id = $6 RETURNING ",
            columns!()
        ))
        .bind(id.as_str())
        .bind(version)
        .bind(started_us)
        .bind(end_us)
        .bind(agent_version)
        .bind(self.node.as_str());
        self.sandbox_change(id, "mark a sandbox as running again", query).await
    }
}

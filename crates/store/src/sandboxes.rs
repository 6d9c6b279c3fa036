//! Sandboxes: who owns them, what they are made of, when they end, and where in their life they are.
//!
//! A row is inserted before the node is asked to start anything, so that whatever a crash leaves behind has a name. Each
//! change raises `version`. A change that was decided on a view of the row names that view's version and is
//! [`Change::Stale`] if the row moved on: a deadline that was extended an instant ago is not enforced.
//!
//! A row is its node's: only [`NodeRows`] changes it, and for another node it is not there.

mod page;
mod row;

use std::collections::BTreeMap;

use model::id::{BuildId, NodeId, SandboxId, TeamId, TemplateId, UserId};
use model::lifecycle::State;

pub use self::page::{Order, SandboxCursor, SandboxFilter, SandboxPage, SandboxQuery};
pub use self::row::SandboxRow;
use self::row::columns;
use crate::error::{StoreError, sort};
use crate::nodes::NodeRows;
use crate::row::{Columns, FromColumns, storable};
use crate::{Change, Store};

/// A sandbox that is about to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSandbox {
    /// Its id.
    pub id: SandboxId,
    /// The owning team.
    pub team_id: TeamId,
    /// The user that asked for it.
    pub user_id: UserId,
    /// The template it is made of.
    pub template_id: TemplateId,
    /// The build of that template.
    pub build_id: BuildId,
    /// The template's alias, shown to clients.
    pub alias: Option<String>,
    /// This run of the sandbox: a UUID.
    pub execution_id: String,
    /// When it is to end, in microseconds since the Unix epoch.
    pub end_us: i64,
    /// The latest end that extensions may reach, in microseconds since the Unix epoch. The caller enforces it.
    pub max_end_us: i64,
    /// Cores.
    pub cpu_count: u32,
    /// Memory, in MiB.
    pub memory_mb: u32,
    /// Disk, in MiB.
    pub disk_mb: u32,
    /// The agent's version, as far as known before it answers.
    pub agent_version: String,
    /// Labels that the client chose.
    pub metadata: BTreeMap<String, String>,
    /// Whether the agent asks for a token.
    pub secure: bool,
    /// Whether ports answer without a token.
    pub allow_public_traffic: bool,
    /// What the client asked for, if it asked.
    pub allow_internet_access: Option<bool>,
    /// The network settings of the client, in a form that is the caller's own.
    pub network_json: Option<String>,
    /// The lifecycle settings of the client, in a form that is the caller's own.
    pub lifecycle_json: Option<String>,
    /// When it was asked for, in microseconds since the Unix epoch.
    pub created_us: i64,
}

/// Only whether a row is there.
struct Present;

impl FromColumns for Present {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(_: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self)
    }
}

impl NodeRows {
    /// Stores a new sandbox of this node in the state `creating`, with version 1, and returns its row.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id is taken; [`StoreError::Dangling`] when there is no such team or user.
    pub async fn sandbox_insert(&self, new: NewSandbox) -> Result<SandboxRow, StoreError> {
        if let Some(alias) = &new.alias {
            storable("sandbox alias", alias)?;
        }
        let row = creating(new, self.node.clone());
        let metadata = serde_json::to_string(&row.metadata).expect("a map of texts is always JSON");
        let query = sqlx::query(concat!(
            "INSERT INTO sandboxes (",
            columns!(),
            ") VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, \
             $21, $22, $23, $24)"
        ))
        .bind(row.id.as_str())
        .bind(row.team_id.as_str())
        .bind(row.user_id.as_str())
        .bind(row.template_id.as_str())
        .bind(row.build_id.as_str())
        .bind(row.alias.as_deref())
        .bind(row.state.as_str())
        .bind(row.version)
        .bind(row.execution_id.as_str())
        .bind(row.started_us)
        .bind(row.end_us)
        .bind(row.max_end_us)
        .bind(i64::from(row.cpu_count))
        .bind(i64::from(row.memory_mb))
        .bind(i64::from(row.disk_mb))
        .bind(row.agent_version.as_str())
        .bind(metadata)
        .bind(i64::from(row.secure))
        .bind(i64::from(row.allow_public_traffic))
        .bind(row.allow_internet_access.map(i64::from))
        .bind(row.network_json.as_deref())
        .bind(row.lifecycle_json.as_deref())
        .bind(row.created_us)
        .bind(self.node.as_str());
        self.store.db.write("sandbox", "insert a sandbox", query).await?;
        Ok(row)
    }

    /// The agent answered: from `creating` at `version` to `running`, with the times that were told to the client.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_started(
        &self,
        id: &SandboxId,
        version: i64,
        started_us: i64,
        end_us: i64,
        agent_version: &str,
    ) -> Result<Change<SandboxRow>, StoreError> {
        storable("agent version", agent_version)?;
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET state = 'running', version = version + 1, started_us = $3, end_us = $4, \
             agent_version = $5 WHERE id = $1 AND version = $2 AND state = 'creating' AND node_id = $6 \
             RETURNING ",
            columns!()
        ))
        .bind(id.as_str())
        .bind(version)
        .bind(started_us)
        .bind(end_us)
        .bind(agent_version)
        .bind(self.node.as_str());
        self.sandbox_change(id, "mark a sandbox as started", query).await
    }

    /// Moves a sandbox from `from_version` to `state`. Which moves make sense is for `State::next` to say.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_set_state(
        &self,
        id: &SandboxId,
        from_version: i64,
        state: State,
    ) -> Result<Change<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET state = $3, version = version + 1 \
             WHERE id = $1 AND version = $2 AND node_id = $4 RETURNING ",
            columns!()
        ))
        .bind(id.as_str())
        .bind(from_version)
        .bind(state.as_str())
        .bind(self.node.as_str());
        self.sandbox_change(id, "set the state of a sandbox", query).await
    }

    /// Sets the end of a running sandbox, earlier or later: at `from_version`, or at whatever version when none is
    /// given. One that does not run is [`Change::Stale`].
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_set_end(
        &self,
        id: &SandboxId,
        from_version: Option<i64>,
        end_us: i64,
    ) -> Result<Change<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET end_us = $3, version = version + 1 \
             WHERE id = $1 AND version = COALESCE($2, version) AND state = 'running' AND node_id = $4 \
             RETURNING ",
            columns!()
        ))
        .bind(id.as_str())
        .bind(from_version)
        .bind(end_us)
        .bind(self.node.as_str());
        self.sandbox_change(id, "set the end of a sandbox", query).await
    }

    /// Moves the end of a running sandbox to `end_us` unless it is later already, and returns the row either way. One
    /// that does not run is [`Change::Stale`].
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_extend_end(&self, id: &SandboxId, end_us: i64) -> Result<Change<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET version = CASE WHEN end_us < $2 THEN version + 1 ELSE version END, \
             end_us = CASE WHEN end_us < $2 THEN $2 ELSE end_us END \
             WHERE id = $1 AND state = 'running' AND node_id = $3 RETURNING ",
            columns!()
        ))
        .bind(id.as_str())
        .bind(end_us)
        .bind(self.node.as_str());
        self.sandbox_change(id, "extend a sandbox", query).await
    }

    /// Removes a sandbox of this node and returns its last row; none if there is no such sandbox. One that was started is
    /// counted at its template in the same change, so that the sandboxes of a template are its count and the rows that
    /// are there.
    ///
    /// # Errors
    /// When the database fails; then the row is still there and nothing was counted.
    pub async fn sandbox_delete(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        const WHAT: &str = "delete a sandbox";
        let mut tx = self.store.db.begin(WHAT).await?;
        let delete = concat!(
            "DELETE FROM sandboxes WHERE id = $1 AND node_id = $2 RETURNING ",
            columns!()
        );
        let rows = sqlx::query(delete)
            .bind(id.as_str())
            .bind(self.node.as_str())
            .fetch_all(&mut *tx)
            .await
            .map_err(|error| sort(&error, "sandbox", WHAT))?;
        let row: Option<SandboxRow> = rows.first().map(Columns::decode).transpose()?;
        if let Some(row) = row.as_ref().filter(|row| row.state != State::Creating) {
            sqlx::query(
                "UPDATE templates SET spawn_count = spawn_count + 1, \
                 last_spawned_us = CASE WHEN COALESCE(last_spawned_us, 0) < $2 THEN $2 ELSE last_spawned_us END \
                 WHERE id = $1",
            )
            .bind(row.template_id.as_str())
            .bind(row.started_us)
            .execute(&mut *tx)
            .await
            .map_err(|error| sort(&error, "template", WHAT))?;
        }
        tx.commit().await.map_err(|error| sort(&error, "sandbox", WHAT))?;
        Ok(row)
    }

    /// Every sandbox of this node that is not gone, of every team, for the start of the platform: in all other moments,
    /// memory knows.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_list_live(&self) -> Result<Vec<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM sandboxes WHERE node_id = $1 AND state <> 'gone' ORDER BY created_us, id"
        ))
        .bind(self.node.as_str());
        self.store.db.read_all("list live sandboxes", query).await
    }

    /// Runs a conditional change, and when it hit nothing finds out why.
    async fn sandbox_change(
        &self,
        id: &SandboxId,
        what: &'static str,
        query: crate::db::Query,
    ) -> Result<Change<SandboxRow>, StoreError> {
        if let Some(row) = self.store.db.write_returning(what, query).await? {
            return Ok(Change::Applied(row));
        }
        let present = sqlx::query("SELECT id FROM sandboxes WHERE id = $1 AND node_id = $2")
            .bind(id.as_str())
            .bind(self.node.as_str());
        Ok(match self.store.db.read_optional::<Present>(what, present).await? {
            Some(Present) => Change::Stale,
            None => Change::Missing,
        })
    }
}

impl Store {
    /// The sandbox with that id, whoever owns it and whichever node has it.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_by_id(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!("SELECT ", columns!(), " FROM sandboxes WHERE id = $1")).bind(id.as_str());
        self.db.read_optional("find a sandbox", query).await
    }
}

/// The row that a new sandbox begins with.
fn creating(new: NewSandbox, node: NodeId) -> SandboxRow {
    SandboxRow {
        id: new.id,
        node_id: Some(node),
        team_id: new.team_id,
        user_id: new.user_id,
        template_id: new.template_id,
        build_id: new.build_id,
        alias: new.alias,
        state: State::Creating,
        version: 1,
        execution_id: new.execution_id,
        started_us: new.created_us,
        end_us: new.end_us,
        max_end_us: new.max_end_us,
        cpu_count: new.cpu_count,
        memory_mb: new.memory_mb,
        disk_mb: new.disk_mb,
        agent_version: new.agent_version,
        metadata: new.metadata,
        secure: new.secure,
        allow_public_traffic: new.allow_public_traffic,
        allow_internet_access: new.allow_internet_access,
        network_json: new.network_json,
        lifecycle_json: new.lifecycle_json,
        created_us: new.created_us,
    }
}

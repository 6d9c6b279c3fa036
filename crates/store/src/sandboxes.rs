//! Sandboxes: owner, template, deadline and state.
//!
//! A row is inserted before the node starts anything, so that everything a crash leaves behind has a row. Each change
//! raises `version`. A change that depends on an earlier read names the version it has read, and is [`Change::Stale`]
//! if the row has changed since: a deadline that a client has just extended is not enforced.
//!
//! A row belongs to its node: only [`NodeRows`] changes it, and other nodes do not find it.

mod change;
mod limits;
mod page;
mod parcel;
mod pause;
mod row;
mod spawned;
mod within;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use model::id::{BuildId, NodeId, SandboxId, TeamId, TemplateId, UserId};
use model::lifecycle::row::RowChange;
use model::lifecycle::{Kept, State};

use self::change::update_settings;
pub use self::limits::{PausedMost, PausedUse, TeamMost, TeamShare, TeamUse};
pub use self::page::{Order, SandboxCursor, SandboxFilter, SandboxPage, SandboxQuery};
pub use self::parcel::{Leaving, Move, ParcelRow};
pub use self::pause::{Pause, Resumption};
pub use self::row::SandboxRow;
use self::row::columns;
use self::spawned::count_spawned;
use crate::error::{StoreError, classify};
use crate::keys::SealedSecret;
use crate::nodes::{NodeRows, held};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::{InTransaction as _, Query};
use crate::{Change, Store};

/// A sandbox to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSandbox {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// The owning team.
    pub team_id: TeamId,
    /// The user that requested the sandbox.
    pub user_id: UserId,
    /// The template that the sandbox is created from.
    pub template_id: TemplateId,
    /// The build of the template.
    pub build_id: BuildId,
    /// The template's alias, shown to clients.
    pub alias: Option<String>,
    /// This run of the sandbox: a UUID.
    pub execution_id: String,
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
    /// The expected version of the agent, until the agent reports its own.
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
    /// Its injections, sealed by the caller.
    pub injections_sealed: Option<SealedSecret>,
    /// Its environment, sealed by the caller.
    pub environment_sealed: Option<SealedSecret>,
    /// The sandbox whose certificate authority this one shares; none if it has one of its own.
    pub authority_of: Option<SandboxId>,
    /// When it was requested, in microseconds since the Unix epoch.
    pub created_us: i64,
}

/// The injections of a sandbox.
struct SandboxInjections {
    id: SandboxId,
    sealed: SealedSecret,
}

impl FromColumns for SandboxInjections {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            sealed: SealedSecret::new(columns.text("injections_sealed")?),
        })
    }
}

/// The environment of a sandbox.
struct Environment(SealedSecret);

impl FromColumns for Environment {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self(SealedSecret::new(columns.text("environment_sealed")?)))
    }
}

impl NodeRows {
    /// Stores a new sandbox of this node in the state `creating`, with version 1, and returns its row.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] when the id is taken; [`StoreError::Dangling`] when there is no such team or user.
    pub async fn sandbox_insert(&self, new: NewSandbox) -> Result<SandboxRow, StoreError> {
        let (injections, environment) = (new.injections_sealed.clone(), new.environment_sealed.clone());
        let row = self.sandbox_unstored(new);
        self.insert(row, injections.as_ref(), environment.as_ref()).await
    }

    /// The row that a new sandbox of this node would have, without storing it.
    #[must_use]
    pub fn sandbox_unstored(&self, new: NewSandbox) -> SandboxRow {
        creating(new, self.node.clone())
    }

    /// Stores a new sandbox of this node that runs already, with version 1 and the times that the client is sent, and
    /// returns its row: [`Self::sandbox_insert`] and [`Self::sandbox_started`] in one. After a crash before it, there is
    /// no row and the node ends the sandbox.
    ///
    /// # Errors
    /// As [`Self::sandbox_insert`].
    pub async fn sandbox_insert_running(
        &self,
        new: NewSandbox,
        started_us: i64,
        end_us: i64,
        agent_version: &str,
    ) -> Result<SandboxRow, StoreError> {
        let (injections, environment) = (new.injections_sealed.clone(), new.environment_sealed.clone());
        let row = self.running(new, started_us, end_us, agent_version)?;
        self.insert(row, injections.as_ref(), environment.as_ref()).await
    }

    /// The row of a new sandbox that runs already.
    fn running(
        &self,
        new: NewSandbox,
        started_us: i64,
        end_us: i64,
        agent_version: &str,
    ) -> Result<SandboxRow, StoreError> {
        storable("agent version", agent_version)?;
        Ok(SandboxRow {
            state: State::Running,
            started_us,
            end_us,
            agent_version: agent_version.to_owned(),
            ..self.sandbox_unstored(new)
        })
    }

    async fn insert(
        &self,
        row: SandboxRow,
        injections: Option<&SealedSecret>,
        environment: Option<&SealedSecret>,
    ) -> Result<SandboxRow, StoreError> {
        const WHAT: &str = "insert a sandbox";
        let query = self.insert_query(&row, injections, environment)?;
        let stored = self.store.db.write("sandbox", WHAT, query).await?;
        self.expect_lease(stored, WHAT)?;
        Ok(row)
    }

    fn insert_query(
        &self,
        row: &SandboxRow,
        injections: Option<&SealedSecret>,
        environment: Option<&SealedSecret>,
    ) -> Result<Query, StoreError> {
        if let Some(alias) = &row.alias {
            storable("sandbox alias", alias)?;
        }
        let metadata = serde_json::to_string(&row.metadata).expect("a map of texts is always JSON");
        let query = sqlx::query(concat!(
            "INSERT INTO sandboxes (",
            columns!(),
            ", injections_sealed, environment_sealed) SELECT $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, \
             $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, id, $25, $26, $27, $28, $29, $30, $31 \
             FROM nodes WHERE lease_key = $24"
        ))
        .bind(row.id.as_str().to_owned())
        .bind(row.team_id.as_str().to_owned())
        .bind(row.user_id.as_str().to_owned())
        .bind(row.template_id.as_str().to_owned())
        .bind(row.build_id.as_str().to_owned())
        .bind(row.alias.clone())
        .bind(row.state.as_str().to_owned())
        .bind(row.version)
        .bind(row.execution_id.as_str().to_owned())
        .bind(row.started_us)
        .bind(row.end_us)
        .bind(row.max_end_us)
        .bind(i64::from(row.cpu_count))
        .bind(i64::from(row.memory_mb))
        .bind(i64::from(row.disk_mb))
        .bind(row.agent_version.as_str().to_owned())
        .bind(metadata)
        .bind(i64::from(row.secure))
        .bind(i64::from(row.allow_public_traffic))
        .bind(row.allow_internet_access.map(i64::from))
        .bind(row.network_json.clone())
        .bind(row.lifecycle_json.clone())
        .bind(row.created_us)
        .bind(self.lease_key.clone())
        .bind(row.paused_us)
        .bind(row.kept.map(Kept::as_str))
        .bind(row.kept_bytes)
        .bind(row.resume_error.clone())
        .bind(row.authority_of.as_ref().map(|id| id.as_str().to_owned()))
        .bind(injections.map(|sealed| sealed.as_str().to_owned()))
        .bind(environment.map(|sealed| sealed.as_str().to_owned()));
        Ok(query)
    }

    /// Marks a sandbox as started, from `creating` at `version` to `running`, with the times that the client is sent.
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
        self.change_state(id, version, RowChange::Started, |query| {
            query.bind(started_us).bind(end_us).bind(agent_version)
        })
        .await
    }

    /// Sets the deadline of a running sandbox, earlier or later: at `from_version`, or at any version when none is
    /// given. A sandbox that does not run is [`Change::Stale`].
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_set_end(
        &self,
        id: &SandboxId,
        from_version: Option<i64>,
        end_us: i64,
    ) -> Result<Change<SandboxRow>, StoreError> {
        static STATEMENT: LazyLock<String> = LazyLock::new(|| {
            update_settings(
                "end_us = $3, version = version + 1",
                concat!(
                    "id = $1 AND version = COALESCE($2, version) AND node_id = ",
                    held!("$4")
                ),
            )
        });
        let query = sqlx::query(STATEMENT.as_str())
            .bind(id.as_str())
            .bind(from_version)
            .bind(end_us)
            .bind(self.lease_key.clone());
        self.change_row(id, "set the deadline of a sandbox", query).await
    }

    /// Extends the deadline of a running sandbox to `end_us` unless it is later already, and returns the row either
    /// way. A sandbox that does not run is [`Change::Stale`].
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_extend_end(&self, id: &SandboxId, end_us: i64) -> Result<Change<SandboxRow>, StoreError> {
        static STATEMENT: LazyLock<String> = LazyLock::new(|| {
            update_settings(
                "version = CASE WHEN end_us < $2 THEN version + 1 ELSE version END, \
                 end_us = CASE WHEN end_us < $2 THEN $2 ELSE end_us END",
                concat!("id = $1 AND node_id = ", held!("$3")),
            )
        });
        let query = sqlx::query(STATEMENT.as_str())
            .bind(id.as_str())
            .bind(end_us)
            .bind(self.lease_key.clone());
        self.change_row(id, "extend the deadline of a sandbox", query).await
    }

    /// Replaces the network settings and the requested internet access of a running sandbox, at `from_version`. A sandbox
    /// that does not run is [`Change::Stale`].
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_set_network(
        &self,
        id: &SandboxId,
        from_version: i64,
        network_json: Option<&str>,
        allow_internet_access: Option<bool>,
    ) -> Result<Change<SandboxRow>, StoreError> {
        static STATEMENT: LazyLock<String> = LazyLock::new(|| {
            update_settings(
                "network_json = $3, allow_internet_access = $4, version = version + 1",
                concat!("id = $1 AND version = $2 AND node_id = ", held!("$5")),
            )
        });
        let query = sqlx::query(STATEMENT.as_str())
            .bind(id.as_str())
            .bind(from_version)
            .bind(network_json)
            .bind(allow_internet_access.map(i64::from))
            .bind(self.lease_key.clone());
        self.change_row(id, "set the network of a sandbox", query).await
    }

    /// Replaces the injections of a running sandbox, at `from_version`. A sandbox that does not run is
    /// [`Change::Stale`].
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_set_injections(
        &self,
        id: &SandboxId,
        from_version: i64,
        injections: Option<&SealedSecret>,
    ) -> Result<Change<SandboxRow>, StoreError> {
        static STATEMENT: LazyLock<String> = LazyLock::new(|| {
            update_settings(
                "injections_sealed = $3, version = version + 1",
                concat!("id = $1 AND version = $2 AND node_id = ", held!("$4")),
            )
        });
        let query = sqlx::query(STATEMENT.as_str())
            .bind(id.as_str())
            .bind(from_version)
            .bind(injections.map(SealedSecret::as_str))
            .bind(self.lease_key.clone());
        self.change_row(id, "set the injections of a sandbox", query).await
    }

    /// The injections of all sandboxes of this node that have some.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_injections_list(&self) -> Result<BTreeMap<SandboxId, SealedSecret>, StoreError> {
        let query = sqlx::query(
            "SELECT id, injections_sealed FROM sandboxes WHERE node_id = $1 AND injections_sealed IS NOT NULL",
        )
        .bind(self.node.as_str());
        let rows: Vec<SandboxInjections> = self.store.db.read_all("list injections of sandboxes", query).await?;
        Ok(rows.into_iter().map(|row| (row.id, row.sealed)).collect())
    }

    /// Deletes a sandbox of this node and returns its last row; none if there is no such sandbox. A started sandbox is
    /// counted at its template in the same transaction, so that the count of the template plus its existing rows is the
    /// number of its sandboxes.
    ///
    /// # Errors
    /// When the database fails; then the row still exists and nothing was counted.
    pub async fn sandbox_delete(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        const WHAT: &str = "delete a sandbox";
        let mut tx = self.store.db.begin(WHAT).await?;
        let delete = concat!(
            "DELETE FROM sandboxes WHERE id = $1 AND node_id = ",
            held!("$2"),
            " RETURNING ",
            columns!()
        );
        let rows = sqlx::query(delete)
            .bind(id.as_str())
            .bind(self.lease_key.clone())
            .all_in(&mut tx)
            .await
            .map_err(|error| classify(&error, "sandbox", WHAT))?;
        let row: Option<SandboxRow> = rows.first().map(Columns::decode).transpose()?;
        if let Some(row) = &row {
            count_spawned(&mut tx, row)
                .await
                .map_err(|error| classify(&error, "template", WHAT))?;
        }
        tx.commit().await.map_err(|error| classify(&error, "sandbox", WHAT))?;
        if row.is_none() {
            self.check_lease(WHAT).await?;
        }
        Ok(row)
    }

    /// Every sandbox of this node that is not gone, of every team, for the start of the platform: after that, the
    /// registry in memory is used.
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
}

impl Store {
    /// The sandbox with that id, of any owner and on any node.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_by_id(&self, id: &SandboxId) -> Result<Option<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!("SELECT ", columns!(), " FROM sandboxes WHERE id = $1")).bind(id.as_str());
        self.db.read_optional("find a sandbox", query).await
    }

    /// Every sandbox that is not gone, of every team, on the nodes that have joined: those of all servers of a service.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_list_joined(&self) -> Result<Vec<SandboxRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM sandboxes WHERE state <> 'gone' AND node_id IN (SELECT id FROM joined_nodes) ORDER BY created_us, id"
        ));
        self.db.read_all("list the sandboxes of all nodes", query).await
    }

    /// The environment that a sandbox was created with; none if it has none, or there is no such sandbox.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_environment(&self, id: &SandboxId) -> Result<Option<SealedSecret>, StoreError> {
        let query =
            sqlx::query("SELECT environment_sealed FROM sandboxes WHERE id = $1 AND environment_sealed IS NOT NULL")
                .bind(id.as_str());
        let row: Option<Environment> = self
            .db
            .read_optional("read the environment of a sandbox", query)
            .await?;
        Ok(row.map(|Environment(sealed)| sealed))
    }

    /// The injections of a sandbox of any owner; none if it has none, or there is no such sandbox.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_injections(&self, id: &SandboxId) -> Result<Option<SealedSecret>, StoreError> {
        let query =
            sqlx::query("SELECT id, injections_sealed FROM sandboxes WHERE id = $1 AND injections_sealed IS NOT NULL")
                .bind(id.as_str());
        let row: Option<SandboxInjections> = self.db.read_optional("read injections of a sandbox", query).await?;
        Ok(row.map(|row| row.sealed))
    }
}

/// The first row of a new sandbox.
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
        paused_us: None,
        kept: None,
        kept_bytes: None,
        resume_error: None,
        authority_of: new.authority_of,
    }
}

//! The statements that change rows of sandboxes.
//!
//! Each change names the states of rows in which it is made. They are those of [`model::lifecycle::row`], and written into
//! the statements from there.

use std::sync::LazyLock;

use model::id::SandboxId;
use model::lifecycle::State;
use model::lifecycle::row::RowChange;

use super::row::{SandboxRow, columns};
use crate::Change;
use crate::error::StoreError;
use crate::nodes::{NodeRows, held};
use crate::row::{Columns, FromColumns};
use crate::statement::Query;

/// The columns that a change of state sets besides the state and the version. Its arguments begin with `$4`.
fn set_by(change: RowChange) -> &'static str {
    match change {
        RowChange::Started => ", started_us = $4, end_us = $5, agent_version = $6",
        RowChange::Pausing => ", kept = $4, lifecycle_json = COALESCE($5, lifecycle_json)",
        RowChange::Paused => ", kept = $4, paused_us = $5, kept_bytes = $6, resume_error = $7",
        RowChange::Resuming => ", end_us = $4, max_end_us = $5, execution_id = $6, lifecycle_json = $7",
        RowChange::Running => ", started_us = $4, end_us = $5, agent_version = COALESCE($6, agent_version)",
        RowChange::Stopping | RowChange::Gone => "",
    }
}

/// What a change of state does, for errors.
pub(super) fn name_of(change: RowChange) -> &'static str {
    match change {
        RowChange::Started => "mark a sandbox as started",
        RowChange::Pausing => "mark a sandbox as being paused",
        RowChange::Paused => "mark a sandbox as paused",
        RowChange::Resuming => "mark a sandbox as being resumed",
        RowChange::Running => "mark a sandbox as running again",
        RowChange::Stopping | RowChange::Gone => "set the state of a sandbox",
    }
}

/// The statement of a change of state: `$1` id, `$2` version, `$3` key of the lease.
fn statement(change: RowChange) -> &'static str {
    static STATEMENTS: LazyLock<[String; RowChange::ALL.len()]> = LazyLock::new(|| {
        RowChange::ALL.map(|change| {
            let (state, set) = (change.state().as_str(), set_by(change));
            let set = format!("state = '{state}', version = version + 1{set}");
            update(
                &set,
                concat!("id = $1 AND version = $2 AND node_id = ", held!("$3")),
                change.sources(),
            )
        })
    });
    &STATEMENTS[change as usize]
}

/// A statement that changes settings in the row of a sandbox, in the states that allow it.
pub(super) fn update_settings(set: &str, condition: &str) -> String {
    update(
        set,
        condition,
        State::ALL.into_iter().filter(|state| state.takes_settings()),
    )
}

fn update(set: &str, condition: &str, states: impl Iterator<Item = State>) -> String {
    let states: Vec<String> = states.map(|state| format!("'{}'", state.as_str())).collect();
    format!(
        "UPDATE sandboxes SET {set} WHERE {condition} AND state IN ({}) RETURNING {}",
        states.join(", "),
        columns!()
    )
}

/// Decoded from a row whose existence is all that matters.
struct Present;

impl FromColumns for Present {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(_: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self)
    }
}

impl NodeRows {
    /// Changes the state of a sandbox at `version`, with a change that sets no other columns.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_change_state(
        &self,
        id: &SandboxId,
        version: i64,
        change: RowChange,
    ) -> Result<Change<SandboxRow>, StoreError> {
        self.change_state(id, version, change, |query| query).await
    }

    /// Changes the state of a sandbox at `version`. `bind` adds the arguments for the columns that the change sets.
    pub(super) async fn change_state(
        &self,
        id: &SandboxId,
        version: i64,
        change: RowChange,
        bind: impl FnOnce(Query) -> Query,
    ) -> Result<Change<SandboxRow>, StoreError> {
        let query = self.change_query(id, version, change, bind);
        self.change_row(id, name_of(change), query).await
    }

    /// The statement of [`Self::change_state`], which returns the row if it changes that.
    pub(super) fn change_query(
        &self,
        id: &SandboxId,
        version: i64,
        change: RowChange,
        bind: impl FnOnce(Query) -> Query,
    ) -> Query {
        let query = sqlx::query(statement(change))
            .bind(id.as_str().to_owned())
            .bind(version)
            .bind(self.lease_key.clone());
        bind(query)
    }

    /// Runs a conditional change, and finds out why when it changed nothing.
    pub(super) async fn change_row(
        &self,
        id: &SandboxId,
        what: &'static str,
        query: Query,
    ) -> Result<Change<SandboxRow>, StoreError> {
        let row = self.store.db.write_returning(what, query).await?;
        self.changed(id, what, row).await
    }

    /// What a conditional change has done that returned this row, or none.
    pub(super) async fn changed(
        &self,
        id: &SandboxId,
        what: &'static str,
        row: Option<SandboxRow>,
    ) -> Result<Change<SandboxRow>, StoreError> {
        if let Some(row) = row {
            return Ok(Change::Applied(row));
        }
        self.check_lease(what).await?;
        let present = sqlx::query("SELECT id FROM sandboxes WHERE id = $1 AND node_id = $2")
            .bind(id.as_str())
            .bind(self.node.as_str());
        Ok(match self.store.db.read_optional::<Present>(what, present).await? {
            Some(Present) => Change::Stale,
            None => Change::Missing,
        })
    }
}

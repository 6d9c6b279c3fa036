//! Changes by which a team has one more sandbox that runs or is paused, if that is within its limits on all nodes together.
//!
//! What a server knows of the nodes of others is some time old, so where there are several, the database decides. It decides about
//! one after another for each team, so that servers which do it at the same time see each other's. Nobody else acquires the lease of
//! the node meanwhile: a row that was committed after its next owner has listed the rows would stay without a sandbox.

use model::id::{SandboxId, TeamId};
use model::lifecycle::Kept;
use model::lifecycle::row::RowChange;

use super::NewSandbox;
use super::limits::{PausedMost, PausedUse, TeamMost, TeamShare, TeamUse};
use super::pause::Resumption;
use super::row::SandboxRow;
use crate::Change;
use crate::error::{StoreError, classify};
use crate::keys::SealedSecret;
use crate::nodes::NodeRows;
use crate::row::Columns;
use crate::statement::{InTransaction as _, Query, Transaction};

const INSERT: &str = "insert a sandbox";

impl NodeRows {
    /// As [`Self::sandbox_insert`], if the sandboxes of the team on all nodes, this one included, are no more than `most`. Otherwise
    /// nothing is stored, and the answer is what the team has.
    ///
    /// # Errors
    /// As [`Self::sandbox_insert`].
    pub async fn sandbox_insert_within(
        &self,
        new: NewSandbox,
        most: TeamMost,
    ) -> Result<Result<SandboxRow, TeamUse>, StoreError> {
        let (injections, environment) = (new.injections_sealed.clone(), new.environment_sealed.clone());
        let row = self.sandbox_unstored(new);
        self.insert_within(row, injections.as_ref(), environment.as_ref(), most)
            .await
    }

    /// As [`Self::sandbox_insert_running`], with the condition of [`Self::sandbox_insert_within`].
    ///
    /// # Errors
    /// As [`Self::sandbox_insert`].
    pub async fn sandbox_insert_running_within(
        &self,
        new: NewSandbox,
        started_us: i64,
        end_us: i64,
        agent_version: &str,
        most: TeamMost,
    ) -> Result<Result<SandboxRow, TeamUse>, StoreError> {
        let (injections, environment) = (new.injections_sealed.clone(), new.environment_sealed.clone());
        let row = self.running(new, started_us, end_us, agent_version)?;
        self.insert_within(row, injections.as_ref(), environment.as_ref(), most)
            .await
    }

    /// As [`Self::sandbox_resuming`], if what the sandbox takes of the limits of its team fits beside what that has on all nodes.
    /// Otherwise nothing is changed, and the answer is what the team has.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_resuming_within(
        &self,
        (id, team): (&SandboxId, &TeamId),
        version: i64,
        resumption: &Resumption,
        share: TeamShare,
        most: TeamMost,
    ) -> Result<Result<Change<SandboxRow>, TeamUse>, StoreError> {
        const CHANGE: RowChange = RowChange::Resuming;
        let what = super::change::name_of(CHANGE);
        let query = self.change_query(id, version, CHANGE, |query| resumption.bind(query));
        let tx = match self.begin_within(team, share, most, what).await? {
            Ok(tx) => tx,
            Err(used) => return Ok(Err(used)),
        };
        self.change_within(tx, query, id, what).await.map(Ok)
    }

    /// As [`Self::sandbox_pausing`], if the team may have another paused sandbox beside those that it has on all nodes. Otherwise nothing
    /// is changed, and the answer is what it has.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_pausing_within(
        &self,
        (id, team): (&SandboxId, &TeamId),
        version: i64,
        kept: Kept,
        lifecycle_json: Option<&str>,
        most: PausedMost,
    ) -> Result<Result<Change<SandboxRow>, PausedUse>, StoreError> {
        const CHANGE: RowChange = RowChange::Pausing;
        let what = super::change::name_of(CHANGE);
        let failed = |error: sqlx::Error| classify(&error, "sandbox", what);
        let query = self.change_query(id, version, CHANGE, |query| {
            query.bind(kept.as_str()).bind(lifecycle_json)
        });
        let mut tx = self.begin_for(team, what).await?;
        let used = sqlx::query(
            "SELECT COUNT(*) AS sandboxes, CAST(COALESCE(SUM((kept_bytes + 1048575) / 1048576), 0) AS BIGINT) AS disk_mb \
             FROM sandboxes WHERE team_id = $1 AND state IN ('pausing', 'paused')",
        )
        .bind(team.as_str().to_owned())
        .all_in(&mut tx)
        .await
        .map_err(failed)?;
        let used: PausedUse = used.first().map(Columns::decode).transpose()?.unwrap_or_default();
        if !most.has_room(used) {
            tx.commit().await.map_err(failed)?;
            return Ok(Err(used));
        }
        self.change_within(tx, query, id, what).await.map(Ok)
    }

    /// Changes a sandbox at the end of a transaction.
    async fn change_within(
        &self,
        mut tx: Transaction,
        query: Query,
        id: &SandboxId,
        what: &'static str,
    ) -> Result<Change<SandboxRow>, StoreError> {
        let failed = |error: sqlx::Error| classify(&error, "sandbox", what);
        let changed = query.all_in(&mut tx).await.map_err(failed)?;
        tx.commit().await.map_err(failed)?;
        let row = changed.first().map(Columns::decode).transpose()?;
        self.changed(id, what, row).await
    }

    /// Whether what a sandbox takes of the limits of its team fits beside what that has on all nodes. If not, the answer is what it has.
    /// Others may have taken it a moment later.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn team_has_room(
        &self,
        team: &TeamId,
        share: TeamShare,
        most: TeamMost,
    ) -> Result<Result<(), TeamUse>, StoreError> {
        const WHAT: &str = "compare the limits of a team";
        let tx = match self.begin_within(team, share, most, WHAT).await? {
            Ok(tx) => tx,
            Err(used) => return Ok(Err(used)),
        };
        tx.commit().await.map_err(|error| classify(&error, "sandbox", WHAT))?;
        Ok(Ok(()))
    }

    async fn insert_within(
        &self,
        row: SandboxRow,
        injections: Option<&SealedSecret>,
        environment: Option<&SealedSecret>,
        most: TeamMost,
    ) -> Result<Result<SandboxRow, TeamUse>, StoreError> {
        let insert = self.insert_query(&row, injections, environment)?;
        let share = TeamShare {
            cpu_count: row.cpu_count,
            memory_mb: row.memory_mb,
        };
        let mut tx = match self.begin_within(&row.team_id, share, most, INSERT).await? {
            Ok(tx) => tx,
            Err(used) => return Ok(Err(used)),
        };
        let failed = |error: sqlx::Error| classify(&error, "sandbox", INSERT);
        let stored = insert.execute_in(&mut tx).await.map_err(failed)?.rows_affected();
        tx.commit().await.map_err(failed)?;
        self.expect_lease(stored, INSERT)?;
        Ok(Ok(row))
    }

    /// Begins a transaction in which the team may have this much more; if it may not, the answer is what it has.
    async fn begin_within(
        &self,
        team: &TeamId,
        share: TeamShare,
        most: TeamMost,
        what: &'static str,
    ) -> Result<Result<Transaction, TeamUse>, StoreError> {
        let failed = |error: sqlx::Error| classify(&error, "sandbox", what);
        let mut tx = self.begin_for(team, what).await?;
        let used = sqlx::query(
            "SELECT COUNT(CASE WHEN state <> 'paused' THEN 1 END) AS sandboxes, \
             CAST(COALESCE(SUM(CASE WHEN state <> 'paused' THEN cpu_count ELSE 0 END), 0) AS BIGINT) AS cpu_count, \
             CAST(COALESCE(SUM(CASE WHEN state <> 'paused' OR kept = 'memory' THEN memory_mb ELSE 0 END), 0) AS BIGINT) \
             AS memory_mb FROM sandboxes WHERE team_id = $1 AND state <> 'gone'",
        )
        .bind(team.as_str().to_owned())
        .all_in(&mut tx)
        .await
        .map_err(failed)?;
        let used: TeamUse = used.first().map(Columns::decode).transpose()?.unwrap_or_default();
        if most.has_room(used, share) {
            return Ok(Ok(tx));
        }
        tx.commit().await.map_err(failed)?;
        Ok(Err(used))
    }

    /// Begins a transaction after all others that compare the limits of a team.
    async fn begin_for(&self, team: &TeamId, what: &'static str) -> Result<Transaction, StoreError> {
        let mut tx = self.store.db.begin(what).await?;
        sqlx::query(self.store.db.engine.team_lock())
            .bind(team.as_str().to_owned())
            .bind(self.lease_key.clone())
            .execute_in(&mut tx)
            .await
            .map_err(|error| classify(&error, "sandbox", what))?;
        Ok(tx)
    }
}

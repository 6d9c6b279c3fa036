//! Copies of paused sandboxes in the blob store, and the move of a sandbox to another node.
//!
//! A copy is that of one pause: it counts while the sandbox is paused in the execution that it was made of. A resume begins the next
//! execution before anything runs, so a copy that is older than what a sandbox has is never taken for it.
//!
//! The id of a copy that was found to be damaged ends with a mark. It counts as before, because what is missing in the blob store may be
//! restored there, and the node that has the sandbox makes another one. A server that does not know of the mark finds no such copy.

use model::id::{NodeId, OwnerId, SandboxId};
use model::lifecycle::Kept;

use super::row::{SandboxRow, columns};
use super::spawned::count_spawned;
use crate::Store;
use crate::error::{StoreError, classify};
use crate::keys::SealedSecret;
use crate::nodes::{NodeRows, held};
use crate::row::{Columns, FromColumns};
use crate::statement::InTransaction as _;

/// What the id of a damaged copy ends with. Statements name it as well.
const DAMAGED: char = '!';

/// What a row says of the copies of its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParcelRow {
    /// The key that they are encrypted under, sealed by the caller; none if there was none yet.
    pub key: Option<SealedSecret>,
    /// The copy of the current pause, if there is a complete one.
    pub current: Option<String>,
    /// Whether that was found to be damaged, and is to be made again.
    pub is_damaged: bool,
}

impl FromColumns for ParcelRow {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let run = columns.text_opt("parcel_run")?;
        let is_current = run.is_some_and(|run| columns.text("execution_id").is_ok_and(|now| now == run));
        let is_paused = columns.text("state")? == "paused";
        let current = columns.text_opt("parcel_id")?.filter(|_| is_current && is_paused);
        Ok(Self {
            key: columns.text_opt("parcel_key_sealed")?.map(SealedSecret::new),
            is_damaged: current.as_ref().is_some_and(|id| id.ends_with(DAMAGED)),
            current: current.map(|id| id.trim_end_matches(DAMAGED).to_owned()),
        })
    }
}

/// The key of a row.
struct Key(SealedSecret);

impl FromColumns for Key {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self(SealedSecret::new(columns.text("parcel_key_sealed")?)))
    }
}

/// The id of a row.
struct Id(SandboxId);

impl FromColumns for Id {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self(columns.id("id")?))
    }
}

/// The node that a sandbox leaves.
#[derive(Debug, Clone)]
pub enum Leaving<'a> {
    /// One whose lease the caller has.
    Held(&'a NodeRows),
    /// One whose lease nobody has but the owner, which does not use it.
    Free {
        /// The node.
        node: NodeId,
        /// How often its lease was acquired when the caller found out that the node is not served.
        epoch: i64,
        /// The owner of the caller's leases.
        owner: OwnerId,
        /// The current time, in microseconds since the Unix epoch.
        now_us: i64,
    },
}

impl Leaving<'_> {
    fn node(&self) -> &NodeId {
        match self {
            Self::Held(rows) => &rows.node,
            Self::Free { node, .. } => node,
        }
    }
}

/// A paused sandbox that moves to another node.
#[derive(Debug, Clone, Copy)]
pub struct Move<'a> {
    /// The sandbox.
    pub id: &'a SandboxId,
    /// The version of its row that was read.
    pub version: i64,
    /// The copy that it was made of on the other node.
    pub parcel: &'a str,
    /// What is kept of it there.
    pub kept: Kept,
    /// Space that it takes there, in bytes.
    pub kept_bytes: i64,
}

impl NodeRows {
    /// Returns the key of a sandbox's copies, after storing `sealed` if it had none; none if there is no such sandbox.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_parcel_key(
        &self,
        id: &SandboxId,
        sealed: &SealedSecret,
    ) -> Result<Option<SealedSecret>, StoreError> {
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET parcel_key_sealed = COALESCE(parcel_key_sealed, $2) WHERE id = $1 AND node_id = ",
            held!("$3"),
            " RETURNING parcel_key_sealed"
        ))
        .bind(id.as_str())
        .bind(sealed.as_str().to_owned())
        .bind(self.lease_key.clone());
        let key = self.store.db.write_returning("store the key of copies", query).await?;
        Ok(key.map(|Key(sealed)| sealed))
    }

    /// Notes that a complete copy of a sandbox is in the blob store, if it is paused in that execution still. Returns whether it is.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_packed(&self, id: &SandboxId, execution: &str, parcel: &str) -> Result<bool, StoreError> {
        let query = sqlx::query(concat!(
            "UPDATE sandboxes SET parcel_id = $2, parcel_run = $3 \
             WHERE id = $1 AND execution_id = $3 AND state = 'paused' AND kept <> 'memory' AND node_id = ",
            held!("$4")
        ))
        .bind(id.as_str())
        .bind(parcel.to_owned())
        .bind(execution.to_owned())
        .bind(self.lease_key.clone());
        let changed = self
            .store
            .db
            .write("sandbox", "note the copy of a sandbox", query)
            .await?;
        Ok(changed > 0)
    }

    /// The sandboxes of the node that are paused on disk: those with a complete copy of that, or those without. One that is damaged is
    /// told either time.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_list_packed(&self, with_copy: bool) -> Result<Vec<SandboxId>, StoreError> {
        let query = sqlx::query(
            "SELECT id FROM sandboxes WHERE node_id = $1 AND state = 'paused' AND kept <> 'memory' \
             AND ((CASE WHEN parcel_run = execution_id THEN 1 ELSE 0 END) = $2 OR ($2 = 0 AND parcel_id LIKE '%!'))",
        )
        .bind(self.node.as_str())
        .bind(i64::from(with_copy));
        let ids: Vec<Id> = self.store.db.read_all("list copies of sandboxes", query).await?;
        Ok(ids.into_iter().map(|Id(id)| id).collect())
    }

    /// Makes a paused sandbox of another node one of this node, where it was made of its current copy. Nobody acquires either lease
    /// meanwhile, so whoever takes one of the nodes over reads the row as it is before or after this. Returns the row; none if the
    /// sandbox, its copy, or who serves the nodes has changed.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_take(&self, moved: Move<'_>, from: &Leaving<'_>) -> Result<Option<SandboxRow>, StoreError> {
        const WHAT: &str = "move a sandbox to another node";
        let failed = |error: sqlx::Error| classify(&error, "sandbox", WHAT);
        let mut tx = self.store.db.begin(WHAT).await?;
        let engine = self.store.db.engine;
        let lock = match from {
            Leaving::Held(rows) => sqlx::query(engine.lock_of_move())
                .bind(rows.lease_key.clone())
                .bind(self.lease_key.clone()),
            Leaving::Free {
                node,
                epoch,
                owner,
                now_us,
            } => sqlx::query(engine.lock_of_move_from_free())
                .bind(node.as_str().to_owned())
                .bind(self.lease_key.clone())
                .bind(*epoch)
                .bind(*now_us)
                .bind(owner.as_str().to_owned()),
        };
        if lock.optional_in(&mut tx).await.map_err(failed)?.is_none() {
            tx.commit().await.map_err(failed)?;
            return Ok(None);
        }
        let update = sqlx::query(concat!(
            "UPDATE sandboxes SET node_id = $1, version = version + 1, kept = $2, kept_bytes = $3 \
             WHERE id = $4 AND version = $5 AND node_id = $6 AND state = 'paused' \
             AND (parcel_id = $7 OR parcel_id = $7 || '!') AND parcel_run = execution_id RETURNING ",
            columns!()
        ))
        .bind(self.node.as_str().to_owned())
        .bind(moved.kept.as_str())
        .bind(moved.kept_bytes)
        .bind(moved.id.as_str().to_owned())
        .bind(moved.version)
        .bind(from.node().as_str().to_owned())
        .bind(moved.parcel.to_owned());
        let row = update.optional_in(&mut tx).await.map_err(failed)?;
        let row = row.as_ref().map(Columns::decode).transpose()?;
        tx.commit().await.map_err(failed)?;
        // The node that had it throws it away from now on, so this must not be lost with the power.
        self.sync().await?;
        Ok(row)
    }
}

impl Store {
    /// Deletes a paused sandbox at `version` of a node whose lease nobody has, if it has a current copy: whoever takes the node over has
    /// it throw away what it kept. Returns whether it was deleted; not for a node whose lease the caller has.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_delete_left(
        &self,
        id: &SandboxId,
        version: i64,
        from: &Leaving<'_>,
    ) -> Result<bool, StoreError> {
        const WHAT: &str = "delete a sandbox of a node that is away";
        let failed = |error: sqlx::Error| classify(&error, "sandbox", WHAT);
        let Leaving::Free {
            node,
            epoch,
            owner,
            now_us,
        } = from
        else {
            return Ok(false);
        };
        let mut tx = self.db.begin(WHAT).await?;
        let lock = sqlx::query(self.db.engine.lock_of_free())
            .bind(node.as_str().to_owned())
            .bind(*epoch)
            .bind(*now_us)
            .bind(owner.as_str().to_owned());
        if lock.optional_in(&mut tx).await.map_err(failed)?.is_none() {
            tx.commit().await.map_err(failed)?;
            return Ok(false);
        }
        let delete = sqlx::query(concat!(
            "DELETE FROM sandboxes WHERE id = $1 AND version = $2 AND node_id = $3 AND state = 'paused' \
             AND parcel_run = execution_id RETURNING ",
            columns!()
        ))
        .bind(id.as_str().to_owned())
        .bind(version)
        .bind(node.as_str().to_owned());
        let row = delete.optional_in(&mut tx).await.map_err(failed)?;
        let row: Option<SandboxRow> = row.as_ref().map(Columns::decode).transpose()?;
        if let Some(row) = &row {
            count_spawned(&mut tx, row).await.map_err(failed)?;
        }
        tx.commit().await.map_err(failed)?;
        Ok(row.is_some())
    }

    /// Notes that a copy is damaged, if it is that of the current pause of a sandbox of any owner, and has not been noted. Returns
    /// whether it is. This needs no lease: who has the node makes another copy, and nothing else changes.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_parcel_damaged(&self, id: &SandboxId, parcel: &str) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE sandboxes SET parcel_id = parcel_id || '!' \
             WHERE id = $1 AND parcel_id = $2 AND state = 'paused' AND parcel_run = execution_id",
        )
        .bind(id.as_str())
        .bind(parcel.to_owned());
        let changed = self.db.write("sandbox", "note that a copy is damaged", query).await?;
        Ok(changed > 0)
    }

    /// What there is of copies of a sandbox of any owner; none if there is no such sandbox.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn sandbox_parcel(&self, id: &SandboxId) -> Result<Option<ParcelRow>, StoreError> {
        let query = sqlx::query(
            "SELECT parcel_key_sealed, parcel_id, parcel_run, execution_id, state FROM sandboxes WHERE id = $1",
        )
        .bind(id.as_str());
        self.db.read_optional("find the copy of a sandbox", query).await
    }
}

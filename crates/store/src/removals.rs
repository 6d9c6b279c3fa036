//! Removals of objects from the blob store, announced by the node that removes.
//!
//! No S3 server in general deletes an object only if it is still the one that was seen, so nodes agree here. A node
//! announces a removal, looks once more whether the object is needed, deletes it and says so. A node that stores an
//! object, or finds that it is stored, looks before and after: if the announcement is the same, nothing was removed in
//! between, and otherwise it does it again.

use crate::Store;
use crate::error::StoreError;
use crate::row::{Columns, FromColumns, storable};

/// The last announced removal of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removal {
    /// Its random number.
    pub id: i64,
    /// When it was announced, in microseconds since the Unix epoch.
    pub begun_us: i64,
    /// When the removal ended, in microseconds since the Unix epoch; none if it has not, or the node was killed.
    pub ended_us: Option<i64>,
}

impl FromColumns for Removal {
    const TABLE: &'static str = "blob_removals";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.int("id")?,
            begun_us: columns.int("begun_us")?,
            ended_us: columns.int_opt("ended_us")?,
        })
    }
}

impl Store {
    /// Announces the removal of an object. `false` when another one has not ended, unless it was announced before
    /// `expired_us`.
    pub async fn removal_begin(&self, name: &str, id: i64, now_us: i64, expired_us: i64) -> Result<bool, StoreError> {
        storable("name of an object", name)?;
        let query = sqlx::query(
            "INSERT INTO blob_removals (name, id, begun_us) VALUES ($1, $2, $3) \
             ON CONFLICT (name) DO UPDATE SET id = excluded.id, begun_us = excluded.begun_us, ended_us = NULL \
             WHERE blob_removals.ended_us IS NOT NULL OR blob_removals.begun_us < $4",
        )
        .bind(name)
        .bind(id)
        .bind(now_us)
        .bind(expired_us);
        Ok(self.db.write("removal", "announce a removal", query).await? > 0)
    }

    /// Notes that a removal has ended, also one that removed nothing.
    pub async fn removal_end(&self, name: &str, id: i64, now_us: i64) -> Result<(), StoreError> {
        let query = sqlx::query("UPDATE blob_removals SET ended_us = $3 WHERE name = $1 AND id = $2")
            .bind(name)
            .bind(id)
            .bind(now_us);
        self.db.write("removal", "end a removal", query).await?;
        Ok(())
    }

    /// The last announced removal of an object.
    pub async fn removal_find(&self, name: &str) -> Result<Option<Removal>, StoreError> {
        let query = sqlx::query("SELECT id, begun_us, ended_us FROM blob_removals WHERE name = $1").bind(name);
        self.db.read_optional("find a removal", query).await
    }

    /// Forgets the removals that were announced before a time.
    pub async fn removal_purge(&self, before_us: i64) -> Result<(), StoreError> {
        let query = sqlx::query("DELETE FROM blob_removals WHERE begun_us < $1").bind(before_us);
        self.db.write("removal", "forget removals", query).await?;
        Ok(())
    }
}

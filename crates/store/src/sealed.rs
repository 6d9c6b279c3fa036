//! Sealed columns: everything that the caller encrypted, so that it can be encrypted again under another key.
//!
//! A new table with a secret gets a line in [`SEALED`]; otherwise its secrets are lost when the key is replaced.

use sqlx::Row;
use sqlx::any::AnyRow;

use crate::Store;
use crate::error::{StoreError, classify};
use crate::statement::InTransaction as _;

/// A column that holds sealed text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SealedColumn {
    /// The table.
    pub table: &'static str,
    /// Whether the column is JSON, in which the values of keys that end in `Sealed` are sealed, and not one sealed text.
    pub is_json: bool,
    select: &'static str,
    update: &'static str,
    /// Gives up what the row holds, at the time `$2`; none if that cannot be said of it.
    drop: Option<&'static str>,
}

/// What becomes of a sealed text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resealed {
    /// The secret stays.
    Keep,
    /// The secret is replaced by this text.
    Replace(String),
    /// The secret is given up: a key is revoked, and anything else is deleted. Settings of a network stay.
    Drop,
}

/// All columns with sealed text. Those of revoked keys stay as they are: nobody reads them.
const SEALED: &[SealedColumn] = &[
    SealedColumn {
        table: "access_keys",
        is_json: false,
        select: "SELECT id AS row_key, secret_sealed AS sealed FROM access_keys WHERE revoked_us IS NULL",
        update: "UPDATE access_keys SET secret_sealed = $2 WHERE id = $1",
        drop: Some("UPDATE access_keys SET revoked_us = $2 WHERE id = $1"),
    },
    SealedColumn {
        table: "platform_secrets",
        is_json: false,
        select: "SELECT name AS row_key, value_sealed AS sealed FROM platform_secrets",
        update: "UPDATE platform_secrets SET value_sealed = $2 WHERE name = $1",
        drop: Some("DELETE FROM platform_secrets WHERE name = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "injection_rules",
        is_json: false,
        select: "SELECT id AS row_key, injection_sealed AS sealed FROM injection_rules",
        update: "UPDATE injection_rules SET injection_sealed = $2 WHERE id = $1",
        drop: Some("DELETE FROM injection_rules WHERE id = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "secrets",
        is_json: false,
        select: "SELECT id AS row_key, value_sealed AS sealed FROM secrets",
        update: "UPDATE secrets SET value_sealed = $2 WHERE id = $1",
        drop: Some("DELETE FROM secrets WHERE id = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "webhooks",
        is_json: false,
        select: "SELECT id AS row_key, secret_sealed AS sealed FROM webhooks",
        update: "UPDATE webhooks SET secret_sealed = $2 WHERE id = $1",
        // What waits for it is dropped when it is found to be gone.
        drop: Some("DELETE FROM webhooks WHERE id = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "builds",
        is_json: false,
        select: "SELECT id AS row_key, registry_sealed AS sealed FROM builds WHERE registry_sealed IS NOT NULL",
        update: "UPDATE builds SET registry_sealed = $2 WHERE id = $1",
        drop: Some("UPDATE builds SET registry_sealed = NULL WHERE id = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "builds",
        is_json: false,
        select: "SELECT id AS row_key, memory_key_sealed AS sealed FROM builds WHERE memory_key_sealed IS NOT NULL",
        update: "UPDATE builds SET memory_key_sealed = $2 WHERE id = $1",
        drop: Some("UPDATE builds SET memory_key_sealed = NULL WHERE id = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "fork_memories",
        is_json: false,
        select: "SELECT build_id AS row_key, memory_key_sealed AS sealed FROM fork_memories",
        update: "UPDATE fork_memories SET memory_key_sealed = $2 WHERE build_id = $1",
        // Its fork has ended with the server that was stopped for this.
        drop: Some("DELETE FROM fork_memories WHERE build_id = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "sandboxes.injections",
        is_json: false,
        select: "SELECT id AS row_key, injections_sealed AS sealed FROM sandboxes WHERE injections_sealed IS NOT NULL",
        update: "UPDATE sandboxes SET injections_sealed = $2 WHERE id = $1",
        drop: Some("UPDATE sandboxes SET injections_sealed = NULL WHERE id = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "sandboxes.environment",
        is_json: false,
        select: "SELECT id AS row_key, environment_sealed AS sealed FROM sandboxes WHERE environment_sealed IS NOT NULL",
        update: "UPDATE sandboxes SET environment_sealed = $2 WHERE id = $1",
        drop: Some("UPDATE sandboxes SET environment_sealed = NULL WHERE id = $1 AND $2 > 0"),
    },
    SealedColumn {
        table: "sandboxes.parcel_key",
        is_json: false,
        select: "SELECT id AS row_key, parcel_key_sealed AS sealed FROM sandboxes WHERE parcel_key_sealed IS NOT NULL",
        update: "UPDATE sandboxes SET parcel_key_sealed = $2 WHERE id = $1",
        // What is encrypted under it is replaced at the next pause.
        drop: Some(
            "UPDATE sandboxes SET parcel_key_sealed = NULL, parcel_id = NULL, parcel_run = NULL WHERE id = $1 AND $2 > 0",
        ),
    },
    SealedColumn {
        table: "sandboxes.network",
        is_json: true,
        select: "SELECT id AS row_key, network_json AS sealed FROM sandboxes WHERE network_json IS NOT NULL",
        update: "UPDATE sandboxes SET network_json = $2 WHERE id = $1",
        drop: None,
    },
];

/// Why sealed columns were not encrypted again. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ResealError<E> {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The caller refused a text.
    #[error(transparent)]
    Refused(E),
    /// A server works with the database.
    #[error("a platform uses the database (node {name}): stop it first; sandboxes keep running")]
    InUse {
        /// The name of its host.
        name: String,
    },
}

impl Store {
    /// Returns the sealed secret of the platform with this name, after storing `sealed` if there was none. Several
    /// servers that do this at once get the same.
    pub async fn platform_secret(&self, name: &'static str, sealed: &str) -> Result<String, StoreError> {
        const WHAT: &str = "read a secret of the platform";
        let find = || sqlx::query("SELECT value_sealed AS value FROM platform_secrets WHERE name = $1").bind(name);
        if let Some(found) = self.db.read_optional(WHAT, find()).await? {
            return Ok(found);
        }
        let insert = sqlx::query(
            "INSERT INTO platform_secrets (name, value_sealed) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING",
        )
        .bind(name)
        .bind(sealed.to_owned());
        self.db.write_durably("secret", WHAT, insert).await?;
        let stored = self.db.read_optional(WHAT, find()).await?;
        Ok(stored.unwrap_or_else(|| sealed.to_owned()))
    }

    /// Replaces sealed texts, all or none, while no server has a lease. `reseal` gets the column, the key of the row and
    /// the text, and decides. Returns how many were replaced or given up.
    ///
    /// # Errors
    /// When a server uses the database, `reseal` refuses a text, or the database fails. Then nothing was changed.
    pub async fn reseal<E>(
        &self,
        now_us: i64,
        mut reseal: impl FnMut(&SealedColumn, &str, &str) -> Result<Resealed, E> + Send,
    ) -> Result<u64, ResealError<E>> {
        const WHAT: &str = "replace sealed texts";
        let lease_time_us = self.lease_time_us(now_us).await?;
        let mut tx = self.db.begin(WHAT).await?;
        let failed = |error: sqlx::Error| ResealError::Store(classify(&error, "secret", WHAT));
        let leased = sqlx::query("SELECT name FROM nodes WHERE lease_owner IS NOT NULL AND lease_until_us > $1")
            .bind(lease_time_us)
            .all_in(&mut tx)
            .await
            .map_err(failed)?;
        if let Some(row) = leased.first() {
            let name = text(row, "nodes", "name")?;
            return Err(ResealError::InUse { name });
        }
        let mut replaced = 0;
        for column in SEALED {
            let rows = sqlx::query(column.select).all_in(&mut tx).await.map_err(failed)?;
            for row in rows {
                let key = text(&row, column.table, "row_key")?;
                let sealed = text(&row, column.table, "sealed")?;
                let query = match reseal(column, &key, &sealed).map_err(ResealError::Refused)? {
                    Resealed::Keep => continue,
                    Resealed::Replace(new) => sqlx::query(column.update).bind(key).bind(new),
                    Resealed::Drop => match column.drop {
                        None => continue,
                        Some(drop) => sqlx::query(drop).bind(key).bind(now_us),
                    },
                };
                query.execute_in(&mut tx).await.map_err(failed)?;
                replaced += 1;
            }
        }
        tx.commit().await.map_err(failed)?;
        self.db.sync(WHAT).await?;
        Ok(replaced)
    }
}

fn text(row: &AnyRow, table: &'static str, column: &'static str) -> Result<String, StoreError> {
    row.try_get(column).map_err(|_| StoreError::Corrupt { table, column })
}

//! What steps of builds left behind, so that the same step is not run again. An entry belongs to a team and to the node
//! that has its layer.

use model::id::{LayerId, TeamId};

use crate::Store;
use crate::error::StoreError;
use crate::nodes::{NodeRows, held};
use crate::row::{Columns, FromColumns, storable};

/// What a step left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedLayerRow {
    /// The layer that the step wrote.
    pub layer: LayerId,
    /// Space that the layer takes, in bytes.
    pub bytes: i64,
    /// What the next step needs to know, in a format of the caller.
    pub state_json: String,
}

impl FromColumns for CachedLayerRow {
    const TABLE: &'static str = "layer_cache";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            layer: columns.id("layer_id")?,
            bytes: columns.int("bytes")?,
            state_json: columns.text("state_json")?,
        })
    }
}

impl NodeRows {
    /// Finds an entry, and notes that it was used.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_cache_find(
        &self,
        team: &TeamId,
        key: &str,
        now_us: i64,
    ) -> Result<Option<CachedLayerRow>, StoreError> {
        storable("key of a layer", key)?;
        let query = sqlx::query(concat!(
            "UPDATE layer_cache SET used_us = $4 WHERE node_id = ",
            held!("$1"),
            " AND team_id = $2 AND key = $3 \
             RETURNING layer_id, bytes, state_json"
        ))
        .bind(self.lease_key.clone())
        .bind(team.as_str())
        .bind(key)
        .bind(now_us);
        self.store.db.write_returning("find a cached layer", query).await
    }

    /// Stores an entry, in place of one with the same key.
    ///
    /// # Errors
    /// When the database fails, or there is no such team.
    pub async fn layer_cache_put(
        &self,
        team: &TeamId,
        key: &str,
        row: &CachedLayerRow,
        now_us: i64,
    ) -> Result<(), StoreError> {
        storable("key of a layer", key)?;
        storable("state of a layer", &row.state_json)?;
        let query = sqlx::query(
            "INSERT INTO layer_cache (node_id, team_id, key, layer_id, bytes, state_json, used_us) \
             SELECT id, $2, $3, $4, $5, $6, $7 FROM nodes WHERE lease_key = $1 ON CONFLICT (node_id, team_id, key) DO UPDATE SET \
             layer_id = excluded.layer_id, bytes = excluded.bytes, state_json = excluded.state_json, \
             used_us = excluded.used_us",
        )
        .bind(self.lease_key.clone())
        .bind(team.as_str())
        .bind(key)
        .bind(row.layer.as_str())
        .bind(row.bytes)
        .bind(row.state_json.as_str())
        .bind(now_us);
        const WHAT: &str = "store a cached layer";
        let stored = self.store.db.write_durably("cached layer", WHAT, query).await?;
        self.expect_lease(stored, WHAT)
    }

    /// Removes the entries that were not used since a time, and then those that were used longest ago until the layers
    /// of the others take at most `most_bytes`. Returns how many were removed.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_cache_purge(&self, unused_since_us: i64, most_bytes: i64) -> Result<u64, StoreError> {
        let query = sqlx::query(concat!(
            "DELETE FROM layer_cache WHERE node_id = ",
            held!("$1"),
            " AND (used_us < $2 OR (team_id, key) IN (\
             SELECT team_id, key FROM (SELECT team_id, key, SUM(bytes) OVER (ORDER BY used_us DESC, team_id, key) \
             AS total FROM layer_cache WHERE node_id = ",
            held!("$1"),
            ") sized WHERE total > $3))"
        ))
        .bind(self.lease_key.clone())
        .bind(unused_since_us)
        .bind(most_bytes);
        self.store.db.write("cached layer", "purge cached layers", query).await
    }

    /// Removes the entries of a layer, which is lost.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_cache_forget(&self, layer: &LayerId) -> Result<u64, StoreError> {
        let query = sqlx::query(concat!(
            "DELETE FROM layer_cache WHERE node_id = ",
            held!("$1"),
            " AND layer_id = $2"
        ))
        .bind(self.lease_key.clone())
        .bind(layer.as_str());
        self.store
            .db
            .write("cached layer", "forget a cached layer", query)
            .await
    }

    /// The layers of all entries of the node.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_cache_layers(&self) -> Result<Vec<String>, StoreError> {
        let query = sqlx::query("SELECT DISTINCT layer_id AS value FROM layer_cache WHERE node_id = $1")
            .bind(self.node.as_str());
        self.store.db.read_all("list cached layers", query).await
    }

    /// What refers to layers of the node besides the cache: the specs of builds from which a sandbox was or can be
    /// started, and the recipes of builds that have not ended. Templates that were deleted after `deleted_us` count as
    /// if they were not.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_references(&self, deleted_us: i64) -> Result<Vec<String>, StoreError> {
        let query = sqlx::query(
            "SELECT b.spec_json AS value FROM builds b JOIN templates t ON t.id = b.template_id \
             WHERE b.spec_json IS NOT NULL AND (b.node_id = $1 OR b.node_id IS NULL) AND (t.deleted_us IS NULL \
             OR t.deleted_us > $2 OR EXISTS (SELECT 1 FROM sandboxes s WHERE s.build_id = b.id)) \
             UNION ALL SELECT b.recipe_json AS value FROM builds b WHERE b.recipe_json IS NOT NULL \
             AND b.node_id = $1 AND b.status IN ('waiting', 'building')",
        )
        .bind(self.node.as_str())
        .bind(deleted_us);
        self.store.db.read_all("list references to layers", query).await
    }

    /// The specs of the builds that sandboxes, on whatever node, were started from which have not ended.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_references_of_sandboxes(&self) -> Result<Vec<String>, StoreError> {
        let query = sqlx::query(
            "SELECT b.spec_json AS value FROM builds b WHERE b.spec_json IS NOT NULL \
             AND EXISTS (SELECT 1 FROM sandboxes s WHERE s.build_id = b.id)",
        );
        self.store.db.read_all("list layers of sandboxes", query).await
    }

    /// The specs of the finished builds of the node with the teams that own them, deleted templates excluded.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_references_by_team(&self) -> Result<Vec<(TeamId, String)>, StoreError> {
        let query = sqlx::query(
            "SELECT t.team_id, b.spec_json AS value FROM builds b JOIN templates t ON t.id = b.template_id \
             WHERE b.spec_json IS NOT NULL AND b.node_id = $1 AND t.deleted_us IS NULL AND t.team_id IS NOT NULL",
        )
        .bind(self.node.as_str());
        self.store.db.read_all("list layers of teams", query).await
    }

    /// The layers of all entries of the node with the teams that own them.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_cache_by_team(&self) -> Result<Vec<(TeamId, String)>, StoreError> {
        let query = sqlx::query("SELECT DISTINCT team_id, layer_id AS value FROM layer_cache WHERE node_id = $1")
            .bind(self.node.as_str());
        self.store.db.read_all("list cached layers of teams", query).await
    }
}

impl Store {
    /// As [`NodeRows::layer_cache_layers`], of all nodes.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_cache_layers_of_all(&self) -> Result<Vec<String>, StoreError> {
        let query = sqlx::query("SELECT DISTINCT layer_id AS value FROM layer_cache");
        self.db.read_all("list cached layers", query).await
    }

    /// As [`NodeRows::layer_references_by_team`], of all nodes.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_references_by_team_of_all(&self) -> Result<Vec<(TeamId, String)>, StoreError> {
        let query = sqlx::query(
            "SELECT t.team_id, b.spec_json AS value FROM builds b JOIN templates t ON t.id = b.template_id \
             WHERE b.spec_json IS NOT NULL AND t.deleted_us IS NULL AND t.team_id IS NOT NULL",
        );
        self.db.read_all("list layers of teams", query).await
    }

    /// As [`NodeRows::layer_references`], of the builds of all nodes.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn layer_references_of_all(&self, deleted_us: i64) -> Result<Vec<String>, StoreError> {
        let query = sqlx::query(
            "SELECT b.spec_json AS value FROM builds b JOIN templates t ON t.id = b.template_id \
             WHERE b.spec_json IS NOT NULL AND (t.deleted_us IS NULL OR t.deleted_us > $1 \
             OR EXISTS (SELECT 1 FROM sandboxes s WHERE s.build_id = b.id)) \
             UNION ALL SELECT b.recipe_json AS value FROM builds b WHERE b.recipe_json IS NOT NULL \
             AND b.status IN ('waiting', 'building')",
        )
        .bind(deleted_us);
        self.db.read_all("list references to layers", query).await
    }
}

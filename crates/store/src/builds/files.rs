//! Archives that clients uploaded for builds. The content is in the data directory of the node.

use model::id::TeamId;

use crate::Store;
use crate::error::StoreError;
use crate::nodes::{NodeRows, held};
use crate::row::{Columns, FromColumns, storable};

/// An uploaded archive with files of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRow {
    /// The team that uploaded the archive.
    pub team_id: TeamId,
    /// The hash by which its client named the archive.
    pub hash: String,
    /// Size of the archive.
    pub bytes: i64,
}

impl FromColumns for FileRow {
    const TABLE: &'static str = "template_files";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            team_id: columns.id("team_id")?,
            hash: columns.text("hash")?,
            bytes: columns.int("bytes")?,
        })
    }
}

impl Store {
    /// The teams and hashes of the archives of all nodes.
    pub async fn template_file_names(&self) -> Result<Vec<(TeamId, String)>, StoreError> {
        let query = sqlx::query("SELECT DISTINCT team_id, hash AS value FROM template_files");
        self.db.read_all("list uploaded files", query).await
    }

    /// Whether a node has an archive of a team.
    pub async fn template_file_exists(&self, team: &TeamId, hash: &str) -> Result<bool, StoreError> {
        storable("hash of files", hash)?;
        let query = sqlx::query("SELECT hash AS value FROM template_files WHERE team_id = $1 AND hash = $2 LIMIT 1")
            .bind(team.as_str())
            .bind(hash);
        let found: Option<String> = self.db.read_optional("find an uploaded file", query).await?;
        Ok(found.is_some())
    }
}

impl NodeRows {
    /// Notes that an archive was stored, also when it was stored before.
    ///
    /// # Errors
    /// When the database fails, or there is no such team.
    pub async fn template_file_put(&self, file: &FileRow, now_us: i64) -> Result<(), StoreError> {
        storable("hash of files", &file.hash)?;
        let query = sqlx::query(
            "INSERT INTO template_files (node_id, team_id, hash, bytes, used_us) \
             SELECT id, $2, $3, $4, $5 FROM nodes WHERE lease_key = $1 ON CONFLICT (node_id, team_id, hash) DO UPDATE SET bytes = excluded.bytes, used_us = excluded.used_us",
        )
        .bind(self.lease_key.clone())
        .bind(file.team_id.as_str())
        .bind(file.hash.as_str())
        .bind(file.bytes)
        .bind(now_us);
        const WHAT: &str = "store an uploaded file";
        let stored = self.store.db.write_durably("uploaded file", WHAT, query).await?;
        self.expect_lease(stored, WHAT)
    }

    /// Finds an archive, and notes that it was used.
    pub async fn template_file_find(
        &self,
        team: &TeamId,
        hash: &str,
        now_us: i64,
    ) -> Result<Option<FileRow>, StoreError> {
        storable("hash of files", hash)?;
        let query = sqlx::query(concat!(
            "UPDATE template_files SET used_us = $4 WHERE node_id = ",
            held!("$1"),
            " AND team_id = $2 AND hash = $3 RETURNING team_id, hash, bytes"
        ))
        .bind(self.lease_key.clone())
        .bind(team.as_str())
        .bind(hash)
        .bind(now_us);
        self.store.db.write_returning("find an uploaded file", query).await
    }

    /// The size of all archives of a team on this node, in bytes.
    pub async fn template_file_total(&self, team: &TeamId) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) AS value FROM template_files \
             WHERE node_id = $1 AND team_id = $2",
        )
        .bind(self.node.as_str())
        .bind(team.as_str());
        self.store.db.read_number("measure uploaded files", query).await
    }

    /// The size of all archives of each team on this node, in bytes.
    pub async fn template_file_totals(&self) -> Result<Vec<(TeamId, u64)>, StoreError> {
        let query = sqlx::query(
            "SELECT team_id, CAST(SUM(bytes) AS BIGINT) AS value FROM template_files WHERE node_id = $1 GROUP BY team_id",
        )
        .bind(self.node.as_str());
        self.store.db.read_all("measure uploaded files", query).await
    }

    /// Removes the row of an archive that was not used since a time, and returns it; none if there is no such row.
    pub async fn template_file_take_unused(&self, unused_since_us: i64) -> Result<Option<FileRow>, StoreError> {
        let query = sqlx::query(concat!(
            "DELETE FROM template_files WHERE node_id = ",
            held!("$1"),
            " AND (team_id, hash) IN (SELECT team_id, hash FROM template_files WHERE node_id = ",
            held!("$1"),
            " AND used_us < $2 ORDER BY used_us LIMIT 1) RETURNING team_id, hash, bytes"
        ))
        .bind(self.lease_key.clone())
        .bind(unused_since_us);
        self.store.db.write_returning("remove an uploaded file", query).await
    }
}

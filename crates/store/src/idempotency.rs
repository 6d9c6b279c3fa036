//! Idempotency keys: which request with a key came first, and its response.
//!
//! A key belongs to a team and is claimed before anything is created, together with the id of the sandbox that the
//! request will create. So the outcome is known even after a crash: the sandbox runs, or it does not. A stored response
//! contains no secrets; its tokens are derived from the sandbox's id again.
//!
//! The former owner of a claim that ended (completed, abandoned, or expired and acquired by another request) cannot
//! change it any more, because every change names the sandbox of the claim.

use model::id::{NodeId, SandboxId, TeamId};

use crate::Store;
use crate::error::StoreError;
use crate::nodes::NodeRows;
use crate::row::{Columns, FromColumns, storable};

/// A claim of a key by a new request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIdempotencyKey {
    /// The team of the request.
    pub team_id: TeamId,
    /// The key that the client chose.
    pub key: String,
    /// A digest of the request. The caller computes it with a secret, because requests contain secrets.
    pub body_hash: String,
    /// The sandbox that the request will create.
    pub sandbox_id: SandboxId,
    /// When the request arrived, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When the key expires, in microseconds since the Unix epoch.
    pub expires_us: i64,
}

/// A claimed key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyRow {
    /// The team of the request.
    pub team_id: TeamId,
    /// The key that the client chose.
    pub key: String,
    /// The digest of the request that claimed the key.
    pub body_hash: String,
    /// The sandbox of the request.
    pub sandbox_id: SandboxId,
    /// The node whose server handles the request; none in a row of a version that did not know nodes.
    pub node_id: Option<NodeId>,
    /// The response; none while the request is in progress.
    pub response: Option<StoredResponse>,
    /// When the request arrived, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// When the key expires, in microseconds since the Unix epoch.
    pub expires_us: i64,
}

/// The stored part of a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredResponse {
    /// The HTTP status.
    pub status: u32,
    /// The content from which the body is built again, in a format of the caller. No secrets.
    pub json: String,
}

/// The outcome of a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Claim {
    /// The caller owns the key now, and must complete or abandon the claim.
    Acquired,
    /// An earlier request has the key; this is its row as it is now.
    Existing(IdempotencyRow),
}

const IN_PROGRESS: &str = "in_progress";
const DONE: &str = "done";

macro_rules! columns {
    () => {
        "team_id, key, body_hash, state, sandbox_id, status, answer_json, created_us, expires_us, node_id"
    };
}

impl FromColumns for IdempotencyRow {
    const TABLE: &'static str = "idempotency_keys";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let response = match columns.text("state")?.as_str() {
            IN_PROGRESS => None,
            DONE => Some(StoredResponse {
                status: columns.count("status")?,
                json: columns.text("answer_json")?,
            }),
            _ => return Err(columns.corrupt("state")),
        };
        Ok(Self {
            team_id: columns.id("team_id")?,
            key: columns.text("key")?,
            body_hash: columns.text("body_hash")?,
            sandbox_id: columns.id("sandbox_id")?,
            node_id: columns.id_opt("node_id")?,
            response,
            created_us: columns.int("created_us")?,
            expires_us: columns.int("expires_us")?,
        })
    }
}

impl NodeRows {
    /// Claims a key for this node, or returns the existing claim. Of several concurrent claims exactly one succeeds. A
    /// claim that has expired by `new.created_us` counts as absent.
    ///
    /// # Errors
    /// [`StoreError::Dangling`] when there is no such team.
    pub async fn idempotency_claim(&self, new: &NewIdempotencyKey) -> Result<Claim, StoreError> {
        const WHAT: &str = "claim an idempotency key";
        storable("idempotency key", &new.key)?;
        storable("body hash", &new.body_hash)?;
        loop {
            let claim = sqlx::query(concat!(
                "INSERT INTO idempotency_keys (",
                columns!(),
                ") SELECT $1, $2, $3, $4, $5, NULL, NULL, $6, $7, id FROM nodes WHERE lease_key = $8 ON CONFLICT (team_id, key) DO UPDATE SET \
                 body_hash = excluded.body_hash, state = excluded.state, sandbox_id = excluded.sandbox_id, \
                 status = NULL, answer_json = NULL, created_us = excluded.created_us, \
                 expires_us = excluded.expires_us, node_id = excluded.node_id \
                 WHERE idempotency_keys.expires_us <= excluded.created_us"
            ))
            .bind(new.team_id.as_str())
            .bind(new.key.as_str())
            .bind(new.body_hash.as_str())
            .bind(IN_PROGRESS)
            .bind(new.sandbox_id.as_str())
            .bind(new.created_us)
            .bind(new.expires_us)
            .bind(self.lease_key.clone());
            if self.store.db.write("idempotency key", WHAT, claim).await? > 0 {
                return Ok(Claim::Acquired);
            }
            self.check_lease(WHAT).await?;
            // The owner may have abandoned it in between; then it is free again.
            if let Some(row) = self.store.idempotency_by_key(&new.team_id, &new.key).await? {
                return Ok(Claim::Existing(row));
            }
        }
    }

    /// The claims of this node that are in progress, for the start of the platform: their requests ended with its last
    /// run.
    pub async fn idempotency_list_in_progress(&self) -> Result<Vec<IdempotencyRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM idempotency_keys WHERE node_id = $1 AND state = 'in_progress' ORDER BY team_id, key"
        ))
        .bind(self.node.as_str());
        self.store.db.read_all("list idempotency keys in progress", query).await
    }
}

impl Store {
    /// The claim of a key, expired or not.
    pub async fn idempotency_by_key(&self, team: &TeamId, key: &str) -> Result<Option<IdempotencyRow>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT ",
            columns!(),
            " FROM idempotency_keys WHERE team_id = $1 AND key = $2"
        ))
        .bind(team.as_str())
        .bind(key);
        self.db.read_optional("find an idempotency key", query).await
    }

    /// Stores the response of the request that claimed a key for `sandbox`. `false` when that claim is not in progress.
    pub async fn idempotency_complete(
        &self,
        team: &TeamId,
        key: &str,
        sandbox: &SandboxId,
        response: &StoredResponse,
    ) -> Result<bool, StoreError> {
        storable("response", &response.json)?;
        let query = sqlx::query(
            "UPDATE idempotency_keys SET state = $4, status = $5, answer_json = $6 \
             WHERE team_id = $1 AND key = $2 AND sandbox_id = $3 AND state = 'in_progress'",
        )
        .bind(team.as_str())
        .bind(key)
        .bind(sandbox.as_str())
        .bind(DONE)
        .bind(i64::from(response.status))
        .bind(response.json.as_str());
        let changed = self.db.write("idempotency key", "store a response", query).await?;
        Ok(changed > 0)
    }

    /// Changes the sandbox for which a claim is in progress. `false` when there is no such claim.
    pub async fn idempotency_move(
        &self,
        team: &TeamId,
        key: &str,
        sandbox: &SandboxId,
        to: &SandboxId,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE idempotency_keys SET sandbox_id = $4 \
             WHERE team_id = $1 AND key = $2 AND sandbox_id = $3 AND state = 'in_progress'",
        )
        .bind(team.as_str())
        .bind(key)
        .bind(sandbox.as_str())
        .bind(to.as_str());
        let changed = self
            .db
            .write("idempotency key", "change the sandbox of an idempotency key", query)
            .await?;
        Ok(changed > 0)
    }

    /// Abandons the claim of a key for `sandbox`, which created nothing. `false` when that claim is not in progress.
    pub async fn idempotency_abandon(&self, team: &TeamId, key: &str, sandbox: &SandboxId) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "DELETE FROM idempotency_keys \
             WHERE team_id = $1 AND key = $2 AND sandbox_id = $3 AND state = 'in_progress'",
        )
        .bind(team.as_str())
        .bind(key)
        .bind(sandbox.as_str());
        let changed = self
            .db
            .write("idempotency key", "abandon an idempotency key", query)
            .await?;
        Ok(changed > 0)
    }

    /// Removes at most `limit` claims that expired by `now_us`, oldest first, and returns how many.
    pub async fn idempotency_purge(&self, now_us: i64, limit: u32) -> Result<u64, StoreError> {
        // The outer condition repeats the time, because a claim may have been acquired again in between.
        let query = sqlx::query(
            "DELETE FROM idempotency_keys WHERE expires_us <= $1 AND (team_id, key) IN \
             (SELECT team_id, key FROM idempotency_keys WHERE expires_us <= $1 ORDER BY expires_us LIMIT $2)",
        )
        .bind(now_us)
        .bind(i64::from(limit));
        self.db
            .write("idempotency key", "remove expired idempotency keys", query)
            .await
    }
}

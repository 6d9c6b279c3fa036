//! Idempotency keys: which request with a key came first, and what it was answered.
//!
//! A key belongs to a team and is claimed before anything is made, together with the id of the sandbox that the request
//! will make. So whatever a crash interrupts can be told afterwards: the sandbox runs, or it does not. What is kept of
//! an answer holds no secret; the tokens in it are derived from the sandbox's id again.
//!
//! A claim that ended (done, abandoned, expired and taken by another) cannot be changed by its late owner, because
//! every change names the sandbox of the claim.

use model::id::{NodeId, SandboxId, TeamId};

use crate::Store;
use crate::error::StoreError;
use crate::nodes::NodeRows;
use crate::row::{Columns, FromColumns, storable};

/// What a key is claimed with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewIdempotencyKey {
    /// The team of the request.
    pub team_id: TeamId,
    /// The key that the client chose.
    pub key: String,
    /// A digest of the request. The caller makes it with a secret, because requests hold secrets.
    pub body_hash: String,
    /// The sandbox that the request is going to make.
    pub sandbox_id: SandboxId,
    /// When the request came, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// Until when the key counts, in microseconds since the Unix epoch.
    pub expires_us: i64,
}

/// A key that was claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyRow {
    /// The team of the request.
    pub team_id: TeamId,
    /// The key that the client chose.
    pub key: String,
    /// The digest of the request that claimed it.
    pub body_hash: String,
    /// The sandbox that the request makes or made.
    pub sandbox_id: SandboxId,
    /// The node whose server works on the request; none in a row of a version that did not know nodes.
    pub node_id: Option<NodeId>,
    /// What the request was answered; none while it runs.
    pub response: Option<StoredResponse>,
    /// When the request came, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// Until when the key counts, in microseconds since the Unix epoch.
    pub expires_us: i64,
}

/// What is kept of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredResponse {
    /// The HTTP status.
    pub status: u32,
    /// What the body is made from again, in a form that is the caller's own. No secrets.
    pub json: String,
}

/// Whose a key is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Claim {
    /// The caller's. It completes or abandons it.
    Acquired,
    /// An earlier request's, as it is now.
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
    /// Claims a key for this node, or returns the claim that is there. Of many that ask at once exactly one gets it. One
    /// that has expired by `new.created_us` counts as not there.
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
                ") VALUES ($1, $2, $3, $4, $5, NULL, NULL, $6, $7, $8) ON CONFLICT (team_id, key) DO UPDATE SET \
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
            .bind(self.node.as_str());
            if self.store.db.write("idempotency key", WHAT, claim).await? > 0 {
                return Ok(Claim::Acquired);
            }
            // None when its owner gave it up in between; then it is free again.
            if let Some(row) = self.store.idempotency_by_key(&new.team_id, &new.key).await? {
                return Ok(Claim::Existing(row));
            }
        }
    }

    /// Every claim of this node in progress, for the start of the platform: their requests ended with the platform
    /// before it.
    ///
    /// # Errors
    /// When the database fails.
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
    ///
    /// # Errors
    /// When the database fails.
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

    /// Keeps the answer of the request that claimed a key for `sandbox`. `false` when that claim is not in progress.
    ///
    /// # Errors
    /// When the database fails.
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

    /// Gives up the claim of a key for `sandbox`, which made nothing. `false` when that claim is not in progress.
    ///
    /// # Errors
    /// When the database fails.
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

    /// Removes at most `limit` claims that expired by `now_us`, oldest first, and says how many.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn idempotency_purge(&self, now_us: i64, limit: u32) -> Result<u64, StoreError> {
        // The time is asked again outside, because a claim may have been taken anew in between.
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

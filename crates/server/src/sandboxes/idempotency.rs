//! Create requests with an `Idempotency-Key`: one sandbox per key, however often a client repeats the request.
//!
//! ```text
//!   claim ──▶ in progress ──created──▶ done: its answer is repeated, for 24 hours
//!                 │
//!                 └──failed──▶ free
//! ```
//!
//! A key is claimed with the id of the future sandbox, before the row of the sandbox exists. So an interrupted create
//! request, even after a crash, can be resolved from the rows: if the sandbox runs, the key is done, else it is free.
//! This happens for all keys of a node at its start, and for a single key when it is requested and no server works on
//! it: neither this one nor the server of another node with a valid lease. A node has one server, so the keys in
//! progress on this node are known in memory, and most premature repetitions cost no query.
//!
//! Of a request, only a keyed digest is stored, because it may contain secrets that are easy to guess. Tokens in an
//! answer are derived from the id of the sandbox and are not stored.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use model::id::{SandboxId, TeamId, TemplateId};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use store::error::StoreError;
use store::idempotency::{Claim, IdempotencyRow, NewIdempotencyKey, StoredResponse};
use store::nodes::NodeRows;
use store::sandboxes::SandboxRow;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};

/// How long a key is valid, in microseconds (as documented in the API).
const KEPT_US: i64 = 24 * 3600 * SECOND_US;
/// How often expired keys are removed.
const PURGE_INTERVAL: Duration = Duration::from_secs(600);
/// Keys removed by one statement, so that create requests do not wait long for the database.
const PURGE_BATCH: u32 = 1000;
/// The status of a successful create.
const CREATED: u32 = 201;

/// A key as a client sent it: 1 to 255 visible ASCII characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct IdempotencyKey(String);

impl IdempotencyKey {
    /// Longest key, in characters (API contract).
    pub(crate) const MAX_LENGTH: usize = 255;

    /// Parses the value of a header; `None` if it is not a valid key.
    pub(crate) fn parse(value: &[u8]) -> Option<Self> {
        let fits = (1..=Self::MAX_LENGTH).contains(&value.len()) && value.iter().all(u8::is_ascii_graphic);
        fits.then(|| Self(String::from_utf8_lossy(value).into_owned()))
    }
}

/// A request with a key.
#[derive(Debug)]
pub(crate) struct KeyedRequest {
    /// The team that sent it.
    pub(crate) team: TeamId,
    /// Its key.
    pub(crate) key: IdempotencyKey,
    /// Digest of its body.
    pub(crate) body_hash: String,
    /// The id of the sandbox that will be created for it.
    pub(crate) sandbox: SandboxId,
}

/// The result of claiming a key.
#[derive(Debug)]
pub(crate) enum Claimed {
    /// The request may proceed.
    First(Box<KeyClaim>),
    /// The request was answered before, with this sandbox.
    Repeated(StoredSandbox),
}

/// Why a key could not be claimed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClaimError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the key was used with another request")]
    Mismatch,
    #[error("the first request with the key is still in progress")]
    InProgress,
}

/// What is stored of a created sandbox, so that the answer can be repeated. No secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StoredSandbox {
    pub(crate) sandbox_id: SandboxId,
    pub(crate) template_id: TemplateId,
    pub(crate) alias: Option<String>,
    pub(crate) agent_version: String,
}

impl From<SandboxRow> for StoredSandbox {
    fn from(row: SandboxRow) -> Self {
        Self {
            sandbox_id: row.id,
            template_id: row.template_id,
            alias: row.alias,
            agent_version: row.agent_version,
        }
    }
}

/// The idempotency keys of all teams.
#[derive(Debug)]
pub(crate) struct Claims {
    rows: NodeRows,
    clock: Clock,
    /// Keys of requests in progress, with the digests of the requests.
    in_progress: Mutex<HashMap<(TeamId, IdempotencyKey), String>>,
    /// Work that a request started and that outlives it.
    work: TaskTracker,
}

/// The right to work on a key. Dropping it before completion frees the key.
#[derive(Debug)]
pub(crate) struct KeyClaim {
    claims: Arc<Claims>,
    request: KeyedRequest,
    /// Whether the row in the database belongs to this claim.
    has_row: bool,
}

impl Drop for KeyClaim {
    fn drop(&mut self) {
        let entry = (self.request.team.clone(), self.request.key.clone());
        if !self.has_row {
            self.claims.in_progress.lock().remove(&entry);
            return;
        }
        // The create was interrupted: its client disconnected, or it panicked.
        let claims = Arc::clone(&self.claims);
        let sandbox = self.request.sandbox.clone();
        self.claims.work.spawn(async move {
            claims.abandon(&entry.0, &entry.1, &sandbox).await;
            claims.in_progress.lock().remove(&entry);
        });
    }
}

impl KeyClaim {
    /// Stores the sandbox as the answer to the key. `false` if another server has settled the key meanwhile and the sandbox is
    /// not the answer: this server was stopped for so long that its claim no longer counted, and the other may have created one.
    pub(crate) async fn complete(mut self, row: SandboxRow) -> bool {
        let KeyedRequest { team, key, sandbox, .. } = &self.request;
        // Even if this fails, only the next request may resolve the row now.
        self.has_row = false;
        let kept = match self.claims.keep_answer(team, &key.0, sandbox, row).await {
            Ok(false) => self.claims.is_answer(team, &key.0, sandbox).await,
            kept => kept,
        };
        kept.unwrap_or_else(|error| {
            tracing::error!(sandbox.id = %sandbox, error = %Chain(&error), "cannot store an idempotent answer");
            true
        })
    }

    /// Changes the sandbox that will be created for the request.
    pub(crate) async fn move_to(&mut self, id: &SandboxId) -> Result<(), StoreError> {
        let KeyedRequest { team, key, sandbox, .. } = &self.request;
        self.claims
            .rows
            .store()
            .idempotency_move(team, &key.0, sandbox, id)
            .await?;
        self.request.sandbox = id.clone();
        Ok(())
    }

    /// Frees the key: no sandbox was created.
    pub(crate) async fn abandon(mut self) {
        self.has_row = false;
        let KeyedRequest { team, key, sandbox, .. } = &self.request;
        self.claims.abandon(team, key, sandbox).await;
    }
}

impl Claims {
    pub(crate) fn new(rows: NodeRows, clock: Clock, work: TaskTracker) -> Self {
        Self {
            rows,
            clock,
            in_progress: Mutex::default(),
            work,
        }
    }

    /// Claims the key of a request, or returns the stored answer.
    pub(crate) async fn claim(self: &Arc<Self>, request: KeyedRequest) -> Result<Claimed, ClaimError> {
        match self
            .in_progress
            .lock()
            .entry((request.team.clone(), request.key.clone()))
        {
            Entry::Occupied(entry) if *entry.get() == request.body_hash => return Err(ClaimError::InProgress),
            Entry::Occupied(_) => return Err(ClaimError::Mismatch),
            Entry::Vacant(entry) => entry.insert(request.body_hash.clone()),
        };
        let created_us = self.clock.now_us();
        let new = NewIdempotencyKey {
            team_id: request.team.clone(),
            key: request.key.0.clone(),
            body_hash: request.body_hash.clone(),
            sandbox_id: request.sandbox.clone(),
            created_us,
            expires_us: created_us + KEPT_US,
        };
        // From here on the row counts as inserted: a client disconnect does not undo the statement.
        let mut claim = Box::new(KeyClaim {
            claims: Arc::clone(self),
            request,
            has_row: true,
        });
        loop {
            let row = match self.rows.idempotency_claim(&new).await? {
                Claim::Acquired => return Ok(Claimed::First(claim)),
                Claim::Existing(row) => row,
            };
            if row.body_hash != new.body_hash {
                claim.has_row = false;
                return Err(ClaimError::Mismatch);
            }
            if let Some(answer) = &row.response {
                claim.has_row = false;
                let kept = serde_json::from_str(&answer.json).map_err(|_| StoreError::Corrupt {
                    table: "idempotency_keys",
                    column: "answer_json",
                })?;
                return Ok(Claimed::Repeated(kept));
            }
            if self.is_worked_on_elsewhere(&row, created_us).await? {
                claim.has_row = false;
                return Err(ClaimError::InProgress);
            }
            self.settle(&row).await?;
        }
    }

    /// Whether the server of another node may still be processing the request that claimed a key.
    async fn is_worked_on_elsewhere(&self, row: &IdempotencyRow, now_us: i64) -> Result<bool, StoreError> {
        match &row.node_id {
            Some(node) if node != self.rows.node() => {
                let now_us = self.rows.store().lease_time_us(now_us).await?;
                let node = self.rows.store().node_by_id(node).await?;
                Ok(node.is_some_and(|node| node.is_leased(now_us)))
            }
            Some(_) | None => Ok(false),
        }
    }

    /// Resolves a claim that no server works on any more.
    async fn settle(&self, row: &IdempotencyRow) -> Result<(), StoreError> {
        match self.rows.store().sandbox_by_id(&row.sandbox_id).await? {
            Some(sandbox) if sandbox.state.is_present() => {
                self.keep_answer(&row.team_id, &row.key, &row.sandbox_id, sandbox)
                    .await?;
            }
            Some(_) | None => {
                self.rows
                    .store()
                    .idempotency_abandon(&row.team_id, &row.key, &row.sandbox_id)
                    .await?;
            }
        }
        Ok(())
    }

    /// Resolves every claim that an earlier start left in progress, once it is known which sandboxes run.
    pub(crate) async fn settle_all(&self) -> Result<(), StoreError> {
        for row in self.rows.idempotency_list_in_progress().await? {
            self.settle(&row).await?;
        }
        Ok(())
    }

    async fn keep_answer(
        &self,
        team: &TeamId,
        key: &str,
        sandbox: &SandboxId,
        row: SandboxRow,
    ) -> Result<bool, StoreError> {
        let answer = StoredResponse {
            status: CREATED,
            json: serde_json::to_string(&StoredSandbox::from(row)).expect("texts and flags are always JSON"),
        };
        self.rows
            .store()
            .idempotency_complete(team, key, sandbox, &answer)
            .await
    }

    /// Whether a sandbox is the stored answer to a key.
    async fn is_answer(&self, team: &TeamId, key: &str, sandbox: &SandboxId) -> Result<bool, StoreError> {
        let row = self.rows.store().idempotency_by_key(team, key).await?;
        Ok(row.is_some_and(|row| row.sandbox_id == *sandbox && row.response.is_some()))
    }

    async fn abandon(&self, team: &TeamId, key: &IdempotencyKey, sandbox: &SandboxId) {
        if let Err(error) = self.rows.store().idempotency_abandon(team, &key.0, sandbox).await {
            // The next request with the key resolves it.
            tracing::error!(sandbox.id = %sandbox, error = %Chain(&error), "cannot free an idempotency key");
        }
    }

    /// Removes expired keys periodically, until `stop` is cancelled.
    pub(crate) async fn purge(self: Arc<Self>, stop: CancellationToken) {
        let mut interval = tokio::time::interval(PURGE_INTERVAL);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = interval.tick() => {}
            }
            loop {
                match self
                    .rows
                    .store()
                    .idempotency_purge(self.clock.now_us(), PURGE_BATCH)
                    .await
                {
                    Ok(removed) if removed >= PURGE_BATCH.into() => {}
                    Ok(_) => break,
                    Err(error) => {
                        tracing::error!(error = %Chain(&error), "cannot remove expired idempotency keys");
                        break;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_one_to_255_visible_characters() {
        let longest = "k".repeat(IdempotencyKey::MAX_LENGTH);
        for good in ["k", "!", "~", "0192-af_K:/", &longest] {
            assert_eq!(
                IdempotencyKey::parse(good.as_bytes()),
                Some(IdempotencyKey(good.to_owned()))
            );
        }
        let too_long = "k".repeat(IdempotencyKey::MAX_LENGTH + 1);
        for bad in ["", " ", "a b", "a\t", "a\u{7f}", "é", &too_long] {
            assert_eq!(IdempotencyKey::parse(bad.as_bytes()), None, "{bad:?}");
        }
    }
}

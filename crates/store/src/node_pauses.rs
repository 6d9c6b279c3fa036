//! Pauses of what is left on draining nodes: an operator asks any server for one, and the server that has the node does it.
//!
//! The last one that was asked for is in the row of the node. It ends with the drain.

use model::id::NodeId;

use crate::Store;
use crate::error::StoreError;
use crate::row::{Columns, FromColumns};

/// A pause of what is left on a draining node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePause {
    /// Id of the node.
    pub node: NodeId,
    /// When it was asked for, in microseconds since the Unix epoch.
    pub asked_us: i64,
    /// When the server that has the node has begun with it, in microseconds since the Unix epoch; none before that.
    pub begun_us: Option<i64>,
    /// How many sandboxes are kept, and how many are not; none before it is done.
    pub outcome: Option<(u64, u64)>,
}

impl FromColumns for NodePause {
    const TABLE: &'static str = "joined_nodes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let count = |name: &'static str| match columns.int_opt(name)? {
            None => Ok(None),
            Some(count) => u64::try_from(count).map(Some).map_err(|_| columns.corrupt(name)),
        };
        Ok(Self {
            node: columns.id("id")?,
            asked_us: columns.int("pause_asked_us")?,
            begun_us: columns.int_opt("pause_begun_us")?,
            outcome: count("pause_kept")?.zip(count("pause_failed")?),
        })
    }
}

impl Store {
    /// Asks for what is left on a draining node to be paused. None when there is no such node, or it does not drain.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_pause_ask(&self, id: &NodeId, now_us: i64) -> Result<Option<NodePause>, StoreError> {
        let query = sqlx::query(
            "UPDATE joined_nodes SET pause_asked_us = $2, pause_begun_us = NULL, pause_kept = NULL, pause_failed = NULL \
             WHERE id = $1 AND forgotten_us IS NULL AND draining_us IS NOT NULL \
             RETURNING id, pause_asked_us, pause_begun_us, pause_kept, pause_failed",
        )
        .bind(id.as_str())
        .bind(now_us);
        self.db
            .write_returning_durably("ask for what is left on a node to be paused", query)
            .await
    }

    /// The pauses of nodes that drain, those that are done as well.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_pause_list(&self) -> Result<Vec<NodePause>, StoreError> {
        let query = sqlx::query(
            "SELECT id, pause_asked_us, pause_begun_us, pause_kept, pause_failed FROM joined_nodes \
             WHERE pause_asked_us IS NOT NULL AND draining_us IS NOT NULL AND forgotten_us IS NULL",
        );
        self.db.read_all("list what is to be paused on nodes", query).await
    }

    /// Notes that the pause that was asked for at `asked_us` has begun. `false` when another one was asked for since, or the drain
    /// was ended.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_pause_begin(&self, id: &NodeId, asked_us: i64, now_us: i64) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE joined_nodes SET pause_begun_us = $3 WHERE id = $1 AND pause_asked_us = $2 AND draining_us IS NOT NULL",
        )
        .bind(id.as_str())
        .bind(asked_us)
        .bind(now_us);
        let changed = self.db.write("joined node", "begin a pause on a node", query).await?;
        Ok(changed > 0)
    }

    /// Withdraws the pause that was asked for at `asked_us`. `false` when it has begun, another one was asked for since, or the drain was
    /// ended.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_pause_withdraw(&self, id: &NodeId, asked_us: i64) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE joined_nodes SET pause_asked_us = NULL \
             WHERE id = $1 AND pause_asked_us = $2 AND pause_begun_us IS NULL",
        )
        .bind(id.as_str())
        .bind(asked_us);
        let changed = self
            .db
            .write("joined node", "withdraw a pause on a node", query)
            .await?;
        Ok(changed > 0)
    }

    /// Notes what became of the pause that was asked for at `asked_us`.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_pause_end(
        &self,
        id: &NodeId,
        asked_us: i64,
        (kept, failed): (usize, usize),
    ) -> Result<(), StoreError> {
        let count = |count| i64::try_from(count).unwrap_or(i64::MAX);
        let query = sqlx::query(
            "UPDATE joined_nodes SET pause_kept = $3, pause_failed = $4 WHERE id = $1 AND pause_asked_us = $2",
        )
        .bind(id.as_str())
        .bind(asked_us)
        .bind(count(kept))
        .bind(count(failed));
        self.db.write("joined node", "end a pause on a node", query).await?;
        Ok(())
    }
}

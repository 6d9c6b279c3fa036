//! Nodes that are processes of their own and have joined a server, and the tokens with which they do.
//!
//! A token makes one node, once, and the database sees to it: what uses it up is one guarded change. The row of a node that
//! was forgotten stays, because the certificate of the node does, and is refused by it.

use model::id::NodeId;
use model::lifecycle::{Kept, State};

use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::InTransaction as _;

/// How long tokens are remembered that have expired or were used, for clear errors, in microseconds.
const REMEMBERED_US: i64 = 7 * 24 * 60 * 60 * 1_000_000;

/// The condition on a node `n` that it has sandboxes, and that each of them is paused with a current copy in the blob store.
macro_rules! has_copies_alone {
    () => {
        "(EXISTS (SELECT 1 FROM sandboxes b WHERE b.node_id = n.id AND b.state <> 'gone') \
         AND NOT EXISTS (SELECT 1 FROM sandboxes b WHERE b.node_id = n.id AND b.state <> 'gone' \
         AND (CASE WHEN b.state = 'paused' AND b.kept <> 'memory' AND b.parcel_run = b.execution_id THEN 1 ELSE 0 END) = 0))"
    };
}

/// A node that has joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinedNode {
    /// The id in its certificate.
    pub id: NodeId,
    /// The name of its host.
    pub name: String,
    /// When it has joined, in microseconds since the Unix epoch.
    pub joined_us: i64,
    /// When it last connected, in microseconds since the Unix epoch; none if it has not yet.
    pub seen_us: Option<i64>,
    /// When it was forgotten, in microseconds since the Unix epoch; none if it was not.
    pub forgotten_us: Option<i64>,
    /// Since when it gets no new sandboxes, in microseconds since the Unix epoch; none if it gets some.
    pub draining_us: Option<i64>,
}

/// The sandboxes of a draining node that are alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOnNode {
    /// Id of the node.
    pub node: NodeId,
    /// Their state.
    pub state: State,
    /// What is kept of paused ones.
    pub kept: Option<Kept>,
    /// How many they are.
    pub count: u64,
}

/// What became of a token.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum TokenOutcome {
    /// The node has joined.
    Joined,
    /// There is no such token.
    Unknown,
    /// The token was used before.
    Used,
    /// The token has expired.
    Expired,
}

#[derive(Debug)]
struct TokenRow {
    node: Option<NodeId>,
}

impl FromColumns for JoinedNode {
    const TABLE: &'static str = "joined_nodes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.id("id")?,
            name: columns.text("name")?,
            joined_us: columns.int("joined_us")?,
            seen_us: columns.int_opt("seen_us")?,
            forgotten_us: columns.int_opt("forgotten_us")?,
            draining_us: columns.int_opt("draining_us")?,
        })
    }
}

impl FromColumns for LeftOnNode {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            node: columns.id("node_id")?,
            state: State::from_column(&columns.text("state")?).ok_or_else(|| columns.corrupt("state"))?,
            kept: match columns.text_opt("kept")? {
                None => None,
                Some(word) => Some(Kept::from_column(&word).ok_or_else(|| columns.corrupt("kept"))?),
            },
            count: u64::try_from(columns.int("sandboxes")?).map_err(|_| columns.corrupt("sandboxes"))?,
        })
    }
}

impl FromColumns for TokenRow {
    const TABLE: &'static str = "node_tokens";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self {
            node: columns.id_opt("node_id")?,
        })
    }
}

impl Store {
    /// Stores the hash of a token that is good until `expires_us`, and forgets old ones.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_token_insert(&self, hash: &str, now_us: i64, expires_us: i64) -> Result<(), StoreError> {
        let old = sqlx::query("DELETE FROM node_tokens WHERE expires_us < $1").bind(now_us - REMEMBERED_US);
        self.db.write("node token", "remove old tokens of nodes", old).await?;
        let query = sqlx::query("INSERT INTO node_tokens (hash, created_us, expires_us) VALUES ($1, $2, $3)")
            .bind(hash)
            .bind(now_us)
            .bind(expires_us);
        self.db
            .write_durably("node token", "insert a token of a node", query)
            .await?;
        Ok(())
    }

    /// Uses up a token for a new node. On any other outcome than [`TokenOutcome::Joined`] nothing is changed.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_join(
        &self,
        hash: &str,
        node: &NodeId,
        name: &str,
        now_us: i64,
    ) -> Result<TokenOutcome, StoreError> {
        const WHAT: &str = "let a node join";
        storable("host name", name)?;
        // Anybody may try, so what is no unused token of this server must not take the turn of a writer.
        match self.node_token(hash).await? {
            None => return Ok(TokenOutcome::Unknown),
            Some(TokenRow { node: Some(_) }) => return Ok(TokenOutcome::Used),
            Some(TokenRow { node: None }) => {}
        }
        let failed = |error| classify(&error, "joined node", WHAT);
        let mut tx = self.db.begin(WHAT).await?;
        let used =
            sqlx::query("UPDATE node_tokens SET node_id = $2 WHERE hash = $1 AND node_id IS NULL AND expires_us > $3")
                .bind(hash)
                .bind(node.as_str())
                .bind(now_us)
                .execute_in(&mut tx)
                .await
                .map_err(failed)?;
        if used.rows_affected() == 0 {
            tx.commit().await.map_err(failed)?;
            return Ok(match self.node_token(hash).await? {
                None => TokenOutcome::Unknown,
                Some(TokenRow { node: Some(_) }) => TokenOutcome::Used,
                Some(TokenRow { node: None }) => TokenOutcome::Expired,
            });
        }
        sqlx::query("INSERT INTO joined_nodes (id, name, joined_us) VALUES ($1, $2, $3)")
            .bind(node.as_str())
            .bind(name)
            .bind(now_us)
            .execute_in(&mut tx)
            .await
            .map_err(failed)?;
        tx.commit().await.map_err(failed)?;
        self.db.sync("write a node that has joined to disk").await?;
        Ok(TokenOutcome::Joined)
    }

    async fn node_token(&self, hash: &str) -> Result<Option<TokenRow>, StoreError> {
        let query = sqlx::query("SELECT node_id FROM node_tokens WHERE hash = $1").bind(hash);
        self.db.read_optional("find a token of a node", query).await
    }

    /// The nodes that have joined, oldest first; those that were forgotten as well.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn joined_node_list(&self) -> Result<Vec<JoinedNode>, StoreError> {
        let query = sqlx::query(
            "SELECT id, name, joined_us, seen_us, forgotten_us, draining_us FROM joined_nodes ORDER BY joined_us, id",
        );
        self.db.read_all("list nodes", query).await
    }

    /// The node with this id.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn joined_node(&self, id: &NodeId) -> Result<Option<JoinedNode>, StoreError> {
        let query = sqlx::query(
            "SELECT id, name, joined_us, seen_us, forgotten_us, draining_us FROM joined_nodes WHERE id = $1",
        )
        .bind(id.as_str());
        self.db.read_optional("find a node", query).await
    }

    /// Notes that a node has connected, from a host of this name.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn joined_node_seen(&self, id: &NodeId, name: &str, now_us: i64) -> Result<(), StoreError> {
        storable("host name", name)?;
        let query = sqlx::query("UPDATE joined_nodes SET seen_us = $2, name = $3 WHERE id = $1")
            .bind(id.as_str())
            .bind(now_us)
            .bind(name);
        self.db
            .write("joined node", "note that a node has connected", query)
            .await?;
        Ok(())
    }

    /// Forgets a node. `false` when there is none, or it was forgotten before.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn joined_node_forget(&self, id: &NodeId, now_us: i64) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE joined_nodes SET forgotten_us = $2, place = NULL WHERE id = $1 AND forgotten_us IS NULL",
        )
        .bind(id.as_str())
        .bind(now_us);
        let changed = self.db.write_durably("joined node", "forget a node", query).await?;
        Ok(changed > 0)
    }

    /// The nodes that were forgotten and still have rows which are to be removed, and no server has the lease of, at `now_us` of the
    /// time of leases: those of [`Self::forgotten_node_list_kept`] have none.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn forgotten_node_list(&self, now_us: i64) -> Result<Vec<NodeId>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT j.id AS value FROM joined_nodes j JOIN nodes n ON n.id = j.id \
             WHERE j.forgotten_us IS NOT NULL AND (n.lease_owner IS NULL OR n.lease_until_us <= $1) AND NOT ",
            has_copies_alone!(),
            " ORDER BY j.id"
        ))
        .bind(now_us);
        self.db.read_all("list what is left of forgotten nodes", query).await
    }

    /// The nodes that were forgotten and have paused sandboxes alone, each with a current copy in the blob store, from where other nodes
    /// go on with them. No server has their lease at `now_us` of the time of leases.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn forgotten_node_list_kept(&self, now_us: i64) -> Result<Vec<NodeId>, StoreError> {
        let query = sqlx::query(concat!(
            "SELECT j.id AS value FROM joined_nodes j JOIN nodes n ON n.id = j.id \
             WHERE j.forgotten_us IS NOT NULL AND (n.lease_owner IS NULL OR n.lease_until_us <= $1) AND ",
            has_copies_alone!(),
            " ORDER BY j.id"
        ))
        .bind(now_us);
        self.db.read_all("list what is kept of forgotten nodes", query).await
    }

    /// Has a node get no new sandboxes from now on, and returns since when that is: a node that drains already goes on as it did.
    /// None when there is no such node, or it was forgotten.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn joined_node_drain(&self, id: &NodeId, now_us: i64) -> Result<Option<i64>, StoreError> {
        let query = sqlx::query(
            "UPDATE joined_nodes SET draining_us = COALESCE(draining_us, $2) WHERE id = $1 AND forgotten_us IS NULL \
             RETURNING id, name, joined_us, seen_us, forgotten_us, draining_us",
        )
        .bind(id.as_str())
        .bind(now_us);
        let node: Option<JoinedNode> = self.db.write_returning_durably("drain a node", query).await?;
        Ok(node.and_then(|node| node.draining_us))
    }

    /// Has a node get new sandboxes again. `false` when there is no such node, or it was forgotten.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn joined_node_undrain(&self, id: &NodeId) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE joined_nodes SET draining_us = NULL, pause_asked_us = NULL WHERE id = $1 AND forgotten_us IS NULL",
        )
        .bind(id.as_str());
        let what = "end the drain of a node";
        let changed = self.db.write_durably("joined node", what, query).await?;
        Ok(changed > 0)
    }

    /// What is left on the nodes that drain.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn left_on_draining_nodes(&self) -> Result<Vec<LeftOnNode>, StoreError> {
        let query = sqlx::query(
            "SELECT b.node_id, b.state, b.kept, COUNT(*) AS sandboxes FROM sandboxes b \
             JOIN joined_nodes j ON j.id = b.node_id \
             WHERE j.draining_us IS NOT NULL AND j.forgotten_us IS NULL AND b.state <> 'gone' \
             GROUP BY b.node_id, b.state, b.kept",
        );
        self.db.read_all("count what is left on draining nodes", query).await
    }
}

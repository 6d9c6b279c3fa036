//! Nodes: the host of each sandbox, and the lease that allows one server to change the rows of a node.
//!
//! Several platforms may share a database. Each is a node, and only the server that has the lease of a node may change
//! its rows. It acquires the lease when it starts, renews it while it runs and releases it when it ends. A lease that
//! was not released expires after its time; the same owner, as recorded in its data directory, can acquire it again
//! immediately.
//!
//! Invariant: every operation that changes a sandbox, or lists sandboxes in order to change them, is a method of
//! [`NodeRows`] and names the node in its SQL. Reads for clients are methods of [`Store`] and see every node.

use model::id::{NodeId, OwnerId};

use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRow {
    /// Id of the node.
    pub id: NodeId,
    /// The name of its host.
    pub name: String,
    /// When it was first seen, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// Its lease; none after a release. It may have expired.
    pub lease: Option<Lease>,
}

/// The right to change the rows of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// The owner of the lease.
    pub owner: OwnerId,
    /// When the lease expires, in microseconds since the Unix epoch.
    pub until_us: i64,
}

/// A request for the lease of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseRequest {
    /// The node, which is created if it does not exist.
    pub node: NodeId,
    /// The name of its host.
    pub name: String,
    /// The requested lease.
    pub lease: Lease,
    /// The current time, in microseconds since the Unix epoch.
    pub now_us: i64,
    /// Leases until this time or earlier count as expired, in microseconds since the Unix epoch.
    pub expired_us: i64,
}

/// The outcome of a [`LeaseRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum LeaseOutcome {
    /// The caller has the lease.
    Acquired,
    /// Another owner has the lease; this is the node as it is now.
    Held(NodeRow),
}

/// The rows of one node, for the server that has its lease.
#[derive(Debug, Clone)]
pub struct NodeRows {
    pub(crate) store: Store,
    pub(crate) node: NodeId,
}

impl NodeRows {
    /// The node whose rows can be changed.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// Waits until all changes so far survive a loss of power. Changes of sandboxes do not wait for the disk, because
    /// one that runs does not survive that itself; one that is kept on disk does.
    ///
    /// # Errors
    /// When the disk fails; then the latest changes may be lost with the power.
    pub async fn sync(&self) -> Result<(), StoreError> {
        self.store.db.sync("write the changes of sandboxes to disk").await
    }

    /// The database, for rows that belong to no node.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.store
    }
}

impl NodeRow {
    /// Whether the lease is valid at `now_us`, in microseconds since the Unix epoch.
    #[must_use]
    pub fn is_leased(&self, now_us: i64) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.until_us > now_us)
    }
}

impl FromColumns for NodeRow {
    const TABLE: &'static str = "nodes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let owner: Option<OwnerId> = columns.id_opt("lease_owner")?;
        let until_us = columns.int("lease_until_us")?;
        Ok(Self {
            id: columns.id("id")?,
            name: columns.text("name")?,
            created_us: columns.int("created_us")?,
            lease: owner.map(|owner| Lease { owner, until_us }),
        })
    }
}

impl Store {
    /// The rows of a node. The caller must have the node's lease.
    #[must_use]
    pub fn of_node(&self, node: NodeId) -> NodeRows {
        NodeRows {
            store: self.clone(),
            node,
        }
    }

    /// Acquires the lease of a node unless another owner has it. Rows without a node, written by a version that did not
    /// know nodes, become this node's in the same transaction.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_lease_acquire(&self, request: &LeaseRequest) -> Result<LeaseOutcome, StoreError> {
        const WHAT: &str = "acquire the lease of a node";
        storable("host name", &request.name)?;
        loop {
            let mut tx = self.db.begin(WHAT).await?;
            let taken = sqlx::query(
                "INSERT INTO nodes (id, name, created_us, lease_owner, lease_until_us) VALUES ($1, $2, $3, $4, $5) \
                 ON CONFLICT (id) DO UPDATE SET name = excluded.name, lease_owner = excluded.lease_owner, \
                 lease_until_us = excluded.lease_until_us WHERE nodes.lease_owner IS NULL \
                 OR nodes.lease_owner = excluded.lease_owner OR nodes.lease_until_us <= $6",
            )
            .bind(request.node.as_str())
            .bind(request.name.as_str())
            .bind(request.now_us)
            .bind(request.lease.owner.as_str())
            .bind(request.lease.until_us)
            .bind(request.expired_us)
            .execute(&mut *tx)
            .await
            .map_err(|error| classify(&error, "node", WHAT))?;
            if taken.rows_affected() > 0 {
                for sql in [
                    "UPDATE sandboxes SET node_id = $1 WHERE node_id IS NULL",
                    "UPDATE idempotency_keys SET node_id = $1 WHERE node_id IS NULL",
                ] {
                    sqlx::query(sql)
                        .bind(request.node.as_str())
                        .execute(&mut *tx)
                        .await
                        .map_err(|error| classify(&error, "node", WHAT))?;
                }
                tx.commit().await.map_err(|error| classify(&error, "node", WHAT))?;
                return Ok(LeaseOutcome::Acquired);
            }
            tx.commit().await.map_err(|error| classify(&error, "node", WHAT))?;
            // The node may have been removed in between; then its lease is free.
            if let Some(row) = self.node_by_id(&request.node).await? {
                return Ok(LeaseOutcome::Held(row));
            }
        }
    }

    /// Extends a lease. `false` when the owner no longer has it.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_lease_renew(&self, node: &NodeId, lease: &Lease) -> Result<bool, StoreError> {
        let query = sqlx::query("UPDATE nodes SET lease_until_us = $3 WHERE id = $1 AND lease_owner = $2")
            .bind(node.as_str())
            .bind(lease.owner.as_str())
            .bind(lease.until_us);
        let changed = self.db.write("node", "renew the lease of a node", query).await?;
        Ok(changed > 0)
    }

    /// Releases a lease. `false` when the owner no longer had it.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_lease_release(&self, node: &NodeId, owner: &OwnerId) -> Result<bool, StoreError> {
        let query =
            sqlx::query("UPDATE nodes SET lease_owner = NULL, lease_until_us = 0 WHERE id = $1 AND lease_owner = $2")
                .bind(node.as_str())
                .bind(owner.as_str());
        let changed = self.db.write("node", "release the lease of a node", query).await?;
        Ok(changed > 0)
    }

    /// Removes a node that has no sandboxes, for the owner of its lease. `false` when nothing was removed.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_delete(&self, node: &NodeId, owner: &OwnerId) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "DELETE FROM nodes WHERE id = $1 AND lease_owner = $2 \
             AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE sandboxes.node_id = nodes.id)",
        )
        .bind(node.as_str())
        .bind(owner.as_str());
        let changed = self.db.write("node", "remove a node", query).await?;
        Ok(changed > 0)
    }

    /// Returns the node with this id.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_by_id(&self, id: &NodeId) -> Result<Option<NodeRow>, StoreError> {
        let query = sqlx::query("SELECT id, name, created_us, lease_owner, lease_until_us FROM nodes WHERE id = $1")
            .bind(id.as_str());
        self.db.read_optional("find a node", query).await
    }
}

//! Nodes: the host of each sandbox, and the lease that allows one server to change the rows of a node.
//!
//! Several platforms may share a database. Each is a node, and only the server that has the lease of a node may change
//! its rows. It acquires the lease when it starts, renews it while it runs and releases it when it ends. A lease that
//! was not released expires after its time; the same owner, as recorded in its data directory, can acquire it again
//! immediately.
//!
//! Each acquisition has a number of its own, the epoch of the lease. A server that was stopped for longer than its lease, as
//! when its machine was suspended, does not know yet that another one has the lease; so every statement of [`NodeRows`] that
//! changes a row names the lease with its epoch, and changes nothing once there is a later one. A statement that runs while
//! the lease is acquired may still be committed; it is older than the list of rows that its new owner reads, or the new owner
//! finds another version of the row than it read.
//!
//! Invariant: every operation that changes a sandbox, or lists sandboxes in order to change them, is a method of
//! [`NodeRows`] and names the node in its SQL. Reads for clients are methods of [`Store`] and see every node.

use model::id::{NodeId, OwnerId};

use crate::Store;
use crate::error::{StoreError, classify};
use crate::row::{Columns, FromColumns, storable};
use crate::statement::InTransaction as _;

/// How often a lease is asked for again because of a conflict with another request for it. One is enough unless the database has
/// the lease key of the node in the row of another.
const CONFLICTS_MAX: u32 = 5;

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRow {
    /// Id of the node.
    pub id: NodeId,
    /// The name of its host.
    pub name: String,
    /// When it was first seen, in microseconds since the Unix epoch.
    pub created_us: i64,
    /// How often its lease was acquired.
    pub epoch: i64,
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
    /// The current time, in microseconds since the Unix epoch: see [`Store::lease_time_us`].
    pub now_us: i64,
    /// Leases until this time or earlier count as expired, in microseconds since the Unix epoch.
    pub expired_us: i64,
    /// The number of the last acquisition that the caller knows of, 0 for none, if the lease must not have been acquired since.
    pub last_epoch: Option<i64>,
}

/// The outcome of a [`LeaseRequest`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum LeaseOutcome {
    /// The caller has the lease.
    Acquired {
        /// The number of this acquisition; a later one has a higher number.
        epoch: i64,
    },
    /// Another owner has the lease, or it was acquired since the last acquisition that the caller knows of; this is the node as
    /// it is now.
    Held(NodeRow),
}

/// The rows of one node, for the server that has its lease.
#[derive(Debug, Clone)]
pub struct NodeRows {
    pub(crate) store: Store,
    pub(crate) node: NodeId,
    epoch: i64,
    /// What the node's row has in `lease_key` while the lease is that of the caller.
    pub(crate) lease_key: String,
}

/// The id of a node while its lease has the key that is given as an argument, and NULL from then on.
macro_rules! held {
    ($argument:literal) => {
        concat!("(SELECT id FROM nodes WHERE lease_key = ", $argument, ")")
    };
}
pub(crate) use held;

/// Decoded from the row of a node whose existence is all that matters.
struct Held;

impl FromColumns for Held {
    const TABLE: &'static str = "nodes";

    fn from_columns(_: &Columns<'_>) -> Result<Self, StoreError> {
        Ok(Self)
    }
}

/// The text that stands in the row of a node for one acquisition of its lease. The database makes the same.
fn lease_key(node: &NodeId, epoch: i64) -> String {
    format!("{node}.{epoch}")
}

impl NodeRows {
    /// The node whose rows can be changed.
    #[must_use]
    pub fn node(&self) -> &NodeId {
        &self.node
    }

    /// The number of the acquisition of the lease.
    #[must_use]
    pub fn epoch(&self) -> i64 {
        self.epoch
    }

    /// Finds out whether a statement changed nothing because the lease is another server's.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] then, and when the database fails.
    pub(crate) async fn check_lease(&self, what: &'static str) -> Result<(), StoreError> {
        let query = sqlx::query("SELECT id FROM nodes WHERE lease_key = $1").bind(self.lease_key.clone());
        let held = self.store.db.read_optional::<Held>(what, query).await?;
        held.map(|Held| ()).ok_or(StoreError::LeaseLost { what })
    }

    /// The outcome of a statement that stores a row for the holder of the lease, and has stored `stored` rows.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when that is none.
    pub(crate) fn expect_lease(&self, stored: u64, what: &'static str) -> Result<(), StoreError> {
        if stored == 0 {
            return Err(StoreError::LeaseLost { what });
        }
        Ok(())
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
            epoch: columns.int("lease_epoch")?,
            lease: owner.map(|owner| Lease { owner, until_us }),
        })
    }
}

impl Store {
    /// The rows of a node, for the caller that has acquired its lease with this `epoch`. With another one, such as 0, which no
    /// acquisition has, they can be read, and changes fail.
    #[must_use]
    pub fn of_node(&self, node: NodeId, epoch: i64) -> NodeRows {
        NodeRows {
            store: self.clone(),
            lease_key: lease_key(&node, epoch),
            node,
            epoch,
        }
    }

    /// The rows of a node in a copy of a database that nobody else uses: its lease is free in the copy from now on.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn of_node_in_copy(&self, node: NodeId) -> Result<NodeRows, StoreError> {
        let query = sqlx::query(
            "UPDATE nodes SET lease_owner = NULL, lease_until_us = 0, lease_epoch = lease_epoch + 1, \
             lease_key = id || '.' || CAST(lease_epoch + 1 AS TEXT) WHERE id = $1 \
             RETURNING id, name, created_us, lease_owner, lease_until_us, lease_epoch",
        )
        .bind(node.as_str());
        let row: Option<NodeRow> = self.db.write_returning("take the lease in a copy", query).await?;
        Ok(self.of_node(node, row.map_or(0, |row| row.epoch)))
    }

    /// The time by which leases are written and compared, in microseconds since the Unix epoch. On PostgreSQL it is that of the
    /// database, so that servers whose clocks differ agree on which leases have expired. A file of SQLite belongs to one process,
    /// whose own time `own_us` is.
    ///
    /// Ask before reading or writing leases: until a caller that was stopped in between goes on, its time is too early, with
    /// which a lease that it writes ends sooner and one that it reads counts for longer.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn lease_time_us(&self, own_us: i64) -> Result<i64, StoreError> {
        let Some(statement) = self.db.engine.time() else {
            return Ok(own_us);
        };
        let time: u64 = self.db.read_number("read the time", sqlx::query(statement)).await?;
        Ok(i64::try_from(time).unwrap_or(i64::MAX))
    }

    /// Acquires the lease of a node unless another owner has it. Rows without a node, written by a version that did not
    /// know nodes, become this node's in the same transaction.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_lease_acquire(&self, request: &LeaseRequest) -> Result<LeaseOutcome, StoreError> {
        const WHAT: &str = "acquire the lease of a node";
        storable("host name", &request.name)?;
        let mut conflicts = 0;
        loop {
            let mut tx = self.db.begin(WHAT).await?;
            let inserted = sqlx::query(
                "INSERT INTO nodes (id, name, created_us, lease_owner, lease_until_us, lease_epoch, lease_key) \
                 VALUES ($1, $2, $3, $4, $5, 1, $7) \
                 ON CONFLICT (id) DO UPDATE SET name = excluded.name, lease_owner = excluded.lease_owner, \
                 lease_until_us = excluded.lease_until_us, lease_epoch = nodes.lease_epoch + 1, \
                 lease_key = nodes.id || '.' || CAST(nodes.lease_epoch + 1 AS TEXT) WHERE (nodes.lease_owner IS NULL \
                 OR nodes.lease_owner = excluded.lease_owner OR nodes.lease_until_us <= $6) AND nodes.lease_epoch = \
                 COALESCE($8, nodes.lease_epoch) \
                 RETURNING id, name, created_us, lease_owner, lease_until_us, lease_epoch",
            )
            .bind(request.node.as_str())
            .bind(request.name.as_str())
            .bind(request.now_us)
            .bind(request.lease.owner.as_str())
            .bind(request.lease.until_us)
            .bind(request.expired_us)
            .bind(lease_key(&request.node, 1))
            .bind(request.last_epoch)
            .all_in(&mut tx)
            .await;
            let rows = match inserted.map_err(|error| classify(&error, "node", WHAT)) {
                // Another one has inserted the node just now. PostgreSQL may see its lease key before its id, on which there is
                // no conflict for it then. The next time it sees both.
                Err(StoreError::Conflict { .. }) if conflicts < CONFLICTS_MAX => {
                    conflicts += 1;
                    continue;
                }
                rows => rows?,
            };
            if let Some(row) = rows.first() {
                let NodeRow { epoch, .. } = Columns::decode(row)?;
                for sql in [
                    "UPDATE sandboxes SET node_id = $1 WHERE node_id IS NULL",
                    "UPDATE idempotency_keys SET node_id = $1 WHERE node_id IS NULL",
                ] {
                    sqlx::query(sql)
                        .bind(request.node.as_str())
                        .execute_in(&mut tx)
                        .await
                        .map_err(|error| classify(&error, "node", WHAT))?;
                }
                tx.commit().await.map_err(|error| classify(&error, "node", WHAT))?;
                return Ok(LeaseOutcome::Acquired { epoch });
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
            sqlx::query("UPDATE nodes SET lease_owner = NULL, lease_until_us = 0, lease_key = NULL WHERE id = $1 AND lease_owner = $2")
                .bind(node.as_str())
                .bind(owner.as_str());
        let changed = self.db.write("node", "release the lease of a node", query).await?;
        Ok(changed > 0)
    }

    /// Ends the lease that another owner than `owner` has had of a node until before `now_us`: that one finds that it has lost the lease,
    /// instead of renewing it later.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn node_lease_end_expired(&self, node: &NodeId, owner: &OwnerId, now_us: i64) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE nodes SET lease_owner = NULL, lease_until_us = 0, lease_key = NULL \
             WHERE id = $1 AND lease_owner <> $2 AND lease_until_us <= $3",
        )
        .bind(node.as_str())
        .bind(owner.as_str())
        .bind(now_us);
        self.db.write("node", "end the expired lease of a node", query).await?;
        Ok(())
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
        let query = sqlx::query(
            "SELECT id, name, created_us, lease_owner, lease_until_us, lease_epoch FROM nodes WHERE id = $1",
        )
        .bind(id.as_str());
        self.db.read_optional("find a node", query).await
    }
}

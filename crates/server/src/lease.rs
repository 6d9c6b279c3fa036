//! The lease of a node: the right of a running server to change the node's rows.
//!
//! Several servers may share a database, and each changes only the rows of its own node. Two servers of one node would
//! undo each other's work: each would take the other's sandboxes for remains of a crash. So a server takes the node's
//! lease before it reads a row, renews it in the background, and releases it when it stops. A killed server releases
//! nothing; its successor has the same owner id, because the lock of the data directory proves that the earlier server
//! is gone, and takes the lease immediately. A copied data directory, or one whose machine was restarted, has another
//! owner id and waits until the lease expires.
//!
//! Requests never check the lease. The statements that change rows do: each names the number of the acquisition, so what a
//! server does after it has lost the lease, and before it knows, changes nothing.

use std::time::Duration;

use model::id::{NodeId, OwnerId};
use store::Store;
use store::error::StoreError;
use store::nodes::{Lease, LeaseOutcome, LeaseRequest, NodeRows};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};

/// Duration of a lease from when it is taken or renewed. A start waits this long after a power failure.
const LEASE: Duration = Duration::from_secs(10);
/// Pause between renewals: two of them may fail before the lease expires.
const RENEWAL: Duration = Duration::from_secs(3);
/// Time limit for releasing a lease: a stop must not wait for an unavailable database.
const RELEASE_BOUND: Duration = Duration::from_secs(2);
/// Pause between checks of a lease that another owner holds.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The node that a server manages, and the owner of its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    /// The node.
    pub id: NodeId,
    /// The name of its host, for display.
    pub name: String,
    /// The owner of its lease. Servers that may run at the same time have different owner ids.
    pub owner: OwnerId,
}

/// Why a lease could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another running server renews the lease.
    #[error(
        "another server runs node {node} (last started on {name}): if this data directory is a copy of that server's, \
         remove the file `node.json` from the copy, which makes it a node of its own"
    )]
    Held {
        /// The node.
        node: NodeId,
        /// The host on which its owner last started.
        name: String,
    },
}

/// The lease of a node, renewed for as long as this exists.
#[derive(Debug)]
pub struct NodeLease {
    rows: NodeRows,
    owner: OwnerId,
    lost: CancellationToken,
    renewal: TaskTracker,
    stop: CancellationToken,
}

impl Drop for NodeLease {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl NodeLease {
    /// Takes the lease of a node. Waits until it expires when another owner holds it and does not renew it.
    ///
    /// # Errors
    /// When another server renews it, or the database fails.
    pub async fn take(store: &Store, identity: NodeIdentity, clock: Clock) -> Result<Self, LeaseError> {
        let since = Instant::now();
        let mut first_seen: Option<Lease> = None;
        loop {
            let now_us = store.lease_time_us(clock.now_us()).await?;
            // A lease that was not renewed for that long has expired, even if the clock of the database was changed.
            let watched_us = first_seen
                .as_ref()
                .filter(|_| since.elapsed() > LEASE)
                .map(|lease| lease.until_us);
            let request = LeaseRequest {
                node: identity.id.clone(),
                name: identity.name.clone(),
                lease: lease(&identity.owner, now_us),
                now_us,
                expired_us: now_us.max(watched_us.unwrap_or(now_us)),
                last_epoch: None,
            };
            let held = match store.node_lease_acquire(&request).await? {
                LeaseOutcome::Acquired { epoch } => return Ok(Self::with_renewal(store, identity, epoch, clock)),
                LeaseOutcome::Held(held) => held,
            };
            match (&first_seen, &held.lease) {
                (None, Some(_)) => {
                    tracing::warn!(
                        node.id = %held.id,
                        "the lease of this node was not released: waiting until it expires, {LEASE:?} at most"
                    );
                    first_seen = held.lease;
                }
                (Some(before), Some(now)) if before != now => {
                    return Err(LeaseError::Held {
                        node: held.id,
                        name: held.name,
                    });
                }
                // Released meanwhile, or not renewed yet.
                (_, None) | (Some(_), Some(_)) => {}
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Takes the lease of a node that is connected to this server, from whoever has it. A node has one connection at a time, and
    /// closes it before it opens the next, so the server before cannot reach it any more; and the number of this acquisition keeps
    /// that server from changing its rows, whether it is gone, was only stopped, or has not noticed yet.
    ///
    /// `last_epoch` is the number of the last acquisition, 0 for none, that was read before the node has answered this server. If
    /// there is a later one, the node may have gone to another server while this one was stopped: then nothing is taken.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn take_of_connected(
        store: &Store,
        identity: NodeIdentity,
        last_epoch: i64,
        clock: Clock,
    ) -> Result<Option<Self>, StoreError> {
        let now_us = store.lease_time_us(clock.now_us()).await?;
        let request = LeaseRequest {
            node: identity.id.clone(),
            name: identity.name.clone(),
            lease: lease(&identity.owner, now_us),
            now_us,
            expired_us: i64::MAX,
            last_epoch: Some(last_epoch),
        };
        Ok(match store.node_lease_acquire(&request).await? {
            LeaseOutcome::Acquired { epoch } => Some(Self::with_renewal(store, identity, epoch, clock)),
            LeaseOutcome::Held(_) => None,
        })
    }

    fn with_renewal(store: &Store, identity: NodeIdentity, epoch: i64, clock: Clock) -> Self {
        let stop = CancellationToken::new();
        let lease = Self {
            rows: store.of_node(identity.id, epoch),
            owner: identity.owner,
            lost: CancellationToken::new(),
            renewal: TaskTracker::new(),
            stop: stop.clone(),
        };
        let (rows, owner, lost) = (lease.rows.clone(), lease.owner.clone(), lease.lost.clone());
        lease.renewal.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = renew(&rows, &owner, &clock) => lost.cancel(),
            }
        });
        lease
    }

    /// The owner of the lease.
    pub(crate) fn owner(&self) -> &OwnerId {
        &self.owner
    }

    /// The rows that may be changed.
    pub(crate) fn rows(&self) -> &NodeRows {
        &self.rows
    }

    /// Cancelled when another server has taken the lease: this server did not renew it for longer than its duration and
    /// must not change any more rows.
    pub(crate) fn lost(&self) -> CancellationToken {
        self.lost.clone()
    }

    /// Releases the lease.
    pub async fn release(self) {
        self.end_renewal().await;
        let release = self.rows.store().node_lease_release(self.rows.node(), &self.owner);
        // If this fails, the lease expires by itself.
        match tokio::time::timeout(RELEASE_BOUND, release).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(error = %Chain(&error), "cannot release the lease of this node"),
            Err(_) => tracing::warn!("the lease of this node was not released within {RELEASE_BOUND:?}"),
        }
    }

    /// Removes all sandboxes of the node and the node itself from the database, and returns how many sandboxes those
    /// were.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn remove_node(self) -> Result<usize, StoreError> {
        let rows = &self.rows;
        let live = rows.sandbox_list_live().await?;
        for sandbox in &live {
            rows.sandbox_delete(&sandbox.id).await?;
        }
        self.end_renewal().await;
        rows.store().node_delete(rows.node(), &self.owner).await?;
        Ok(live.len())
    }

    async fn end_renewal(&self) {
        self.stop.cancel();
        self.renewal.close();
        self.renewal.wait().await;
    }
}

/// A lease that begins at `now_us`, by the time of leases.
fn lease(owner: &OwnerId, now_us: i64) -> Lease {
    let lease_us = i64::try_from(LEASE.as_secs()).expect("a few seconds") * SECOND_US;
    Lease {
        owner: owner.clone(),
        until_us: now_us + lease_us,
    }
}

/// Renews a lease until another server has it.
async fn renew(rows: &NodeRows, owner: &OwnerId, clock: &Clock) {
    let mut failing = false;
    loop {
        tokio::time::sleep(RENEWAL).await;
        let renewed = async {
            let now_us = rows.store().lease_time_us(clock.now_us()).await?;
            rows.store().node_lease_renew(rows.node(), &lease(owner, now_us)).await
        };
        match renewed.await {
            Ok(true) if failing => {
                failing = false;
                tracing::info!("the lease of this node was renewed again");
            }
            Ok(true) => {}
            Ok(false) => {
                tracing::error!(node.id = %rows.node(), "another server has taken the lease of this node");
                return;
            }
            // An expired lease does no harm until another server takes it.
            Err(error) if !failing => {
                failing = true;
                tracing::warn!(error = %Chain(&error), "cannot renew the lease of this node");
            }
            Err(_) => {}
        }
    }
}

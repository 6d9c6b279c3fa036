//! The lease of a node: the right to change its rows, for as long as a server runs.
//!
//! Several servers may share a database, and each changes the rows of its own node only. Two servers of one node would
//! undo each other's work: each takes what the other made for what a crash left behind. So a server takes the node's
//! lease before it looks at a row, renews it in the background, and gives it back at its end. One that was killed gives
//! nothing back; its successor has the same owner id, because the lock of the data directory proves that the earlier
//! server is gone, and takes the lease at once. A data directory that was copied, or whose machine was restarted, has
//! another owner id and waits until the lease is over.
//!
//! Nothing on the way of a request asks for the lease.

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

/// How long a lease lasts from when it was taken or renewed. It is what a start waits for after a power cut.
const LEASE: Duration = Duration::from_secs(10);
/// Pause between renewals: two of them may fail before the lease is over.
const RENEWAL: Duration = Duration::from_secs(3);
/// How long giving a lease back may take: an end must not wait for a database that is away.
const RELEASE_BOUND: Duration = Duration::from_secs(2);
/// Pause between looks at a lease that another owner has.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Which node a server is for, and as whom it owns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeIdentity {
    /// The node.
    pub id: NodeId,
    /// The name of its host, for people.
    pub name: String,
    /// The owner of its lease. Two servers that may run at the same moment have different ones.
    pub owner: OwnerId,
}

/// Why a lease could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another server runs and renews it.
    #[error(
        "another server runs node {node} (last started on {name}): if this data directory is a copy of that server's, \
         remove the file `node.json` from the copy, which makes it a node of its own"
    )]
    Held {
        /// The node.
        node: NodeId,
        /// Where its owner runs.
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
    /// Takes the lease of a node, and waits until it is over when an owner has it that does not renew it.
    ///
    /// # Errors
    /// When another server renews it, or the database fails.
    pub async fn take(store: &Store, identity: NodeIdentity, clock: Clock) -> Result<Self, LeaseError> {
        let since = Instant::now();
        let mut first_seen: Option<Lease> = None;
        loop {
            let now_us = clock.now_us();
            // One that nobody renewed for that long is over, even where the clocks of two hosts differ.
            let watched_us = first_seen
                .as_ref()
                .filter(|_| since.elapsed() > LEASE)
                .map(|lease| lease.until_us);
            let request = LeaseRequest {
                node: identity.id.clone(),
                name: identity.name.clone(),
                lease: lease(&identity.owner, &clock),
                now_us,
                expired_us: now_us.max(watched_us.unwrap_or(now_us)),
            };
            let held = match store.node_lease_acquire(&request).await? {
                LeaseOutcome::Acquired => return Ok(Self::with_renewal(store, identity, clock)),
                LeaseOutcome::Held(held) => held,
            };
            match (&first_seen, &held.lease) {
                (None, Some(_)) => {
                    tracing::warn!(
                        node.id = %held.id,
                        "the lease of this node was not given back: waiting until it is over, {LEASE:?} at most"
                    );
                    first_seen = held.lease;
                }
                (Some(before), Some(now)) if before != now => {
                    return Err(LeaseError::Held {
                        node: held.id,
                        name: held.name,
                    });
                }
                // Given back a moment ago, or not renewed yet.
                (_, None) | (Some(_), Some(_)) => {}
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn with_renewal(store: &Store, identity: NodeIdentity, clock: Clock) -> Self {
        let stop = CancellationToken::new();
        let lease = Self {
            rows: store.of_node(identity.id),
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

    /// The rows that may be changed.
    pub(crate) fn rows(&self) -> &NodeRows {
        &self.rows
    }

    /// Cancelled when another server has taken the lease: this one was away for longer than the lease lasts, and must
    /// change no row any more.
    pub(crate) fn lost(&self) -> CancellationToken {
        self.lost.clone()
    }

    /// Gives the lease back.
    pub async fn release(self) {
        self.end_renewal().await;
        let release = self.rows.store().node_lease_release(self.rows.node(), &self.owner);
        // Without it, the lease expires by itself soon.
        match tokio::time::timeout(RELEASE_BOUND, release).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(error = %Chain(&error), "give back the lease of this node"),
            Err(_) => tracing::warn!("the database did not take back the lease of this node within {RELEASE_BOUND:?}"),
        }
    }

    /// Removes all sandboxes of the node and the node itself from the database, and says how many sandboxes those were.
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

/// A lease from now on.
fn lease(owner: &OwnerId, clock: &Clock) -> Lease {
    let lease_us = i64::try_from(LEASE.as_secs()).expect("a few seconds") * SECOND_US;
    Lease {
        owner: owner.clone(),
        until_us: clock.now_us() + lease_us,
    }
}

/// Renews a lease until another server has it.
async fn renew(rows: &NodeRows, owner: &OwnerId, clock: &Clock) {
    let mut failing = false;
    loop {
        tokio::time::sleep(RENEWAL).await;
        match rows.store().node_lease_renew(rows.node(), &lease(owner, clock)).await {
            Ok(true) if failing => {
                failing = false;
                tracing::info!("the lease of this node is renewed again");
            }
            Ok(true) => {}
            Ok(false) => {
                tracing::error!(node.id = %rows.node(), "another server has taken the lease of this node");
                return;
            }
            // A lease that is over does no harm as long as nobody else takes it.
            Err(error) if !failing => {
                failing = true;
                tracing::warn!(error = %Chain(&error), "renew the lease of this node");
            }
            Err(_) => {}
        }
    }
}

//! Whether there is room for another sandbox, and whether a team asks too often.
//!
//! [`quota`] is what a team may use, [`capacity`] what the host has left, and [`rate`] how often something may happen.
//! All of it is decided before anything of a sandbox is made.

pub(crate) mod capacity;
pub(crate) mod quota;
pub(crate) mod rate;

use std::sync::Arc;

use model::id::TeamId;
use protocol::node::HostCapacity;
use store::Store;
use store::error::StoreError;

use self::capacity::{Capacity, CapacityPermit};
use self::quota::{OverQuota, Quotas, Reservation, ResourceUse, TeamQuota};
use crate::clock::Clock;
use crate::deadlines::Deadlines;
use crate::node::NodeHandle;
use crate::settings::{CapacitySettings, Limits};

/// What a sandbox takes of its team's limits and of its host, given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Admission {
    /// Of the team's limits.
    #[expect(dead_code, reason = "held for what its end gives back")]
    reservation: Reservation,
    /// Of the host.
    #[expect(dead_code, reason = "held for what its end gives back")]
    capacity: CapacityPermit,
}

/// Why there is no room for a sandbox.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdmissionError {
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    #[error("{why}")]
    NoCapacity {
        why: String,
        /// Seconds until there may be.
        retry_after_s: u32,
    },
}

/// Decides who may have another sandbox, and how often a team may ask.
#[derive(Debug)]
pub(crate) struct AdmissionControl {
    store: Store,
    node: NodeHandle,
    quotas: Quotas,
    capacity: Capacity,
    deadlines: Arc<Deadlines>,
    clock: Clock,
}

impl AdmissionControl {
    pub(crate) fn new(
        store: Store,
        node: NodeHandle,
        (limits, capacity): (Limits, CapacitySettings),
        deadlines: Arc<Deadlines>,
        clock: Clock,
    ) -> Self {
        Self {
            store,
            node,
            quotas: Quotas::new(limits),
            capacity: Capacity::new(capacity),
            deadlines,
            clock,
        }
    }

    /// The quota of a team.
    ///
    /// # Errors
    /// When the database fails, which is asked at most once for each team.
    pub(crate) async fn quota_of(&self, team: &TeamId) -> Result<Arc<TeamQuota>, StoreError> {
        self.quotas.of(&self.store, team).await
    }

    /// Takes what a sandbox of this size needs of its team's limits and of the host, before anything of it is made.
    pub(crate) async fn admit(&self, quota: &Arc<TeamQuota>, share: ResourceUse) -> Result<Admission, AdmissionError> {
        let reservation = quota.reserve(share)?;
        let permit = self.capacity.admit(&*self.node, &self.clock).await;
        Ok(Admission {
            reservation,
            capacity: permit.map_err(|why| AdmissionError::NoCapacity {
                why: why.to_string(),
                retry_after_s: self.deadlines.capacity_retry_s(&self.clock),
            })?,
        })
    }

    /// Takes the same for a sandbox that runs already, whatever the limits.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn occupy(&self, team: &TeamId, share: ResourceUse) -> Result<Admission, StoreError> {
        let quota = self.quota_of(team).await?;
        Ok(Admission {
            reservation: quota.occupy(share),
            capacity: self.capacity.occupy(),
        })
    }

    /// What the host has left, at most a moment ago; none if it cannot tell.
    pub(crate) async fn host_capacity(&self) -> Option<HostCapacity> {
        self.capacity.host(&*self.node, &self.clock).await
    }

    /// Says in the log which names are limited that no team has, most likely misspelt.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn check_names(&self) -> Result<(), StoreError> {
        for name in self.quotas.unknown_names(&self.store).await? {
            tracing::warn!(team = name, "the configuration limits a team that does not exist");
        }
        Ok(())
    }
}

//! Admission: whether a create request may start now.
//!
//! [`quota`] is what a team may use, [`capacity`] what the host has left, and [`rate`] how often something may happen.
//! All of them are checked before any part of a sandbox is created.

pub(crate) mod capacity;
pub(crate) mod quota;
pub(crate) mod rate;

use std::sync::Arc;

use model::id::TeamId;
use protocol::node::HostCapacity;
use store::Store;
use store::error::StoreError;

use self::capacity::{Capacity, CapacityPermit, NoCapacity};
use self::quota::{OverQuota, Quotas, Reservation, ResourceUse, TeamQuota};
use crate::clock::Clock;
use crate::deadlines::Deadlines;
use crate::node::NodeHandle;
use crate::settings::{CapacitySettings, Limits};

/// What a sandbox takes of its team's quota and of its host, released when this is dropped.
#[derive(Debug)]
pub(crate) struct Admission {
    /// The share of the team's quota.
    #[expect(dead_code, reason = "released when dropped")]
    reservation: Reservation,
    /// The share of the host.
    #[expect(dead_code, reason = "released when dropped")]
    capacity: CapacityPermit,
}

/// Why a create request was not admitted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdmissionError {
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    #[error("{why}")]
    NoCapacity {
        why: String,
        /// Seconds until there may be capacity.
        retry_after_s: u32,
    },
}

/// Decides about the admission of create requests, and has the quotas of teams.
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
    /// When the database fails. It is queried at most once for each team.
    pub(crate) async fn quota_of(&self, team: &TeamId) -> Result<Arc<TeamQuota>, StoreError> {
        self.quotas.of(&self.store, team).await
    }

    /// Reserves what a sandbox of this size needs of its team's quota and of the host.
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

    /// Reserves what a sandbox needs of the host, for one that counts against no team.
    pub(crate) async fn admit_to_host(&self) -> Result<CapacityPermit, NoCapacity> {
        self.capacity.admit(&*self.node, &self.clock).await
    }

    /// Reserves the same for a sandbox that is running already, regardless of the limits.
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

    /// What the host has left, from a recent reading; `None` if the node could not read it.
    pub(crate) async fn host_capacity(&self) -> Option<HostCapacity> {
        self.capacity.host(&*self.node, &self.clock).await
    }

    /// Logs the team names in the limits that no team has, most likely misspelt.
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

//! Admission: whether a create request may start now.
//!
//! [`quota`] is what a team may use, [`capacity`] what the host has left, and [`rate`] how often something may happen.
//! All of them are checked before any part of a sandbox is created.

pub(crate) mod capacity;
pub(crate) mod quota;
pub(crate) mod rate;

use std::collections::HashMap;
use std::sync::Arc;

use model::capacity::{Bounds, PermitRequest, Purpose};
use model::id::{SandboxId, TeamId};
use protocol::node::{HostCapacity, HostReport, NoCapacity};
use store::Store;
use store::error::StoreError;
use store::servers::UseElsewhere;

use self::capacity::{Capacity, CapacityPermit};
use self::quota::{OverQuota, Quotas, Reservation, ResourceUse, TeamQuota};
use crate::clock::Clock;
use crate::deadlines::Deadlines;
use crate::node::NodeHandle;
use crate::settings::{CapacitySettings, Limits};

/// What a sandbox takes of its team's quota and of its host, released when this and its clones are dropped.
#[derive(Debug, Clone)]
pub(crate) struct Admission {
    /// The share of the team's quota.
    reservation: Arc<Reservation>,
    /// The share of the host, released when dropped; none while nothing of the sandbox runs.
    capacity: Option<Arc<CapacityPermit>>,
}

impl Admission {
    /// The admission of a sandbox whose share of the host is that of a sandbox that was started in advance.
    pub(crate) fn of_started(reservation: Arc<Reservation>, capacity: Arc<CapacityPermit>) -> Self {
        Self {
            reservation,
            capacity: Some(capacity),
        }
    }

    /// Takes another share of the team's quota instead, if what it has more exceeds no limit. The share of the host stays.
    pub(crate) fn exchange(&self, share: ResourceUse) -> Result<(), OverQuota> {
        self.reservation.exchange(share)
    }

    /// Changes the reserved share regardless of the limits.
    pub(crate) fn force(&self, share: ResourceUse) {
        self.reservation.force(share);
    }

    /// The share of the team's quota.
    pub(crate) fn reservation(&self) -> &Arc<Reservation> {
        &self.reservation
    }

    /// Releases the share of the host.
    pub(crate) fn leave_host(&mut self) {
        self.capacity = None;
    }

    /// Whether the admission includes a share of the host.
    pub(crate) fn is_on_host(&self) -> bool {
        self.capacity.is_some()
    }

    /// Takes a share of the host.
    pub(crate) fn enter_host(&mut self, permit: CapacityPermit) {
        self.capacity = Some(Arc::new(permit));
    }
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
    quotas: Arc<Quotas>,
    capacity: Capacity,
    deadlines: Arc<Deadlines>,
    clock: Clock,
}

impl AdmissionControl {
    pub(crate) fn new(
        store: Store,
        node: NodeHandle,
        limits: Limits,
        capacity: CapacitySettings,
        deadlines: Arc<Deadlines>,
        clock: Clock,
    ) -> Self {
        Self {
            store,
            node,
            quotas: Arc::new(Quotas::new(limits)),
            capacity: Capacity::new(capacity),
            deadlines,
            clock,
        }
    }

    /// Admission of another node, with the same quotas.
    pub(crate) fn on(&self, node: NodeHandle) -> Self {
        Self {
            store: self.store.clone(),
            node,
            quotas: Arc::clone(&self.quotas),
            capacity: self.capacity.like_this(),
            deadlines: Arc::clone(&self.deadlines),
            clock: self.clock.clone(),
        }
    }

    /// The quota of a team.
    ///
    /// # Errors
    /// When the database fails. It is queried at most once for each team.
    pub(crate) async fn quota_of(&self, team: &TeamId) -> Result<Arc<TeamQuota>, StoreError> {
        self.quotas.of(&self.store, team).await
    }

    /// Reserves what a sandbox needs of the host; its share of its team's quota is reserved already.
    pub(crate) async fn admit(
        &self,
        id: &SandboxId,
        reservation: &Arc<Reservation>,
    ) -> Result<Admission, AdmissionError> {
        let permit = self.capacity.admit(&self.node, id).await;
        let permit = permit.map_err(|why| AdmissionError::NoCapacity {
            why: why.to_string(),
            retry_after_s: self.deadlines.capacity_retry_s(&self.clock),
        })?;
        Ok(Admission {
            reservation: Arc::clone(reservation),
            capacity: Some(Arc::new(permit)),
        })
    }

    /// An admission of a sandbox whose start asks for the permit, by [`Self::ask_with_start`].
    pub(crate) fn admit_with_start(&self, reservation: &Arc<Reservation>) -> Admission {
        Admission {
            reservation: Arc::clone(reservation),
            capacity: Some(Arc::new(self.capacity.of_start())),
        }
    }

    /// The request for a permit that is sent with the next start of a sandbox, if it comes with that.
    pub(crate) fn ask_with_start(&self, admission: &Admission, id: &SandboxId) -> Option<PermitRequest> {
        let permit = admission.capacity.as_ref().filter(|permit| permit.comes_with_start())?;
        Some(self.capacity.expect(permit, &self.node, id, Purpose::Wanted))
    }

    /// Reserves what a sandbox needs of the host, for one that counts against no team.
    pub(crate) async fn admit_to_host(&self, id: &SandboxId) -> Result<CapacityPermit, NoCapacity> {
        self.capacity.admit(&self.node, id).await
    }

    /// A share of the host for a sandbox that takes this much memory and that nobody waits for; none unless much is left.
    pub(crate) async fn admit_spare(&self, id: &SandboxId, memory_bytes: u64) -> Option<CapacityPermit> {
        self.capacity.admit_spare(&self.node, id, memory_bytes).await
    }

    /// Disk space of the host above what is reserved, in bytes; nothing if it cannot be read.
    pub(crate) async fn spare_disk_bytes(&self) -> Option<u64> {
        let report = self.node.capacity().await.ok()?;
        Some(
            report
                .left
                .disk_available_bytes
                .saturating_sub(self.capacity.disk_floor_bytes()),
        )
    }

    /// Whether the host is so short of memory that requests may be refused soon.
    pub(crate) async fn is_short_of_memory(&self) -> bool {
        self.capacity.is_short_of_memory(&*self.node, &self.clock).await
    }

    /// Makes the next request read what the host has left, because something has ended.
    pub(crate) fn forget_reading(&self) {
        self.capacity.forget_reading();
    }

    /// Reserves the same for a sandbox that is running already, regardless of the limits.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn occupy(&self, team: &TeamId, share: ResourceUse) -> Result<Admission, StoreError> {
        let quota = self.quota_of(team).await?;
        Ok(Admission {
            reservation: Arc::new(quota.occupy(share)),
            capacity: Some(Arc::new(self.capacity.of_present())),
        })
    }

    /// What the host has left, from a recent reading; `None` if the node could not read it.
    pub(crate) async fn host_capacity(&self) -> Option<HostCapacity> {
        Some(self.host_report().await?.left)
    }

    /// What the host has left, and how large and how busy it is, from a recent reading.
    pub(crate) async fn host_report(&self) -> Option<HostReport> {
        self.capacity.host(&*self.node, &self.clock).await
    }

    /// The bounds of this server for any host.
    pub(crate) fn bounds(&self) -> Bounds {
        self.capacity.bounds()
    }

    /// What the node has reported last, and how many sandboxes were admitted to it. Nothing is read.
    pub(crate) fn last_report(&self) -> (Option<HostReport>, u32) {
        self.capacity.last(&self.clock)
    }

    /// Notes what teams use on nodes of other servers.
    ///
    /// # Errors
    /// When the database fails.
    pub(crate) async fn note_elsewhere(&self, uses: Vec<UseElsewhere>) -> Result<(), StoreError> {
        let mut teams: HashMap<TeamId, ResourceUse> = HashMap::new();
        for part in uses {
            teams.entry(part.team.clone()).or_default().add_elsewhere(&part);
        }
        self.quotas.note_elsewhere(&self.store, teams).await
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

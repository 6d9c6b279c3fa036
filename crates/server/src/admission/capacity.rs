//! Capacity permits of the node, as the server holds them.
//!
//! Whether a host has capacity for another sandbox, the host itself decides ([`model::capacity`]): it is asked for a permit
//! before any part of a sandbox is created, by a call of its own or by the start itself. The server adds its own bounds to those
//! of the node, and gives back what it does not use. When a sandbox ends, nobody has to tell the node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use model::capacity::{Bounds, FRESH_US, PERMIT_US, PermitRequest, Purpose};
use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::node::{HostReport, NoCapacity, NodeApi};

use crate::chain::Chain;
use crate::clock::Clock;
use crate::node::NodeHandle;
use crate::settings::CapacitySettings;

/// Bytes of a MiB.
const MIB: u64 = 1024 * 1024;
/// How long a permit lasts of which nothing is begun. One that is older need not be given back.
const PERMIT_LASTS: Duration = Duration::from_micros(PERMIT_US.unsigned_abs());
/// How long a reading tells nodes apart, in microseconds: several rounds of reports.
const REPORTED_US: i64 = 5_000_000;

#[derive(Debug, Clone, Copy)]
struct Reading {
    at_us: i64,
    /// What it said; `None` when the node could not read what its host has left.
    report: Option<HostReport>,
}

/// Asks nodes for permits, and reads what they have left.
#[derive(Debug)]
pub(crate) struct Capacity {
    settings: CapacitySettings,
    reading: Mutex<Option<Reading>>,
    /// Whether the node reads again what its host has left for the next permit, because something has ended.
    reads_again: AtomicBool,
    /// Held during a reading, so that a burst reads only once.
    reading_lock: tokio::sync::Mutex<()>,
    /// How many shares of the host there are.
    shares: Arc<AtomicU32>,
}

/// A share of the host for one sandbox: a permit of its node until it has processes, and these until they have ended. When
/// this is dropped, a permit that was not used is given back.
#[derive(Debug)]
pub(crate) struct CapacityPermit {
    given: Mutex<Option<Given>>,
    /// Whether the permit comes with the start. Nothing is given until then.
    comes_with_start: bool,
    /// The number of shares, this one included.
    shares: Arc<AtomicU32>,
}

#[derive(Debug)]
struct Given {
    node: NodeHandle,
    id: SandboxId,
    number: u64,
    since: Instant,
}

impl CapacityPermit {
    fn new(comes_with_start: bool, shares: &Arc<AtomicU32>) -> Self {
        shares.fetch_add(1, Ordering::Relaxed);
        Self {
            given: Mutex::default(),
            comes_with_start,
            shares: Arc::clone(shares),
        }
    }

    /// Whether the node is asked for it by the start.
    pub(super) fn comes_with_start(&self) -> bool {
        self.comes_with_start
    }
}

impl Drop for CapacityPermit {
    fn drop(&mut self) {
        self.shares.fetch_sub(1, Ordering::Relaxed);
        if let Some(given) = self.given.get_mut().take()
            && given.since.elapsed() < PERMIT_LASTS
        {
            given.node.give_back(&given.id, given.number);
        }
    }
}

impl Capacity {
    pub(crate) fn new(settings: CapacitySettings) -> Self {
        Self {
            settings,
            reading: Mutex::default(),
            reads_again: AtomicBool::new(false),
            reading_lock: tokio::sync::Mutex::default(),
            shares: Arc::default(),
        }
    }

    /// The capacity of another host, with the same settings.
    pub(super) fn like_this(&self) -> Self {
        Self::new(self.settings)
    }

    /// The last reading, if it is not too old to tell nodes apart, and the number of sandboxes.
    pub(super) fn last(&self, clock: &Clock) -> (Option<HostReport>, u32) {
        let now_us = clock.now_us();
        let reading = (*self.reading.lock()).filter(|reading| (0..REPORTED_US).contains(&(now_us - reading.at_us)));
        (
            reading.and_then(|reading| reading.report),
            self.shares.load(Ordering::Relaxed),
        )
    }

    /// Disk space that is reserved, in bytes.
    pub(super) fn disk_floor_bytes(&self) -> u64 {
        u64::from(self.settings.disk_floor_mb) * MIB
    }

    /// The share of a sandbox that has processes, or that asks its node for a permit when it gets them.
    pub(super) fn of_present(&self) -> CapacityPermit {
        CapacityPermit::new(false, &self.shares)
    }

    /// The share of a sandbox whose permit comes with its start. It is counted at once.
    pub(super) fn of_start(&self) -> CapacityPermit {
        CapacityPermit::new(true, &self.shares)
    }

    /// Expects a permit that is asked for next, by a call or by a start that is sent with the result. What is cut may have got
    /// one, and so may a start that was refused: it says nothing of its permit.
    pub(super) fn expect(
        &self,
        permit: &CapacityPermit,
        node: &NodeHandle,
        id: &SandboxId,
        purpose: Purpose,
    ) -> PermitRequest {
        // Never 0, which is that of no permit.
        let number = uuid::Uuid::new_v4().as_u64_pair().0 | 1;
        *permit.given.lock() = Some(Given {
            node: node.clone(),
            id: id.clone(),
            number,
            since: Instant::now(),
        });
        PermitRequest {
            id: id.clone(),
            number,
            purpose,
            bounds: self.settings.bounds(),
            reads_again: self.reads_again.swap(false, Ordering::Relaxed),
        }
    }

    /// A permit for a new sandbox, if the host has capacity for it. If the node does not answer, the sandbox is admitted:
    /// its start tells why it fails.
    pub(crate) async fn admit(&self, node: &NodeHandle, id: &SandboxId) -> Result<CapacityPermit, NoCapacity> {
        self.ask(node, id, Purpose::Wanted).await
    }

    /// A permit for a sandbox that takes this much memory and that nobody waits for. It is not given unless twice the
    /// floors are left.
    pub(crate) async fn admit_spare(
        &self,
        node: &NodeHandle,
        id: &SandboxId,
        memory_bytes: u64,
    ) -> Option<CapacityPermit> {
        self.ask(node, id, Purpose::Spare { memory_bytes }).await.ok()
    }

    async fn ask(&self, node: &NodeHandle, id: &SandboxId, purpose: Purpose) -> Result<CapacityPermit, NoCapacity> {
        let permit = CapacityPermit::new(false, &self.shares);
        let request = self.expect(&permit, node, id, purpose);
        match node.permit(request).await {
            Ok(Ok(())) => Ok(permit),
            Ok(Err(why)) => {
                *permit.given.lock() = None;
                Err(why)
            }
            Err(_) if purpose != Purpose::Wanted => Err(NoCapacity::NotSpare),
            Err(error) => {
                tracing::warn!(sandbox.id = %id, error = %Chain(&error), "the node does not say whether it has capacity");
                Ok(permit)
            }
        }
    }

    /// Whether less memory is left than one and a half times the floor.
    pub(crate) async fn is_short_of_memory(&self, node: &dyn NodeApi, clock: &Clock) -> bool {
        let floor_bytes = u64::from(self.settings.memory_floor_mb) * 3 * MIB / 2;
        let report = self.host(node, clock).await;
        report.is_some_and(|report| report.left.memory_available_bytes < floor_bytes)
    }

    /// Makes the next request read again what the host has left.
    pub(crate) fn forget_reading(&self) {
        self.reads_again.store(true, Ordering::Relaxed);
        *self.reading.lock() = None;
    }

    /// The bounds of this server.
    pub(super) fn bounds(&self) -> Bounds {
        self.settings.bounds()
    }

    /// What the host has left and how busy it is, from a recent reading; `None` if the node could not read it.
    pub(crate) async fn host(&self, node: &dyn NodeApi, clock: &Clock) -> Option<HostReport> {
        if let Some(reading) = self.fresh(clock) {
            return reading.report;
        }
        let _guard = self.reading_lock.lock().await;
        if let Some(reading) = self.fresh(clock) {
            return reading.report;
        }
        let report = match node.capacity().await {
            Ok(report) => Some(report),
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "cannot read the capacity of the host");
                None
            }
        };
        *self.reading.lock() = Some(Reading {
            at_us: clock.now_us(),
            report,
        });
        report
    }

    fn fresh(&self, clock: &Clock) -> Option<Reading> {
        let now_us = clock.now_us();
        // A clock that was set back must not extend the validity of a reading.
        (*self.reading.lock()).filter(|reading| (0..FRESH_US).contains(&(now_us - reading.at_us)))
    }
}

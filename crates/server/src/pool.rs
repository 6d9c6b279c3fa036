//! The warm pool: sandboxes that are started before a client asks for them, with their start command ready, and frozen.
//!
//! A pooled sandbox has nothing of a client: no row, no owner, no place in a quota, no environment, a network that allows
//! nothing, and no entry in the registry, so that nobody reaches it. Its id is random and its own, and becomes the id of
//! the sandbox that a create request gets: a claim takes it out of the pool, gives its agent the identity of the request,
//! and stores its row. A restart of the platform ends pooled sandboxes like everything without a row.
//!
//! [`refill`] decides which there should be, starts them, and ends those that are not needed any more. This module has
//! what requests do: taking one, and ending one where capacity is short. A pooled sandbox must never be the reason for
//! the refusal of a request.

mod demand;
mod refill;
mod wait;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use model::id::{BuildId, LayerId, SandboxId, TeamId, TemplateId};
use model::resources::Resources;
use parking_lot::Mutex;
use protocol::node::{NoCapacity, NodeError, SandboxLog};
use store::builds::BuildRow;
use store::nodes::NodeRows;
use store::sandboxes::SandboxRow;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admission::capacity::CapacityPermit;
use crate::admission::quota::Reservation;
use crate::admission::{Admission, AdmissionControl, AdmissionError};
use crate::builds::recipe::{BuildSpec, layers_of};
use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::keys::TokenSeed;
use crate::metrics::Metrics;
use crate::node::NodeHandle;
use crate::outcome::{PoolEnd, PoolUse};
use crate::settings::PoolSettings;
use demand::Demand;

/// How long nothing is started after a request has needed the capacity of a pooled sandbox, in microseconds.
const YIELD_US: i64 = 30 * SECOND_US;
/// How long a request waits for the end of a pooled sandbox.
const EVICT_BOUND: Duration = Duration::from_secs(10);
/// Pause between two attempts to end a sandbox.
const END_RETRY: Duration = Duration::from_secs(1);
/// How old a pooled sandbox may be, in microseconds.
pub(crate) const AGE_MAX_US: i64 = 3600 * SECOND_US;
/// Maximum number of log entries of a pooled sandbox that are kept for its owner.
const LOG_MAX: usize = 64;

/// What pooled sandboxes have to have in common with a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PoolKey {
    build: BuildId,
    cpu_count: u32,
    memory_mb: u32,
    disk_mb: u32,
}

impl PoolKey {
    /// The key of a sandbox.
    pub(crate) fn of_sandbox(row: &SandboxRow) -> Self {
        Self {
            build: row.build_id.clone(),
            cpu_count: row.cpu_count,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
        }
    }

    /// The key of the sandboxes of a build.
    pub(crate) fn of(build: &BuildRow) -> Self {
        Self {
            build: build.id.clone(),
            cpu_count: build.cpu_count,
            memory_mb: build.memory_mb,
            disk_mb: build.disk_mb,
        }
    }
}

/// The services of the pool.
#[derive(Debug)]
pub(crate) struct PoolServices {
    pub(crate) rows: NodeRows,
    pub(crate) node: NodeHandle,
    pub(crate) tokens: TokenSeed,
    pub(crate) admission: Arc<AdmissionControl>,
    pub(crate) metrics: Arc<Metrics>,
    /// Limits that a build does not set.
    pub(crate) resources: Resources,
    pub(crate) clock: Clock,
    /// Ends of sandboxes, which go on when the server stops.
    pub(crate) work: TaskTracker,
}

/// The warm pool of the node of this server.
#[derive(Debug)]
pub(crate) struct Pool {
    settings: PoolSettings,
    services: PoolServices,
    state: Mutex<State>,
    /// Something changed that may need a start.
    changed: Notify,
    /// A sandbox has left the pool.
    left: Notify,
    /// One that was being started is ready, or will not be.
    settled: Notify,
    /// Create requests in progress, and how many there were.
    creating: AtomicUsize,
    created: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    demands: HashMap<PoolKey, Demand>,
    members: HashMap<SandboxId, Member>,
    /// Time before which no sandbox is started.
    paused_until_us: i64,
    /// Whether the node drains: the pool is empty, or becomes so.
    is_draining: bool,
}

/// What becomes of a pooled sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The sandbox and its start command are being started.
    Starting,
    /// The sandbox can be claimed.
    Ready,
    /// A request has the sandbox.
    Taken,
    /// The sandbox is being ended.
    Ending,
}

/// A sandbox of the pool.
#[derive(Debug)]
struct Member {
    key: PoolKey,
    phase: Phase,
    since_us: i64,
    memory_bytes: u64,
    permit: Arc<CapacityPermit>,
    /// Ends its start.
    cancel: CancellationToken,
    /// Whether the sandbox ended by itself.
    is_dead: bool,
    /// Whether a request waits for the sandbox to become ready, which no other may take.
    is_promised: bool,
    log: Vec<SandboxLog>,
}

/// A pooled sandbox, for the operator.
#[derive(Debug)]
pub(crate) struct PooledSandbox {
    pub(crate) id: SandboxId,
    pub(crate) template: TemplateId,
    pub(crate) is_ready: bool,
    pub(crate) since_us: i64,
    pub(crate) cpu_count: u32,
    pub(crate) memory_mb: u32,
    pub(crate) disk_mb: u32,
}

/// What a request asks the pool for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    /// The template.
    pub(crate) template: &'a TemplateId,
    /// The team that the template belongs to; none for one of the operator.
    pub(crate) owner: Option<&'a TeamId>,
    /// What the sandbox has to have.
    pub(crate) key: &'a PoolKey,
    /// What its build consists of.
    pub(crate) spec: &'a BuildSpec,
}

/// What the pool has for a request.
enum Offer {
    Taken(Taken),
    Missing,
    /// Sandboxes of this kind are not kept ready.
    Nothing,
}

/// A create request in progress.
#[derive(Debug)]
pub(crate) struct Creating(Arc<Pool>);

impl Drop for Creating {
    fn drop(&mut self) {
        self.0.created.fetch_add(1, Ordering::Relaxed);
        self.0.creating.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A pooled sandbox that a request has taken. Dropping it unused returns it to the pool.
#[derive(Debug)]
pub(crate) struct Taken {
    pool: Arc<Pool>,
    id: SandboxId,
    key: PoolKey,
    permit: Arc<CapacityPermit>,
    is_used: bool,
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !self.is_used {
            self.pool.put_back(&self.id);
        }
    }
}

impl Taken {
    /// Id of the sandbox.
    pub(crate) fn id(&self) -> &SandboxId {
        &self.id
    }

    /// Its share of the host, which the request takes over.
    pub(crate) fn permit(&self) -> Arc<CapacityPermit> {
        Arc::clone(&self.permit)
    }

    /// Takes the sandbox out of the pool for good, and returns what was logged of it; none if it has ended. Its entry
    /// is in the registry already, so that its end does not stay unnoticed. From here on the caller ends it when
    /// something fails.
    pub(crate) fn begin(&mut self) -> Option<Vec<SandboxLog>> {
        self.is_used = true;
        let member = self.pool.state.lock().members.remove(&self.id);
        self.pool.left.notify_waiters();
        self.pool.changed.notify_one();
        let member = member.filter(|member| !member.is_dead)?;
        Some(member.log)
    }

    /// Notes what became of the claim.
    pub(crate) fn finish(self, is_claimed: bool) {
        let pool_use = if is_claimed { PoolUse::Hit } else { PoolUse::Failed };
        self.pool.services.metrics.pool_use(pool_use);
        if let Some(demand) = self.pool.state.lock().demands.get_mut(&self.key) {
            if is_claimed {
                demand.failures = 0;
            } else {
                demand.fail(self.pool.services.clock.now_us());
            }
        }
    }
}

impl Pool {
    pub(crate) fn new(settings: PoolSettings, services: PoolServices) -> Self {
        Self {
            settings,
            services,
            state: Mutex::default(),
            changed: Notify::new(),
            left: Notify::new(),
            settled: Notify::new(),
            creating: AtomicUsize::new(0),
            created: AtomicU64::new(0),
        }
    }

    /// Notes that a create request is in progress, until the result is dropped: nothing is started meanwhile.
    pub(crate) fn creating(self: &Arc<Self>) -> Creating {
        self.creating.fetch_add(1, Ordering::Relaxed);
        Creating(Arc::clone(self))
    }

    /// How many sandboxes of a build the pool should have while they are used.
    fn size_of(&self, spec: &BuildSpec) -> u32 {
        match (&spec.start, &spec.memory) {
            (Some(_), None) => self.settings.per_template,
            // With memory, what the start command does is there already.
            (None, _) | (_, Some(_)) => 0,
        }
    }

    /// Takes a sandbox for a request, if there is one that is ready, and notes what was asked for.
    fn take_ready(self: &Arc<Self>, asked: Asked<'_>) -> Offer {
        let Asked {
            template,
            owner,
            key,
            spec,
        } = asked;
        let now_us = self.services.clock.now_us();
        let size = self.size_of(spec);
        let mut state = self.state.lock();
        if let Some(demand) = state.demands.get_mut(key) {
            demand.used(now_us);
        } else if size > 0 {
            let mut demand = Demand::new(template.clone(), Arc::new(spec.clone()), size);
            demand.owner = owner.cloned();
            demand.used(now_us);
            state.demands.insert(key.clone(), demand);
        } else {
            return Offer::Nothing;
        }
        let oldest = state
            .members
            .iter_mut()
            .filter(|(_, member)| member.phase == Phase::Ready && member.key == *key && !member.is_promised)
            .min_by_key(|(_, member)| member.since_us);
        let taken = oldest.map(|(id, member)| {
            member.phase = Phase::Taken;
            (id.clone(), Arc::clone(&member.permit))
        });
        drop(state);
        let Some((id, permit)) = taken else {
            return Offer::Missing;
        };
        Offer::Taken(Taken {
            pool: Arc::clone(self),
            id,
            key: key.clone(),
            permit,
            is_used: false,
        })
    }

    /// Notes how long a sandbox of a kind took to become ready that a request has started, unless that is known. The
    /// environment of a request may make it take longer than others.
    pub(crate) fn became_ready(&self, key: &PoolKey, took: Duration) {
        if let Some(demand) = self.state.lock().demands.get_mut(key)
            && demand.ready_us == 0
        {
            demand.ready_us = i64::try_from(took.as_micros()).unwrap_or(i64::MAX);
        }
    }

    fn put_back(self: &Arc<Self>, id: &SandboxId) {
        let mut state = self.state.lock();
        let Some(member) = state.members.get_mut(id) else {
            return;
        };
        member.phase = Phase::Ready;
        let (is_dead, key) = (member.is_dead, member.key.clone());
        if is_dead {
            self.begin_end(&mut state, id, PoolEnd::Died);
        } else if state.is_draining {
            self.begin_end(&mut state, id, PoolEnd::Drained);
        } else if !state.demands.contains_key(&key) {
            // Forgotten while the request had it.
            self.begin_end(&mut state, id, PoolEnd::Stale);
        }
    }

    /// Ends the pooled sandbox that is needed least, for a request that lacks capacity, and returns whether one has ended.
    /// For some time no other is started.
    pub(crate) async fn evict(self: &Arc<Self>) -> bool {
        let left = self.left.notified();
        tokio::pin!(left);
        left.as_mut().enable();
        {
            let mut state = self.state.lock();
            if !state.members.values().any(|member| member.phase != Phase::Taken) {
                return false;
            }
            state.paused_until_us = self.services.clock.now_us() + YIELD_US;
            if let Some(id) = state.least_needed() {
                self.begin_end(&mut state, &id, PoolEnd::Evicted);
            }
        }
        tokio::time::timeout(EVICT_BOUND, left).await.is_ok()
    }

    /// Reserves what a sandbox of this size needs. Where the host has no capacity, pooled sandboxes are ended for it first.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        id: &SandboxId,
        reservation: &Arc<Reservation>,
    ) -> Result<Admission, AdmissionError> {
        let admission = &self.services.admission;
        let mut is_last = false;
        loop {
            match admission.admit(id, reservation).await {
                Err(AdmissionError::NoCapacity { .. }) if !is_last => {
                    if self.evict().await {
                        admission.forget_reading();
                    } else {
                        // Once more: the last one may have just ended.
                        is_last = true;
                    }
                }
                admitted => return admitted,
            }
        }
    }

    /// Reserves what a sandbox needs of the host, for one that counts against no team and waits for capacity.
    pub(crate) async fn admit_to_host(self: &Arc<Self>, id: &SandboxId) -> Result<CapacityPermit, NoCapacity> {
        let admission = &self.services.admission;
        match admission.admit_to_host(id).await {
            Err(_) if self.evict().await => {
                admission.forget_reading();
                admission.admit_to_host(id).await
            }
            admitted => admitted,
        }
    }

    /// Ends a pooled sandbox for the operator. Returns whether there was one.
    pub(crate) fn end(self: &Arc<Self>, id: &SandboxId) -> bool {
        let mut state = self.state.lock();
        let is_pooled = state.members.get(id).is_some_and(|member| member.phase != Phase::Taken);
        if is_pooled {
            self.begin_end(&mut state, id, PoolEnd::Operator);
        }
        is_pooled
    }

    /// Ends what no request has, and starts nothing, until the node does not drain any more.
    pub(crate) fn drain(self: &Arc<Self>, is_draining: bool) {
        let mut state = self.state.lock();
        state.is_draining = is_draining;
        if is_draining {
            let held = state.members.iter().filter(|(_, member)| member.phase != Phase::Taken);
            let ids: Vec<SandboxId> = held.map(|(id, _)| id.clone()).collect();
            for id in &ids {
                self.begin_end(&mut state, id, PoolEnd::Drained);
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Notes that a sandbox has ended by itself.
    pub(crate) fn exited(self: &Arc<Self>, id: &SandboxId) {
        let mut state = self.state.lock();
        let Some(member) = state.members.get_mut(id) else {
            return;
        };
        member.is_dead = true;
        self.settled.notify_waiters();
        if member.phase == Phase::Ready {
            let key = member.key.clone();
            self.begin_end(&mut state, id, PoolEnd::Died);
            let now_us = self.services.clock.now_us();
            if let Some(demand) = state.demands.get_mut(&key) {
                demand.fail(now_us);
            }
        }
    }

    /// Notes that only these sandboxes run.
    pub(crate) fn running(self: &Arc<Self>, is_running: impl Fn(&SandboxId) -> bool) {
        let ids: Vec<SandboxId> = {
            let state = self.state.lock();
            let held = state
                .members
                .iter()
                .filter(|(_, member)| member.phase != Phase::Starting);
            held.map(|(id, _)| id.clone()).collect()
        };
        for id in ids.iter().filter(|id| !is_running(id)) {
            self.exited(id);
        }
    }

    /// Keeps a log entry of a pooled sandbox for its owner. Returns the entry if it is of another sandbox.
    pub(crate) fn keep_log(&self, entry: SandboxLog) -> Option<SandboxLog> {
        let mut state = self.state.lock();
        let Some(member) = state.members.get_mut(&entry.id) else {
            return Some(entry);
        };
        if member.log.len() < LOG_MAX {
            member.log.push(entry);
        }
        None
    }

    /// The layers that pooled sandboxes use.
    pub(crate) fn layers(&self) -> Vec<LayerId> {
        let state = self.state.lock();
        let used = state
            .members
            .values()
            .filter_map(|member| state.demands.get(&member.key));
        used.flat_map(|demand| layers_of(&demand.spec.image).to_vec()).collect()
    }

    /// How many are being started, and how many are ready.
    pub(crate) fn counts(&self) -> [(&'static str, usize); 2] {
        let state = self.state.lock();
        let count = |phase| state.members.values().filter(|member| member.phase == phase).count();
        [("starting", count(Phase::Starting)), ("ready", count(Phase::Ready))]
    }

    /// How many are ready.
    pub(crate) fn ready(&self) -> usize {
        let state = self.state.lock();
        let is_ready = |member: &&Member| member.phase == Phase::Ready;
        state.members.values().filter(is_ready).count()
    }

    /// Whether there is one of a kind that a request can have at once.
    pub(crate) fn has_ready(&self, key: &PoolKey) -> bool {
        let state = self.state.lock();
        let mut ready = state.members.values().filter(|member| member.phase == Phase::Ready);
        ready.any(|member| member.key == *key && !member.is_promised)
    }

    /// Lists the sandboxes of the pool that no request has taken.
    pub(crate) fn list(&self) -> Vec<PooledSandbox> {
        let state = self.state.lock();
        let pooled = state.members.iter().filter(|(_, member)| member.phase != Phase::Taken);
        pooled
            .filter_map(|(id, member)| {
                Some(PooledSandbox {
                    id: id.clone(),
                    template: state.demands.get(&member.key)?.template.clone(),
                    is_ready: member.phase == Phase::Ready,
                    since_us: member.since_us,
                    cpu_count: member.key.cpu_count,
                    memory_mb: member.key.memory_mb,
                    disk_mb: member.key.disk_mb,
                })
            })
            .collect()
    }

    /// Begins to end a pooled sandbox. One that is being started is ended by its start.
    fn begin_end(self: &Arc<Self>, state: &mut State, id: &SandboxId, why: PoolEnd) {
        let Some(member) = state.members.get_mut(id) else {
            return;
        };
        match member.phase {
            Phase::Ending => return,
            Phase::Starting if !member.cancel.is_cancelled() => {
                self.services.metrics.pool_end(why);
                member.cancel.cancel();
                return self.settled.notify_waiters();
            }
            Phase::Starting => return,
            Phase::Ready | Phase::Taken => {}
        }
        member.phase = Phase::Ending;
        self.services.metrics.pool_end(why);
        tracing::debug!(sandbox.id = %id, reason = why.as_str(), "a pooled sandbox is ended");
        let (pool, id) = (Arc::clone(self), id.clone());
        self.services.work.spawn(async move { pool.finish(&id).await });
    }

    /// Ends what runs of a sandbox, and removes it from the pool. While the node fails, it keeps its share of the host.
    async fn finish(&self, id: &SandboxId) {
        loop {
            match self.services.node.kill(id).await {
                Ok(()) | Err(NodeError::NotFound(_)) => break,
                Err(error) => {
                    tracing::error!(sandbox.id = %id, error = %Chain(&error), "cannot end a pooled sandbox");
                    tokio::time::sleep(END_RETRY).await;
                }
            }
        }
        self.state.lock().members.remove(id);
        self.left.notify_waiters();
        self.settled.notify_waiters();
        self.changed.notify_one();
    }
}

impl State {
    /// Of the sandboxes that no request has and that are not ending, the one whose kind was not asked for the longest;
    /// of several, one that is not ready, or else the oldest.
    fn least_needed(&self) -> Option<SandboxId> {
        let used_us = |member: &Member| self.demands.get(&member.key).map_or(0, |demand| demand.used_us);
        let ended = |member: &Member| match member.phase {
            Phase::Starting => member.cancel.is_cancelled(),
            Phase::Ready => false,
            Phase::Taken | Phase::Ending => true,
        };
        let pooled = self.members.iter().filter(|(_, member)| !ended(member));
        let least = pooled.min_by_key(|(_, member)| (used_us(member), member.phase == Phase::Ready, member.since_us));
        least.map(|(id, _)| id.clone())
    }
}

//! Filling the pool in the background: which sandboxes there should be, starting them one after another, and ending
//! those that are too old or not needed any more.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use model::id::{BuildId, SandboxId, TeamId};
use model::injection::Interception;
use model::network::{Cidr, EgressPolicy};
use model::secret::Secret;
use protocol::agent::Init;
use protocol::node::{Image, NodeError, StartSandbox};
use secrecy::ExposeSecret as _;
use store::error::StoreError;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::demand::Demand;
use super::{AGE_MAX_US, Member, Phase, Pool, PoolKey, State};
use crate::agent::{Agent, AgentError};
use crate::builds::recipe::BuildSpec;
use crate::chain::Chain;
use crate::clock::SECOND_US;
use crate::ids::new_sandbox_id;
use crate::outcome::PoolEnd;
use crate::start_command::{Waiting, become_ready};

/// The built-in template.
const BASE: &str = "base";
/// User that runs commands and owns files unless a request names another one.
const DEFAULT_USER: &str = "user";
/// Nothing is started until there was no create request for this long.
const QUIET: Duration = Duration::from_millis(20);
/// How long a start waits for that quiet time.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long nothing is started while the host is short of capacity, in microseconds.
const SHORT_US: i64 = 10 * SECOND_US;
/// How long a sandbox may take to become ready: as long as in a build.
const READY_BOUND: Duration = Duration::from_secs(600);
/// How long sandboxes of a template are kept after one was asked for, in microseconds.
const UNUSED_US: i64 = 600 * SECOND_US;
/// Every how many checks the database is asked which builds are current.
const FRESHNESS_EVERY: u64 = 5;
/// What an idle sandbox takes besides the memory of its processes: the agent, and what the kernel needs for it.
const OVERHEAD_BYTES: u64 = 2 << 20;

/// Why a pooled sandbox did not become ready.
#[derive(Debug, thiserror::Error)]
enum FillError {
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("the start command of the template")]
    StartCommand(#[source] AgentError),
    #[error("the ready command of the template did not succeed within 10 minutes")]
    NotReady,
}

impl Pool {
    /// Fills the pool until `stop` is cancelled.
    pub(crate) async fn serve(self: Arc<Self>, tasks: TaskTracker, stop: CancellationToken) {
        if self.settings.total == 0 || (self.settings.base == 0 && self.settings.per_template == 0) {
            return;
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = self.fill(&tasks, &stop) => {}
        }
    }

    async fn fill(self: &Arc<Self>, tasks: &TaskTracker, stop: &CancellationToken) {
        let mut checks = tokio::time::interval(self.settings.check_interval);
        checks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut count = 0_u64;
        loop {
            tokio::select! {
                () = self.changed.notified() => {}
                _ = checks.tick() => {
                    self.check(count.is_multiple_of(FRESHNESS_EVERY)).await;
                    count += 1;
                }
            }
            while self.missing().is_some() {
                self.until_quiet().await;
                // What is missing may be another one now.
                let Some((key, demand)) = self.missing() else { break };
                if !Box::pin(self.start(key, demand, tasks, stop)).await {
                    break;
                }
            }
        }
    }

    /// What should be started next: of what is missing, what was asked for last.
    fn missing(&self) -> Option<(PoolKey, Demand)> {
        let now_us = self.services.clock.now_us();
        let state = self.state.lock();
        if state.is_draining || now_us < state.paused_until_us {
            return None;
        }
        let held = || {
            let members = state.members.values();
            members.filter(|member| matches!(member.phase, Phase::Starting | Phase::Ready))
        };
        let taken: u64 = held().map(|member| member.memory_bytes).sum();
        let free = (u64::from(self.settings.memory_mb) << 20).saturating_sub(taken);
        let total = usize::try_from(self.settings.total).unwrap_or(usize::MAX);
        if held().count() >= total {
            return None;
        }
        let owner = |member: &Member| state.demands.get(&member.key)?.owner.as_ref();
        // Start commands run in nobody's quota: a team has half of the pool, and one of them that is neither frozen yet nor
        // waited for by a request, in whose quota it is soon.
        let may_have = |team: &TeamId| {
            let own = || held().filter(|member| owner(member) == Some(team));
            let is_settled = |member: &Member| member.phase == Phase::Ready || member.is_promised;
            own().count() < (total / 2).max(1) && own().all(is_settled)
        };
        // One for which a request waits is as good as taken.
        let have = |key: &PoolKey| {
            held()
                .filter(|member| member.key == *key && !member.is_promised)
                .count()
        };
        let is_missing = |key: &PoolKey, demand: &Demand| {
            have(key) < demand.wanted(now_us)
                && now_us >= demand.retry_us
                && demand.owner.as_ref().is_none_or(may_have)
                && demand.memory_bytes.max(OVERHEAD_BYTES) <= free
        };
        let missing = state.demands.iter().filter(|(key, demand)| is_missing(key, demand));
        // What was asked for last, but one of each kind before a second of any.
        let next = missing.max_by_key(|(key, demand)| {
            let is_extra = have(key) >= usize::try_from(demand.size).unwrap_or(usize::MAX);
            (!is_extra, demand.used_us)
        });
        next.map(|(key, demand)| (key.clone(), demand.clone()))
    }

    /// Waits until there was no create request for some time, for [`PATIENCE`] at most.
    async fn until_quiet(&self) {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            let before = self.created.load(Ordering::Relaxed);
            tokio::time::sleep(QUIET).await;
            if self.creating.load(Ordering::Relaxed) == 0 && self.created.load(Ordering::Relaxed) == before {
                return;
            }
        }
    }

    /// Starts a sandbox, and lets it become ready on a task of its own, so that a start command that takes long delays no
    /// other. Returns whether there may be capacity for another one.
    async fn start(
        self: &Arc<Self>,
        key: PoolKey,
        demand: Demand,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> bool {
        let now_us = self.services.clock.now_us();
        let needed = demand.memory_bytes.max(OVERHEAD_BYTES);
        let permit = async {
            let id = new_sandbox_id().ok()?;
            let permit = self.services.admission.admit_spare(&id, needed).await?;
            Some((id, permit))
        };
        let Some((id, permit)) = permit.await else {
            self.pause(SHORT_US);
            return false;
        };
        let cancel = CancellationToken::new();
        let member = Member {
            key: key.clone(),
            phase: Phase::Starting,
            since_us: now_us,
            memory_bytes: needed,
            permit: Arc::new(permit),
            cancel: cancel.clone(),
            is_dead: false,
            is_promised: false,
            log: Vec::new(),
        };
        {
            let mut state = self.state.lock();
            if state.is_draining {
                return false;
            }
            state.members.insert(id.clone(), member);
        }
        let request = self.request(&id, &key, &demand);
        let started = self.services.node.start(&demand.owner, request).await;
        match started {
            Ok(_) => {}
            Err(NodeError::Capacity(_)) => {
                self.finish(&id).await;
                self.pause(SHORT_US);
                return false;
            }
            Err(error) => {
                self.failed(&id, &key, &error.into()).await;
                return true;
            }
        }
        let (pool, stop) = (Arc::clone(self), stop.clone());
        tasks.spawn(async move {
            let ready = Box::pin(pool.make_ready(&id, &demand.spec));
            let ready = tokio::select! {
                biased;
                // The next start ends it.
                () = stop.cancelled() => return,
                () = cancel.cancelled() => return pool.finish(&id).await,
                ready = ready => ready,
            };
            match ready {
                Ok(memory_bytes) => pool.settle(&id, &key, memory_bytes),
                Err(error) => pool.failed(&id, &key, &error).await,
            }
        });
        true
    }

    /// Runs the start command and freezes the sandbox. Returns the memory that it takes.
    async fn make_ready(&self, id: &SandboxId, spec: &BuildSpec) -> Result<u64, FillError> {
        let services = &self.services;
        if let Some(start) = &spec.start {
            let agent = Agent {
                node: &services.node,
                id,
                token: services.tokens.access_token(id),
                work: &services.work,
            };
            let ready = become_ready(&agent, start, Waiting::Nobody);
            let ready = tokio::time::timeout(READY_BOUND, ready).await;
            ready
                .map_err(|_| FillError::NotReady)?
                .map_err(FillError::StartCommand)?;
        }
        let frozen = services.node.freeze(id).await?;
        Ok(frozen.memory_bytes.saturating_add(OVERHEAD_BYTES))
    }

    /// Takes over a sandbox that is ready, unless it takes too much memory.
    fn settle(self: &Arc<Self>, id: &SandboxId, key: &PoolKey, memory_bytes: u64) {
        let mut state = self.state.lock();
        let since_us = state.members.get(id).map(|member| member.since_us);
        if let Some(demand) = state.demands.get_mut(key) {
            demand.memory_bytes = memory_bytes;
            demand.ready_us = since_us.map_or(demand.ready_us, |since_us| self.services.clock.now_us() - since_us);
        }
        let held = state.members.values();
        let held = held.filter(|member| matches!(member.phase, Phase::Starting | Phase::Ready));
        let total: u64 = held.map(|member| member.memory_bytes).sum();
        let Some(member) = state.members.get_mut(id) else {
            return;
        };
        let total = total.saturating_sub(member.memory_bytes).saturating_add(memory_bytes);
        member.memory_bytes = memory_bytes;
        member.phase = Phase::Ready;
        // Its team may have another one started.
        self.changed.notify_one();
        self.settled.notify_waiters();
        self.services.metrics.pool_start(true);
        if member.is_dead {
            self.begin_end(&mut state, id, PoolEnd::Died);
        } else if member.cancel.is_cancelled() {
            self.begin_end(&mut state, id, PoolEnd::Evicted);
        } else if total > u64::from(self.settings.memory_mb) << 20 {
            tracing::warn!(
                memory_bytes,
                "a pooled sandbox takes more memory than the pool may, and is ended"
            );
            self.begin_end(&mut state, id, PoolEnd::Memory);
        }
    }

    /// Ends a sandbox that did not become ready.
    async fn failed(&self, id: &SandboxId, key: &PoolKey, error: &FillError) {
        self.services.metrics.pool_start(false);
        let now_us = self.services.clock.now_us();
        let retry_s = {
            let mut state = self.state.lock();
            state.demands.get_mut(key).map(|demand| {
                demand.fail(now_us);
                (demand.retry_us - now_us) / SECOND_US
            })
        };
        tracing::warn!(sandbox.id = %id, retry_s, error = %Chain(error), "a pooled sandbox did not become ready");
        self.finish(id).await;
    }

    /// Starts nothing for some time.
    fn pause(&self, us: i64) {
        let until_us = self.services.clock.now_us() + us;
        let mut state = self.state.lock();
        state.paused_until_us = state.paused_until_us.max(until_us);
    }

    /// The start request of a sandbox that has no owner.
    fn request(&self, id: &SandboxId, key: &PoolKey, demand: &Demand) -> StartSandbox {
        let services = &self.services;
        let mut resources = services.resources;
        resources.cpu_count = key.cpu_count;
        resources.memory_mb = key.memory_mb;
        resources.disk_mb = key.disk_mb;
        StartSandbox {
            id: id.clone(),
            template: demand.template.clone(),
            image: demand.spec.image.clone(),
            resources,
            init: Init {
                access_token: Some(services.tokens.access_token(id).expose_secret().to_owned()),
                // No time: that of the claim must not be older, even if the clock is set back.
                default_user: Some(demand.spec.user.clone().unwrap_or_else(|| DEFAULT_USER.to_owned())),
                default_workdir: demand.spec.workdir.clone(),
                sandbox_id: Some(id.as_str().to_owned()),
                template_id: Some(demand.template.as_str().to_owned()),
                cpu_count: Some(key.cpu_count),
                memory_mb: Some(key.memory_mb),
                // Certificates are installed before it is frozen.
                ca_bundle_deferred: false,
                ..Init::default()
            },
            memory: None,
            owner: None,
            egress: EgressPolicy {
                deny: vec![Cidr::ALL],
                default_allow: Some(false),
                interception: Some(Box::new(Interception {
                    ca_seed: Secret::new(services.tokens.ca_seed(id).expose_secret().to_owned()),
                    rules: Vec::new(),
                })),
                ..EgressPolicy::default()
            },
            deadline: None,
            permit: None,
        }
    }

    /// Ends what is not needed any more.
    async fn check(self: &Arc<Self>, is_full: bool) {
        if is_full && let Err(error) = self.check_builds().await {
            tracing::warn!(error = %Chain(&error), "cannot check which builds the pool needs");
        }
        let is_empty = self.state.lock().members.is_empty();
        if !is_empty && self.services.admission.is_short_of_memory().await {
            self.pause(SHORT_US);
            let mut state = self.state.lock();
            if let Some(id) = state.least_needed() {
                self.begin_end(&mut state, &id, PoolEnd::Evicted);
            }
        }
        let now_us = self.services.clock.now_us();
        let mut state = self.state.lock();
        if let Some(id) = state.surplus(now_us) {
            self.begin_end(&mut state, &id, PoolEnd::Unused);
        }
        let unused: Vec<PoolKey> = state
            .demands
            .iter()
            .filter(|(_, demand)| !demand.is_permanent && now_us - demand.used_us >= UNUSED_US)
            .map(|(key, _)| key.clone())
            .collect();
        for key in &unused {
            self.forget(&mut state, key, PoolEnd::Unused);
        }
        let aged = state.members.iter().filter(|(_, member)| {
            let age_us = now_us - member.since_us;
            member.phase == Phase::Ready && age_us >= AGE_MAX_US
        });
        // One in each check, so that the others can be claimed until it is replaced.
        let oldest = aged.min_by_key(|(_, member)| member.since_us).map(|(id, _)| id.clone());
        if let Some(id) = oldest {
            self.begin_end(&mut state, &id, PoolEnd::Age);
        }
    }

    /// Ends the sandboxes of builds that their templates do not have any more, and finds the current build of `base`.
    async fn check_builds(self: &Arc<Self>) -> Result<(), StoreError> {
        let store = self.services.rows.store();
        let base = match self.settings.base {
            0 => None,
            _ => self.find_base().await?,
        };
        let demands: Vec<(PoolKey, Demand)> = {
            let state = self.state.lock();
            state
                .demands
                .iter()
                .map(|(key, demand)| (key.clone(), demand.clone()))
                .collect()
        };
        let mut stale = Vec::new();
        for (key, demand) in demands {
            let is_current = match store.template_by_id(&demand.template).await? {
                None => false,
                Some(template) if demand.is_permanent => base
                    .as_ref()
                    .is_some_and(|(found, _)| template.id == demand.template && *found == key),
                Some(template) => {
                    let tags = store.tag_list(&template.id).await?;
                    let current: HashSet<BuildId> = tags.into_iter().map(|tag| tag.build_id).collect();
                    current.contains(&key.build)
                }
            };
            if !is_current {
                stale.push(key);
            }
        }
        let mut state = self.state.lock();
        for key in &stale {
            self.forget(&mut state, key, PoolEnd::Stale);
        }
        if let Some((key, demand)) = base {
            state.demands.entry(key).or_insert(demand);
        }
        Ok(())
    }

    /// The current build of `base`, which is the global template of that name.
    async fn find_base(&self) -> Result<Option<(PoolKey, Demand)>, StoreError> {
        let store = self.services.rows.store();
        let nobody = TeamId::try_from(uuid::Uuid::nil().to_string()).expect("a UUID in its usual form is a team's id");
        let Some(template) = store.template_resolve(&nobody, BASE).await? else {
            return Ok(None);
        };
        let Some(build) = store.build_latest_ready(&template.id).await? else {
            return Ok(None);
        };
        let spec = BuildSpec::of(&build).filter(|spec| spec.image == Image::Base && spec.start.is_none());
        let demand = spec.map(|spec| {
            let mut demand = Demand::new(template.id, Arc::new(spec), self.settings.base);
            demand.is_permanent = true;
            demand.used(self.services.clock.now_us());
            demand
        });
        Ok(demand.map(|demand| (PoolKey::of(&build), demand)))
    }

    /// Forgets that sandboxes of a kind were asked for, and ends those that no request has.
    fn forget(self: &Arc<Self>, state: &mut State, key: &PoolKey, why: PoolEnd) {
        let members = state.members.iter().filter(|(_, member)| member.key == *key);
        let ids: Vec<SandboxId> = members
            .filter(|(_, member)| member.phase != Phase::Taken)
            .map(|(id, _)| id.clone())
            .collect();
        for id in &ids {
            self.begin_end(state, id, why);
        }
        state.demands.remove(key);
    }
}

impl State {
    /// A sandbox that is ready and of which there are more than wanted: a burst of requests is over.
    fn surplus(&self, now_us: i64) -> Option<SandboxId> {
        self.demands.iter().find_map(|(key, demand)| {
            let ready = self.members.iter();
            let ready = ready.filter(|(_, member)| member.key == *key && member.phase == Phase::Ready);
            let ready = ready.filter(|(_, member)| !member.is_promised);
            if ready.clone().count() > demand.wanted(now_us) {
                ready
                    .min_by_key(|(_, member)| member.since_us)
                    .map(|(id, _)| id.clone())
            } else {
                None
            }
        })
    }
}

//! The measurements: what is asked, by how many clients, and what is kept of the answers.
//!
//! Invariant: whatever happens, every sandbox that an answer named is either deleted or in `live`, which is emptied at
//! the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use measure::client::{Client, Created, Sandbox, Target};
use measure::stats::Distribution;
use parking_lot::Mutex;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::memory;
use super::report::{IdleMemory, Measure, Sustained};

/// Failures that are shown; the rest are only counted.
const ERROR_SAMPLES: usize = 5;
/// Clients that clean up. Deleting is never measured there.
const CLEANERS: usize = 8;
/// Time between two creates of [`Bench::ready`].
const READY_EVERY: Duration = Duration::from_millis(300);
/// Name of the measurement of forks.
const FORK: &str = "fork to 201, one child";
/// Consecutive failures after which a client gives up.
const FAILURES_MAX: usize = 10;

/// What all clients of a run share.
pub(crate) struct Bench {
    platform: Target,
    /// Set to interrupt the run.
    pub(crate) cancelled: CancellationToken,
    live: Mutex<BTreeSet<String>>,
    samples: Mutex<Vec<String>>,
    errors: AtomicUsize,
}

/// What the clients of one measurement gathered.
#[derive(Default)]
struct Gathered {
    create: Kind,
    /// Creates that got a sandbox which was kept ready. What failed counts among the others.
    create_ready: Kind,
    first_output: Kind,
    delete: Kind,
    stages: BTreeMap<String, Vec<Duration>>,
    stage_order: Vec<String>,
    completed: usize,
}

/// The times of one kind of request.
#[derive(Default)]
struct Kind {
    times: Vec<Duration>,
    errors: u64,
}

impl Kind {
    fn add(&mut self, other: Self) {
        self.times.extend(other.times);
        self.errors += other.errors;
    }

    fn measure(self, what: &str, concurrency: usize) -> Measure {
        Measure {
            what: what.to_owned(),
            concurrency,
            errors: self.errors,
            times: Distribution::of(self.times),
        }
    }
}

impl Gathered {
    fn add(&mut self, other: Self) {
        self.create.add(other.create);
        self.create_ready.add(other.create_ready);
        self.first_output.add(other.first_output);
        self.delete.add(other.delete);
        for name in other.stage_order {
            if !self.stages.contains_key(&name) {
                self.stage_order.push(name.clone());
            }
            let times = other.stages.get(&name).into_iter().flatten();
            self.stages.entry(name).or_default().extend(times);
        }
        self.completed += other.completed;
    }

    fn stage(&mut self, name: String, took: Duration) {
        if !self.stages.contains_key(&name) {
            self.stage_order.push(name.clone());
        }
        self.stages.entry(name).or_default().push(took);
    }

    fn errors(&self) -> u64 {
        self.create.errors + self.first_output.errors + self.delete.errors
    }
}

/// The requests of one sandbox's life that are timed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timed {
    pub(crate) create: bool,
    pub(crate) first_output: bool,
    pub(crate) delete: bool,
}

impl Bench {
    /// A run against a platform.
    pub(crate) fn new(platform: Target, cancelled: CancellationToken) -> Self {
        Self {
            platform,
            cancelled,
            live: Mutex::default(),
            samples: Mutex::default(),
            errors: AtomicUsize::new(0),
        }
    }

    /// Number of failures so far, and the first few of them.
    pub(crate) fn failures(&self) -> (u64, Vec<String>) {
        (self.errors.load(Ordering::Relaxed) as u64, self.samples.lock().clone())
    }

    fn failed(&self, error: &anyhow::Error) {
        self.errors.fetch_add(1, Ordering::Relaxed);
        let mut samples = self.samples.lock();
        if samples.len() < ERROR_SAMPLES {
            samples.push(format!("{error:#}"));
        }
    }

    async fn create(&self, client: &mut Client, into: &mut Gathered) -> Option<(Sandbox, Duration)> {
        match client.create().await {
            Ok(created) => {
                let was_ready = created.was_ready();
                let Created { sandbox, took, stages } = created;
                self.live.lock().insert(sandbox.id.clone());
                if was_ready {
                    into.create_ready.times.push(took);
                } else {
                    into.create.times.push(took);
                    for (name, took) in stages {
                        into.stage(name, took);
                    }
                }
                Some((sandbox, took))
            }
            Err(error) => {
                into.create.errors += 1;
                self.failed(&error);
                None
            }
        }
    }

    async fn delete(&self, client: &mut Client, id: &str, into: &mut Gathered) -> bool {
        match client.delete(id).await {
            Ok(took) => {
                self.live.lock().remove(id);
                into.delete.times.push(took);
                true
            }
            Err(error) => {
                into.delete.errors += 1;
                self.failed(&error);
                false
            }
        }
    }

    /// One life: create, first output if wanted, delete. `false` when something failed.
    async fn life(&self, client: &mut Client, output: bool, into: &mut Gathered) -> bool {
        let Some((sandbox, create_took)) = self.create(client, into).await else {
            return false;
        };
        let mut good = true;
        if output {
            let begun = Instant::now();
            match client.first_output(&sandbox).await {
                Ok(at) => into.first_output.times.push(create_took + (at - begun)),
                Err(error) => {
                    into.first_output.errors += 1;
                    self.failed(&error);
                    good = false;
                }
            }
        }
        self.delete(client, &sandbox.id, into).await && good
    }

    /// Runs `concurrency` clients side by side, each until `work` says that there is no more, too much failed, or the
    /// run is ended.
    async fn clients(&self, concurrency: usize, work: impl AsyncFn(Client, Gathered) -> Gathered) -> Gathered {
        let mut clients: FuturesUnordered<_> = (0..concurrency)
            .map(|_| work(Client::new(self.platform.clone()), Gathered::default()))
            .collect();
        let mut all = Gathered::default();
        while let Some(gathered) = clients.next().await {
            all.add(gathered);
        }
        all
    }

    /// `count` lives; the times of those requests that are wanted, and the stages of create.
    pub(crate) async fn latencies(
        &self,
        count: usize,
        concurrency: usize,
        timed: Timed,
    ) -> (Vec<Measure>, Vec<Measure>) {
        let left = AtomicUsize::new(count);
        let left = &left;
        let gathered = self
            .clients(concurrency.min(count), async |mut client, mut gathered| {
                let mut failures = 0;
                while !self.cancelled.is_cancelled() && failures < FAILURES_MAX && take_one(left) {
                    let good = self.life(&mut client, timed.first_output, &mut gathered).await;
                    failures = if good { 0 } else { failures + 1 };
                }
                gathered
            })
            .await;
        let mut requests = Vec::new();
        let mut stages = Vec::new();
        if timed.create {
            for name in &gathered.stage_order {
                let times = gathered.stages.get(name).cloned().unwrap_or_default();
                stages.push(Kind { times, errors: 0 }.measure(name, concurrency));
            }
            requests.extend(creates(
                gathered.create,
                gathered.create_ready,
                "create to 201",
                concurrency,
            ));
        }
        if timed.first_output {
            requests.push(gathered.first_output.measure("create to first output", concurrency));
        }
        if timed.delete {
            requests.push(gathered.delete.measure("delete to 204", concurrency));
        }
        (requests, stages)
    }

    /// Create and delete for a while.
    pub(crate) async fn sustained(
        &self,
        named: &str,
        duration: Duration,
        concurrency: usize,
    ) -> (Sustained, Vec<Measure>) {
        let begun = Instant::now();
        let gathered = self
            .clients(concurrency, async |mut client, mut gathered| {
                let mut failures = 0;
                while !self.cancelled.is_cancelled() && failures < FAILURES_MAX && begun.elapsed() < duration {
                    if self.life(&mut client, false, &mut gathered).await {
                        gathered.completed += 1;
                        failures = 0;
                    } else {
                        failures += 1;
                    }
                }
                gathered
            })
            .await;
        let seconds = begun.elapsed().as_secs_f64();
        let sustained = Sustained {
            concurrency,
            seconds,
            completed: gathered.completed,
            per_second: gathered.completed as f64 / seconds,
            errors: gathered.errors(),
        };
        let mut measures = creates(
            gathered.create,
            gathered.create_ready,
            &format!("create, {named}"),
            concurrency,
        );
        measures.push(gathered.delete.measure(&format!("delete, {named}"), concurrency));
        (sustained, measures)
    }

    /// One client that creates a sandbox every [`READY_EVERY`] and deletes it: time enough for another one to be ready.
    pub(crate) async fn ready(&self, count: usize) -> Measure {
        let mut gathered = Gathered::default();
        let mut client = Client::new(self.platform.clone());
        let mut ticks = tokio::time::interval(READY_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failures = 0;
        for _ in 0..count {
            ticks.tick().await;
            if self.cancelled.is_cancelled() || failures >= FAILURES_MAX {
                break;
            }
            let good = self.life(&mut client, false, &mut gathered).await;
            failures = if good { 0 } else { failures + 1 };
        }
        let (hits, errors) = (gathered.create_ready.times.len(), gathered.errors());
        let mut all = gathered.create;
        all.add(gathered.create_ready);
        all.errors = errors;
        let seconds = READY_EVERY.as_secs_f64();
        let what = format!("create every {seconds} s ({hits} of {} kept ready)", all.times.len());
        all.measure(&what, 1)
    }

    /// `count` lives in which an idle sandbox is paused, as the platform does that by default, and connected to.
    pub(crate) async fn pauses(&self, count: usize, concurrency: usize) -> [Measure; 2] {
        let (pause, resume) = (Mutex::new(Kind::default()), Mutex::new(Kind::default()));
        let left = AtomicUsize::new(count);
        let left = &left;
        self.clients(concurrency.min(count), async |mut client, mut gathered| {
            let mut failures = 0;
            while !self.cancelled.is_cancelled() && failures < FAILURES_MAX && take_one(left) {
                let good = self.pause_once(&mut client, &pause, &resume, &mut gathered).await;
                failures = if good { 0 } else { failures + 1 };
            }
            gathered
        })
        .await;
        [
            pause.into_inner().measure("pause to 204", concurrency),
            resume.into_inner().measure("connect to 201, paused", concurrency),
        ]
    }

    async fn pause_once(
        &self,
        client: &mut Client,
        pause: &Mutex<Kind>,
        resume: &Mutex<Kind>,
        into: &mut Gathered,
    ) -> bool {
        let Some((sandbox, _)) = self.create(client, into).await else {
            pause.lock().errors += 1;
            return false;
        };
        let paused = client.pause(&sandbox.id).await;
        let mut good = self.note(paused, pause);
        if good {
            let resumed = client.resume(&sandbox.id).await;
            good = self.note(resumed, resume);
        }
        self.delete(client, &sandbox.id, into).await && good
    }

    /// `count` forks of one idle sandbox, one after the other, each of which is deleted; none if the host cannot fork.
    pub(crate) async fn forks(&self, count: usize) -> Option<Measure> {
        let fork = Mutex::new(Kind::default());
        let mut gathered = Gathered::default();
        let mut client = Client::new(self.platform.clone());
        let Some((parent, _)) = self.create(&mut client, &mut gathered).await else {
            fork.lock().errors += 1;
            return Some(fork.into_inner().measure(FORK, 1));
        };
        let (mut failures, mut is_missing) = (0, false);
        for _ in 0..count {
            if self.cancelled.is_cancelled() || failures >= FAILURES_MAX {
                break;
            }
            let good = match client.fork(&parent.id).await {
                Ok(None) => {
                    is_missing = true;
                    break;
                }
                Ok(Some((child, took))) => {
                    self.live.lock().insert(child.id.clone());
                    self.note(Ok(took), &fork) && self.delete(&mut client, &child.id, &mut gathered).await
                }
                Err(error) => self.note(Err(error), &fork),
            };
            failures = if good { 0 } else { failures + 1 };
        }
        self.delete(&mut client, &parent.id, &mut gathered).await;
        (!is_missing).then(|| fork.into_inner().measure(FORK, 1))
    }

    /// Adds a time, or a failure. Returns whether it is a time.
    fn note(&self, outcome: Result<Duration>, kind: &Mutex<Kind>) -> bool {
        match outcome {
            Ok(took) => kind.lock().times.push(took),
            Err(error) => {
                kind.lock().errors += 1;
                self.failed(&error);
                return false;
            }
        }
        true
    }

    /// Available memory before and with `count` sandboxes that do nothing.
    ///
    /// # Errors
    /// When `/proc/meminfo` cannot be read.
    pub(crate) async fn idle_memory(&self, count: usize, concurrency: usize) -> Result<IdleMemory> {
        // The first sandbox pays for what all share, such as the page cache of the agent.
        let mut first = Gathered::default();
        self.life(&mut Client::new(self.platform.clone()), true, &mut first)
            .await;
        let before_kb = memory::settled_kb(&self.cancelled).await?;
        let left = AtomicUsize::new(count);
        let left = &left;
        let gathered = self
            .clients(concurrency.min(count), async |mut client, mut gathered| {
                let mut failures = 0;
                while !self.cancelled.is_cancelled() && failures < FAILURES_MAX && take_one(left) {
                    let made = self.create(&mut client, &mut gathered).await;
                    failures = if made.is_some() { 0 } else { failures + 1 };
                }
                gathered
            })
            .await;
        let after_kb = memory::settled_kb(&self.cancelled).await?;
        let sandboxes = gathered.create.times.len() + gathered.create_ready.times.len();
        self.clean_up().await;
        Ok(IdleMemory {
            sandboxes,
            before_kb,
            after_kb,
            per_sandbox_kb: (sandboxes > 0).then(|| (before_kb as f64 - after_kb as f64) / sandboxes as f64),
            errors: first.errors() + gathered.errors(),
        })
    }

    /// Deletes what is left of this run. After failures the platform is asked too: an answer that never came may have
    /// named a sandbox.
    pub(crate) async fn clean_up(&self) {
        self.delete_live().await;
        if self.errors.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Ok(ids) = Client::new(self.platform.clone()).of_this_run().await
            && !ids.is_empty()
        {
            self.live.lock().extend(ids);
            self.delete_live().await;
        }
    }

    async fn delete_live(&self) {
        let ids: Vec<String> = self.live.lock().iter().cloned().collect();
        let next = AtomicUsize::new(0);
        let (ids, next) = (&ids, &next);
        self.clients(CLEANERS.min(ids.len()), async |mut client, mut gathered| {
            let mut failures = 0;
            while failures < FAILURES_MAX
                && let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed))
            {
                let good = self.delete(&mut client, id, &mut gathered).await;
                failures = if good { 0 } else { failures + 1 };
            }
            gathered
        })
        .await;
    }

    /// Sandboxes that could not be deleted.
    pub(crate) fn left_over(&self) -> usize {
        self.live.lock().len()
    }
}

/// The times of creates: those that got a sandbox which was kept ready have a row of their own, if there were any.
fn creates(create: Kind, ready: Kind, what: &str, concurrency: usize) -> Vec<Measure> {
    let mut measures = Vec::new();
    let is_only_ready = create.times.is_empty() && create.errors == 0 && !ready.times.is_empty();
    if !is_only_ready {
        measures.push(create.measure(what, concurrency));
    }
    if !ready.times.is_empty() {
        measures.push(ready.measure(&format!("{what}, kept ready"), concurrency));
    }
    measures
}

/// Takes one from a shared count, unless none is left.
fn take_one(left: &AtomicUsize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
        .is_ok()
}

//! Limits the processor time of sandboxes that create very many processes or threads.
//!
//! A process that ends at once costs its own sandbox little and others much: each shifts the averages by which the
//! scheduler of the kernel places what becomes runnable. Beside a sandbox with hundreds of them, any thread of the host
//! waits for a processor for 100 ms, and beside one that does the same with threads for seconds, whatever its priority.
//! Neither limits of processes nor fair shares help. What helps is that the sandbox has less processor time, so that it
//! creates fewer.
//!
//! The kernel counts what each sandbox creates. A sandbox may create [`Rates::sandbox`] per second in the long run, as
//! long as it has few at a time: a script, a build or a test suite waits for what it starts, and has at most some tens.
//! With more than [`CROWD`], it may create fewer in proportion. A burst is allowed beyond that. A sandbox that has used
//! it up gets as much processor time as creating a part of its rate takes, by what its processes are measured to take. It
//! is let go once it has created few for some time, which is longer each time. All sandboxes together may create
//! [`Rates::host`], by the same rule; if they create more, each of those that create many has an equal share, so that
//! many sandboxes below the rate are limited like one above it.
//!
//! The limit is a file of the kernel and outlives the platform. The next start sets it back, and measures anew.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::log::Level;

use crate::handle::SandboxHandle;
use crate::shared::Shared;
use crate::work::guarded;

/// Interval between two looks at the sum of all sandboxes.
const TICK: Duration = Duration::from_millis(50);
/// Longest time between two looks at each sandbox.
const ROUND: Duration = Duration::from_secs(1);
/// What a sandbox may create at once beyond its rate, in seconds of the whole rate: the threads of a large program.
const BURST_S: f64 = 0.2;
/// Processes and threads at a time with which a sandbox has its whole rate.
const CROWD: f64 = 32.0;
/// Part of its rate that a limited sandbox should have, and that of one with more than [`CROWD`].
const TARGET: f64 = 0.75;
const TARGET_OF_CROWD: f64 = 0.25;
/// Part of that below which it counts as calm.
const CALM: f64 = 0.5;
/// How long it must be calm before it is let go, for the first time and at most. The time doubles if it has to be
/// limited again within [`FORGIVEN`].
const CALM_FOR: Duration = Duration::from_secs(2);
const CALM_FOR_MAX: Duration = Duration::from_secs(64);
const FORGIVEN: Duration = Duration::from_secs(300);
/// Interval in which a limited sandbox is measured and its limit adjusted.
const ADJUST: Duration = Duration::from_millis(500);
/// Least and most processor time, in thousandths of a core. With less, no command of a client would start beside a storm
/// of processes. Beside threads it would, and a tenth of a core is enough for thousands of those.
const MILLI_CORES_MIN: u32 = 100;
const MILLI_CORES_MIN_OF_THREADS: u32 = 20;
const MILLI_CORES_MAX: u32 = 1_000_000;
/// Processor time that a short-lived process takes at first sight, in seconds: its creation, its end, and nothing else.
const COST_S: f64 = 0.000_5;
/// Processor time below which what is created are threads, in seconds each.
const COST_OF_THREADS_S: f64 = 0.000_1;
/// Part of its processor time from which a sandbox counts as limited by it.
const USED: f64 = 0.75;
/// Rate from which a sandbox counts as one that creates many, as a part of its own rate.
const MANY: f64 = 0.1;

/// How many processes and threads may be created per second.
#[derive(Debug, Clone, Copy)]
struct Rates {
    /// By one sandbox.
    sandbox: f64,
    /// By all sandboxes together.
    host: f64,
    /// Number of cores.
    cores: f64,
}

impl Rates {
    /// The rate of one sandbox, and the same for every core of the host.
    fn new(sandbox: u32, cores: usize) -> Self {
        let sandbox = f64::from(sandbox);
        let cores = u32::try_from(cores).unwrap_or(u32::MAX);
        Self {
            sandbox,
            host: sandbox * f64::from(cores.max(1)),
            cores: f64::from(cores.max(1)),
        }
    }
}

impl Rates {
    /// What each sandbox may create per second because of all others.
    fn share<'a>(&self, readings: impl Iterator<Item = &'a Reading>) -> f64 {
        let (mut rate, mut processes, mut number) = (0.0, 0.0, 0.0);
        for reading in readings {
            rate += reading.rate;
            if reading.rate > self.sandbox * MANY {
                processes += reading.crowd();
                number += 1.0;
            }
        }
        let host = self.host * (CROWD / (processes / self.cores).max(1.0)).min(1.0);
        if rate > host && number > 0.0 {
            (host / number).max(self.sandbox * MANY)
        } else {
            self.sandbox
        }
    }

    /// What a sandbox may create per second.
    fn of(&self, reading: &Reading, share: f64) -> f64 {
        let own = self.sandbox * (CROWD / reading.crowd().max(1.0)).clamp(MANY, 1.0);
        own.min(share)
    }
}

/// Watches until the platform stops, on a thread of its own, so that queued work in this process cannot delay it.
///
/// # Errors
/// When no thread can be created.
pub(crate) fn watch(shared: &Arc<Shared>, rate: u32) -> io::Result<()> {
    // Not held between two looks: this thread must not keep a node alive that is dropped without being released.
    let shared = Arc::downgrade(shared);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let look = move || {
        let rates = Rates::new(rate, cores);
        let mut watch = Watch::new(rates);
        while let Some(shared) = shared.upgrade().filter(|shared| !shared.stop.is_cancelled()) {
            if guarded("process-watch", || watch.look(&shared, Instant::now())).is_none() {
                watch = Watch::new(rates);
            }
            drop(shared);
            std::thread::sleep(TICK);
        }
    };
    std::thread::Builder::new()
        .name("process-watch".to_owned())
        .spawn(look)?;
    Ok(())
}

struct Watch {
    rates: Rates,
    accounts: HashMap<SandboxId, Account>,
    /// Of all sandboxes, at the last tick.
    sum: u64,
    ticked: Instant,
    /// When each sandbox was looked at last.
    looked: Instant,
    has_logged_error: bool,
}

impl Watch {
    fn new(rates: Rates) -> Self {
        Self {
            rates,
            accounts: HashMap::new(),
            sum: 0,
            ticked: Instant::now(),
            looked: Instant::now(),
            has_logged_error: false,
        }
    }

    fn look(&mut self, shared: &Shared, now: Instant) {
        let sum = match shared.driver.processes_created() {
            Ok(sum) => sum,
            Err(error) => {
                if !std::mem::replace(&mut self.has_logged_error, true) {
                    tracing::error!(
                        "cannot read how many processes sandboxes create, so none that creates too many is slowed down: {error}"
                    );
                }
                return;
            }
        };
        let created = sum.saturating_sub(self.sum);
        let rate = per_second(created, now.saturating_duration_since(self.ticked));
        (self.sum, self.ticked) = (sum, now);
        let is_due = now.saturating_duration_since(self.looked) >= ROUND
            || rate > self.rates.sandbox * MANY / 2.0
            || self.accounts.values().any(Account::is_watched)
            // A new one is not counted before it is looked at.
            || self.accounts.len() != shared.sandboxes.lock().len();
        if !is_due {
            return;
        }
        self.looked = now;
        let handles: Vec<Arc<SandboxHandle>> = shared.sandboxes.lock().values().cloned().collect();
        let mut accounts = HashMap::with_capacity(handles.len());
        let mut readings = Vec::with_capacity(handles.len());
        for handle in handles {
            let Ok(created) = handle.sandbox().processes_created() else {
                continue;
            };
            let mut account = self
                .accounts
                .remove(handle.id())
                .unwrap_or_else(|| Account::new(created, now));
            let mut reading = account.read(created, now);
            if reading.rate > self.rates.sandbox * MANY || account.is_watched() {
                reading.processes = handle.sandbox().processes().unwrap_or_default();
            }
            accounts.insert(handle.id().clone(), account);
            readings.push((handle, reading));
        }
        self.accounts = accounts;
        let share = self.rates.share(readings.iter().map(|(_, reading)| reading));
        for (handle, reading) in readings {
            if handle.is_ending() {
                continue;
            }
            let Some(account) = self.accounts.get_mut(handle.id()) else {
                continue;
            };
            let worked = || handle.sandbox().work_time().unwrap_or_default();
            match account.judge(
                &reading,
                self.rates.sandbox,
                self.rates.of(&reading, share),
                now,
                worked,
            ) {
                None => {}
                Some(Verdict::Limit { milli_cores, is_new }) => {
                    limit(shared, &handle, milli_cores, is_new, reading.rate);
                }
                Some(Verdict::Release) => release(&handle),
            }
        }
        let throttled = self.accounts.values().filter(|account| account.limit.is_some()).count();
        let throttled = u32::try_from(throttled).unwrap_or(u32::MAX);
        shared.throttles.throttled.store(throttled, Ordering::Relaxed);
        shared.journal.throttles(shared.throttles.read());
    }
}

/// Limits a sandbox, or changes its limit.
fn limit(shared: &Shared, handle: &SandboxHandle, milli_cores: u32, is_new: bool, rate: f64) {
    if let Err(error) = handle.limit_cpu(Some(milli_cores)) {
        tracing::warn!(sandbox.id = %handle.id(), "cannot limit the processor time of a sandbox that creates many processes: {error}");
        return;
    }
    if !is_new {
        return;
    }
    shared.throttles.throttles.fetch_add(1, Ordering::Relaxed);
    let rate = format!("{rate:.0}");
    tracing::warn!(
        sandbox.id = %handle.id(),
        processes_per_second = rate, milli_cores,
        "a sandbox creates very many processes: its processor time is limited"
    );
    let message = format!(
        "the sandbox creates {rate} processes and threads per second, which slows down others: its processor time is \
         limited until it creates fewer"
    );
    let fields = [
        ("event_type", "cpu_throttled".to_owned()),
        ("processes_per_second", rate),
        ("milli_cores", milli_cores.to_string()),
    ];
    handle.log().host(Level::Warn, &message, fields);
}

/// Lets a sandbox go.
fn release(handle: &SandboxHandle) {
    if let Err(error) = handle.limit_cpu(None) {
        tracing::warn!(sandbox.id = %handle.id(), "cannot end the limit of the processor time of a sandbox: {error}");
        return;
    }
    tracing::info!(sandbox.id = %handle.id(), "the processor time of a sandbox is not limited any more");
    let fields = [("event_type", "cpu_resumed".to_owned())];
    let message = "the sandbox creates fewer processes: it has its whole processor time again";
    handle.log().host(Level::Info, message, fields);
}

fn per_second(count: u64, time: Duration) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "processes in less than a minute")]
    let count = count as f64;
    count / time.as_secs_f64().max(0.001)
}

/// What is known of a sandbox.
#[derive(Debug)]
struct Account {
    created: u64,
    at: Instant,
    /// What it has created beyond its rate, less what it has not used since.
    excess: f64,
    limit: Option<Limit>,
    /// How long it has to be calm the next time.
    calm_for: Duration,
    /// When it was let go last.
    released: Option<Instant>,
}

/// The limit of a sandbox.
#[derive(Debug)]
struct Limit {
    milli_cores: u32,
    /// When it was measured last, and what it had created and worked by then.
    since: Instant,
    created: u64,
    worked: Duration,
    calm_since: Instant,
}

/// What was read of a sandbox.
#[derive(Debug, Clone, Copy)]
struct Reading {
    /// Created so far.
    created: u64,
    /// Time since the reading before.
    time: Duration,
    /// Created per second in this time.
    rate: f64,
    /// Processes and threads that it has now, if it creates many.
    processes: u64,
}

impl Reading {
    #[expect(clippy::cast_precision_loss, reason = "a number of processes")]
    fn crowd(&self) -> f64 {
        self.processes as f64
    }

    /// Part of its rate that it should have when it is limited.
    fn target(&self) -> f64 {
        if self.crowd() > CROWD { TARGET_OF_CROWD } else { TARGET }
    }
}

/// What to do with a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Limit { milli_cores: u32, is_new: bool },
    Release,
}

impl Account {
    fn new(created: u64, now: Instant) -> Self {
        Self {
            created,
            at: now,
            excess: 0.0,
            limit: None,
            calm_for: CALM_FOR,
            released: None,
        }
    }

    /// Whether it has to be looked at each time.
    fn is_watched(&self) -> bool {
        self.excess > 0.0 || self.limit.is_some()
    }

    fn read(&mut self, created: u64, now: Instant) -> Reading {
        let time = now.saturating_duration_since(self.at);
        let rate = per_second(created.saturating_sub(self.created), time);
        (self.created, self.at) = (created, now);
        Reading {
            created,
            time,
            rate,
            processes: 0,
        }
    }

    /// Decides from a reading, with the whole rate of a sandbox and what it may create now. `worked` returns the processor time so far.
    fn judge(
        &mut self,
        reading: &Reading,
        own: f64,
        allowed: f64,
        now: Instant,
        worked: impl FnOnce() -> Duration,
    ) -> Option<Verdict> {
        let burst = own * BURST_S;
        self.excess = (self.excess + (reading.rate - allowed) * reading.time.as_secs_f64()).clamp(0.0, burst * 2.0);
        if self.limit.is_some() {
            return self.adjust(reading, allowed, now, worked);
        }
        if self.excess < burst {
            return None;
        }
        self.calm_for = match self.released {
            Some(released) if now.saturating_duration_since(released) < FORGIVEN => {
                (self.calm_for * 2).min(CALM_FOR_MAX)
            }
            _ => CALM_FOR,
        };
        let milli_cores = whole(allowed * reading.target() * COST_S * 1000.0).max(MILLI_CORES_MIN);
        self.limit = Some(Limit {
            milli_cores,
            since: now,
            created: reading.created,
            worked: worked(),
            calm_since: now,
        });
        Some(Verdict::Limit {
            milli_cores,
            is_new: true,
        })
    }

    /// Adjusts its limit, or ends it.
    fn adjust(
        &mut self,
        reading: &Reading,
        allowed: f64,
        now: Instant,
        worked: impl FnOnce() -> Duration,
    ) -> Option<Verdict> {
        let limit = self.limit.as_mut()?;
        let time = now.saturating_duration_since(limit.since);
        if time < ADJUST {
            return None;
        }
        let worked = worked();
        let target = allowed * reading.target();
        let rate = per_second(reading.created.saturating_sub(limit.created), time);
        let used = worked.saturating_sub(limit.worked).as_secs_f64() / time.as_secs_f64();
        (limit.since, limit.created, limit.worked) = (now, reading.created, worked);
        if rate > target * CALM {
            limit.calm_since = now;
        } else if now.saturating_duration_since(limit.calm_since) >= self.calm_for {
            self.limit = None;
            self.released = Some(now);
            self.excess = 0.0;
            return Some(Verdict::Release);
        }
        let change = target / rate.max(1.0);
        let has_used_it = used * 1000.0 > f64::from(limit.milli_cores) * USED;
        let milli_cores = match change {
            ..0.8 => f64::from(limit.milli_cores) * change.max(0.25),
            1.25.. if has_used_it => f64::from(limit.milli_cores) * change.min(1.5),
            _ => return None,
        };
        let least = least_milli_cores(used / rate.max(1.0));
        let milli_cores = whole(milli_cores).clamp(least, MILLI_CORES_MAX);
        if milli_cores == std::mem::replace(&mut limit.milli_cores, milli_cores) {
            return None;
        }
        Some(Verdict::Limit {
            milli_cores,
            is_new: false,
        })
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "thousandths of a core, above zero"
)]
fn whole(milli_cores: f64) -> u32 {
    milli_cores as u32
}

/// Least processor time where what is created takes `cost_s` seconds each.
fn least_milli_cores(cost_s: f64) -> u32 {
    if cost_s < COST_OF_THREADS_S {
        MILLI_CORES_MIN_OF_THREADS
    } else {
        MILLI_CORES_MIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: Rates = Rates {
        sandbox: 2000.0,
        host: 4000.0,
        cores: 2.0,
    };

    /// A sandbox that creates processes as fast as its processor time allows.
    struct Model {
        account: Account,
        now: Instant,
        created: f64,
        worked: f64,
        milli_cores: Option<u32>,
        limits: u32,
    }

    impl Model {
        fn new() -> Self {
            let now = Instant::now();
            Self {
                account: Account::new(0, now),
                now,
                created: 0.0,
                worked: 0.0,
                milli_cores: None,
                limits: 0,
            }
        }

        /// For so many seconds, it would create `rate` processes per second, of which it has some at a time and each takes
        /// `cost` seconds. Returns the rate of the last second.
        fn run(&mut self, seconds: f64, rate: f64, processes: u64, cost: f64) -> f64 {
            let mut last = Vec::new();
            let ticks = whole(seconds / TICK.as_secs_f64());
            for _ in 0..ticks {
                self.now += TICK;
                let cores = self.milli_cores.map_or(2.0, |milli| f64::from(milli) / 1000.0);
                let now = rate.min(cores / cost);
                self.created += now * TICK.as_secs_f64();
                self.worked += now * cost * TICK.as_secs_f64();
                last.push(now);
                let mut reading = self.account.read(u64::from(whole(self.created)), self.now);
                reading.processes = processes;
                let allowed = RATES.of(&reading, RATES.share([&reading].into_iter()));
                let worked = Duration::from_secs_f64(self.worked);
                match self
                    .account
                    .judge(&reading, RATES.sandbox, allowed, self.now, || worked)
                {
                    Some(Verdict::Limit { milli_cores, is_new }) => {
                        self.limits += u32::from(is_new);
                        self.milli_cores = Some(milli_cores);
                    }
                    Some(Verdict::Release) => self.milli_cores = None,
                    None => {}
                }
            }
            let second = last.len().saturating_sub(20);
            last[second..].iter().sum::<f64>() / f64::from(20)
        }
    }

    #[test]
    fn scripts_builds_and_tests_are_not_limited() {
        let mut model = Model::new();
        // Rate, processes at a time, and seconds.
        for (rate, processes, seconds) in [
            (300.0, 12, 600.0),
            (1900.0, 20, 600.0),
            (2600.0, 30, 0.5),
            (450.0, 130, 600.0),
            (8000.0, 400, 0.05),
            (200.0, 500, 600.0),
        ] {
            model.run(seconds, rate, processes, 0.000_5);
            assert_eq!(model.limits, 0, "{rate} {processes}");
            model.run(10.0, 0.0, 5, 0.000_5);
        }
    }

    #[test]
    fn a_storm_is_limited_within_a_second_and_for_as_long_as_it_lasts() {
        for (rate, processes, cost) in [
            (1300.0, 300, 0.000_7),
            (3000.0, 200, 0.000_3),
            (40_000.0, 500, 0.000_02),
        ] {
            let mut model = Model::new();
            model.run(1.0, rate, processes, cost);
            assert_eq!(model.limits, 1, "{rate}");
            model.run(5.0, rate, processes, cost);
            let allowed = 2000.0 * CROWD / f64::from(u32::try_from(processes).unwrap());
            for _ in 0..60 {
                let limited = model.run(10.0, rate, processes, cost);
                let least = f64::from(least_milli_cores(cost)) / 1000.0 / cost;
                assert!(limited < (least * 1.01).max(allowed * 0.5), "{rate}: {limited}");
                assert_eq!(model.limits, 1, "{rate}");
            }
            model.run(CALM_FOR.as_secs_f64() + 1.0, 10.0, 8, cost);
            assert_eq!(model.milli_cores, None, "{rate}");
        }
    }

    #[test]
    fn a_storm_that_comes_back_is_limited_for_longer_each_time() {
        let mut model = Model::new();
        let mut calm = CALM_FOR;
        for storm in 1..=8 {
            model.run(1.0, 5000.0, 300, 0.000_2);
            assert_eq!(model.limits, storm);
            model.run(calm.as_secs_f64() - 1.0, 0.0, 8, 0.000_2);
            assert!(model.milli_cores.is_some(), "{storm}");
            model.run(3.0, 0.0, 8, 0.000_2);
            assert_eq!(model.milli_cores, None, "{storm}");
            calm = (calm * 2).min(CALM_FOR_MAX);
        }
        model.run(FORGIVEN.as_secs_f64(), 0.0, 8, 0.000_2);
        model.run(1.0, 5000.0, 300, 0.000_2);
        model.run(CALM_FOR.as_secs_f64() + 1.0, 0.0, 8, 0.000_2);
        assert_eq!(model.milli_cores, None, "what was long ago is forgiven");
    }

    #[test]
    fn a_limit_makes_room_for_processes_that_take_longer() {
        let mut model = Model::new();
        model.run(1.0, 5000.0, 50, 0.000_2);
        assert_eq!(model.limits, 1);
        // Compilers, which create few processes and need two cores.
        model.run(8.0, 100.0, 20, 0.02);
        assert_eq!(model.milli_cores, None);
    }

    #[test]
    fn many_sandboxes_below_the_rate_are_limited_like_one_above() {
        let reading = |rate, processes| Reading {
            created: 0,
            time: TICK,
            rate,
            processes,
        };
        let share = |number: usize, one: Reading| RATES.share(vec![one; number].iter());
        assert!(share(2, reading(1500.0, 20)) >= 2000.0);
        assert!(share(3, reading(1500.0, 20)) < 1500.0);
        // As many processes at a time, of ten sandboxes.
        assert!(share(10, reading(250.0, 50)) < 250.0);
        assert!(share(10, reading(250.0, 10)) >= 2000.0);
        assert!(share(1000, reading(1.0, 5)) >= 2000.0);
    }
}

//! Records of sandboxes: logs, metrics, lifecycle events, and what teams use.
//!
//! Log entries come from lifecycle events in this server and from the node. They wait in one bounded queue ([`queue`])
//! and are written in the background, many in one transaction ([`writer`]), so that a create request never waits for
//! them. Samples are taken from the node every few seconds ([`sampler`]), collected in memory and written as one
//! encoded row per sandbox and five minutes ([`encoding`]). All are kept for some time after their sandbox has ended, and
//! removed in small batches ([`purge`]).
//!
//! What happens to a sandbox is one call, [`Records::log_event`], from which both its log entry and the event for clients
//! ([`event`]) are made; events go through the same queue, and what is to be sent of them to webhooks is written with them.
//!
//! A crash loses the entries and events of the last fraction of a second, and the samples since the last row of each sandbox, at
//! most five minutes of them. An orderly stop loses nothing.
//!
//! Size: with 1,000 sandboxes, each has 17,280 samples a day. Five minutes of an idle one take 477 bytes in SQLite with
//! the indexes (measured), of a busy one 1,950: between 140 and 560 MB a day for all of them together, written as three
//! to four rows per second, and no more than that with a retention of one day. A log takes about `log_bytes` at most.

pub(crate) mod buckets;
mod encoding;
mod event;
mod lifecycle_event;
mod purge;
mod queue;
mod sampler;
mod tail;
pub(crate) mod team_usage;
mod writer;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use model::event::EventType;
use model::id::{NodeId, SandboxId, TeamId};
use model::log::Level;
use parking_lot::Mutex;
use protocol::node::{NetworkBytes, SandboxLog};
use store::Store;
use store::error::StoreError;
use store::records::{EventQuery, LogQuery, LogRow, NewLogEntry, TeamUsage};
use store::sandboxes::SandboxRow;
use tokio::sync::Notify;

pub(crate) use self::encoding::Sample;
use self::event::Subject;
pub(crate) use self::lifecycle_event::LifecycleEvent;
use self::queue::{Item, WriteQueue};
use self::tail::Tail;
use self::team_usage::TeamCounters;
use crate::clock::{Clock, SECOND_US};
use crate::settings::RecordSettings;
use crate::telemetry::{Telemetry, WorkSpan};

/// How long an ended sandbox is kept in memory: entries of the node may still arrive.
const LINGER: Duration = Duration::from_secs(10);

/// The records of all sandboxes.
#[derive(Debug)]
pub(crate) struct Records {
    store: Store,
    /// What records spans, if that is on.
    telemetry: Option<Arc<Telemetry>>,
    settings: RecordSettings,
    clock: Clock,
    queue: WriteQueue,
    tracked: Mutex<HashMap<SandboxId, TrackedSandbox>>,
    /// What teams use. Locked after `tracked`, if both are.
    usage: Mutex<TeamCounters>,
    /// How much all logs together may still grow, in bytes, since the last count.
    log_budget: AtomicU64,
    /// Notified when the logs have grown beyond their budget.
    over_budget: Notify,
    /// Notified when events have been written, which may have to be sent.
    events_written: Notify,
}

/// A sandbox with records.
#[derive(Debug)]
struct TrackedSandbox {
    team: TeamId,
    ended: Option<Instant>,
    tail: Tail,
    subject: Subject,
    /// Whether it counts as one that its team runs.
    is_running: bool,
}

impl Records {
    pub(crate) fn new(
        store: Store,
        settings: RecordSettings,
        clock: Clock,
        node: &NodeId,
        telemetry: Option<Arc<Telemetry>>,
    ) -> Self {
        let log_total_bytes = settings.log_total_bytes;
        Self {
            store,
            telemetry,
            queue: WriteQueue::new(settings.settle),
            settings,
            clock,
            tracked: Mutex::default(),
            usage: Mutex::new(TeamCounters::new(node.to_string())),
            // The first count is one purge interval after the start, or when this much was added.
            log_budget: AtomicU64::new(log_total_bytes),
            over_budget: Notify::new(),
            events_written: Notify::new(),
        }
    }

    /// Number of log entries dropped since the start because the database was too slow.
    pub(crate) fn entries_lost(&self) -> u64 {
        self.queue.lost()
    }

    /// Begins the span of a change of a sandbox that no request waits for, if its trace is recorded.
    pub(crate) fn begin_change(
        &self,
        name: &'static str,
        team: &TeamId,
        id: &SandboxId,
        reason: &'static str,
    ) -> Option<WorkSpan> {
        self.telemetry.as_ref()?.begin_change(name, team, id, reason)
    }

    /// Begins the records of a sandbox.
    pub(crate) fn track(&self, row: &SandboxRow) {
        let tracked = TrackedSandbox {
            team: row.team_id.clone(),
            ended: None,
            tail: Tail::new(&row.id, row.cpu_count),
            subject: Subject::of(row),
            is_running: false,
        };
        let before = self.tracked.lock().insert(row.id.clone(), tracked);
        if let Some(mut before) = before {
            self.count(&mut before, false);
        }
    }

    /// Starts the samples of a sandbox, which runs since `started_us`.
    pub(crate) fn start_sampling(&self, row: &SandboxRow) {
        if let Some(tracked) = self.tracked.lock().get_mut(&row.id) {
            tracked.tail.start(row.started_us);
            tracked.subject.begin(row);
            self.count(tracked, true);
        }
    }

    /// Stops the samples of a sandbox until [`Self::start_sampling`]: it is paused, and `network` is what it had received and
    /// sent.
    pub(crate) fn stop_sampling(&self, id: &SandboxId, network: Option<NetworkBytes>) {
        if let Some(tracked) = self.tracked.lock().get_mut(id) {
            tracked.tail.pause(network);
            tracked.subject.end(self.clock.now_us());
            self.count(tracked, false);
        }
    }

    /// Notes that the run of a sandbox has ended at this time, before its end was known here.
    pub(crate) fn run_has_ended(&self, id: &SandboxId, at_us: i64) {
        if let Some(tracked) = self.tracked.lock().get_mut(id) {
            tracked.subject.end(at_us);
        }
    }

    /// Counts whether a sandbox runs.
    fn count(&self, tracked: &mut TrackedSandbox, is_running: bool) {
        let was_running = std::mem::replace(&mut tracked.is_running, is_running);
        let now_us = self.clock.now_us();
        match (was_running, is_running) {
            (false, true) => self.usage.lock().enter(&tracked.team, now_us),
            (true, false) => self.usage.lock().leave(&tracked.team, now_us),
            (false, false) | (true, true) => {}
        }
    }

    /// Adds a lifecycle event to the log of a sandbox, and to the events of its team if clients are told about it.
    pub(crate) fn log_event(&self, id: &SandboxId, event: &LifecycleEvent<'_>) {
        let (level, message, fields) = event.describe();
        let now_us = self.clock.now_us();
        self.put_entry(id, lifecycle_event::LOGGER, now_us, level, message.to_owned(), fields);
        if let Some(kind) = event.kind() {
            self.put_event(id, kind, event, now_us);
        }
    }

    fn put_event(&self, id: &SandboxId, kind: EventType, event: &LifecycleEvent<'_>, now_us: i64) {
        let mut tracked = self.tracked.lock();
        let Some(tracked) = tracked.get_mut(id) else { return };
        if matches!(kind, EventType::Created | EventType::Resumed) {
            self.usage.lock().start(&tracked.team, now_us);
        }
        if tracked.subject.is_news(kind) {
            let seq = self.queue.next_seq();
            let event = tracked.subject.event(kind, &tracked.team, id, event, now_us, seq);
            self.queue.put(Item::Event(event));
        }
    }

    /// Events of a team in JSON, including everything that happened before the call.
    pub(crate) async fn events(&self, team: &TeamId, query: &EventQuery) -> Result<Vec<String>, StoreError> {
        self.queue.flush().await;
        self.store.event_list(team, query).await
    }

    /// Resolves when events have been written since the last call.
    pub(crate) async fn events_written(&self) {
        self.events_written.notified().await;
    }

    /// What a team used in the minutes that began between two times, both inclusive, oldest first. The current minute is in
    /// it as far as it has gone.
    pub(crate) async fn team_usage(
        &self,
        team: &TeamId,
        from_us: i64,
        to_us: i64,
    ) -> Result<Vec<TeamUsage>, StoreError> {
        let from_us = from_us.max(self.clock.now_us() - i64::from(self.settings.event_retention_s) * SECOND_US);
        let now = || self.usage.lock().current(team);
        let minute_of = |usage: &Option<TeamUsage>| usage.as_ref().map(|minute| minute.at_us);
        let mut current = now();
        let mut usage = loop {
            self.queue.flush().await;
            let usage = self.store.team_usage(team, from_us, to_us).await?;
            let before = std::mem::replace(&mut current, now());
            // A minute that ended meanwhile may be among those that are stored, or not.
            if minute_of(&before) == minute_of(&current) {
                break usage;
            }
        };
        let current = current.filter(|minute| (from_us..=to_us).contains(&minute.at_us));
        match (usage.last_mut(), current) {
            // Of a process before this one.
            (Some(last), Some(current)) if last.at_us == current.at_us => {
                last.sandboxes = last.sandboxes.max(current.sandboxes);
                last.starts = last.starts.saturating_add(current.starts);
            }
            (_, Some(current)) => usage.push(current),
            (_, None) => {}
        }
        Ok(usage)
    }

    /// Has the minutes written that are over, or all of them.
    fn write_usage(&self, all: bool) {
        let over = self.usage.lock().cut(self.clock.now_us(), all);
        for usage in over {
            self.queue.put(Item::Usage(usage));
        }
    }

    /// Ends the records of a sandbox: its last samples are written, and the retention of its log begins.
    pub(crate) fn end(&self, id: &SandboxId) {
        let mut tracked = self.tracked.lock();
        let Some(tracked) = tracked.get_mut(id).filter(|tracked| tracked.ended.is_none()) else {
            return;
        };
        tracked.ended = Some(Instant::now());
        self.count(tracked, false);
        if let Some(chunk) = tracked.tail.cut(&tracked.team, id) {
            self.queue.put(Item::Chunk(chunk));
        }
        self.queue
            .put(Item::End(tracked.team.clone(), id.clone(), self.clock.now_us()));
    }

    /// Adds a log entry of the node.
    pub(crate) fn log_from_node(&self, entry: SandboxLog) {
        let SandboxLog {
            id,
            at_us,
            level,
            logger,
            message,
            fields,
        } = entry;
        self.put_entry(&id, logger.as_str(), at_us, level, message, fields);
    }

    fn put_entry(
        &self,
        id: &SandboxId,
        logger: &str,
        at_us: i64,
        level: Level,
        message: String,
        fields: BTreeMap<String, String>,
    ) {
        let team = self.tracked.lock().get(id).map(|tracked| tracked.team.clone());
        // Without a team: the sandbox was never announced, or ended long ago.
        let Some(team_id) = team else { return };
        // PostgreSQL does not support NUL in texts.
        let message = if message.contains('\0') {
            message.replace('\0', "\u{fffd}")
        } else {
            message
        };
        self.queue.put(Item::Entry(NewLogEntry {
            team_id,
            sandbox_id: id.clone(),
            row: LogRow {
                at_us,
                seq: self.queue.next_seq(),
                level,
                logger: logger.to_owned(),
                message,
                fields,
            },
        }));
    }

    /// Log entries of a team's sandbox, including everything that was added before the call.
    pub(crate) async fn log(&self, team: &TeamId, id: &SandboxId, query: &LogQuery) -> Result<Vec<LogRow>, StoreError> {
        if query.limit == 0 {
            return Ok(Vec::new());
        }
        self.queue.flush().await;
        self.store.log_list(team, id, query).await
    }

    /// The team that owns or owned a sandbox, as long as there are records of it. Only for the operator: requests of
    /// teams already have their team.
    pub(crate) async fn owner(&self, id: &SandboxId) -> Result<Option<TeamId>, StoreError> {
        let tracked = self.tracked.lock().get(id).map(|tracked| tracked.team.clone());
        match tracked {
            Some(team) => Ok(Some(team)),
            None => self.store.record_owner(id).await,
        }
    }

    /// The samples of a team's sandbox between two times, both inclusive, oldest first.
    pub(crate) async fn samples(
        &self,
        team: &TeamId,
        id: &SandboxId,
        from_us: i64,
        to_us: i64,
    ) -> Result<Vec<Sample>, StoreError> {
        let from_us = from_us.max(self.oldest_sample_us());
        // Memory first: samples that move to the database meanwhile are then read twice, not missed.
        let recent = self.with_tail(team, id, |tail| tail.samples().to_vec());
        self.queue.flush().await;
        let chunks = self.store.metric_list(team, id, from_us, to_us).await?;
        let mut samples: BTreeMap<i64, Sample> = BTreeMap::new();
        for chunk in &chunks {
            let decoded = encoding::decode(&chunk.samples).unwrap_or_else(|| {
                tracing::error!(sandbox.id = %id, from_us = chunk.from_us, "cannot decode metrics in the database, answers are without them");
                Vec::new()
            });
            samples.extend(decoded.into_iter().map(|sample| (sample.at_us, sample)));
        }
        samples.extend(recent.into_iter().flatten().map(|sample| (sample.at_us, sample)));
        if from_us > to_us {
            return Ok(Vec::new());
        }
        Ok(samples.range(from_us..=to_us).map(|(_, sample)| *sample).collect())
    }

    /// The newest sample of a team's sandbox.
    pub(crate) async fn latest(&self, team: &TeamId, id: &SandboxId) -> Result<Option<Sample>, StoreError> {
        let last = match self.with_tail(team, id, Tail::last).flatten() {
            Some(last) => Some(last),
            None => {
                let chunk = self.store.metric_latest(team, id).await?;
                chunk.and_then(|chunk| encoding::decode(&chunk.samples)?.last().copied())
            }
        };
        Ok(last.filter(|sample| sample.at_us >= self.oldest_sample_us()))
    }

    /// The newest sample of each of these sandboxes, if it has one. At most one read of the database, however
    /// many they are: what is in memory needs none.
    pub(crate) async fn latest_of(&self, rows: &[SandboxRow]) -> Result<HashMap<SandboxId, Sample>, StoreError> {
        let mut found = HashMap::with_capacity(rows.len());
        for row in rows {
            if let Some(last) = self.with_tail(&row.team_id, &row.id, Tail::last).flatten() {
                found.insert(row.id.clone(), last);
            }
        }
        let oldest_us = self.oldest_sample_us();
        if found.len() < rows.len() {
            let wanted: HashSet<&SandboxId> = rows.iter().map(|row| &row.id).collect();
            for chunk in self.store.metric_latest_of_all(oldest_us).await? {
                if !wanted.contains(&chunk.sandbox_id) || found.contains_key(&chunk.sandbox_id) {
                    continue;
                }
                let samples = encoding::decode(&chunk.samples);
                if let Some(last) = samples.and_then(|samples| samples.last().copied()) {
                    found.insert(chunk.sandbox_id, last);
                }
            }
        }
        found.retain(|_, sample| sample.at_us >= oldest_us);
        Ok(found)
    }

    /// Has sandboxes that were just taken over go on with what they had received and sent.
    pub(crate) async fn recall(&self, taken_over: &HashSet<SandboxId>) -> Result<(), StoreError> {
        let chunks = self.store.metric_latest_of_all(self.oldest_sample_us()).await?;
        let mut tracked = self.tracked.lock();
        for chunk in chunks
            .into_iter()
            .filter(|chunk| taken_over.contains(&chunk.sandbox_id))
        {
            let last = encoding::decode(&chunk.samples).and_then(|samples| samples.last().copied());
            if let (Some(last), Some(tracked)) = (last, tracked.get_mut(&chunk.sandbox_id)) {
                tracked.tail.recall(&last);
            }
        }
        Ok(())
    }

    /// Calls `ask` with the tail of a sandbox, if it belongs to the team.
    fn with_tail<T>(&self, team: &TeamId, id: &SandboxId, ask: impl FnOnce(&Tail) -> T) -> Option<T> {
        let tracked = self.tracked.lock();
        let tracked = tracked.get(id).filter(|tracked| tracked.team == *team)?;
        Some(ask(&tracked.tail))
    }

    fn oldest_sample_us(&self) -> i64 {
        self.clock.now_us() - i64::from(self.settings.metric_retention_s) * SECOND_US
    }

    /// Removes sandboxes from memory that ended some time ago.
    fn forget_ended(&self) {
        self.tracked
            .lock()
            .retain(|_, tracked| tracked.ended.is_none_or(|ended| ended.elapsed() < LINGER));
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicI64, Ordering};

    use futures_util::poll;
    use tokio_util::sync::CancellationToken;

    use super::team_usage::MINUTE_US;
    use super::*;

    #[tokio::test]
    async fn a_minute_that_ends_while_it_is_read_counts_once() {
        let directory = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}/db", directory.path().display());
        let store = Store::open(&url).await.unwrap();
        let now_us = Arc::new(AtomicI64::new(MINUTE_US * 29_750_000));
        let clock = Arc::clone(&now_us);
        let clock = Clock::new(move || clock.load(Ordering::Relaxed));
        let node = "00000000-0000-4000-8000-000000000002".parse().unwrap();
        let records = Arc::new(Records::new(store, RecordSettings::default(), clock, &node, None));
        let stop = CancellationToken::new();
        let writing = tokio::spawn(Arc::clone(&records).write(stop.clone()));
        let team: TeamId = "00000000-0000-4000-8000-000000000001".parse().unwrap();
        let begun_us = now_us.load(Ordering::Relaxed);
        {
            let mut usage = records.usage.lock();
            usage.enter(&team, begun_us);
            usage.start(&team, begun_us);
        }
        // It waits for what is not written yet, and meanwhile the minute is over and is written.
        let ended = "i0000000000000000000".parse().unwrap();
        records.queue.put(Item::End(team.clone(), ended, begun_us));
        let mut asked = pin!(records.team_usage(&team, 0, i64::MAX));
        assert!(poll!(&mut asked).is_pending());
        now_us.fetch_add(MINUTE_US, Ordering::Relaxed);
        records.write_usage(false);
        records.queue.flush().await;
        let told = asked.await.unwrap();
        let told: Vec<_> = told
            .iter()
            .map(|minute| (minute.at_us, minute.sandboxes, minute.starts))
            .collect();
        assert_eq!(told, [(begun_us, 1, 1), (begun_us + MINUTE_US, 1, 0)]);
        stop.cancel();
        writing.await.unwrap();
    }
}

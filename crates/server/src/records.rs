//! What is remembered of sandboxes: their logs and their metrics.
//!
//! Entries come from the life of sandboxes in this server and from the node. They wait in one bounded queue ([`queue`])
//! and are written behind the scenes, many in one transaction ([`writer`]), so that nothing on the way of a create ever
//! waits for them. Samples are taken from the node every few seconds ([`sampler`]), collected in memory and written as
//! one packed row per sandbox and five minutes ([`pack`]). Both are kept for a while after their sandbox has ended, and
//! removed in small slices ([`purge`]).
//!
//! What a crash loses: entries of the last fraction of a second, and the samples since a sandbox's last row, at most
//! five minutes of them. An orderly end loses nothing.
//!
//! Size. 1,000 sandboxes make 17,280 samples a day each. Five minutes of an idle one take 477 bytes in SQLite with the
//! indexes (measured), of a busy one 1,474: between 140 and 425 MB a day for all of them together, written as three to
//! four rows a second, and no more than that with a retention of a day. A log takes `log_bytes` at most, about.

pub(crate) mod buckets;
mod lifecycle_event;
mod pack;
mod purge;
mod queue;
mod sampler;
mod tail;
mod writer;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use model::id::{SandboxId, TeamId};
use model::log::Level;
use parking_lot::Mutex;
use protocol::node::SandboxLog;
use store::Store;
use store::error::StoreError;
use store::records::{LogQuery, LogRow, NewLogEntry};
use store::sandboxes::SandboxRow;
use tokio::sync::Notify;

pub(crate) use self::lifecycle_event::LifecycleEvent;
pub(crate) use self::pack::Sample;
use self::queue::{Item, WriteQueue};
use self::tail::Tail;
use crate::clock::{Clock, SECOND_US};
use crate::settings::RecordSettings;

/// How long a sandbox that ended is remembered here: what the node had to say of it may still be on its way.
const LINGER: Duration = Duration::from_secs(10);

/// The records of all sandboxes.
#[derive(Debug)]
pub(crate) struct Records {
    store: Store,
    settings: RecordSettings,
    clock: Clock,
    queue: WriteQueue,
    tracked: Mutex<HashMap<SandboxId, TrackedSandbox>>,
    /// What all logs together may still grow by, in bytes, as far as that is known.
    log_budget: AtomicU64,
    /// They have grown by more.
    over_budget: Notify,
}

/// A sandbox that something may be recorded of.
#[derive(Debug)]
struct TrackedSandbox {
    team: TeamId,
    ended: Option<Instant>,
    tail: Tail,
}

impl Records {
    pub(crate) fn new(store: Store, settings: RecordSettings, clock: Clock) -> Self {
        let log_total_bytes = settings.log_total_bytes;
        Self {
            store,
            settings,
            clock,
            queue: WriteQueue::new(),
            tracked: Mutex::default(),
            // Known after the first look, a purge interval after the start or when as much as is allowed was added.
            log_budget: AtomicU64::new(log_total_bytes),
            over_budget: Notify::new(),
        }
    }

    /// How many entries of logs were ever dropped here, because the database was behind.
    pub(crate) fn entries_lost(&self) -> u64 {
        self.queue.lost()
    }

    /// Begins the records of a sandbox.
    pub(crate) fn track(&self, row: &SandboxRow) {
        let tracked = TrackedSandbox {
            team: row.team_id.clone(),
            ended: None,
            tail: Tail::new(&row.id, row.cpu_count),
        };
        self.tracked.lock().insert(row.id.clone(), tracked);
    }

    /// Samples of a sandbox count from now on: it runs, since `started_us`.
    pub(crate) fn start_sampling(&self, row: &SandboxRow) {
        if let Some(tracked) = self.tracked.lock().get_mut(&row.id) {
            tracked.tail.start(row.started_us);
        }
    }

    /// Notes in the log of a sandbox what happened to it.
    pub(crate) fn log_event(&self, id: &SandboxId, event: &LifecycleEvent<'_>) {
        let (level, message, fields) = event.describe();
        self.put_entry(
            id,
            lifecycle_event::LOGGER,
            self.clock.now_us(),
            level,
            message.to_owned(),
            fields,
        );
    }

    /// A sandbox is gone: its last samples are written, and its log begins to age.
    pub(crate) fn end(&self, id: &SandboxId) {
        let mut tracked = self.tracked.lock();
        let Some(tracked) = tracked.get_mut(id).filter(|tracked| tracked.ended.is_none()) else {
            return;
        };
        tracked.ended = Some(Instant::now());
        if let Some(chunk) = tracked.tail.cut(&tracked.team, id) {
            self.queue.put(Item::Chunk(chunk));
        }
        self.queue
            .put(Item::End(tracked.team.clone(), id.clone(), self.clock.now_us()));
    }

    /// Takes in an entry of the node.
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
        // Of a sandbox that nobody was told of, or that ended long ago.
        let Some(team_id) = team else { return };
        // PostgreSQL has no NUL character in its texts.
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

    /// Entries of a team's sandbox, with everything that was noted before the call.
    pub(crate) async fn log(&self, team: &TeamId, id: &SandboxId, query: &LogQuery) -> Result<Vec<LogRow>, StoreError> {
        if query.limit == 0 {
            return Ok(Vec::new());
        }
        self.queue.flush().await;
        self.store.log_list(team, id, query).await
    }

    /// The team whose sandbox this is or was, as long as anything is remembered of it. For the operator: requests of
    /// teams know theirs.
    pub(crate) async fn owner(&self, id: &SandboxId) -> Result<Option<TeamId>, StoreError> {
        let tracked = self.tracked.lock().get(id).map(|tracked| tracked.team.clone());
        match tracked {
            Some(team) => Ok(Some(team)),
            None => self.store.record_owner(id).await,
        }
    }

    /// The samples of a team's sandbox between two times, both included, oldest first.
    pub(crate) async fn samples(
        &self,
        team: &TeamId,
        id: &SandboxId,
        from_us: i64,
        to_us: i64,
    ) -> Result<Vec<Sample>, StoreError> {
        let from_us = from_us.max(self.oldest_sample_us());
        // Memory first: what moves into the database in between is then seen twice, not missed.
        let recent = self.with_tail(team, id, |tail| tail.samples().to_vec());
        self.queue.flush().await;
        let chunks = self.store.metric_list(team, id, from_us, to_us).await?;
        let mut samples: BTreeMap<i64, Sample> = BTreeMap::new();
        for chunk in &chunks {
            let decoded = pack::decode(&chunk.samples).unwrap_or_else(|| {
                tracing::error!(sandbox.id = %id, from_us = chunk.from_us, "metrics in the database cannot be read");
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
                chunk.and_then(|chunk| pack::decode(&chunk.samples)?.last().copied())
            }
        };
        Ok(last.filter(|sample| sample.at_us >= self.oldest_sample_us()))
    }

    /// Asks the tail of a sandbox, if it is that team's.
    fn with_tail<T>(&self, team: &TeamId, id: &SandboxId, ask: impl FnOnce(&Tail) -> T) -> Option<T> {
        let tracked = self.tracked.lock();
        let tracked = tracked.get(id).filter(|tracked| tracked.team == *team)?;
        Some(ask(&tracked.tail))
    }

    fn oldest_sample_us(&self) -> i64 {
        self.clock.now_us() - i64::from(self.settings.metric_retention_s) * SECOND_US
    }

    /// Forgets sandboxes that ended some time ago.
    fn forget_ended(&self) {
        self.tracked
            .lock()
            .retain(|_, tracked| tracked.ended.is_none_or(|ended| ended.elapsed() < LINGER));
    }
}

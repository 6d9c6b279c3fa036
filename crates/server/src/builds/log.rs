//! The log of a running build: lines are collected in memory and written in batches. Its size is bounded.

use std::time::Duration;

use model::id::BuildId;
use model::log::Level;
use parking_lot::Mutex;
use store::Store;
use store::builds::BuildLogRow;
use store::error::StoreError;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::chain::Chain;
use crate::clock::Clock;

/// How often lines are written. Clients ask five times a second.
const INTERVAL: Duration = Duration::from_millis(150);
/// Maximum number of lines of a build.
const LINES_MAX: i64 = 20_000;
/// Maximum size of all lines of a build, in bytes.
const BYTES_MAX: i64 = 4 << 20;
/// Maximum size of a line, in bytes.
const LINE_MAX: usize = 8 << 10;
/// How many lines are written at once.
const BATCH: usize = 500;
/// How often writing the last lines is tried.
const LAST_ATTEMPTS: usize = 5;

/// The log of one build.
#[derive(Debug)]
pub(crate) struct BuildLog {
    store: Store,
    build: BuildId,
    clock: Clock,
    state: Mutex<LogState>,
    /// One writer at a time, so that entries arrive in order.
    writing: tokio::sync::Mutex<()>,
    added: Notify,
}

#[derive(Debug, Default)]
struct LogState {
    last_seq: i64,
    bytes: i64,
    is_full: bool,
    pending: Vec<BuildLogRow>,
}

/// The text, cut to a length in bytes.
fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        let mut end = most;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

impl BuildLog {
    /// Opens the log, which has the lines of earlier attempts.
    pub(crate) async fn open(store: Store, build: BuildId, clock: Clock) -> Result<Self, StoreError> {
        let size = store.build_log_size(&build).await?;
        Ok(Self {
            store,
            build,
            clock,
            state: Mutex::new(LogState {
                last_seq: size.last_seq,
                bytes: size.bytes,
                ..LogState::default()
            }),
            writing: tokio::sync::Mutex::default(),
            added: Notify::new(),
        })
    }

    /// Adds a line; whether it was added. Once the log is full, only errors are, of which a build has few.
    pub(crate) fn write(&self, level: Level, step: Option<&str>, message: String) -> bool {
        let message = cut(message, LINE_MAX);
        let mut state = self.state.lock();
        let length = i64::try_from(message.len()).unwrap_or(i64::MAX);
        let fits = state.last_seq < LINES_MAX && state.bytes.saturating_add(length) <= BYTES_MAX;
        if !fits && !state.is_full {
            state.is_full = true;
            let note = "the log of this build is full: further lines are left out".to_owned();
            state.push(self.clock.now_us(), Level::Warn, step, note);
        }
        // A little more for the reason, which comes last.
        let is_last = level == Level::Error && state.last_seq < LINES_MAX + 100;
        let is_added = !state.is_full || is_last;
        if is_added {
            state.push(self.clock.now_us(), level, step, message);
        }
        drop(state);
        self.added.notify_one();
        is_added
    }

    /// Writes lines to the database as they come, until `done` is cancelled.
    pub(crate) async fn follow(&self, done: &CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = done.cancelled() => return,
                () = self.added.notified() => {}
            }
            tokio::select! {
                biased;
                () = done.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
            if let Err(error) = self.flush().await {
                tracing::warn!(build.id = %self.build, error = %Chain(&error), "cannot write the log of a build");
            }
        }
    }

    /// Writes the rest. A build ends only after that, so that its log is complete by then.
    pub(crate) async fn finish(&self) {
        for _ in 0..LAST_ATTEMPTS {
            match self.flush().await {
                Ok(()) => return,
                Err(error) => {
                    tracing::error!(build.id = %self.build, error = %Chain(&error), "cannot write the log of a build");
                    tokio::time::sleep(INTERVAL).await;
                }
            }
        }
    }

    async fn flush(&self) -> Result<(), StoreError> {
        let _writing = self.writing.lock().await;
        loop {
            let batch: Vec<BuildLogRow> = self.state.lock().pending.iter().take(BATCH).cloned().collect();
            if batch.is_empty() {
                return Ok(());
            }
            match self.store.build_log_append(&self.build, &batch).await {
                Ok(()) => {}
                // An earlier write succeeded without an answer.
                Err(StoreError::Conflict { .. }) => {
                    let stored = self.store.build_log_size(&self.build).await?.last_seq;
                    self.state.lock().pending.retain(|entry| entry.seq > stored);
                    continue;
                }
                Err(error) => return Err(error),
            }
            self.state.lock().pending.drain(..batch.len());
        }
    }
}

impl LogState {
    fn push(&mut self, at_us: i64, level: Level, step: Option<&str>, message: String) {
        self.last_seq += 1;
        self.bytes = self
            .bytes
            .saturating_add(i64::try_from(message.len()).unwrap_or(i64::MAX));
        self.pending.push(BuildLogRow {
            seq: self.last_seq,
            at_us,
            level,
            step: step.map(str::to_owned),
            message,
        });
    }
}

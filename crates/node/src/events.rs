//! Writes the events of an agent into the log of its sandbox.
//!
//! Every byte from the agent is untrusted. The length of a line and of each value is bounded, and control characters,
//! which a terminal would obey, are replaced. Timestamps are the host's. The rate of entries is limited per sandbox:
//! events beyond it are counted, reported in one entry, and read slowly, so that a flood costs the sandbox its log and
//! not the host.

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Body;
use model::log::Level;
use protocol::agent::AgentEvent;
use protocol::node::Logger;
use tokio::time::Instant;

use crate::log_writer::{self, LogWriter};

/// Maximum length of a line, in bytes. The agent's own lines have at most about 500.
const LINE_MAX: usize = 4096;
/// Maximum length of a stored value, in characters.
const VALUE_MAX: usize = 256;
/// Entries that a sandbox may write in one burst, and per second in the long run. The start and the end of a process
/// are one entry each.
const BURST: u32 = 1000;
const PER_SECOND: u32 = 50;
/// Pause before the next chunk of a flood is read. With the size of one read this is 3 MB/s.
const FLOOD_PAUSE: Duration = Duration::from_millis(5);

/// Writes agent events into the log until the agent reports that its spawner has ended. `failed_ends` is called after
/// entries about processes that ended with a nonzero exit code.
pub(crate) async fn follow(
    mut body: impl Body<Data = Bytes, Error: Error + Send + Sync + 'static> + Unpin,
    log: &LogWriter,
    budget: &mut Budget,
    failed_ends: impl Fn(),
) -> io::Result<()> {
    let mut lines = Lines::default();
    loop {
        let frame = match budget.until_report(Instant::now()) {
            None => body.frame().await,
            // The dropped entries must also be reported when no further event follows the flood.
            Some(wait) => match tokio::time::timeout(wait, body.frame()).await {
                Ok(frame) => frame,
                Err(_) => {
                    budget.report_dropped(Instant::now(), log);
                    continue;
                }
            },
        };
        let frame = frame.ok_or(io::ErrorKind::UnexpectedEof)?.map_err(io::Error::other)?;
        let Ok(data) = frame.into_data() else { continue };
        let mut has_failed_end = false;
        let mut spawner_gone = false;
        let now = Instant::now();
        lines.take(&data, |line| match line.map(serde_json::from_slice::<AgentEvent>) {
            Some(Ok(AgentEvent::SpawnerGone)) => spawner_gone = true,
            Some(Ok(AgentEvent::Heartbeat | AgentEvent::Unknown)) => {}
            Some(Ok(AgentEvent::Dropped { count })) => {
                budget.count_dropped(u64::from(u32::try_from(count).unwrap_or(u32::MAX)))
            }
            Some(Ok(event)) => {
                has_failed_end |= matches!(&event, AgentEvent::ProcessEnd { exit_code, .. } if *exit_code != 0);
                if budget.report_dropped(now, log) && budget.spend(now) {
                    let entry = log_entry(event);
                    log.write(entry.level, entry.logger, entry.message, entry.fields);
                } else {
                    budget.count_dropped(1);
                }
            }
            Some(Err(_)) | None => budget.count_dropped(1),
        });
        if has_failed_end {
            failed_ends();
        }
        if spawner_gone {
            return Ok(());
        }
        if budget.is_spent(now) {
            tokio::time::sleep(FLOOD_PAUSE).await;
        }
    }
}

struct LogEntry {
    level: Level,
    logger: Logger,
    message: String,
    fields: BTreeMap<String, String>,
}

fn log_entry(event: AgentEvent) -> LogEntry {
    let mut fields = BTreeMap::new();
    let mut field = |key: &str, value: &str| drop(fields.insert(key.to_owned(), sanitized(value)));
    let (level, message) = match event {
        AgentEvent::ProcessStart {
            pid,
            command,
            user,
            pty,
        } => {
            field("event_type", "process_start");
            field("pid", &pid.to_string());
            field("command", &command);
            field("user", &user);
            field("pty", &pty.to_string());
            (Level::Info, format!("process {pid} started: {command}"))
        }
        AgentEvent::ProcessEnd {
            pid,
            command,
            exit_code,
            status,
            stdout_bytes,
            stderr_bytes,
            pty_bytes,
            duration_ms,
        } => {
            field("event_type", "process_end");
            field("pid", &pid.to_string());
            field("command", &command);
            field("process_result", &status);
            for (key, value) in [
                ("stdout_bytes", stdout_bytes),
                ("stderr_bytes", stderr_bytes),
                ("pty_bytes", pty_bytes),
                ("duration_ms", duration_ms),
            ] {
                field(key, &value.to_string());
            }
            field("exit_code", &exit_code.to_string());
            (Level::Info, format!("process {pid} ended: {status}"))
        }
        AgentEvent::ProcessFailed { command, reason } => {
            field("event_type", "process_start_failed");
            field("command", &command);
            field("reason", &reason);
            (Level::Warn, format!("process could not be started: {reason}"))
        }
        AgentEvent::SocketMemory { bytes } => {
            field("event_type", "socket_memory");
            field("held_bytes", &bytes.to_string());
            let mib = bytes >> 20;
            (
                Level::Error,
                format!("all processes were killed: sockets held {mib} MiB beyond the sandbox's limit"),
            )
        }
        AgentEvent::Dropped { .. } | AgentEvent::Heartbeat | AgentEvent::SpawnerGone | AgentEvent::Unknown => {
            field("event_type", "unknown");
            (Level::Debug, "unknown agent event".to_owned())
        }
    };
    LogEntry {
        level,
        logger: Logger::Process,
        message: sanitized(&message),
        fields,
    }
}

/// A text from the agent that is safe to display: at most [`VALUE_MAX`] characters, control characters replaced.
fn sanitized(text: &str) -> String {
    let replace = |character: char| {
        if character.is_control() {
            char::REPLACEMENT_CHARACTER
        } else {
            character
        }
    };
    text.chars().take(VALUE_MAX).map(replace).collect()
}

/// Splits a byte stream into lines of at most [`LINE_MAX`] bytes.
#[derive(Debug, Default)]
struct Lines {
    partial: Vec<u8>,
    /// The current line is too long and has been reported as such.
    too_long: bool,
}

impl Lines {
    /// Calls `each` for every line that ends in `data`, and with `None` for a line that is too long.
    fn take(&mut self, data: &Bytes, mut each: impl FnMut(Option<&[u8]>)) {
        let mut pieces = data.split(|byte| *byte == b'\n').peekable();
        while let Some(piece) = pieces.next() {
            if !self.too_long && self.partial.len() + piece.len() > LINE_MAX {
                self.too_long = true;
                self.partial = Vec::new();
                each(None);
            }
            if !self.too_long {
                self.partial.extend_from_slice(piece);
            }
            if pieces.peek().is_none() {
                // The last piece has no line end yet.
                return;
            }
            if !self.too_long {
                each(Some(&self.partial));
            }
            self.too_long = false;
            // Usually nothing remains after a line, so no allocation is kept.
            self.partial = Vec::new();
        }
    }
}

/// Rate limit for the log entries of one sandbox.
#[derive(Debug)]
pub(crate) struct Budget {
    /// When the whole budget is available again: later than now by the time in which the spent entries are replenished.
    full_at: Instant,
    /// Entries that were dropped and have not been reported yet.
    dropped: u64,
}

impl Budget {
    const STEP: Duration = Duration::from_millis(1000 / PER_SECOND as u64);

    pub(crate) fn new(now: Instant) -> Self {
        Self {
            full_at: now,
            dropped: 0,
        }
    }

    /// Time until this number of entries may be written in one burst.
    fn wait_for(&self, entries: u32, now: Instant) -> Duration {
        (self.full_at.max(now) + Self::STEP * entries).saturating_duration_since(now + Self::STEP * BURST)
    }

    fn is_spent(&self, now: Instant) -> bool {
        !self.wait_for(1, now).is_zero()
    }

    /// Takes the budget of one entry, if available.
    fn spend(&mut self, now: Instant) -> bool {
        let is_allowed = !self.is_spent(now);
        if is_allowed {
            self.full_at = self.full_at.max(now) + Self::STEP;
        }
        is_allowed
    }

    fn count_dropped(&mut self, count: u64) {
        self.dropped = self.dropped.saturating_add(count);
    }

    /// Time until dropped entries may be reported; `None` when there are none. The budget of one second must be
    /// available, so that a flood does not produce a log of reports about dropped entries only.
    fn until_report(&self, now: Instant) -> Option<Duration> {
        (self.dropped > 0).then(|| self.wait_for(PER_SECOND, now))
    }

    /// Reports dropped entries if there are any and the budget allows it. Returns whether none are left to report.
    fn report_dropped(&mut self, now: Instant, log: &LogWriter) -> bool {
        match self.until_report(now) {
            None => true,
            Some(Duration::ZERO) => {
                self.spend(now);
                let dropped = std::mem::take(&mut self.dropped);
                log.write(
                    Level::Warn,
                    Logger::Sandbox,
                    log_writer::dropped_message(dropped),
                    log_writer::dropped_fields(dropped),
                );
                true
            }
            Some(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::{Full, StreamBody};
    use hyper::body::Frame;
    use tokio::sync::mpsc;

    use super::*;
    use crate::journal::{Journal, LogEntries};

    fn log() -> (LogWriter, LogEntries) {
        let journal = Journal::new();
        let entries = LogEntries::of(&journal);
        (LogWriter::new("iabc".parse().unwrap(), journal), entries)
    }

    fn start(pid: u32, command: &str) -> Vec<u8> {
        let event = AgentEvent::ProcessStart {
            pid,
            command: command.to_owned(),
            user: "user".to_owned(),
            pty: false,
        };
        [&serde_json::to_vec(&event).unwrap()[..], b"\n"].concat()
    }

    const GONE: &[u8] = b"{\"event\":\"spawner_gone\"}\n";

    #[test]
    fn lines_are_reassembled_and_bounded() {
        let mut lines = Lines::default();
        let mut seen = Vec::new();
        let longest = "l".repeat(LINE_MAX);
        let pieces = [
            "on",
            "e\n\ntwo\nth",
            "ree",
            "\n",
            &longest,
            "\n",
            &longest,
            "x",
            "xx\nfour",
            "\n",
            &longest,
            "x\n",
            "five\nsix",
        ];
        for piece in pieces {
            let each = |line: Option<&[u8]>| seen.push(line.map(|line| String::from_utf8_lossy(line).into_owned()));
            lines.take(&Bytes::copy_from_slice(piece.as_bytes()), each);
        }
        let expected = [
            Some("one"),
            Some(""),
            Some("two"),
            Some("three"),
            Some(&longest),
            None,
            Some("four"),
            None,
            Some("five"),
        ];
        assert_eq!(seen, expected.map(|line| line.map(str::to_owned)));
    }

    #[tokio::test]
    async fn agent_events_become_log_entries() {
        let (log, mut entries) = log();
        let end = r#"{"event":"process_end","pid":7,"command":"a\u001b[2J","exitCode":-1,"status":"signal: killed",
            "stdoutBytes":1,"stderrBytes":2,"ptyBytes":3,"durationMs":4}"#;
        let end = end.replace("\n", "");
        let new = r#"{"event":"of_a_later_version","x":1}"#;
        let all = [&start(7, "ls")[..], end.as_bytes(), b"\n", new.as_bytes(), b"\n", GONE].concat();
        let failed = std::cell::Cell::new(0);
        let mut budget = Budget::new(Instant::now());
        let count = || failed.set(failed.get() + 1);
        follow(Full::new(Bytes::from(all)), &log, &mut budget, count)
            .await
            .unwrap();
        assert_eq!(failed.get(), 1);
        let entry = entries.try_next().unwrap();
        assert_eq!((entry.level, entry.logger), (Level::Info, Logger::Process));
        assert_eq!(entry.message, "process 7 started: ls");
        let fields: Vec<_> = entry
            .fields
            .iter()
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        assert_eq!(
            fields,
            [
                "command=ls",
                "event_type=process_start",
                "pid=7",
                "pty=false",
                "user=user"
            ]
        );
        let entry = entries.try_next().unwrap();
        assert_eq!(entry.message, "process 7 ended: signal: killed");
        assert_eq!(entry.fields["command"], "a\u{fffd}[2J");
        let expected = [
            ("event_type", "process_end"),
            ("process_result", "signal: killed"),
            ("exit_code", "-1"),
            ("stdout_bytes", "1"),
            ("stderr_bytes", "2"),
            ("pty_bytes", "3"),
            ("duration_ms", "4"),
        ];
        for (key, value) in expected {
            assert_eq!(entry.fields[key], value, "{key}");
        }
        assert_eq!(entries.try_next(), None);

        // A stream that is cut off is an error, not the end of the spawner.
        let cut = Full::new(Bytes::from(start(7, "ls")));
        assert!(follow(cut, &log, &mut budget, || {}).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_events_is_limited_and_counted() {
        let (log, mut entries) = log();
        let events = BURST * 3;
        let (sender, receiver) = mpsc::channel::<Bytes>(8192);
        for pid in 0..events {
            sender.try_send(start(pid, "x").into()).unwrap();
        }
        let long = "x".repeat(LINE_MAX + 1);
        sender.try_send(Bytes::from(format!("{long}\nno json\n[1]\n"))).unwrap();
        sender
            .try_send(br#"{"event":"dropped","count":18446744073709551615}"#.to_vec().into())
            .unwrap();
        sender.try_send(Bytes::from_static(b"\n")).unwrap();
        let frames = body_of(receiver);
        let task = tokio::task::spawn(async move {
            let mut budget = Budget::new(Instant::now());
            follow(frames, &log, &mut budget, || {}).await
        });
        let mut written = 0;
        let mut lost = 0;
        let begin = Instant::now();
        while written + lost < u64::from(events) + 3 + u64::from(u32::MAX) {
            let entry = entries.next().await;
            match entry.fields.get("dropped") {
                Some(count) => lost += count.parse::<u64>().unwrap(),
                None => written += 1,
            }
        }
        let seconds = begin.elapsed().as_secs() + 1;
        assert!(written >= u64::from(BURST), "{written}");
        assert!(
            written <= u64::from(BURST) + u64::from(PER_SECOND) * seconds,
            "{written} in {seconds} s"
        );
        // The end of the spawner is seen after the flood.
        sender.try_send(GONE.into()).unwrap();
        task.await.unwrap().unwrap();
    }

    fn body_of(
        mut receiver: mpsc::Receiver<Bytes>,
    ) -> impl Body<Data = Bytes, Error = Infallible> + Unpin + Send + 'static {
        let stream = futures_util::stream::poll_fn(move |ctx| {
            receiver
                .poll_recv(ctx)
                .map(|data| data.map(|data| Ok(Frame::data(data))))
        });
        StreamBody::new(stream)
    }

    #[test]
    fn values_are_truncated_and_control_characters_replaced() {
        assert_eq!(
            sanitized("a\tb\r\n\u{7f}\u{9b}é"),
            "a\u{fffd}b\u{fffd}\u{fffd}\u{fffd}\u{fffd}é"
        );
        assert_eq!(sanitized(&"é".repeat(VALUE_MAX)).chars().count(), VALUE_MAX);
        assert_eq!(sanitized(&"é".repeat(VALUE_MAX + 1)).chars().count(), VALUE_MAX);
    }
}

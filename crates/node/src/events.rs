//! What the agent of a sandbox tells, on its way into the sandbox's log.
//!
//! Every byte of it is hostile. A line is bounded, so is what is taken of its values, and control characters, which a
//! terminal would obey, are replaced. The time is the host's. A sandbox gets so many entries a second and no more;
//! the rest is counted, told in one entry, and read slowly, so that a flood costs its sandbox's log and not the host.

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

use crate::journal::{self, Journal};

/// Longest line that is read, in bytes. The agent's own have at most about 500.
const LINE_MAX: usize = 4096;
/// Longest value that is kept, in characters.
const VALUE_MAX: usize = 256;
/// Entries that a sandbox may write at once, and per second in the long run. A start and an end are two.
const BURST: u32 = 1000;
const PER_SECOND: u32 = 50;
/// How long to wait before the next piece of a flood is read. With what the connection reads at once this is 3 MB/s.
const FLOOD_PAUSE: Duration = Duration::from_millis(5);

/// Writes what the agent tells into the log until there is no spawner. `failed_ends` is called after entries about
/// processes that did not end well.
pub(crate) async fn follow(
    mut body: impl Body<Data = Bytes, Error: Error + Send + Sync + 'static> + Unpin,
    journal: &Journal,
    budget: &mut Budget,
    failed_ends: impl Fn(),
) -> io::Result<()> {
    let mut lines = Lines::default();
    loop {
        let frame = match budget.owed(Instant::now()) {
            None => body.frame().await,
            // Somebody may wait for the end of a flood that has no next entry to come before.
            Some(wait) => match tokio::time::timeout(wait, body.frame()).await {
                Ok(frame) => frame,
                Err(_) => {
                    budget.settle(Instant::now(), journal);
                    continue;
                }
            },
        };
        let frame = frame.ok_or(io::ErrorKind::UnexpectedEof)?.map_err(io::Error::other)?;
        let Ok(data) = frame.into_data() else { continue };
        let mut failed = false;
        let mut gone = false;
        let now = Instant::now();
        lines.take(&data, |line| match line.map(serde_json::from_slice::<AgentEvent>) {
            Some(Ok(AgentEvent::SpawnerGone)) => gone = true,
            Some(Ok(AgentEvent::Heartbeat | AgentEvent::Unknown)) => {}
            Some(Ok(AgentEvent::Dropped { count })) => budget.lose(u64::from(u32::try_from(count).unwrap_or(u32::MAX))),
            Some(Ok(event)) => {
                failed |= matches!(&event, AgentEvent::ProcessEnd { exit_code, .. } if *exit_code != 0);
                if budget.settle(now, journal) && budget.spend(now) {
                    let entry = entry(event);
                    journal.write(entry.level, entry.logger, entry.message, entry.fields);
                } else {
                    budget.lose(1);
                }
            }
            Some(Err(_)) | None => budget.lose(1),
        });
        if failed {
            failed_ends();
        }
        if gone {
            return Ok(());
        }
        if budget.is_spent(now) {
            tokio::time::sleep(FLOOD_PAUSE).await;
        }
    }
}

struct Entry {
    level: Level,
    logger: Logger,
    message: String,
    fields: BTreeMap<String, String>,
}

fn entry(event: AgentEvent) -> Entry {
    let mut fields = BTreeMap::new();
    let mut field = |key: &str, value: &str| drop(fields.insert(key.to_owned(), presentable(value)));
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
            (Level::Warn, format!("a process could not be started: {reason}"))
        }
        AgentEvent::SocketMemory { bytes } => {
            field("event_type", "socket_memory");
            field("held_bytes", &bytes.to_string());
            let mib = bytes >> 20;
            (
                Level::Error,
                format!("every process was killed: sockets held {mib} MiB beyond the sandbox's limit"),
            )
        }
        AgentEvent::Dropped { .. } | AgentEvent::Heartbeat | AgentEvent::SpawnerGone | AgentEvent::Unknown => {
            field("event_type", "unknown");
            (Level::Debug, "something else happened".to_owned())
        }
    };
    Entry {
        level,
        logger: Logger::Process,
        message: presentable(&message),
        fields,
    }
}

/// A text of the agent as it may be shown: short, and without what a terminal would obey.
fn presentable(text: &str) -> String {
    let replace = |character: char| {
        if character.is_control() {
            char::REPLACEMENT_CHARACTER
        } else {
            character
        }
    };
    text.chars().take(VALUE_MAX).map(replace).collect()
}

/// Splits what comes into lines of at most [`LINE_MAX`] bytes.
#[derive(Debug, Default)]
struct Lines {
    partial: Vec<u8>,
    /// The line that is being read is too long and was told already.
    too_long: bool,
}

impl Lines {
    /// Calls `each` for every line that ends in `data`, and with `None` for one that is too long.
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
                // What follows belongs to it.
                return;
            }
            if !self.too_long {
                each(Some(&self.partial));
            }
            self.too_long = false;
            // Nearly always, nothing is left, and then nothing is kept.
            self.partial = Vec::new();
        }
    }
}

/// How many entries a sandbox may still write.
#[derive(Debug)]
pub(crate) struct Budget {
    /// When all of the budget is there again. Ahead of now by the time that what was spent takes to come back.
    full_at: Instant,
    /// Entries that were not written, and not told of yet.
    lost: u64,
}

impl Budget {
    const STEP: Duration = Duration::from_millis(1000 / PER_SECOND as u64);

    pub(crate) fn new(now: Instant) -> Self {
        Self { full_at: now, lost: 0 }
    }

    /// How long until so many entries may be written at once.
    fn wait_for(&self, entries: u32, now: Instant) -> Duration {
        (self.full_at.max(now) + Self::STEP * entries).saturating_duration_since(now + Self::STEP * BURST)
    }

    fn is_spent(&self, now: Instant) -> bool {
        !self.wait_for(1, now).is_zero()
    }

    /// Takes one entry's share, if there is one.
    fn spend(&mut self, now: Instant) -> bool {
        let may = !self.is_spent(now);
        if may {
            self.full_at = self.full_at.max(now) + Self::STEP;
        }
        may
    }

    fn lose(&mut self, count: u64) {
        self.lost = self.lost.saturating_add(count);
    }

    /// How long until what was lost may be told; `None` when nothing was. A second's worth of entries has to be there,
    /// so that a flood does not leave a log that tells of nothing but losses.
    fn owed(&self, now: Instant) -> Option<Duration> {
        (self.lost > 0).then(|| self.wait_for(PER_SECOND, now))
    }

    /// Tells what was lost, if something was and the time has come. Whether nothing is left to tell.
    fn settle(&mut self, now: Instant, journal: &Journal) -> bool {
        match self.owed(now) {
            None => true,
            Some(Duration::ZERO) => {
                self.spend(now);
                let lost = std::mem::take(&mut self.lost);
                journal.write(
                    Level::Warn,
                    Logger::Sandbox,
                    journal::dropped(lost),
                    journal::dropped_fields(lost),
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
    use crate::reports::{Entries, Reports};

    fn journal() -> (Journal, Entries) {
        let reports = Reports::new();
        let entries = Entries::of(&reports);
        (Journal::new("iabc".parse().unwrap(), reports), entries)
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
    fn lines_are_whole_and_bounded() {
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
    async fn what_the_agent_tells_is_written_in_the_words_of_the_log() {
        let (journal, mut entries) = journal();
        let end = r#"{"event":"process_end","pid":7,"command":"a\u001b[2J","exitCode":-1,"status":"signal: killed",
            "stdoutBytes":1,"stderrBytes":2,"ptyBytes":3,"durationMs":4}"#;
        let end = end.replace("\n", "");
        let new = r#"{"event":"of_a_later_version","x":1}"#;
        let all = [&start(7, "ls")[..], end.as_bytes(), b"\n", new.as_bytes(), b"\n", GONE].concat();
        let failed = std::cell::Cell::new(0);
        let mut budget = Budget::new(Instant::now());
        let count = || failed.set(failed.get() + 1);
        follow(Full::new(Bytes::from(all)), &journal, &mut budget, count)
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

        // An agent that is cut off is no agent without a spawner.
        let cut = Full::new(Bytes::from(start(7, "ls")));
        assert!(follow(cut, &journal, &mut budget, || {}).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_cut_down_and_counted() {
        let (journal, mut entries) = journal();
        let lots = BURST * 3;
        let (sender, receiver) = mpsc::channel::<Bytes>(8192);
        for pid in 0..lots {
            sender.try_send(start(pid, "x").into()).unwrap();
        }
        let long = "x".repeat(LINE_MAX + 1);
        sender.try_send(Bytes::from(format!("{long}\nno json\n[1]\n"))).unwrap();
        sender
            .try_send(br#"{"event":"dropped","count":18446744073709551615}"#.to_vec().into())
            .unwrap();
        sender.try_send(Bytes::from_static(b"\n")).unwrap();
        let frames = futures(receiver);
        let task = tokio::task::spawn(async move {
            let mut budget = Budget::new(Instant::now());
            follow(frames, &journal, &mut budget, || {}).await
        });
        let mut written = 0;
        let mut lost = 0;
        let begin = Instant::now();
        while written + lost < u64::from(lots) + 3 + u64::from(u32::MAX) {
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
        // It comes to an end all the same.
        sender.try_send(GONE.into()).unwrap();
        task.await.unwrap().unwrap();
    }

    fn futures(
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
    fn values_are_short_and_harmless() {
        assert_eq!(
            presentable("a\tb\r\n\u{7f}\u{9b}é"),
            "a\u{fffd}b\u{fffd}\u{fffd}\u{fffd}\u{fffd}é"
        );
        assert_eq!(presentable(&"é".repeat(VALUE_MAX)).chars().count(), VALUE_MAX);
        assert_eq!(presentable(&"é".repeat(VALUE_MAX + 1)).chars().count(), VALUE_MAX);
    }
}

//! `GET /events`: what is reported to the host, for the sandbox's log.
//!
//! Events wait as text until the host reads them, so that those of a time without a platform are not all lost. What
//! waits is bounded; beyond that events are counted instead. One reader at a time gets them: a new one takes over, for
//! the old one may be a connection of a platform that has ended.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use bytes::Bytes;
use futures_util::{Stream, stream};
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use protocol::agent::AgentEvent;
use tokio::sync::{Notify, watch};

use crate::spawner_client::SpawnerClient;
use crate::sys;
use crate::transport::http::Body;

/// Bytes of text that may wait: some 400 events.
const WAITING: usize = 64 * 1024;

/// Events on their way to the host.
#[derive(Debug)]
pub(crate) struct EventQueue {
    waiting: RefCell<Waiting>,
    news: Notify,
    /// The connection that reads the events. There is a reader as long as a platform is connected.
    reader: watch::Sender<Option<Rc<Reader>>>,
}

/// The connection on which the host reads, and what is known of its progress.
#[derive(Debug)]
struct Reader {
    connection: Rc<OwnedFd>,
    /// Bytes that were handed to the connection.
    sent: Cell<u64>,
    /// How many of them the host had read when it was last asked for, or fewer: what the kernel counts as unread
    /// includes its own overhead.
    read: Cell<i64>,
}

impl Reader {
    fn new(connection: Rc<OwnedFd>) -> Self {
        Self {
            connection,
            sent: Cell::new(0),
            read: Cell::new(0),
        }
    }

    /// Whether the host has read all there is, or at least something since the last call.
    fn has_progressed(&self) -> bool {
        let Ok(unread) = sys::unread_by_peer(self.connection.as_fd()) else {
            return false;
        };
        let read = self.sent.get().cast_signed() - i64::from(unread);
        let before = self.read.replace(read);
        unread == 0 || read > before
    }
}

/// Makes a connection the reader of the queue until this is dropped, or until another one takes over.
struct Reading {
    event_queue: Rc<EventQueue>,
    reader: Rc<Reader>,
}

impl Reading {
    fn begin(event_queue: Rc<EventQueue>, connection: Rc<OwnedFd>) -> Self {
        let reader = Rc::new(Reader::new(connection));
        event_queue.reader.send_replace(Some(reader.clone()));
        Self { event_queue, reader }
    }

    fn is_superseded(&self) -> bool {
        let current = self.event_queue.reader.borrow();
        !current
            .as_ref()
            .is_some_and(|current| Rc::ptr_eq(current, &self.reader))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.is_superseded() {
            self.event_queue.reader.send_replace(None);
        }
    }
}

#[derive(Debug, Default)]
struct Waiting {
    lines: Vec<u8>,
    dropped: u64,
}

impl Waiting {
    fn push(&mut self, event: &AgentEvent) {
        let line = line(event);
        // Nothing after a gap before the gap itself was reported.
        if self.dropped > 0 || self.lines.len() + line.len() > WAITING {
            self.dropped += 1;
        } else {
            self.lines.extend_from_slice(&line);
        }
    }

    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.dropped == 0
    }

    fn take(&mut self) -> Option<Bytes> {
        let count = std::mem::take(&mut self.dropped);
        if count > 0 {
            self.lines.extend_from_slice(&line(&AgentEvent::Dropped { count }));
        }
        let lines = std::mem::take(&mut self.lines);
        (!lines.is_empty()).then(|| lines.into())
    }
}

fn line(event: &AgentEvent) -> Vec<u8> {
    // Plain data always serializes.
    let mut line = serde_json::to_vec(event).unwrap_or_default();
    line.push(b'\n');
    line
}

impl Default for EventQueue {
    fn default() -> Self {
        Self {
            waiting: RefCell::default(),
            news: Notify::new(),
            reader: watch::Sender::new(None),
        }
    }
}

impl EventQueue {
    /// Adds an event to the queue. Never waits.
    pub(crate) fn record(&self, event: &AgentEvent) {
        self.waiting.borrow_mut().push(event);
        self.news.notify_one();
    }

    /// Whether a host is connected to read events.
    pub(crate) fn has_reader(&self) -> bool {
        self.reader.borrow().is_some()
    }

    /// Waits until another reader comes, or this one goes.
    pub(crate) async fn reader_changed(&self) {
        // The sender lives in `self`, so the channel cannot close while this waits.
        let _ = self.reader.subscribe().changed().await;
    }

    /// Sends the reader something by which [`Self::is_followed`] can see whether it reads.
    pub(crate) fn probe(&self) {
        if self.waiting.borrow().is_empty() {
            self.record(&AgentEvent::Heartbeat);
        }
    }

    /// Whether the reader has read all that it was sent, or at least something since the last call.
    pub(crate) fn is_followed(&self) -> bool {
        let reader = self.reader.borrow().clone();
        reader.is_some_and(|reader| reader.has_progressed())
    }
}

/// The service behind `GET /events`.
pub(crate) struct EventService {
    pub(crate) event_queue: Rc<EventQueue>,
    pub(crate) spawner: Rc<SpawnerClient>,
}

impl EventService {
    /// Serves the events from now on, and first those that wait, to the host at the other end of that connection.
    pub(crate) fn serve(&self, connection: Rc<OwnedFd>) -> Response<Body> {
        let reading = Reading::begin(self.event_queue.clone(), connection);
        let mut response = Response::new(Body::Stream {
            stream: Box::pin(lines(reading, self.spawner.clone())),
            length: None,
        });
        *response.status_mut() = StatusCode::OK;
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
        response
    }
}

fn lines(reading: Reading, spawner: Rc<SpawnerClient>) -> impl Stream<Item = io::Result<Bytes>> {
    stream::unfold(Some(reading), move |reading| {
        let spawner = spawner.clone();
        async move {
            let reading = reading?;
            let event_queue = &reading.event_queue;
            let mut readers = event_queue.reader.subscribe();
            loop {
                if reading.is_superseded() {
                    return Some((Err(io::ErrorKind::ConnectionAborted.into()), None));
                }
                let waiting = event_queue.waiting.borrow_mut().take();
                if let Some(lines) = waiting {
                    let sent = &reading.reader.sent;
                    sent.set(sent.get() + lines.len() as u64);
                    return Some((Ok(lines), Some(reading)));
                }
                tokio::select! {
                    biased;
                    _ = readers.changed() => {}
                    () = event_queue.news.notified() => {}
                    () = spawner.gone() => {
                        return Some((Ok(line(&AgentEvent::SpawnerGone).into()), None));
                    }
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(reason: &str) -> AgentEvent {
        AgentEvent::ProcessFailed {
            command: "sh".to_owned(),
            reason: reason.to_owned(),
        }
    }

    #[test]
    fn what_waits_is_bounded_and_gaps_are_told_in_their_place() {
        let mut waiting = Waiting::default();
        assert_eq!(waiting.take(), None);
        let large = event(&"x".repeat(WAITING - 100));
        waiting.push(&large);
        waiting.push(&large);
        // It would fit, but the gap comes first.
        waiting.push(&event("small"));
        let taken = waiting.take().unwrap();
        assert!(taken.len() <= WAITING + 100);
        let lines: Vec<&[u8]> = taken.split(|byte| *byte == b'\n').collect();
        let read = |line: &[u8]| serde_json::from_slice::<AgentEvent>(line).unwrap();
        assert_eq!((lines.len(), lines[2]), (3, &b""[..]));
        assert_eq!(read(lines[0]), large);
        assert_eq!(read(lines[1]), AgentEvent::Dropped { count: 2 });
        waiting.push(&event("next"));
        assert_eq!(read(waiting.take().unwrap().trim_ascii_end()), event("next"));
        assert_eq!(waiting.lines.capacity(), 0, "an idle agent keeps no buffer");
    }
}

//! `GET /events`: what the host is told of, for the sandbox's log.
//!
//! Events wait as text until the host reads them, so that those of a time without a platform are not all lost. What
//! waits is bounded; beyond that events are counted instead. One reader at a time gets them: a new one takes over, for
//! the old one may be a connection of a platform that is no more.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use bytes::Bytes;
use futures_util::{Stream, stream};
use http::header::{self, HeaderValue};
use http::{Response, StatusCode};
use protocol::agent::Event;
use tokio::sync::{Notify, watch};

use crate::agent::Agent;
use crate::http::Body;

/// Bytes of text that may wait: some 400 events.
const WAITING: usize = 64 * 1024;

/// Events on their way to the host.
#[derive(Debug)]
pub(crate) struct Journal {
    waiting: RefCell<Waiting>,
    news: Notify,
    /// How many readers there were.
    readers: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Waiting {
    lines: Vec<u8>,
    dropped: u64,
}

impl Waiting {
    fn push(&mut self, event: &Event) {
        let line = line(event);
        // Nothing after a gap before the gap itself was told.
        if self.dropped > 0 || self.lines.len() + line.len() > WAITING {
            self.dropped += 1;
        } else {
            self.lines.extend_from_slice(&line);
        }
    }

    fn take(&mut self) -> Option<Bytes> {
        let count = std::mem::take(&mut self.dropped);
        if count > 0 {
            self.lines.extend_from_slice(&line(&Event::Dropped { count }));
        }
        let lines = std::mem::take(&mut self.lines);
        (!lines.is_empty()).then(|| lines.into())
    }
}

fn line(event: &Event) -> Vec<u8> {
    // Plain data always serializes.
    let mut line = serde_json::to_vec(event).unwrap_or_default();
    line.push(b'\n');
    line
}

impl Default for Journal {
    fn default() -> Self {
        Self {
            waiting: RefCell::default(),
            news: Notify::new(),
            readers: watch::Sender::new(0),
        }
    }
}

impl Journal {
    /// Notes something. Never waits.
    pub(crate) fn record(&self, event: &Event) {
        self.waiting.borrow_mut().push(event);
        self.news.notify_one();
    }
}

/// Serves the events from now on, and first those that wait.
pub(crate) fn serve(agent: &Rc<Agent>) -> Response<Body> {
    let mut response = Response::new(Body::Stream {
        stream: Box::pin(lines(agent.clone())),
        length: None,
    });
    *response.status_mut() = StatusCode::OK;
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    response
}

fn lines(agent: Rc<Agent>) -> impl Stream<Item = io::Result<Bytes>> {
    let mut reader = 0;
    agent.events.readers.send_modify(|readers| {
        *readers += 1;
        reader = *readers;
    });
    let superseded = agent.events.readers.subscribe();
    stream::unfold(Some((agent, superseded)), move |state| async move {
        let (agent, mut superseded) = state?;
        loop {
            if *superseded.borrow() != reader {
                return Some((Err(io::ErrorKind::ConnectionAborted.into()), None));
            }
            let waiting = agent.events.waiting.borrow_mut().take();
            if let Some(lines) = waiting {
                return Some((Ok(lines), Some((agent, superseded))));
            }
            tokio::select! {
                biased;
                _ = superseded.changed() => {}
                () = agent.events.news.notified() => {}
                () = agent.launcher.gone() => {
                    return Some((Ok(line(&Event::SpawnerGone).into()), None));
                }
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(reason: &str) -> Event {
        Event::ProcessFailed {
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
        let read = |line: &[u8]| serde_json::from_slice::<Event>(line).unwrap();
        assert_eq!((lines.len(), lines[2]), (3, &b""[..]));
        assert_eq!(read(lines[0]), large);
        assert_eq!(read(lines[1]), Event::Dropped { count: 2 });
        waiting.push(&event("next"));
        assert_eq!(read(waiting.take().unwrap().trim_ascii_end()), event("next"));
        assert_eq!(waiting.lines.capacity(), 0, "an idle agent keeps no buffer");
    }
}

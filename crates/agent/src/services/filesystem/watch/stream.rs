//! The events of a watch as envelopes: `start`, then events and keepalives, then the error that ended it.

use std::io;

use bytes::Bytes;
use futures_util::{Stream, stream};
use protocol::connect;
use protocol::filesystem::WatchDirResponse;
use protocol::process::Empty;
use std::time::Duration;
use tokio::time::Instant;

use super::watcher::{Watcher, without_entry};
use crate::transport::rpc::{self, Call, Writer};

struct Events {
    watcher: Watcher,
    writer: Writer,
    legacy: bool,
    started: bool,
    over: bool,
    interval: Duration,
    keepalive: Instant,
    deadline: Option<Instant>,
}

/// The events for this caller, until the client leaves, its deadline passes or the watch fails.
pub(super) fn events(
    watcher: Watcher,
    call: &Call,
    writer: Writer,
    legacy: bool,
) -> impl Stream<Item = io::Result<Bytes>> + use<> {
    let events = Events {
        watcher,
        writer,
        legacy,
        started: false,
        over: false,
        interval: call.keepalive,
        keepalive: Instant::now() + call.keepalive,
        deadline: call.deadline,
    };
    stream::unfold(events, async move |mut events| {
        let envelope = events.next().await?;
        Some((Ok(envelope), events))
    })
}

impl Events {
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        if !self.started {
            self.started = true;
            return Some(self.envelope(&WatchDirResponse {
                start: Some(Empty {}),
                ..WatchDirResponse::default()
            }));
        }
        loop {
            // Before any event, of which there may always be more.
            if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                self.over = true;
                return Some(connect::end_of_stream(Some(&rpc::late())));
            }
            match self.watcher.queue.take() {
                Ok(None) => {}
                Ok(Some(event)) => {
                    let event = if self.legacy { without_entry(event) } else { event };
                    return Some(self.envelope(&WatchDirResponse {
                        filesystem: Some(event),
                        ..WatchDirResponse::default()
                    }));
                }
                Err(error) => {
                    self.over = true;
                    return Some(connect::end_of_stream(Some(&error)));
                }
            }
            let wake = self
                .deadline
                .map_or(self.keepalive, |deadline| deadline.min(self.keepalive));
            tokio::select! {
                () = self.watcher.queue.changed() => {}
                () = tokio::time::sleep_until(wake) => {
                    if wake == self.keepalive {
                        return Some(self.envelope(&WatchDirResponse {
                            keepalive: Some(Empty {}),
                            ..WatchDirResponse::default()
                        }));
                    }
                }
            }
        }
    }

    fn envelope(&mut self, message: &WatchDirResponse) -> Bytes {
        self.keepalive = Instant::now() + self.interval;
        self.writer.envelope(message)
    }
}

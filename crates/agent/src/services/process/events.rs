//! The stream of a process's events, as envelopes.
//!
//! `start` comes first, then output and keepalives, then exactly one `end`, then the end of the stream. Past the
//! client's deadline the stream ends with an error instead.

use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use protocol::connect;
use protocol::process::{DataEvent, Empty, EndEvent, ProcessEvent, StartEvent, StreamResponse};
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use super::table::Process;
use crate::transport::rpc::{self, Call, Writer};

/// Where the events come from.
pub(super) enum Events {
    Live(mpsc::Receiver<DataEvent>, Rc<Process>),
    /// The process has ended, in this way.
    Ended(EndEvent),
}

#[derive(PartialEq, Eq)]
enum Next {
    Start,
    Event,
    EndOfStream,
    Nothing,
}

/// The events of one process for one client.
pub(super) struct EventStream {
    pid: u32,
    events: Events,
    writer: Writer,
    next: Next,
    keepalive: Pin<Box<Sleep>>,
    interval: Duration,
    deadline: Option<Pin<Box<Sleep>>>,
}

/// Streams the events of a process to this caller.
pub(super) fn stream(pid: u32, events: Events, call: &Call, writer: Writer) -> EventStream {
    EventStream {
        pid,
        events,
        writer,
        next: Next::Start,
        keepalive: Box::pin(tokio::time::sleep(call.keepalive)),
        interval: call.keepalive,
        deadline: call
            .deadline
            .map(|deadline| Box::pin(tokio::time::sleep_until(deadline))),
    }
}

impl EventStream {
    fn envelope(&mut self, event: ProcessEvent) -> Poll<Option<io::Result<Bytes>>> {
        self.keepalive.as_mut().reset(Instant::now() + self.interval);
        Poll::Ready(Some(Ok(self.writer.envelope(&StreamResponse { event: Some(event) }))))
    }

    fn end(&mut self, end: EndEvent) -> Poll<Option<io::Result<Bytes>>> {
        self.next = Next::EndOfStream;
        self.envelope(ProcessEvent {
            end: Some(end),
            ..ProcessEvent::default()
        })
    }
}

impl Stream for EventStream {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, ctx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        match this.next {
            Next::Start => {
                this.next = Next::Event;
                let start = Some(StartEvent { pid: this.pid });
                return this.envelope(ProcessEvent {
                    start,
                    ..ProcessEvent::default()
                });
            }
            Next::Event => {}
            Next::EndOfStream => {
                this.next = Next::Nothing;
                return Poll::Ready(Some(Ok(connect::end_of_stream(None))));
            }
            Next::Nothing => return Poll::Ready(None),
        }
        // Before any output, of which there may always be more.
        if let Some(deadline) = &mut this.deadline
            && deadline.as_mut().poll(ctx).is_ready()
        {
            this.next = Next::Nothing;
            return Poll::Ready(Some(Ok(connect::end_of_stream(Some(&rpc::late())))));
        }
        let event = match &mut this.events {
            Events::Ended(end) => {
                let end = end.clone();
                return this.end(end);
            }
            Events::Live(events, process) => match events.poll_recv(ctx) {
                // The channel closes when the end is known, and not before.
                Poll::Ready(None) => {
                    let end = process.end().cloned().unwrap_or_default();
                    return this.end(end);
                }
                other => other,
            },
        };
        if let Poll::Ready(Some(data)) = event {
            return this.envelope(ProcessEvent {
                data: Some(data),
                ..ProcessEvent::default()
            });
        }
        if this.keepalive.as_mut().poll(ctx).is_ready() {
            return this.envelope(ProcessEvent {
                keepalive: Some(Empty {}),
                ..ProcessEvent::default()
            });
        }
        Poll::Pending
    }
}

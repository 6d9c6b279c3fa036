//! The streams of an intercepted connection.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::super::rate::Direction;
use super::super::relay::{Counts, poll_taken};
use super::super::sandbox::Sandbox;
use super::super::socket::close_cleanly;

/// The connection of a program, from its first byte on. Its bytes are counted, and wait for the bandwidth of the sandbox.
pub(super) struct ProgramStream {
    stream: TcpStream,
    /// Bytes that were read already, and how many of them were taken.
    first: (Vec<u8>, usize),
    sandbox: Arc<Sandbox>,
    counts: Arc<Counts>,
    /// When bytes may be moved again.
    waits: [Option<Pin<Box<Sleep>>>; 2],
}

impl ProgramStream {
    pub(super) fn new(stream: TcpStream, first: Vec<u8>, sandbox: Arc<Sandbox>, counts: Arc<Counts>) -> Self {
        Self {
            stream,
            first: (first, 0),
            sandbox,
            counts,
            waits: [None, None],
        }
    }

    fn poll_turn(&mut self, direction: Direction, cx: &mut Context<'_>) -> Poll<()> {
        let wait = &mut self.waits[usize::from(direction == Direction::In)];
        if let Some(sleep) = wait {
            ready!(sleep.as_mut().poll(cx));
            *wait = None;
        }
        Poll::Ready(())
    }

    fn count(&mut self, direction: Direction, bytes: usize) {
        self.counts.add(direction, bytes);
        let due = self.sandbox.bandwidth.due(direction, bytes);
        let due = due.filter(|due| *due > Instant::now());
        let sleep = due.map(|due| Box::pin(tokio::time::sleep_until(due)));
        self.waits[usize::from(direction == Direction::In)] = sleep;
    }
}

impl AsyncRead for ProgramStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_turn(Direction::Out, cx));
        let (first, taken) = &mut this.first;
        let before = buf.filled().len();
        if *taken < first.len() {
            let length = buf.remaining().min(first.len() - *taken);
            buf.put_slice(&first[*taken..*taken + length]);
            *taken += length;
            if *taken == first.len() {
                *first = Vec::new();
                *taken = 0;
            }
        } else {
            ready!(Pin::new(&mut this.stream).poll_read(cx, buf))?;
        }
        this.count(Direction::Out, buf.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ProgramStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_turn(Direction::In, cx));
        let written = ready!(Pin::new(&mut this.stream).poll_write(cx, bytes))?;
        this.count(Direction::In, written);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let taken = poll_taken(&this.stream, cx);
        this.counts.set_ending(taken.is_pending());
        ready!(taken)?;
        // The connection ends as it should, so what was sent is delivered. In every other case it is reset.
        close_cleanly(&this.stream);
        Pin::new(&mut this.stream).poll_shutdown(cx)
    }
}

//! Relays bytes between two TCP connections, through pipes in the kernel: they are not copied to this process.
//!
//! A direction has a pipe only while bytes are on their way, so an idle connection holds none. What one side does, the
//! other sees: the end of a direction, a reset, and, because nothing is read that cannot be forwarded, its speed.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::net::Shutdown;
use rustix::pipe::{PipeFlags, SpliceFlags};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::counters::Counters;
use super::rate::{Bandwidth, Direction};

/// Most bytes in a pipe. More does not make it faster.
pub(super) const CHUNK_MAX: usize = 256 << 10;
/// Unused pipes that are kept.
const PIPES_KEPT: usize = 64;

/// A pipe: its reading end, then its writing end.
type Pipe = (OwnedFd, OwnedFd);

/// Pipes that are empty.
#[derive(Debug, Default)]
pub(super) struct Pipes(Mutex<Vec<Pipe>>);

impl Pipes {
    fn take(&self) -> io::Result<Pipe> {
        if let Some(pipe) = self.0.lock().pop() {
            return Ok(pipe);
        }
        let pipe = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // If the limit of pipe memory is reached, a small one does it too.
        let _ = rustix::pipe::fcntl_setpipe_size(&pipe.0, CHUNK_MAX);
        Ok(pipe)
    }

    fn put(&self, pipe: Pipe) {
        let mut pipes = self.0.lock();
        if pipes.len() < PIPES_KEPT {
            pipes.push(pipe);
        }
    }
}

/// Bytes that one connection relayed.
#[derive(Debug, Default)]
pub(super) struct Counts {
    sent: AtomicU64,
    received: AtomicU64,
    /// Those of all connections.
    totals: Arc<Counters>,
}

impl Counts {
    pub(super) fn new(totals: &Arc<Counters>) -> Self {
        Self {
            totals: Arc::clone(totals),
            ..Self::default()
        }
    }

    /// Bytes from the sandbox and to it.
    pub(super) fn get(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    pub(super) fn add(&self, direction: Direction, bytes: usize) {
        let count = match direction {
            Direction::Out => &self.sent,
            Direction::In => &self.received,
        };
        count.fetch_add(bytes as u64, Ordering::Relaxed);
        self.totals.bytes(direction, bytes as u64);
    }
}

/// Relays between a sandbox and the outside until both directions have ended, at most `chunk` bytes at a time.
///
/// # Errors
/// When one side failed: both are to be reset then.
pub(super) async fn relay(
    pipes: &Pipes,
    (sandbox, outside): (&TcpStream, &TcpStream),
    chunk: usize,
    bandwidth: &Bandwidth,
    counts: &Counts,
) -> io::Result<()> {
    let out = pump(pipes, (sandbox, outside, chunk), bandwidth, Direction::Out, counts);
    let back = pump(pipes, (outside, sandbox, chunk), bandwidth, Direction::In, counts);
    tokio::try_join!(out, back).map(drop)
}

async fn pump(
    pipes: &Pipes,
    (from, to, chunk): (&TcpStream, &TcpStream, usize),
    bandwidth: &Bandwidth,
    direction: Direction,
    counts: &Counts,
) -> io::Result<()> {
    let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
    loop {
        from.readable().await?;
        let pipe = pipes.take()?;
        let filled = from.try_io(Interest::READABLE, || {
            Ok(rustix::pipe::splice(from, None, &pipe.1, None, chunk, flags)?)
        });
        let filled = match filled {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                pipes.put(pipe);
                continue;
            }
            // The pipe is closed, because bytes may be in it.
            Err(error) => return Err(error),
            Ok(0) => {
                pipes.put(pipe);
                return match rustix::net::shutdown(to, Shutdown::Write) {
                    // The other side is gone, which the other direction notices.
                    Err(rustix::io::Errno::NOTCONN) => Ok(()),
                    outcome => Ok(outcome?),
                };
            }
            Ok(filled) => filled,
        };
        let mut left = filled;
        while left > 0 {
            to.writable().await?;
            let moved = to.try_io(Interest::WRITABLE, || {
                Ok(rustix::pipe::splice(&pipe.0, None, to, None, left, flags)?)
            });
            match moved {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(moved) => left -= moved,
            }
        }
        pipes.put(pipe);
        counts.add(direction, filled);
        bandwidth.pay(direction, filled).await;
        // A connection that is always ready lets the others run.
        tokio::task::consume_budget().await;
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "tests start tasks of their own")]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::task::JoinHandle;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (client, listener.accept().await.unwrap().0)
    }

    /// A relay, with the ends that programs have: inside, then outside.
    async fn relayed() -> (TcpStream, TcpStream, JoinHandle<(io::Result<()>, Counts)>) {
        let ((inside, sandbox), (outside, server)) = (pair().await, pair().await);
        let relay = tokio::spawn(async move {
            let counts = Counts::default();
            let bandwidth = Bandwidth::new(0);
            let outcome = relay(&Pipes::default(), (&sandbox, &outside), CHUNK_MAX, &bandwidth, &counts).await;
            (outcome, counts)
        });
        (inside, server, relay)
    }

    fn data(length: usize) -> Vec<u8> {
        (0..length).map(|at| u8::try_from(at * 31 % 251).unwrap()).collect()
    }

    #[tokio::test]
    async fn each_direction_ends_for_itself_and_nothing_is_lost() {
        let (mut inside, mut server, relay) = relayed().await;
        let sent = data(5_000_000);
        let copy = sent.clone();
        let request = tokio::spawn(async move {
            inside.write_all(&copy).await.unwrap();
            inside.shutdown().await.unwrap();
            let mut answer = Vec::new();
            inside.read_to_end(&mut answer).await.unwrap();
            answer
        });
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert!(received == sent, "{} bytes", received.len());
        // The other direction is still open.
        let answer = data(3_000_000);
        server.write_all(&answer).await.unwrap();
        drop(server);
        assert!(request.await.unwrap() == answer);
        let (outcome, counts) = relay.await.unwrap();
        outcome.unwrap();
        assert_eq!(counts.get(), (5_000_000, 3_000_000));
        let totals = counts.totals.read();
        assert_eq!((totals.bytes_sent, totals.bytes_received), counts.get());
    }

    #[tokio::test]
    async fn a_reset_ends_the_relay_with_an_error() {
        for is_inside in [true, false] {
            let (inside, server, relay) = relayed().await;
            let (resets, _other) = if is_inside { (inside, server) } else { (server, inside) };
            resets.set_zero_linger().unwrap();
            drop(resets);
            assert!(relay.await.unwrap().0.is_err());
        }
    }

    #[tokio::test]
    async fn a_sender_waits_for_a_receiver_that_does_not_read() {
        let (inside, mut server, relay) = relayed().await;
        let part = data(1 << 16);
        let mut written = 0;
        let fill = async {
            loop {
                inside.writable().await.unwrap();
                if let Ok(length) = inside.try_write(&part) {
                    written += length;
                }
            }
        };
        let _ = tokio::time::timeout(Duration::from_secs(1), fill).await;
        // Buffers of four sockets, and a pipe.
        assert!(written < 64 << 20, "{written} bytes were accepted");
        drop(inside);
        let mut received = Vec::new();
        server.read_to_end(&mut received).await.unwrap();
        assert_eq!(received.len(), written);
        drop(server);
        relay.await.unwrap().0.unwrap();
    }
}

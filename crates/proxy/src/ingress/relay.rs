//! Relays the bytes of an upgraded connection.
//!
//! A stream may be silent for as long as its sandbox runs: clients of WebSockets wait for hours. So it holds no buffer
//! while it waits; what was read is written at once, and only what the other side does not take yet is kept. A stream
//! of which one side has ended may be silent for [`HALF_CLOSED`] only, because what remains of it is often forgotten.

use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

use super::client::ClientConnection;
use super::dial::AliveCheck;

/// Maximum number of bytes per read, which is also the most that a direction holds.
const BUFFER_BYTES: usize = 128 * 1024;
/// How long nothing may be transferred once one side has ended.
pub(super) const HALF_CLOSED: Duration = Duration::from_secs(600);

thread_local! {
    /// Where the streams of this thread read to, one at a time.
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; BUFFER_BYTES].into_boxed_slice());
}

/// Relays until both sides have closed. In all other cases the client's connection is reset: when the sandbox ends, a side
/// fails, one side is silent for too long after the other has ended, or the platform stops.
pub(super) async fn relay(
    client: OnUpgrade,
    guest: OnUpgrade,
    connection: Option<ClientConnection>,
    ending: CancellationToken,
    alive: AliveCheck,
    stop: CancellationToken,
) {
    let cut = || {
        if let Some(connection) = &connection {
            connection.cut();
        }
    };
    let watched = ending.clone();
    let copy = async {
        let (client, guest) = match tokio::try_join!(client, guest) {
            Ok(both) => both,
            Err(error) => {
                tracing::debug!(%error, "upgrade did not complete");
                return cut();
            }
        };
        let guest = GuestSide {
            stream: TokioIo::new(guest),
            ending: watched,
            alive: Some(alive),
        };
        // Awaited by reference, so that the connection is marked to be reset before the streams are dropped.
        let mut both = Both::new(TokioIo::new(client), guest);
        if let Err(error) = (&mut both).await {
            tracing::debug!(%error, "upgraded stream failed");
            cut();
        }
    };
    // Borrowed by the `select!`, so that the streams are dropped after the connection is marked to be reset.
    let mut copy = Box::pin(copy);
    tokio::select! {
        biased;
        () = ending.cancelled() => cut(),
        () = stop.cancelled() => cut(),
        () = &mut copy => {}
    }
}

/// Copies in both directions until both have ended.
struct Both<A, B> {
    a: A,
    b: B,
    forth: Direction,
    back: Direction,
    /// Set while exactly one direction has ended.
    limit: Option<Pin<Box<Sleep>>>,
}

impl<A, B> Both<A, B> {
    fn new(a: A, b: B) -> Self {
        Self {
            a,
            b,
            forth: Direction::default(),
            back: Direction::default(),
            limit: None,
        }
    }
}

impl<A, B> Future for Both<A, B>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self {
            a,
            b,
            forth,
            back,
            limit,
        } = &mut *self;
        let moved = (forth.moved, back.moved);
        // Both are polled, so that each is woken.
        let ended = forth.poll(cx, a, b)?.is_ready();
        if back.poll(cx, b, a)?.is_ready() && ended {
            return Poll::Ready(Ok(()));
        }
        if forth.is_at_end() || back.is_at_end() {
            let until = Instant::now() + HALF_CLOSED;
            match limit {
                Some(limit) if moved != (forth.moved, back.moved) => limit.as_mut().reset(until),
                Some(_) => {}
                None => *limit = Some(Box::pin(tokio::time::sleep_until(until))),
            }
            if let Some(limit) = limit {
                ready!(limit.as_mut().poll(cx));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        Poll::Pending
    }
}

/// One direction of a relay.
#[derive(Default)]
struct Direction {
    /// What was read and not yet written.
    rest: Vec<u8>,
    written: usize,
    needs_flush: bool,
    end: End,
    /// Number of transfers.
    moved: u64,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum End {
    #[default]
    Open,
    /// The reader has ended; the writer has yet to be closed.
    Read,
    Closed,
}

impl Direction {
    fn is_at_end(&self) -> bool {
        self.end != End::Open
    }

    /// Ready when the reader has ended and the writer is closed.
    fn poll<R, W>(&mut self, cx: &mut Context<'_>, reader: &mut R, writer: &mut W) -> Poll<io::Result<()>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        loop {
            ready!(self.poll_rest(cx, writer))?;
            match self.end {
                End::Open => {
                    if self.poll_read(cx, reader, writer)?.is_pending() {
                        if self.needs_flush {
                            ready!(Pin::new(&mut *writer).poll_flush(cx))?;
                            self.needs_flush = false;
                        }
                        return Poll::Pending;
                    }
                }
                End::Read => {
                    ready!(Pin::new(&mut *writer).poll_shutdown(cx))?;
                    self.end = End::Closed;
                }
                End::Closed => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Writes what is kept.
    fn poll_rest<W: AsyncWrite + Unpin>(&mut self, cx: &mut Context<'_>, writer: &mut W) -> Poll<io::Result<()>> {
        while self.written < self.rest.len() {
            let count = ready!(Pin::new(&mut *writer).poll_write(cx, &self.rest[self.written..]))?;
            self.wrote(count)?;
            self.written += count;
        }
        // Also gives back its memory.
        self.rest = Vec::new();
        self.written = 0;
        Poll::Ready(Ok(()))
    }

    /// Reads once, and writes as much of it as the writer takes.
    fn poll_read<R, W>(&mut self, cx: &mut Context<'_>, reader: &mut R, writer: &mut W) -> Poll<io::Result<()>>
    where
        R: AsyncRead + Unpin,
        W: AsyncWrite + Unpin,
    {
        BUFFER.with_borrow_mut(|buffer| {
            let mut buffer = ReadBuf::new(buffer);
            ready!(Pin::new(&mut *reader).poll_read(cx, &mut buffer))?;
            let got = buffer.filled();
            if got.is_empty() {
                self.end = End::Read;
                return Poll::Ready(Ok(()));
            }
            self.moved += 1;
            let count = match Pin::new(&mut *writer).poll_write(cx, got)? {
                Poll::Ready(count) => {
                    self.wrote(count)?;
                    count
                }
                Poll::Pending => 0,
            };
            self.rest = got[count..].to_vec();
            Poll::Ready(Ok(()))
        })
    }

    fn wrote(&mut self, count: usize) -> io::Result<()> {
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        self.moved += 1;
        self.needs_flush = true;
        Ok(())
    }
}

/// The side of the sandbox: its end is an error if the sandbox has ended.
struct GuestSide<S> {
    stream: S,
    ending: CancellationToken,
    /// Polled once, at the end.
    alive: Option<AliveCheck>,
}

impl<S: AsyncRead + Unpin> AsyncRead for GuestSide<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            return Poll::Ready(Ok(()));
        }
        let was_alive = match &mut self.alive {
            Some(alive) => ready!(alive.as_mut().poll(cx)),
            None => true,
        };
        self.alive = None;
        if !was_alive || self.ending.is_cancelled() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GuestSide<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::task::JoinHandle;

    use super::*;

    /// Starts a relay, and returns both of its outer ends and its result.
    fn relayed() -> (DuplexStream, DuplexStream, JoinHandle<io::Result<()>>) {
        let (client, a) = tokio::io::duplex(64);
        let (b, guest) = tokio::io::duplex(64);
        #[expect(clippy::disallowed_methods, reason = "the test waits for it")]
        let both = tokio::spawn(Both::new(a, b));
        (client, guest, both)
    }

    #[tokio::test(start_paused = true)]
    async fn open_streams_may_be_silent_and_half_closed_ones_only_for_a_time() {
        let (mut client, mut guest, both) = relayed();
        let mut byte = [0];
        for _ in 0..3 {
            tokio::time::sleep(100 * HALF_CLOSED).await;
            client.write_all(b"a").await.expect("written");
            guest.read_exact(&mut byte).await.expect("read");
        }
        client.shutdown().await.expect("closed");
        assert_eq!(guest.read(&mut byte).await.expect("the end"), 0);
        // What the other side sends extends the time.
        for _ in 0..3 {
            tokio::time::sleep(HALF_CLOSED - Duration::from_secs(1)).await;
            guest.write_all(b"b").await.expect("written");
            client.read_exact(&mut byte).await.expect("read");
        }
        let begun = Instant::now();
        let error = both.await.expect("no panic").expect_err("a limit");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let waited = begun.elapsed();
        assert!(
            waited >= HALF_CLOSED && waited < HALF_CLOSED + Duration::from_secs(1),
            "{waited:?}"
        );
    }

    #[tokio::test]
    async fn everything_arrives_in_order_through_a_slow_reader() {
        let (client, mut guest, both) = relayed();
        let (mut receiver, mut sender) = tokio::io::split(client);
        let sent: Vec<u8> = (0..500_000_u32).map(|n| (n % 251) as u8).collect();
        let writing = async {
            sender.write_all(&sent).await.expect("written");
            sender.shutdown().await.expect("closed");
        };
        let echoing = async {
            let mut all = Vec::new();
            guest.read_to_end(&mut all).await.expect("read");
            guest.write_all(&all).await.expect("written");
            guest.shutdown().await.expect("closed");
        };
        let mut back = Vec::new();
        let reading = async { receiver.read_to_end(&mut back).await.expect("read") };
        tokio::join!(writing, echoing, reading);
        assert!(back == sent);
        both.await.expect("no panic").expect("a clean end");
    }
}

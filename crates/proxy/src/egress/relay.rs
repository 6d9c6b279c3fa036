//! Relays bytes between two TCP connections, through pipes in the kernel: they are not copied to this process.
//!
//! A direction has a pipe only while bytes are on their way, so an idle connection holds none. What one side does, the
//! other sees: the end of a direction, a reset, and, because nothing is read that cannot be forwarded, its speed.
//!
//! A connection to a proxy with TLS is the exception: its bytes are copied, through a buffer per direction.
//!
//! Once one direction has ended, the other may be silent for [`HALF_CLOSED_IDLE`]. Programs that have vanished or forgot
//! a socket would hold the connection for ever otherwise. Waiting for a receiver is no silence.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use protocol::node::Traffic;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{Shutdown, sockopt};
use rustix::pipe::{PipeFlags, SpliceFlags};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use super::counters::Counters;
use super::rate::{Bandwidth, Direction};

/// Most bytes in a pipe. More does not make it faster.
const CHUNK_MAX: usize = 256 << 10;
/// How long a direction may be silent when the other one has ended. TCP implementations use the same for connections of
/// which only the other side is open (tcp_fin_timeout).
pub(super) const HALF_CLOSED_IDLE: Duration = Duration::from_secs(60);
/// Bytes that are copied at a time.
const BUFFER: usize = 16 << 10;
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
#[derive(Debug)]
pub(super) struct Counts {
    sent: AtomicU64,
    received: AtomicU64,
    /// Whether the gateway has sent everything to the program, which has not taken all of it.
    is_ending: AtomicBool,
    /// What counts the connections of all sandboxes.
    totals: Arc<Counters>,
    /// What counts everything of this sandbox.
    traffic: Arc<Traffic>,
}

impl Counts {
    pub(super) fn new(totals: &Arc<Counters>, traffic: &Arc<Traffic>) -> Self {
        Self {
            sent: AtomicU64::default(),
            received: AtomicU64::default(),
            is_ending: AtomicBool::default(),
            totals: Arc::clone(totals),
            traffic: Arc::clone(traffic),
        }
    }

    /// Bytes from the sandbox, and bytes to it.
    pub(super) fn get(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// Whether only the program has to do something, for the connection to end.
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    pub(super) fn set_ending(&self, is_ending: bool) {
        self.is_ending.store(is_ending, Ordering::Relaxed);
    }

    pub(super) fn add(&self, direction: Direction, bytes: usize) {
        let count = match direction {
            Direction::Out => {
                self.traffic.send(bytes);
                &self.sent
            }
            Direction::In => {
                self.traffic.receive(bytes);
                &self.received
            }
        };
        count.fetch_add(bytes as u64, Ordering::Relaxed);
        self.totals.bytes(direction, bytes as u64);
    }
}

/// The directions that ended on their own. The other one was silent for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ended {
    /// The direction from the sandbox has ended.
    pub(super) out: bool,
    /// The direction to the sandbox has ended.
    pub(super) back: bool,
}

/// The end of one of two directions.
#[derive(Debug, Default)]
struct FirstEnd(CancellationToken);

impl FirstEnd {
    /// Returns when one direction has ended and the caller has waited for too long since then.
    async fn silence(&self) {
        self.0.cancelled().await;
        tokio::time::sleep(HALF_CLOSED_IDLE).await;
    }
}

/// Relays between a sandbox and the outside until both directions have ended, at most `chunk` bytes at a time.
///
/// # Errors
/// When one side failed: both are to be reset then.
pub(super) async fn relay(
    pipes: &Pipes,
    sandbox: &TcpStream,
    outside: &TcpStream,
    chunk: usize,
    bandwidth: &Bandwidth,
    counts: &Counts,
) -> io::Result<Ended> {
    let pump = Pump {
        pipes,
        chunk,
        bandwidth,
        counts,
        first: FirstEnd::default(),
    };
    let out = pump.run(Direction::Out, sandbox, outside);
    let back = pump.run(Direction::In, outside, sandbox);
    let (out, back) = tokio::try_join!(out, back)?;
    Ok(Ended { out, back })
}

/// Relays between a sandbox and a stream with TLS, as [`relay`] does.
///
/// # Errors
/// When one side failed, or the stream ended without the end of TLS.
pub(super) async fn relay_tls(
    sandbox: &TcpStream,
    outside: &mut TlsStream<TcpStream>,
    bandwidth: &Bandwidth,
    counts: &Counts,
) -> io::Result<Ended> {
    let first = FirstEnd::default();
    let (mut reader, mut writer) = tokio::io::split(outside);
    let out = async {
        let mut buffer = vec![0; BUFFER];
        loop {
            let length = tokio::select! {
                biased;
                length = read_some(sandbox, &mut buffer) => length?,
                () = first.silence() => return Ok(false),
            };
            if length == 0 {
                writer.shutdown().await?;
                first.0.cancel();
                return io::Result::Ok(true);
            }
            // Before they are written, so that a connection that fails meanwhile does not hide them.
            counts.add(Direction::Out, length);
            writer.write_all(&buffer[..length]).await?;
            writer.flush().await?;
            bandwidth.pay(Direction::Out, length).await;
            tokio::task::consume_budget().await;
        }
    };
    let back = async {
        let mut buffer = vec![0; BUFFER];
        loop {
            let length = tokio::select! {
                biased;
                length = reader.read(&mut buffer) => length?,
                () = first.silence() => return Ok(false),
            };
            if length == 0 {
                taken(sandbox).await?;
                end_writing(sandbox)?;
                first.0.cancel();
                return io::Result::Ok(true);
            }
            counts.add(Direction::In, length);
            write_all(sandbox, &buffer[..length]).await?;
            bandwidth.pay(Direction::In, length).await;
            tokio::task::consume_budget().await;
        }
    };
    let (out, back) = tokio::try_join!(out, back)?;
    Ok(Ended { out, back })
}

/// Reads what is there, and waits for the first byte. 0 is the end.
pub(super) async fn read_some(stream: &TcpStream, part: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(part) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            outcome => return outcome,
        }
    }
}

/// Writes all bytes.
pub(super) async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
            Ok(written) => bytes = &bytes[written..],
        }
    }
    Ok(())
}

/// Returns once the other side has taken what was sent, but for some last bytes, or is gone. The end is told only then:
/// what a connection has not delivered when both directions have ended stays in the memory of the host, and no limit of
/// connections would count it. The other side sees no difference, since the end comes after the data.
///
/// # Errors
/// When the socket is not usable.
pub(super) async fn taken(to: &TcpStream) -> io::Result<()> {
    std::future::poll_fn(|cx| poll_taken(to, cx)).await
}

/// Polls whether the peer has taken everything that was sent.
pub(super) fn poll_taken(to: &TcpStream, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
    // With the smallest buffer, it is writable only when almost nothing is in it.
    sockopt::set_socket_send_buffer_size(to, 1)?;
    loop {
        ready!(to.poll_write_ready(cx))?;
        let is_empty = to.try_io(Interest::WRITABLE, || {
            let mut polled = [PollFd::new(to, PollFlags::OUT)];
            match rustix::event::poll(&mut polled, Some(&Timespec::default()))? {
                0 => Err(io::ErrorKind::WouldBlock.into()),
                _ => Ok(()),
            }
        });
        match is_empty {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            outcome => return Poll::Ready(outcome),
        }
    }
}

fn end_writing(to: &TcpStream) -> io::Result<()> {
    match rustix::net::shutdown(to, Shutdown::Write) {
        // The other side is gone, which the other direction notices.
        Err(rustix::io::Errno::NOTCONN) => Ok(()),
        outcome => Ok(outcome?),
    }
}

/// What both directions of a relay have in common.
struct Pump<'a> {
    pipes: &'a Pipes,
    /// Most bytes that are moved at a time.
    chunk: usize,
    bandwidth: &'a Bandwidth,
    counts: &'a Counts,
    /// Cancelled when one direction has ended.
    first: FirstEnd,
}

impl Pump<'_> {
    /// Relays one direction until it ends; returns whether it ended, and not by silence.
    async fn run(&self, direction: Direction, from: &TcpStream, to: &TcpStream) -> io::Result<bool> {
        let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
        loop {
            tokio::select! {
                biased;
                readable = from.readable() => readable?,
                () = self.first.silence() => return Ok(false),
            }
            let pipe = self.pipes.take()?;
            let filled = from.try_io(Interest::READABLE, || {
                Ok(rustix::pipe::splice(from, None, &pipe.1, None, self.chunk, flags)?)
            });
            let filled = match filled {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.pipes.put(pipe);
                    continue;
                }
                // The pipe is closed, because bytes may be in it.
                Err(error) => return Err(error),
                Ok(0) => {
                    self.pipes.put(pipe);
                    taken(to).await?;
                    end_writing(to)?;
                    self.first.0.cancel();
                    return Ok(true);
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
                    Ok(moved) => {
                        // Each part at once: a connection that fails before the rest has moved these.
                        self.counts.add(direction, moved);
                        left -= moved;
                    }
                }
            }
            self.pipes.put(pipe);
            self.bandwidth.pay(direction, filled).await;
            // A connection that is always ready lets the others run.
            tokio::task::consume_budget().await;
        }
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

    /// Starts a relay, and returns the outer ends of its streams: inside, then outside.
    async fn relayed() -> (TcpStream, TcpStream, JoinHandle<(io::Result<Ended>, Counts)>) {
        let ((inside, sandbox), (outside, server)) = (pair().await, pair().await);
        let relay = tokio::spawn(async move {
            let counts = Counts::new(&Arc::default(), &Arc::new(Traffic::new(0)));
            let bandwidth = Bandwidth::new(0);
            let outcome = relay(&Pipes::default(), &sandbox, &outside, CHUNK_MAX, &bandwidth, &counts).await;
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
        assert_eq!(outcome.unwrap(), Ended { out: true, back: true });
        assert_eq!(counts.get(), (5_000_000, 3_000_000));
        let totals = counts.totals.read();
        assert_eq!((totals.bytes_sent, totals.bytes_received), counts.get());
        let traffic = counts.traffic.read();
        assert_eq!((traffic.sent, traffic.received), counts.get());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_left_of_a_connection_may_not_be_silent_for_long() {
        for is_inside in [true, false] {
            let (inside, server, relay) = relayed().await;
            let (mut ends, mut stays) = if is_inside { (inside, server) } else { (server, inside) };
            // While both directions are open, silence has no limit.
            tokio::time::sleep(HALF_CLOSED_IDLE * 100).await;
            ends.shutdown().await.unwrap();
            assert_eq!(stays.read(&mut [0]).await.unwrap(), 0);
            for _ in 0..3 {
                tokio::time::sleep(HALF_CLOSED_IDLE - Duration::from_secs(1)).await;
                stays.write_all(b"x").await.unwrap();
                ends.read_exact(&mut [0]).await.unwrap();
            }
            assert!(!relay.is_finished());
            let begun = tokio::time::Instant::now();
            let (outcome, _) = relay.await.unwrap();
            let took = begun.elapsed();
            assert!(
                (HALF_CLOSED_IDLE - Duration::from_secs(2)..=HALF_CLOSED_IDLE * 2).contains(&took),
                "{took:?}"
            );
            let want = Ended {
                out: is_inside,
                back: !is_inside,
            };
            assert_eq!(outcome.unwrap(), want);
        }
    }

    #[tokio::test]
    async fn what_a_server_took_before_it_resets_is_counted() {
        let (inside, mut server, relay) = relayed().await;
        let part = data(1 << 16);
        // Until the buffers on the way are full, so that a part is between the two sides.
        let fill = async {
            loop {
                inside.writable().await.unwrap();
                let _ = inside.try_write(&part);
            }
        };
        let mut taken = vec![0; 3_000_000];
        tokio::select! {
            read = server.read_exact(&mut taken) => { read.unwrap(); }
            () = fill => {}
        }
        server.set_zero_linger().unwrap();
        drop(server);
        let (outcome, counts) = relay.await.unwrap();
        assert!(outcome.is_err());
        assert!(counts.traffic.read().sent >= 3_000_000, "{counts:?}");
        drop(inside);
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

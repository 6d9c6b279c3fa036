//! The stream into a sandbox, with limits for untrusted servers.
//!
//! A server inside can send informational responses (`103 Early Hints`) without end, or never finish a head, so bytes and
//! informational responses are counted until the head of the response is complete. It can also respond before it has read
//! the request and close the connection; the response is then in the socket although writing fails, so a failed write only
//! ends writing, and reading determines the result.
//!
//! Data that a server sends on an idle connection must not become the response of the next client. The HTTP library reads
//! before it writes a request, but a read that follows the event loop does not notice data of which the loop has not been
//! told. So the socket itself is asked before the first byte of a request is written on a kept connection.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::connection_limit::ConnectionPermit;
use super::fair::ByteBudget;
use super::tls::{self, Transport};

/// Maximum number of informational responses to one request. Servers send one or two; a server that reports progress with
/// `102` every 20 seconds reaches this after ten minutes.
const INFORMATIONAL_MAX: u32 = 32;
/// Maximum number of bytes until the head of the response is complete, including informational responses and data that is
/// read together with the head.
const BEFORE_HEAD_MAX_BYTES: usize = 512 * 1024;
/// Time limit for a head from its first byte to its last. There is no limit for the first byte, except the client's.
const HEAD_TIME: Duration = Duration::from_secs(30);

/// How many of the first bytes of a response are remembered, to recognise the protocol of the server.
const FIRST_BYTES: usize = 4;

/// Progress of the head of a response, shared by the stream, the callback of the HTTP library and the call that waits for it.
#[derive(Debug, Clone, Default)]
pub(super) struct Head(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Whether the socket must be checked before the request is written.
    unchecked: AtomicBool,
    complete: AtomicBool,
    bytes: AtomicUsize,
    informational: AtomicU32,
    /// The first bytes, and how many there are.
    first: Mutex<([u8; FIRST_BYTES], usize)>,
    /// Time of the first byte of the current head; none between two heads.
    began: Mutex<Option<Instant>>,
}

impl Head {
    /// Begins the next exchange on a kept connection.
    pub(super) fn restart(&self) {
        self.0.bytes.store(0, Ordering::Release);
        self.0.informational.store(0, Ordering::Release);
        self.0.first.lock().1 = 0;
        *self.0.began.lock() = None;
        self.0.complete.store(false, Ordering::Release);
        self.0.unchecked.store(true, Ordering::Release);
    }

    /// Whether no byte of a response was read.
    pub(super) fn is_untouched(&self) -> bool {
        self.0.bytes.load(Ordering::Acquire) == 0
    }

    /// The first bytes of the response.
    pub(super) fn first(&self) -> Vec<u8> {
        let (bytes, count) = *self.0.first.lock();
        bytes[..count].to_vec()
    }

    /// The head of the response is complete: the body or another protocol follows.
    pub(super) fn complete(&self) {
        self.0.complete.store(true, Ordering::Release);
    }

    /// Counts an informational response.
    pub(super) fn inform(&self) {
        self.0.informational.fetch_add(1, Ordering::AcqRel);
        *self.0.began.lock() = None;
    }

    /// When the current head must be complete; none unless it has begun.
    fn deadline(&self) -> Option<Instant> {
        if self.0.complete.load(Ordering::Acquire) {
            return None;
        }
        self.0.began.lock().map(|began| began + HEAD_TIME)
    }

    /// Counts bytes read; an error above the limit.
    fn read(&self, read: &[u8]) -> io::Result<()> {
        let bytes = read.len();
        if bytes == 0 || self.0.complete.load(Ordering::Acquire) {
            return Ok(());
        }
        {
            let (first, count) = &mut *self.0.first.lock();
            let more = bytes.min(FIRST_BYTES - *count);
            first[*count..*count + more].copy_from_slice(&read[..more]);
            *count += more;
        }
        self.0.began.lock().get_or_insert_with(Instant::now);
        if self.0.bytes.fetch_add(bytes, Ordering::AcqRel) + bytes > BEFORE_HEAD_MAX_BYTES {
            return Err(io::Error::other("too much data before the head of the response"));
        }
        Ok(())
    }

    /// Whether more may be read.
    fn check(&self) -> io::Result<()> {
        if self.0.informational.load(Ordering::Acquire) > INFORMATIONAL_MAX {
            return Err(io::Error::other("too many informational responses"));
        }
        Ok(())
    }
}

/// A stream to a server in a sandbox.
#[derive(Debug)]
pub(super) struct GuestStream {
    stream: Transport,
    head: Head,
    reads: ByteBudget,
    writes: ByteBudget,
    permit: ConnectionPermit,
    /// Wakes the stream at the deadline of a head. An earlier deadline is only replaced when it has passed, so that not
    /// every exchange sets a timer.
    timer: Option<Pin<Box<Sleep>>>,
    /// Writing has failed; further data is discarded.
    deaf: bool,
}

impl GuestStream {
    pub(super) fn new(stream: Transport, head: Head, permit: ConnectionPermit) -> Self {
        Self {
            stream,
            head,
            permit,
            timer: None,
            reads: ByteBudget::new(),
            writes: ByteBudget::new(),
            deaf: false,
        }
    }

    /// Checks a kept connection before it is used: `Some` is the end of the connection, or an error.
    fn poll_unexpected(&self) -> Option<io::Result<()>> {
        if !self.head.0.unchecked.swap(false, Ordering::AcqRel) {
            return None;
        }
        let socket = tls::socket_of(&self.stream)?;
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        match rustix::net::recv(socket, &mut [0], flags) {
            Ok((0, _)) => Some(Ok(())),
            Ok(_) => Some(Err(io::Error::other("data on an idle connection"))),
            Err(Errno::AGAIN | Errno::INTR) => None,
            Err(error) => Some(Err(error.into())),
        }
    }

    fn written(&mut self, written: io::Result<usize>, offered: usize) -> io::Result<usize> {
        match written {
            Err(error) if hung_up(&error) => {
                self.deaf = true;
                Ok(offered)
            }
            other => other,
        }
    }
}

impl Drop for GuestStream {
    fn drop(&mut self) {
        // The connection may still be in the pool.
        self.permit.release();
    }
}

/// Ready once the deadline has passed.
fn poll_passed(timer: &mut Option<Pin<Box<Sleep>>>, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
    let timer = timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
    loop {
        ready!(timer.as_mut().poll(cx));
        if timer.deadline() >= deadline {
            return Poll::Ready(());
        }
        timer.as_mut().reset(deadline);
    }
}

fn hung_up(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted
    )
}

impl AsyncRead for GuestStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(ended) = self.poll_unexpected() {
            return Poll::Ready(ended);
        }
        let Self {
            stream,
            head,
            reads,
            timer,
            ..
        } = &mut *self;
        reads.poll(cx, |cx| {
            head.check()?;
            let before = buf.filled().len();
            match tls::poll_read(stream, cx, buf) {
                Poll::Ready(result) => result?,
                Poll::Pending => {
                    if let Some(deadline) = head.deadline() {
                        ready!(poll_passed(timer, deadline, cx));
                        return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                    }
                    return Poll::Pending;
                }
            }
            let got = buf.filled().len() - before;
            head.read(&buf.filled()[before..])?;
            Poll::Ready(Ok(((), got)))
        })
    }
}

impl AsyncWrite for GuestStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.deaf {
            return Poll::Ready(Ok(buf.len()));
        }
        if let Some(ended) = self.poll_unexpected() {
            return Poll::Ready(ended.and(Err(io::ErrorKind::UnexpectedEof.into())));
        }
        let Self { stream, writes, .. } = &mut *self;
        let written = ready!(writes.poll(cx, |cx| {
            let written = ready!(Pin::new(stream).poll_write(cx, buf))?;
            Poll::Ready(Ok((written, written)))
        }));
        Poll::Ready(self.written(written, buf.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let offered = bufs.iter().map(|buf| buf.len()).sum();
        if self.deaf {
            return Poll::Ready(Ok(offered));
        }
        if let Some(ended) = self.poll_unexpected() {
            return Poll::Ready(ended.and(Err(io::ErrorKind::UnexpectedEof.into())));
        }
        let Self { stream, writes, .. } = &mut *self;
        let written = ready!(writes.poll(cx, |cx| {
            let written = ready!(Pin::new(stream).poll_write_vectored(cx, bufs))?;
            Poll::Ready(Ok((written, written)))
        }));
        Poll::Ready(self.written(written, offered))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match ready!(Pin::new(&mut self.stream).poll_shutdown(cx)) {
            Err(error) if hung_up(&error) || error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::task::Waker;

    use protocol::node::SandboxStream;
    use tokio_util::either::Either;

    use super::super::connection_limit::ConnectionLimiter;
    use super::*;

    #[tokio::test]
    async fn a_kept_connection_is_checked_before_the_event_loop_is_told() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
        let id = "iabc".parse().expect("an id");
        for sends in [true, false] {
            let address = listener.local_addr().expect("address");
            let stream = tokio::net::TcpStream::connect(address).await.expect("connect");
            let (mut server, _) = listener.accept().expect("accept");
            let permit = ConnectionLimiter::new(1, 1).take(&id).expect("a permit");
            let head = Head::default();
            let mut guest = GuestStream::new(Either::Left(SandboxStream::from(stream)), head.clone(), permit);
            let mut cx = Context::from_waker(Waker::noop());
            let mut bytes = [0; 8];
            let mut buffer = ReadBuf::new(&mut bytes);
            assert!(Pin::new(&mut guest).poll_read(&mut cx, &mut buffer).is_pending());
            // From here to the end of the turn, the event loop does not run.
            if sends {
                server.write_all(b"HTTP").expect("written");
            } else {
                drop(server);
            }
            head.restart();
            let write = Pin::new(&mut guest).poll_write(&mut cx, b"GET");
            assert!(matches!(write, Poll::Ready(Err(_))), "{write:?}");
            head.restart();
            let read = Pin::new(&mut guest).poll_read(&mut cx, &mut buffer);
            assert!(matches!(read, Poll::Ready(result) if result.is_err() == sends));
            assert!(buffer.filled().is_empty());
        }
    }
}

//! The client's connection, with a way to abort it.
//!
//! Dropping a socket sends FIN, which ends a body without a length cleanly. So the socket is marked to be reset, and the
//! task that serves it drops it when notified.
//!
//! A client that has vanished sends no FIN, and a stream may be silent for as long as its sandbox runs. So the kernel
//! probes silent connections.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::fair::ByteBudget;

/// How long a connection is silent before it is probed, and between two probes.
const PROBES: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(15));
/// Number of probes without an answer after which the client has vanished.
const PROBES_MAX: u32 = 4;

/// A handle on a client's connection, in the extensions of its requests.
#[derive(Debug, Clone)]
pub struct ClientConnection {
    cut: CancellationToken,
    reset: Arc<AtomicBool>,
}

impl ClientConnection {
    /// Splits an accepted connection into the stream to serve and the handle on it.
    #[must_use]
    pub fn new(tcp: TcpStream) -> (ClientStream, Self) {
        if let Err(error) = probe(&tcp) {
            tracing::debug!(%error, "cannot probe a connection");
        }
        let connection = Self {
            cut: CancellationToken::new(),
            reset: Arc::new(AtomicBool::new(false)),
        };
        let reset = Arc::clone(&connection.reset);
        let stream = ClientStream {
            tcp,
            reset,
            reads: ByteBudget::new(),
            writes: ByteBudget::new(),
        };
        (stream, connection)
    }

    /// Makes the connection end with a reset, now if its server waits on [`Self::was_cut`].
    pub fn cut(&self) {
        self.reset.store(true, Ordering::Release);
        self.cut.cancel();
    }

    /// Returns once [`Self::cut`] was called; the stream must then be dropped.
    pub async fn was_cut(&self) {
        self.cut.cancelled().await;
    }
}

fn probe(tcp: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_tcp_keepidle(tcp, PROBES.0)?;
    sockopt::set_tcp_keepintvl(tcp, PROBES.1)?;
    sockopt::set_tcp_keepcnt(tcp, PROBES_MAX)?;
    sockopt::set_socket_keepalive(tcp, true)
}

/// The stream of a client's connection. Dropped after [`ClientConnection::cut`], it sends a reset. It yields to other
/// streams, see [`super::fair`].
#[derive(Debug)]
pub struct ClientStream {
    tcp: TcpStream,
    reset: Arc<AtomicBool>,
    reads: ByteBudget,
    writes: ByteBudget,
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        if self.reset.load(Ordering::Acquire) {
            // Setting the option fails only on a closed socket, which does not need it.
            let _ = self.tcp.set_zero_linger();
        }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { tcp, reads, .. } = &mut *self;
        reads.poll(cx, |cx| {
            let before = buf.filled().len();
            ready!(Pin::new(tcp).poll_read(cx, buf))?;
            Poll::Ready(Ok(((), buf.filled().len() - before)))
        })
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let Self { tcp, writes, .. } = &mut *self;
        writes.poll(cx, |cx| {
            let written = ready!(Pin::new(tcp).poll_write(cx, buf))?;
            Poll::Ready(Ok((written, written)))
        })
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Self { tcp, writes, .. } = &mut *self;
        writes.poll(cx, |cx| {
            let written = ready!(Pin::new(tcp).poll_write_vectored(cx, bufs))?;
            Poll::Ready(Ok((written, written)))
        })
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}

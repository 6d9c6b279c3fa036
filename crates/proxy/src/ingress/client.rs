//! The client's connection, with a way to cut it.
//!
//! A dropped socket says FIN, which a client of a body without a length reads as its end. So the socket remembers that
//! it has to be reset, and whoever serves it drops it when told.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

/// A handle on a client's connection, put into the extensions of each request that comes over it.
#[derive(Debug, Clone)]
pub struct ClientConnection {
    cut: CancellationToken,
    reset: Arc<AtomicBool>,
}

impl ClientConnection {
    /// Splits an accepted connection into the stream to serve and the handle on it.
    #[must_use]
    pub fn new(tcp: TcpStream) -> (ClientStream, Self) {
        let connection = Self {
            cut: CancellationToken::new(),
            reset: Arc::new(AtomicBool::new(false)),
        };
        let reset = Arc::clone(&connection.reset);
        (ClientStream { tcp, reset }, connection)
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

/// The stream of a client's connection. Dropped after a cut, it resets instead of closing.
#[derive(Debug)]
pub struct ClientStream {
    tcp: TcpStream,
    reset: Arc<AtomicBool>,
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        if self.reset.load(Ordering::Acquire) {
            // A socket that is already dead cannot take the option, and needs none.
            let _ = self.tcp.set_zero_linger();
        }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(cx, bufs)
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

//! A byte stream to a port inside a sandbox.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// A bidirectional byte stream over any transport.
pub trait ByteStream: AsyncRead + AsyncWrite + Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin> ByteStream for T {}

/// A byte stream to a port inside a sandbox. The opener has made sure that small writes are sent immediately.
///
/// A socket on this host is kept as such, so that relaying costs no more than between two sockets.
#[derive(Debug)]
pub enum SandboxStream {
    /// A socket of this host.
    Local(TcpStream),
    /// Any other transport.
    Remote(Box<dyn ByteStream>),
}

impl From<TcpStream> for SandboxStream {
    fn from(socket: TcpStream) -> Self {
        Self::Local(socket)
    }
}

impl SandboxStream {
    /// A stream that is not a socket of this host.
    pub fn remote(stream: impl ByteStream + 'static) -> Self {
        Self::Remote(Box::new(stream))
    }
}

impl AsyncRead for SandboxStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Local(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Remote(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for SandboxStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Local(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Remote(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Local(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Remote(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Local(stream) => stream.is_write_vectored(),
            Self::Remote(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Local(stream) => Pin::new(stream).poll_flush(cx),
            Self::Remote(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Local(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Remote(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// Bytes that are only read.
pub trait ByteSource: AsyncRead + Debug + Send + Unpin {}

impl<T: AsyncRead + Debug + Send + Unpin> ByteSource for T {}

/// An archive of a layer. Reading it ends with an error if the archive is incomplete.
#[derive(Debug)]
pub struct LayerStream(Box<dyn ByteSource>);

impl LayerStream {
    /// A stream over any transport.
    pub fn new(source: impl ByteSource + 'static) -> Self {
        Self(Box::new(source))
    }
}

impl AsyncRead for LayerStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.get_mut().0).poll_read(cx, buf)
    }
}

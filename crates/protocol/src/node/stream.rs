//! A byte stream to a port inside a sandbox.

use std::fmt::Debug;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::traffic::Traffic;

/// A bidirectional byte stream over any transport.
pub trait ByteStream: AsyncRead + AsyncWrite + Debug + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Debug + Send + Unpin> ByteStream for T {}

/// A byte stream to a port inside a sandbox. The opener has made sure that small writes are sent immediately.
///
/// Its bytes are counted where the node of the sandbox opens it ([`Self::counted`]), and nowhere else on their way.
#[derive(Debug)]
pub struct SandboxStream {
    transport: Transport,
    counted: Option<Counted>,
}

/// Who counts the bytes.
#[derive(Debug)]
struct Counted {
    sandbox: Arc<Traffic>,
    /// All streams of the node.
    streams: Arc<Traffic>,
}

/// What carries the bytes. A socket on this host is kept as such, so that relaying costs no more than between two sockets.
#[derive(Debug)]
enum Transport {
    /// A socket of this host.
    Local(TcpStream),
    /// Any other transport.
    Remote(Box<dyn ByteStream>),
}

impl From<TcpStream> for SandboxStream {
    fn from(socket: TcpStream) -> Self {
        Self::new(Transport::Local(socket))
    }
}

impl SandboxStream {
    const fn new(transport: Transport) -> Self {
        Self {
            transport,
            counted: None,
        }
    }

    /// A stream that is not a socket of this host.
    pub fn remote(stream: impl ByteStream + 'static) -> Self {
        Self::new(Transport::Remote(Box::new(stream)))
    }

    /// This stream, whose bytes are counted from now on: for its sandbox, and with those of all other streams.
    #[must_use]
    pub fn counted(self, sandbox: Arc<Traffic>, streams: Arc<Traffic>) -> Self {
        Self {
            counted: Some(Counted { sandbox, streams }),
            ..self
        }
    }

    /// The socket, if it is one of this host.
    #[must_use]
    pub const fn socket(&self) -> Option<&TcpStream> {
        match &self.transport {
            Transport::Local(socket) => Some(socket),
            Transport::Remote(_) => None,
        }
    }

    /// Counts what was written, if it was.
    fn written(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let (Some(counted), Poll::Ready(Ok(count))) = (&self.counted, &written) {
            counted.sandbox.receive(*count);
            counted.streams.receive(*count);
        }
        written
    }
}

impl AsyncRead for SandboxStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let read = match &mut this.transport {
            Transport::Local(stream) => Pin::new(stream).poll_read(cx, buf),
            Transport::Remote(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        if let Some(counted) = &this.counted {
            let count = buf.filled().len().saturating_sub(before);
            counted.sandbox.send(count);
            counted.streams.send(count);
        }
        read
    }
}

impl AsyncWrite for SandboxStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match &mut this.transport {
            Transport::Local(stream) => Pin::new(stream).poll_write(cx, buf),
            Transport::Remote(stream) => Pin::new(stream).poll_write(cx, buf),
        };
        this.written(written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match &mut this.transport {
            Transport::Local(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Transport::Remote(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        };
        this.written(written)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Local(stream) => stream.is_write_vectored(),
            Transport::Remote(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Local(stream) => Pin::new(stream).poll_flush(cx),
            Transport::Remote(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Local(stream) => Pin::new(stream).poll_shutdown(cx),
            Transport::Remote(stream) => Pin::new(stream).poll_shutdown(cx),
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

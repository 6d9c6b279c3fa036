//! Relays a stream into a sandbox over a connection that carries frames.
//!
//! A stream that was cut must not look like one that ended, so bytes are sent in chunks with a length prefix, and an
//! empty chunk is the end. A connection that closes without one was cut.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use protocol::node::SandboxStream;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};

/// Maximum size of a chunk, in bytes.
const CHUNK_BYTES: usize = 16 * 1024;

/// A stream of chunks over `S`.
#[derive(Debug)]
pub(crate) struct Chunked<S> {
    inner: S,
    header: Vec<u8>,
    /// Bytes of the current chunk that were not read yet.
    remaining: usize,
    has_ended: bool,
    /// The output buffer; its first `written` bytes were sent.
    pending: Vec<u8>,
    written: usize,
    has_shut_down: bool,
}

impl<S> Chunked<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self {
            inner,
            header: Vec::new(),
            remaining: 0,
            has_ended: false,
            pending: Vec::new(),
            written: 0,
            has_shut_down: false,
        }
    }

    fn put(&mut self, chunk: &[u8]) {
        let length = u16::try_from(chunk.len()).expect("a chunk has at most 16 KiB");
        self.pending.extend_from_slice(&length.to_be_bytes());
        self.pending.extend_from_slice(chunk);
    }
}

impl<S: AsyncWrite + Unpin> Chunked<S> {
    fn poll_pending(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.pending.len() {
            let written = ready!(Pin::new(&mut self.inner).poll_write(cx, &self.pending[self.written..]))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += written;
        }
        self.pending.clear();
        self.written = 0;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Chunked<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while !this.has_ended && this.remaining == 0 {
            let mut byte = [0];
            let mut read = ReadBuf::new(&mut byte);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            this.header.push(byte[0]);
            if let [high, low] = this.header[..] {
                this.header.clear();
                this.remaining = u16::from_be_bytes([high, low]).into();
                this.has_ended = this.remaining == 0;
            }
        }
        if this.has_ended || buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let room = buf.remaining().min(this.remaining);
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(room));
        ready!(Pin::new(&mut this.inner).poll_read(cx, &mut part))?;
        let read = part.filled().len();
        if read == 0 {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        buf.advance(read);
        this.remaining -= read;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Chunked<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_pending(cx))?;
        let chunk = &buf[..buf.len().min(CHUNK_BYTES)];
        if !chunk.is_empty() {
            self.put(chunk);
        }
        // The rest is sent with the next write or flush.
        if let Poll::Ready(Err(error)) = self.poll_pending(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(chunk.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_pending(cx))?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !std::mem::replace(&mut self.has_shut_down, true) {
            self.put(&[]);
        }
        self.poll_flush(cx)
    }
}

/// Relays between a client and a sandbox until both sides have ended. On an error, the client's side is dropped without
/// an end, which cuts it.
pub(crate) async fn relay<S>(client: Chunked<S>, guest: SandboxStream) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_guest, mut to_guest) = tokio::io::split(guest);
    let up = async {
        let mut buffer = vec![0; CHUNK_BYTES];
        // A server that closes its connection may have responded before: bytes that it does not accept are discarded.
        let mut discards = false;
        loop {
            let read = from_client.read(&mut buffer).await?;
            if read == 0 {
                let _ = to_guest.shutdown().await;
                return Ok(());
            }
            discards = discards || to_guest.write_all(&buffer[..read]).await.is_err();
        }
    };
    let down = async {
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let read = from_guest.read(&mut buffer).await?;
            if read == 0 {
                return to_client.shutdown().await;
            }
            to_client.write_all(&buffer[..read]).await?;
            to_client.flush().await?;
        }
    };
    tokio::try_join!(up, down).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_end_and_a_cut_are_distinguished() {
        for ends in [true, false] {
            let (near, far) = tokio::io::duplex(64);
            let (mut near, mut far) = (Chunked::new(near), Chunked::new(far));
            let sent: Vec<u8> = (0..=255).cycle().take(CHUNK_BYTES + 1000).collect();
            let writing = async {
                near.write_all(&sent).await.unwrap();
                near.flush().await.unwrap();
                if ends {
                    near.shutdown().await.unwrap();
                }
                drop(near);
            };
            let mut received = Vec::new();
            let ((), read) = tokio::join!(writing, far.read_to_end(&mut received));
            assert_eq!(received, sent);
            match read {
                Ok(_) => assert!(ends),
                Err(error) => assert!(!ends && error.kind() == io::ErrorKind::ConnectionReset, "{error}"),
            }
        }
    }
}

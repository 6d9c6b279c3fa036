//! A byte stream of a link: one stream of an HTTP/2 connection.
//!
//! An end is a half that the peer has closed; anything else (a reset, a lost connection) is an error, so a stream that
//! was cut never looks as if it had ended.
//!
//! What arrives is moved at once from the frames of the connection to one buffer per stream, and the peer may send more
//! only as the buffer is read. Frames that wait would cost a multiple of their bytes, and who writes single bytes to a
//! stream that nobody reads could exhaust what the connection allows for all streams.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf as _, Bytes, BytesMut};
use h2::client::ResponseFuture;
use h2::{FlowControl, RecvStream, SendStream};
use http::StatusCode;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::JoinSet;

/// How many bytes of a stream may be on their way or wait to be read.
pub(crate) const WINDOW_BYTES: u32 = 256 << 10;
/// How many bytes one write takes at most, so that streams take turns.
const WRITE_MAX: usize = 32 << 10;

/// What has arrived.
#[derive(Debug, Default)]
struct Inbox {
    buffer: BytesMut,
    flow: Option<FlowControl>,
    /// How the stream ended, once it has.
    end: Option<Result<(), (io::ErrorKind, String)>>,
    reader: Option<Waker>,
}

/// A byte stream of a link.
#[derive(Debug)]
pub(crate) struct LinkStream {
    send: SendStream<Bytes>,
    inbox: Arc<Mutex<Inbox>>,
    has_shut_down: bool,
    /// Ends with this stream, which resets it unless both sides have ended.
    _filling: JoinSet<()>,
}

impl LinkStream {
    /// The stream of a request that was sent.
    pub(crate) fn of_request(response: ResponseFuture, send: SendStream<Bytes>) -> Self {
        Self::filled(send, async move {
            let response = response.await.map_err(cut)?;
            if response.status() != StatusCode::OK {
                let text = format!("the node refused a request with status {}", response.status());
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            Ok(response.into_body())
        })
    }

    /// The stream of a request that was accepted.
    pub(crate) fn of_response(body: RecvStream, send: SendStream<Bytes>) -> Self {
        Self::filled(send, async move { Ok(body) })
    }

    fn filled(send: SendStream<Bytes>, body: impl Future<Output = io::Result<RecvStream>> + Send + 'static) -> Self {
        let inbox = Arc::new(Mutex::new(Inbox::default()));
        let filling = Arc::clone(&inbox);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let ended = match body.await {
                Ok(body) => fill(&filling, body).await,
                Err(error) => Err(error),
            };
            let mut inbox = filling.lock();
            inbox.end = Some(ended.map_err(|error| (error.kind(), error.to_string())));
            if let Some(reader) = inbox.reader.take() {
                reader.wake();
            }
        });
        Self {
            send,
            inbox,
            has_shut_down: false,
            _filling: tasks,
        }
    }
}

async fn fill(inbox: &Mutex<Inbox>, mut body: RecvStream) -> io::Result<()> {
    inbox.lock().flow = Some(body.flow_control().clone());
    while let Some(data) = body.data().await {
        let data = data.map_err(cut)?;
        let mut inbox = inbox.lock();
        inbox.buffer.extend_from_slice(&data);
        if let Some(reader) = inbox.reader.take() {
            reader.wake();
        }
    }
    Ok(())
}

/// The error of a stream that was cut.
fn cut(error: h2::Error) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, error)
}

impl AsyncRead for LinkStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut inbox = self.inbox.lock();
        let count = inbox.buffer.len().min(buf.remaining());
        if count > 0 {
            buf.put_slice(&inbox.buffer[..count]);
            inbox.buffer.advance(count);
            if inbox.buffer.is_empty() {
                // What a burst has taken is not kept by a stream that idles.
                inbox.buffer = BytesMut::new();
            }
            if let Some(flow) = &mut inbox.flow {
                // Fails only for more than has arrived.
                let _ = flow.release_capacity(count);
            }
            return Poll::Ready(Ok(()));
        }
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        match &inbox.end {
            Some(Ok(())) => Poll::Ready(Ok(())),
            Some(Err((kind, text))) => Poll::Ready(Err(io::Error::new(*kind, text.clone()))),
            None => {
                inbox.reader = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl AsyncWrite for LinkStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if buf.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let wanted = buf.len().min(WRITE_MAX);
        self.send.reserve_capacity(wanted);
        let capacity = loop {
            match self.send.capacity() {
                0 => match ready!(self.send.poll_capacity(cx)) {
                    // Capacity that was there may be gone by the time that it is asked for.
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Poll::Ready(Err(cut(error))),
                    None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
                },
                capacity => break capacity,
            }
        };
        let count = wanted.min(capacity);
        let sent = self.send.send_data(Bytes::copy_from_slice(&buf[..count]), false);
        Poll::Ready(sent.map(|()| count).map_err(cut))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The task of the connection sends what was written.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !std::mem::replace(&mut self.has_shut_down, true) {
            self.send.send_data(Bytes::new(), true).map_err(cut)?;
        }
        Poll::Ready(Ok(()))
    }
}

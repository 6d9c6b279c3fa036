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
use protocol::node::LayerStream;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, BufReader, ReadBuf};
use tokio::task::JoinSet;

use crate::frame;

/// How many bytes of a stream may be on their way or wait to be read.
pub(crate) const WINDOW_BYTES: u32 = 256 << 10;
/// The largest frame of data, in bytes.
pub(crate) const FRAME_BYTES: u32 = 32 << 10;
/// How many bytes one write takes at most, so that streams take turns. With the nine bytes before it, such a frame fills two records
/// of TLS, and begins no third.
pub(crate) const WRITE_MAX: usize = (32 << 10) - 9;
/// How many bytes that have arrived are given to their reader at once, at most.
const PART_MAX: usize = 32 << 10;

/// What has arrived.
#[derive(Debug, Default)]
struct Inbox {
    buffer: BytesMut,
    flow: Option<FlowControl>,
    /// How the stream ended, once it has.
    end: Option<Result<(), (io::ErrorKind, String)>>,
    reader: Option<Waker>,
}

/// Sends a frame as the last bytes of a stream: together with the headers before it and the end, if nothing holds it up.
pub(crate) async fn send_last(send: &mut SendStream<Bytes>, value: &impl Serialize) -> io::Result<()> {
    let mut frame = Bytes::from(frame::encode(value)?);
    loop {
        let count = std::future::poll_fn(|cx| poll_capacity(send, frame.len(), cx)).await?;
        let part = frame.split_to(count);
        let is_last = frame.is_empty();
        send.send_data(part, is_last).map_err(cut)?;
        if is_last {
            return Ok(());
        }
    }
}

/// Reads one frame of at most `max` bytes from the beginning of `body`, and returns it with what has arrived after it. The
/// peer may send as much again, but for that.
pub(crate) async fn read_first(body: &mut RecvStream, max: u32) -> io::Result<(Vec<u8>, BytesMut)> {
    let mut read = BytesMut::new();
    let mut length = None;
    let mut arrived = 0;
    loop {
        if length.is_none()
            && let Some(head) = read.first_chunk()
        {
            length = Some(frame::length(*head, max)?);
            read.advance(head.len());
        }
        if let Some(length) = length
            && read.len() >= length
        {
            let rest = read.split_off(length);
            release(body, arrived - rest.len());
            return Ok((read.into(), rest));
        }
        release(body, arrived);
        let Some(data) = body.data().await else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let data = data.map_err(cut)?;
        arrived = data.len();
        read.extend_from_slice(&data);
    }
}

/// An archive that is sent on a stream, read by as much as that takes at once.
pub(crate) fn in_parts(archive: LayerStream) -> BufReader<LayerStream> {
    BufReader::with_capacity(WRITE_MAX, archive)
}

fn release(body: &mut RecvStream, count: usize) {
    // Fails only for more than has arrived.
    let _ = body.flow_control().release_capacity(count);
}

/// The body of an answer.
pub(crate) async fn answered(response: ResponseFuture) -> io::Result<RecvStream> {
    let response = response.await.map_err(cut)?;
    if response.status() != StatusCode::OK {
        let text = format!("the node refused a request with status {}", response.status());
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(response.into_body())
}

/// How many of `wanted` bytes may be sent now.
fn poll_capacity(send: &mut SendStream<Bytes>, wanted: usize, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
    let wanted = wanted.min(WRITE_MAX);
    send.reserve_capacity(wanted);
    loop {
        match send.capacity() {
            0 => match ready!(send.poll_capacity(cx)) {
                // Capacity that was there may be gone by the time that it is asked for.
                Some(Ok(_)) => {}
                Some(Err(error)) => return Poll::Ready(Err(cut(error))),
                None => return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            },
            capacity => return Poll::Ready(Ok(wanted.min(capacity))),
        }
    }
}

/// A byte stream of a link.
#[derive(Debug)]
pub(crate) struct LinkStream {
    sending: Sending,
    receiving: Receiving,
}

/// What is sent on a stream. Unless both sides have ended, the stream is reset once this and [`Receiving`] are dropped.
#[derive(Debug)]
pub(crate) struct Sending {
    send: SendStream<Bytes>,
    has_shut_down: bool,
}

/// What arrives on a stream.
#[derive(Debug)]
pub(crate) struct Receiving {
    inbox: Arc<Mutex<Inbox>>,
    /// The task that fills the inbox. It ends when its owner is dropped.
    _filling: JoinSet<()>,
}

impl LinkStream {
    /// The stream of a request that was sent.
    pub(crate) fn of_request(response: ResponseFuture, send: SendStream<Bytes>) -> Self {
        Self::filled(send, BytesMut::new(), answered(response))
    }

    /// The stream of a request that was answered.
    pub(crate) fn of_answered(body: RecvStream, send: SendStream<Bytes>) -> Self {
        Self::filled(send, BytesMut::new(), async move { Ok(body) })
    }

    /// The stream of a request that was accepted, of which `read` is the first that has not been used.
    pub(crate) fn of_response(read: BytesMut, body: RecvStream, send: SendStream<Bytes>) -> Self {
        Self::filled(send, read, async move { Ok(body) })
    }

    fn filled(
        send: SendStream<Bytes>,
        read: BytesMut,
        body: impl Future<Output = io::Result<RecvStream>> + Send + 'static,
    ) -> Self {
        let inbox = Arc::new(Mutex::new(Inbox {
            buffer: read,
            ..Inbox::default()
        }));
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
            sending: Sending {
                send,
                has_shut_down: false,
            },
            receiving: Receiving { inbox, _filling: tasks },
        }
    }

    /// Both directions, for whoever moves bytes as they are.
    pub(crate) fn into_halves(self) -> (Receiving, Sending) {
        (self.receiving, self.sending)
    }
}

impl Sending {
    /// How many bytes [`Self::send`] takes now.
    pub(crate) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        poll_capacity(&mut self.send, WRITE_MAX, cx)
    }

    /// Sends bytes for which there is room. The task of the connection does it.
    pub(crate) fn send(&mut self, part: Bytes) -> io::Result<()> {
        self.send.send_data(part, false).map_err(cut)
    }

    pub(crate) fn end(&mut self) -> io::Result<()> {
        if !std::mem::replace(&mut self.has_shut_down, true) {
            self.send.send_data(Bytes::new(), true).map_err(cut)?;
        }
        Ok(())
    }
}

impl Receiving {
    /// What has arrived next; empty at the end.
    pub(crate) fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Bytes>> {
        let mut part = Bytes::new();
        let taken = self.inbox.lock().poll_take(cx, |arrived| {
            part = arrived.split_to(arrived.len().min(PART_MAX)).freeze();
        });
        taken.map_ok(|()| part)
    }
}

impl Inbox {
    /// Has `take` take some of the bytes that are there, and the peer send as many again. Nothing is taken at the end.
    fn poll_take(&mut self, cx: &mut Context<'_>, take: impl FnOnce(&mut BytesMut)) -> Poll<io::Result<()>> {
        let there = self.buffer.len();
        if there > 0 {
            take(&mut self.buffer);
            let taken = there - self.buffer.len();
            if self.buffer.is_empty() {
                // What a burst has taken is not kept by a stream that idles.
                self.buffer = BytesMut::new();
            }
            if let Some(flow) = &mut self.flow {
                // Fails only for more than has arrived.
                let _ = flow.release_capacity(taken);
            }
            return Poll::Ready(Ok(()));
        }
        match &self.end {
            Some(Ok(())) => Poll::Ready(Ok(())),
            Some(Err((kind, text))) => Poll::Ready(Err(io::Error::new(*kind, text.clone()))),
            None => {
                self.reader = Some(cx.waker().clone());
                Poll::Pending
            }
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
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let mut inbox = self.receiving.inbox.lock();
        inbox.poll_take(cx, |arrived| {
            let count = arrived.len().min(buf.remaining());
            buf.put_slice(&arrived[..count]);
            arrived.advance(count);
        })
    }
}

impl AsyncWrite for LinkStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if buf.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let count = ready!(poll_capacity(&mut self.sending.send, buf.len(), cx))?;
        let sent = self.sending.send(Bytes::copy_from_slice(&buf[..count]));
        Poll::Ready(sent.map(|()| count))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The task of the connection sends what was written.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.sending.end())
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::connection;

    /// Both ends of a stream whose request was sent, with the connections' tasks.
    async fn stream(tasks: &mut JoinSet<()>) -> (LinkStream, RecvStream, h2::server::SendResponse<Bytes>) {
        let (near, far) = tokio::io::duplex(64 << 10);
        let (caller, called) = tokio::join!(
            connection::caller().handshake::<_, Bytes>(near),
            connection::called().handshake::<_, Bytes>(far)
        );
        let (mut requests, connection) = caller.unwrap();
        let mut called = called.unwrap();
        tasks.spawn(async move { connection.await.unwrap() });
        let request = Request::builder().uri("https://node/call").body(()).unwrap();
        let (response, send) = requests.send_request(request, false).unwrap();
        let (request, respond) = called.accept().await.unwrap().unwrap();
        tasks.spawn(async move { while called.accept().await.is_some() {} });
        (LinkStream::of_request(response, send), request.into_body(), respond)
    }

    #[tokio::test]
    async fn what_follows_the_first_frame_is_read_after_it() {
        let mut tasks = JoinSet::new();
        let (mut near, mut body, mut respond) = stream(&mut tasks).await;
        let more: Vec<u8> = (0..=255).cycle().take(3 * WINDOW_BYTES as usize).collect();
        let sent = more.clone();
        let mut writing = JoinSet::new();
        writing.spawn(async move {
            for part in [&[0, 0][..], &[0, 3, b'1'], b"23re"] {
                near.write_all(part).await.unwrap();
                tokio::task::yield_now().await;
            }
            near.write_all(&sent).await.unwrap();
            near.shutdown().await.unwrap();
            let mut answer = Vec::new();
            near.read_to_end(&mut answer).await.unwrap();
            assert_eq!(answer, b"\0\0\0\x04true");
        });
        let (frame, rest) = read_first(&mut body, 3).await.unwrap();
        assert_eq!(frame, b"123");
        let mut far = LinkStream::of_response(rest, body, respond.send_response(Response::new(()), false).unwrap());
        let mut read = Vec::new();
        far.read_to_end(&mut read).await.unwrap();
        let (first, following) = read.split_at(2);
        assert_eq!(first, b"re");
        assert!(following == more);
        send_last(&mut far.sending.send, &true).await.unwrap();
        writing.join_next().await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_first_frame_is_bounded_and_whole() {
        let mut tasks = JoinSet::new();
        let (mut near, mut body, _respond) = stream(&mut tasks).await;
        near.write_all(&[0, 0, 0, 4, 1, 2, 3, 4]).await.unwrap();
        let error = read_first(&mut body, 3).await.unwrap_err();
        assert!(error.to_string().contains("a frame of 4 bytes"), "{error}");
        let (mut near, mut body, _respond) = stream(&mut tasks).await;
        near.write_all(&[0, 0, 0, 4, 1, 2, 3]).await.unwrap();
        near.shutdown().await.unwrap();
        let error = read_first(&mut body, 4).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn an_answer_larger_than_the_window_is_sent_as_it_is_read() {
        let mut tasks = JoinSet::new();
        let (mut near, _body, mut respond) = stream(&mut tasks).await;
        let text = "a".repeat(3 * WINDOW_BYTES as usize);
        let sending = async {
            let mut send = respond.send_response(Response::new(()), false).unwrap();
            send_last(&mut send, &text).await.unwrap();
        };
        let mut answer = Vec::new();
        let (_, read) = tokio::join!(sending, near.read_to_end(&mut answer));
        read.unwrap();
        assert_eq!(answer.len(), text.len() + 6);
    }
}

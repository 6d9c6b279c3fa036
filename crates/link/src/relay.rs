//! Relays a stream of a link to a stream into a sandbox.
//!
//! A stream may be silent for as long as its sandbox runs, and a node has thousands of them, so none holds a buffer while it waits.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use protocol::node::SandboxStream;
use tokio::io::{AsyncRead as _, AsyncWriteExt as _, ReadBuf, ReadHalf};

use crate::stream::{LinkStream, Sending, WRITE_MAX};

thread_local! {
    /// Where the streams of this thread read to, one at a time.
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; WRITE_MAX].into_boxed_slice());
}

/// Relays between a client and a sandbox until both sides have ended. On an error, the client's side is dropped without
/// an end, which cuts it.
pub(crate) async fn relay(client: LinkStream, guest: SandboxStream) -> io::Result<()> {
    let (mut from_client, mut to_client) = client.into_halves();
    let (mut from_guest, mut to_guest) = tokio::io::split(guest);
    let up = async {
        // A server that closes its connection may have responded before: bytes that it does not accept are discarded.
        let mut discards = false;
        loop {
            let part = poll_fn(|cx| from_client.poll_part(cx)).await?;
            if part.is_empty() {
                let _ = to_guest.shutdown().await;
                return Ok(());
            }
            discards = discards || to_guest.write_all(&part).await.is_err();
        }
    };
    let down = async {
        loop {
            let part = poll_fn(|cx| poll_part(cx, &mut from_guest, &mut to_client)).await?;
            if part.is_empty() {
                return to_client.end();
            }
            to_client.send(part)?;
        }
    };
    tokio::try_join!(up, down).map(|_| ())
}

/// What a sandbox has sent next, as much as the client's side takes now; empty at the end.
fn poll_part(
    cx: &mut Context<'_>,
    guest: &mut ReadHalf<SandboxStream>,
    client: &mut Sending,
) -> Poll<io::Result<Bytes>> {
    let room = ready!(client.poll_room(cx))?;
    BUFFER.with_borrow_mut(|buffer| {
        let mut buffer = ReadBuf::new(&mut buffer[..room]);
        ready!(Pin::new(guest).poll_read(cx, &mut buffer))?;
        Poll::Ready(Ok(Bytes::copy_from_slice(buffer.filled())))
    })
}

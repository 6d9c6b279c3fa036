//! Relays bytes in both directions after `101 Switching Protocols`, until both sides have closed or the sandbox ends.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional_with_sizes};
use tokio_util::sync::CancellationToken;

use super::client::ClientConnection;
use super::dial::AliveCheck;

/// Buffer size per direction, in bytes. Untouched pages are not allocated, so an idle relay uses one page.
const BUFFER_BYTES: usize = 128 * 1024;

/// Relays until both sides have closed. In all other cases the client's connection is reset: when the sandbox ends, a side
/// fails, or the platform stops.
pub(super) async fn relay(
    client: OnUpgrade,
    guest: OnUpgrade,
    connection: Option<ClientConnection>,
    ending: CancellationToken,
    alive: AliveCheck,
    stop: CancellationToken,
) {
    let cut = || {
        if let Some(connection) = &connection {
            connection.cut();
        }
    };
    let watched = ending.clone();
    let copy = async {
        let (client, guest) = match tokio::try_join!(client, guest) {
            Ok(both) => both,
            Err(error) => {
                tracing::debug!(%error, "upgrade did not complete");
                return cut();
            }
        };
        let mut client = TokioIo::new(client);
        let mut guest = GuestSide {
            stream: TokioIo::new(guest),
            ending: watched,
            alive: Some(alive),
        };
        if let Err(error) = copy_bidirectional_with_sizes(&mut client, &mut guest, BUFFER_BYTES, BUFFER_BYTES).await {
            tracing::debug!(%error, "upgraded stream failed");
            cut();
        }
    };
    // Borrowed by the `select!`, so that the streams are dropped after the connection is marked to be reset.
    let mut copy = Box::pin(copy);
    tokio::select! {
        biased;
        () = ending.cancelled() => cut(),
        () = stop.cancelled() => cut(),
        () = &mut copy => {}
    }
}

/// The side of the sandbox: its end is an error if the sandbox has ended.
struct GuestSide<S> {
    stream: S,
    ending: CancellationToken,
    /// Polled once, at the end.
    alive: Option<AliveCheck>,
}

impl<S: AsyncRead + Unpin> AsyncRead for GuestSide<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            return Poll::Ready(Ok(()));
        }
        let was_alive = match &mut self.alive {
            Some(alive) => ready!(alive.as_mut().poll(cx)),
            None => true,
        };
        self.alive = None;
        if !was_alive || self.ending.is_cancelled() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GuestSide<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

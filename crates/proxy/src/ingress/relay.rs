//! After `101 Switching Protocols`: bytes both ways, whatever they mean, until both sides closed or the sandbox ended.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional_with_sizes};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::client::ClientConnection;
use super::dial::{self, Lives};

/// Size of the buffer of each direction, in bytes. Pages that no message reached are never touched, so an idle relay
/// costs one of them.
const BUFFER_BYTES: usize = 128 * 1024;

/// Relays until both sides closed. Anything else resets the client: a sandbox that ends, a side that breaks, a
/// platform that stops.
pub(super) async fn relay(
    client: OnUpgrade,
    guest: OnUpgrade,
    connection: Option<ClientConnection>,
    mut ending: watch::Receiver<bool>,
    lives: Lives,
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
            lives: Some(lives),
        };
        if let Err(error) = copy_bidirectional_with_sizes(&mut client, &mut guest, BUFFER_BYTES, BUFFER_BYTES).await {
            tracing::debug!(%error, "upgraded stream broke");
            cut();
        }
    };
    // Only borrowed by the `select!`, so that the streams are dropped after the cut is marked.
    let mut copy = Box::pin(copy);
    tokio::select! {
        biased;
        () = dial::ended(&mut ending) => cut(),
        () = stop.cancelled() => cut(),
        () = &mut copy => {}
    }
}

/// The sandbox's side: its end is an error when the sandbox is what ended.
struct GuestSide<S> {
    stream: S,
    ending: watch::Receiver<bool>,
    /// Asked once, at the end.
    lives: Option<Lives>,
}

impl<S: AsyncRead + Unpin> AsyncRead for GuestSide<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            return Poll::Ready(Ok(()));
        }
        let lived = match &mut self.lives {
            Some(lives) => ready!(lives.as_mut().poll(cx)),
            None => true,
        };
        self.lives = None;
        if !lived || dial::has_ended(&self.ending) {
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

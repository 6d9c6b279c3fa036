//! Relays a stream of a link to a stream into a sandbox.

use std::io;

use protocol::node::SandboxStream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::stream::LinkStream;

/// Size of the buffers, in bytes.
const BUFFER_BYTES: usize = 16 << 10;

/// Relays between a client and a sandbox until both sides have ended. On an error, the client's side is dropped without
/// an end, which cuts it.
pub(crate) async fn relay(client: LinkStream, guest: SandboxStream) -> io::Result<()> {
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_guest, mut to_guest) = tokio::io::split(guest);
    let up = async {
        let mut buffer = vec![0; BUFFER_BYTES];
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
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            let read = from_guest.read(&mut buffer).await?;
            if read == 0 {
                return to_client.shutdown().await;
            }
            to_client.write_all(&buffer[..read]).await?;
        }
    };
    tokio::try_join!(up, down).map(|_| ())
}

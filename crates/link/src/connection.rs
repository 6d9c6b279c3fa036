//! What both ends of a link agree about its HTTP/2 connection: windows, how many streams, and keep-alive.
//!
//! The window of the connection is larger than those of all streams together, so that no stream can hold up another by
//! not being read. Resets are not counted as abuse, because clients that go away are all in a day's work, and both ends
//! have shown who they are.

use std::io;
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::io::BufReader;
use tokio::net::TcpStream;

use crate::stream::{FRAME_BYTES, WINDOW_BYTES};

/// The socket of a connection, below TLS. rustls reads 4 KiB at a time, which would be five system calls for each of its records.
pub type Socket = BufReader<TcpStream>;

/// How much of a connection is read at once, in bytes: a few records of TLS.
const READ_BYTES: usize = 64 << 10;

/// How many calls a server makes at the same time.
pub(crate) const CALLS: usize = 1024;
/// How many streams into sandboxes, and streams of layers, a server has open at the same time.
pub(crate) const STREAMS: usize = 16 << 10;
/// How many streams a node accepts: those, and a few that are being closed.
const STREAMS_ACCEPTED: u32 = 24 << 10;
/// How many streams a server has open to another one at the same time, with traffic and with requests to the API. Each may hold
/// the window of a stream on either side, so there are fewer.
pub(crate) const STREAMS_BETWEEN_SERVERS: (usize, usize) = (4 << 10, 1 << 10);
/// How many streams a server accepts of another one.
const STREAMS_ACCEPTED_BETWEEN_SERVERS: u32 = 6 << 10;
/// Window of a connection, in bytes: the largest that there is.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// How much of a stream waits to be sent, in bytes.
const SEND_BUFFER_BYTES: usize = 128 << 10;
/// How many streams that were reset are remembered, because something may arrive for them.
const RESETS_REMEMBERED: usize = 64 << 10;

/// Pause between pings.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// How long a ping may take. A peer that is gone without a word is noticed after both.
const PING_BOUND: Duration = Duration::from_secs(10);

/// Sets up a socket that was connected.
pub(crate) fn socket(socket: TcpStream) -> io::Result<Socket> {
    socket.set_nodelay(true)?;
    Ok(BufReader::with_capacity(READ_BYTES, socket))
}

/// The settings of the side that calls.
pub(crate) fn caller() -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .initial_max_send_streams(STREAMS + CALLS)
        .max_concurrent_reset_streams(RESETS_REMEMBERED)
        .max_local_error_reset_streams(None)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .enable_push(false);
    builder
}

/// The settings of a server that another one has connected to.
pub(crate) fn between_servers() -> h2::server::Builder {
    let mut builder = called();
    // And a few that are being closed.
    builder.max_concurrent_streams(STREAMS_ACCEPTED_BETWEEN_SERVERS);
    builder
}

/// The settings of the side that is called.
pub(crate) fn called() -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .max_concurrent_streams(STREAMS_ACCEPTED)
        .max_concurrent_reset_streams(RESETS_REMEMBERED)
        .max_pending_accept_reset_streams(RESETS_REMEMBERED)
        .max_local_error_reset_streams(None)
        .max_send_buffer_size(SEND_BUFFER_BYTES);
    builder
}

/// Pings the peer, and returns why once it does not answer.
pub(crate) async fn watch(pings: Option<PingPong>) -> &'static str {
    let Some(mut pings) = pings else {
        return "the connection has no pings";
    };
    loop {
        tokio::time::sleep(PING_INTERVAL).await;
        match tokio::time::timeout(PING_BOUND, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            Ok(Err(_)) => return "the connection was lost",
            Err(_) => return "the peer does not answer pings",
        }
    }
}

//! WebSockets that send a short message and wait until it comes back: one at a time for the latency, and thousands that
//! are silent for the memory of the platform. Frames are written as bytes, like the requests of [`super::load`].

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::bench::host::Process;

/// What the request for a WebSocket begins with.
pub(super) const REQUEST_LINE: &str = "GET /echo HTTP/1.1\r\n";
/// Bytes of a message.
const MESSAGE_BYTES: u8 = 32;
/// Bytes of a frame from the client: two for type and length, four for the mask.
pub(super) const SENT_BYTES: usize = 6 + MESSAGE_BYTES as usize;
/// Bytes of a frame from the server.
const RETURNED_BYTES: usize = 2 + MESSAGE_BYTES as usize;
/// Bytes of the mask.
const MASK: [u8; 4] = [1, 2, 3, 4];
/// Longest head of a response, in bytes.
const HEAD_MAX: usize = 4096;
/// Number of WebSockets that are opened at the same time.
const OPENING: usize = 64;
/// How long silent WebSockets are left alone before the memory is read.
const SETTLE: Duration = Duration::from_secs(2);

/// The frame that the server sends for one of a client.
pub(super) fn returned(sent: &[u8; SENT_BYTES]) -> [u8; RETURNED_BYTES] {
    let mut frame = [0; RETURNED_BYTES];
    frame[0] = sent[0];
    frame[1] = MESSAGE_BYTES;
    for (at, byte) in frame[2..].iter_mut().enumerate() {
        *byte = sent[6 + at] ^ sent[2 + at % 4];
    }
    frame
}

/// An open WebSocket.
struct WebSocket(TcpStream);

impl WebSocket {
    async fn open(address: SocketAddr, host: &str) -> Result<Self> {
        let mut stream = TcpStream::connect(address).await.context("connect")?;
        stream.set_nodelay(true)?;
        let request = format!(
            "{REQUEST_LINE}Host: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            ensure!(head.len() < HEAD_MAX, "a long head");
            head.push(
                stream
                    .read_u8()
                    .await
                    .context("the connection ended before the response")?,
            );
        }
        if !head.starts_with(b"HTTP/1.1 101 ") {
            bail!("no WebSocket: {}", String::from_utf8_lossy(&head));
        }
        Ok(Self(stream))
    }

    /// Sends a message and waits until it comes back.
    async fn echo(&mut self) -> Result<()> {
        let mut frame = [0; SENT_BYTES];
        frame[0] = 0x82;
        frame[1] = 0x80 | MESSAGE_BYTES;
        frame[2..6].copy_from_slice(&MASK);
        for (at, byte) in (0..MESSAGE_BYTES).enumerate() {
            frame[6 + at] = byte ^ MASK[at % 4];
        }
        self.0.write_all(&frame).await?;
        let mut answer = [0; RETURNED_BYTES];
        self.0.read_exact(&mut answer).await?;
        ensure!(
            answer[2..].iter().copied().eq(0..MESSAGE_BYTES),
            "another message came back"
        );
        Ok(())
    }
}

/// The times of messages that are sent one after the other.
///
/// # Errors
/// When there is no WebSocket.
pub(super) async fn echoes(address: SocketAddr, host: &str, count: usize) -> Result<Vec<Duration>> {
    let mut socket = WebSocket::open(address, host).await?;
    for _ in 0..count.div_ceil(10) {
        socket.echo().await?;
    }
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begun = Instant::now();
        socket.echo().await?;
        times.push(begun.elapsed());
    }
    Ok(times)
}

/// Resident memory of the proxy with silent WebSockets, in KiB.
pub(super) struct Held {
    /// With none open, after some were.
    pub(super) none: u64,
    /// Open, after one message each.
    pub(super) open: u64,
    /// After all have closed.
    pub(super) closed: u64,
}

/// Opens that many WebSockets, sends a message on each, and leaves them alone.
///
/// # Errors
/// When one cannot be opened.
pub(super) async fn hold(proxy: Process, address: SocketAddr, host: &str, count: usize) -> Result<Held> {
    drop(open(address, host, OPENING).await?);
    tokio::time::sleep(SETTLE).await;
    let none = proxy.memory()?.resident;
    let mut sockets = open(address, host, count).await?;
    tokio::time::sleep(SETTLE).await;
    let open = proxy.memory()?.resident;
    for socket in &mut sockets {
        socket.echo().await.context("a WebSocket that was silent")?;
    }
    drop(sockets);
    tokio::time::sleep(SETTLE).await;
    let closed = proxy.memory()?.resident;
    Ok(Held { none, open, closed })
}

async fn open(address: SocketAddr, host: &str, count: usize) -> Result<Vec<WebSocket>> {
    let opening = stream::iter(0..count).map(|_| async move {
        let mut socket = WebSocket::open(address, host).await?;
        socket.echo().await?;
        Ok::<_, anyhow::Error>(socket)
    });
    let mut sockets = Vec::with_capacity(count);
    let mut opening = opening.buffer_unordered(OPENING);
    while let Some(socket) = opening.next().await {
        let message = || {
            format!(
                "WebSocket {} of {count}; limits are in the configuration",
                sockets.len() + 1
            )
        };
        sockets.push(socket.with_context(message)?);
    }
    Ok(sockets)
}

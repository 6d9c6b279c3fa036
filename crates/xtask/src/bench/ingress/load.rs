//! The load: kept client connections, each with one request at a time, and single downloads. Written as bytes, because an
//! HTTP library would take more time than the proxies.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Time before the measurement begins, in which connections are opened.
const WARM_UP: Duration = Duration::from_millis(500);
/// Longest head of a response, in bytes.
const HEAD_MAX: usize = 64 * 1024;
/// Bytes per read of a download.
const BLOCK: usize = 256 * 1024;

/// The result of a round.
pub(super) struct Load {
    /// The duration of each request.
    pub(super) times: Vec<Duration>,
    /// Number of requests, including those before the measurement.
    pub(super) all: usize,
    seconds: u64,
}

impl Load {
    /// Requests per second.
    pub(super) fn rate(&self) -> f64 {
        self.times.len() as f64 / self.seconds as f64
    }
}

/// Sends requests on `connections` connections for `seconds`.
///
/// # Errors
/// When a request fails.
pub(super) async fn requests(address: SocketAddr, host: &str, connections: usize, seconds: u64) -> Result<Load> {
    let begin = Instant::now() + WARM_UP;
    let end = begin + Duration::from_secs(seconds);
    let mut clients = JoinSet::new();
    for _ in 0..connections {
        let request = get("/", host);
        clients.spawn(async move {
            let mut connection = Connection::open(address).await?;
            let mut times = Vec::new();
            let mut all = 0;
            loop {
                let began = Instant::now();
                if began >= end {
                    return Ok::<_, anyhow::Error>((times, all));
                }
                let length = connection.send(&request).await?;
                connection.skip(length).await?;
                all += 1;
                if began >= begin {
                    times.push(began.elapsed());
                }
            }
        });
    }
    let mut load = Load {
        times: Vec::new(),
        all: 0,
        seconds,
    };
    while let Some(client) = clients.join_next().await {
        let (times, all) = client??;
        load.times.extend(times);
        load.all += all;
    }
    Ok(load)
}

/// Downloads this many bytes, and returns how long it took.
///
/// # Errors
/// When it fails.
pub(super) async fn download(address: SocketAddr, host: &str, bytes: u64) -> Result<Duration> {
    let mut connection = Connection::open(address).await?;
    let begun = Instant::now();
    let length = connection.send(&get(&format!("/{bytes}"), host)).await?;
    if length != bytes {
        bail!("a download has {length} instead of {bytes} bytes");
    }
    connection.skip(length).await?;
    Ok(begun.elapsed())
}

fn get(path: &str, host: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n").into_bytes()
}

/// A client connection.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The part of the buffer that was received and not yet used.
    filled: std::ops::Range<usize>,
}

impl Connection {
    async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await.context("connect")?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: vec![0; BLOCK],
            filled: 0..0,
        })
    }

    /// Sends a request and returns the length of the response's body.
    async fn send(&mut self, request: &[u8]) -> Result<u64> {
        self.stream.write_all(request).await?;
        self.filled = 0..0;
        loop {
            let got = self.stream.read(&mut self.buffer[self.filled.end..]).await?;
            self.filled.end += got;
            let received = &self.buffer[..self.filled.end];
            if let Some(at) = received.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                let length = length(&received[..at])?;
                self.filled.start = at + 4;
                return Ok(length);
            }
            if got == 0 || self.filled.end > HEAD_MAX {
                bail!("the connection ended before a response");
            }
        }
    }

    /// Receives the rest of a body.
    async fn skip(&mut self, length: u64) -> Result<()> {
        let mut left = length
            .checked_sub(self.filled.len() as u64)
            .context("more than the response")?;
        while left > 0 {
            let got = self.stream.read(&mut self.buffer).await?;
            if got == 0 {
                bail!("the connection ended within a response");
            }
            left = left.checked_sub(got as u64).context("more than the response")?;
        }
        Ok(())
    }
}

/// The length of the body, from the head of a successful response.
fn length(head: &[u8]) -> Result<u64> {
    let head = std::str::from_utf8(head)?;
    if !head.starts_with("HTTP/1.1 200 ") {
        bail!("unexpected response: {head}");
    }
    let value = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim())
    });
    Ok(value.context("a response without a length")?.parse()?)
}

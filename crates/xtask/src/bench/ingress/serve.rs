//! The HTTP server behind the proxies: as little work per request as possible, so that the proxy is measured. A request
//! for an upgrade makes the connection a WebSocket that gets its messages back.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;

use super::open_files::raise_open_files;
use super::websocket;

/// The small response.
pub(super) const SMALL: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 13\r\n\r\nHello, world!";
/// The response that makes a connection a WebSocket. The key is not that of the request, which no client here checks.
const SWITCHED: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
      Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";
/// Bytes per write of a large response.
const BLOCK: usize = 256 * 1024;
/// Longest head of a request, in bytes.
const HEAD_MAX: usize = 64 * 1024;

/// Flags of `bench serve-http`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The port on localhost, or 0 for any
    #[arg(long, default_value_t = 0)]
    port: u16,
}

/// Serves until it is killed. `/N` is a response of N bytes, every other path the small response.
///
/// # Errors
/// When the port is not available.
pub(crate) fn run(args: &Args) -> Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, args.port)).context("listen")?;
    let mut output = std::io::stdout();
    writeln!(output, "{}", listener.local_addr()?)?;
    output.flush()?;
    raise_open_files()?;
    // Thousands of WebSockets share a thread; a sandbox could not have one for each.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let sockets = WebSockets {
        runtime: runtime.handle().clone(),
        tasks: TaskTracker::new(),
    };
    loop {
        let (connection, _) = listener.accept()?;
        // One thread per connection: the fastest for a few dozen of them. It ends with its connection.
        let sockets = sockets.clone();
        std::thread::spawn(move || drop(answer(connection, &sockets)));
    }
}

/// Where WebSockets are served.
#[derive(Clone)]
struct WebSockets {
    runtime: Handle,
    tasks: TaskTracker,
}

fn answer(mut connection: TcpStream, sockets: &WebSockets) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    let mut head = Vec::with_capacity(4096);
    let mut buffer = [0; 4096];
    loop {
        let got = connection.read(&mut buffer)?;
        if got == 0 || head.len() > HEAD_MAX {
            return Ok(());
        }
        head.extend_from_slice(&buffer[..got]);
        if !head.ends_with(b"\r\n\r\n") {
            continue;
        }
        if head.starts_with(websocket::REQUEST_LINE.as_bytes()) {
            connection.write_all(SWITCHED)?;
            connection.set_nonblocking(true)?;
            let _runtime = sockets.runtime.enter();
            let connection = tokio::net::TcpStream::from_std(connection)?;
            sockets.tasks.spawn(async move { drop(echo(connection).await) });
            return Ok(());
        }
        let length: Option<usize> = head
            .split(|byte| *byte == b' ')
            .nth(1)
            .and_then(|path| std::str::from_utf8(path).ok()?.strip_prefix('/')?.parse().ok());
        head.clear();
        let Some(length) = length else {
            connection.write_all(SMALL)?;
            continue;
        };
        connection.write_all(format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").as_bytes())?;
        let block = vec![b'x'; BLOCK];
        let mut left = length;
        while left > 0 {
            let part = left.min(BLOCK);
            connection.write_all(&block[..part])?;
            left -= part;
        }
    }
}

/// Sends each message of a WebSocket back, until its connection ends.
async fn echo(mut connection: tokio::net::TcpStream) -> std::io::Result<()> {
    let mut sent = [0; websocket::SENT_BYTES];
    loop {
        connection.read_exact(&mut sent).await?;
        connection.write_all(&websocket::returned(&sent)).await?;
    }
}

/// The server on the host, as a child of this process.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    child: Child,
}

impl Server {
    /// Starts the server on a free port.
    ///
    /// # Errors
    /// When it does not start.
    pub(super) fn start() -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["bench", "serve-http"])
            .stdout(Stdio::piped())
            .spawn()
            .context("start the server")?;
        let mut line = String::new();
        let output = child.stdout.take().context("it has an output")?;
        let read = BufReader::new(output).read_line(&mut line);
        let mut server = Self {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            child,
        };
        read?;
        server.address = line.trim().parse().context("the server did not start")?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! A plain file server for comparison: hyper on one thread, files read and written on blocking threads, on a disk like
//! a sandbox's: ext4 in a sparse file behind a loop device.
//!
//! It is a separate process in its own mount namespace, so that the mount is always removed with it, and exits at the end
//! of its standard input.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::task::TaskTracker;

use crate::bench::client::client_runtime;

/// Buffer size in bytes, the same as in the agent.
const CHUNK: usize = 256 * 1024;

/// The server, as a child of this process.
pub(super) struct Plain {
    pub(super) address: SocketAddr,
    child: Child,
    _directory: TempDir,
}

impl Plain {
    /// Starts it with room for a file of `mb` MB.
    ///
    /// # Errors
    /// When a disk cannot be created or mounted, which requires root.
    pub(super) fn start(parent: &Path, mb: u64) -> Result<Self> {
        let directory = TempDir::with_prefix_in("ringfence-bench-", parent)?;
        let image = directory.path().join("disk.img");
        let mount = directory.path().join("mount");
        std::fs::create_dir(&mount)?;
        File::create(&image)?.set_len((mb + mb / 4 + 256) * 1_000_000)?;
        let made = Command::new("mkfs.ext4")
            .args(["-q", "-F"])
            .arg(&image)
            .status()
            .context("run mkfs.ext4")?;
        if !made.success() {
            bail!("mkfs.ext4 ended with {made}");
        }
        let script = "mount -o loop \"$1\" \"$2\" && exec \"$3\" bench plain-files \"$2\"";
        let mut child = Command::new("unshare")
            .args(["--mount", "sh", "-c", script, "sh"])
            .args([&image, &mount, &std::env::current_exe()?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("run unshare")?;
        let mut line = String::new();
        let output = child.stdout.take().context("it has an output")?;
        BufReader::new(output).read_line(&mut line)?;
        let Ok(address) = line.trim().parse() else {
            let _ = child.kill();
            let ended = child.wait()?;
            bail!("it did not start: {ended}");
        };
        Ok(Self {
            address,
            child,
            _directory: directory,
        })
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // The disk is free once the process is gone.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Flags of `bench plain-files`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the files are
    dir: PathBuf,
}

/// Serves until the standard input ends.
///
/// # Errors
/// When no port is available.
pub(crate) fn serve(args: &Args) -> Result<()> {
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::abort();
    });
    client_runtime()?.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        writeln!(std::io::stdout(), "{}", listener.local_addr()?)?;
        let directory: Arc<Path> = args.dir.as_path().into();
        let connections = TaskTracker::new();
        loop {
            let (connection, _) = listener.accept().await?;
            connection.set_nodelay(true)?;
            let directory = Arc::clone(&directory);
            connections.spawn(async move {
                let service = service_fn(|request| answer(Arc::clone(&directory), request));
                let _ = http1::Builder::new()
                    .serve_connection(TokioIo::new(connection), service)
                    .await;
            });
        }
    })
}

type Answer = Response<UnsyncBoxBody<Bytes, std::io::Error>>;

async fn answer(directory: Arc<Path>, request: Request<Incoming>) -> std::io::Result<Answer> {
    let path = directory.join(request.uri().path().trim_start_matches('/'));
    if request.method() == Method::GET {
        return send(path).await;
    }
    let mut file = blocking(move || File::create(path)).await?;
    let mut body = request.into_body();
    let mut offset = 0;
    let mut pieces = Vec::new();
    let mut length = 0;
    loop {
        let data = body.frame().await.transpose().map_err(std::io::Error::other)?;
        let last = data.is_none();
        if let Some(Ok(data)) = data.map(Frame::into_data) {
            length += data.len();
            pieces.push(data);
        }
        if last || length >= CHUNK {
            let write: Vec<Bytes> = std::mem::take(&mut pieces);
            let at = offset;
            file = blocking(move || {
                let mut at = at;
                for piece in write {
                    file.write_all_at(&piece, at)?;
                    at += piece.len() as u64;
                }
                Ok(file)
            })
            .await?;
            offset += length as u64;
            length = 0;
        }
        if last {
            let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
            return Ok(Response::new(body));
        }
    }
}

async fn send(path: PathBuf) -> std::io::Result<Answer> {
    let (file, size) = blocking(move || {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        Ok((Arc::new(file), size))
    })
    .await?;
    let chunks = stream::iter((0..size).step_by(CHUNK)).then(move |offset| {
        let file = Arc::clone(&file);
        blocking(move || {
            let mut chunk = vec![0; CHUNK];
            let length = file.read_at(&mut chunk, offset)?;
            chunk.truncate(length);
            Ok(Bytes::from(chunk))
        })
    });
    let body = StreamBody::new(chunks.map_ok(Frame::data)).boxed_unsync();
    let response = Response::builder()
        .status(StatusCode::OK)
        .header(http::header::CONTENT_LENGTH, size);
    response.body(body).map_err(std::io::Error::other)
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> std::io::Result<T> + Send + 'static) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other)?
}

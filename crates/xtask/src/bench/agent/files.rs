//! File transfers to and from a sandbox, compared with a plain file server that uses the same kind of disk.
//!
//! The plain server is reached without the platform between, so the difference is relay and agent together. Files that
//! were written are read from the page cache, on both sides. What arrives packed is counted by the size of the file and
//! not unpacked.

use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode, request};
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, SizeHint};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use measure::table;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

use super::reference::Plain;
use super::subject::Subject;

/// Bytes of what a file repeats. Much longer than the window of gzip, so that random bytes stay random to it.
const PATTERN: usize = 1 << 20;

/// Measures `repeat` transfers of each kind and size. The disk of the plain server is in `dir`.
pub(super) async fn measure(subject: &Subject, file_mb: &[u64], repeat: usize, dir: &Path) -> Result<String> {
    let largest = file_mb.iter().max().copied().unwrap_or_default();
    let plain = Plain::start(dir, largest).context("start the plain file server")?;
    let mut rows = Vec::new();
    for mb in file_mb {
        for (content, pattern) in [("random", random()?), ("text", text())] {
            let file = File {
                bytes: mb * 1_000_000,
                pattern,
            };
            let cell = |what: &str| format!("{what}, {mb} MB, {content}");
            let (agent, server) = (Way::Agent(subject), Way::Plain(&plain));
            // Alternating, so that other load on the machine affects all alike.
            let mut times: [Vec<Duration>; 5] = std::array::from_fn(|_| Vec::new());
            for _ in 0..repeat {
                times[0].push(agent.upload(&file).await?);
                times[1].push(server.upload(&file).await?);
                times[2].push(agent.download(&file, None).await?.0);
                times[3].push(server.download(&file, None).await?.0);
                times[4].push(agent.download(&file, Some("gzip")).await?.0);
            }
            let (_, coding) = agent.download(&file, Some("gzip")).await?;
            let names = [
                cell("upload"),
                cell("upload, plain server"),
                cell("download"),
                cell("download, plain server"),
                cell(&format!("download, gzip accepted, {coding} sent")),
            ];
            rows.extend(names.iter().zip(times).map(|(name, times)| row(name, *mb, times)));
        }
    }
    let header = ["MB/s", "median", "slowest", "fastest", "n"];
    Ok(format!("\n{}", table::columns(&header, rows)))
}

fn row(what: &str, mb: u64, mut times: Vec<Duration>) -> Vec<String> {
    times.sort_unstable();
    let rate = |time: Option<&Duration>| time.map_or("-".to_owned(), |t| format!("{:.0}", mb as f64 / t.as_secs_f64()));
    vec![
        what.to_owned(),
        rate(times.get(times.len() / 2)),
        rate(times.last()),
        rate(times.first()),
        times.len().to_string(),
    ]
}

/// A file that repeats a pattern.
#[derive(Clone)]
struct File {
    bytes: u64,
    pattern: Bytes,
}

fn random() -> Result<Bytes> {
    use std::io::Read as _;
    let mut bytes = vec![0; PATTERN];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.into())
}

/// Text like that of a log, which can be compressed.
fn text() -> Bytes {
    let mut text = String::new();
    let mut n = 0_u64;
    while text.len() < PATTERN {
        n += 1;
        text.push_str(&format!(
            "2026-01-01T00:00:{:02}Z INFO request {n} took {} us, status 200\n",
            n % 60,
            n * 7919 % 10_007
        ));
    }
    text.truncate(PATTERN);
    text.into()
}

/// Source and destination of transfers.
enum Way<'a> {
    Agent(&'a Subject),
    Plain(&'a Plain),
}

impl Way<'_> {
    async fn connect(&self) -> Result<TcpStream> {
        match self {
            Self::Agent(subject) => subject.platform.connect().await,
            Self::Plain(plain) => Ok(TcpStream::connect(plain.address).await?),
        }
    }

    fn request(&self, method: Method) -> request::Builder {
        match self {
            Self::Agent(subject) => {
                let path = "/files?path=%2Fhome%2Fuser%2Fbench&username=user";
                subject.platform.agent_request(&subject.sandbox, method, path)
            }
            Self::Plain(_) => Request::builder().method(method).uri("/bench").header(HOST, "plain"),
        }
    }

    async fn upload(&self, file: &File) -> Result<Duration> {
        let request = self
            .request(Method::POST)
            .header(CONTENT_TYPE, "application/octet-stream")
            .body(Upload {
                left: file.bytes,
                pattern: file.pattern.clone(),
            })?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(self.connect().await?)).await?;
        let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
        let begun = Instant::now();
        let response = sender.send_request(request).await.context("upload")?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        if status != StatusCode::OK {
            bail!("an upload was answered {status}: {}", String::from_utf8_lossy(&body));
        }
        Ok(begun.elapsed())
    }

    /// The duration, and the content coding of the response.
    async fn download(&self, file: &File, coding: Option<&'static str>) -> Result<(Duration, String)> {
        let mut request = self.request(Method::GET);
        if let Some(coding) = coding {
            request = request.header(ACCEPT_ENCODING, coding);
        }
        let nothing = Upload {
            left: 0,
            pattern: Bytes::new(),
        };
        let (mut sender, connection) = http1::handshake(TokioIo::new(self.connect().await?)).await?;
        let _driver = AbortOnDropHandle::new(tokio::spawn(connection));
        let begun = Instant::now();
        let response = sender.send_request(request.body(nothing)?).await.context("download")?;
        let status = response.status();
        if status != StatusCode::OK {
            bail!("a download was answered {status}");
        }
        let coding = response.headers().get(CONTENT_ENCODING);
        let coding = coding
            .and_then(|coding| coding.to_str().ok())
            .unwrap_or("identity")
            .to_owned();
        let mut body = response.into_body();
        let mut got = 0;
        while let Some(frame) = body.frame().await {
            got += frame?.data_ref().map_or(0, Bytes::len) as u64;
        }
        if coding == "identity" && got != file.bytes {
            bail!("a download had {got} of {} bytes", file.bytes);
        }
        Ok((begun.elapsed(), coding))
    }
}

/// A body that repeats a pattern.
struct Upload {
    left: u64,
    pattern: Bytes,
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut TaskContext<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let length = self.pattern.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        self.left -= length as u64;
        Poll::Ready(Some(Ok(Frame::data(self.pattern.slice(..length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

//! The benchmark client: HTTP/1.1 over kept-alive connections, with the operations of a sandbox's lifecycle.
//!
//! It sends the same requests as the SDKs and does nothing else, so that the measured times are those of the platform.

use std::fmt;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use protocol::process::SERVICE;
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpStream;
use tokio_util::task::AbortOnDropHandle;

use crate::process::{Command, ProcessEvent, ProcessEvents};

/// Timeout of a request, as in the SDKs.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Lifetime of the sandboxes, in seconds: sandboxes that remain after this client was killed expire.
const SANDBOX_TIMEOUT_S: u32 = 900;
/// The stage of a create request that got a sandbox which was kept ready.
const CLAIM: &str = "claim";

/// The address and credentials of the platform under measurement.
#[derive(Debug, Clone)]
pub struct Target {
    /// Address of the platform.
    pub address: SocketAddr,
    /// The `Host` header.
    host: HeaderValue,
    key: HeaderValue,
    template: String,
    /// Metadata of the sandboxes of this run, so that remaining ones can be found.
    pub run: String,
}

impl Target {
    /// Resolves the address of a base URL.
    ///
    /// # Errors
    /// When the URL is not an http URL, its host name does not resolve, or the key is not valid in a header.
    pub async fn find(url: &str, key: &str, template: String, run: String) -> Result<Self> {
        let uri: http::Uri = url.parse().with_context(|| format!("{url:?} is not a URL"))?;
        if uri.scheme_str() != Some("http") {
            bail!("{url:?} must begin with http://, the only scheme that bench supports");
        }
        let authority = uri.authority().with_context(|| format!("{url:?} has no host"))?;
        let port = authority.port_u16().unwrap_or(80);
        let name = authority.host().trim_matches(['[', ']']);
        let mut addresses = tokio::net::lookup_host((name, port))
            .await
            .with_context(|| format!("look up {name}"))?;
        let address = addresses.next().with_context(|| format!("{name} has no address"))?;
        let mut key = HeaderValue::try_from(key).map_err(|_| anyhow!("the API key contains control characters"))?;
        key.set_sensitive(true);
        Ok(Self {
            address,
            host: HeaderValue::try_from(authority.as_str())?,
            key,
            template,
            run,
        })
    }

    /// Opens a connection without Nagle's algorithm.
    ///
    /// # Errors
    /// When the connection is not established within the timeout of a request.
    pub async fn connect(&self) -> Result<TcpStream> {
        let address = self.address;
        let connected = tokio::time::timeout(REQUEST_TIMEOUT, TcpStream::connect(address)).await;
        let stream = connected
            .with_context(|| format!("connect to {address}: timeout"))?
            .with_context(|| format!("connect to {address}"))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// The head of a request to the agent of a sandbox, as the user `user`.
    #[must_use]
    pub fn agent_request(&self, sandbox: &Sandbox, method: Method, path: &str) -> request::Builder {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.host)
            .header("e2b-sandbox-id", &sandbox.id)
            .header("e2b-sandbox-port", protocol::agent::PORT)
            .header(AUTHORIZATION, format!("Basic {}", STANDARD.encode("user:")));
        match &sandbox.access_token {
            Some(token) => request.header("x-access-token", token),
            None => request,
        }
    }
}

/// A created sandbox.
#[derive(Clone, Deserialize)]
pub struct Sandbox {
    /// Id of the sandbox.
    #[serde(rename = "sandboxID")]
    pub id: String,
    #[serde(rename = "envdAccessToken")]
    access_token: Option<String>,
}

impl fmt::Debug for Sandbox {
    /// Does not show the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sandbox").field("id", &self.id).finish_non_exhaustive()
    }
}

/// What became of one sandbox of a fork.
#[derive(Deserialize)]
struct Forked {
    sandbox: Option<Sandbox>,
}

/// The response to a create request.
#[derive(Debug)]
pub struct Created {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// Time from the first byte of the request to the last of the response.
    pub took: Duration,
    /// Durations of the stages as reported by the platform.
    pub stages: Vec<(String, Duration)>,
}

impl Created {
    /// Whether the sandbox was one that the platform had kept ready.
    #[must_use]
    pub fn was_ready(&self) -> bool {
        self.stages.iter().any(|(name, _)| name == CLAIM)
    }
}

/// A response of the REST API.
#[derive(Debug)]
pub struct Answer {
    /// Time from the first byte of the request to the last of the response.
    pub took: Duration,
    /// Headers of the answer.
    pub headers: HeaderMap,
    /// Body of the answer.
    pub body: Bytes,
}

/// A kept-alive connection to the platform, which is opened again after it was closed.
#[derive(Debug)]
pub struct Client {
    platform: Target,
    connection: Option<(SendRequest<Full<Bytes>>, AbortOnDropHandle<()>)>,
}

impl Client {
    /// A client that is not connected yet.
    #[must_use]
    pub fn new(platform: Target) -> Self {
        Self {
            platform,
            connection: None,
        }
    }

    /// Creates a sandbox.
    ///
    /// # Errors
    /// When the response is not 201, or none is received.
    pub async fn create(&mut self) -> Result<Created> {
        let body = json!({
            "templateID": self.platform.template,
            "timeout": SANDBOX_TIMEOUT_S,
            "metadata": {"ringfence-bench": self.platform.run},
        });
        let request = self.api(Method::POST, "/v2/sandboxes", Bytes::from(body.to_string()))?;
        self.connect().await?;
        let begun = Instant::now();
        let (status, headers, body) = self.exchange(request).await.context("create")?;
        let took = begun.elapsed();
        expect(status, StatusCode::CREATED, &body).context("create")?;
        let sandbox = serde_json::from_slice(&body).context("read the response to the create request")?;
        Ok(Created {
            sandbox,
            took,
            stages: stages(&headers),
        })
    }

    /// Runs `/bin/echo` in a sandbox and returns the time of its first output.
    ///
    /// # Errors
    /// When the output is missing or unexpected.
    pub async fn first_output(&mut self, sandbox: &Sandbox) -> Result<Instant> {
        let echo = async {
            let command = Command::new("/bin/echo", &["ready"]);
            let mut events = self.start(sandbox, &command).await?;
            let mut first = None;
            while let Some(event) = events.next().await? {
                if let ProcessEvent::Output(output) = event
                    && first.is_none()
                {
                    if !output.starts_with(b"ready") {
                        bail!("unexpected output");
                    }
                    first = Some(Instant::now());
                }
            }
            first.context("the process exited without output")
        };
        within(echo).await.context("first output")
    }

    /// Starts a process in a sandbox. Its events must be read to their end before the next request.
    ///
    /// # Errors
    /// When the response is not 200, or none is received.
    pub async fn start(&mut self, sandbox: &Sandbox, command: &Command<'_>) -> Result<ProcessEvents> {
        let request = self
            .platform
            .agent_request(sandbox, Method::POST, &format!("{SERVICE}Start"))
            .header(CONTENT_TYPE, command.codec.stream_content_type())
            .header("connect-protocol-version", "1")
            .body(Full::new(command.message()))?;
        self.connect().await?;
        let response = self.send(request).await?;
        let status = response.status();
        if status != StatusCode::OK {
            let body = response.into_body().collect().await?.to_bytes();
            return Err(unexpected(status, StatusCode::OK, &body));
        }
        Ok(ProcessEvents::new(response.into_body(), command.codec))
    }

    /// Deletes a sandbox and returns the duration.
    ///
    /// # Errors
    /// When the response is not 204, or none is received.
    pub async fn delete(&mut self, id: &str) -> Result<Duration> {
        let request = self.api(Method::DELETE, &format!("/sandboxes/{id}"), Bytes::new())?;
        self.connect().await?;
        let begun = Instant::now();
        let (status, _, body) = self.exchange(request).await.context("delete")?;
        expect(status, StatusCode::NO_CONTENT, &body).context("delete")?;
        Ok(begun.elapsed())
    }

    /// Pauses a sandbox and returns the duration.
    ///
    /// # Errors
    /// When the response is not 204, or none is received.
    pub async fn pause(&mut self, id: &str) -> Result<Duration> {
        let request = self.api(Method::POST, &format!("/sandboxes/{id}/pause"), Bytes::new())?;
        self.connect().await?;
        let begun = Instant::now();
        let (status, _, body) = self.exchange(request).await.context("pause")?;
        expect(status, StatusCode::NO_CONTENT, &body).context("pause")?;
        Ok(begun.elapsed())
    }

    /// Connects to a sandbox that is paused, so that it runs again, and returns the duration.
    ///
    /// # Errors
    /// When the response is not 201, or none is received.
    pub async fn resume(&mut self, id: &str) -> Result<Duration> {
        let body = json!({"timeout": SANDBOX_TIMEOUT_S}).to_string();
        let request = self.api(Method::POST, &format!("/sandboxes/{id}/connect"), Bytes::from(body))?;
        self.connect().await?;
        let begun = Instant::now();
        let (status, _, body) = self.exchange(request).await.context("connect")?;
        expect(status, StatusCode::CREATED, &body).context("connect")?;
        Ok(begun.elapsed())
    }

    /// Forks a sandbox into one more, and returns that one and the duration; none if the host cannot fork sandboxes.
    ///
    /// # Errors
    /// When the response is neither 201 nor 501, none is received, or it says that the new sandbox does not run.
    pub async fn fork(&mut self, id: &str) -> Result<Option<(Sandbox, Duration)>> {
        let body = json!({"timeout": SANDBOX_TIMEOUT_S, "count": 1}).to_string();
        let request = self.api(Method::POST, &format!("/sandboxes/{id}/fork"), Bytes::from(body))?;
        self.connect().await?;
        let begun = Instant::now();
        let (status, _, body) = self.exchange(request).await.context("fork")?;
        let took = begun.elapsed();
        if status == StatusCode::NOT_IMPLEMENTED {
            return Ok(None);
        }
        expect(status, StatusCode::CREATED, &body).context("fork")?;
        let made: Vec<Forked> = serde_json::from_slice(&body).context("read the response to the fork request")?;
        let sandbox = made.into_iter().find_map(|forked| forked.sandbox);
        let sandbox = sandbox.ok_or_else(|| unexpected(status, StatusCode::CREATED, &body).context("fork"))?;
        Ok(Some((sandbox, took)))
    }

    /// Ids of the sandboxes of this run, at most a page of them.
    ///
    /// # Errors
    /// When the response is not 200, or none is received.
    pub async fn of_this_run(&mut self) -> Result<Vec<String>> {
        let path = format!(
            "/v2/sandboxes?limit=100&metadata=ringfence-bench%3D{}",
            self.platform.run
        );
        let answer = self.get(&path).await?;
        let sandboxes: Vec<Sandbox> =
            serde_json::from_slice(&answer.body).context("read the response to the list request")?;
        Ok(sandboxes.into_iter().map(|sandbox| sandbox.id).collect())
    }

    /// Sends a GET request for `path` to the REST API.
    ///
    /// # Errors
    /// When the response is not 200, or none is received.
    pub async fn get(&mut self, path: &str) -> Result<Answer> {
        let request = self.api(Method::GET, path, Bytes::new())?;
        self.connect().await?;
        let begun = Instant::now();
        let (status, headers, body) = self.exchange(request).await.with_context(|| format!("get {path}"))?;
        let took = begun.elapsed();
        expect(status, StatusCode::OK, &body).with_context(|| format!("get {path}"))?;
        Ok(Answer { took, headers, body })
    }

    /// Sends a POST request with a JSON body and one more header to `path`.
    ///
    /// # Errors
    /// When the response is not 200, or none is received.
    pub async fn post(&mut self, path: &str, header: (&str, &str), body: Bytes) -> Result<Answer> {
        let mut request = self.api(Method::POST, path, body)?;
        request
            .headers_mut()
            .insert(HeaderName::try_from(header.0)?, HeaderValue::try_from(header.1)?);
        self.connect().await?;
        let begun = Instant::now();
        let (status, headers, body) = self.exchange(request).await.with_context(|| format!("post {path}"))?;
        let took = begun.elapsed();
        expect(status, StatusCode::OK, &body).with_context(|| format!("post {path}"))?;
        Ok(Answer { took, headers, body })
    }

    fn api(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.platform.host)
            .header("x-api-key", &self.platform.key);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        Ok(request.body(Full::new(body))?)
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> Result<(StatusCode, HeaderMap, Bytes)> {
        within(async {
            let (head, body) = self.send(request).await?.into_parts();
            let body = body.collect().await.context("read the response")?.to_bytes();
            Ok((head.status, head.headers, body))
        })
        .await
    }

    /// Sends a request. If the platform had closed the kept-alive connection before receiving it, it is sent again.
    async fn send(&mut self, mut request: Request<Full<Bytes>>) -> Result<Response<Incoming>> {
        for _ in 0..2 {
            self.connect().await?;
            let Some((sender, _)) = &mut self.connection else { break };
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                Err(mut error) => {
                    self.connection = None;
                    match error.take_message() {
                        Some(unsent) => request = unsent,
                        None => return Err(error.into_error()).context("send the request"),
                    }
                }
            }
        }
        bail!("{} closes connections without reading a request", self.platform.address)
    }

    /// Ensures that the connection is ready, so that connecting is not measured.
    async fn connect(&mut self) -> Result<()> {
        if let Some((sender, _)) = &mut self.connection
            && sender.ready().await.is_ok()
        {
            return Ok(());
        }
        let stream = self.platform.connect().await?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        #[expect(clippy::disallowed_methods, reason = "the handle ends it with the connection")]
        let driver = tokio::spawn(async {
            // Errors are reported to the request that is waiting on the connection.
            let _ = connection.await;
        });
        self.connection = Some((sender, AbortOnDropHandle::new(driver)));
        Ok(())
    }
}

/// Gives up after [`REQUEST_TIMEOUT`].
async fn within<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(REQUEST_TIMEOUT, work)
        .await
        .map_err(|_| anyhow!("no response within {} s", REQUEST_TIMEOUT.as_secs()))?
}

fn expect(got: StatusCode, want: StatusCode, body: &Bytes) -> Result<()> {
    if got == want {
        Ok(())
    } else {
        Err(unexpected(got, want, body))
    }
}

fn unexpected(got: StatusCode, want: StatusCode, body: &Bytes) -> anyhow::Error {
    let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
    anyhow!("status {got} instead of {want}: {text}")
}

/// The stages of a `Server-Timing` header: `name;dur=<milliseconds>`, separated by commas.
fn stages(headers: &HeaderMap) -> Vec<(String, Duration)> {
    headers
        .get_all("server-timing")
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|entry| {
            let (name, parameters) = entry.trim().split_once(';')?;
            let dur = parameters
                .split(';')
                .find_map(|parameter| parameter.trim().strip_prefix("dur="))?;
            let seconds = dur.parse::<f64>().ok()? / 1000.0;
            Some((name.to_owned(), Duration::try_from_secs_f64(seconds).ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_timing_is_read() {
        let mut headers = HeaderMap::new();
        headers.append(
            "server-timing",
            HeaderValue::from_static("auth;dur=0.25, start;desc=\"x\";dur=4.5,cache,bad;dur=x"),
        );
        headers.append("server-timing", HeaderValue::from_static("total;dur=-1, init;dur=2"));
        let want = [("auth", 250), ("start", 4500), ("init", 2000)];
        let want: Vec<_> = want
            .iter()
            .map(|&(name, us)| (name.to_owned(), Duration::from_micros(us)))
            .collect();
        assert_eq!(stages(&headers), want);
    }

    #[tokio::test]
    async fn only_plain_http_urls_are_taken() {
        for url in ["", "127.0.0.1", "https://127.0.0.1:1", "ftp://127.0.0.1", "/path"] {
            let found = Target::find(url, "e2b_00", "base".to_owned(), "r".to_owned()).await;
            assert!(found.is_err(), "{url}");
        }
        let found = Target::find("http://[::1]:8080/", "e2b_00", "base".to_owned(), "r".to_owned()).await;
        assert_eq!(
            found.map(|platform| platform.address).unwrap(),
            "[::1]:8080".parse().unwrap()
        );
    }
}

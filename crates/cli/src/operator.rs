//! Requests to the platform of a data directory, through the operator socket.

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body::Body;
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use server::operator::{OperatorError, OperatorSocket, STREAM_PROTOCOL};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use crate::data_dir::DataDir;
use crate::requests;

/// Largest answer that is read, in bytes: some 10,000 log entries or sandboxes.
const ANSWER_MAX: usize = 256 << 20;

/// Sends a request and decodes the body of a success.
pub(crate) async fn ask<T: DeserializeOwned>(dir: &DataDir, method: Method, path: &str) -> Result<T> {
    let body = answer(dir, method, path).await?;
    decode(&body)
}

/// Decodes the body of a success.
pub(crate) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).context("decode the response of the platform; does it run another version?")
}

/// Sends a request and returns the body of a success.
pub(crate) async fn answer(dir: &DataDir, method: Method, path: &str) -> Result<Bytes> {
    exchange(dir, method, path, Empty::<Bytes>::new(), read).await
}

/// Reads a body.
pub(crate) async fn read(body: Incoming) -> Result<Bytes> {
    requests::whole(body, ANSWER_MAX).await
}

/// Sends a request with a body, and gives the body of a success to `take`.
pub(crate) async fn exchange<B, T>(
    dir: &DataDir,
    method: Method,
    path: &str,
    body: B,
    take: impl AsyncFnOnce(Incoming) -> Result<T>,
) -> Result<T>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let stream = connect(dir).await?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "operator")
        .body(body)?;
    let sent = requests::send(stream, request).await;
    let (response, _connection) = sent.context("send the request to the platform")?;
    let status = response.status();
    if status.is_success() {
        return take(response.into_body()).await;
    }
    let body = read(response.into_body()).await?;
    Err(refusal(status, &body, path))
}

/// Opens a byte stream by an upgrade of the connection.
///
/// # Errors
/// When no platform runs, or it refuses.
pub(crate) async fn stream(dir: &DataDir, path: &str) -> Result<Upgraded> {
    let stream = connect(dir).await?;
    let request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header(header::HOST, "operator")
        .header(header::CONNECTION, "upgrade")
        .header(header::UPGRADE, STREAM_PROTOCOL)
        .body(Empty::<Bytes>::new())?;
    let (mut requests, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let mut driver = JoinSet::new();
    driver.spawn(async move {
        // Its errors are also those of the request.
        let _ = connection.with_upgrades().await;
    });
    let sent = requests.send_request(request).await;
    let response = sent.context("send the request to the platform")?;
    let status = response.status();
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return hyper::upgrade::on(response).await.context("open a stream");
    }
    let body = read(response.into_body()).await?;
    Err(refusal(status, &body, path))
}

/// Checks that a text may be the id of a sandbox, and so part of a path.
///
/// # Errors
/// When it is not.
pub(crate) fn check_id(id: &str) -> Result<()> {
    if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        bail!("{id:?} is not a sandbox ID; see `ringfence sandbox list`");
    }
    Ok(())
}

async fn connect(dir: &DataDir) -> Result<UnixStream> {
    OperatorSocket::connect(dir.path()).await.map_err(|error| {
        let shown = dir.path().display();
        match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                anyhow!("no platform runs on {shown}; start it with `ringfence up` (running sandboxes are adopted)")
            }
            _ => anyhow!(error).context(format!("connect to the platform on {shown}")),
        }
    })
}

/// The error of a response that is no success.
fn refusal(status: StatusCode, body: &[u8], path: &str) -> anyhow::Error {
    match serde_json::from_slice::<OperatorError>(body) {
        Ok(error) => anyhow!(error.message),
        Err(_) if status == StatusCode::NOT_FOUND => {
            anyhow!("the platform does not support {path}; is it an older version?")
        }
        Err(_) => anyhow!("the platform answered {status}"),
    }
}

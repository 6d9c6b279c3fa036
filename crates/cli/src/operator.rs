//! Requests to the platform of a data directory, through the operator socket.

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body::Body;
use http_body_util::Empty;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use server::operator::{OperatorError, OperatorSocket};

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
    let stream = OperatorSocket::connect(dir.path()).await.map_err(|error| {
        let shown = dir.path().display();
        match error.kind() {
            std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => {
                anyhow!("no platform runs on {shown}; start it with `ringfence up` (running sandboxes are adopted)")
            }
            _ => anyhow!(error).context(format!("connect to the platform on {shown}")),
        }
    })?;
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::HOST, "operator")
        .body(body)?;
    let sent = requests::send(stream, request).await;
    let (response, _connection) = sent.context("send the request to the platform")?;
    let status = response.status();
    if status.is_success() {
        return take(response.into_body()).await;
    }
    let body = read(response.into_body()).await?;
    match serde_json::from_slice::<OperatorError>(&body) {
        Ok(error) => bail!(error.message),
        Err(_) if status == StatusCode::NOT_FOUND => {
            bail!("the platform does not support {path}; is it an older version?")
        }
        Err(_) => bail!("the platform answered {status}"),
    }
}

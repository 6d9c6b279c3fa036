//! Requests to the REST API.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, Uri};
use http_body_util::{Full, StreamBody};
use hyper::body::{Body, Frame};
use serde_json::Value;
use tokio::fs::File;
use tokio_util::io::ReaderStream;

use crate::requests::{self, Server, connector, roots_of_host};

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a request may take, uploads excepted.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an upload may take, as in the SDKs.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);
/// Largest answer that is read, in bytes.
const ANSWER_MAX: usize = 64 << 20;
/// Size of a piece of an upload, in bytes.
const PIECE: usize = 128 << 10;

/// A client of one platform. Each request has a connection of its own.
pub(super) struct Client {
    server: Server,
    host: HeaderValue,
    key: HeaderValue,
}

impl fmt::Debug for Client {
    /// Does not show the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// A client for a base URL and an API key.
    pub(super) fn new(url: &str, key: &str) -> Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("{url:?} is not a URL"))?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => bail!("{url:?} must begin with http:// or https://"),
        };
        let authority = uri.authority().with_context(|| format!("{url:?} has no host"))?;
        let mut key = HeaderValue::try_from(key).map_err(|_| anyhow!("the API key contains control characters"))?;
        key.set_sensitive(true);
        Ok(Self {
            host: HeaderValue::try_from(authority.as_str())?,
            server: Server {
                is_tls,
                authority: authority.clone(),
            },
            key,
        })
    }

    async fn exchange<B>(&self, request: Request<B>, timeout: Duration) -> Result<Bytes>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let tls = connector(roots_of_host());
        let stream = self.server.connect(&tls, CONNECT_TIMEOUT).await?;
        let exchange = async {
            let (response, _connection) = requests::send(stream, request).await?;
            let status = response.status();
            let body = requests::whole(response.into_body(), ANSWER_MAX).await?;
            Ok::<_, anyhow::Error>((status, body))
        };
        let exchanged = tokio::time::timeout(timeout, exchange).await;
        let (status, body) = exchanged
            .map_err(|_| anyhow!("the platform did not answer in time"))?
            .context("send the request to the platform")?;
        if status.is_success() {
            return Ok(body);
        }
        let message = serde_json::from_slice::<Value>(&body).ok();
        let message = message.and_then(|message| message["message"].as_str().map(crate::output::printable));
        match message {
            Some(message) => bail!("{message}"),
            None => bail!("the platform answered {status}"),
        }
    }

    /// Sends a request with JSON and returns the body of a success.
    pub(super) async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Bytes> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.host)
            .header("x-api-key", &self.key);
        let request = match body {
            Some(body) => request
                .header(CONTENT_TYPE, "application/json")
                .body(Full::new(Bytes::from(body.to_string())))?,
            None => request.body(Full::default())?,
        };
        self.exchange(request, REQUEST_TIMEOUT).await
    }

    /// Sends a request with JSON and reads JSON.
    pub(super) async fn json(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let answer = self.send(method, path, body).await?;
        serde_json::from_slice(&answer).context("decode the response of the platform")
    }

    /// Uploads a file for builds, unless the platform has one with this hash. Whether it was sent.
    pub(super) async fn upload(&self, template: &str, hash: &str, file: std::fs::File) -> Result<bool> {
        let place = self
            .json(Method::GET, &format!("/templates/{template}/files/{hash}"), None)
            .await?;
        if place["present"] == true {
            return Ok(false);
        }
        let url: Uri = place["url"]
            .as_str()
            .unwrap_or_default()
            .parse()
            .context("read the address of the upload")?;
        let path = url.path_and_query().context("the address of the upload has no path")?;
        let length = file.metadata()?.len();
        let content = ReaderStream::with_capacity(File::from_std(file), PIECE);
        let content = futures_util::TryStreamExt::map_ok(content, Frame::data);
        // The address is signed and needs no key.
        let request = Request::put(path.as_str())
            .header(HOST, &self.host)
            .header(CONTENT_LENGTH, length)
            .body(StreamBody::new(content))?;
        self.exchange(request, UPLOAD_TIMEOUT).await.context("upload files")?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_have_a_scheme() {
        let client = Client::new("https://[::1]/", "key").unwrap();
        let server = &client.server;
        assert_eq!((server.is_tls, server.host(), server.port()), (true, "::1", 443));
        assert!(!format!("{client:?}").contains("key"));
        let client = Client::new("http://localhost:3000", "key").unwrap();
        assert_eq!((client.server.is_tls, client.server.port()), (false, 3000));
        for url in ["localhost:3000", "ftp://x", "/x", ""] {
            assert!(Client::new(url, "key").is_err(), "{url}");
        }
    }
}

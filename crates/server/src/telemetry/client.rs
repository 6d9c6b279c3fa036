//! Sends one export to the receiver.
//!
//! Each export has a connection of its own, redirects are not followed, the environment has no say (no proxy), and of the
//! answer a bounded part is read. Everything takes a bounded time. Nothing that the receiver writes reaches the log.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use prost::Message as _;
use proxy::egress::host_roots;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::message::ExportResponse;
use super::settings::{Endpoint, TelemetrySettings};

/// How long an export may take, from looking up the host to the end of the answer.
const EXCHANGE_BOUND: Duration = Duration::from_secs(10);
/// Maximum number of headers of an answer.
const HEADERS_MAX: usize = 100;
/// Maximum size of the head of an answer, in bytes.
const HEAD_MAX: usize = 16 << 10;
/// How much of the body of an answer is read, in bytes. What is needed of it takes twenty.
const BODY_MAX: usize = 16 << 10;
/// Longest pause that a receiver may ask for.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(300);
const AGENT: &str = concat!("ringfence/", env!("CARGO_PKG_VERSION"));

/// Why an export was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExportError {
    /// No connection was made: there is no address, or nothing listens.
    Connect,
    /// The certificate is not valid, or there is no TLS.
    Tls,
    /// There was no answer in time.
    Timeout,
    /// What came back is not an answer.
    Answer,
    /// The receiver answered with another status than 2xx.
    Status {
        status: StatusCode,
        /// How long it asks to wait.
        retry_after: Option<Duration>,
    },
}

impl ExportError {
    /// Whether the same export may be accepted later, by the rules of the protocol.
    pub(super) fn is_temporary(self) -> bool {
        match self {
            Self::Connect | Self::Tls | Self::Timeout | Self::Answer => true,
            Self::Status { status, .. } => matches!(status.as_u16(), 429 | 502 | 503 | 504),
        }
    }

    /// How long the receiver asks to wait.
    pub(super) fn retry_after(self) -> Option<Duration> {
        match self {
            Self::Status { retry_after, .. } => retry_after,
            Self::Connect | Self::Tls | Self::Timeout | Self::Answer => None,
        }
    }
}

impl fmt::Display for ExportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Connect => f.write_str("no connection"),
            Self::Tls => f.write_str("no TLS, or its certificate is not trusted"),
            Self::Timeout => write!(f, "no answer within {} s", EXCHANGE_BOUND.as_secs()),
            Self::Answer => f.write_str("the answer is not HTTP"),
            Self::Status { status, .. } => write!(f, "status {}", status.as_u16()),
        }
    }
}

/// The client of the receiver.
pub(super) struct ExportClient {
    endpoint: Endpoint,
    headers: HeaderMap,
    roots: Arc<RootCertStore>,
    connector: OnceLock<TlsConnector>,
}

impl fmt::Debug for ExportClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportClient")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}

impl ExportClient {
    pub(super) fn new(settings: TelemetrySettings) -> Self {
        let roots = if settings.authorities.is_empty() {
            Arc::clone(host_roots())
        } else {
            let mut roots = RootCertStore::clone(host_roots());
            roots.add_parsable_certificates(settings.authorities);
            Arc::new(roots)
        };
        Self {
            endpoint: settings.endpoint,
            headers: settings.headers,
            roots,
            connector: OnceLock::new(),
        }
    }

    /// Sends an export, and returns how many of its spans the receiver did not want.
    pub(super) async fn send(&self, body: Bytes) -> Result<u64, ExportError> {
        match tokio::time::timeout(EXCHANGE_BOUND, self.exchange(body)).await {
            Ok(result) => result,
            Err(_) => Err(ExportError::Timeout),
        }
    }

    async fn exchange(&self, body: Bytes) -> Result<u64, ExportError> {
        let endpoint = &self.endpoint;
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))
            .await
            .map_err(|_| ExportError::Connect)?;
        let request = self.request(body);
        if !endpoint.is_tls {
            return ask(stream, request).await;
        }
        let name = ServerName::try_from(endpoint.host.clone()).map_err(|_| ExportError::Tls)?;
        let stream = self.connector().connect(name, stream).await;
        ask(stream.map_err(|_| ExportError::Tls)?, request).await
    }

    fn request(&self, body: Bytes) -> Request<Full<Bytes>> {
        let length = body.len();
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.endpoint.path.clone();
        *request.headers_mut() = self.headers.clone();
        for (name, value) in [
            (header::HOST, self.endpoint.authority.clone()),
            (header::CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf")),
            (header::CONTENT_LENGTH, HeaderValue::from(length)),
            (header::USER_AGENT, HeaderValue::from_static(AGENT)),
            (header::CONNECTION, HeaderValue::from_static("close")),
        ] {
            request.headers_mut().insert(name, value);
        }
        request
    }

    fn connector(&self) -> &TlsConnector {
        self.connector.get_or_init(|| {
            let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("the provider has the usual versions")
                .with_root_certificates(Arc::clone(&self.roots))
                .with_no_client_auth();
            TlsConnector::from(Arc::new(config))
        })
    }
}

/// Sends a request on a connection of its own, and reads as much of the answer as matters.
async fn ask<S>(stream: S, request: Request<Full<Bytes>>) -> Result<u64, ExportError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::Builder::new()
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|_| ExportError::Answer)?;
    // Aborted when this returns, whatever of the answer is left.
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        // Its errors are also those of the request.
        let _ = connection.await;
    });
    let answer = sender.send_request(request).await.map_err(|_| ExportError::Answer)?;
    let status = answer.status();
    if !status.is_success() {
        return Err(ExportError::Status {
            status,
            retry_after: retry_after(answer.headers()),
        });
    }
    // It was accepted; what cannot be read does not change that.
    let body = Limited::new(answer.into_body(), BODY_MAX).collect().await;
    let answer = body.ok().and_then(|body| ExportResponse::decode(body.to_bytes()).ok());
    let rejected = answer.and_then(|answer| answer.partial_success);
    Ok(rejected.map_or(0, |partial| u64::try_from(partial.rejected_spans).unwrap_or(0)))
}

/// The seconds that a receiver asks to wait. A date counts as nothing: the clocks of two hosts differ.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds).min(RETRY_AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_protocol_repeats_is_temporary() {
        let of = |status: u16| ExportError::Status {
            status: StatusCode::from_u16(status).unwrap(),
            retry_after: None,
        };
        let temporary: Vec<u16> = (300..600).filter(|status| of(*status).is_temporary()).collect();
        assert_eq!(temporary, [429, 502, 503, 504]);
        assert!(ExportError::Connect.is_temporary() && ExportError::Timeout.is_temporary());
    }

    #[test]
    fn a_receiver_may_ask_for_a_bounded_pause() {
        for (text, want) in [
            ("7", Some(7)),
            ("0", Some(0)),
            ("86400", Some(300)),
            ("99999999999999999999999", None),
            ("-1", None),
            ("Wed, 21 Oct 2026 07:28:00 GMT", None),
        ] {
            let headers = HeaderMap::from_iter([(header::RETRY_AFTER, HeaderValue::from_str(text).unwrap())]);
            assert_eq!(retry_after(&headers), want.map(Duration::from_secs), "{text}");
        }
    }
}

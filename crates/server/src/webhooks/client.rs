//! Sends one event to a receiver.
//!
//! Each attempt looks up the host once, judges all of its addresses, and connects to one of those that were judged: no name
//! is looked up again in between. Redirects are not followed, the environment has no say (no proxy), one connection serves
//! one request, and of the answer only the head is read, within bounds. Everything takes a bounded time.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use http_body_util::Full;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use proxy::egress::host_roots;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::receiver::{ReceiverRules, ReceiverUrl};

/// How long an attempt may take once the addresses of the host are known.
const EXCHANGE_BOUND: Duration = Duration::from_secs(10);
/// How long looking up a host may take. The C library gives up by itself, and its thread is taken until then.
pub(super) const LOOKUP_BOUND: Duration = Duration::from_secs(45);
/// How long a connection to one of several addresses may take.
const CONNECT_BOUND: Duration = Duration::from_secs(4);
/// How many addresses of a host are tried.
const TRIED_MAX: usize = 3;
/// Maximum number of headers of an answer.
const HEADERS_MAX: usize = 100;
/// Maximum size of the head of an answer, in bytes.
const HEAD_MAX: usize = 16 << 10;
const AGENT: &str = concat!("ringfence/", env!("CARGO_PKG_VERSION"));

/// Why an event was not received, if there was no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendError {
    /// The host has no addresses, or they could not be looked up.
    Lookup,
    /// The URL or an address of the host is not allowed.
    Refused,
    /// No connection was made.
    Connect,
    /// The certificate is not valid, or there is no TLS.
    Tls,
    /// There was no answer in time.
    Timeout,
    /// What came back is not an answer.
    Answer,
}

impl SendError {
    /// One word for the log of the webhook. Stable.
    pub(super) fn word(self) -> &'static str {
        match self {
            // One word for both: a tenant must not learn which names there are in the network of the host.
            Self::Lookup | Self::Refused => "address",
            Self::Connect => "connect",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::Answer => "answer",
        }
    }
}

/// The client of receivers.
pub(super) struct EventClient {
    rules: Arc<ReceiverRules>,
    /// Issuers that are trusted beside those of the host.
    authorities: Vec<CertificateDer<'static>>,
    connector: OnceLock<TlsConnector>,
}

impl std::fmt::Debug for EventClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventClient")
            .field("rules", &self.rules)
            .finish_non_exhaustive()
    }
}

impl EventClient {
    pub(super) fn new(rules: Arc<ReceiverRules>, authorities: Vec<CertificateDer<'static>>) -> Self {
        Self {
            rules,
            authorities,
            connector: OnceLock::new(),
        }
    }

    /// Sends a body with these headers, and returns the status of the answer.
    pub(super) async fn send(&self, url: &str, headers: HeaderMap, body: Bytes) -> Result<StatusCode, SendError> {
        let url = self.rules.parse(url).map_err(|_| SendError::Refused)?;
        let addresses = lookup(&url).await?;
        self.rules
            .check_addresses(&url.host, &addresses)
            .map_err(|_| SendError::Refused)?;
        let exchange = self.exchange(&url, &addresses, headers, body);
        match tokio::time::timeout(EXCHANGE_BOUND, exchange).await {
            Ok(result) => result,
            Err(_) => Err(SendError::Timeout),
        }
    }

    async fn exchange(
        &self,
        url: &ReceiverUrl,
        addresses: &[IpAddr],
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<StatusCode, SendError> {
        let stream = connect(url.port, addresses).await?;
        let request = request(url, headers, body)?;
        if !url.is_tls {
            return ask(stream, request).await;
        }
        let name = ServerName::try_from(url.host.clone()).map_err(|_| SendError::Tls)?;
        let stream = self.connector().connect(name, stream).await;
        ask(stream.map_err(|_| SendError::Tls)?, request).await
    }

    fn connector(&self) -> &TlsConnector {
        self.connector.get_or_init(|| {
            let mut roots = RootCertStore::clone(host_roots());
            roots.add_parsable_certificates(self.authorities.iter().cloned());
            let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
                .with_safe_default_protocol_versions()
                .expect("the provider has the usual versions")
                .with_root_certificates(roots)
                .with_no_client_auth();
            TlsConnector::from(Arc::new(config))
        })
    }
}

/// The addresses of a host, looked up once.
async fn lookup(url: &ReceiverUrl) -> Result<Vec<IpAddr>, SendError> {
    if let Some(address) = url.address() {
        return Ok(vec![address]);
    }
    let found = tokio::net::lookup_host((url.host.as_str(), url.port));
    let found: io::Result<Vec<IpAddr>> = match tokio::time::timeout(LOOKUP_BOUND, found).await {
        Ok(found) => found.map(|found| found.map(|address| address.ip()).collect()),
        Err(_) => return Err(SendError::Lookup),
    };
    found.ok().filter(|found| !found.is_empty()).ok_or(SendError::Lookup)
}

async fn connect(port: u16, addresses: &[IpAddr]) -> Result<TcpStream, SendError> {
    let mut last = SendError::Connect;
    for address in addresses.iter().take(TRIED_MAX) {
        let connected = TcpStream::connect(SocketAddr::new(*address, port));
        match tokio::time::timeout(CONNECT_BOUND, connected).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(_)) => last = SendError::Connect,
            Err(_) => last = SendError::Timeout,
        }
    }
    Err(last)
}

fn request(url: &ReceiverUrl, headers: HeaderMap, body: Bytes) -> Result<Request<Full<Bytes>>, SendError> {
    let length = body.len();
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = url.path.parse().map_err(|_| SendError::Refused)?;
    *request.headers_mut() = headers;
    let host = HeaderValue::from_str(&url.authority).map_err(|_| SendError::Refused)?;
    request.headers_mut().insert(header::HOST, host);
    request
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request
        .headers_mut()
        .insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    request
        .headers_mut()
        .insert(header::USER_AGENT, HeaderValue::from_static(AGENT));
    request
        .headers_mut()
        .insert(header::CONNECTION, HeaderValue::from_static("close"));
    Ok(request)
}

/// Sends a request on a connection of its own, and reads the head of the answer.
async fn ask<S>(stream: S, request: Request<Full<Bytes>>) -> Result<StatusCode, SendError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = http1::Builder::new()
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_MAX)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|_| SendError::Answer)?;
    // Aborted when this returns, whatever of the answer is left.
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        // Its errors are also those of the request.
        let _ = connection.await;
    });
    let answer = sender.send_request(request).await.map_err(|_| SendError::Answer)?;
    Ok(answer.status())
}

//! Requests to registries: one connection each, with a timeout for every step.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use bytes::Bytes;
use http::header::{HOST, LOCATION, USER_AGENT};
use http::{HeaderMap, Method, StatusCode, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

use super::dns;

const AGENT: &str = concat!("ringfence/", env!("CARGO_PKG_VERSION"));
/// Time for a connection to one of the addresses of a host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: usize = 5;
const HEADERS_MAX: usize = 100;
const HEAD_BYTES: usize = 64 << 10;

/// Why a request failed, and whether another attempt may help.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: Error,
    pub(super) is_temporary: bool,
    /// How long the server wants to be left alone.
    pub(super) after: Option<Duration>,
}

impl Failure {
    pub(super) fn temporary(error: impl Into<Error>) -> Self {
        Self {
            error: error.into(),
            is_temporary: true,
            after: None,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            error,
            is_temporary: false,
            after: None,
        }
    }
}

/// Where a request goes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) is_tls: bool,
    pub(super) host: String,
    pub(super) port: u16,
    /// Path and query.
    pub(super) path: String,
}

impl Url {
    pub(super) fn parse(text: &str) -> Result<Self> {
        let uri: Uri = text.parse().map_err(|_| anyhow!("invalid URL"))?;
        let is_tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => bail!("invalid URL: expected https"),
        };
        let authority = uri.authority().context("a URL without a host")?;
        ensure!(!authority.as_str().contains('@'), "a URL with a user name");
        Ok(Self {
            is_tls,
            host: authority.host().to_owned(),
            port: authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            path: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        })
    }

    /// Resolves a location of a response relative to this URL.
    fn join(&self, location: &str) -> Result<Self> {
        if location.contains("://") {
            return Self::parse(location);
        }
        ensure!(
            location.starts_with('/') && !location.starts_with("//"),
            "a redirect to an unsupported place"
        );
        let path: http::uri::PathAndQuery = location
            .parse()
            .map_err(|_| anyhow!("a redirect to an invalid place"))?;
        Ok(Self {
            path: path.as_str().to_owned(),
            ..self.clone()
        })
    }

    /// Whether two URLs lead to the same server.
    pub(super) fn is_same_origin(&self, other: &Self) -> bool {
        (self.is_tls, &self.host, self.port) == (other.is_tls, &other.host, other.port)
    }

    /// `host`, or `host:port` where the port is not the usual one.
    pub(super) fn authority(&self) -> String {
        match (self.is_tls, self.port) {
            (true, 443) | (false, 80) => self.host.clone(),
            (_, port) => format!("{}:{port}", self.host),
        }
    }
}

/// Trust and timeouts of all requests.
#[derive(Clone)]
pub(super) struct Client {
    tls: TlsConnector,
    /// For hosts that have authorities of their own.
    own: Arc<BTreeMap<String, TlsConnector>>,
    roots: usize,
    request_timeout: Duration,
    stall_timeout: Duration,
    /// Hosts with plain HTTP.
    insecure: Vec<String>,
}

impl Client {
    pub(super) fn new(
        authorities: &BTreeMap<String, String>,
        insecure: Vec<String>,
        request_timeout: Duration,
        stall_timeout: Duration,
    ) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let mut own = BTreeMap::new();
        for (host, pem) in authorities {
            let mut roots = roots.clone();
            for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                let certificate = certificate.with_context(|| format!("authorities of {host}: invalid PEM"))?;
                roots
                    .add(certificate)
                    .with_context(|| format!("authorities of {host}: invalid certificate"))?;
            }
            own.insert(host.trim_end_matches(":443").to_owned(), connector(roots)?);
        }
        Ok(Self {
            roots: roots.len(),
            tls: connector(roots)?,
            own: Arc::new(own),
            request_timeout,
            stall_timeout,
            insecure,
        })
    }

    /// Whether plain HTTP is allowed to a host.
    pub(super) fn is_insecure(&self, authority: &str) -> bool {
        self.insecure.iter().any(|other| other == authority)
    }

    /// Sends a request and follows redirects. `Authorization` is sent to the first server only.
    pub(super) async fn send(
        &self,
        method: Method,
        url: &Url,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Response, Failure> {
        let mut url = url.clone();
        let mut headers = headers.clone();
        for _ in 0..=REDIRECTS_MAX {
            let response = self.request(&method, &url, &headers, body.clone()).await?;
            if !matches!(response.status.as_u16(), 301 | 302 | 303 | 307 | 308) || method != Method::GET {
                return Ok(response);
            }
            let location = response.headers.get(LOCATION).and_then(|value| value.to_str().ok());
            let location = location.context("a redirect without a place").map_err(Failure::from)?;
            let next = url.join(location)?;
            if url.is_tls && !next.is_tls {
                return Err(anyhow!("a redirect from HTTPS to HTTP, to {}, is refused", next.authority()).into());
            }
            if !next.is_same_origin(&url) {
                headers.remove(http::header::AUTHORIZATION);
            }
            url = next;
        }
        Err(anyhow!("more than {REDIRECTS_MAX} redirects").into())
    }

    async fn request(&self, method: &Method, url: &Url, headers: &HeaderMap, body: Bytes) -> Result<Response, Failure> {
        let authority = url.authority();
        if !url.is_tls && !self.is_insecure(&authority) {
            return Err(anyhow!("{authority} has no HTTPS, and is not in the list of insecure registries").into());
        }
        let exchange = self.exchange(method, url, headers, body);
        match tokio::time::timeout(self.request_timeout, exchange).await {
            Ok(response) => response,
            Err(_) => Err(Failure::temporary(anyhow!(
                "{authority} did not respond within {} ms",
                self.request_timeout.as_millis()
            ))),
        }
    }

    async fn exchange(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Response, Failure> {
        let authority = url.authority();
        let stream = connect(url).await?;
        let mut tasks = JoinSet::new();
        let mut sender = if url.is_tls {
            let name = url.host.trim_start_matches('[').trim_end_matches(']').to_owned();
            let name = ServerName::try_from(name).map_err(|_| Failure::from(anyhow!("invalid host {authority}")))?;
            let tls = self.own.get(&authority).unwrap_or(&self.tls);
            let stream = tls
                .connect(name, stream)
                .await
                .map_err(|error| self.handshake(&authority, error))?;
            handshake(stream, &mut tasks).await
        } else {
            handshake(stream, &mut tasks).await
        }
        .map_err(|error| Failure::temporary(Error::from(error).context(format!("connect to {authority}"))))?;
        let mut request = http::Request::new(Full::new(body));
        *request.method_mut() = method.clone();
        *request.uri_mut() = url.path.parse().map_err(|_| Failure::from(anyhow!("invalid path")))?;
        *request.headers_mut() = headers.clone();
        let host = authority
            .parse()
            .map_err(|_| Failure::from(anyhow!("invalid host {authority}")))?;
        request.headers_mut().insert(HOST, host);
        request
            .headers_mut()
            .insert(USER_AGENT, http::HeaderValue::from_static(AGENT));
        let response = sender
            .send_request(request)
            .await
            .map_err(|error| Failure::temporary(Error::from(error).context(format!("request to {authority}"))))?;
        let (head, body) = response.into_parts();
        Ok(Response {
            status: head.status,
            headers: head.headers,
            authority,
            body,
            stall_timeout: self.stall_timeout,
            _connection: tasks,
        })
    }

    fn handshake(&self, authority: &str, error: std::io::Error) -> Failure {
        let is_certificate = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        let is_temporary = !matches!(is_certificate, Some(rustls::Error::InvalidCertificate(_)));
        let hint = if self.roots == 0 {
            "; there are no system certificates"
        } else {
            ""
        };
        Failure {
            error: Error::from(error).context(format!("TLS with {authority}{hint}")),
            is_temporary,
            after: None,
        }
    }
}

fn connector(roots: RootCertStore) -> Result<TlsConnector> {
    let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

async fn connect(url: &Url) -> Result<TcpStream, Failure> {
    let addresses = dns::lookup(&url.host).await;
    let addresses =
        addresses.map_err(|error| Failure::temporary(Error::from(error).context(format!("look up {}", url.host))))?;
    let mut last = anyhow!("no address");
    for address in addresses {
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect((address, url.port))).await {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => last = error.into(),
            Err(_) => last = anyhow!("no connection within {} s", CONNECT_TIMEOUT.as_secs()),
        }
    }
    Err(Failure::temporary(
        last.context(format!("connect to {}", url.authority())),
    ))
}

async fn handshake<S>(stream: S, tasks: &mut JoinSet<()>) -> hyper::Result<http1::SendRequest<Full<Bytes>>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = http1::Builder::new()
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES)
        .handshake(TokioIo::new(stream))
        .await?;
    tasks.spawn(async move {
        // Its errors are also those of the request or the body.
        let _ = connection.await;
    });
    Ok(sender)
}

/// The head of a response, and the body that is not read yet.
pub(super) struct Response {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) authority: String,
    body: Incoming,
    stall_timeout: Duration,
    _connection: JoinSet<()>,
}

impl Response {
    pub(super) fn header(&self, name: http::HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The next bytes of the body; none at its end.
    pub(super) async fn chunk(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            let frame = tokio::time::timeout(self.stall_timeout, self.body.frame()).await;
            let frame = frame.map_err(|_| {
                let stalled = self.stall_timeout.as_millis();
                Failure::temporary(anyhow!("{} sent nothing for {stalled} ms", self.authority))
            })?;
            match frame {
                None => return Ok(None),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Some(Err(error)) => {
                    let error = Error::from(error).context(format!("response of {}", self.authority));
                    return Err(Failure::temporary(error));
                }
            }
        }
    }

    /// The whole body, which must not be larger.
    pub(super) async fn bytes(mut self, most: usize) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            if bytes.len() + chunk.len() > most {
                return Err(anyhow!("the response of {} is larger than {most} bytes", self.authority).into());
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }
}

//! Requests to registries: one connection each, with a timeout for every step.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST, LOCATION, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
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

const AGENT: &str = concat!("ringfence/", env!("CARGO_PKG_VERSION"));
/// Time for a connection to one of the addresses of a host.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: usize = 5;
const HEADERS_MAX: usize = 100;
const HEAD_BYTES: usize = 64 << 10;

/// The addresses of a host.
pub type Found = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;
/// Looks up a host, which may be an address in brackets. Not everywhere may the C library be asked.
pub type Lookup = fn(String) -> Found;

/// The body of a request.
pub type ContentBody = UnsyncBoxBody<Bytes, io::Error>;

/// What a request sends. Its body is made for each attempt.
pub trait Content: Send + Sync {
    /// The body, from its beginning.
    ///
    /// # Errors
    /// When what it consists of cannot be read.
    fn body(&self) -> Result<ContentBody>;

    /// Its size, in bytes.
    fn length(&self) -> u64;

    /// How long sending it may take, if that is longer than other requests.
    fn time(&self) -> Option<Duration> {
        None
    }
}

impl Content for Bytes {
    fn body(&self) -> Result<ContentBody> {
        Ok(UnsyncBoxBody::new(
            Full::new(self.clone()).map_err(|never| match never {}),
        ))
    }

    fn length(&self) -> u64 {
        self.len() as u64
    }
}

/// Why a request failed, and whether another attempt may help.
#[derive(Debug)]
pub struct Failure {
    /// What to say about it.
    pub error: Error,
    /// Whether another attempt may help.
    pub is_temporary: bool,
    /// How long the server wants to be left alone.
    pub after: Option<Duration>,
}

impl Failure {
    /// A failure after which another attempt may help.
    pub fn temporary(error: impl Into<Error>) -> Self {
        Self {
            error: error.into(),
            is_temporary: true,
            after: None,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
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
pub struct Url {
    /// Whether it begins with `https`.
    pub is_tls: bool,
    /// A name or an address, one of IPv6 in brackets.
    pub host: String,
    /// The port, or the usual one.
    pub port: u16,
    /// Path and query.
    pub path: String,
}

impl Url {
    /// A URL of a text.
    ///
    /// # Errors
    /// When the text is none, or has a user.
    pub fn parse(text: &str) -> Result<Self> {
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

    /// The place that a response from here names.
    ///
    /// # Errors
    /// When it is not one, or leads from HTTPS to HTTP.
    pub fn join(&self, location: &str) -> Result<Self> {
        if location.contains("://") {
            let next = Self::parse(location)?;
            ensure!(
                next.is_tls || !self.is_tls,
                "it leads from HTTPS to HTTP, to {}, which is refused",
                next.authority()
            );
            return Ok(next);
        }
        ensure!(
            location.starts_with('/') && !location.starts_with("//"),
            "an unsupported place"
        );
        let path: http::uri::PathAndQuery = location.parse().map_err(|_| anyhow!("an invalid place"))?;
        Ok(Self {
            path: path.as_str().to_owned(),
            ..self.clone()
        })
    }

    /// Adds parameters to the query.
    pub fn add_query(&mut self, parameters: &str) {
        self.path.push(if self.path.contains('?') { '&' } else { '?' });
        self.path.push_str(parameters);
    }

    /// Whether two URLs lead to the same server.
    #[must_use]
    pub fn is_same_origin(&self, other: &Self) -> bool {
        (self.is_tls, &self.host, self.port) == (other.is_tls, &other.host, other.port)
    }

    /// `host`, or `host:port` where the port is not the usual one.
    #[must_use]
    pub fn authority(&self) -> String {
        match (self.is_tls, self.port) {
            (true, 443) | (false, 80) => self.host.clone(),
            (_, port) => format!("{}:{port}", self.host),
        }
    }
}

/// What the requests of a client have in common.
#[derive(Debug, Clone)]
pub struct RequestSettings<'a> {
    /// Certificates of issuers, in PEM, that are trusted besides those of the system, by `host` or `host:port`.
    pub authorities: &'a BTreeMap<String, String>,
    /// Registries with plain HTTP, by `host` or `host:port`.
    pub insecure: &'a [String],
    /// How long an answer may take, from the look-up of the name to the end of its head.
    pub request_timeout: Duration,
    /// How long a server may take to send the next piece of a body.
    pub stall_timeout: Duration,
    /// Looks up hosts.
    pub lookup: Lookup,
}

/// Trust and timeouts of all requests.
#[derive(Clone)]
pub struct Client {
    tls: TlsConnector,
    /// For hosts that have authorities of their own.
    own: Arc<BTreeMap<String, TlsConnector>>,
    roots: usize,
    request_timeout: Duration,
    stall_timeout: Duration,
    /// Hosts with plain HTTP.
    insecure: Vec<String>,
    lookup: Lookup,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("insecure", &self.insecure)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// A client.
    ///
    /// # Errors
    /// When a certificate is none.
    pub fn new(settings: &RequestSettings<'_>) -> Result<Self> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let mut own = BTreeMap::new();
        for (host, pem) in settings.authorities {
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
            request_timeout: settings.request_timeout,
            stall_timeout: settings.stall_timeout,
            insecure: settings.insecure.to_vec(),
            lookup: settings.lookup,
        })
    }

    /// Whether plain HTTP is allowed to a host.
    #[must_use]
    pub fn is_insecure(&self, authority: &str) -> bool {
        let short = |text: &str| text.strip_suffix(":80").unwrap_or(text).to_owned();
        self.insecure.iter().any(|other| short(other) == short(authority))
    }

    /// Sends a request, and follows redirects of one that only reads. `Authorization` is sent to the first server only.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn send(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        content: &dyn Content,
    ) -> Result<Response, Failure> {
        let mut url = url.clone();
        let mut headers = headers.clone();
        let is_read = matches!(*method, Method::GET | Method::HEAD);
        for _ in 0..=REDIRECTS_MAX {
            let response = self.request(method, &url, &headers, content).await?;
            if !matches!(response.status.as_u16(), 301 | 302 | 303 | 307 | 308) || !is_read {
                return Ok(response);
            }
            let location = response.header(LOCATION);
            let location = location.context("a redirect without a place").map_err(Failure::from)?;
            let next = url.join(location).context("a redirect")?;
            if !next.is_same_origin(&url) {
                headers.remove(http::header::AUTHORIZATION);
            }
            url = next;
        }
        Err(anyhow!("more than {REDIRECTS_MAX} redirects").into())
    }

    async fn request(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        content: &dyn Content,
    ) -> Result<Response, Failure> {
        let authority = url.authority();
        if !url.is_tls && !self.is_insecure(&authority) {
            return Err(anyhow!("{authority} has no HTTPS, and is not in the list of insecure registries").into());
        }
        let time = content.time().unwrap_or(self.request_timeout);
        let exchange = self.exchange(method, url, headers, content);
        match tokio::time::timeout(time, exchange).await {
            Ok(response) => response,
            Err(_) => Err(Failure::temporary(anyhow!(
                "{authority} did not respond within {} ms",
                time.as_millis()
            ))),
        }
    }

    async fn exchange(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        content: &dyn Content,
    ) -> Result<Response, Failure> {
        let authority = url.authority();
        let stream = self.connect(url).await?;
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
        let mut request = http::Request::new(content.body()?);
        *request.method_mut() = method.clone();
        *request.uri_mut() = url.path.parse().map_err(|_| Failure::from(anyhow!("invalid path")))?;
        *request.headers_mut() = headers.clone();
        let host = authority
            .parse()
            .map_err(|_| Failure::from(anyhow!("invalid host {authority}")))?;
        request.headers_mut().insert(HOST, host);
        request
            .headers_mut()
            .insert(USER_AGENT, HeaderValue::from_static(AGENT));
        if !matches!(*method, Method::GET | Method::HEAD) {
            let length = HeaderValue::from(content.length());
            request.headers_mut().insert(CONTENT_LENGTH, length);
        }
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

    async fn connect(&self, url: &Url) -> Result<TcpStream, Failure> {
        let addresses = (self.lookup)(url.host.clone()).await;
        let addresses = addresses
            .map_err(|error| Failure::temporary(Error::from(error).context(format!("look up {}", url.host))))?;
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

async fn handshake<S>(stream: S, tasks: &mut JoinSet<()>) -> hyper::Result<http1::SendRequest<ContentBody>>
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
#[derive(Debug)]
pub struct Response {
    /// Its status.
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// The authority (`host` or `host:port`) that sent the response.
    pub authority: String,
    body: Incoming,
    stall_timeout: Duration,
    _connection: JoinSet<()>,
}

impl Response {
    /// A failure because of this response, which says whether and when another attempt may help.
    #[must_use]
    pub fn failure(&self, error: Error) -> Failure {
        let after = self.header(RETRY_AFTER).and_then(|text| text.parse().ok());
        Failure {
            error,
            is_temporary: self.status.is_server_error() || matches!(self.status.as_u16(), 408 | 429),
            after: after.map(Duration::from_secs),
        }
    }

    /// A header, if it is text.
    #[must_use]
    pub fn header(&self, name: http::HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The next bytes of the body; none at its end.
    ///
    /// # Errors
    /// When the connection ends before, or nothing comes.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Failure> {
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
    ///
    /// # Errors
    /// When it is, or does not come.
    pub async fn bytes(mut self, most: usize) -> Result<Vec<u8>, Failure> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_lead_to_no_worse_place() {
        let base = Url::parse("https://h.example:5000/v2/a").unwrap();
        let check = |location: &str| base.join(location).ok().map(|url| (url.authority(), url.path));
        let at = |authority: &str, path: &str| Some((authority.to_owned(), path.to_owned()));
        assert_eq!(check("/v2/b?x=1"), at("h.example:5000", "/v2/b?x=1"));
        assert_eq!(check("https://cdn.example/c"), at("cdn.example", "/c"));
        for bad in [
            "http://h.example:5000/c",
            "//x/c",
            "c",
            "",
            "ftp://x/c",
            "https://u:p@x/c",
            "/a b",
        ] {
            assert_eq!(check(bad), None, "{bad}");
        }
        assert!(Url::parse("http://h/a").unwrap().join("http://other/b").is_ok());
        assert!(!base.is_same_origin(&Url::parse("https://h.example/v2").unwrap()));
    }

    #[test]
    fn parameters_are_added_to_a_query() {
        for (url, path) in [
            ("https://h/a", "/a?x=1"),
            ("https://h/a?b", "/a?b&x=1"),
            ("https://h", "/?x=1"),
        ] {
            let mut url = Url::parse(url).unwrap();
            url.add_query("x=1");
            assert_eq!(url.path, path);
        }
    }

    #[test]
    fn a_registry_without_https_may_be_named_with_its_port() {
        let client = Client::new(&RequestSettings {
            authorities: &BTreeMap::new(),
            insecure: &[
                "a.example:80".to_owned(),
                "b.example".to_owned(),
                "c.example:5000".to_owned(),
            ],
            request_timeout: Duration::ZERO,
            stall_timeout: Duration::ZERO,
            lookup: |_| Box::pin(async { Ok(Vec::new()) }),
        })
        .unwrap();
        for (authority, is_insecure) in [
            ("a.example", true),
            ("a.example:80", true),
            ("b.example:80", true),
            ("c.example:5000", true),
            ("c.example", false),
            ("a.example:5000", false),
            ("example", false),
        ] {
            assert_eq!(client.is_insecure(authority), is_insecure, "{authority}");
        }
    }
}

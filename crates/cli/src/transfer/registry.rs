//! A client of registries for artifacts: blobs and manifests of one repository, with the tokens that they need.
//!
//! Each request has a connection of its own. What a registry sends is untrusted: sizes are limited, credentials go to it
//! and to the place that it names for tokens, and never from HTTPS to HTTP.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Seek as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, LOCATION, RANGE, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_util::io::ReaderStream;

use super::login::{Login, secret};
use super::query::encoded;
use super::reference::Reference;
use crate::output::printable;

/// How long connecting may take, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a registry may take to answer, and to send the next piece of a body.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an upload may take.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(6 * 3600);
/// How often a request is sent before its failure counts, and the pause in between.
const ATTEMPTS: u32 = 4;
const PAUSE: Duration = Duration::from_secs(1);
const REDIRECTS_MAX: usize = 5;
const TEXT_MAX: usize = 64 << 10;
/// Size of a piece of an upload, in bytes.
const PIECE: usize = 128 << 10;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// What a request sends.
pub(super) enum Content {
    Nothing,
    Text(Bytes),
    /// A file from its beginning, of this size.
    File(File, u64),
}

impl Content {
    fn body(&self) -> Result<UnsyncBoxBody<Bytes, std::io::Error>> {
        let bytes = match self {
            Self::Nothing => Bytes::new(),
            Self::Text(text) => text.clone(),
            Self::File(file, _) => {
                let mut file = file.try_clone()?;
                file.rewind()?;
                let stream = ReaderStream::with_capacity(tokio::fs::File::from_std(file), PIECE);
                let stream = futures_util::TryStreamExt::map_ok(stream, Frame::data);
                return Ok(UnsyncBoxBody::new(StreamBody::new(stream)));
            }
        };
        Ok(UnsyncBoxBody::new(Full::new(bytes).map_err(|never| match never {})))
    }

    fn length(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Text(text) => text.len() as u64,
            Self::File(_, size) => *size,
        }
    }
}

/// Where a request goes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Location {
    is_tls: bool,
    /// `host` or `host:port`.
    authority: String,
    /// Path and query.
    path: String,
}

impl Location {
    fn parse(text: &str) -> Result<Self> {
        let uri: Uri = text.parse().map_err(|_| anyhow!("an invalid address"))?;
        let is_tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => bail!("an address without https"),
        };
        let authority = uri.authority().context("an address without a host")?;
        ensure!(!authority.as_str().contains('@'), "an address with a user");
        Ok(Self {
            is_tls,
            authority: authority.to_string(),
            path: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        })
    }

    /// The place that an answer from here names.
    fn join(&self, location: &str) -> Result<Self> {
        if location.contains("://") {
            let next = Self::parse(location)?;
            ensure!(
                next.is_tls || !self.is_tls,
                "it leads from HTTPS to HTTP, to {}",
                next.authority
            );
            return Ok(next);
        }
        ensure!(
            location.starts_with('/') && !location.starts_with("//") && location.parse::<Uri>().is_ok(),
            "an unsupported address"
        );
        Ok(Self {
            path: location.to_owned(),
            ..self.clone()
        })
    }

    fn is_same_server(&self, other: &Self) -> bool {
        (self.is_tls, &self.authority) == (other.is_tls, &other.authority)
    }
}

/// The head of an answer, and the body that is not read yet.
pub(super) struct Answer {
    pub(super) status: StatusCode,
    headers: HeaderMap,
    body: Incoming,
    /// The connection, which ends with the answer.
    _connection: JoinSet<()>,
}

impl Answer {
    /// The next bytes of the body; none at its end.
    pub(super) async fn piece(&mut self) -> Result<Option<Bytes>> {
        loop {
            let frame = tokio::time::timeout(ANSWER_TIMEOUT, self.body.frame()).await;
            let frame = frame.map_err(|_| anyhow!("the registry sends nothing"))?;
            match frame.transpose().context("read what the registry sends")? {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// The whole body.
    async fn bytes(&mut self, most: usize) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while let Some(piece) = self.piece().await? {
            ensure!(
                bytes.len() + piece.len() <= most,
                "the answer is larger than {most} bytes"
            );
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }

    fn header(&self, name: http::HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// What registries are trusted with.
pub(super) struct Trust<'a> {
    /// Registries with plain HTTP.
    pub(super) insecure: &'a [String],
    /// Certificates of issuers, in PEM, by registry.
    pub(super) authorities: &'a BTreeMap<String, String>,
}

/// One repository of a registry.
pub(super) struct Registry {
    base: Location,
    repository: String,
    insecure: Vec<String>,
    /// For the registry itself, and for other servers.
    own: TlsConnector,
    other: TlsConnector,
    login: Option<Login>,
    writes: bool,
    authorization: RefCell<Option<HeaderValue>>,
}

impl Registry {
    pub(super) fn new(reference: &Reference, trust: &Trust<'_>, login: Option<Login>, writes: bool) -> Result<Self> {
        let Reference { host, repository, .. } = reference;
        let scheme = if trust.insecure.contains(host) { "http" } else { "https" };
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let other = connector(roots.clone());
        if let Some(pem) = trust.authorities.get(host) {
            for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
                let certificate = certificate.with_context(|| format!("issuers of {host}"))?;
                roots.add(certificate).with_context(|| format!("issuers of {host}"))?;
            }
        }
        Ok(Self {
            base: Location::parse(&format!("{scheme}://{host}/v2/{repository}"))?,
            repository: repository.clone(),
            insecure: trust.insecure.to_vec(),
            own: connector(roots),
            other,
            login,
            writes,
            authorization: RefCell::new(None),
        })
    }

    fn place(&self, rest: &str) -> Location {
        Location {
            path: format!("{}/{rest}", self.base.path),
            ..self.base.clone()
        }
    }

    /// Uploads a blob, unless the repository has it, and returns whether it was sent. Whether it was sent.
    pub(super) async fn upload(&self, digest: &str, content: &Content) -> Result<bool> {
        self.repeat(async || {
            let has = self.place(&format!("blobs/{digest}"));
            let mut answer = self
                .send(&Method::HEAD, &has, &HeaderMap::new(), &Content::Nothing)
                .await?;
            if answer.status.is_success() {
                return Ok(false);
            }
            if answer.status != StatusCode::NOT_FOUND {
                return Err(self.failure(&mut answer, "the question for a blob").await);
            }
            let begin = self.place("blobs/uploads/");
            let mut answer = self
                .send(&Method::POST, &begin, &HeaderMap::new(), &Content::Nothing)
                .await?;
            if answer.status != StatusCode::ACCEPTED {
                return Err(self.failure(&mut answer, "an upload").await);
            }
            let location = answer
                .header(LOCATION)
                .context("the registry does not say where to upload")?;
            let mut place = begin.join(location).context("the registry says to upload to")?;
            let mark = if place.path.contains('?') { '&' } else { '?' };
            place
                .path
                .push_str(&format!("{mark}digest={}", digest.replace(':', "%3A")));
            drop(answer);
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
            let mut answer = self.send(&Method::PUT, &place, &headers, content).await?;
            if answer.status.is_success() {
                Ok(true)
            } else {
                Err(self.failure(&mut answer, "a blob").await)
            }
        })
        .await
    }

    /// Stores a manifest under a tag.
    pub(super) async fn put_manifest(&self, tag: &str, kind: &'static str, text: Bytes) -> Result<()> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        let content = Content::Text(text);
        let place = self.place(&format!("manifests/{tag}"));
        self.repeat(async || {
            let mut answer = self.send(&Method::PUT, &place, &headers, &content).await?;
            if answer.status.is_success() {
                Ok(())
            } else {
                Err(self.failure(&mut answer, "the manifest").await)
            }
        })
        .await
    }

    /// The text of a manifest by tag or digest.
    pub(super) async fn manifest(&self, target: &str, kind: &'static str, most: usize) -> Result<Vec<u8>> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static(kind));
        let place = self.place(&format!("manifests/{target}"));
        self.repeat(async || {
            let mut answer = self.send(&Method::GET, &place, &headers, &Content::Nothing).await?;
            if !answer.status.is_success() {
                return Err(self.failure(&mut answer, "the manifest").await);
            }
            answer.bytes(most).await
        })
        .await
    }

    /// A blob from a position on. Whether it begins there, or at its beginning.
    pub(super) async fn blob(&self, digest: &str, from: u64) -> Result<(Answer, bool)> {
        let mut headers = HeaderMap::new();
        if from > 0 {
            headers.insert(RANGE, HeaderValue::from_str(&format!("bytes={from}-"))?);
        }
        let place = self.place(&format!("blobs/{digest}"));
        let mut answer = self.send(&Method::GET, &place, &headers, &Content::Nothing).await?;
        match answer.status {
            StatusCode::PARTIAL_CONTENT => Ok((answer, from > 0)),
            StatusCode::RANGE_NOT_SATISFIABLE => {
                Err(Refused(format!("it is {from} bytes long, which is less than its manifest says")).into())
            }
            status if status.is_success() => Ok((answer, false)),
            _ => Err(self.failure(&mut answer, "a blob").await),
        }
    }

    /// Repeats an action that failed, unless the registry refused it.
    async fn repeat<T>(&self, action: impl AsyncFn() -> Result<T>) -> Result<T> {
        let mut attempt = 1;
        loop {
            match action().await {
                Err(error) if attempt < ATTEMPTS && !error.is::<Refused>() => {
                    tokio::time::sleep(PAUSE * attempt).await;
                    attempt += 1;
                }
                done => return done,
            }
        }
    }

    /// Sends a request, with what the registry wants for authorization, and follows redirects of reads.
    async fn send(&self, method: &Method, place: &Location, headers: &HeaderMap, content: &Content) -> Result<Answer> {
        let mut place = place.clone();
        let mut has_asked = false;
        let mut redirects = 0;
        loop {
            let is_own = place.is_same_server(&self.base);
            let mut headers = headers.clone();
            if is_own && let Some(value) = self.authorization.borrow().clone() {
                headers.insert(AUTHORIZATION, value);
            }
            let answer = self.once(method, &place, &headers, content).await?;
            if answer.status == StatusCode::UNAUTHORIZED && is_own && !has_asked {
                has_asked = true;
                let challenges = answer.headers.get_all(WWW_AUTHENTICATE).iter();
                let challenges: Vec<&str> = challenges.filter_map(|value| value.to_str().ok()).collect();
                if let Some(value) = self.authorize(&challenges).await? {
                    *self.authorization.borrow_mut() = Some(value);
                    continue;
                }
                return Ok(answer);
            }
            let is_read = matches!(*method, Method::GET | Method::HEAD);
            if !is_read || !matches!(answer.status.as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(answer);
            }
            redirects += 1;
            ensure!(redirects <= REDIRECTS_MAX, "more than {REDIRECTS_MAX} redirects");
            let location = answer.header(LOCATION).context("a redirect without an address")?;
            place = place.join(location).context("a redirect")?;
        }
    }

    async fn once(&self, method: &Method, place: &Location, headers: &HeaderMap, content: &Content) -> Result<Answer> {
        let Location { authority, .. } = place;
        if !place.is_tls && !self.insecure.contains(authority) {
            return Err(Refused(format!(
                "{authority} has no HTTPS, and is not in `builds.insecure_registries`"
            ))
            .into());
        }
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, self.connect(place)).await;
        let connected = connected
            .map_err(|_| anyhow!("timeout"))
            .and_then(|connected| connected);
        let stream = connected.with_context(|| format!("connect to {authority}"))?;
        let (mut requests, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            // Its errors are also those of the request or the body.
            let _ = connection.await;
        });
        let mut request = Request::builder()
            .method(method)
            .uri(&place.path)
            .header(HOST, authority.as_str())
            .header("user-agent", concat!("ringfence/", env!("CARGO_PKG_VERSION")))
            .body(content.body()?)?;
        request.headers_mut().extend(headers.clone());
        if !matches!(*method, Method::GET | Method::HEAD) {
            request
                .headers_mut()
                .insert(CONTENT_LENGTH, HeaderValue::from(content.length()));
        }
        let bound = match content {
            Content::File(..) => UPLOAD_TIMEOUT,
            _ => ANSWER_TIMEOUT,
        };
        let answer = tokio::time::timeout(bound, requests.send_request(request)).await;
        let answer = answer.map_err(|_| anyhow!("{authority} does not answer"))?;
        let (head, body) = answer.with_context(|| format!("request to {authority}"))?.into_parts();
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body,
            _connection: tasks,
        })
    }

    async fn connect(&self, place: &Location) -> Result<Box<dyn Stream>> {
        let uri: http::uri::Authority = place.authority.parse()?;
        let name = uri.host().trim_matches(['[', ']']).to_owned();
        let port = uri.port_u16().unwrap_or(if place.is_tls { 443 } else { 80 });
        let stream = TcpStream::connect((name.as_str(), port)).await?;
        stream.set_nodelay(true)?;
        if !place.is_tls {
            return Ok(Box::new(stream));
        }
        let tls = if place.is_same_server(&self.base) {
            &self.own
        } else {
            &self.other
        };
        Ok(Box::new(tls.connect(ServerName::try_from(name)?, stream).await?))
    }

    /// The authorization that a registry asks for; none if there are no credentials for it.
    async fn authorize(&self, challenges: &[&str]) -> Result<Option<HeaderValue>> {
        let login = self.login.as_ref().map(Login::header).transpose()?;
        let Some(bearer) = challenges.iter().find(|text| scheme(text) == "bearer") else {
            let is_basic = challenges.iter().any(|text| scheme(text) == "basic");
            return Ok(login.filter(|_| is_basic));
        };
        let realm = parameter(bearer, "realm").context("the registry does not say where its tokens are")?;
        let mut place = self
            .base
            .join(&realm)
            .context("the registry says that its tokens are at")?;
        let actions = if self.writes { "pull%2Cpush" } else { "pull" };
        let scope = format!("repository%3A{}%3A{actions}", self.repository.replace('/', "%2F"));
        let service = parameter(bearer, "service").map(|service| format!("service={}&", encoded(&service)));
        let mark = if place.path.contains('?') { '&' } else { '?' };
        place
            .path
            .push_str(&format!("{mark}{}scope={scope}", service.unwrap_or_default()));
        let mut headers = HeaderMap::new();
        if let Some(login) = login {
            headers.insert(AUTHORIZATION, login);
        }
        let mut answer = self.once(&Method::GET, &place, &headers, &Content::Nothing).await?;
        if !answer.status.is_success() {
            return Ok(None);
        }
        let text = answer.bytes(TEXT_MAX).await.context("read a token of the registry")?;
        let token: serde_json::Value = serde_json::from_slice(&text).map_err(|_| anyhow!("an invalid token"))?;
        let token = token["token"].as_str().or_else(|| token["access_token"].as_str());
        let token = token.context("the registry answers without a token")?;
        Ok(Some(secret(&format!("Bearer {token}"))?))
    }

    /// The error that an unsuccessful answer stands for.
    async fn failure(&self, answer: &mut Answer, what: &str) -> anyhow::Error {
        let Location { authority, .. } = &self.base;
        let status = answer.status;
        let text = answer.bytes(TEXT_MAX).await.unwrap_or_default();
        let text: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
        let why = text["errors"][0]["message"].as_str().map(printable).unwrap_or_default();
        let message = match (status.as_u16(), &self.login) {
            (401, Some(_)) => format!("{authority} does not accept the credentials"),
            (401, None) => format!("{authority} requires credentials: use --registry-user, or `docker login`"),
            (403, _) => format!("{authority} does not allow it for repository {}", self.repository),
            (404, _) => format!("repository {} of {authority} does not have it", self.repository),
            _ => format!("{authority} answered {status} to {what}: {why}"),
        };
        if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
            anyhow!(message)
        } else {
            Refused(message).into()
        }
    }
}

/// A failure that would be the same again.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refused(String);

fn connector(roots: RootCertStore) -> TlsConnector {
    let config = rustls::ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

fn scheme(challenge: &str) -> String {
    let scheme = challenge.split_ascii_whitespace().next().unwrap_or_default();
    scheme.to_ascii_lowercase()
}

/// A quoted parameter of a challenge.
fn parameter(challenge: &str, name: &str) -> Option<String> {
    let (_, mut rest) = challenge.split_once(' ')?;
    loop {
        let (found, after) = rest.split_once("=\"")?;
        let (value, next) = after.split_once('"')?;
        if found.trim_matches([' ', ',']).eq_ignore_ascii_case(name) {
            return Some(value.to_owned());
        }
        rest = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_lead_to_no_worse_place() {
        let base = Location::parse("https://h.example:5000/v2/a").unwrap();
        let check = |location: &str| base.join(location).ok().map(|place| (place.authority, place.path));
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
        assert!(Location::parse("http://h/a").unwrap().join("http://other/b").is_ok());
        assert!(!base.is_same_server(&Location::parse("https://h.example/v2").unwrap()));
    }

    #[test]
    fn challenges_have_parameters() {
        let challenge = r#"Bearer realm="https://t.example/token",service="a b", scope="x=\"y""#;
        assert_eq!(scheme(challenge), "bearer");
        assert_eq!(
            parameter(challenge, "realm").as_deref(),
            Some("https://t.example/token")
        );
        assert_eq!(parameter(challenge, "service").as_deref(), Some("a b"));
        assert_eq!(parameter(challenge, "nothing"), None);
        assert_eq!(parameter("Basic", "realm"), None);
        assert_eq!(
            (scheme(""), scheme("BASIC realm=x")),
            (String::new(), "basic".to_owned())
        );
    }
}

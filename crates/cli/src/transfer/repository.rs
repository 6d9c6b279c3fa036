//! A repository of a registry, as far as artifacts need it: blobs and manifests.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Seek as _;
use std::time::Duration;

use anyhow::{Context as _, Error, Result, anyhow};
use bytes::Bytes;
use formats::percent;
use http::header::{ACCEPT, CONTENT_TYPE, LOCATION, RANGE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::StreamBody;
use hyper::body::Frame;
use registry::{
    Access, Client, Content, ContentBody, Failure, Found, Login, Repository, RequestSettings, Response, Retries, Url,
};
use tokio_util::io::ReaderStream;

use super::reference::Reference;
use crate::output::printable;

/// How long a registry may take to answer, and to send the next piece of a body.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an upload may take.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(6 * 3600);
/// How often a request is sent before its failure counts, and the pause in between.
const RETRIES: Retries = Retries {
    attempts: 4,
    backoff: Duration::from_secs(1),
};
const TEXT_MAX: usize = 64 << 10;
/// Size of a piece of an upload, in bytes.
const PIECE: usize = 128 << 10;

/// A file that is uploaded, from its beginning.
pub(super) struct Upload {
    pub(super) file: File,
    pub(super) size: u64,
}

impl Content for Upload {
    fn body(&self) -> Result<ContentBody> {
        let mut file = self.file.try_clone()?;
        file.rewind()?;
        let stream = ReaderStream::with_capacity(tokio::fs::File::from_std(file), PIECE);
        let stream = futures_util::TryStreamExt::map_ok(stream, Frame::data);
        Ok(ContentBody::new(StreamBody::new(stream)))
    }

    fn length(&self) -> u64 {
        self.size
    }

    fn time(&self) -> Option<Duration> {
        Some(UPLOAD_TIMEOUT)
    }
}

/// What registries are trusted with.
pub(super) struct Trust<'a> {
    /// Registries with plain HTTP.
    pub(super) insecure: &'a [String],
    /// Certificates of issuers, in PEM, by registry.
    pub(super) authorities: &'a BTreeMap<String, String>,
}

/// A repository of artifacts.
pub(super) struct Artifacts(Repository);

impl Artifacts {
    pub(super) fn new(of: &Reference, trust: &Trust<'_>, login: Option<Login>, access: Access) -> Result<Self> {
        let client = Client::new(&RequestSettings {
            authorities: trust.authorities,
            insecure: trust.insecure,
            request_timeout: ANSWER_TIMEOUT,
            stall_timeout: ANSWER_TIMEOUT,
            lookup,
        })?;
        let repository = Repository::new(client, &of.host, &of.repository, access, login, RETRIES)?;
        Ok(Self(repository))
    }

    /// Uploads a blob, unless the repository has it. Whether it was sent.
    pub(super) async fn upload(&self, digest: &str, content: &dyn Content) -> Result<bool> {
        let has = self.0.url(&format!("blobs/{digest}"));
        let begin = self.0.url("blobs/uploads/");
        self.0
            .repeat(async || {
                let answer = self.send(&Method::HEAD, &has, &HeaderMap::new()).await?;
                if answer.status.is_success() {
                    return Ok(false);
                }
                if answer.status != StatusCode::NOT_FOUND {
                    return Err(self.failure(answer, "the question for a blob").await);
                }
                let answer = self.send(&Method::POST, &begin, &HeaderMap::new()).await?;
                if answer.status != StatusCode::ACCEPTED {
                    return Err(self.failure(answer, "an upload").await);
                }
                let location = answer.header(LOCATION);
                let location = location.context("the registry does not say where to upload")?;
                let mut place = begin.join(location).context("the registry says to upload to")?;
                place.add_query(&format!("digest={}", percent::encode(digest)));
                drop(answer);
                self.put(&place, "application/octet-stream", content, "a blob").await?;
                Ok(true)
            })
            .await
    }

    /// Stores a manifest under a tag.
    pub(super) async fn put_manifest(&self, tag: &str, kind: &'static str, text: Bytes) -> Result<()> {
        let place = self.0.url(&format!("manifests/{tag}"));
        self.0
            .repeat(async || self.put(&place, kind, &text, "the manifest").await)
            .await
    }

    /// The text of a manifest by tag or digest.
    pub(super) async fn manifest(&self, target: &str, kind: &'static str, most: usize) -> Result<Vec<u8>> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static(kind));
        let place = self.0.url(&format!("manifests/{target}"));
        self.0
            .repeat(async || {
                let answer = self.send(&Method::GET, &place, &headers).await?;
                if !answer.status.is_success() {
                    return Err(self.failure(answer, "the manifest").await);
                }
                answer.bytes(most).await
            })
            .await
    }

    /// A blob from a position on. Whether it begins there, or at its beginning.
    pub(super) async fn blob(&self, digest: &str, from: u64) -> Result<(Response, bool), Failure> {
        let mut headers = HeaderMap::new();
        if from > 0 {
            let range = HeaderValue::from_str(&format!("bytes={from}-")).map_err(Error::from)?;
            headers.insert(RANGE, range);
        }
        let place = self.0.url(&format!("blobs/{digest}"));
        let answer = self.send(&Method::GET, &place, &headers).await?;
        match answer.status {
            StatusCode::PARTIAL_CONTENT => Ok((answer, from > 0)),
            StatusCode::RANGE_NOT_SATISFIABLE => {
                Err(anyhow!("it is {from} bytes long, which is less than its manifest says").into())
            }
            status if status.is_success() => Ok((answer, false)),
            _ => Err(self.failure(answer, "a blob").await),
        }
    }

    /// Sends a request without a body.
    async fn send(&self, method: &Method, place: &Url, headers: &HeaderMap) -> Result<Response, Failure> {
        self.0.send(method, place, headers, &Bytes::new()).await
    }

    async fn put(&self, place: &Url, kind: &'static str, content: &dyn Content, what: &str) -> Result<(), Failure> {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        let answer = self.0.send(&Method::PUT, place, &headers, content).await?;
        if answer.status.is_success() {
            return Ok(());
        }
        Err(self.failure(answer, what).await)
    }

    /// What an answer that is no success means.
    async fn failure(&self, answer: Response, what: &str) -> Failure {
        let (authority, name) = (self.0.authority(), self.0.name());
        let status = answer.status;
        let mut failure = answer.failure(anyhow!("status {status}"));
        let text = answer.bytes(TEXT_MAX).await.unwrap_or_default();
        let text: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
        let why = text["errors"][0]["message"].as_str().map(printable).unwrap_or_default();
        failure.error = match status.as_u16() {
            401 if self.0.has_login() => anyhow!("{authority} does not accept the credentials"),
            401 => anyhow!("{authority} requires credentials: use --registry-user, or `docker login`"),
            403 => anyhow!("{authority} does not allow it for repository {name}"),
            404 => anyhow!("repository {name} of {authority} does not have it"),
            _ => anyhow!("{authority} answered {status} to {what}: {why}"),
        };
        failure
    }
}

/// The addresses of a host, as the C library knows them.
fn lookup(host: String) -> Found {
    Box::pin(async move {
        let found = tokio::net::lookup_host((host.trim_matches(['[', ']']), 0)).await?;
        Ok(found.map(|address| address.ip()).collect())
    })
}

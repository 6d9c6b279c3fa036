//! A registry: manifests and blobs, with the tokens that they need.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_RANGE, RANGE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex;

use super::challenge::Challenge;
use super::http::{Client, Failure, Response, Url};
use super::reference::Reference;
use crate::manifest::{ACCEPTED, Digest};

/// Maximum size of a manifest; registries refuse larger ones.
const MANIFEST_MAX: usize = 4 << 20;
const CONFIG_MAX: u64 = 8 << 20;
const TOKEN_MAX: usize = 1 << 20;
const ERROR_MAX: usize = 64 << 10;
/// Maximum time that a registry can ask to wait.
const AFTER_MAX: Duration = Duration::from_secs(60);

/// User name and password.
#[derive(Clone)]
pub(super) struct Login {
    pub(super) username: String,
    pub(super) password: String,
}

impl Login {
    fn header(&self) -> Result<HeaderValue> {
        let text = STANDARD.encode(format!("{}:{}", self.username, self.password));
        secret(&format!("Basic {text}"))
    }
}

/// A header whose value is not logged.
pub(super) fn secret(text: &str) -> Result<HeaderValue> {
    let mut value = HeaderValue::from_str(text).map_err(|_| anyhow!("credentials with an unsupported character"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// How often and how fast requests are repeated.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retries {
    pub(super) attempts: u32,
    pub(super) backoff: Duration,
}

/// One repository of a registry.
pub(super) struct Registry {
    client: Client,
    base: Url,
    reference: Reference,
    login: Option<Login>,
    retries: Retries,
    /// The current `Authorization`, if the registry requires one.
    authorization: Mutex<Option<HeaderValue>>,
}

/// An object of a registry with its digest and size.
#[derive(Debug, Clone)]
pub(super) struct Blob {
    pub(super) digest: Digest,
    pub(super) size: u64,
}

#[derive(Debug, Default, Deserialize)]
struct Errors {
    #[serde(default)]
    errors: Vec<ErrorItem>,
}

#[derive(Debug, Default, Deserialize)]
struct ErrorItem {
    #[serde(default)]
    code: String,
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Registry {
    /// Creates a client of `host`, which is the registry or a mirror of it.
    pub(super) fn new(
        client: Client,
        host: &str,
        reference: Reference,
        login: Option<Login>,
        retries: Retries,
    ) -> Result<Self> {
        super::reference::check_host(host)?;
        let host = if host == "docker.io" {
            "registry-1.docker.io"
        } else {
            host
        };
        let scheme = if client.is_insecure(host) { "http" } else { "https" };
        let base = Url::parse(&format!("{scheme}://{host}/v2/{}", reference.repository))?;
        Ok(Self {
            client,
            base,
            reference,
            login,
            retries,
            authorization: Mutex::new(None),
        })
    }

    fn url(&self, rest: &str) -> Url {
        Url {
            path: format!("{}/{rest}", self.base.path),
            ..self.base.clone()
        }
    }

    /// A manifest by tag or digest. Its digest is computed, and checked where one is known.
    pub(super) async fn manifest(&self, target: &str) -> Result<(Vec<u8>, Digest)> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static(ACCEPTED));
        let expected = Digest::parse(target).ok();
        self.repeat(async || {
            let response = self.get(&self.url(&format!("manifests/{target}")), &headers).await?;
            let response = self.check(response, "manifest").await?;
            let stated = response
                .headers
                .get("docker-content-digest")
                .and_then(|value| value.to_str().ok());
            let stated = stated.and_then(|text| Digest::parse(text).ok());
            let bytes = response.bytes(MANIFEST_MAX).await?;
            let digest = Digest::of(&bytes);
            if [&expected, &stated].into_iter().flatten().any(|other| *other != digest) {
                return Err(Failure::temporary(anyhow!(
                    "the manifest has the wrong digest {digest}"
                )));
            }
            Ok((bytes, digest))
        })
        .await
    }

    /// A small blob.
    pub(super) async fn config(&self, blob: &Blob) -> Result<Vec<u8>> {
        ensure!(
            blob.size <= CONFIG_MAX,
            "the configuration is larger than {CONFIG_MAX} bytes"
        );
        let most = usize::try_from(blob.size)?;
        self.repeat(async || {
            let response = self
                .get(&self.url(&format!("blobs/{}", blob.digest)), &HeaderMap::new())
                .await?;
            let bytes = self.check(response, "configuration").await?.bytes(most).await?;
            if Digest::of(&bytes) != blob.digest {
                return Err(Failure::temporary(anyhow!("the configuration has the wrong digest")));
            }
            Ok(bytes)
        })
        .await
    }

    /// Downloads a blob to a file. An attempt goes on where the one before it ended.
    pub(super) async fn download(&self, blob: &Blob, path: &Path, shown: &AtomicU64) -> Result<()> {
        let mut progress = Progress {
            shown,
            file: File::create_new(path).with_context(|| format!("create {}", path.display()))?,
            hasher: Sha256::new(),
            received: 0,
        };
        let mut failed = 0;
        loop {
            let before = progress.received;
            match self.part(blob, &mut progress).await {
                Ok(()) => return Ok(()),
                // What brings bytes is no failure of the same kind as one that brings none.
                Err(failure) => {
                    failed = if progress.received > before { 1 } else { failed + 1 };
                    self.pause(failure, failed).await?;
                }
            }
        }
    }

    async fn part(&self, blob: &Blob, progress: &mut Progress<'_>) -> Result<(), Failure> {
        let mut headers = HeaderMap::new();
        if progress.received > 0 {
            let range = format!("bytes={}-", progress.received);
            headers.insert(
                RANGE,
                HeaderValue::from_str(&range).map_err(|_| Failure::from(anyhow!("invalid range")))?,
            );
        }
        let response = self.get(&self.url(&format!("blobs/{}", blob.digest)), &headers).await?;
        if response.status == StatusCode::RANGE_NOT_SATISFIABLE {
            progress.restart()?;
            return Err(Failure::temporary(anyhow!(
                "the registry does not resume layer {}",
                blob.digest
            )));
        }
        let mut response = self.check(response, "layer").await?;
        let start = format!("bytes {}-", progress.received);
        let is_rest = response.status == StatusCode::PARTIAL_CONTENT
            && response
                .header(CONTENT_RANGE)
                .is_some_and(|range| range.starts_with(&start));
        if progress.received > 0 && !is_rest {
            progress.restart()?;
        }
        while let Some(chunk) = response.chunk().await? {
            progress.received += chunk.len() as u64;
            if progress.received > blob.size {
                return Err(anyhow!(
                    "layer {} is larger than the {} bytes of its manifest",
                    blob.digest,
                    blob.size
                )
                .into());
            }
            progress.shown.store(progress.received, Ordering::Relaxed);
            progress.hasher.update(&chunk);
            progress
                .file
                .write_all(&chunk)
                .context("write a layer")
                .map_err(Failure::from)?;
        }
        if progress.received < blob.size {
            let Progress { received, .. } = progress;
            return Err(Failure::temporary(anyhow!(
                "layer {} ended after {received} of {} bytes",
                blob.digest,
                blob.size
            )));
        }
        let digest = Digest::from_hash(&progress.hasher.clone().finalize());
        if digest != blob.digest {
            progress.restart()?;
            return Err(Failure::temporary(anyhow!(
                "layer {} has the wrong digest {digest}",
                blob.digest
            )));
        }
        Ok(())
    }

    /// Repeats what failed for a temporary reason.
    async fn repeat<T>(&self, action: impl AsyncFn() -> Result<T, Failure>) -> Result<T> {
        let mut failed = 0;
        loop {
            match action().await {
                Ok(done) => return Ok(done),
                Err(failure) => {
                    failed += 1;
                    self.pause(failure, failed).await?;
                }
            }
        }
    }

    /// Waits before another attempt, or gives up.
    async fn pause(&self, failure: Failure, failed: u32) -> Result<()> {
        if !failure.is_temporary || failed >= self.retries.attempts {
            let error = failure.error;
            return Err(if failed > 1 {
                error.context(format!("failed {failed} times"))
            } else {
                error
            });
        }
        let backoff = self.retries.backoff * 2_u32.saturating_pow(failed.saturating_sub(1).min(6));
        tokio::time::sleep(failure.after.map_or(backoff, |after| after.min(AFTER_MAX)).max(backoff)).await;
        Ok(())
    }

    /// Sends a request with what the registry wants for authorization.
    async fn get(&self, url: &Url, headers: &HeaderMap) -> Result<Response, Failure> {
        let used = self.authorization.lock().await.clone();
        let response = self.get_as(url, headers, used.as_ref()).await?;
        // Another server, to which a redirect led, has nothing to ask for.
        if response.status != StatusCode::UNAUTHORIZED || response.authority != self.base.authority() {
            return Ok(response);
        }
        let mut current = self.authorization.lock().await;
        // Another task may have renewed it meanwhile.
        if *current == used {
            let challenges = response.headers.get_all(WWW_AUTHENTICATE).iter();
            let challenge = challenges
                .filter_map(|value| Challenge::parse(value.to_str().ok()?))
                .max();
            match self.authorize(challenge).await? {
                Some(value) if Some(&value) != used.as_ref() => *current = Some(value),
                // Nothing else can be tried.
                _ => return Ok(response),
            }
        }
        let renewed = current.clone();
        drop(current);
        self.get_as(url, headers, renewed.as_ref()).await
    }

    async fn get_as(&self, url: &Url, headers: &HeaderMap, value: Option<&HeaderValue>) -> Result<Response, Failure> {
        let mut headers = headers.clone();
        if let Some(value) = value {
            headers.insert(AUTHORIZATION, value.clone());
        }
        self.client.send(Method::GET, url, &headers, Bytes::new()).await
    }

    /// The authorization that a registry asks for; none if there are no credentials for it.
    async fn authorize(&self, challenge: Option<Challenge>) -> Result<Option<HeaderValue>, Failure> {
        let login = self.login.as_ref().map(Login::header).transpose()?;
        match challenge {
            None => Ok(None),
            Some(Challenge::Basic) => Ok(login),
            Some(Challenge::Bearer { realm, service, .. }) => {
                let scope = format!("repository:{}:pull", self.reference.repository);
                let mut url = Url::parse(&realm).context("realm of the registry")?;
                let mark = if url.path.contains('?') { '&' } else { '?' };
                let service = service.map_or(String::new(), |service| format!("service={}&", encode(&service)));
                url.path = format!("{}{mark}{service}scope={}", url.path, encode(&scope));
                let mut headers = HeaderMap::new();
                if let Some(login) = login {
                    headers.insert(AUTHORIZATION, login);
                }
                let response = self.client.send(Method::GET, &url, &headers, Bytes::new()).await?;
                if matches!(response.status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
                    return Ok(None);
                }
                let response = self.check(response, "token").await?;
                let bytes = response.bytes(TOKEN_MAX).await?;
                let token: Token =
                    serde_json::from_slice(&bytes).map_err(|_| anyhow!("invalid token of the registry"))?;
                let token = token
                    .token
                    .or(token.access_token)
                    .context("no token in the response of the registry")?;
                Ok(Some(secret(&format!("Bearer {token}"))?))
            }
        }
    }

    /// Turns a response that is not a success into a message for the user.
    async fn check(&self, response: Response, what: &str) -> Result<Response, Failure> {
        let status = response.status;
        if status.is_success() {
            return Ok(response);
        }
        let after = response
            .header(RETRY_AFTER)
            .and_then(|text| text.parse().ok())
            .map(Duration::from_secs);
        let authority = response.authority.clone();
        let body = response.bytes(ERROR_MAX).await.unwrap_or_default();
        let errors: Errors = serde_json::from_slice(&body).unwrap_or_default();
        let has_code = |code: &str| errors.errors.iter().any(|error| error.code == code);
        let is_temporary = status.is_server_error() || matches!(status.as_u16(), 408 | 429);
        let error: Error = match status.as_u16() {
            401 if self.login.is_some() => anyhow!("unauthorised: {authority} does not accept the credentials"),
            401 => anyhow!("unauthorised: {authority} requires credentials, or the repository does not exist"),
            403 => anyhow!("denied: {authority} does not allow access to the repository"),
            404 if what != "manifest" => anyhow!("{authority} does not have the {what}"),
            404 if has_code("NAME_UNKNOWN") || !self.has_repository().await => {
                anyhow!("unknown repository {} on {authority}", self.reference.repository)
            }
            404 => anyhow!("unknown tag or digest {}", self.reference.target()),
            429 => anyhow!("{authority} has received too many requests: use credentials or try again later"),
            _ => anyhow!("{authority} responded with status {status} to the request for the {what}"),
        };
        Err(Failure {
            error,
            is_temporary,
            after,
        })
    }

    /// Whether a repository has any tags. Some registries give the same error for an unknown one.
    async fn has_repository(&self) -> bool {
        let authorization = self.authorization.lock().await.clone();
        let url = self.url("tags/list?n=1");
        match self.get_as(&url, &HeaderMap::new(), authorization.as_ref()).await {
            Ok(response) => response.status != StatusCode::NOT_FOUND,
            Err(_) => true,
        }
    }
}

/// What was received of a blob.
struct Progress<'a> {
    /// Number of received bytes, for readers of other threads.
    shown: &'a AtomicU64,
    file: File,
    hasher: Sha256,
    received: u64,
}

impl Progress<'_> {
    fn restart(&mut self) -> Result<(), Failure> {
        self.hasher = Sha256::new();
        self.received = 0;
        let restarted = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        restarted.context("write a layer").map_err(Failure::from)?;
        Ok(())
    }
}

/// Percent-encoding of a value in a query.
pub(super) fn encode(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
    text.bytes()
        .map(|byte| {
            if is_plain(byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect()
}

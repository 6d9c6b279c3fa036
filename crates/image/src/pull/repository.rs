//! A registry: manifests and blobs.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, anyhow, ensure};
use bytes::Bytes;
use http::header::{ACCEPT, CONTENT_RANGE, RANGE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use registry::{Access, Client, Failure, Login, Repository, Response, Retries, Url};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::reference::Reference;
use crate::manifest::{ACCEPTED, Digest};

/// Maximum size of a manifest; registries refuse larger ones.
const MANIFEST_MAX: usize = 4 << 20;
const CONFIG_MAX: u64 = 8 << 20;
const ERROR_MAX: usize = 64 << 10;

/// One repository of a registry.
pub(super) struct Registry {
    repository: Repository,
    reference: Reference,
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

impl Registry {
    /// `host` is the registry or a mirror of it.
    pub(super) fn new(
        client: Client,
        host: &str,
        reference: Reference,
        login: Option<Login>,
        retries: Retries,
    ) -> Result<Self> {
        registry::name::check_host(host)?;
        let host = if host == "docker.io" {
            "registry-1.docker.io"
        } else {
            host
        };
        Ok(Self {
            repository: Repository::new(client, host, &reference.repository, Access::Pull, login, retries)?,
            reference,
        })
    }

    /// A manifest by tag or digest. Its digest is computed, and checked where one is known.
    pub(super) async fn manifest(&self, target: &str) -> Result<(Vec<u8>, Digest)> {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_static(ACCEPTED));
        let expected = Digest::parse(target).ok();
        self.repository
            .repeat(async || {
                let response = self
                    .get(&self.repository.url(&format!("manifests/{target}")), &headers)
                    .await?;
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
        self.repository
            .repeat(async || {
                let response = self
                    .get(
                        &self.repository.url(&format!("blobs/{}", blob.digest)),
                        &HeaderMap::new(),
                    )
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
                    self.repository.pause(failure, failed).await?;
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
        let response = self
            .get(&self.repository.url(&format!("blobs/{}", blob.digest)), &headers)
            .await?;
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

    async fn get(&self, url: &Url, headers: &HeaderMap) -> Result<Response, Failure> {
        self.repository.send(&Method::GET, url, headers, &Bytes::new()).await
    }

    /// Turns a response that is not a success into a message for the user.
    async fn check(&self, response: Response, what: &str) -> Result<Response, Failure> {
        let status = response.status;
        if status.is_success() {
            return Ok(response);
        }
        let authority = response.authority.clone();
        let mut failure = response.failure(anyhow!("status {status}"));
        let body = response.bytes(ERROR_MAX).await.unwrap_or_default();
        let errors: Errors = serde_json::from_slice(&body).unwrap_or_default();
        let has_code = |code: &str| errors.errors.iter().any(|error| error.code == code);
        failure.error = match status.as_u16() {
            401 if self.repository.has_login() => anyhow!("unauthorised: {authority} does not accept the credentials"),
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
        Err(failure)
    }

    /// Whether a repository has any tags. Some registries give the same error for an unknown one.
    async fn has_repository(&self) -> bool {
        let url = self.repository.url("tags/list?n=1");
        match self.get(&url, &HeaderMap::new()).await {
            Ok(response) => response.status != StatusCode::NOT_FOUND,
            Err(_) => true,
        }
    }
}

/// What was received of a blob.
struct Progress<'a> {
    /// How much, for others.
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

//! One repository of a registry: requests with the token that it asks for, and their repetition.

use std::fmt;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use bytes::Bytes;
use formats::percent;
use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use serde::Deserialize;
use tokio::sync::Mutex;

use crate::challenge::Challenge;
use crate::client::{Client, Content, Failure, Response, Url};
use crate::login::{Login, secret};

/// Maximum size of an answer with a token, in bytes.
const TOKEN_MAX: usize = 1 << 20;
/// Maximum time that a registry can ask to wait.
const AFTER_MAX: Duration = Duration::from_secs(60);

/// How often and how fast requests are repeated.
#[derive(Debug, Clone, Copy)]
pub struct Retries {
    /// How often a request is sent before its failure counts.
    pub attempts: u32,
    /// The pause after the first failure. It doubles.
    pub backoff: Duration,
}

/// What a repository is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading the repository.
    Pull,
    /// Reading and writing the repository.
    Push,
}

/// One repository of a registry.
pub struct Repository {
    client: Client,
    base: Url,
    name: String,
    access: Access,
    login: Option<Login>,
    retries: Retries,
    /// The current `Authorization`, if the registry wants one.
    authorization: Mutex<Option<HeaderValue>>,
}

impl fmt::Debug for Repository {
    /// Shows no credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Repository")
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
}

impl Repository {
    /// The repository of a name at a `host` or `host:port`.
    ///
    /// # Errors
    /// When they make no URL.
    pub fn new(
        client: Client,
        host: &str,
        name: &str,
        access: Access,
        login: Option<Login>,
        retries: Retries,
    ) -> Result<Self> {
        let scheme = if client.is_insecure(host) { "http" } else { "https" };
        Ok(Self {
            base: Url::parse(&format!("{scheme}://{host}/v2/{name}"))?,
            name: name.to_owned(),
            client,
            access,
            login,
            retries,
            authorization: Mutex::new(None),
        })
    }

    /// The name of the repository.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The registry, as `host` or `host:port`.
    #[must_use]
    pub fn authority(&self) -> String {
        self.base.authority()
    }

    /// Whether there are credentials for the registry.
    #[must_use]
    pub fn has_login(&self) -> bool {
        self.login.is_some()
    }

    /// A place in the repository, such as `manifests/latest`.
    #[must_use]
    pub fn url(&self, rest: &str) -> Url {
        Url {
            path: format!("{}/{rest}", self.base.path),
            ..self.base.clone()
        }
    }

    /// Sends a request, with what the registry wants for authorization if it goes to the registry itself.
    ///
    /// # Errors
    /// When there is no answer. An answer that is no success is none.
    pub async fn send(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        content: &dyn Content,
    ) -> Result<Response, Failure> {
        let is_own = url.is_same_origin(&self.base);
        let used = self.authorization.lock().await.clone().filter(|_| is_own);
        let response = self.send_as(method, url, headers, content, used.as_ref()).await?;
        // Another server, to which a redirect led, has nothing to ask for.
        let is_asked = is_own && response.authority == self.base.authority();
        if response.status != StatusCode::UNAUTHORIZED || !is_asked {
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
        self.send_as(method, url, headers, content, renewed.as_ref()).await
    }

    async fn send_as(
        &self,
        method: &Method,
        url: &Url,
        headers: &HeaderMap,
        content: &dyn Content,
        authorization: Option<&HeaderValue>,
    ) -> Result<Response, Failure> {
        let mut headers = headers.clone();
        if let Some(value) = authorization {
            headers.insert(AUTHORIZATION, value.clone());
        }
        self.client.send(method, url, &headers, content).await
    }

    /// The authorization that a registry asks for; none if there are no credentials for it.
    async fn authorize(&self, challenge: Option<Challenge>) -> Result<Option<HeaderValue>, Failure> {
        let login = self.login.as_ref().map(Login::header).transpose()?;
        let (realm, service) = match challenge {
            None => return Ok(None),
            Some(Challenge::Basic) => return Ok(login),
            Some(Challenge::Bearer { realm, service }) => (realm, service),
        };
        let mut url = self.base.join(&realm).context("realm of the registry")?;
        let actions = match self.access {
            Access::Pull => "pull",
            Access::Push => "pull,push",
        };
        let scope = percent::encode(&format!("repository:{}:{actions}", self.name));
        let service = service.map(|service| format!("service={}&", percent::encode(&service)));
        url.add_query(&format!("{}scope={scope}", service.unwrap_or_default()));
        let mut headers = HeaderMap::new();
        if let Some(login) = login {
            headers.insert(AUTHORIZATION, login);
        }
        let response = self.client.send(&Method::GET, &url, &headers, &Bytes::new()).await?;
        let status = response.status;
        if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            return Ok(None);
        }
        if !status.is_success() {
            let authority = &response.authority;
            let error = match status {
                StatusCode::TOO_MANY_REQUESTS => {
                    anyhow!("{authority} has received too many requests: use credentials or try again later")
                }
                _ => anyhow!("{authority} responded with status {status} to the request for the token"),
            };
            return Err(response.failure(error));
        }
        let bytes = response.bytes(TOKEN_MAX).await?;
        let token: Token = serde_json::from_slice(&bytes).map_err(|_| anyhow!("invalid token of the registry"))?;
        let token = token.token.or(token.access_token);
        let token = token.context("no token in the response of the registry")?;
        Ok(Some(secret(&format!("Bearer {token}"))?))
    }

    /// Repeats what failed for a temporary reason.
    ///
    /// # Errors
    /// When it failed for another reason, or too often.
    pub async fn repeat<T>(&self, action: impl AsyncFn() -> Result<T, Failure>) -> Result<T> {
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

    /// Waits before another attempt.
    ///
    /// # Errors
    /// The failure, if there is to be no other attempt.
    pub async fn pause(&self, failure: Failure, failed: u32) -> Result<()> {
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
}

//! Removes the platform's own credentials from requests to sandboxes.
//!
//! Clients send their key with every request to the platform's address, and a program in a sandbox must not get it. But
//! applications in sandboxes use keys of their own, in the same headers and, if they call another such platform, in the
//! same format. So exactly those values are removed that are credentials of this platform, which only its database
//! knows. Lookups are cached by the hash of the value.

use std::collections::HashMap;
use std::time::Duration;

use http::HeaderMap;
use http::header::{AUTHORIZATION, HeaderName, HeaderValue};
use parking_lot::Mutex;
use store::Store;
use store::keys::KeyHash;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::chain::Chain;
use crate::keys::{hash_access_token, hash_api_key};

/// Headers that carry credentials of the platform.
const CARRIERS: [HeaderName; 2] = [HeaderName::from_static("x-api-key"), AUTHORIZATION];
/// How long a negative lookup is cached. New keys are random, so a value that was seen before does not become one.
const FOREIGN_TTL: Duration = Duration::from_secs(300);
/// Maximum number of cached values.
const CACHE_MAX: usize = 4096;
/// Maximum number of concurrent lookups, and how long a request waits for one.
const LOOKUPS: (usize, Duration) = (2, Duration::from_millis(250));
/// Longest value that is checked, in bytes, and maximum number of values in one request: the platform's credentials are
/// shorter, and a client sends one.
const VALUES: (usize, usize) = (256, 4);

/// Removes the platform's credentials from request headers.
#[derive(Debug)]
pub(super) struct CredentialFilter {
    /// Whether a value is a credential of this platform, and when it was looked up.
    known: Mutex<HashMap<KeyHash, (bool, Instant)>>,
    lookups: Semaphore,
}

impl Default for CredentialFilter {
    fn default() -> Self {
        Self {
            known: Mutex::default(),
            lookups: Semaphore::new(LOOKUPS.0),
        }
    }
}

enum Candidate {
    ApiKey(KeyHash),
    AccessToken(KeyHash),
}

impl CredentialFilter {
    /// Removes every value that is a credential of this platform, and no other value.
    pub(super) async fn strip(&self, store: &Store, headers: &mut HeaderMap) {
        for name in &CARRIERS {
            let mut ours = Vec::new();
            for (count, value) in headers.get_all(name).iter().enumerate() {
                let Some(candidate) = candidate(value) else { continue };
                // No legitimate client sends so many.
                if count >= VALUES.1 || self.is_ours(store, candidate).await {
                    ours.push(value.clone());
                }
            }
            if ours.is_empty() {
                continue;
            }
            let all: Vec<HeaderValue> = headers.get_all(name).iter().cloned().collect();
            headers.remove(name);
            for value in all.into_iter().filter(|value| !ours.contains(value)) {
                headers.append(name, value);
            }
        }
    }

    async fn is_ours(&self, store: &Store, candidate: Candidate) -> bool {
        let (Candidate::ApiKey(hash) | Candidate::AccessToken(hash)) = &candidate;
        let now = Instant::now();
        if let Some((ours, at)) = self.known.lock().get(hash)
            && (*ours || now - *at < FOREIGN_TTL)
        {
            return *ours;
        }
        let Ok(Ok(_turn)) = tokio::time::timeout(LOOKUPS.1, self.lookups.acquire()).await else {
            // In doubt, removing an application's key is better than leaking one of the platform.
            return true;
        };
        let found = match &candidate {
            Candidate::ApiKey(hash) => store.api_key_by_hash(hash).await.map(|owner| owner.is_some()),
            Candidate::AccessToken(hash) => store.access_token_by_hash(hash).await.map(|owner| owner.is_some()),
        };
        match found {
            Ok(ours) => {
                self.cache(hash.clone(), ours, now);
                ours
            }
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "cannot look up whether a key belongs to this platform");
                true
            }
        }
    }

    fn cache(&self, hash: KeyHash, ours: bool, now: Instant) {
        let mut known = self.known.lock();
        if known.len() >= CACHE_MAX {
            known.retain(|_, (ours, at)| *ours || now - *at < FOREIGN_TTL);
        }
        if known.len() >= CACHE_MAX
            && let Some(any) = known.keys().next().cloned()
        {
            known.remove(&any);
        }
        known.insert(hash, (ours, now));
    }
}

/// The kind of credential that a value may be, by its format: with or without an authentication scheme.
fn candidate(value: &HeaderValue) -> Option<Candidate> {
    let text = value.to_str().ok()?.trim();
    if text.len() > VALUES.0 {
        return None;
    }
    let key = text.rsplit(' ').next().unwrap_or(text);
    let key_hash = hash_api_key(key).ok().map(Candidate::ApiKey);
    key_hash.or_else(|| hash_access_token(key).ok().map(Candidate::AccessToken))
}

//! The platform's own credentials in requests to sandboxes.
//!
//! Clients send their key with everything that goes to the platform's address, and a program in a sandbox must not get
//! it. But applications in sandboxes have keys of their own, in the same headers and, where they call another platform
//! of this kind, in the same form. So exactly those values go that are credentials of this platform, which only its
//! database knows. What it said is remembered under the hash of the value.

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

/// Where the platform takes credentials from.
const CARRIERS: [HeaderName; 2] = [HeaderName::from_static("x-api-key"), AUTHORIZATION];
/// How long a value is known to be none of ours. A new key is random, so none becomes one after it was seen.
const FOREIGN_TTL: Duration = Duration::from_secs(300);
/// Values that are remembered.
const CACHE_MAX: usize = 4096;
/// Questions to the database at a time, and how long one may wait for its turn.
const LOOKUPS: (usize, Duration) = (2, Duration::from_millis(250));
/// Longest value that is looked at, and most values of one request: ours are shorter, and a client sends one.
const VALUES: (usize, usize) = (256, 4);

/// Takes the platform's credentials out of requests.
#[derive(Debug)]
pub(super) struct CredentialFilter {
    /// Whether a value is ours, and when that was found.
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
    /// Removes every value that is a credential of this platform, and no other.
    pub(super) async fn strip(&self, store: &Store, headers: &mut HeaderMap) {
        for name in &CARRIERS {
            let mut ours = Vec::new();
            for (count, value) in headers.get_all(name).iter().enumerate() {
                let Some(candidate) = candidate(value) else { continue };
                // Nobody who needs one of them sends so many.
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
            // Rather a stranger's key too few than one of ours too many.
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
                tracing::warn!(error = %Chain(&error), "tell whether a key is one of this platform");
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

/// What a value may be, by its form alone: with or without a scheme in front.
fn candidate(value: &HeaderValue) -> Option<Candidate> {
    let text = value.to_str().ok()?.trim();
    if text.len() > VALUES.0 {
        return None;
    }
    let key = text.rsplit(' ').next().unwrap_or(text);
    let key_hash = hash_api_key(key).ok().map(Candidate::ApiKey);
    key_hash.or_else(|| hash_access_token(key).ok().map(Candidate::AccessToken))
}

//! Whom a credential speaks for. Each is looked up anew, so that one revoked by this or another process stops at once.

use std::collections::HashMap;

use model::id::{TeamId, UserId};
use parking_lot::Mutex;
use secrecy::{ExposeSecret as _, SecretString};
use store::Store;
use store::error::StoreError;
use tokio_util::task::TaskTracker;

use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::keys::{InvalidKey, hash_access_token, hash_api_key};

/// A use of a credential is noted when this much time passed since the last note, because it is a write.
const RECORD_INTERVAL_US: i64 = 60 * SECOND_US;

/// What a request presents.
#[derive(Debug)]
pub(crate) enum Credential {
    ApiKey(SecretString),
    AccessToken(SecretString),
}

/// Whom a credential speaks for: one user of one team, who may do what the team may.
#[derive(Debug)]
pub(crate) struct Owner {
    /// The id of the credential.
    pub(crate) credential: String,
    /// The team.
    pub(crate) team: TeamId,
    /// The user.
    pub(crate) user: UserId,
}

/// Why a credential speaks for nobody.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthenticationError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("invalid API key")]
    InvalidApiKey(#[source] InvalidKey),
    #[error("unknown API key")]
    UnknownApiKey,
    #[error("invalid access token")]
    InvalidAccessToken(#[source] InvalidKey),
    #[error("unknown access token")]
    UnknownAccessToken,
}

/// Finds the owners of credentials.
#[derive(Debug)]
pub(crate) struct Authenticator {
    store: Store,
    clock: Clock,
    /// When the use of each credential was last noted, in microseconds since the Unix epoch. As many as there are keys
    /// that count: an unknown one never gets here.
    recorded: Mutex<HashMap<String, i64>>,
    /// Work that a request began and that outlives it.
    work: TaskTracker,
}

impl Authenticator {
    pub(crate) fn new(store: Store, clock: Clock, work: TaskTracker) -> Self {
        Self {
            store,
            clock,
            recorded: Mutex::default(),
            work,
        }
    }

    /// Whom a credential speaks for. The lookup compares hashes of random keys, so its timing tells nothing about a key.
    pub(crate) async fn owner(&self, credential: &Credential) -> Result<Owner, AuthenticationError> {
        match credential {
            Credential::ApiKey(key) => {
                let hash = hash_api_key(key.expose_secret()).map_err(AuthenticationError::InvalidApiKey)?;
                let owner = self.store.api_key_by_hash(&hash).await?;
                let owner = owner.ok_or(AuthenticationError::UnknownApiKey)?;
                Ok(Owner {
                    credential: owner.key_id,
                    team: owner.team_id,
                    user: owner.user_id,
                })
            }
            Credential::AccessToken(token) => {
                let hash = hash_access_token(token.expose_secret()).map_err(AuthenticationError::InvalidAccessToken)?;
                let owner = self.store.access_token_by_hash(&hash).await?;
                let owner = owner.ok_or(AuthenticationError::UnknownAccessToken)?;
                Ok(Owner {
                    credential: owner.token_id,
                    team: owner.team_id,
                    user: owner.user_id,
                })
            }
        }
    }

    /// Notes that a credential was used, now and then, beside the request.
    pub(crate) fn record_use(&self, credential: &Credential, id: String) {
        let now_us = self.clock.now_us();
        if !self.is_due(&id, now_us) {
            return;
        }
        let is_api_key = matches!(credential, Credential::ApiKey(_));
        let store = self.store.clone();
        self.work.spawn(async move {
            let recorded = if is_api_key {
                store.api_key_used(&id, now_us).await
            } else {
                store.access_token_used(&id, now_us).await
            };
            if let Err(error) = recorded {
                tracing::warn!(key.id = id, error = %Chain(&error), "note the use of a key");
            }
        });
    }

    fn is_due(&self, id: &str, now_us: i64) -> bool {
        let mut recorded = self.recorded.lock();
        match recorded.get_mut(id) {
            Some(at_us) if now_us - *at_us < RECORD_INTERVAL_US => false,
            Some(at_us) => {
                *at_us = now_us;
                true
            }
            None => {
                recorded.insert(id.to_owned(), now_us);
                true
            }
        }
    }
}

//! Authentication of credentials. Every use is looked up, so that a credential revoked by any process is refused
//! immediately.

use std::collections::HashMap;

use model::id::{TeamId, UserId};
use parking_lot::Mutex;
use secrecy::{ExposeSecret as _, SecretString};
use store::Store;
use store::error::StoreError;
use store::keys::KeyHash;
use tokio_util::task::TaskTracker;

use crate::chain::Chain;
use crate::clock::{Clock, SECOND_US};
use crate::keys::{InvalidKey, hash_access_token, hash_api_key};

/// Shortest time between two records of the use of a credential, because each is a write.
const RECORD_INTERVAL_US: i64 = 60 * SECOND_US;

/// The credential of a request.
#[derive(Debug)]
pub(crate) enum Credential {
    ApiKey(SecretString),
    AccessToken(SecretString),
}

/// What a credential is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CredentialKind {
    ApiKey,
    AccessToken,
}

impl Credential {
    pub(crate) fn kind(&self) -> CredentialKind {
        match self {
            Self::ApiKey(_) => CredentialKind::ApiKey,
            Self::AccessToken(_) => CredentialKind::AccessToken,
        }
    }
}

/// A credential as the database knows it: it opens nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoredCredential {
    ApiKey(KeyHash),
    AccessToken(KeyHash),
}

impl StoredCredential {
    /// The hash of a credential.
    pub(crate) fn of(credential: &Credential) -> Result<Self, AuthenticationError> {
        match credential {
            Credential::ApiKey(key) => hash_api_key(key.expose_secret())
                .map(Self::ApiKey)
                .map_err(AuthenticationError::InvalidApiKey),
            Credential::AccessToken(token) => hash_access_token(token.expose_secret())
                .map(Self::AccessToken)
                .map_err(AuthenticationError::InvalidAccessToken),
        }
    }

    pub(crate) fn kind(&self) -> CredentialKind {
        match self {
            Self::ApiKey(_) => CredentialKind::ApiKey,
            Self::AccessToken(_) => CredentialKind::AccessToken,
        }
    }
}

/// Extension of a request that a session of the dashboard makes: whom it acts for.
#[derive(Debug, Clone)]
pub(crate) struct SessionOwner(pub(crate) Owner);

/// The owner of a credential: a user of a team, with all rights of the team.
#[derive(Debug, Clone)]
pub(crate) struct Owner {
    /// The id of the credential.
    pub(crate) credential: String,
    /// The team.
    pub(crate) team: TeamId,
    /// The user.
    pub(crate) user: UserId,
}

/// Why a credential was refused.
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

/// Looks up the owners of credentials.
#[derive(Debug)]
pub(crate) struct Authenticator {
    store: Store,
    clock: Clock,
    /// When the use of each credential was last recorded, in microseconds since the Unix epoch. Bounded by the number
    /// of valid credentials: unknown ones never get here.
    recorded: Mutex<HashMap<String, i64>>,
    /// Tracker of work that a request started and that outlives the request.
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

    /// The owner of a credential. The lookup compares hashes of random keys, so its timing reveals nothing about a key.
    pub(crate) async fn owner(&self, credential: &Credential) -> Result<Owner, AuthenticationError> {
        let stored = StoredCredential::of(credential)?;
        let owner = self.owner_of_stored(&stored).await?;
        owner.ok_or(match stored {
            StoredCredential::ApiKey(_) => AuthenticationError::UnknownApiKey,
            StoredCredential::AccessToken(_) => AuthenticationError::UnknownAccessToken,
        })
    }

    /// The owner of a credential of which the hash is known; `None` once it was revoked.
    pub(crate) async fn owner_of_stored(&self, credential: &StoredCredential) -> Result<Option<Owner>, StoreError> {
        Ok(match credential {
            StoredCredential::ApiKey(hash) => self.store.api_key_by_hash(hash).await?.map(|owner| Owner {
                credential: owner.key_id,
                team: owner.team_id,
                user: owner.user_id,
            }),
            StoredCredential::AccessToken(hash) => self.store.access_token_by_hash(hash).await?.map(|owner| Owner {
                credential: owner.token_id,
                team: owner.team_id,
                user: owner.user_id,
            }),
        })
    }

    /// Records that the credential with that id was used, in the background and at most once per interval.
    pub(crate) fn record_use(&self, kind: CredentialKind, id: &str) {
        let now_us = self.clock.now_us();
        if !self.is_due(id, now_us) {
            return;
        }
        let id = id.to_owned();
        let store = self.store.clone();
        self.work.spawn(async move {
            let recorded = match kind {
                CredentialKind::ApiKey => store.api_key_used(&id, now_us).await,
                CredentialKind::AccessToken => store.access_token_used(&id, now_us).await,
            };
            if let Err(error) = recorded {
                tracing::warn!(key.id = id, error = %Chain(&error), "cannot record the use of a key");
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

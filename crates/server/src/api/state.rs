//! What handlers work with. Each takes the services that it needs, by their types, and no other.

use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRef;
use model::id::SandboxId;
use secrecy::SecretString;
use store::Store;

use crate::admission::AdmissionControl;
use crate::authentication::Authenticator;
use crate::clock::Clock;
use crate::keys::TokenSeed;
use crate::metrics::Metrics;
use crate::records::Records;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::idempotency::Claims;
use crate::sandboxes::registry::Registry;

/// The state of the router: cloning it shares the services.
#[derive(Debug, Clone)]
pub(crate) struct ApiState(Arc<Services>);

impl ApiState {
    pub(crate) fn new(services: Services) -> Self {
        Self(Arc::new(services))
    }
}

impl Deref for ApiState {
    type Target = Services;

    fn deref(&self) -> &Services {
        &self.0
    }
}

macro_rules! services {
    ($($(#[doc = $doc:literal])* $service:ident: $type:ty,)*) => {
        /// Everything that some handler needs.
        #[derive(Debug)]
        pub(crate) struct Services {
            $($(#[doc = $doc])* pub(crate) $service: $type,)*
        }

        $(impl FromRef<ApiState> for $type {
            fn from_ref(state: &ApiState) -> Self {
                state.0.$service.clone()
            }
        })*
    };
}

services! {
    store: Store,
    clock: Clock,
    tokens: TokenSeed,
    access: Arc<SandboxAccess>,
    sandboxes: Arc<Sandboxes>,
    registry: Arc<Registry>,
    claims: Arc<Claims>,
    admission: Arc<AdmissionControl>,
    authenticator: Arc<Authenticator>,
    records: Arc<Records>,
    metrics: Arc<Metrics>,
}

/// What clients are told of how to reach sandboxes.
#[derive(Debug)]
pub(crate) struct SandboxAccess {
    /// Domain of sandbox traffic, with the port where it is not the scheme's own.
    pub(crate) domain: String,
    /// What the tokens of a sandbox are derived from.
    pub(crate) tokens: TokenSeed,
}

impl SandboxAccess {
    /// The token that the agent of a sandbox asks for.
    pub(crate) fn agent_token(&self, id: &SandboxId) -> SecretString {
        self.tokens.access_token(id)
    }

    /// The token that traffic to a sandbox must carry where it is not public.
    pub(crate) fn traffic_token(&self, id: &SandboxId) -> SecretString {
        self.tokens.traffic_token(id)
    }
}

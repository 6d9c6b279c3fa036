//! The services of handlers. Each handler extracts those that it needs by their types.

use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRef;
use model::id::SandboxId;
use secrecy::SecretString;
use store::Store;

use crate::admission::AdmissionControl;
use crate::authentication::Authenticator;
use crate::builds::Builds;
use crate::clock::Clock;
use crate::creation::SandboxCreation;
use crate::health::Health;
use crate::injections::Injections;
use crate::keys::TokenSeed;
use crate::mcp::McpService;
use crate::metrics::Metrics;
use crate::readers::Readers;
use crate::records::Records;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::registry::Registry;
use crate::secrets::Secrets;
use crate::signature::Signatures;
use crate::webhooks::Webhooks;

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
        /// The services of all handlers.
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
    secrets: Arc<Secrets>,
    creation: SandboxCreation,
    builds: Arc<Builds>,
    admission: Arc<AdmissionControl>,
    authenticator: Arc<Authenticator>,
    injections: Arc<Injections>,
    signatures: Arc<Signatures>,
    records: Arc<Records>,
    metrics: Arc<Metrics>,
    mcp: Arc<McpService>,
    readers: Arc<Readers>,
    health: Arc<Health>,
    webhooks: Arc<Webhooks>,
}

/// How clients reach sandboxes.
#[derive(Debug)]
pub(crate) struct SandboxAccess {
    /// Domain of sandbox traffic, with the port unless it is the default of the scheme.
    pub(crate) domain: String,
    /// The seed of the tokens of sandboxes.
    pub(crate) tokens: TokenSeed,
}

impl SandboxAccess {
    /// The agent token of a sandbox.
    pub(crate) fn agent_token(&self, id: &SandboxId) -> SecretString {
        self.tokens.access_token(id)
    }

    /// The traffic token of a sandbox, required unless its traffic is public.
    pub(crate) fn traffic_token(&self, id: &SandboxId) -> SecretString {
        self.tokens.traffic_token(id)
    }
}

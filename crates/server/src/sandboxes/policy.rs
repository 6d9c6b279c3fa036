//! What sandboxes may reach: from the settings in a row to the policy that a node enforces.

use std::sync::Arc;

use model::header_rules;
use model::id::{SandboxId, TeamId};
use model::injection::{InjectionRule, Interception};
use model::network::{Cidr, EgressPolicy};
use model::sandbox::NetworkSpec;
use model::secret::Secret;
use proxy::egress::{EgressSettings, check_proxy};
use secrecy::ExposeSecret as _;
use serde_json::{Map, Value};
use store::error::StoreError;
use store::sandboxes::SandboxRow;

use crate::admission::AdmissionControl;
use crate::injections::{Injections, SandboxInjections};
use crate::keys::TokenSeed;
use crate::seal::{SealError, Sealer};
use crate::secrets::Secrets;

/// Makes policies, and the columns that they are made of.
#[derive(Debug)]
pub(crate) struct Policies {
    pub(crate) sealer: Sealer,
    /// The rules of the operator, which the node applies. Here they are for early refusals.
    pub(crate) rules: EgressSettings,
    pub(crate) admission: Arc<AdmissionControl>,
    pub(crate) injections: Arc<Injections>,
    /// Of which the certificate authorities of sandboxes are derived.
    pub(crate) tokens: TokenSeed,
    /// The secrets to which header rules refer.
    pub(crate) secrets: Arc<Secrets>,
}

/// What a policy is made of besides the row.
#[derive(Debug, Clone)]
pub(crate) struct PolicyContext {
    /// What applies to addresses that the policies of a team do not mention; none for the default of the operator.
    default_allow: Option<bool>,
    /// The headers that are set.
    rules: Vec<InjectionRule>,
}

/// The settings of a row are not a policy.
#[derive(Debug, thiserror::Error)]
enum InvalidRow {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Network(#[from] model::sandbox::InvalidNetwork),
    #[error("the password of the egress proxy: {0}")]
    Sealed(#[from] SealError),
}

impl Policies {
    /// Checks the egress settings of a request.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(crate) fn check(&self, network: &NetworkSpec, allow_internet_access: Option<bool>) -> Result<(), String> {
        let policy = network
            .egress(allow_internet_access)
            .map_err(|error| error.to_string())?;
        policy.proxy.map_or(Ok(()), |proxy| check_proxy(&self.rules, &proxy))
    }

    /// The column of network settings, in which the password of the proxy is encrypted.
    pub(super) fn to_json(&self, id: &SandboxId, network: &NetworkSpec) -> String {
        let mut network = network.clone();
        if let Some(proxy) = &mut network.egress_proxy
            && let Some(password) = &proxy.password
        {
            let sealed = self.sealer.seal(&owner(id), password.expose());
            proxy.password_sealed = Some(sealed.expect("the kernel has random bytes"));
        }
        if !network.rules.is_empty() {
            network.rules_shown = header_rules::shown(&network.rules);
            let rules = serde_json::to_string(&network.rules).expect("texts are always JSON");
            let sealed = self.sealer.seal(&rules_owner(id), &rules);
            network.rules_sealed = Some(sealed.expect("the kernel has random bytes"));
        }
        if let Some(token) = &network.repository_token {
            let sealed = self.sealer.seal(&token_owner(id), token.expose());
            network.repository_token_sealed = Some(sealed.expect("the kernel has random bytes"));
        }
        serde_json::to_string(&network).expect("flags and texts are always JSON")
    }

    /// What the policy of a sandbox is made of besides its row.
    ///
    /// # Errors
    /// When the database fails. It is queried at most once for each team, and for each saved rule of the injections.
    pub(super) async fn context_of(
        &self,
        team: &TeamId,
        injections: Option<&SandboxInjections>,
    ) -> Result<PolicyContext, StoreError> {
        let quota = self.admission.quota_of(team).await?;
        Ok(PolicyContext {
            default_allow: quota.limits.egress_default_allow,
            rules: match injections {
                None => Vec::new(),
                Some(injections) => self.injections.rules(injections).await?,
            },
        })
    }

    /// The column of network settings of a fork of a sandbox: the same, encrypted for another one.
    ///
    /// # Errors
    /// When they cannot be read.
    pub(super) fn json_of_fork(&self, row: &SandboxRow, fork: &SandboxId) -> Result<Option<String>, SealError> {
        let Some(text) = &row.network_json else {
            return Ok(None);
        };
        let Ok(Some(mut network)) = spec_of(row) else {
            // Of no meaning: neither of the two gets network access.
            return Ok(Some(text.clone()));
        };
        if let Some(proxy) = &mut network.egress_proxy
            && let Some(sealed) = proxy.password_sealed.take()
        {
            proxy.password = Some(Secret::new(self.sealer.open(&owner(&row.id), &sealed)?));
        }
        if let Some(sealed) = network.rules_sealed.take() {
            let rules = self.sealer.open(&rules_owner(&row.id), &sealed)?;
            network.rules = serde_json::from_str(&rules).map_err(|_| SealError::Corrupt)?;
        }
        if let Some(sealed) = network.repository_token_sealed.take() {
            let token = self.sealer.open(&token_owner(&row.id), &sealed)?;
            network.repository_token = Some(Secret::new(token));
        }
        Ok(Some(self.to_json(fork, &network)))
    }

    /// Every sandbox has a certificate authority from its start, so that rules can come later. That of a fork is the one
    /// that its programs trust already.
    fn interception(&self, id: &SandboxId, rules: Vec<InjectionRule>) -> Box<Interception> {
        Box::new(Interception {
            ca_seed: Secret::new(self.tokens.ca_seed(id).expose_secret().to_owned()),
            rules,
        })
    }

    /// What the sandbox of a row may reach. With invalid settings it is nothing: what a client wanted closed must not be
    /// open.
    ///
    /// # Errors
    /// When the database fails. It is queried only for what the settings refer to.
    pub(super) async fn of(&self, row: &SandboxRow, context: PolicyContext) -> Result<EgressPolicy, StoreError> {
        let PolicyContext {
            default_allow,
            rules: injected,
        } = context;
        let mut rules = self.repository_rules(row);
        rules.extend(injected);
        rules.extend(self.header_rules(row).await?);
        let interception = Some(self.interception(row.authority_of.as_ref().unwrap_or(&row.id), rules));
        Ok(match self.read(row) {
            Ok(policy) => EgressPolicy {
                default_allow,
                interception,
                ..policy
            },
            Err(invalid) => {
                tracing::error!(
                    sandbox.id = %row.id,
                    "invalid value in column network_json of sandboxes: the sandbox gets no network access: {invalid}"
                );
                EgressPolicy {
                    deny: vec![Cidr::ALL],
                    interception,
                    ..EgressPolicy::default()
                }
            }
        })
    }

    /// What a sandbox with this row may reach now, with the injections that are stored for it.
    ///
    /// # Errors
    /// When the database fails.
    pub(super) async fn of_row(&self, row: &SandboxRow) -> Result<EgressPolicy, StoreError> {
        let injections = self.injections.of_sandbox(&row.id).await?;
        let context = self.context_of(&row.team_id, injections.as_ref()).await?;
        self.of(row, context).await
    }

    fn read(&self, row: &SandboxRow) -> Result<EgressPolicy, InvalidRow> {
        let mut network = spec_of(row)?.unwrap_or_default();
        if let Some(proxy) = &mut network.egress_proxy
            && let Some(sealed) = &proxy.password_sealed
        {
            proxy.password = Some(Secret::new(self.sealer.open(&owner(&row.id), sealed)?));
        }
        Ok(network.egress(row.allow_internet_access)?)
    }
}

/// The owner of the sealed header rules of a sandbox.
pub(super) fn rules_owner(id: &SandboxId) -> String {
    format!("network-rules/{id}")
}

/// The owner of the sealed token of a sandbox.
pub(super) fn token_owner(id: &SandboxId) -> String {
    format!("repository-token/{id}")
}

/// The owner of the sealed password of a sandbox.
fn owner(id: &SandboxId) -> String {
    format!("egress-proxy/{id}")
}

/// The network settings of a row; none if the client requested none.
///
/// # Errors
/// When the column holds something else.
pub(crate) fn spec_of(row: &SandboxRow) -> Result<Option<NetworkSpec>, serde_json::Error> {
    let Some(text) = &row.network_json else {
        return Ok(None);
    };
    // Only an object: an array would be read as the settings in order, with defaults for those that are missing.
    let object: Map<String, Value> = serde_json::from_str(text)?;
    serde_json::from_value(Value::Object(object)).map(Some)
}

//! The token of the repositories of a sandbox: what the gateway sets on requests to the code host, so that git inside
//! works, and what the sandbox reaches while it gets its repositories.

use model::injection::provider::Providers;
use model::injection::spec::Injection;
use model::injection::{InjectionRule, Interception};
use model::network::{Cidr, EgressPolicy};
use model::sandbox::NetworkSpec;
use model::secret::Secret;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::change::ChangeError;
use super::entry::Turn;
use super::policy::{Policies, spec_of, token_owner};

/// The type of injection that the token stands for.
const CODE_HOST: &str = "code_host";
/// How logs name its rules.
const RULE: &str = "resources";

/// The hosts whose requests get the token. The first is that of the repositories.
pub(crate) fn code_hosts() -> Vec<String> {
    let providers = Providers::default();
    let hosts = providers.get(CODE_HOST).map(|provider| provider.hosts.as_slice());
    let hosts = hosts.unwrap_or_default().iter();
    hosts.map(|host| host.host.as_str().to_owned()).collect()
}

/// The rules that set the token.
fn rules(token: Secret) -> Vec<InjectionRule> {
    let injection = Injection {
        kind: CODE_HOST.to_owned(),
        base_url: None,
        headers: None,
        api_key: None,
        token: Some(token),
        if_headers: None,
        if_queries: None,
    };
    injection.rules(&Providers::default(), RULE).unwrap_or_default()
}

/// What a sandbox reaches while it gets its repositories: the code host, as its policy says how, and nothing else.
pub(super) fn preparation_policy(policy: &EgressPolicy) -> EgressPolicy {
    let interception = policy.interception.as_ref().map(|interception| {
        let rules = interception.rules.iter().filter(|rule| rule.name == RULE);
        Box::new(Interception {
            ca_seed: interception.ca_seed.clone(),
            rules: rules.cloned().collect(),
        })
    });
    let rules = interception.iter().flat_map(|interception| &interception.rules);
    EgressPolicy {
        allow: Vec::new(),
        allow_domains: rules.map(|rule| rule.host.clone()).collect(),
        deny: vec![Cidr::ALL],
        dns_servers: policy.dns_servers.clone(),
        default_allow: policy.default_allow,
        proxy: policy.proxy.clone(),
        interception,
    }
}

impl Policies {
    /// The rules for the repositories of a row.
    pub(super) fn repository_rules(&self, row: &SandboxRow) -> Vec<InjectionRule> {
        let sealed = spec_of(row)
            .ok()
            .flatten()
            .and_then(|spec| spec.repository_token_sealed);
        let Some(sealed) = sealed else { return Vec::new() };
        match self.sealer.open(&token_owner(&row.id), &sealed) {
            Ok(token) => rules(Secret::new(token)),
            Err(error) => {
                tracing::error!(sandbox.id = %row.id, "cannot open the token of the repositories: {error}");
                Vec::new()
            }
        }
    }
}

impl Sandboxes {
    /// Replaces the token of the repositories in a row, if it has any: the row afterwards. The caller has the turn of
    /// the sandbox, and applies the policy.
    pub(super) async fn store_repository_token(
        &self,
        turn: &Turn<'_>,
        row: SandboxRow,
        token: &Secret,
    ) -> Result<(SandboxRow, bool), ChangeError> {
        let spec = spec_of(&row).ok().flatten();
        let Some(spec) = spec.filter(|spec| spec.repository_token_sealed.is_some()) else {
            return Ok((row, false));
        };
        let network = NetworkSpec {
            repository_token: Some(token.clone()),
            ..spec
        };
        let json = self.policies.to_json(&row.id, &network);
        let change = turn
            .node
            .rows
            .sandbox_set_network(&row.id, row.version, Some(&json), row.allow_internet_access);
        Ok((turn.changed(change.await)?, true))
    }
}

//! `PUT /sandboxes/{sandboxID}/network`, and what it has in common with the network settings of a create request.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use http::StatusCode;
use model::egress_proxy::{ProxySpec, ProxyTlsSpec};
use model::header_rules::RuleSpec;
use model::limits::{DNS_SERVERS_MAX, EGRESS_ENTRIES_MAX, HTTPS_PORTS_MAX};
use model::sandbox::NetworkSpec;
use model::secret::Secret;
use serde::Serialize;
use utoipa::ToSchema;

use super::error::NotChanged;
use crate::api::auth::{Caller, SandboxPath};
use crate::api::body::RequiredBody;
use crate::api::body::shape::{Nullable, body};
use crate::api::body::values::{
    DnsServer, EgressEntry, HeaderRulesByDomain, HttpsPort, List, ProxyAddress, ProxyCertificates, ProxyCredential,
    ProxyServerName,
};
use crate::api::error::ApiError;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::header_rules::RulesError;
use crate::sandboxes::network::EgressUpdate;

body! {
    /// What a sandbox may reach.
    pub(super) struct EgressRules {
        /// What is open even if `denyOut` closes it: IP addresses, networks in CIDR notation, domains, `*.` and a domain
        /// for all names below it, or `*` for all names. Domains require `0.0.0.0/0` in `denyOut` or
        /// `allow_internet_access: false`. Private networks stay closed unless the operator opens them.
        "allowOut" allow_out: Option<List<EgressEntry, 0, EGRESS_ENTRIES_MAX>>;
        /// What is closed: IP addresses and networks in CIDR notation; `0.0.0.0/0` is everything, IPv6 included.
        "denyOut" deny_out: Option<List<EgressEntry, 0, EGRESS_ENTRIES_MAX>>;
        /// DNS servers, by IPv4 address; at least one, because DNS cannot be closed. By default, those of the operator.
        "dnsServers" dns_servers: Option<List<DnsServer, 1, DNS_SERVERS_MAX>>;
        /// Headers for HTTPS requests, by the domain of their host: a domain, or `*.` and a domain for all names below it.
        /// A header of the same name that a program sends is replaced. `${e2b.secrets.NAME}` in a value stands for the
        /// secret of that name. This opens no host.
        "rules" rules: Option<HeaderRulesByDomain>;
        /// A SOCKS5 proxy that makes all TCP connections which are open otherwise. UDP is closed then. If the proxy cannot
        /// be used, nothing is connected.
        "egressProxy" egress_proxy: Nullable<SandboxEgressProxy>;
    }
}

body! {
    /// A SOCKS5 proxy.
    pub(super) struct SandboxEgressProxy {
        /// Its host, a domain name or an address that sandboxes may reach, and its port.
        "address" address: ProxyAddress;
        /// The user, if it asks for one.
        "username" username: Option<ProxyCredential>;
        /// The password of the user. It is never returned.
        "password" password: Option<ProxyCredential>;
        /// TLS to the proxy.
        "tls" tls: Nullable<SandboxEgressProxyTls>;
    }
}

body! {
    /// TLS to a proxy. Its certificate is always verified.
    struct SandboxEgressProxyTls {
        /// Whether TLS is used. If not, the other keys must be absent.
        "enabled" enabled: bool;
        /// The name in the certificate; by default the host of the address.
        "serverName" server_name: Option<ProxyServerName>;
        /// Certificates in PEM, one of which issued that of the proxy; by default those that the host trusts. They are
        /// never returned.
        "caCert" ca_cert: Option<ProxyCertificates>;
    }
}

impl SandboxEgressProxy {
    fn spec(&self) -> Result<ProxySpec, String> {
        let tls = self.tls.0.as_ref();
        if tls.is_some_and(|tls| !tls.enabled && (tls.server_name.is_some() || tls.ca_cert.is_some())) {
            return Err("egressProxy.tls: serverName and caCert require that enabled is true".to_owned());
        }
        let credential = |text: &Option<ProxyCredential>| text.as_ref().map(|ProxyCredential(text)| text.clone());
        Ok(ProxySpec {
            address: self.address.0.clone(),
            username: credential(&self.username),
            password: credential(&self.password).map(Secret::new),
            password_sealed: None,
            tls: tls.filter(|tls| tls.enabled).map(|tls| ProxyTlsSpec {
                server_name: tls.server_name.as_ref().map(|ProxyServerName(name)| name.clone()),
                ca_cert: tls.ca_cert.as_ref().map(|ProxyCertificates(pem)| pem.clone()),
            }),
        })
    }
}

impl EgressRules {
    /// The egress part of network settings, which is not checked yet.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(super) fn spec(&self) -> Result<NetworkSpec, String> {
        let entries = |list: &Option<List<EgressEntry, 0, EGRESS_ENTRIES_MAX>>| {
            let entries = list.iter().flat_map(|List(entries)| entries);
            entries.map(|EgressEntry(entry)| entry.clone()).collect()
        };
        let servers = self.dns_servers.iter().flat_map(|List(servers)| servers);
        let proxy = self.egress_proxy.0.as_ref().map(SandboxEgressProxy::spec);
        Ok(NetworkSpec {
            allow_out: entries(&self.allow_out),
            deny_out: entries(&self.deny_out),
            dns_servers: servers.map(|DnsServer(server)| server.clone()).collect(),
            egress_proxy: proxy.transpose()?,
            rules: self
                .rules
                .as_ref()
                .map(|HeaderRulesByDomain(rules)| rules.clone())
                .unwrap_or_default(),
            ..NetworkSpec::default()
        })
    }
}

body! {
    /// What a sandbox may reach from now on. Every key that is absent is reset, except for `httpsPorts`.
    pub(crate) struct SandboxNetworkUpdate {
        flatten rules: EgressRules;
        /// `false` closes everything that `allowOut` does not open.
        "allow_internet_access" allow_internet_access: Option<bool>;
        /// Ports whose servers speak TLS, for new requests; not that of the agent. If the key is absent, they stay as they are.
        "httpsPorts" https_ports: Option<List<HttpsPort, 0, HTTPS_PORTS_MAX>>;
    }
}

/// Replaces what a sandbox may reach. Open connections that are no longer allowed are cut. How the sandbox is reached
/// stays the same, except for `httpsPorts`.
#[utoipa::path(
    put,
    path = "/sandboxes/{sandboxID}/network",
    tag = "sandboxes",
    params(SandboxPath),
    request_body(content = SandboxNetworkUpdate),
    responses((status = 204, description = "The sandbox may reach what the request says"), NotChanged)
)]
pub(crate) async fn update_sandbox_network(
    State(sandboxes): State<Arc<Sandboxes>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    body: RequiredBody<SandboxNetworkUpdate>,
) -> Result<StatusCode, ApiError> {
    let body = body.read()?;
    let update = EgressUpdate {
        network: body.rules.spec().map_err(ApiError::invalid)?,
        allow_internet_access: body.allow_internet_access,
        https_ports: body.https_ports.as_ref().map(ports),
    };
    let checked = sandboxes.policies.check(&update.network, update.allow_internet_access);
    checked.map_err(ApiError::invalid)?;
    let checked = sandboxes.policies.check_rules(&caller.team, &update.network).await;
    checked.map_err(|error| match error {
        RulesError::Store(error) => error.into(),
        RulesError::Invalid(why) => ApiError::invalid(why),
    })?;
    let entry = caller.sandbox(&sandboxes, &id).await?;
    sandboxes
        .set_egress(&entry, update)
        .await
        .map_err(|error| ApiError::not_changed(error, &id))?;
    Ok(StatusCode::NO_CONTENT)
}

/// The ports of a request.
pub(super) fn ports(List(ports): &List<HttpsPort, 0, HTTPS_PORTS_MAX>) -> Vec<u16> {
    ports.iter().map(|HttpsPort(port)| *port).collect()
}

/// The network settings of a sandbox, as requested.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct SandboxNetwork {
    allow_public_traffic: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    allow_out: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    deny_out: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    dns_servers: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    egress_proxy: Option<ShownProxy>,
    /// Headers by domain, with placeholders as they were requested and all other text of values masked.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(required = false)]
    rules: BTreeMap<String, Vec<ShownRule>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    mask_request_host: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    https_ports: Vec<u16>,
}

/// A rule for the requests to a domain.
#[derive(Serialize, ToSchema)]
struct ShownRule {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    transform: Option<ShownTransform>,
}

/// What is changed in requests.
#[derive(Serialize, ToSchema)]
struct ShownTransform {
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    headers: Option<BTreeMap<String, String>>,
}

impl From<RuleSpec> for ShownRule {
    fn from(rule: RuleSpec) -> Self {
        let shown = |(name, value): (String, Secret)| (name, value.expose().to_owned());
        Self {
            transform: rule.transform.map(|transform| ShownTransform {
                headers: transform
                    .headers
                    .map(|headers| headers.into_iter().map(shown).collect()),
            }),
        }
    }
}

/// The proxy of a sandbox, without its password and certificates.
#[derive(Serialize, ToSchema)]
struct ShownProxy {
    address: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    username: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    tls: Option<ShownProxyTls>,
}

/// TLS to the proxy of a sandbox.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct ShownProxyTls {
    enabled: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    server_name: Option<String>,
}

impl From<ProxySpec> for ShownProxy {
    fn from(spec: ProxySpec) -> Self {
        Self {
            address: spec.address,
            username: spec.username,
            tls: spec.tls.map(|tls| ShownProxyTls {
                enabled: true,
                server_name: tls.server_name,
            }),
        }
    }
}

impl From<NetworkSpec> for SandboxNetwork {
    fn from(spec: NetworkSpec) -> Self {
        Self {
            allow_public_traffic: spec.allow_public_traffic,
            allow_out: spec.allow_out,
            deny_out: spec.deny_out,
            dns_servers: spec.dns_servers,
            egress_proxy: spec.egress_proxy.map(ShownProxy::from),
            rules: spec
                .rules_shown
                .into_iter()
                .map(|(domain, rules)| (domain, rules.into_iter().map(ShownRule::from).collect()))
                .collect(),
            mask_request_host: spec.mask_request_host.map(String::from),
            https_ports: spec.https_ports,
        }
    }
}

//! Headers that the egress gateway sets on HTTPS requests of a sandbox, so that secrets work inside and are never there.
//!
//! These are the rules as the gateway applies them, with secrets in the clear: they exist in memory and in messages to
//! the node, and are never stored or shown. What clients request is translated to them by the server.

pub mod base_url;
mod kind;
pub mod path;
pub mod provider;
pub mod spec;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::network::domain::DomainPattern;
use crate::secret::Secret;

/// What the gateway needs to intercept connections of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interception {
    /// 64 hexadecimal digits from which the private key of the sandbox's certificate authority is derived. The same for
    /// the whole life of the sandbox, whatever its rules, since programs inside keep trusting the certificate.
    pub ca_seed: Secret,
    /// The rules, in the order of the request. Connections to hosts that none mentions are never decrypted.
    pub rules: Vec<InjectionRule>,
}

/// Headers for the requests that match.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InjectionRule {
    /// How logs name the rule: the id of a saved rule, or its place in the request, such as `injections[2]`.
    pub name: String,
    /// The host of the request, which is also the server name of its connection.
    pub host: DomainPattern,
    /// Port of the requests that the rule applies to.
    pub port: u16,
    /// Paths of the requests that the rule applies to.
    pub path: PathPattern,
    /// Headers that the request must have, with exactly these values. Names are in lower case; of a repeated header only
    /// the first value counts.
    pub if_headers: BTreeMap<String, String>,
    /// Query parameters that the request must have, with exactly these values.
    pub if_queries: BTreeMap<String, String>,
    /// The headers to set. A header of the same name that the client sent is replaced.
    pub headers: Vec<InjectedHeader>,
    /// How many of [`Self::headers`] are set.
    pub set: HeaderChoice,
    /// Secrets in [`Self::headers`], to be hidden in answers that contain them: the token itself if a header has it
    /// encoded or after a scheme word.
    pub secrets: Vec<Secret>,
}

/// A header that is set on requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InjectedHeader {
    /// Name, in lower case.
    pub name: String,
    /// Value of the header.
    pub value: Secret,
}

/// Which headers of a rule are set on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeaderChoice {
    /// All headers of the rule are set.
    All,
    /// Only headers that the request has already are replaced; if it has none of them, the first is set.
    Present,
}

/// The paths of a rule. Compared with the normalised path of a request, see [`path::normalize_path`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathPattern {
    /// All paths.
    Any,
    /// This path only.
    Exact(String),
    /// Paths that begin with this text, which need not end at a segment.
    Prefix(String),
}

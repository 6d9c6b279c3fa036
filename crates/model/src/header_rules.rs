//! Headers by domain, as E2B's SDKs request them in `network.rules`, with placeholders for secrets of the team.
//!
//! What a client wrote ([`RulesSpec`]) is kept, because clients are shown it, with the text of headers masked. It is
//! parsed ([`HeaderRules`]) and, with the values of the secrets, becomes the rules of the gateway.

use std::collections::{BTreeMap, BTreeSet};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::header::{is_header_value, settable_name};
use crate::injection::{HeaderChoice, InjectedHeader, InjectionRule, PathPattern};
use crate::network::domain::DomainPattern;
use crate::secret::Secret;

/// Maximum number of domains (API contract, like the following ones).
pub const RULE_DOMAINS_MAX: usize = 10;
/// Maximum number of rules of a domain.
pub const RULES_OF_DOMAIN_MAX: usize = 1;
/// Maximum number of headers of a rule.
pub const RULE_HEADERS_MAX: usize = 20;
/// Maximum length of a domain, in characters.
pub const RULE_DOMAIN_MAX: usize = 128;
/// Maximum length of the name of a header, in characters.
pub const RULE_HEADER_NAME_MAX: usize = 64;
/// Maximum length of the value of a header as written, in characters.
pub const RULE_HEADER_VALUE_MAX: usize = 2048;
/// Maximum number of different secrets in all rules of a sandbox.
pub const RULE_SECRETS_MAX: usize = 32;
/// Maximum length of the value of a header with the values of its secrets, in bytes: what common servers accept.
pub const RULE_HEADER_RESOLVED_MAX: usize = 16 * 1024;

/// Shortest text in a header, other than the value of a secret, that is hidden in answers which contain it.
const HIDDEN_FROM: usize = 8;
/// Shortest text of which a part is shown in its mask.
const MASK_FROM: usize = 12;
/// The shown part.
const MASK_HEAD: usize = 4;
/// What a mask shows in the place of the rest.
const MASK: &str = "****";
/// Scheme words before credentials, which are no secrets.
const SCHEMES: [&str; 3] = ["bearer ", "basic ", "token "];

/// The rules as a client wrote them, by domain.
pub type RulesSpec = BTreeMap<String, Vec<RuleSpec>>;

/// A rule as a client wrote it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RuleSpec {
    /// What to change in requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transform: Option<TransformSpec>,
}

/// What to change in requests.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TransformSpec {
    /// Headers to set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, Secret>>,
}

/// The rules as clients are shown them: placeholders as they were written, all other text of headers masked.
#[must_use]
pub fn shown(rules: &RulesSpec) -> RulesSpec {
    let mask = |rule: &RuleSpec| RuleSpec {
        transform: rule.transform.as_ref().map(|transform| TransformSpec {
            headers: transform.headers.as_ref().map(|headers| {
                let masked = headers.iter().map(|(name, value)| (name.clone(), masked(value)));
                masked.collect()
            }),
        }),
    };
    let rules = rules.iter();
    rules
        .map(|(domain, rules)| (domain.clone(), rules.iter().map(mask).collect()))
        .collect()
}

fn masked(value: &Secret) -> Secret {
    let Ok(template) = HeaderTemplate::parse(value.expose()) else {
        return Secret::new(MASK.to_owned());
    };
    let mut text = String::new();
    for (index, part) in template.0.iter().enumerate() {
        match part {
            Part::Secret { written, .. } => text.push_str(written),
            Part::Text(part) => {
                let scheme = if index == 0 { scheme_of(part) } else { "" };
                text.push_str(scheme);
                let rest = &part[scheme.len()..];
                if rest.trim().is_empty() {
                    text.push_str(rest);
                } else {
                    let is_long = rest.len() >= MASK_FROM && rest.is_ascii();
                    text.push_str(if is_long { &rest[..MASK_HEAD] } else { "" });
                    text.push_str(MASK);
                }
            }
        }
    }
    Secret::new(text)
}

/// The scheme word at the beginning of the value of a header, with the space after it.
fn scheme_of(value: &str) -> &str {
    let found = SCHEMES.iter().find_map(|scheme| {
        let head = value.get(..scheme.len())?;
        head.eq_ignore_ascii_case(scheme).then_some(head)
    });
    found.unwrap_or("")
}

/// The value of a header with its placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
struct HeaderTemplate(Vec<Part>);

#[derive(Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Secret {
        /// The name, in lower case.
        name: String,
        /// Text of the placeholder.
        written: String,
    },
}

impl std::fmt::Debug for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(_) => f.write_str("Text(hidden)"),
            Self::Secret { written, .. } => f.write_str(written),
        }
    }
}

/// A placeholder that is not one of a secret.
enum InvalidPlaceholder {
    Open,
    Identity(String),
    Unknown(String),
}

impl HeaderTemplate {
    /// What every placeholder begins with. Other text with a dollar sign is no placeholder.
    const BEGIN: &str = "${e2b.";
    const SECRET: &str = "secrets.";
    const IDENTITY: &str = "identity.";

    fn parse(value: &str) -> Result<Self, InvalidPlaceholder> {
        let mut parts = Vec::new();
        let mut rest = value;
        while let Some(start) = rest.find(Self::BEGIN) {
            let (text, placeholder) = rest.split_at(start);
            let end = placeholder.find('}').ok_or(InvalidPlaceholder::Open)?;
            let (written, after) = placeholder.split_at(end + 1);
            let inner = &written[Self::BEGIN.len()..end];
            let name = match inner.strip_prefix(Self::SECRET) {
                Some(name) if !name.is_empty() => name.to_lowercase(),
                None if inner.starts_with(Self::IDENTITY) => {
                    return Err(InvalidPlaceholder::Identity(written.to_owned()));
                }
                Some(_) | None => return Err(InvalidPlaceholder::Unknown(written.to_owned())),
            };
            if !text.is_empty() {
                parts.push(Part::Text(text.to_owned()));
            }
            let written = written.to_owned();
            parts.push(Part::Secret { name, written });
            rest = after;
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        Ok(Self(parts))
    }

    fn secrets(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            Part::Text(_) => None,
            Part::Secret { name, .. } => Some(name.as_str()),
        })
    }

    /// The value of the header, if its secrets exist and it is not too long.
    fn resolve(&self, secrets: &BTreeMap<String, Secret>) -> Result<Secret, Unresolved> {
        let mut value = String::new();
        for part in &self.0 {
            let text = match part {
                Part::Text(text) => text,
                Part::Secret { name, .. } => {
                    let secret = secrets.get(name);
                    secret.ok_or_else(|| Unresolved::Secret(name.clone()))?.expose()
                }
            };
            if value.len() + text.len() > RULE_HEADER_RESOLVED_MAX {
                return Err(Unresolved::TooLong);
            }
            value.push_str(text);
        }
        Ok(Secret::new(value))
    }
}

enum Unresolved {
    Secret(String),
    TooLong,
}

/// Rules that are not valid. The values of headers are not shown.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidRules {
    /// A domain of unknown form.
    #[error(
        "rules: {0:?} is not a domain such as api.example.com or *.example.com; headers are set by the name of a host, \
         and never for an address or for all hosts"
    )]
    Domain(String),
    /// A domain that is there twice, in different spellings.
    #[error("rules: {0:?} is listed twice")]
    RepeatedDomain(String),
    /// A header that cannot be set.
    #[error("rules[{domain:?}]: header {name:?} cannot be set: {why}")]
    Header {
        /// The domain.
        domain: String,
        /// The name of the header.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// A placeholder that is not complete.
    #[error("rules[{domain:?}]: header {name:?} has a placeholder without its closing brace")]
    OpenPlaceholder {
        /// The domain.
        domain: String,
        /// The name of the header.
        name: String,
    },
    /// A placeholder of a workload identity.
    #[error(
        "rules[{domain:?}]: header {name:?} contains {placeholder}, and workload identity is not available on this \
         platform"
    )]
    Identity {
        /// The domain.
        domain: String,
        /// The name of the header.
        name: String,
        /// The placeholder.
        placeholder: String,
    },
    /// A placeholder of an unknown kind.
    #[error(
        "rules[{domain:?}]: header {name:?} contains {placeholder}, which is not a placeholder such as \
         ${{e2b.secrets.NAME}}"
    )]
    Placeholder {
        /// The domain.
        domain: String,
        /// The name of the header.
        name: String,
        /// The placeholder.
        placeholder: String,
    },
    /// Too many secrets.
    #[error("rules: at most {RULE_SECRETS_MAX} different secrets are allowed, and these rules have {0}")]
    Secrets(usize),
}

/// Rules that were parsed and are valid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeaderRules(Vec<HeaderRule>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct HeaderRule {
    /// The domain as the client wrote it.
    domain: String,
    host: DomainPattern,
    /// Names in lower case, with values.
    headers: Vec<(String, HeaderTemplate)>,
}

/// Rules with the values of secrets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResolvedRules {
    /// The rules of the gateway: exact hosts first, then the longest pattern.
    pub rules: Vec<InjectionRule>,
    /// Why headers were left out, for people. Without the values of secrets.
    pub left_out: Vec<String>,
}

impl HeaderRules {
    /// Parses rules.
    ///
    /// # Errors
    /// With the first thing that is wrong.
    pub fn parse(spec: &RulesSpec) -> Result<Self, InvalidRules> {
        let mut rules: Vec<HeaderRule> = Vec::new();
        for (domain, of_domain) in spec {
            let host = domain.parse::<DomainPattern>().ok();
            let host = host.filter(|host| host.as_str() != "*");
            let host = host.ok_or_else(|| InvalidRules::Domain(domain.clone()))?;
            if rules.iter().any(|rule| rule.host == host) {
                return Err(InvalidRules::RepeatedDomain(domain.clone()));
            }
            let headers = of_domain
                .iter()
                .filter_map(|rule| rule.transform.as_ref()?.headers.as_ref());
            let mut parsed: Vec<(String, HeaderTemplate)> = Vec::new();
            for (name, value) in headers.flatten() {
                let (lower, template) = parse_header(domain, name, value)?;
                if parsed.iter().any(|(other, _)| *other == lower) {
                    let (domain, name) = (domain.clone(), name.clone());
                    let why = "it is listed twice".to_owned();
                    return Err(InvalidRules::Header { domain, name, why });
                }
                parsed.push((lower, template));
            }
            rules.push(HeaderRule {
                domain: domain.clone(),
                host,
                headers: parsed,
            });
        }
        let rules = Self(rules);
        let secrets = rules.secrets().len();
        if secrets > RULE_SECRETS_MAX {
            return Err(InvalidRules::Secrets(secrets));
        }
        Ok(rules)
    }

    /// Whether the rules set no header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|rule| rule.headers.is_empty())
    }

    /// The names of all secrets that they need, in lower case.
    #[must_use]
    pub fn secrets(&self) -> BTreeSet<&str> {
        let headers = self.0.iter().flat_map(|rule| &rule.headers);
        headers.flat_map(|(_, template)| template.secrets()).collect()
    }

    /// The rules of the gateway, with the values of secrets by name. A header whose secret does not exist, or that gets
    /// too long, is left out.
    #[must_use]
    pub fn resolve(&self, secrets: &BTreeMap<String, Secret>) -> ResolvedRules {
        let mut resolved = ResolvedRules::default();
        let mut rules: Vec<&HeaderRule> = self.0.iter().filter(|rule| !rule.headers.is_empty()).collect();
        rules.sort_by_key(|rule| {
            let pattern = rule.host.as_str();
            (pattern.starts_with('*'), std::cmp::Reverse(pattern.len()))
        });
        for rule in rules {
            let (mut headers, mut hidden) = (Vec::new(), Vec::new());
            for (name, template) in &rule.headers {
                match template.resolve(secrets) {
                    Ok(value) => {
                        hidden.extend(secrets_in(&value));
                        hidden.extend(template.secrets().filter_map(|name| secrets.get(name)).cloned());
                        let name = name.clone();
                        headers.push(InjectedHeader { name, value });
                    }
                    Err(Unresolved::Secret(secret)) => resolved.left_out.push(format!(
                        "header {name:?} for {:?} is not set: secret {secret:?} does not exist",
                        rule.domain
                    )),
                    Err(Unresolved::TooLong) => resolved.left_out.push(format!(
                        "header {name:?} for {:?} is not set: with its secrets it is longer than \
                         {RULE_HEADER_RESOLVED_MAX} bytes",
                        rule.domain
                    )),
                }
            }
            if headers.is_empty() {
                continue;
            }
            hidden.sort_by(|a, b| a.expose().cmp(b.expose()));
            hidden.dedup();
            resolved.rules.push(InjectionRule {
                name: format!("network.rules[{:?}]", rule.domain),
                host: rule.host.clone(),
                port: 443,
                path: PathPattern::Any,
                if_headers: BTreeMap::new(),
                if_queries: BTreeMap::new(),
                headers,
                set: HeaderChoice::All,
                secrets: hidden,
            });
        }
        resolved
    }
}

/// What is secret in the value of a header: all after a scheme word, and the password of Basic credentials.
fn secrets_in(value: &Secret) -> Vec<Secret> {
    let scheme = scheme_of(value.expose());
    let credentials = value.expose()[scheme.len()..].trim();
    let mut secrets = vec![Secret::new(credentials.to_owned())];
    if scheme.eq_ignore_ascii_case("basic ")
        && let Ok(decoded) = STANDARD.decode(credentials)
        && let Ok(pair) = String::from_utf8(decoded)
        && let Some((_, password)) = pair.split_once(':')
    {
        secrets.push(Secret::new(password.to_owned()));
    }
    // Shorter text is hardly a credential, and hiding it would damage answers.
    secrets.retain(|secret| secret.expose().len() >= HIDDEN_FROM);
    secrets
}

/// Checks a header. Its name is returned in lower case.
fn parse_header(domain: &str, name: &str, value: &Secret) -> Result<(String, HeaderTemplate), InvalidRules> {
    let invalid = |why| InvalidRules::Header {
        domain: domain.to_owned(),
        name: name.to_owned(),
        why,
    };
    let lower = settable_name(name).map_err(|why| invalid(why.to_string()))?;
    if !is_header_value(value.expose()) {
        let why = "its value must consist of printable ASCII characters";
        return Err(invalid(why.to_owned()));
    }
    let template = HeaderTemplate::parse(value.expose()).map_err(|error| {
        let (domain, name) = (domain.to_owned(), name.to_owned());
        match error {
            InvalidPlaceholder::Open => InvalidRules::OpenPlaceholder { domain, name },
            InvalidPlaceholder::Identity(placeholder) => InvalidRules::Identity {
                domain,
                name,
                placeholder,
            },
            InvalidPlaceholder::Unknown(placeholder) => InvalidRules::Placeholder {
                domain,
                name,
                placeholder,
            },
        }
    })?;
    Ok((lower, template))
}

#[cfg(test)]
mod tests;

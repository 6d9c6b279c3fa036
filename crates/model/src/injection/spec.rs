//! Injections as clients request them, and the rules that they stand for.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::base_url::{BaseUrl, HTTPS_PORT, InvalidBaseUrl};
pub use super::kind::{HTTP, SAVED};
use super::provider::{Provider, Providers};
use super::{HeaderChoice, InjectedHeader, InjectionRule, PathPattern};
use crate::header::{InvalidHeaderName, header_name, is_header_value, settable_name};
use crate::limits::{HEADER_NAME_MAX, HEADER_VALUE_MAX, INJECTION_ENTRIES_MAX};
use crate::secret::Secret;

/// Shortest value of a header that is hidden in answers: others appear in answers by chance.
const HIDDEN_MIN: usize = 8;
/// Shortest secret of which the beginning is shown.
const SHOWN_MIN: usize = 12;
/// Characters of a secret that are shown.
const SHOWN: usize = 4;
/// What is shown instead of the rest.
const STARS: &str = "****";

/// An injection of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum InjectionItem {
    /// The injection of a saved rule.
    Saved(SavedInjection),
    /// An injection that belongs to this sandbox alone.
    Own(Injection),
}

/// A reference to a saved rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedInjection {
    /// The type, which is [`SAVED`].
    #[serde(rename = "type")]
    pub kind: String,
    /// The id of the rule.
    pub id: String,
}

impl SavedInjection {
    /// Creates a reference to the saved rule with this id.
    #[must_use]
    pub fn new(id: String) -> Self {
        Self {
            kind: SAVED.to_owned(),
            id,
        }
    }
}

/// An injection as a client requested it. It serializes with its secrets, to be stored encrypted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Injection {
    /// The type, in the word that the client used: `http` or the name of a provider.
    #[serde(rename = "type")]
    pub kind: String,
    /// The requests that the injection applies to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_url: Option<String>,
    /// The headers to set, of the type `http`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headers: Option<BTreeMap<String, Secret>>,
    /// The key for a provider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key: Option<Secret>,
    /// The token for a code host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<Secret>,
    /// Headers that requests must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_headers: Option<BTreeMap<String, String>>,
    /// Query parameters that requests must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub if_queries: Option<BTreeMap<String, String>>,
}

/// An injection that is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidInjection {
    /// An unknown type.
    #[error("type: {kind:?} is unknown; it must be one of {known}")]
    Kind {
        /// The type.
        kind: String,
        /// All types.
        known: String,
    },
    /// A key that the type requires.
    #[error("{key}: type {kind} requires it")]
    Missing {
        /// The missing key.
        key: &'static str,
        /// The type.
        kind: String,
    },
    /// A key that injections of this type do not have.
    #[error("{key}: type {kind} does not have it")]
    Foreign {
        /// The key.
        key: &'static str,
        /// The type.
        kind: String,
    },
    /// Not an address.
    #[error("base_url: {0}")]
    BaseUrl(#[from] InvalidBaseUrl),
    /// A host that does not belong to the type.
    #[error("base_url: its host must be {hosts} for type {kind}")]
    Host {
        /// The type.
        kind: String,
        /// The hosts of the type.
        hosts: String,
    },
    /// Too many entries.
    #[error("{0}: at most {INJECTION_ENTRIES_MAX} entries are allowed")]
    Count(&'static str),
    /// A name that a header cannot have.
    #[error("{key}: {name:?} is not the name of a header")]
    HeaderName {
        /// The key.
        key: &'static str,
        /// The name.
        name: String,
    },
    /// A header that no rule may set.
    #[error("headers: {0:?} frames the request and cannot be set")]
    Reserved(String),
    /// A name that occurs twice.
    #[error("{key}: {name:?} is there twice, as upper and lower case do not count")]
    Twice {
        /// The key.
        key: &'static str,
        /// The name.
        name: String,
    },
    /// A value that a header cannot have.
    #[error("{0}: the value must have 1 to {HEADER_VALUE_MAX} printable ASCII characters, without spaces at its ends")]
    Value(String),
    /// A value of a condition that is too long or cannot occur.
    #[error("{0}: the value must have at most {HEADER_VALUE_MAX} bytes without control characters")]
    Condition(String),
    /// The name of a query parameter that is too long or empty.
    #[error("if_queries: a name must have 1 to {HEADER_NAME_MAX} bytes")]
    QueryName,
    /// A masked secret, as an answer showed it, in the place of the secret.
    #[error("{0}: this is the masked value of an answer; send the secret itself")]
    Masked(String),
}

/// Whether a text can be the whole value of a header.
fn is_whole_value(value: &str) -> bool {
    (1..=HEADER_VALUE_MAX).contains(&value.len()) && is_header_value(value) && value.trim_matches(' ') == value
}

/// Masks a secret for answers: its first characters if it is long enough, and four asterisks.
#[must_use]
pub fn mask(secret: &Secret) -> String {
    let text = secret.expose();
    let shown: String = text.chars().take(SHOWN).collect();
    match text.chars().count() {
        SHOWN_MIN.. => format!("{shown}{STARS}"),
        _ => STARS.to_owned(),
    }
}

impl Injection {
    /// Rules of the egress gateway for this injection. `name` is how logs name them.
    ///
    /// # Errors
    /// When it is not valid.
    pub fn rules(&self, providers: &Providers, name: &str) -> Result<Vec<InjectionRule>, InvalidInjection> {
        let conditions = self.conditions()?;
        if self.kind == HTTP {
            self.forbid(&[("api_key", self.api_key.is_some()), ("token", self.token.is_some())])?;
            let url = self.url()?.ok_or_else(|| self.missing("base_url"))?;
            let (headers, secrets) = self.own_headers()?;
            return Ok(vec![conditions.rule(name, url, headers, HeaderChoice::All, secrets)]);
        }
        let provider = providers.get(&self.kind).ok_or_else(|| InvalidInjection::Kind {
            kind: self.kind.clone(),
            known: [HTTP]
                .into_iter()
                .chain(providers.names())
                .collect::<Vec<_>>()
                .join(", "),
        })?;
        self.forbid(&[("headers", self.headers.is_some())])?;
        let credential = self.credential(provider)?;
        let url = self.url()?;
        let hosts: Vec<_> = match &url {
            None => provider.hosts.iter().map(|host| (host, None)).collect(),
            Some(url) => {
                let same = provider.hosts.iter().find(|host| host.host == url.host);
                let host = same.or_else(|| provider.hosts.first().filter(|_| provider.any_host));
                let host = host.ok_or_else(|| self.other_host(provider))?;
                vec![(host, Some(url.clone()))]
            }
        };
        let rules = hosts.into_iter().map(|(host, url)| {
            let url = url.unwrap_or_else(|| BaseUrl {
                host: host.host.clone(),
                port: HTTPS_PORT,
                path: PathPattern::Any,
            });
            let headers = host.headers.iter().map(|header| header.with(credential)).collect();
            conditions.rule(name, url, headers, provider.set, vec![credential.clone()])
        });
        Ok(rules.collect())
    }

    /// Whether the injection is for a provider with a token, which [`Self::set_token`] can replace.
    #[must_use]
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Replaces the token of the injection.
    pub fn set_token(&mut self, token: Secret) {
        self.token = Some(token);
    }

    /// The injection for answers: without its key and token, and with `show_headers` with its headers.
    #[must_use]
    pub fn masked(&self, show_headers: bool) -> Self {
        let masked = |secret: &Secret| Secret::new(mask(secret));
        let headers = self.headers.as_ref().map(|headers| {
            let values = headers.iter().map(|(name, value)| {
                let value = if show_headers { value.clone() } else { masked(value) };
                (name.clone(), value)
            });
            values.collect()
        });
        Self {
            headers,
            api_key: self.api_key.as_ref().map(masked),
            token: self.token.as_ref().map(masked),
            ..self.clone()
        }
    }

    fn missing(&self, key: &'static str) -> InvalidInjection {
        InvalidInjection::Missing {
            key,
            kind: self.kind.clone(),
        }
    }

    fn forbid(&self, keys: &[(&'static str, bool)]) -> Result<(), InvalidInjection> {
        match keys.iter().find(|(_, is_set)| *is_set) {
            None => Ok(()),
            Some((key, _)) => Err(InvalidInjection::Foreign {
                key,
                kind: self.kind.clone(),
            }),
        }
    }

    fn other_host(&self, provider: &Provider) -> InvalidInjection {
        let hosts: Vec<&str> = provider.hosts.iter().map(|host| host.host.as_str()).collect();
        InvalidInjection::Host {
            kind: self.kind.clone(),
            hosts: hosts.join(" or "),
        }
    }

    fn url(&self) -> Result<Option<BaseUrl>, InvalidInjection> {
        let url = self.base_url.as_deref().map(str::parse::<BaseUrl>);
        Ok(url.transpose()?)
    }

    fn credential(&self, provider: &Provider) -> Result<&Secret, InvalidInjection> {
        use super::provider::Credential;
        let (given, other) = match provider.credential {
            Credential::ApiKey => (&self.api_key, ("token", self.token.is_some())),
            Credential::Token => (&self.token, ("api_key", self.api_key.is_some())),
        };
        self.forbid(&[other])?;
        let key = provider.credential.key();
        let credential = given.as_ref().ok_or_else(|| self.missing(key))?;
        check_secret(key, credential)?;
        Ok(credential)
    }

    /// The headers of the type `http`, and the secrets in them.
    fn own_headers(&self) -> Result<(Vec<InjectedHeader>, Vec<Secret>), InvalidInjection> {
        let mut headers: Vec<InjectedHeader> = Vec::new();
        let mut secrets = Vec::new();
        let given = self.headers.iter().flatten();
        for (name, value) in given {
            if headers.len() == INJECTION_ENTRIES_MAX {
                return Err(InvalidInjection::Count("headers"));
            }
            let lower = settable_name(name).map_err(|why| match why {
                InvalidHeaderName::NotAName => InvalidInjection::HeaderName {
                    key: "headers",
                    name: shortened(name),
                },
                InvalidHeaderName::Reserved => InvalidInjection::Reserved(name.clone()),
            })?;
            if headers.iter().any(|header| header.name == lower) {
                return Err(InvalidInjection::Twice {
                    key: "headers",
                    name: name.clone(),
                });
            }
            check_secret(&format!("headers.{name}"), value)?;
            secrets.extend(secrets_in(value));
            headers.push(InjectedHeader {
                name: lower,
                value: value.clone(),
            });
        }
        Ok((headers, secrets))
    }

    fn conditions(&self) -> Result<Conditions, InvalidInjection> {
        let mut if_headers = BTreeMap::new();
        for (name, value) in self.if_headers.iter().flatten() {
            let lower = header_name(name).ok_or_else(|| InvalidInjection::HeaderName {
                key: "if_headers",
                name: shortened(name),
            })?;
            check_condition(&format!("if_headers.{name}"), value)?;
            if if_headers.insert(lower, value.clone()).is_some() {
                return Err(InvalidInjection::Twice {
                    key: "if_headers",
                    name: name.clone(),
                });
            }
        }
        let if_queries = self.if_queries.clone().unwrap_or_default();
        for (name, value) in &if_queries {
            if !(1..=HEADER_NAME_MAX).contains(&name.len()) {
                return Err(InvalidInjection::QueryName);
            }
            check_condition(&format!("if_queries.{name}"), value)?;
        }
        for (key, count) in [("if_headers", if_headers.len()), ("if_queries", if_queries.len())] {
            if count > INJECTION_ENTRIES_MAX {
                return Err(InvalidInjection::Count(key));
            }
        }
        Ok(Conditions { if_headers, if_queries })
    }
}

/// Conditions on headers and query parameters of a request.
struct Conditions {
    if_headers: BTreeMap<String, String>,
    if_queries: BTreeMap<String, String>,
}

impl Conditions {
    fn rule(
        &self,
        name: &str,
        url: BaseUrl,
        headers: Vec<InjectedHeader>,
        set: HeaderChoice,
        secrets: Vec<Secret>,
    ) -> InjectionRule {
        InjectionRule {
            name: name.to_owned(),
            host: url.host,
            port: url.port,
            path: url.path,
            if_headers: self.if_headers.clone(),
            if_queries: self.if_queries.clone(),
            headers,
            set,
            secrets,
        }
    }
}

/// The beginning of a text of a client, for a message.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Checks a secret of a client, which becomes the value of a header or a part of one.
///
/// # Errors
/// When no header can have it, or it is the mask of a secret.
pub fn check_secret(key: &str, secret: &Secret) -> Result<(), InvalidInjection> {
    if !is_whole_value(secret.expose()) {
        return Err(InvalidInjection::Value(key.to_owned()));
    }
    // Nobody's secret ends like this, and to store it would replace the secret by its mask.
    if secret.expose().ends_with(STARS) {
        return Err(InvalidInjection::Masked(key.to_owned()));
    }
    Ok(())
}

fn check_condition(key: &str, value: &str) -> Result<(), InvalidInjection> {
    let is_value = value.len() <= HEADER_VALUE_MAX && !value.bytes().any(|byte| byte < b' ' || byte == 0x7f);
    is_value
        .then_some(())
        .ok_or_else(|| InvalidInjection::Condition(shortened(key)))
}

/// The secrets in the value of a header: what follows a scheme word, the password of a user, and the value itself.
fn secrets_in(value: &Secret) -> Vec<Secret> {
    let text = value.expose();
    let mut found = vec![text.to_owned()];
    if let Some((scheme, rest)) = text.split_once(' ') {
        found.push(rest.to_owned());
        if scheme.eq_ignore_ascii_case("basic")
            && let Some(pair) = STANDARD.decode(rest).ok().and_then(|pair| String::from_utf8(pair).ok())
            && let Some((_, password)) = pair.split_once(':')
        {
            found.push(password.to_owned());
        }
    }
    let hidden = found.into_iter().filter(|secret| secret.len() >= HIDDEN_MIN);
    hidden.map(Secret::new).collect()
}

#[cfg(test)]
mod tests;

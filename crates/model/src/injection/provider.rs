//! The providers whose credentials rules inject: one table, which the operator can extend, and no code for any of them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use super::kind::{HTTP, SAVED};
use super::{HeaderChoice, InjectedHeader};
use crate::network::domain::{DomainPattern, domain_name};
use crate::secret::Secret;

/// A provider, as a type of injection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Provider {
    /// The words for the type. All mean the same.
    pub names: Vec<String>,
    /// The key of the credential in a request.
    pub credential: Credential,
    /// The hosts whose requests get the credential.
    pub hosts: Vec<ProviderHost>,
    /// Which of its headers are set on a request.
    pub set: HeaderChoice,
    /// Whether `base_url` may name another host, whose requests then get the headers of the first host.
    pub any_host: bool,
}

/// The key under which a request has the credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credential {
    /// `api_key`.
    ApiKey,
    /// `token`.
    Token,
}

impl Credential {
    /// Name of the key in a request.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::ApiKey => "api_key",
            Self::Token => "token",
        }
    }
}

/// A host of a provider, and the headers that its requests get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderHost {
    /// The host.
    pub host: DomainPattern,
    /// The headers.
    pub headers: Vec<ProviderHeader>,
}

/// A header with a credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProviderHeader {
    /// Name, in lower case.
    pub name: String,
    /// How the credential is written.
    pub form: ValueForm,
}

/// How a header has the credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueForm {
    /// After a text.
    After(String),
    /// As the password of a user (RFC 7617).
    Basic {
        /// The user.
        user: String,
    },
}

impl ProviderHeader {
    /// The header with a credential.
    #[must_use]
    pub fn with(&self, credential: &Secret) -> InjectedHeader {
        let secret = credential.expose();
        let value = match &self.form {
            ValueForm::After(text) => format!("{text}{secret}"),
            ValueForm::Basic { user } => format!("Basic {}", STANDARD.encode(format!("{user}:{secret}"))),
        };
        InjectedHeader {
            name: self.name.clone(),
            value: Secret::new(value),
        }
    }
}

/// A header of the built-in table: its name, and what is in front of the credential, or the user of a password.
#[derive(Debug, Clone, Copy)]
enum BuiltinHeader {
    After(&'static str, &'static str),
    Basic(&'static str, &'static str),
}

/// A row of the built-in table.
struct Builtin {
    names: &'static [&'static str],
    credential: Credential,
    hosts: &'static [(&'static str, &'static [BuiltinHeader])],
    set: HeaderChoice,
    any_host: bool,
}

const BEARER: BuiltinHeader = BuiltinHeader::After("authorization", "Bearer ");
const API_KEY: BuiltinHeader = BuiltinHeader::After("x-api-key", "");

/// The built-in providers. The first name is the neutral one.
const BUILTIN: [Builtin; 6] = [
    Builtin {
        names: &["provider_a", "openai"],
        credential: Credential::ApiKey,
        hosts: &[("api.openai.com", &[BEARER])],
        set: HeaderChoice::All,
        any_host: true,
    },
    Builtin {
        names: &["provider_b", "anthropic"],
        credential: Credential::ApiKey,
        hosts: &[("api.anthropic.com", &[API_KEY])],
        set: HeaderChoice::All,
        any_host: true,
    },
    Builtin {
        names: &["provider_c", "gemini"],
        credential: Credential::ApiKey,
        hosts: &[(
            "generativelanguage.googleapis.com",
            &[BuiltinHeader::After("x-goog-api-key", "")],
        )],
        set: HeaderChoice::All,
        any_host: true,
    },
    Builtin {
        names: &["provider_own", "qiniu"],
        credential: Credential::ApiKey,
        hosts: &[("api.qnaigc.com", &[BEARER, API_KEY])],
        set: HeaderChoice::Present,
        any_host: true,
    },
    Builtin {
        names: &["sufy"],
        credential: Credential::ApiKey,
        hosts: &[
            ("openai.sufy.com", &[BEARER, API_KEY]),
            ("api.qnaigc.com", &[BEARER, API_KEY]),
        ],
        set: HeaderChoice::Present,
        any_host: true,
    },
    Builtin {
        names: &["code_host", "github"],
        credential: Credential::Token,
        hosts: &[
            ("github.com", &[BuiltinHeader::Basic("authorization", "x-access-token")]),
            ("api.github.com", &[BEARER]),
        ],
        set: HeaderChoice::All,
        any_host: false,
    },
];

impl From<BuiltinHeader> for ProviderHeader {
    fn from(header: BuiltinHeader) -> Self {
        let (name, form) = match header {
            BuiltinHeader::After(name, text) => (name, ValueForm::After(text.to_owned())),
            BuiltinHeader::Basic(name, user) => (name, ValueForm::Basic { user: user.to_owned() }),
        };
        Self {
            name: name.to_owned(),
            form,
        }
    }
}

/// The table of providers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Providers(Vec<Provider>);

/// A provider that cannot be added to the table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProvider {
    /// A name that is no word, or that requests use for something else.
    #[error("its name must consist of 1 to 32 lower-case letters, digits and underscores, and not be id or http")]
    Name,
    /// No domain name as host.
    #[error("host: {0:?} is not a domain name")]
    Host(String),
    /// A header that cannot be set.
    #[error("header: {0:?} cannot be set")]
    Header(String),
    /// A text that cannot be in a header.
    #[error("value: it must be ASCII text that ends with {{key}}, such as \"Bearer {{key}}\"")]
    Value,
}

impl Default for Providers {
    fn default() -> Self {
        let providers = BUILTIN.iter().map(|builtin| Provider {
            names: builtin.names.iter().map(|name| (*name).to_owned()).collect(),
            credential: builtin.credential,
            hosts: builtin
                .hosts
                .iter()
                .map(|(host, headers)| ProviderHost {
                    host: host.parse().expect("a domain name"),
                    headers: headers.iter().map(|header| (*header).into()).collect(),
                })
                .collect(),
            set: builtin.set,
            any_host: builtin.any_host,
        });
        Self(providers.collect())
    }
}

/// A provider of the operator: one header with a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnProvider<'a> {
    /// The word for the type.
    pub name: &'a str,
    /// The hosts.
    pub hosts: &'a [&'a str],
    /// The name of the header.
    pub header: &'a str,
    /// The value of the header, which ends with `{key}`.
    pub value: &'a str,
}

impl Providers {
    /// Returns the provider with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Provider> {
        self.0
            .iter()
            .find(|provider| provider.names.iter().any(|known| known == name))
    }

    /// Names of all providers.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flat_map(|provider| &provider.names).map(String::as_str)
    }

    /// Adds a provider of the operator. A built-in one with this name is replaced under this name.
    ///
    /// # Errors
    /// When a part of it is not valid.
    pub fn add(&mut self, own: &OwnProvider<'_>) -> Result<(), InvalidProvider> {
        let is_word = (1..=32).contains(&own.name.len())
            && own
                .name
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_');
        if !is_word || [SAVED, HTTP].contains(&own.name) {
            return Err(InvalidProvider::Name);
        }
        let name = crate::header::settable_name(own.header).ok();
        let name = name.ok_or_else(|| InvalidProvider::Header(own.header.to_owned()))?;
        let before = own.value.strip_suffix("{key}").ok_or(InvalidProvider::Value)?;
        if !crate::header::is_header_value(before) || before.contains("{key}") {
            return Err(InvalidProvider::Value);
        }
        let header = ProviderHeader {
            name,
            form: ValueForm::After(before.to_owned()),
        };
        let hosts = own.hosts.iter().map(|host| {
            let invalid = || InvalidProvider::Host((*host).to_owned());
            let host = domain_name(host).ok_or_else(invalid)?;
            Ok(ProviderHost {
                host: host.parse().map_err(|_| invalid())?,
                headers: vec![header.clone()],
            })
        });
        let hosts = hosts.collect::<Result<Vec<_>, InvalidProvider>>()?;
        if hosts.is_empty() {
            return Err(InvalidProvider::Host(String::new()));
        }
        for provider in &mut self.0 {
            provider.names.retain(|known| known != own.name);
        }
        self.0.push(Provider {
            names: vec![own.name.to_owned()],
            credential: Credential::ApiKey,
            hosts,
            set: HeaderChoice::All,
            any_host: true,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_of_one_provider() {
        let providers = Providers::default();
        let mut names: Vec<&str> = providers.names().collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        for (neutral, brand) in [
            ("provider_a", "openai"),
            ("provider_b", "anthropic"),
            ("provider_c", "gemini"),
            ("provider_own", "qiniu"),
            ("code_host", "github"),
        ] {
            assert_eq!(providers.get(neutral), providers.get(brand), "{brand}");
            assert!(providers.get(brand).is_some(), "{brand}");
        }
    }

    #[test]
    fn the_operator_adds_and_replaces_providers() {
        let own = OwnProvider {
            name: "mistral",
            hosts: &["api.mistral.ai"],
            header: "Authorization",
            value: "Bearer {key}",
        };
        let mut providers = Providers::default();
        providers.add(&own).expect("a provider");
        let added = providers.get("mistral").expect("added");
        let header = added.hosts[0].headers[0].with(&Secret::new("k".to_owned()));
        assert_eq!(
            (header.name.as_str(), header.value.expose()),
            ("authorization", "Bearer k")
        );
        providers
            .add(&OwnProvider { name: "openai", ..own })
            .expect("a provider");
        assert_eq!(
            providers.get("openai").expect("replaced").hosts[0].host.as_str(),
            "api.mistral.ai"
        );
        assert_eq!(
            providers.get("provider_a").expect("kept").hosts[0].host.as_str(),
            "api.openai.com"
        );
        for wrong in [
            OwnProvider { name: "", ..own },
            OwnProvider { name: "http", ..own },
            OwnProvider { name: "id", ..own },
            OwnProvider { name: "A", ..own },
            OwnProvider { hosts: &[], ..own },
            OwnProvider {
                hosts: &["*.a.b"],
                ..own
            },
            OwnProvider {
                hosts: &["203.0.113.1"],
                ..own
            },
            OwnProvider { header: "host", ..own },
            OwnProvider { header: "a b", ..own },
            OwnProvider { value: "Bearer", ..own },
            OwnProvider {
                value: "{key}{key}",
                ..own
            },
            OwnProvider {
                value: "\r\n{key}",
                ..own
            },
        ] {
            assert!(providers.add(&wrong).is_err(), "{wrong:?}");
        }
    }
}

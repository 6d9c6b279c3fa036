//! The keys of HTTPS and of certificates.
//!
//! Those of ACME are `acme.*` and not `tls.acme.*`: `tls` is a boolean, and no TOML file can have both.

use std::path::PathBuf;
use std::time::Duration;

use http::Uri;

use super::error::ConfigError;
use super::keys::{self, Key};
use super::sources::Given;
use super::values::{boolean, domain, file, integer};
use crate::tls::acme::{Acme, Hook};
use crate::tls::{Files, Https, host_of};

/// Default time limit of one run of the DNS hook, in seconds.
const HOOK_TIMEOUT_S: u32 = 120;
/// Default time that records have to appear in DNS, in seconds.
const DNS_WAIT_S: u32 = 30;
/// Upper limit of both.
const WAIT_MAX_S: u32 = 3600;
/// Maximum number of names in a certificate, as of the public authorities.
const DOMAINS_MAX: usize = 100;

/// Keys that mean nothing without `acme.directory`.
const OF_ACME: [&Key; 7] = [
    keys::ACME_CONTACT,
    keys::ACME_ACCEPT_TERMS,
    keys::ACME_DOMAINS,
    keys::ACME_DNS_HOOK,
    keys::ACME_DNS_HOOK_TIMEOUT_S,
    keys::ACME_DNS_WAIT_S,
    keys::ACME_CA,
];

impl Given<'_> {
    /// HTTPS: enabled by `tls`, or implied by the certificate files or the ACME directory.
    pub(super) fn https(&self) -> Result<Https, ConfigError> {
        let wanted = self.parse(keys::TLS, boolean)?;
        let files = (self.parse(keys::TLS_CERT, file)?, self.parse(keys::TLS_KEY, file)?);
        let acme = self.acme()?;
        let requires = |key: &'static Key, other: &'static Key| ConfigError::Requires {
            key: key.name,
            other: other.name,
        };
        match (wanted, files, acme) {
            (_, (Some(_), None), _) => Err(requires(keys::TLS_CERT, keys::TLS_KEY)),
            (_, (None, Some(_)), _) => Err(requires(keys::TLS_KEY, keys::TLS_CERT)),
            (_, (Some(_), Some(_)), Some(_)) => Err(ConfigError::Excludes {
                key: keys::ACME_DIRECTORY.name,
                other: keys::TLS_CERT.name,
            }),
            (Some(false), _, _) | (None, (None, None), None) => Ok(Https::Off),
            (_, _, Some(acme)) => Ok(Https::Acme(Box::new(acme))),
            (Some(true), (None, None), None) => Ok(Https::Local),
            (_, (Some(certificates), Some(key)), None) => Ok(Https::Files(Files { certificates, key })),
        }
    }

    fn acme(&self) -> Result<Option<Acme>, ConfigError> {
        let requires = |key: &'static Key, other: &'static str| ConfigError::Requires { key: key.name, other };
        let seconds = |key, min, default: u32| -> Result<Duration, ConfigError> {
            let given = self.parse(key, |text| integer(text, min, WAIT_MAX_S))?;
            Ok(Duration::from_secs(given.unwrap_or(default).into()))
        };
        let Some(directory) = self.parse(keys::ACME_DIRECTORY, directory)? else {
            let lonely = OF_ACME.into_iter().find(|key| self.source(key).is_some());
            return match lonely {
                Some(key) => Err(requires(key, keys::ACME_DIRECTORY.name)),
                None => Ok(None),
            };
        };
        let Some(platform) = self.parse(keys::DOMAIN, domain)? else {
            return Err(requires(keys::ACME_DIRECTORY, keys::DOMAIN.name));
        };
        let Some(path) = self.parse(keys::ACME_DNS_HOOK, hook)? else {
            return Err(requires(keys::ACME_DIRECTORY, keys::ACME_DNS_HOOK.name));
        };
        if !self.parse(keys::ACME_ACCEPT_TERMS, boolean)?.unwrap_or(false) {
            let other = "acme.accept_terms = true, with which you accept the terms of service of the authority";
            return Err(requires(keys::ACME_DIRECTORY, other));
        }
        let host = host_of(&platform);
        Ok(Some(Acme {
            directory,
            contact: self.parse(keys::ACME_CONTACT, contact)?.unwrap_or_default(),
            domains: self
                .parse(keys::ACME_DOMAINS, domains)?
                .unwrap_or_else(|| vec![host.to_owned(), format!("*.{host}")]),
            hook: Hook {
                path,
                timeout: seconds(keys::ACME_DNS_HOOK_TIMEOUT_S, 1, HOOK_TIMEOUT_S)?,
            },
            dns_wait: seconds(keys::ACME_DNS_WAIT_S, 0, DNS_WAIT_S)?,
            ca: self.parse(keys::ACME_CA, file)?,
        }))
    }
}

fn directory(text: &str) -> Result<String, String> {
    let url = text.parse::<Uri>().ok();
    let sound = url.is_some_and(|url| {
        let plain = url
            .authority()
            .is_some_and(|authority| !authority.as_str().contains('@'));
        url.scheme_str() == Some("https") && plain
    });
    // A URL with a password is not quoted.
    if sound {
        Ok(text.to_owned())
    } else {
        Err(
            "must be the HTTPS address of an ACME directory, without a user name, such as \
             https://acme-v02.api.letsencrypt.org/directory"
                .to_owned(),
        )
    }
}

fn contact(text: &str) -> Result<Vec<String>, String> {
    let address = |part: &str| {
        let part = part.trim();
        let sound = part.split_once('@').is_some_and(|(name, host)| {
            !name.is_empty() && host.contains('.') && part.bytes().all(|byte| byte.is_ascii_graphic())
        });
        // Authorities refuse header fields and several recipients in a mailto URL.
        if sound && !part.contains(['?', ',', ':', '%']) {
            Ok(part.to_owned())
        } else {
            Err(format!("{part:?} is not a mail address"))
        }
    };
    text.split(',').map(address).collect()
}

fn domains(text: &str) -> Result<Vec<String>, String> {
    let mut names: Vec<String> = Vec::new();
    for part in text.split(',') {
        let part = part.trim();
        let name = domain(part.strip_prefix("*.").unwrap_or(part))?;
        if name.contains(':') {
            return Err(format!("{part:?} must not have a port"));
        }
        let name = if part.starts_with("*.") {
            format!("*.{name}")
        } else {
            name
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    if names.len() > DOMAINS_MAX {
        return Err(format!("{} names are too many: at most {DOMAINS_MAX}", names.len()));
    }
    Ok(names)
}

/// Absolute, because the platform must not run what a relative path happens to name.
fn hook(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() {
        Ok(path)
    } else {
        Err(format!("{text:?} is not an absolute path"))
    }
}

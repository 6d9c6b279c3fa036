//! The address that a rule is for.

use std::str::FromStr;

use super::PathPattern;
use super::path::InvalidPath;
use crate::limits::BASE_URL_MAX;
use crate::network::domain::{DomainPattern, domain_name};

/// The port of HTTPS.
pub const HTTPS_PORT: u16 = 443;

/// The requests that a rule applies to, in the form of `base_url`: `[https://]host[:port][/path]`, in which the path
/// may end with `*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseUrl {
    /// The host, exactly.
    pub host: DomainPattern,
    /// The port.
    pub port: u16,
    /// The path.
    pub path: PathPattern,
}

/// Text that is not the address of a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBaseUrl {
    /// Too long.
    #[error("it must have at most {BASE_URL_MAX} bytes")]
    Length,
    /// Plain HTTP.
    #[error("it must begin with https://: requests over plain http are never changed")]
    Http,
    /// Another scheme.
    #[error("it must begin with https://, or have no scheme")]
    Scheme,
    /// A user or a password.
    #[error("it must not contain a user or a password")]
    User,
    /// A query.
    #[error("it must not contain a query: use if_queries")]
    Query,
    /// A fragment.
    #[error("it must not contain a fragment")]
    Fragment,
    /// A wildcard as host.
    #[error("its host must be one domain name, without `*`")]
    WildcardHost,
    /// No domain name as host.
    #[error("its host must be a domain name such as api.example.com; addresses are not supported")]
    Host,
    /// Not a port.
    #[error("its port must be from 1 to 65535")]
    Port,
    /// Not a path.
    #[error(transparent)]
    Path(#[from] InvalidPath),
}

impl FromStr for BaseUrl {
    type Err = InvalidBaseUrl;

    fn from_str(text: &str) -> Result<Self, InvalidBaseUrl> {
        if text.len() > BASE_URL_MAX {
            return Err(InvalidBaseUrl::Length);
        }
        let rest = match text.split_once("://") {
            Some((scheme, rest)) if is_scheme(scheme) => match () {
                () if scheme.eq_ignore_ascii_case("https") => rest,
                () if scheme.eq_ignore_ascii_case("http") => return Err(InvalidBaseUrl::Http),
                () => return Err(InvalidBaseUrl::Scheme),
            },
            _ => text,
        };
        if rest.contains('#') {
            return Err(InvalidBaseUrl::Fragment);
        }
        if rest.contains('?') {
            return Err(InvalidBaseUrl::Query);
        }
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        if authority.contains('@') {
            return Err(InvalidBaseUrl::User);
        }
        let (host, port) = match authority.split_once(':') {
            None | Some((_, "")) => (authority.trim_end_matches(':'), HTTPS_PORT),
            Some((host, digits)) => (host, port(digits).ok_or(InvalidBaseUrl::Port)?),
        };
        if host.contains('*') {
            return Err(InvalidBaseUrl::WildcardHost);
        }
        let host = domain_name(host).ok_or(InvalidBaseUrl::Host)?;
        Ok(Self {
            host: host.parse().map_err(|_| InvalidBaseUrl::Host)?,
            port,
            path: PathPattern::parse(path)?,
        })
    }
}

fn is_scheme(text: &str) -> bool {
    text.bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

fn port(digits: &str) -> Option<u16> {
    let is_number = digits.len() <= 5 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number
        .then(|| digits.parse().ok())
        .flatten()
        .filter(|port| *port > 0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn addresses_are_parsed() {
        for (text, host, port, path) in [
            ("api.example.com", "api.example.com", 443, PathPattern::Any),
            ("https://API.example.com.", "api.example.com", 443, PathPattern::Any),
            ("HTTPS://api.example.com/", "api.example.com", 443, PathPattern::Any),
            ("api.example.com:8443/*", "api.example.com", 8443, PathPattern::Any),
            ("https://a.b:/v1", "a.b", 443, PathPattern::Exact("/v1".to_owned())),
            ("a.b/v1/*", "a.b", 443, PathPattern::Prefix("/v1/".to_owned())),
            ("a.b/x://y", "a.b", 443, PathPattern::Exact("/x://y".to_owned())),
            ("localhost:1/v1*", "localhost", 1, PathPattern::Prefix("/v1".to_owned())),
        ] {
            let parsed: BaseUrl = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(
                (parsed.host.as_str(), parsed.port, parsed.path),
                (host, port, path),
                "{text}"
            );
        }
    }

    #[test]
    fn other_addresses_are_refused() {
        for (text, error) in [
            ("", InvalidBaseUrl::Host),
            ("https://", InvalidBaseUrl::Host),
            ("https:///v1", InvalidBaseUrl::Host),
            ("http://api.example.com", InvalidBaseUrl::Http),
            ("HTTP://api.example.com", InvalidBaseUrl::Http),
            ("file:///etc/passwd", InvalidBaseUrl::Scheme),
            ("://a.b", InvalidBaseUrl::Scheme),
            ("https://user:word@a.b", InvalidBaseUrl::User),
            ("https://a.b@c.d", InvalidBaseUrl::User),
            ("https://a.b/x?y=z", InvalidBaseUrl::Query),
            ("https://a.b#x", InvalidBaseUrl::Fragment),
            ("https://*.a.b", InvalidBaseUrl::WildcardHost),
            ("https://*", InvalidBaseUrl::WildcardHost),
            ("https://203.0.113.1", InvalidBaseUrl::Host),
            ("https://[2001:db8::1]", InvalidBaseUrl::Port),
            ("https://a b", InvalidBaseUrl::Host),
            ("https://a.b\\c", InvalidBaseUrl::Host),
            ("https://bücher.example", InvalidBaseUrl::Host),
            ("https://a.b:0", InvalidBaseUrl::Port),
            ("https://a.b:65536", InvalidBaseUrl::Port),
            ("https://a.b:+1", InvalidBaseUrl::Port),
            ("https://a.b:443:443", InvalidBaseUrl::Port),
            ("https://a.b/*/c", InvalidBaseUrl::Path(InvalidPath::Star)),
            ("https://a.b/c d", InvalidBaseUrl::Path(InvalidPath::Ambiguous)),
        ] {
            assert_eq!(text.parse::<BaseUrl>(), Err(error), "{text}");
        }
        assert_eq!(
            "a".repeat(BASE_URL_MAX + 1).parse::<BaseUrl>(),
            Err(InvalidBaseUrl::Length)
        );
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "(https?://|//|:)?([a-c.*@:/?#%0-9\\[\\]-]|\\PC){0,40}") {
            if let Ok(parsed) = text.parse::<BaseUrl>() {
                prop_assert!(!parsed.host.as_str().contains('*'));
                prop_assert!(parsed.port > 0);
                prop_assert!(parsed.host.matches(parsed.host.as_str()));
            }
        }
    }
}

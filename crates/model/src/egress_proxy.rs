//! The SOCKS5 proxy through which a sandbox connects to the outside.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::limits::{PROXY_ADDRESS_MAX, PROXY_CREDENTIAL_MAX};
use crate::network::domain::domain_name;
use crate::secret::Secret;

/// The host of a proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProxyHost {
    /// An address.
    Address(IpAddr),
    /// A domain name.
    Name(String),
}

impl FromStr for ProxyHost {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text.parse::<IpAddr>() {
            Ok(address) => Ok(Self::Address(address.to_canonical())),
            Err(_) => domain_name(text).map(Self::Name).ok_or(()),
        }
    }
}

impl fmt::Display for ProxyHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// A SOCKS5 proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressProxy {
    /// Host of the proxy.
    pub host: ProxyHost,
    /// Its port, never 0.
    pub port: u16,
    /// User and password for the proxy, if it requires them.
    pub credentials: Option<ProxyCredentials>,
    /// How TLS to the proxy is checked; none for a proxy without TLS.
    pub tls: Option<ProxyTls>,
}

/// A user and a password of 1 to 255 and 0 to 255 bytes (RFC 1929).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyCredentials {
    /// User name at the proxy.
    pub username: String,
    /// Password at the proxy; empty if the client set none.
    pub password: Secret,
}

/// How the certificate of a proxy is verified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxyTls {
    /// The name or address in its certificate.
    pub server_name: ProxyHost,
    /// Certificates in PEM that have to be its issuer; those of the host if none.
    pub ca_cert: Option<String>,
}

/// Settings of a proxy as a client requests them. A column stores them as JSON, without the password in the clear.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxySpec {
    /// Host and port.
    pub address: String,
    /// User name at the proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// The password, which is never serialized.
    #[serde(skip)]
    pub password: Option<Secret>,
    /// The encrypted password, in settings that are stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password_sealed: Option<String>,
    /// TLS to the proxy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<ProxyTlsSpec>,
}

/// TLS to a proxy as a client requests it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxyTlsSpec {
    /// The name in the certificate; the host of the address if none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_name: Option<String>,
    /// Certificates in PEM; those of the host if none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_cert: Option<String>,
}

/// Settings of a proxy that are not valid. Shows no credentials.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidProxy {
    /// Not a host and a port. The text is not shown, because some have credentials in it.
    #[error(
        "egressProxy.address: must be a host and a port, of at most {PROXY_ADDRESS_MAX} bytes, such as \
         proxy.example.com:1080 or [2001:db8::1]:1080"
    )]
    Address,
    /// The user is too long, or empty.
    #[error("egressProxy.username: must have 1 to {PROXY_CREDENTIAL_MAX} bytes; leave it out if the proxy needs none")]
    Username,
    /// The password is too long.
    #[error("egressProxy.password: must have at most {PROXY_CREDENTIAL_MAX} bytes")]
    Secret,
    /// A password without a user.
    #[error("egressProxy.password: requires a username")]
    PasswordAlone,
    /// Not a name of a certificate.
    #[error("egressProxy.tls.serverName: {0:?} is not a domain name or an address")]
    ServerName(String),
    /// The stored password was not decrypted.
    #[error("egressProxy.password: cannot be decrypted")]
    Sealed,
}

impl ProxySpec {
    /// The settings in the form in which the egress gateway applies them.
    ///
    /// # Errors
    /// At the first invalid value, and if the password is only there in encrypted form.
    pub fn proxy(&self) -> Result<EgressProxy, InvalidProxy> {
        let (host, port) = host_and_port(&self.address)
            .filter(|(_, port)| *port > 0 && self.address.len() <= PROXY_ADDRESS_MAX)
            .ok_or(InvalidProxy::Address)?;
        let credentials = match (&self.username, &self.password) {
            (_, None) if self.password_sealed.is_some() => return Err(InvalidProxy::Sealed),
            (None, None) => None,
            (None, Some(_)) => return Err(InvalidProxy::PasswordAlone),
            (Some(username), password) => {
                let password = password.clone().unwrap_or_else(|| Secret::new(String::new()));
                if username.is_empty() || username.len() > PROXY_CREDENTIAL_MAX {
                    return Err(InvalidProxy::Username);
                }
                if password.expose().len() > PROXY_CREDENTIAL_MAX {
                    return Err(InvalidProxy::Secret);
                }
                let username = username.clone();
                Some(ProxyCredentials { username, password })
            }
        };
        let tls = self.tls.as_ref().map(|tls| {
            let server_name = match &tls.server_name {
                None => host.clone(),
                Some(name) => name.parse().map_err(|()| InvalidProxy::ServerName(name.clone()))?,
            };
            let ca_cert = tls.ca_cert.clone();
            Ok(ProxyTls { server_name, ca_cert })
        });
        Ok(EgressProxy {
            host,
            port,
            credentials,
            tls: tls.transpose()?,
        })
    }
}

fn host_and_port(text: &str) -> Option<(ProxyHost, u16)> {
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Some((ProxyHost::Address(address.ip().to_canonical()), address.port()));
    }
    let (name, port) = text.rsplit_once(':')?;
    if !port.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some((ProxyHost::Name(domain_name(name)?), port.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(address: &str) -> ProxySpec {
        ProxySpec {
            address: address.to_owned(),
            username: None,
            password: None,
            password_sealed: None,
            tls: None,
        }
    }

    #[test]
    fn addresses_are_a_host_and_a_port() {
        let longest = format!("{}.example:65535", [["a"; 31].concat().as_str(); 7].join("."));
        assert!(longest.len() <= PROXY_ADDRESS_MAX && spec(&longest).proxy().is_ok());
        for (address, host, port) in [
            ("Proxy.example.com:1080", "proxy.example.com", 1080),
            ("203.0.113.7:1", "203.0.113.7", 1),
            ("[2001:db8::1]:65535", "2001:db8::1", 65535),
            ("[::ffff:203.0.113.7]:9", "203.0.113.7", 9),
        ] {
            let proxy = spec(address).proxy().expect(address);
            assert_eq!((proxy.host.to_string().as_str(), proxy.port), (host, port));
            assert!(proxy.credentials.is_none() && proxy.tls.is_none());
        }
        for address in [
            "",
            "proxy.example.com",
            "proxy.example.com:",
            "proxy.example.com:0",
            "proxy.example.com:65536",
            "proxy.example.com:+1",
            "socks5://proxy.example.com:1080",
            "user:secret@proxy.example.com:1080",
            "2001:db8::1:1080",
            "127.1:1080",
            "2130706433:1080",
            "a b:1",
            ":1",
        ] {
            let error = spec(address).proxy().expect_err(address);
            assert_eq!(error, InvalidProxy::Address);
        }
    }

    #[test]
    fn credentials_have_bounds_and_are_not_shown() {
        let with = |username: Option<&str>, password: Option<&str>| ProxySpec {
            username: username.map(str::to_owned),
            password: password.map(|text| Secret::new(text.to_owned())),
            ..spec("a.b:1")
        };
        let longest = "p".repeat(255);
        for (username, password, error) in [
            (Some("u"), None, None),
            (Some("u"), Some(""), None),
            (Some(longest.as_str()), Some(longest.as_str()), None),
            (None, Some("hunter2"), Some(InvalidProxy::PasswordAlone)),
            (Some(""), Some("hunter2"), Some(InvalidProxy::Username)),
            (Some(&"u".repeat(256)), Some("hunter2"), Some(InvalidProxy::Username)),
            (Some("u"), Some(&"p".repeat(256)), Some(InvalidProxy::Secret)),
        ] {
            let made = with(username, password).proxy();
            assert!(!format!("{made:?}").contains("hunter2"));
            assert_eq!(made.err(), error);
        }
        let spec = with(Some("u"), Some("hunter2"));
        let stored = serde_json::to_string(&spec).expect("JSON");
        assert_eq!(stored, r#"{"address":"a.b:1","username":"u"}"#);
        assert!(!format!("{spec:?}").contains("hunter2"));
        let sealed = ProxySpec {
            password: None,
            password_sealed: Some("v1.x".to_owned()),
            ..spec
        };
        assert_eq!(sealed.proxy(), Err(InvalidProxy::Sealed));
    }

    #[test]
    fn certificates_are_verified_against_a_name() {
        let with = |name: Option<&str>| ProxySpec {
            tls: Some(ProxyTlsSpec {
                server_name: name.map(str::to_owned),
                ca_cert: None,
            }),
            ..spec("a.b:1")
        };
        for (name, want) in [
            (None, "a.b"),
            (Some("C.d"), "c.d"),
            (Some("203.0.113.7"), "203.0.113.7"),
        ] {
            let tls = with(name).proxy().expect("a proxy").tls.expect("TLS");
            assert_eq!(tls.server_name.to_string(), want);
        }
        let invalid = InvalidProxy::ServerName("a b".to_owned());
        assert_eq!(with(Some("a b")).proxy(), Err(invalid));
    }
}

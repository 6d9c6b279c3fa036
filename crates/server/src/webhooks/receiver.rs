//! Where events may be sent to.
//!
//! The URL of a webhook is chosen by a tenant, and the connection is made by the host, which reaches more than tenants do.
//! So by default only HTTPS to public addresses is allowed, by the same classes of addresses as connections of sandboxes,
//! and every address of a name must be one. The operator allows hosts, networks and plain HTTP.

use std::collections::BTreeSet;
use std::net::IpAddr;

use http::Uri;
use model::network::domain_name;
use proxy::egress::{EgressSettings, closed_to_all};

use crate::settings::WebhookSettings;

/// Longest URL, in bytes.
pub(crate) const URL_MAX: usize = 2048;
/// Most addresses of one name that are considered. More than a load balancer has are refused.
const ADDRESSES_MAX: usize = 64;

const NOT_PUBLIC: &str =
    "the host of the URL has an address that is not public: the operator of this platform can allow it";

/// What the operator says about receivers.
#[derive(Debug)]
pub(crate) struct ReceiverRules {
    networks: EgressSettings,
    /// Hosts that may have any address, in lower case.
    hosts: BTreeSet<String>,
    allow_http: bool,
}

/// The URL of a receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReceiverUrl {
    pub(super) is_tls: bool,
    /// A name, or an address without brackets.
    pub(super) host: String,
    pub(super) port: u16,
    /// `host` or `host:port`, as in the URL.
    pub(super) authority: String,
    /// Path and query.
    pub(super) path: String,
}

impl ReceiverUrl {
    /// The address, if the URL has one instead of a name.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }
}

impl ReceiverRules {
    pub(crate) fn new(settings: &WebhookSettings) -> Self {
        Self {
            networks: EgressSettings {
                allow_private: settings.allow_private.clone(),
                deny: settings.deny.clone(),
                ..EgressSettings::default()
            },
            hosts: settings.allow_hosts.iter().map(|host| host.to_lowercase()).collect(),
            allow_http: settings.allow_http,
        }
    }

    /// Whether a text is a URL to which events may be sent, as far as that can be said without looking up its host.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(crate) fn check(&self, text: &str) -> Result<(), String> {
        let url = self.parse(text)?;
        match url.address() {
            Some(address) => self.check_addresses(&url.host, &[address]),
            None => Ok(()),
        }
    }

    /// The parts of a URL.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(super) fn parse(&self, text: &str) -> Result<ReceiverUrl, String> {
        if text.len() > URL_MAX {
            return Err(format!("the URL must have at most {URL_MAX} bytes"));
        }
        let invalid = || "the URL is not valid: it must be like https://example.com/hook".to_owned();
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) || text.contains('#') {
            return Err("the URL must consist of visible ASCII characters, without a fragment (#)".to_owned());
        }
        let uri: Uri = text.parse().map_err(|_| invalid())?;
        let is_tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") if self.allow_http => false,
            Some("http") => return Err("the URL must begin with https://: this platform allows no http://".to_owned()),
            _ => return Err(invalid()),
        };
        let authority = uri.authority().ok_or_else(invalid)?;
        if authority.as_str().contains('@') {
            return Err("the URL must have no user name and no password".to_owned());
        }
        let host = authority.host();
        let has_port = authority.as_str().len() != host.len();
        let port = match (has_port, authority.port_u16()) {
            (false, _) => {
                if is_tls {
                    443
                } else {
                    80
                }
            }
            (true, Some(port)) if port > 0 => port,
            (true, _) => return Err("the URL has an invalid port".to_owned()),
        };
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_lowercase();
        let host = match bare.parse::<IpAddr>() {
            Ok(_) => bare,
            // Other ways to write an address are none.
            Err(_) => domain_name(&bare).ok_or_else(invalid)?,
        };
        let is_local = host == "localhost" || host.ends_with(".localhost");
        if is_local && !self.hosts.contains(&host) && self.networks.allow_private.is_empty() {
            return Err(NOT_PUBLIC.to_owned());
        }
        Ok(ReceiverUrl {
            is_tls,
            host,
            port,
            authority: authority.as_str().to_owned(),
            path: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
        })
    }

    /// Whether a host may be connected to, if these are its addresses. One that is closed closes all of them.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    pub(super) fn check_addresses(&self, host: &str, addresses: &[IpAddr]) -> Result<(), String> {
        if self.hosts.contains(host) {
            return Ok(());
        }
        if addresses.len() > ADDRESSES_MAX {
            return Err(format!("the host of the URL has more than {ADDRESSES_MAX} addresses"));
        }
        match addresses
            .iter()
            .find_map(|address| closed_to_all(&self.networks, *address))
        {
            None => Ok(()),
            Some(_) => Err(NOT_PUBLIC.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(adjust: impl FnOnce(&mut WebhookSettings)) -> ReceiverRules {
        let mut settings = WebhookSettings::default();
        adjust(&mut settings);
        ReceiverRules::new(&settings)
    }

    #[test]
    fn only_https_to_public_addresses_is_allowed() {
        let rules = rules(|_| {});
        for good in [
            "https://example.com/hook",
            "HTTPS://Example.COM",
            "https://example.com:8443/a?b=c",
            "https://8.8.8.8/",
            "https://[2606:4700::1111]:8443/x",
        ] {
            assert_eq!(rules.check(good), Ok(()), "{good}");
        }
        let long = format!("https://example.com/{}", "a".repeat(URL_MAX));
        for bad in [
            "",
            "example.com",
            "/hook",
            "https://",
            "https:///hook",
            "ftp://example.com",
            "file:///etc/passwd",
            "http://example.com/hook",
            "https://user@example.com/",
            "https://user:password@example.com/",
            "https://example.com:0/",
            "https://example.com:65536/",
            "https://example.com:/",
            "https://example.com/#part",
            "https://example.com/a b",
            "https://exämple.com/",
            "https://example.com/\r\nx: y",
            "https://127.0.0.1/",
            "https://127.1/",
            "https://2130706433/",
            "https://0x7f.1/",
            "https://localhost/",
            "https://LOCALHOST./",
            "https://a.localhost:8443/",
            "https://127.255.255.254:8443/",
            "https://[::1]/",
            "https://[::ffff:127.0.0.1]/",
            "https://[::ffff:169.254.169.254]/",
            "https://10.0.0.1/",
            "https://172.31.255.255/",
            "https://192.168.1.1/",
            "https://100.64.0.1/",
            "https://169.254.169.254/latest/meta-data",
            "https://168.63.129.16/",
            "https://0.0.0.0/",
            "https://[::]/",
            "https://224.0.0.1/",
            "https://255.255.255.255/",
            "https://[fd00::1]/",
            "https://[fe80::1]/",
            "https://[ff02::1]/",
            "https://[64:ff9b::a9fe:a9fe]/",
            "https://[2002:7f00:1::1]/",
            long.as_str(),
        ] {
            assert!(rules.check(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn one_address_that_is_closed_closes_the_host() {
        let rules = rules(|_| {});
        let addresses =
            |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|text| text.parse().expect("an address")).collect() };
        let public = addresses(&["8.8.8.8", "2606:4700::1111"]);
        assert!(rules.check_addresses("example.com", &public).is_ok());
        let mixed = addresses(&["8.8.8.8", "10.0.0.1"]);
        assert!(rules.check_addresses("example.com", &mixed).is_err());
        let many = vec![public[0]; ADDRESSES_MAX + 1];
        assert!(rules.check_addresses("example.com", &many).is_err());
        assert!(rules.check_addresses("example.com", &many[1..]).is_ok());
    }

    #[test]
    fn the_operator_allows_hosts_networks_and_http() {
        let rules = rules(|settings| {
            settings.allow_private = vec!["10.0.0.0/8".parse().expect("a network")];
            settings.deny = vec![
                "10.0.0.1".parse().expect("a network"),
                "8.8.0.0/16".parse().expect("a network"),
            ];
            settings.allow_hosts = vec!["Hooks.Internal".to_owned()];
            settings.allow_http = true;
        });
        for good in [
            "http://10.1.2.3:8080/",
            "https://10.255.255.255/",
            "http://example.com/",
        ] {
            assert_eq!(rules.check(good), Ok(()), "{good}");
        }
        for bad in [
            "https://10.0.0.1/",
            "https://8.8.8.8/",
            "http://192.168.0.1/",
            "http://127.0.0.1/",
        ] {
            assert!(rules.check(bad).is_err(), "{bad}");
        }
        let inner = ["192.168.0.1".parse().expect("an address")];
        assert!(rules.check_addresses("hooks.internal", &inner).is_ok());
        let url = rules.parse("https://HOOKS.internal.:8443/").expect("a URL");
        assert_eq!(url.host, "hooks.internal");
        assert!(rules.check_addresses("other.internal", &inner).is_err());
    }
}

//! Values of the keys of connections that leave sandboxes.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use model::network::{Cidr, DomainPattern};
use protocol::agent::CA_BUNDLE_MAX;
use proxy::egress::EgressSettings;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use super::values;

/// Port of a DNS server that is given without one.
const DNS_PORT: u16 = 53;
/// Maximum of a limit per sandbox: above it, the host would run out of ports or memory first.
pub(super) const LIMIT_MAX: u32 = 1_000_000;
/// How long the certificates for sandboxes may be in PEM, in bytes: so that there is room for that of the gateway.
const AUTHORITIES_MAX: usize = CA_BUNDLE_MAX - 8 * 1024;

/// The certificates of the operator's file, of which each must be one.
///
/// # Errors
/// When the file cannot be read or contains none.
pub(crate) fn upstream_roots(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let shown = path.display();
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path)
        .with_context(|| format!("read {shown}"))?
        .collect();
    let certificates = certificates.with_context(|| format!("read certificates from {shown}"))?;
    anyhow::ensure!(!certificates.is_empty(), "{shown} contains no certificate in PEM");
    let mut store = RootCertStore::empty();
    for certificate in &certificates {
        store
            .add(certificate.clone())
            .with_context(|| format!("use a certificate of {shown}"))?;
    }
    Ok(certificates)
}

/// The certificates of the operator's files for sandboxes, each once.
///
/// # Errors
/// When one cannot be read, contains none or something that is none, or a private key, which would be a mistake: what is
/// for sandboxes is for everybody. Also when they are more than an agent takes.
pub(crate) fn authorities(paths: &[PathBuf]) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let mut all: Vec<CertificateDer<'static>> = Vec::new();
    for path in paths {
        let certificates = upstream_roots(path)?;
        let shown = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("read {shown}"))?;
        anyhow::ensure!(
            !text.contains("PRIVATE KEY-----"),
            "{shown} contains a private key: give a file with certificates alone"
        );
        for certificate in certificates {
            if !all.contains(&certificate) {
                all.push(certificate);
            }
        }
    }
    let settings = EgressSettings {
        authorities: all,
        ..EgressSettings::default()
    };
    let length = settings.authorities_pem().len();
    anyhow::ensure!(
        length <= AUTHORITIES_MAX,
        "the certificates of all files have {length} bytes in PEM: the maximum is {AUTHORITIES_MAX}, some 30 certificates. Give \
         those of your own issuers alone, without those that systems trust anyway"
    );
    Ok(settings.authorities)
}

/// The files of a list.
pub(super) fn files(text: &str) -> Result<Vec<PathBuf>, String> {
    text.split(',').map(|part| values::file(part.trim())).collect()
}

pub(super) fn is_allow(text: &str) -> Result<bool, String> {
    match text {
        "allow" => Ok(true),
        "deny" => Ok(false),
        _ => Err(format!("{text:?} is invalid: must be allow or deny")),
    }
}

pub(super) fn cidrs(text: &str) -> Result<Vec<Cidr>, String> {
    let network = |part: &str| part.trim().parse::<Cidr>().map_err(|error| error.to_string());
    text.split(',').map(network).collect()
}

pub(super) fn resolvers(text: &str) -> Result<Vec<SocketAddr>, String> {
    let server = |part: &str| {
        let part = part.trim();
        let address = part.parse::<IpAddr>().map(|address| SocketAddr::new(address, DNS_PORT));
        let server = address.or_else(|_| part.parse::<SocketAddr>());
        match server {
            Ok(server) if server.port() > 0 && !server.ip().is_unspecified() => Ok(server),
            Ok(_) | Err(_) => Err(format!(
                "{part:?} is not the address of a DNS server, such as 1.1.1.1 or 127.0.0.1:5353"
            )),
        }
    };
    text.split(',').map(server).collect()
}

pub(super) fn hosts(text: &str) -> Result<BTreeMap<String, Vec<IpAddr>>, String> {
    let mut hosts: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    for entry in text.split(',').filter(|_| !text.is_empty()) {
        let (name, address) = entry
            .split_once('=')
            .ok_or_else(|| format!("{entry:?} is not a name and an address, such as db.internal=10.0.0.5"))?;
        let name = name
            .trim()
            .parse::<DomainPattern>()
            .map_err(|error| error.to_string())?;
        if name.as_str().starts_with('*') {
            return Err(format!(
                "{:?} is a pattern, and only names can have addresses",
                name.as_str()
            ));
        }
        let address = address.trim();
        let parsed: IpAddr = address
            .parse()
            .map_err(|_| format!("{address:?}, the address of {}, is not an IP address", name.as_str()))?;
        let addresses = hosts.entry(name.as_str().to_owned()).or_default();
        addresses.push(parsed.to_canonical());
    }
    Ok(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(networks: &[Cidr]) -> Vec<String> {
        networks.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn lists_are_read() {
        let networks = cidrs("10.0.0.0/8, 192.168.1.1,fd00::/8").expect("networks");
        assert_eq!(shown(&networks), ["10.0.0.0/8", "192.168.1.1/32", "fd00::/8"]);
        let servers = resolvers("1.1.1.1, 127.0.0.1:5353,::1,[2001:db8::1]:54").expect("servers");
        let servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
        assert_eq!(
            servers,
            ["1.1.1.1:53", "127.0.0.1:5353", "[::1]:53", "[2001:db8::1]:54"]
        );
        for text in ["", "x", "10.0.0.0/33", "10.0.0.0/8,", "10.0.0.0/8;::/0"] {
            assert!(cidrs(text).is_err(), "{text}");
        }
        for text in [
            "",
            "dns.example",
            "1.1.1.1:0",
            "0.0.0.0",
            "[::]:53",
            "1.1.1.1:53:53",
            "1.1.1.1,",
        ] {
            assert!(resolvers(text).is_err(), "{text}");
        }
    }

    #[test]
    fn files_of_issuers_are_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("ca.pem");
        assert!(upstream_roots(&path).is_err());
        let key = rcgen::KeyPair::generate().expect("a key");
        let params = rcgen::CertificateParams::default();
        let certificate = params.self_signed(&key).expect("a certificate");
        let begin = "-----BEGIN CERTIFICATE-----";
        for (text, want) in [
            (certificate.pem(), Some(1)),
            (certificate.pem().repeat(2), Some(2)),
            (String::new(), None),
            (key.serialize_pem(), None),
            (format!("{begin}\nAAAA\n-----END CERTIFICATE-----\n"), None),
            (format!("{}{begin}\n", certificate.pem()), None),
        ] {
            std::fs::write(&path, &text).expect("written");
            assert_eq!(upstream_roots(&path).ok().map(|roots| roots.len()), want, "{text}");
        }
    }

    #[test]
    fn what_sandboxes_trust_is_certificates_alone() {
        let dir = tempfile::tempdir().expect("a directory");
        let pem = |name: &str| {
            let key = rcgen::KeyPair::generate().expect("a key");
            let mut params = rcgen::CertificateParams::default();
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            (
                params.self_signed(&key).expect("a certificate").pem(),
                key.serialize_pem(),
            )
        };
        let ((one, key), (two, _)) = (pem("one"), pem("two"));
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).expect("written");
            path
        };
        let good = [file("one", &one), file("both", &format!("company\r\n{one}{two}"))];
        assert_eq!(authorities(&good).expect("certificates").len(), 2);
        assert_eq!(authorities(&[]).expect("none").len(), 0);
        let (own, _) = pem(&"x".repeat(2000));
        let many = (0..30).map(|number| pem(&format!("{number}{}", "x".repeat(2000))).0);
        for (name, text, why) in [
            ("empty", String::new(), "contains no certificate in PEM"),
            ("key", key.clone(), "contains no certificate in PEM"),
            ("with-key", format!("{own}{key}"), "contains a private key"),
            ("broken", own.replace("MII", "M!!"), "read certificates from"),
            ("many", many.collect(), "the maximum is 57344"),
        ] {
            let path = file(name, &text);
            let error = format!("{:#}", authorities(std::slice::from_ref(&path)).expect_err(name));
            assert!(error.contains(why), "{name}: {error}");
            assert!(name == "many" || error.contains(&path.display().to_string()), "{error}");
            assert!(!error.contains("MII"), "{error}");
        }
        let missing = dir.path().join("missing");
        let error = format!(
            "{:#}",
            authorities(std::slice::from_ref(&missing)).expect_err("missing")
        );
        assert!(error.contains("missing") && error.contains("No such file"), "{error}");
        assert!(files("/a, /b").is_ok_and(|files| files.len() == 2));
        assert!(files("/a,").is_err());
    }

    #[test]
    fn hosts_have_names_and_addresses() {
        let hosts = hosts("DB.internal.=10.0.0.5, cache=10.0.0.6,db.internal=::ffff:10.0.0.7").expect("hosts");
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let want = [
            ("cache".to_owned(), vec![address("10.0.0.6")]),
            ("db.internal".to_owned(), vec![address("10.0.0.5"), address("10.0.0.7")]),
        ];
        assert_eq!(hosts, BTreeMap::from(want));
        assert_eq!(super::hosts(""), Ok(BTreeMap::new()));
        for text in [
            ",",
            "a",
            "a=",
            "=10.0.0.1",
            "a b=10.0.0.1",
            "*.a=10.0.0.1",
            "*=10.0.0.1",
            "a=b",
            "a=10.0.0.1:80",
        ] {
            assert!(super::hosts(text).is_err(), "{text}");
        }
    }
}

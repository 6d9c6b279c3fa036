//! What is wrong with a certificate or its key: the names that it is not valid for, its times, and who can read the key.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use jiff::{SignedDuration, Timestamp};
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;
use server::tls::Validity;

/// The names for which a certificate is not valid; empty if it cannot be parsed.
pub(super) fn uncovered<'a>(certificate: &CertificateDer<'_>, names: &'a [String]) -> Vec<&'a str> {
    let Ok(parsed) = ParsedCertificate::try_from(certificate) else {
        return Vec::new();
    };
    let covered = |name: &str| {
        // A wildcard matches exactly one label.
        ServerName::try_from(name.replace('*', "api")).is_ok_and(|name| verify_server_name(&parsed, &name).is_ok())
    };
    names.iter().map(String::as_str).filter(|name| !covered(name)).collect()
}

/// The host names of the platform: its domain, and that of every sandbox.
pub(super) fn names_of(host: &str) -> [String; 2] {
    [host.to_owned(), format!("*.{host}")]
}

/// What is wrong with a validity: it has ended, not begun, or ends before `soon` has passed.
pub(super) fn expiry_problem(validity: Validity, now: Timestamp, soon: SignedDuration) -> Option<String> {
    let Validity { not_before, not_after } = validity;
    if now > not_after {
        Some(format!("expired at {not_after}"))
    } else if now < not_before {
        Some(format!(
            "is not valid before {not_before}: check the clock of this host"
        ))
    } else if not_after.duration_since(now) < soon {
        Some(format!("expires at {not_after}"))
    } else {
        None
    }
}

/// A domain without its port.
pub(crate) fn host_of(domain: &str) -> &str {
    domain.split_once(':').map_or(domain, |(host, _)| host)
}

/// What is wrong with a file that holds a private key: others may read it, or more than its owner may write it. A
/// group that may read is how distributions hand keys to services.
pub(super) fn exposure(path: &Path) -> Option<String> {
    let mode = std::fs::metadata(path).ok()?.mode() & 0o777;
    (mode & 0o027 != 0).then(|| {
        format!(
            "{} contains a private key and has mode {mode:04o}; set it to 0600",
            path.display()
        )
    })
}

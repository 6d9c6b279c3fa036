//! Issuers of certificates that the gateway trusts for what is outside: those of the host, and those that a client sets for
//! its proxy.

use std::sync::{Arc, OnceLock};

use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

/// Certificates of issuers that a client may set. A chain of a company has two or three.
const MAX_ROOTS: usize = 16;

/// The certificates of a text in PEM, as issuers.
///
/// # Errors
/// With what is wrong.
pub(super) fn roots_of(pem: &str) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()).take(MAX_ROOTS + 1) {
        let certificate = certificate.map_err(|_| "is not PEM with certificates".to_owned())?;
        roots
            .add(certificate)
            .map_err(|_| format!("certificate {} is not valid", roots.len() + 1))?;
    }
    match roots.len() {
        0 => Err("contains no certificate in PEM".to_owned()),
        count if count > MAX_ROOTS => Err(format!("contains more than {MAX_ROOTS} certificates")),
        _ => Ok(roots),
    }
}

/// The certificates of issuers that the host trusts.
pub(super) fn host_certificates() -> Vec<CertificateDer<'static>> {
    rustls_native_certs::load_native_certs().certs
}

/// The issuers that the host trusts, as of the first use.
pub fn host_roots() -> &'static Arc<RootCertStore> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    ROOTS.get_or_init(|| {
        let mut roots = RootCertStore::empty();
        let (added, _) = roots.add_parsable_certificates(host_certificates());
        if added == 0 {
            tracing::warn!("the host trusts no issuers of certificates: egress proxies with TLS need caCert, and webhooks webhooks.ca_file");
        }
        Arc::new(roots)
    })
}

//! A certificate with its private key, as a pair of PEM files.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use secrecy::zeroize::Zeroizing;
use server::tls::{Tls, TlsError, Validity};

/// A chain of certificates and its private key, in PEM.
pub(super) struct Pair {
    pub(super) certificates: Vec<u8>,
    pub(super) key: Zeroizing<Vec<u8>>,
}

impl std::fmt::Debug for Pair {
    /// Omits the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair").finish_non_exhaustive()
    }
}

impl Pair {
    pub(super) fn load(&self) -> Result<Tls, TlsError> {
        Tls::from_pem(&self.certificates, &self.key)
    }

    pub(super) fn replace(&self, tls: &Tls) -> Result<(), TlsError> {
        tls.replace(&self.certificates, &self.key)
    }

    pub(super) fn leaf(&self) -> Option<CertificateDer<'static>> {
        CertificateDer::from_pem_slice(&self.certificates).ok()
    }

    pub(super) fn validity(&self) -> Option<Validity> {
        Validity::of(&self.leaf()?)
    }
}

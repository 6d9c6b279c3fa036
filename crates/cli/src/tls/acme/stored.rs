//! The certificate of an ACME server, as it is kept in the data directory.

use jiff::SignedDuration;
use secrecy::zeroize::Zeroizing;
use server::tls::Validity;

use crate::tls::pair::Pair;

/// File of the certificate chain and its key.
pub(super) const CERTIFICATE: &str = "certificate.pem";

/// A certificate that was issued.
pub(super) struct Stored {
    pub(super) pair: Pair,
    pub(super) validity: Validity,
}

impl Stored {
    pub(super) fn parse(content: &[u8]) -> Option<Self> {
        let pair = Pair {
            certificates: content.to_vec(),
            key: Zeroizing::new(content.to_vec()),
        };
        pair.load().ok()?;
        let validity = pair.validity()?;
        Some(Self { pair, validity })
    }
}

pub(super) fn life(validity: Validity) -> SignedDuration {
    validity.not_after.duration_since(validity.not_before)
}

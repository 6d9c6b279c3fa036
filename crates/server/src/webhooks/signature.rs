//! The signature of an event: Base64 of SHA-256 over the secret of the webhook and the body, without padding.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest as _, Sha256};

/// The owner of the sealed secret of a webhook.
pub(super) fn owner(webhook: &str) -> String {
    format!("webhook/{webhook}")
}

/// Signs a body.
pub(super) fn sign(secret: &str, body: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(secret);
    hash.update(body);
    STANDARD_NO_PAD.encode(hash.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_that_of_other_programs() {
        // printf 'secret{}' | openssl dgst -sha256 -binary | base64 | tr -d =
        assert_eq!(sign("secret", "{}"), "e9B8ejqc2/sG6v6Lh2cAHsXgRKkAkGentpGLCOuoSYs");
    }
}

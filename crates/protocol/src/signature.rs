//! Signatures of file URLs, so that a link works without a header.
//!
//! `v1_` and the unpadded standard base64 of SHA-256 over `path:operation:user:token[:expiration]`, where path and
//! user are the raw query values. The agent checks them, and the ingress finds a sandbox by them.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// What a signature covers.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The `path` query value, as sent (empty when absent).
    pub path: &'a str,
    /// `read` for GET, `write` for POST.
    pub operation: &'a str,
    /// The `username` query value, as sent (empty when absent).
    pub username: &'a str,
    /// The `signature_expiration` query value: Unix seconds.
    pub expiration: Option<i64>,
}

impl Claim<'_> {
    /// The signature of this claim under an access token.
    #[must_use]
    pub fn sign(&self, token: &str) -> String {
        let mut hash = Sha256::new();
        for part in [self.path, ":", self.operation, ":", self.username, ":", token] {
            hash.update(part.as_bytes());
        }
        if let Some(expiration) = self.expiration {
            hash.update(format!(":{expiration}").as_bytes());
        }
        format!("v1_{}", STANDARD_NO_PAD.encode(hash.finalize()))
    }

    /// Whether `signature` is the signature of this claim, compared in constant time.
    #[must_use]
    pub fn verify(&self, token: &str, signature: &str) -> bool {
        self.sign(token).as_bytes().ct_eq(signature.as_bytes()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vector_of_the_public_sdks() {
        let claim = Claim {
            path: "hello.txt",
            operation: "read",
            username: "user",
            expiration: None,
        };
        let token = "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0";
        assert_eq!(claim.sign(token), "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E");
        assert!(claim.verify(token, &claim.sign(token)));
        for other in [
            Claim {
                path: "hello.txt ",
                ..claim
            },
            Claim {
                operation: "write",
                ..claim
            },
            Claim {
                username: "root",
                ..claim
            },
            Claim {
                expiration: Some(0),
                ..claim
            },
        ] {
            assert!(!other.verify(token, &claim.sign(token)), "{other:?}");
        }
        assert!(!claim.verify("other", &claim.sign(token)));
        assert!(!claim.verify(token, ""));
    }
}

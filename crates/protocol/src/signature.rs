//! Signatures of file URLs, so that a link works without a header.
//!
//! `v1_` and SHA-256 over `path:operation:user:token[:expiration]`, where path and user are the raw query values. The
//! agent checks them, and the ingress finds a sandbox by them.
//!
//! There are two forms, from different vendors. In the [`Form::Absolute`] one the hash is unpadded standard base64 and
//! the expiration is a Unix time. In the [`Form::Relative`] one the hash is lower-case hex and the expiration is a
//! number of seconds from the creation of the link, hashed as such. Such a link does not contain its creation time, so
//! **its expiration cannot be enforced: a link in hex form works for as long as the sandbox has its token.** The forms
//! differ in length, so no signature is valid in both, and an absolute time is never taken for a relative one.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// Prefix of every signature.
const VERSION: &str = "v1_";
/// Length of a hash, in bytes.
const HASH_BYTES: usize = 32;
/// Length of a signature in the relative form, in bytes: two digits for each byte of the hash.
const RELATIVE_LENGTH: usize = VERSION.len() + 2 * HASH_BYTES;

/// The values that a signature covers.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The `path` query value, as sent (empty when absent).
    pub path: &'a str,
    /// `read` for GET and HEAD, `write` for POST.
    pub operation: &'a str,
    /// The `username` query value, as sent (empty when absent).
    pub username: &'a str,
    /// The `signature_expiration` query value: Unix seconds or, in the relative form, seconds.
    pub expiration: Option<i64>,
}

/// Encoding of a signature, which also determines the meaning of its expiration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Base64; the expiration is a Unix time, to be enforced by the server of the file.
    Absolute,
    /// Hex; the expiration is relative to an unknown time, and has no effect.
    Relative,
}

impl Claim<'_> {
    /// The signature of this claim under an access token, in absolute form.
    #[must_use]
    pub fn sign(&self, token: &str) -> String {
        self.write(token, Form::Absolute)
    }

    /// The form in which `signature` is the signature of this claim, compared in constant time; `None` when it is not.
    #[must_use]
    pub fn form(&self, token: &str, signature: &str) -> Option<Form> {
        let search = self.search(signature)?;
        search.is_signed_with(token).then_some(search.form)
    }

    /// Whether `signature` is the signature of this claim in either form. Does not check its expiration.
    #[must_use]
    pub fn verify(&self, token: &str, signature: &str) -> bool {
        self.form(token, signature).is_some()
    }

    /// Prepares to check many tokens against `signature`; `None` when it is not a well-formed signature.
    #[must_use]
    pub fn search(&self, signature: &str) -> Option<Search> {
        let text = signature.strip_prefix(VERSION)?;
        // The length of a signature is not secret.
        let (form, signature_hash) = if signature.len() == RELATIVE_LENGTH {
            (Form::Relative, from_hex(text)?)
        } else {
            // Decoding is strict, so that every signature has exactly one encoding.
            (Form::Absolute, STANDARD_NO_PAD.decode(text).ok()?.try_into().ok()?)
        };
        Some(Search {
            before_token: self.before_token(),
            after_token: self.after_token(),
            signature_hash,
            form,
        })
    }

    fn write(&self, token: &str, form: Form) -> String {
        let hash = hash(self.before_token(), token, &self.after_token());
        let mut signature = VERSION.to_owned();
        match form {
            Form::Absolute => STANDARD_NO_PAD.encode_string(hash, &mut signature),
            Form::Relative => signature.push_str(&hex::encode(hash)),
        }
        signature
    }

    /// State of the hash before the token is added.
    fn before_token(&self) -> Sha256 {
        let mut hash = Sha256::new();
        for part in [self.path, ":", self.operation, ":", self.username, ":"] {
            hash.update(part.as_bytes());
        }
        hash
    }

    fn after_token(&self) -> String {
        self.expiration
            .map_or_else(String::new, |expiration| format!(":{expiration}"))
    }
}

/// A search for the token that created a signature. The input common to all tokens is already hashed, so checking one
/// more costs a block or two of SHA-256, however long the path is.
#[derive(Clone)]
pub struct Search {
    before_token: Sha256,
    after_token: String,
    signature_hash: [u8; HASH_BYTES],
    form: Form,
}

impl fmt::Debug for Search {
    /// Omits the signature, which grants access to a file.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Search")
            .field("form", &self.form)
            .finish_non_exhaustive()
    }
}

impl Search {
    /// Whether the signature was created with this token, compared in constant time.
    #[must_use]
    pub fn is_signed_with(&self, token: &str) -> bool {
        hash(self.before_token.clone(), token, &self.after_token)
            .ct_eq(&self.signature_hash)
            .into()
    }

    /// The hash that the signature contains.
    #[must_use]
    pub fn signature_hash(&self) -> [u8; HASH_BYTES] {
        self.signature_hash
    }
}

fn hash(mut before_token: Sha256, token: &str, after_token: &str) -> [u8; HASH_BYTES] {
    before_token.update(token.as_bytes());
    before_token.update(after_token.as_bytes());
    before_token.finalize().into()
}

/// Accepts only lower-case hex, so that every signature has exactly one encoding.
fn from_hex(text: &str) -> Option<[u8; HASH_BYTES]> {
    if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return None;
    }
    let mut bytes = [0; HASH_BYTES];
    hex::decode_to_slice(text, &mut bytes).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matches_the_test_vector_of_the_public_sdks() {
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

    #[test]
    fn accepts_the_hex_form() {
        let claim = Claim {
            path: "hello.txt",
            operation: "read",
            username: "user",
            expiration: Some(300),
        };
        // printf 'hello.txt:read:user:secret:300' | sha256sum
        let hex = "v1_4d332b8efa81d7cae045eefae6f69034c0742baed40ffb494864135941fab8f0";
        assert_eq!(claim.form("secret", hex), Some(Form::Relative));
        assert!(claim.verify("secret", hex));
        assert_eq!(claim.form("secret", &claim.sign("secret")), Some(Form::Absolute));
        let unlimited = Claim {
            expiration: None,
            ..claim
        };
        // printf 'hello.txt:read:user:secret' | sha256sum
        let unlimited_hex = "v1_3aae99a34ba9a929f142c06b85baa0fcdae2f6a39fb71175b00ca97e69e38744";
        assert_eq!(unlimited.form("secret", unlimited_hex), Some(Form::Relative));
        for (claim, token, signature) in [
            (claim, "other", hex),
            (unlimited, "secret", hex),
            (claim, "secret", &hex.to_ascii_uppercase().replace('V', "v")),
            (claim, "secret", &hex[3..]),
            (claim, "secret", &hex[..hex.len() - 1]),
            (claim, "secret", &format!("{hex}0")),
            (claim, "secret", &hex.replace("v1_", "v2_")),
        ] {
            assert_eq!(claim.form(token, signature), None, "{signature}");
        }
    }
}

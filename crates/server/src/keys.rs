//! API keys and the tokens of sandboxes.
//!
//! An API key is `e2b_` and hexadecimal digits; what is stored is the SHA-256 of the bytes that the digits stand for.
//! The tokens of a sandbox are HMACs of its id, so they survive restarts without being stored.

use hmac::{Hmac, KeyInit, Mac};
use model::id::SandboxId;
use secrecy::{ExposeSecret, SecretBox, SecretString};
use sha2::{Digest, Sha256};
use store::keys::KeyHash;

/// What every API key begins with.
pub const API_KEY_PREFIX: &str = "e2b_";

/// Why a text is no API key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidApiKey {
    /// It does not begin with [`API_KEY_PREFIX`].
    #[error("an API key begins with {API_KEY_PREFIX}")]
    Prefix,
    /// What follows the prefix is not hexadecimal.
    #[error("an API key is hexadecimal after its prefix")]
    Digits,
}

/// The hash under which an API key is stored. Whoever makes a key stores it under this.
///
/// # Errors
/// When the text is no API key.
pub fn hash_api_key(key: &str) -> Result<KeyHash, InvalidApiKey> {
    let digits = key.strip_prefix(API_KEY_PREFIX).ok_or(InvalidApiKey::Prefix)?;
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if pairs.is_empty() || !rest.is_empty() {
        return Err(InvalidApiKey::Digits);
    }
    let bytes: Option<Vec<u8>> = pairs
        .iter()
        .map(|[high, low]| Some(proxy::percent::hex_digit(*high)? << 4 | proxy::percent::hex_digit(*low)?))
        .collect();
    let bytes = bytes.ok_or(InvalidApiKey::Digits)?;
    Ok(KeyHash::new(hex(&Sha256::digest(bytes))))
}

/// The token that the agent of a sandbox asks clients for.
pub(crate) fn access_token(seed: &SecretBox<[u8; 32]>, id: &SandboxId) -> SecretString {
    derive(seed, &[id.as_str()])
}

/// The token that the traffic of a sandbox that is not public must carry.
pub(crate) fn traffic_token(seed: &SecretBox<[u8; 32]>, id: &SandboxId) -> SecretString {
    derive(seed, &["sandbox-traffic-", id.as_str()])
}

/// A digest of a request, by which only this platform can tell that another one is the same.
pub(crate) fn request_digest(seed: &SecretBox<[u8; 32]>, operation: &str, body: &str) -> String {
    derive(seed, &["request-digest-", operation, "-", body])
        .expose_secret()
        .to_owned()
}

fn derive(seed: &SecretBox<[u8; 32]>, parts: &[&str]) -> SecretString {
    let mut mac = Hmac::<Sha256>::new_from_slice(seed.expose_secret()).expect("HMAC takes a key of every length");
    for part in parts {
        mac.update(part.as_bytes());
    }
    hex(&mac.finalize().into_bytes()).into()
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_hashed_over_their_bytes_whatever_the_case() {
        let hash = hash_api_key("e2b_00ff").expect("a key");
        assert_eq!(hash, hash_api_key("e2b_00FF").expect("a key"));
        assert_eq!(hash, KeyHash::new(hex(&Sha256::digest([0x00, 0xff]))));
        for (key, why) in [
            ("", InvalidApiKey::Prefix),
            ("sk_00", InvalidApiKey::Prefix),
            ("e2b_", InvalidApiKey::Digits),
            ("e2b_0", InvalidApiKey::Digits),
            ("e2b_0g", InvalidApiKey::Digits),
            ("e2b_é", InvalidApiKey::Digits),
        ] {
            assert_eq!(hash_api_key(key), Err(why), "{key}");
        }
    }

    #[test]
    fn tokens_differ_by_sandbox_and_purpose() {
        let seed = SecretBox::new(Box::new([7; 32]));
        let id: SandboxId = "iabc".parse().expect("an id");
        let other: SandboxId = "iabd".parse().expect("an id");
        let token = access_token(&seed, &id);
        assert_eq!(token.expose_secret().len(), 64);
        assert_eq!(token.expose_secret(), access_token(&seed, &id).expose_secret());
        assert_ne!(token.expose_secret(), access_token(&seed, &other).expose_secret());
        assert_ne!(token.expose_secret(), traffic_token(&seed, &id).expose_secret());
    }
}

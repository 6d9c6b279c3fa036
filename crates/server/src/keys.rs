//! API keys, access tokens, and the tokens of sandboxes.
//!
//! An API key is `e2b_` and hexadecimal digits, an access token `sk_e2b_` and hexadecimal digits; what is stored is the
//! SHA-256 of the bytes that the digits stand for. The tokens of a sandbox are HMACs of its id, so they survive restarts
//! without being stored.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use model::id::SandboxId;
use secrecy::{ExposeSecret, SecretBox, SecretString};
use sha2::{Digest, Sha256};
use store::keys::{KeyHash, KeyMask};

/// What every API key begins with.
pub const API_KEY_PREFIX: &str = "e2b_";
/// What every access token begins with.
pub const ACCESS_TOKEN_PREFIX: &str = "sk_e2b_";
/// Random bytes of a new key or token.
const KEY_BYTES: usize = 20;

/// Why a text is no key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKey {
    /// It does not begin with the prefix of its kind.
    #[error("it does not begin as keys of its kind do")]
    Prefix,
    /// What follows the prefix is not hexadecimal.
    #[error("it is not hexadecimal after its prefix")]
    Digits,
}

/// The hash under which an API key is stored. Whoever makes a key stores it under this.
///
/// # Errors
/// When the text is no API key.
pub fn hash_api_key(key: &str) -> Result<KeyHash, InvalidKey> {
    hash(API_KEY_PREFIX, key)
}

/// The hash under which an access token is stored.
///
/// # Errors
/// When the text is no access token.
pub fn hash_access_token(token: &str) -> Result<KeyHash, InvalidKey> {
    hash(ACCESS_TOKEN_PREFIX, token)
}

fn hash(prefix: &str, text: &str) -> Result<KeyHash, InvalidKey> {
    let digits = text.strip_prefix(prefix).ok_or(InvalidKey::Prefix)?;
    let (pairs, rest) = digits.as_bytes().as_chunks::<2>();
    if pairs.is_empty() || !rest.is_empty() {
        return Err(InvalidKey::Digits);
    }
    let bytes: Option<Vec<u8>> = pairs
        .iter()
        .map(|[high, low]| Some(proxy::percent::hex_digit(*high)? << 4 | proxy::percent::hex_digit(*low)?))
        .collect();
    let bytes = bytes.ok_or(InvalidKey::Digits)?;
    Ok(KeyHash::new(hex(&Sha256::digest(bytes))))
}

/// A key or token that was just made, to be shown once to its owner.
pub struct NewKey {
    prefix: &'static str,
    digits: String,
}

impl fmt::Debug for NewKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NewKey({})", self.mask())
    }
}

impl NewKey {
    /// A random API key.
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub fn api_key() -> Result<Self, getrandom::Error> {
        Self::random(API_KEY_PREFIX)
    }

    /// A random access token.
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub fn access_token() -> Result<Self, getrandom::Error> {
        Self::random(ACCESS_TOKEN_PREFIX)
    }

    fn random(prefix: &'static str) -> Result<Self, getrandom::Error> {
        let mut random = [0; KEY_BYTES];
        getrandom::fill(&mut random)?;
        Ok(Self {
            prefix,
            digits: hex(&random),
        })
    }

    /// The API key that belongs to a row of that id and can be shown again. It is derived like the tokens of sandboxes,
    /// so that only its hash is stored like that of any other.
    pub(crate) fn derived(seed: &TokenSeed, row: &str) -> Self {
        let digits = seed.derive(&["api-key-", row]);
        Self {
            prefix: API_KEY_PREFIX,
            digits: digits.expose_secret()[..2 * KEY_BYTES].to_owned(),
        }
    }

    /// The key itself.
    #[must_use]
    pub fn expose(&self) -> String {
        format!("{}{}", self.prefix, self.digits)
    }

    /// What is stored of it.
    #[must_use]
    pub fn hash(&self) -> KeyHash {
        hash(self.prefix, &self.expose()).expect("it is made of its prefix and hexadecimal digits")
    }

    /// What people recognise it by.
    #[must_use]
    pub fn mask(&self) -> KeyMask {
        KeyMask::of(self.prefix, &self.digits)
    }
}

/// The secret that every token of a sandbox is derived from.
#[derive(Debug, Clone)]
pub(crate) struct TokenSeed(Arc<SecretBox<[u8; 32]>>);

impl TokenSeed {
    pub(crate) fn new(seed: SecretBox<[u8; 32]>) -> Self {
        Self(Arc::new(seed))
    }

    /// The token that the agent of a sandbox asks clients for.
    pub(crate) fn access_token(&self, id: &SandboxId) -> SecretString {
        self.derive(&[id.as_str()])
    }

    /// The token that the traffic of a sandbox that is not public must carry.
    pub(crate) fn traffic_token(&self, id: &SandboxId) -> SecretString {
        self.derive(&["sandbox-traffic-", id.as_str()])
    }

    /// A digest of a request, by which only this platform can tell that another one is the same.
    pub(crate) fn request_digest(&self, operation: &str, body: &str) -> String {
        self.derive(&["request-digest-", operation, "-", body])
            .expose_secret()
            .to_owned()
    }

    fn derive(&self, parts: &[&str]) -> SecretString {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose_secret()).expect("HMAC takes a key of every length");
        for part in parts {
            mac.update(part.as_bytes());
        }
        hex(&mac.finalize().into_bytes()).into()
    }
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
    fn key_hashes_ignore_case() {
        let hash = hash_api_key("e2b_00ff").expect("a key");
        assert_eq!(hash, hash_api_key("e2b_00FF").expect("a key"));
        assert_eq!(hash, KeyHash::new(hex(&Sha256::digest([0x00, 0xff]))));
        for (key, why) in [
            ("", InvalidKey::Prefix),
            ("sk_00", InvalidKey::Prefix),
            ("e2b_", InvalidKey::Digits),
            ("e2b_0", InvalidKey::Digits),
            ("e2b_0g", InvalidKey::Digits),
            ("e2b_é", InvalidKey::Digits),
        ] {
            assert_eq!(hash_api_key(key), Err(why), "{key}");
        }
    }

    #[test]
    fn new_keys_have_their_prefix_and_hash() {
        let (one, other) = (NewKey::api_key().expect("random"), NewKey::api_key().expect("random"));
        assert_ne!(one.expose(), other.expose());
        assert_eq!(one.expose().len(), 44);
        assert_eq!(hash_api_key(&one.expose()), Ok(one.hash()));
        let token = NewKey::access_token().expect("random");
        assert_eq!(token.expose().len(), 47);
        assert_eq!(hash_access_token(&token.expose()), Ok(token.hash()));
        assert_eq!(hash_api_key(&token.expose()), Err(InvalidKey::Prefix));
        assert_eq!(hash_access_token(&one.expose()), Err(InvalidKey::Prefix));
        let seed = TokenSeed::new(SecretBox::new(Box::new([7; 32])));
        let derived = NewKey::derived(&seed, "a row");
        assert_eq!(derived.expose(), NewKey::derived(&seed, "a row").expose());
        assert_ne!(derived.expose(), NewKey::derived(&seed, "another").expose());
        for key in [one, token, derived] {
            assert!(!format!("{key:?}").contains(&key.digits));
        }
    }

    #[test]
    fn tokens_differ_by_sandbox_and_purpose() {
        let seed = TokenSeed::new(SecretBox::new(Box::new([7; 32])));
        let id: SandboxId = "iabc".parse().expect("an id");
        let other: SandboxId = "iabd".parse().expect("an id");
        let token = seed.access_token(&id);
        assert_eq!(token.expose_secret().len(), 64);
        assert_eq!(token.expose_secret(), seed.access_token(&id).expose_secret());
        assert_ne!(token.expose_secret(), seed.access_token(&other).expose_secret());
        assert_ne!(token.expose_secret(), seed.traffic_token(&id).expose_secret());
    }
}

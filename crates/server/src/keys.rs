//! API keys, access tokens, and the tokens of sandboxes.
//!
//! An API key is `e2b_` and hexadecimal digits, an access token `sk_e2b_` and hexadecimal digits; stored is the SHA-256
//! of the bytes that the digits encode. The tokens of a sandbox are HMACs of its id, so they survive restarts without
//! being stored.

use std::fmt;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use model::id::{SandboxId, TemplateId};
use secrecy::{ExposeSecret, SecretBox, SecretString};
use sha2::{Digest, Sha256};
use store::keys::{KeyHash, KeyMask};

/// Prefix of every API key.
pub const API_KEY_PREFIX: &str = "e2b_";
/// Prefix of every access token.
pub const ACCESS_TOKEN_PREFIX: &str = "sk_e2b_";
/// Random bytes of a new key or token.
const KEY_BYTES: usize = 20;

/// Why a text is not a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidKey {
    /// The prefix of its kind is missing.
    #[error("the prefix is missing")]
    Prefix,
    /// The text after the prefix is not hexadecimal.
    #[error("the text after the prefix is not hexadecimal")]
    Digits,
}

/// The hash under which an API key is stored.
///
/// # Errors
/// When the text is not an API key.
pub fn hash_api_key(key: &str) -> Result<KeyHash, InvalidKey> {
    hash(API_KEY_PREFIX, key)
}

/// The hash under which an access token is stored.
///
/// # Errors
/// When the text is not an access token.
pub fn hash_access_token(token: &str) -> Result<KeyHash, InvalidKey> {
    hash(ACCESS_TOKEN_PREFIX, token)
}

fn hash(prefix: &str, text: &str) -> Result<KeyHash, InvalidKey> {
    let digits = text.strip_prefix(prefix).ok_or(InvalidKey::Prefix)?;
    let bytes = hex::decode(digits).map_err(|_| InvalidKey::Digits)?;
    if bytes.is_empty() {
        return Err(InvalidKey::Digits);
    }
    Ok(KeyHash::new(hex::encode(Sha256::digest(bytes))))
}

/// A newly created key or token, to be shown once to its owner.
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
    /// When the kernel provides no random bytes.
    pub fn api_key() -> Result<Self, getrandom::Error> {
        Self::random(API_KEY_PREFIX)
    }

    /// A random access token.
    ///
    /// # Errors
    /// When the kernel provides no random bytes.
    pub fn access_token() -> Result<Self, getrandom::Error> {
        Self::random(ACCESS_TOKEN_PREFIX)
    }

    fn random(prefix: &'static str) -> Result<Self, getrandom::Error> {
        let mut random = [0; KEY_BYTES];
        getrandom::fill(&mut random)?;
        Ok(Self {
            prefix,
            digits: hex::encode(random),
        })
    }

    /// The API key of the row with that id, which can be shown again: it is derived from the seed like the tokens of
    /// sandboxes. Only its hash is stored, as for any other key.
    pub(crate) fn derived(seed: &TokenSeed, row: &str) -> Self {
        let digits = seed.derive(&["api-key-", row]);
        Self {
            prefix: API_KEY_PREFIX,
            digits: digits.expose_secret()[..2 * KEY_BYTES].to_owned(),
        }
    }

    /// The complete key.
    #[must_use]
    pub fn expose(&self) -> String {
        format!("{}{}", self.prefix, self.digits)
    }

    /// The hash that is stored.
    #[must_use]
    pub fn hash(&self) -> KeyHash {
        hash(self.prefix, &self.expose()).expect("a prefix and hexadecimal digits")
    }

    /// The part of the key that identifies it in lists.
    #[must_use]
    pub fn mask(&self) -> KeyMask {
        KeyMask::of(self.prefix, &self.digits)
    }
}

/// The secret from which the tokens of sandboxes are derived.
#[derive(Debug, Clone)]
pub(crate) struct TokenSeed(Arc<SecretBox<[u8; 32]>>);

impl TokenSeed {
    pub(crate) fn new(seed: &SecretBox<[u8; 32]>) -> Self {
        let copy = |to: &mut [u8; 32]| to.copy_from_slice(seed.expose_secret());
        Self(Arc::new(SecretBox::init_with_mut(copy)))
    }

    /// The agent token of a sandbox.
    pub(crate) fn access_token(&self, id: &SandboxId) -> SecretString {
        self.derive(&[id.as_str()])
    }

    /// The traffic token of a sandbox, required unless its traffic is public.
    pub(crate) fn traffic_token(&self, id: &SandboxId) -> SecretString {
        self.derive(&["sandbox-traffic-", id.as_str()])
    }

    /// The seed of the private key of a sandbox's certificate authority: 64 hexadecimal digits, the same for its whole
    /// life.
    pub(crate) fn ca_seed(&self, id: &SandboxId) -> SecretString {
        self.derive(&["sandbox-ca-", id.as_str()])
    }

    /// A keyed digest of a request: only this platform can recognize an identical request by it.
    pub(crate) fn request_digest(&self, operation: &str, body: &str) -> String {
        self.derive(&["request-digest-", operation, "-", body])
            .expose_secret()
            .to_owned()
    }

    /// The signature of an address to which the files of a build can be uploaded without an API key.
    pub(crate) fn upload_token(&self, template: &TemplateId, hash: &str, expires_s: i64) -> SecretString {
        let expires = expires_s.to_string();
        self.derive(&["template-upload-", template.as_str(), "-", hash, "-", &expires])
    }

    /// Whether a text is the signature of that address. How long this takes does not depend on the text.
    pub(crate) fn is_upload_token(&self, template: &TemplateId, hash: &str, expires_s: i64, token: &str) -> bool {
        let valid = self.upload_token(template, hash, expires_s);
        let valid = valid.expose_secret().as_bytes();
        let differs = valid.iter().zip(token.as_bytes()).fold(0, |all, (a, b)| all | (a ^ b));
        valid.len() == token.len() && differs == 0
    }

    fn derive(&self, parts: &[&str]) -> SecretString {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose_secret()).expect("HMAC takes a key of every length");
        for part in parts {
            mac.update(part.as_bytes());
        }
        hex::encode(mac.finalize().into_bytes()).into()
    }
}

/// Random hexadecimal digits, for a name that nothing else has.
///
/// # Errors
/// When the kernel provides no random bytes.
pub(crate) fn random_hex() -> Result<String, getrandom::Error> {
    let mut random = [0; 16];
    getrandom::fill(&mut random)?;
    Ok(hex::encode(random))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_hashes_ignore_case() {
        let hash = hash_api_key("e2b_00ff").expect("a key");
        assert_eq!(hash, hash_api_key("e2b_00FF").expect("a key"));
        assert_eq!(hash, KeyHash::new(hex::encode(Sha256::digest([0x00, 0xff]))));
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
        let seed = TokenSeed::new(&SecretBox::new(Box::new([7; 32])));
        let derived = NewKey::derived(&seed, "a row");
        assert_eq!(derived.expose(), NewKey::derived(&seed, "a row").expose());
        assert_ne!(derived.expose(), NewKey::derived(&seed, "another").expose());
        for key in [one, token, derived] {
            assert!(!format!("{key:?}").contains(&key.digits));
        }
    }

    #[test]
    fn tokens_differ_by_sandbox_and_purpose() {
        let seed = TokenSeed::new(&SecretBox::new(Box::new([7; 32])));
        let id: SandboxId = "iabc".parse().expect("an id");
        let other: SandboxId = "iabd".parse().expect("an id");
        let token = seed.access_token(&id);
        assert_eq!(token.expose_secret().len(), 64);
        assert_eq!(token.expose_secret(), seed.access_token(&id).expose_secret());
        assert_ne!(token.expose_secret(), seed.access_token(&other).expose_secret());
        assert_ne!(token.expose_secret(), seed.traffic_token(&id).expose_secret());
        let ca = seed.ca_seed(&id);
        assert_eq!(ca.expose_secret().len(), 64);
        assert_ne!(ca.expose_secret(), token.expose_secret());
        assert_ne!(ca.expose_secret(), seed.ca_seed(&other).expose_secret());
    }
}

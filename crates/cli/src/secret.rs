//! API keys and key pairs of clients.
//!
//! Invariant: nothing here is printed by `Debug`, and API keys are kept as hashes only.

use std::fmt;

use anyhow::{Context, Result, anyhow};
use server::keys::API_KEY_PREFIX;
use store::keys::{KeyHash, KeyMask};

/// Random bytes from the kernel.
///
/// # Errors
/// When the kernel has no random bytes, which does not happen on a booted system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("read random bytes: {error}"))?;
    Ok(bytes)
}

/// An API key: `e2b_` and 40 hexadecimal characters, because older SDKs refuse any other form before they ask.
pub(crate) struct ApiKey {
    text: String,
    hash: KeyHash,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKey({})", self.mask())
    }
}

impl ApiKey {
    /// A new key of 160 random bits.
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub(crate) fn generate() -> Result<Self> {
        let text = format!("{API_KEY_PREFIX}{}", hex::encode(random::<20>()?));
        Self::parse(&text).context("create an API key")
    }

    /// Reads a key that was made earlier.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        Some(Self {
            hash: server::keys::hash_api_key(text).ok()?,
            text: text.to_owned(),
        })
    }

    /// The key itself, to be shown once to its owner.
    pub(crate) fn expose(&self) -> &str {
        &self.text
    }

    /// What the database keeps. The key is random, so a slow hash would add nothing.
    pub(crate) fn hash(&self) -> &KeyHash {
        &self.hash
    }

    /// The masked form that lists show.
    pub(crate) fn mask(&self) -> KeyMask {
        KeyMask::of(API_KEY_PREFIX, &self.text[API_KEY_PREFIX.len()..])
    }
}

/// A key pair that signs requests. The prefixes are ours, so that scanners for leaked secrets can know them.
pub(crate) struct AccessPair {
    /// The public half.
    pub(crate) access: String,
    /// The secret half.
    pub(crate) secret: String,
}

impl fmt::Debug for AccessPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessPair")
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl AccessPair {
    /// A new pair: 128 random bits to be found by, 256 to sign with.
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub(crate) fn generate() -> Result<Self> {
        Ok(Self {
            access: format!("rfa_{}", hex::encode(random::<16>()?)),
            secret: format!("rfs_{}", hex::encode(random::<32>()?)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_keys_are_hashed_over_their_bytes() {
        let key = ApiKey::parse("e2b_53ae1fed82754c17ad8077fbc8bcdd90").unwrap();
        // SHA-256 over the 16 bytes, computed with another program.
        assert_eq!(
            *key.hash(),
            KeyHash::new("44bacb42d6ad0732427deb6e706ba557e970f8467f617575ff72c1c65b005d89".to_owned())
        );
        assert_eq!(key.mask().to_string(), "e2b_53...dd90");
        assert_eq!(
            ApiKey::parse(&key.text.to_uppercase().replace("E2B", "e2b"))
                .unwrap()
                .hash(),
            key.hash()
        );
        for text in ["", "e2b_", "e2b_1", "e2b_xy", "sk_e2b_00", "00", "e2b_é0"] {
            assert!(ApiKey::parse(text).is_none(), "{text}");
        }
    }

    #[test]
    fn new_api_keys_have_the_form_that_sdks_check() {
        let (one, two) = (ApiKey::generate().unwrap(), ApiKey::generate().unwrap());
        assert_ne!(one.expose(), two.expose());
        assert_eq!(one.expose().len(), 44);
        assert_eq!(ApiKey::parse(one.expose()).unwrap().hash(), one.hash());
        assert!(!format!("{one:?}").contains(one.expose()));
    }
}

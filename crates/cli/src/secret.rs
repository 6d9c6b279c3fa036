//! The master key of a platform and the keys derived from it; API keys and key pairs of clients.
//!
//! One random key in `<data-dir>/secret.key` is the root of everything secret: from it come, by HMAC under distinct
//! labels, the key that seals secrets in the database and the seed of the sandboxes' access tokens. So the database
//! alone, as a backup or with the operator of PostgreSQL, opens nothing. Losing the file loses the sealed
//! secrets. Several servers on one database need the same file.
//!
//! Invariant: nothing here is printed by `Debug`, and API keys are kept as hashes only.

use std::fmt::{self, Write as _};
use std::io;

use anyhow::{Context, Result, anyhow};
use hmac::{Hmac, Mac};
use server::keys::API_KEY_PREFIX;
use server::seal::{SealError, Sealer};
use sha2::Sha256;
use store::keys::{KeyHash, KeyMask};

use crate::data_dir::DataDir;

/// The file of the master key: 64 hexadecimal characters, so that it fits into any secret store.
pub(crate) const MASTER_FILE: &str = "secret.key";

/// Random bytes from the kernel.
///
/// # Errors
/// When the kernel has no random bytes, which does not happen on a booted system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("read random bytes: {error}"))?;
    Ok(bytes)
}

fn hex(bytes: &[u8]) -> String {
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if text.is_empty() || !text.len().is_multiple_of(2) || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok())
        .collect()
}

/// The root of everything secret on a platform.
pub(crate) struct MasterKey([u8; 32]);

impl fmt::Debug for MasterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MasterKey(hidden)")
    }
}

impl MasterKey {
    /// Reads the key of a data directory, or creates one. The directory must be locked.
    ///
    /// # Errors
    /// When the file is there and holds no key, or the system refuses.
    pub(crate) fn load_or_make(dir: &DataDir) -> Result<Self> {
        let path = dir.path().join(MASTER_FILE);
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                let bytes = unhex(text.trim()).and_then(|bytes| bytes.try_into().ok());
                bytes
                    .map(Self)
                    .with_context(|| format!("{} must contain exactly 64 hexadecimal characters", path.display()))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let key = Self(random()?);
                dir.write_private(MASTER_FILE, format!("{}\n", hex(&key.0)).as_bytes())?;
                Ok(key)
            }
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    fn derive(&self, label: &str) -> [u8; 32] {
        let mut mac = <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(label.as_bytes());
        mac.finalize().into_bytes().into()
    }

    /// The seed from which the server derives the agent tokens of sandboxes.
    pub(crate) fn token_seed(&self) -> [u8; 32] {
        self.derive("ringfence/token-seed/1")
    }

    /// What encrypts secrets for the database.
    pub(crate) fn sealer(&self) -> Sealer {
        Sealer::new(self.derive("ringfence/seal/1"))
    }

    /// Encrypts a secret for the database, as [`Sealer::seal`].
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub(crate) fn seal(&self, owner: &str, secret: &str) -> Result<String> {
        self.sealer().seal(owner, secret).context("seal a secret")
    }

    /// Decrypts what [`Self::seal`] made for the same owner.
    ///
    /// # Errors
    /// When it was sealed with another key, for another owner, or was changed.
    pub(crate) fn open(&self, owner: &str, sealed: &str) -> Result<String> {
        let opened = self.sealer().open(owner, sealed);
        opened.map_err(|error| match error {
            SealError::WrongKey => anyhow!("the secret of {owner} was sealed with another {MASTER_FILE}"),
            SealError::Corrupt | SealError::Random => anyhow!("the sealed secret of {owner} is corrupt"),
        })
    }
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
        let text = format!("{API_KEY_PREFIX}{}", hex(&random::<20>()?));
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
            access: format!("rfa_{}", hex(&random::<16>()?)),
            secret: format!("rfs_{}", hex(&random::<32>()?)),
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

    #[test]
    fn the_master_key_is_kept() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let made = MasterKey::load_or_make(&dir).unwrap();
        let read = MasterKey::load_or_make(&dir).unwrap();
        assert_eq!(made.0, read.0);
        assert_ne!(made.token_seed(), made.derive("ringfence/seal/1"));
        for damaged in ["", "00", "zz", &"0".repeat(63)] {
            dir.write_private(MASTER_FILE, damaged.as_bytes()).unwrap();
            assert!(MasterKey::load_or_make(&dir).is_err(), "{damaged}");
        }
    }

    #[test]
    fn sealed_secrets_open_for_their_owner_and_key_only() {
        let key = MasterKey([7; 32]);
        let sealed = key.seal("rfa_1", "rfs_secret").unwrap();
        assert_ne!(sealed, key.seal("rfa_1", "rfs_secret").unwrap());
        assert_eq!(key.open("rfa_1", &sealed).unwrap(), "rfs_secret");
        assert!(key.open("rfa_2", &sealed).is_err());
        assert!(MasterKey([8; 32]).open("rfa_1", &sealed).is_err());
        for damaged in ["", "v1.", "v1.AAAA", "v2.AAAA", &sealed[..sealed.len() - 4]] {
            let error = key.open("rfa_1", damaged).unwrap_err();
            assert!(!error.to_string().contains("rfs_secret"), "{error}");
        }
    }
}

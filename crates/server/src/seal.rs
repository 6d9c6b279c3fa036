//! Encryption of secrets for the database.
//!
//! The key comes from the caller and is in no database, so the database alone, as a backup or with its operator, opens
//! nothing. `Debug` shows neither the key nor a secret.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use chacha20poly1305::aead::{Aead, KeyInit, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};

/// Prefix of every sealed text, so that the scheme can be replaced.
const SEALED_PREFIX: &str = "v1.";
/// Length of the random nonce in bytes. At 24 bytes, random ones do not repeat.
const NONCE_BYTES: usize = 24;

/// Encrypts and decrypts secrets.
#[derive(Clone)]
pub struct Sealer(XChaCha20Poly1305);

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer(hidden)")
    }
}

/// Why a secret was not encrypted or decrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The kernel has no random bytes, which does not happen on a booted system.
    #[error("no random bytes")]
    Random,
    /// The text is not one that was made here.
    #[error("the sealed secret is corrupt")]
    Corrupt,
    /// The text was made with another key or for another owner, or was changed.
    #[error("the secret was sealed with another key")]
    WrongKey,
}

impl Sealer {
    /// A sealer with a key.
    #[must_use]
    pub fn new(key: [u8; 32]) -> Self {
        Self(XChaCha20Poly1305::new(&key.into()))
    }

    /// Encrypts a secret for the database. `owner` names its row and is authenticated: in another row the secret cannot
    /// be decrypted.
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub fn seal(&self, owner: &str, secret: &str) -> Result<String, SealError> {
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).map_err(|_| SealError::Random)?;
        let payload = Payload {
            msg: secret.as_bytes(),
            aad: owner.as_bytes(),
        };
        let sealed = self.0.encrypt(&XNonce::from(nonce), payload);
        let sealed = sealed.map_err(|_| SealError::Corrupt)?;
        let text = STANDARD_NO_PAD.encode([&nonce[..], &sealed].concat());
        Ok(format!("{SEALED_PREFIX}{text}"))
    }

    /// Decrypts what [`Self::seal`] made for the same owner.
    ///
    /// # Errors
    /// When it was sealed with another key, for another owner, or was changed.
    pub fn open(&self, owner: &str, sealed: &str) -> Result<String, SealError> {
        let bytes = sealed
            .strip_prefix(SEALED_PREFIX)
            .and_then(|text| STANDARD_NO_PAD.decode(text).ok())
            .ok_or(SealError::Corrupt)?;
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE_BYTES>().ok_or(SealError::Corrupt)?;
        let payload = Payload {
            msg: sealed,
            aad: owner.as_bytes(),
        };
        let secret = self.0.decrypt(&XNonce::from(*nonce), payload);
        String::from_utf8(secret.map_err(|_| SealError::WrongKey)?).map_err(|_| SealError::Corrupt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sealed_secrets_open_for_their_owner_and_key_only() {
        let sealer = Sealer::new([7; 32]);
        let sealed = sealer.seal("rfa_1", "rfs_secret").expect("sealed");
        assert_ne!(sealed, sealer.seal("rfa_1", "rfs_secret").expect("sealed"));
        assert_eq!(sealer.open("rfa_1", &sealed).as_deref(), Ok("rfs_secret"));
        assert_eq!(sealer.open("rfa_2", &sealed), Err(SealError::WrongKey));
        assert_eq!(Sealer::new([8; 32]).open("rfa_1", &sealed), Err(SealError::WrongKey));
        for damaged in ["", "v1.", "v1.AAAA", "v2.AAAA", &sealed[..sealed.len() - 4]] {
            assert!(sealer.open("rfa_1", damaged).is_err(), "{damaged}");
        }
        assert_eq!(
            sealer.open("", &sealer.seal("", "").expect("sealed")).as_deref(),
            Ok("")
        );
    }
}

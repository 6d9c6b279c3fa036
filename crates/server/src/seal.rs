//! Encryption of secrets for the database.
//!
//! Every secret has a random key of its own, which is encrypted with the key of the caller. That key is in no database,
//! so the database alone, as a backup or with its operator, opens nothing; and when it is replaced, only the keys of the
//! secrets are encrypted again. `Debug` shows neither a key nor a secret.
//!
//! A sealed text is `v2.<id of the key>.<encrypted key of the secret>.<encrypted secret>`. Texts of earlier versions,
//! `v1.<encrypted secret>`, have no key of their own; they are read, and become `v2` when the key is replaced.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use chacha20poly1305::aead::{Aead, KeyInit as _, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use hmac::{Hmac, Mac as _};
use sha2::Sha256;

/// Prefix of sealed texts, so that the scheme can be replaced.
const PREFIX: &str = "v2.";
/// Prefix of texts of earlier versions.
const OLD_PREFIX: &str = "v1.";
/// Length of the random nonce in bytes. At 24 bytes, random ones do not repeat.
const NONCE_BYTES: usize = 24;
/// Length of a key in bytes.
const KEY_BYTES: usize = 32;
/// Length of the id of a key, in hexadecimal digits.
const ID_DIGITS: usize = 16;

/// Encrypts and decrypts secrets. Clones share the keys.
#[derive(Clone)]
pub struct Sealer(Arc<Keys>);

/// The key that encrypts, and others that decrypt only.
struct Keys {
    current: Key,
    others: Vec<Key>,
}

/// A key of the caller.
#[derive(Clone)]
struct Key {
    /// Tells keys apart, and reveals nothing about them.
    id: String,
    /// Encrypts the keys of secrets.
    wrap: XChaCha20Poly1305,
    /// Encrypted the secrets of earlier versions.
    old: XChaCha20Poly1305,
}

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

impl Key {
    fn new(key: [u8; KEY_BYTES]) -> Self {
        let derive = |label: &str| -> [u8; KEY_BYTES] {
            let mut mac = <Hmac<Sha256> as hmac::KeyInit>::new_from_slice(&key).expect("HMAC takes keys of any length");
            mac.update(label.as_bytes());
            mac.finalize().into_bytes().into()
        };
        let id = derive("ringfence/seal-key-id/1");
        Self {
            id: hex::encode(&id[..ID_DIGITS / 2]),
            wrap: XChaCha20Poly1305::new(&derive("ringfence/wrap/1").into()),
            old: XChaCha20Poly1305::new(&key.into()),
        }
    }
}

/// The parts of a `v2` text.
struct Sealed<'a> {
    key_id: &'a str,
    wrapped_key: &'a str,
    secret: &'a str,
}

impl<'a> Sealed<'a> {
    /// The parts; none if the text is of another scheme.
    fn parse(text: &'a str) -> Option<Self> {
        let (key_id, rest) = text.strip_prefix(PREFIX)?.split_once('.')?;
        let (wrapped_key, secret) = rest.split_once('.')?;
        Some(Self {
            key_id,
            wrapped_key,
            secret,
        })
    }
}

impl Sealer {
    /// A sealer with a key.
    #[must_use]
    pub fn new(key: [u8; KEY_BYTES]) -> Self {
        Self(Arc::new(Keys {
            current: Key::new(key),
            others: Vec::new(),
        }))
    }

    /// The sealer, which also decrypts what was encrypted with another key.
    #[must_use]
    pub fn and_open_with(&self, key: [u8; KEY_BYTES]) -> Self {
        let mut others = self.0.others.clone();
        others.push(Key::new(key));
        Self(Arc::new(Keys {
            current: self.0.current.clone(),
            others,
        }))
    }

    /// Encrypts a secret for the database. `owner` names its row and is authenticated: in another row the secret cannot
    /// be decrypted.
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub fn seal(&self, owner: &str, secret: &str) -> Result<String, SealError> {
        let mut own = [0; KEY_BYTES];
        getrandom::fill(&mut own).map_err(|_| SealError::Random)?;
        let wrapped = self.wrap(&own)?;
        let secret = encrypt(&XChaCha20Poly1305::new(&own.into()), owner, secret.as_bytes())?;
        Ok(format!("{wrapped}.{secret}"))
    }

    /// Decrypts what [`Self::seal`] made for the same owner.
    ///
    /// # Errors
    /// When it was sealed with another key, for another owner, or was changed.
    pub fn open(&self, owner: &str, sealed: &str) -> Result<String, SealError> {
        let secret = match Sealed::parse(sealed) {
            Some(parts) => {
                let own = self.unwrap(&parts)?;
                decrypt(&XChaCha20Poly1305::new(&own.into()), owner, parts.secret)?
            }
            None => self.open_old(owner, sealed)?,
        };
        String::from_utf8(secret).map_err(|_| SealError::Corrupt)
    }

    /// A sealed text under the current key; none if it is already. `owner` is that of texts of earlier versions.
    ///
    /// # Errors
    /// When it was sealed with another key, or was changed.
    pub fn reseal(&self, owner: &str, sealed: &str) -> Result<Option<String>, SealError> {
        let Some(parts) = Sealed::parse(sealed) else {
            let secret = self.open(owner, sealed)?;
            return self.seal(owner, &secret).map(Some);
        };
        let own = self.unwrap(&parts)?;
        if parts.key_id == self.0.current.id {
            return Ok(None);
        }
        Ok(Some(format!("{}.{}", self.wrap(&own)?, parts.secret)))
    }

    /// The first half of a sealed text.
    fn wrap(&self, own: &[u8; KEY_BYTES]) -> Result<String, SealError> {
        let Key { id, wrap, .. } = &self.0.current;
        Ok(format!("{PREFIX}{id}.{}", encrypt(wrap, id, own)?))
    }

    /// The key of a secret.
    fn unwrap(&self, parts: &Sealed<'_>) -> Result<[u8; KEY_BYTES], SealError> {
        let key = self
            .keys()
            .find(|key| key.id == parts.key_id)
            .ok_or(SealError::WrongKey)?;
        let own = decrypt(&key.wrap, &key.id, parts.wrapped_key)?;
        own.try_into().map_err(|_| SealError::Corrupt)
    }

    fn open_old(&self, owner: &str, sealed: &str) -> Result<Vec<u8>, SealError> {
        let sealed = sealed.strip_prefix(OLD_PREFIX).ok_or(SealError::Corrupt)?;
        let mut result = Err(SealError::Corrupt);
        for key in self.keys() {
            result = decrypt(&key.old, owner, sealed);
            if result.is_ok() {
                break;
            }
        }
        result
    }

    fn keys(&self) -> impl Iterator<Item = &Key> {
        [&self.0.current].into_iter().chain(&self.0.others)
    }
}

fn encrypt(cipher: &XChaCha20Poly1305, owner: &str, secret: &[u8]) -> Result<String, SealError> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(|_| SealError::Random)?;
    let payload = Payload {
        msg: secret,
        aad: owner.as_bytes(),
    };
    let sealed = cipher.encrypt(&XNonce::from(nonce), payload);
    let sealed = sealed.map_err(|_| SealError::Corrupt)?;
    Ok(STANDARD_NO_PAD.encode([&nonce[..], &sealed].concat()))
}

fn decrypt(cipher: &XChaCha20Poly1305, owner: &str, sealed: &str) -> Result<Vec<u8>, SealError> {
    let bytes = STANDARD_NO_PAD.decode(sealed).map_err(|_| SealError::Corrupt)?;
    let (nonce, sealed) = bytes.split_first_chunk::<NONCE_BYTES>().ok_or(SealError::Corrupt)?;
    let payload = Payload {
        msg: sealed,
        aad: owner.as_bytes(),
    };
    let secret = cipher.decrypt(&XNonce::from(*nonce), payload);
    secret.map_err(|_| SealError::WrongKey)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text as earlier versions made it.
    fn seal_old(key: [u8; 32], owner: &str, secret: &str) -> String {
        let sealed = encrypt(&XChaCha20Poly1305::new(&key.into()), owner, secret.as_bytes());
        format!("{OLD_PREFIX}{}", sealed.expect("sealed"))
    }

    #[test]
    fn sealed_secrets_open_for_their_owner_and_key_only() {
        let sealer = Sealer::new([7; 32]);
        let sealed = sealer.seal("rfa_1", "rfs_secret").expect("sealed");
        assert_ne!(sealed, sealer.seal("rfa_1", "rfs_secret").expect("sealed"));
        assert_eq!(sealer.open("rfa_1", &sealed).as_deref(), Ok("rfs_secret"));
        assert_eq!(sealer.open("rfa_2", &sealed), Err(SealError::WrongKey));
        assert_eq!(Sealer::new([8; 32]).open("rfa_1", &sealed), Err(SealError::WrongKey));
        let truncated = &sealed[..sealed.len() - 4];
        for damaged in ["", "v1.", "v2.", "v2..", "v2...", "v1.AAAA", "v3.AAAA", truncated] {
            assert!(sealer.open("rfa_1", damaged).is_err(), "{damaged}");
        }
        assert_eq!(
            sealer.open("", &sealer.seal("", "").expect("sealed")).as_deref(),
            Ok("")
        );
    }

    #[test]
    fn a_text_that_was_changed_anywhere_does_not_open() {
        let sealer = Sealer::new([7; 32]);
        let sealed = sealer.seal("owner", "a secret").expect("sealed");
        for at in 0..sealed.len() {
            let mut changed = sealed.clone().into_bytes();
            changed[at] = if changed[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(changed).expect("ASCII");
            assert!(sealer.open("owner", &changed).is_err(), "{at}");
        }
    }

    #[test]
    fn parts_of_two_secrets_do_not_fit_together() {
        let sealer = Sealer::new([7; 32]);
        let one = sealer.seal("owner", "one").expect("sealed");
        let two = sealer.seal("owner", "two").expect("sealed");
        let (key, _) = one.rsplit_once('.').expect("parts");
        let (_, secret) = two.rsplit_once('.').expect("parts");
        assert!(sealer.open("owner", &format!("{key}.{secret}")).is_err());
    }

    #[test]
    fn texts_of_earlier_versions_open() {
        let sealed = seal_old([7; 32], "rfa_1", "rfs_secret");
        let sealer = Sealer::new([7; 32]);
        assert_eq!(sealer.open("rfa_1", &sealed).as_deref(), Ok("rfs_secret"));
        assert_eq!(sealer.open("rfa_2", &sealed), Err(SealError::WrongKey));
        assert_eq!(Sealer::new([8; 32]).open("rfa_1", &sealed), Err(SealError::WrongKey));
    }

    #[test]
    fn a_new_key_takes_over_with_both_readable_meanwhile() {
        let (old, new) = (Sealer::new([7; 32]), Sealer::new([8; 32]));
        let both = new.and_open_with([7; 32]);
        for sealed in [
            old.seal("owner", "a secret").expect("sealed"),
            seal_old([7; 32], "owner", "a secret"),
        ] {
            assert_eq!(both.open("owner", &sealed).as_deref(), Ok("a secret"));
            let again = both.reseal("owner", &sealed).expect("opened").expect("replaced");
            assert_eq!(new.open("owner", &again).as_deref(), Ok("a secret"));
            assert_eq!(old.open("owner", &again), Err(SealError::WrongKey));
            assert_eq!(both.reseal("owner", &again), Ok(None));
            // A rotation that was cut and is begun again with yet another key.
            let third = Sealer::new([9; 32]).and_open_with([8; 32]).and_open_with([7; 32]);
            assert!(third.reseal("owner", &again).expect("opened").is_some());
        }
        let foreign = Sealer::new([1; 32]).seal("owner", "a secret").expect("sealed");
        assert_eq!(both.reseal("owner", &foreign), Err(SealError::WrongKey));
    }
}

//! The encryption of parcels: XChaCha20-Poly1305 under keys that are derived from that of the sandbox.
//!
//! The nonce of a chunk is the beginning of its name, which is a hash of its content under another key: the same content
//! makes the same chunk, and two contents never share a nonce. The whole name is authenticated with it. A manifest has a
//! random nonce, and the ids of the parcel and of what it is of are authenticated with it: that of an earlier pause, or of
//! another sandbox, is refused.

use std::fmt;
use std::io;

use bytes::Bytes;
use chacha20poly1305::aead::{Aead as _, AeadInOut as _, KeyInit as _, Payload};
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use hmac::{Hmac, Mac as _};
use model::secret::Secret;
use protocol::parcel::ChunkId;
use sha2::Sha256;

/// Length of a key, in bytes.
const KEY: usize = 32;
/// Length of a nonce, in bytes.
const NONCE: usize = 24;

type Mac = Hmac<Sha256>;

/// The keys of the parcels of a sandbox.
pub(crate) struct ParcelKeys {
    names: Mac,
    chunks: XChaCha20Poly1305,
    manifests: XChaCha20Poly1305,
}

impl fmt::Debug for ParcelKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ParcelKeys(hidden)")
    }
}

fn mac(key: &[u8]) -> Mac {
    <Mac as hmac::KeyInit>::new_from_slice(key).expect("HMAC takes keys of any length")
}

fn owner(of: &str, parcel: &str) -> String {
    format!("ringfence/parcel/1/{of}/{parcel}")
}

impl ParcelKeys {
    /// The keys that are derived from this one, of 64 hexadecimal digits.
    ///
    /// # Errors
    /// When it is another text, which is not in the error.
    pub(crate) fn of(key: &Secret) -> io::Result<Self> {
        let mut bytes = [0; KEY];
        hex::decode_to_slice(key.expose(), &mut bytes)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the key of a parcel is not one"))?;
        let derive = |label: &str| -> [u8; KEY] {
            mac(&bytes)
                .chain_update(label.as_bytes())
                .finalize()
                .into_bytes()
                .into()
        };
        Ok(Self {
            names: mac(&derive("ringfence/parcel/names/1")),
            chunks: XChaCha20Poly1305::new(&derive("ringfence/parcel/chunks/1").into()),
            manifests: XChaCha20Poly1305::new(&derive("ringfence/parcel/manifests/1").into()),
        })
    }

    /// The name of a chunk with this content.
    pub(crate) fn name(&self, content: &[u8]) -> ChunkId {
        ChunkId::of_hash(self.names.clone().chain_update(content).finalize().into_bytes().into())
    }

    /// Encrypts the content of a chunk.
    ///
    /// # Errors
    /// When it is too long for the cipher.
    pub(crate) fn seal_chunk(&self, id: &ChunkId, content: &[u8]) -> io::Result<Bytes> {
        let (nonce, _) = id.as_bytes().split_first_chunk::<NONCE>().expect("an id is longer");
        let payload = Payload {
            msg: content,
            aad: id.as_bytes(),
        };
        let sealed = self.chunks.encrypt(&XNonce::from(*nonce), payload);
        sealed.map(Bytes::from).map_err(|_| io::Error::other("encrypt a chunk"))
    }

    /// Decrypts a chunk; none unless it is the one with this name. The content is not hashed again: its name was authenticated with
    /// it, under a key with which nothing is encrypted but content under its own name.
    pub(crate) fn open_chunk(&self, id: &ChunkId, sealed: Bytes) -> Option<Vec<u8>> {
        let (nonce, _) = id.as_bytes().split_first_chunk::<NONCE>()?;
        let mut content = Vec::from(sealed);
        let opened = self
            .chunks
            .decrypt_in_place(&XNonce::from(*nonce), id.as_bytes(), &mut content);
        opened.ok().map(|()| content)
    }

    /// Encrypts the manifest of a parcel of the sandbox, or of the memory of the build, with the id `of`.
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub(crate) fn seal_manifest(&self, of: &str, parcel: &str, manifest: &[u8]) -> io::Result<Bytes> {
        let mut nonce = [0; NONCE];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())?;
        let owner = owner(of, parcel);
        let payload = Payload {
            msg: manifest,
            aad: owner.as_bytes(),
        };
        let sealed = self.manifests.encrypt(&XNonce::from(nonce), payload);
        let sealed = sealed.map_err(|_| io::Error::other("encrypt a manifest"))?;
        Ok(Bytes::from([&nonce[..], &sealed].concat()))
    }

    /// Decrypts the manifest of a parcel; none unless it is that of this one.
    pub(crate) fn open_manifest(&self, of: &str, parcel: &str, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = sealed.split_first_chunk::<NONCE>()?;
        let owner = owner(of, parcel);
        let payload = Payload {
            msg: sealed,
            aad: owner.as_bytes(),
        };
        self.manifests.decrypt(&XNonce::from(*nonce), payload).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(byte: &str) -> ParcelKeys {
        ParcelKeys::of(&Secret::new(byte.repeat(KEY))).unwrap()
    }

    #[test]
    fn a_chunk_opens_under_its_name_and_the_key_of_its_sandbox_alone() {
        let (ours, theirs) = (keys("a1"), keys("b2"));
        let id = ours.name(b"content");
        let sealed = ours.seal_chunk(&id, b"content").unwrap();
        assert!(!sealed.windows(7).any(|window| window == b"content"));
        assert_eq!(sealed, ours.seal_chunk(&id, b"content").unwrap());
        assert_eq!(ours.open_chunk(&id, sealed.clone()).as_deref(), Some(&b"content"[..]));
        assert_ne!(theirs.name(b"content"), id);
        assert_eq!(theirs.open_chunk(&id, sealed.clone()), None);
        // One chunk in the place of another one.
        let other = ours.name(b"another");
        assert_eq!(ours.open_chunk(&other, sealed.clone()), None);
        for at in [0, sealed.len() / 2, sealed.len() - 1] {
            let mut changed = sealed.to_vec();
            changed[at] ^= 1;
            assert_eq!(ours.open_chunk(&id, changed.into()), None, "{at}");
            assert_eq!(ours.open_chunk(&id, sealed.slice(..at)), None, "{at}");
        }
    }

    #[test]
    fn a_manifest_opens_for_its_sandbox_and_parcel_alone() {
        let keys = keys("a1");
        let (one, other) = ("ione", "itwo");
        let sealed = keys.seal_manifest(one, "p1", b"manifest").unwrap();
        assert_eq!(
            keys.open_manifest(one, "p1", &sealed).as_deref(),
            Some(&b"manifest"[..])
        );
        assert_eq!(keys.open_manifest(one, "p2", &sealed), None);
        assert_eq!(keys.open_manifest(other, "p1", &sealed), None);
        assert_eq!(keys.open_manifest(one, "p1", &sealed[..10]), None);
        assert_eq!(keys.open_manifest(one, "p1", &[&sealed[..], b"x"].concat()), None);
    }

    #[test]
    fn an_error_about_a_key_does_not_have_it() {
        let text = ParcelKeys::of(&Secret::new("not-hexadecimal".to_owned()))
            .unwrap_err()
            .to_string();
        assert!(!text.contains("not-hex"), "{text}");
    }
}

//! Archives of files of a recipe, with the hash by which layers are found again.
//!
//! The hash is that of `ringfence template build` for the same files: of names, modes, sizes and contents, and not of times.

use std::collections::BTreeMap;

use formats::tar::{BLOCK, Header, padding};
use sha2::{Digest as _, Sha256};

/// Files and directories have the modes that a copy of the repository has.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// A tar archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    /// The archive.
    pub bytes: Vec<u8>,
    /// Hash of what is in the archive, in hexadecimal digits.
    pub hash: String,
}

impl Archive {
    /// Archives contents by their names, none for a directory. Names have at most as many bytes as a header has room for, which a test
    /// says of each recipe.
    pub(crate) fn of(files: &BTreeMap<&'static str, Option<&'static str>>) -> Self {
        let mut bytes = Vec::new();
        let mut hash = Sha256::new();
        for (name, content) in files {
            let text = content.unwrap_or_default().as_bytes();
            let header = Header {
                path: name.as_bytes(),
                kind: if content.is_some() { b'0' } else { b'5' },
                mode: if content.is_some() { FILE_MODE } else { DIRECTORY_MODE },
                size: text.len() as u64,
                ..Header::default()
            };
            for part in [header.path, header.link] {
                hash.update((part.len() as u64).to_le_bytes());
                hash.update(part);
            }
            hash.update(header.mode.to_le_bytes());
            hash.update(header.size.to_le_bytes());
            hash.update([header.kind]);
            hash.update(text);
            bytes.extend_from_slice(&header.block());
            bytes.extend_from_slice(text);
            bytes.extend_from_slice(&[0; BLOCK][..padding(header.size)]);
        }
        bytes.extend_from_slice(&[0; 2 * BLOCK]);
        Self {
            bytes,
            hash: hex::encode(hash.finalize()),
        }
    }
}

#[cfg(test)]
mod tests {
    use formats::tar::TEXT_MAX;

    use super::*;

    #[test]
    fn an_archive_has_whole_blocks_and_a_hash_of_its_content() {
        let files = BTreeMap::from([("d", None), ("d/a", Some("text"))]);
        let archive = Archive::of(&files);
        assert_eq!(archive.bytes.len(), BLOCK * (1 + 2 + 2));
        assert_eq!(archive.hash.len(), 64);
        let other = Archive::of(&BTreeMap::from([("d", None), ("d/a", Some("tex2"))]));
        assert_ne!(archive.hash, other.hash);
    }

    #[test]
    fn names_fit_into_headers() {
        for carried in crate::all() {
            assert!(carried.files.iter().all(|(name, _)| name.len() <= TEXT_MAX));
        }
    }
}

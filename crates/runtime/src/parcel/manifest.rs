//! The manifest of a parcel: which files are made of which chunks.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use protocol::parcel::{CHUNK, ChunkId};
use serde::{Deserialize, Serialize};

use crate::rootfs::Rootfs;

/// The version of manifests that is written and read.
const VERSION: u32 = 1;
/// Longest file that lies in a manifest itself, in bytes.
pub(crate) const SMALL: u64 = 32 << 10;

/// What a parcel has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    version: u32,
    /// The disk.
    pub(crate) disk: Pieces,
    /// The file system of the disk.
    pub(crate) rootfs: Rootfs,
    /// The version of `base` that its files lie above, if it has one.
    pub(crate) base: Option<String>,
    /// The files of its checkpoint, if there is one.
    pub(crate) checkpoint: Option<Vec<CheckpointFile>>,
}

/// A file that is made of chunks. The rest of it is zero.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pieces {
    /// Its length.
    pub(crate) bytes: u64,
    /// What is not zero.
    pub(crate) pieces: Vec<Piece>,
}

/// A part of a file: the whole content of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Piece {
    /// Where it begins.
    pub(crate) at: u64,
    /// Its length.
    pub(crate) bytes: u32,
    /// The chunk.
    pub(crate) chunk: ChunkId,
}

/// A file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CheckpointFile {
    /// Its name in the directory of the checkpoint.
    pub(crate) name: String,
    /// Its content.
    pub(crate) content: Content,
}

/// The content of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Content {
    /// All of it, in Base64.
    Small(String),
    /// In chunks.
    Pieces(Pieces),
}

/// Where a piece lies: in the disk, or in a file of the checkpoint with this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) file: Option<usize>,
    pub(crate) at: u64,
    pub(crate) bytes: u32,
}

impl Manifest {
    pub(crate) fn new(
        disk: Pieces,
        rootfs: Rootfs,
        base: Option<String>,
        checkpoint: Option<Vec<CheckpointFile>>,
    ) -> Self {
        Self {
            version: VERSION,
            disk,
            rootfs,
            base,
            checkpoint,
        }
    }

    /// The manifest as it is encrypted.
    ///
    /// # Errors
    /// When it cannot be encoded.
    pub(crate) fn encode(&self) -> io::Result<Vec<u8>> {
        Ok(serde_json::to_vec(self)?)
    }

    /// Reads a manifest, and checks all of it that is used as a name or a size.
    ///
    /// # Errors
    /// With the reason when it is not one.
    pub(crate) fn decode(text: &[u8]) -> Result<Self, String> {
        let manifest: Self = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        if manifest.version != VERSION {
            return Err(format!("its version is {}, and not {VERSION}", manifest.version));
        }
        let files = manifest.checkpoint.iter().flatten();
        let named = files.clone().find(|file| !is_name(&file.name));
        if let Some(file) = named {
            return Err(format!("{:?} is no file of a checkpoint", file.name));
        }
        let pieces_of = files.filter_map(|file| match &file.content {
            Content::Pieces(pieces) => Some(pieces),
            Content::Small(_) => None,
        });
        for pieces in pieces_of.chain([&manifest.disk]) {
            for piece in &pieces.pieces {
                let ends = piece.at.checked_add(u64::from(piece.bytes));
                if ends.is_none_or(|end| end > pieces.bytes) || piece.bytes == 0 || piece.bytes as usize > CHUNK {
                    return Err("a piece lies outside its file".to_owned());
                }
            }
        }
        Ok(manifest)
    }

    /// Where the content of each chunk goes. Without the checkpoint if that is not wanted.
    pub(crate) fn places(&self, with_checkpoint: bool) -> HashMap<ChunkId, Vec<Destination>> {
        let mut places: HashMap<ChunkId, Vec<Destination>> = HashMap::new();
        let mut add = |file: Option<usize>, pieces: &Pieces| {
            for piece in &pieces.pieces {
                let (at, bytes) = (piece.at, piece.bytes);
                places
                    .entry(piece.chunk)
                    .or_default()
                    .push(Destination { file, at, bytes });
            }
        };
        add(None, &self.disk);
        if with_checkpoint {
            for (number, file) in self.checkpoint.iter().flatten().enumerate() {
                if let Content::Pieces(pieces) = &file.content {
                    add(Some(number), pieces);
                }
            }
        }
        places
    }
}

/// Whether a file of a checkpoint is part of it, and its name is one without a directory.
pub(crate) fn is_name(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
    !name.contains('/') && !name.starts_with('.') && matches!(extension, Some("img" | "json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest(name: &str, at: u64) -> Manifest {
        let chunk = ChunkId::of_hash([1; 32]);
        let pieces = Pieces {
            bytes: 4096,
            pieces: vec![Piece { at, bytes: 1024, chunk }],
        };
        let file = CheckpointFile {
            name: name.to_owned(),
            content: Content::Pieces(pieces.clone()),
        };
        Manifest::new(pieces, Rootfs::base(), None, Some(vec![file]))
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let good = manifest("pages-1.img", 3072);
        assert_eq!(Manifest::decode(&good.encode().unwrap()), Ok(good.clone()));
        let places = good.places(true);
        assert_eq!(places.len(), 1);
        let of_chunk = &places[&ChunkId::of_hash([1; 32])];
        let files: Vec<Option<usize>> = of_chunk.iter().map(|place| place.file).collect();
        assert_eq!(files, [None, Some(0)]);
        assert_eq!(good.places(false)[&ChunkId::of_hash([1; 32])].len(), 1);
    }

    #[test]
    fn names_and_places_outside_are_refused() {
        for bad in [
            manifest("../pages-1.img", 0),
            manifest(".img", 0),
            manifest("dump.log", 0),
            manifest("pages-1.img", 3073),
            manifest("pages-1.img", u64::MAX),
        ] {
            assert!(Manifest::decode(&bad.encode().unwrap()).is_err(), "{bad:?}");
        }
        let later = Manifest {
            version: 2,
            ..manifest("pages-1.img", 0)
        };
        assert!(
            Manifest::decode(&later.encode().unwrap())
                .unwrap_err()
                .contains("version")
        );
        assert!(Manifest::decode(b"{}").is_err());
    }
}

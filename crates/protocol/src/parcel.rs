//! A parcel: what is kept of a paused sandbox, on its way between a node and the blob store.
//!
//! ```text
//!   node ── chunk, chunk, … , manifest ──▶ server ──▶ blob store     after a pause
//!   node ◀── manifest, chunk, chunk, … ─── server ◀── blob store     before a resume on another node
//! ```
//!
//! A node cuts files into chunks and encrypts each, and the manifest that says what is made of them. The server moves what it
//! cannot change without being noticed. On a stream each of them is a [`Record`]; in the blob store each is an object, and that
//! of the manifest begins with the list of the chunks, in the order in which they are sent back.

use std::fmt;
use std::io;
use std::str::FromStr;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// Maximum length of what is encrypted in a chunk, in bytes.
pub const CHUNK: usize = 1 << 20;
/// Maximum length of an encrypted chunk.
const CHUNK_SEALED: usize = CHUNK + 64;
/// Maximum length of an encrypted manifest: that of a disk of some hundred GiB.
const MANIFEST_SEALED: usize = 96 << 20;
/// What the object of a manifest begins with.
const MAGIC: &[u8; 8] = b"RFPARCL1";
/// Length of the id of a chunk, in bytes.
const ID: usize = 32;

/// The id of a chunk: a hash of its content under a key of the sandbox.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ChunkId([u8; ID]);

/// A text that is not the id of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not the id of a chunk")]
pub struct NoChunkId;

impl ChunkId {
    /// The id that is this hash.
    #[must_use]
    pub const fn of_hash(hash: [u8; ID]) -> Self {
        Self(hash)
    }

    /// The hash.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; ID] {
        &self.0
    }
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ChunkId {
    type Err = NoChunkId;

    fn from_str(text: &str) -> Result<Self, NoChunkId> {
        let mut hash = [0; ID];
        hex::decode_to_slice(text, &mut hash).map_err(|_| NoChunkId)?;
        let id = Self(hash);
        // One id has one text.
        if id.to_string() == text { Ok(id) } else { Err(NoChunkId) }
    }
}

impl TryFrom<String> for ChunkId {
    type Error = NoChunkId;

    fn try_from(text: String) -> Result<Self, NoChunkId> {
        text.parse()
    }
}

impl From<ChunkId> for String {
    fn from(id: ChunkId) -> Self {
        id.to_string()
    }
}

/// A part of a parcel on a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A chunk, encrypted.
    Chunk(ChunkId, Bytes),
    /// A chunk that the receiver has already.
    Known(ChunkId),
    /// The manifest, encrypted.
    Manifest(Bytes),
}

impl Record {
    /// The record as it is sent: what comes before its content, and that.
    #[must_use]
    pub fn encode(self) -> (Vec<u8>, Bytes) {
        let (kind, id, content) = match self {
            Self::Chunk(id, content) => (1, id.0, content),
            Self::Known(id) => (2, id.0, Bytes::new()),
            Self::Manifest(content) => (3, [0; ID], content),
        };
        let mut head = Vec::with_capacity(1 + ID + 4);
        head.push(kind);
        head.extend_from_slice(&id);
        // Nothing is longer than its bound.
        head.extend_from_slice(&u32::try_from(content.len()).unwrap_or(u32::MAX).to_be_bytes());
        (head, content)
    }

    /// Reads the next record.
    ///
    /// # Errors
    /// When the stream ends or fails, and when what arrives is no record.
    pub async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Self> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        let mut head = [0; 1 + ID + 4];
        stream.read_exact(&mut head).await?;
        let mut id = [0; ID];
        id.copy_from_slice(&head[1..=ID]);
        let mut length = [0; 4];
        length.copy_from_slice(&head[1 + ID..]);
        let length = u32::from_be_bytes(length) as usize;
        let most = match head[0] {
            1 => CHUNK_SEALED,
            2 => 0,
            3 => MANIFEST_SEALED,
            _ => return Err(invalid("an unknown part of a parcel")),
        };
        if length > most {
            return Err(invalid("a part of a parcel is too long"));
        }
        // What is longer than a chunk grows with what arrives.
        let mut content = Vec::with_capacity(length.min(CHUNK_SEALED));
        (&mut *stream).take(length as u64).read_to_end(&mut content).await?;
        if content.len() < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let content = Bytes::from(content);
        Ok(match head[0] {
            1 => Self::Chunk(ChunkId(id), content),
            2 => Self::Known(ChunkId(id)),
            _ => Self::Manifest(content),
        })
    }
}

/// The object of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestObject {
    /// The chunks, in the order in which a node wants them.
    pub chunks: Vec<ChunkId>,
    /// The encrypted manifest.
    pub sealed: Bytes,
}

impl ManifestObject {
    /// Maximum number of chunks.
    pub const CHUNKS: usize = 1 << 20;
    /// Longest object, in bytes.
    pub const MAX: usize = MAGIC.len() + 4 + Self::CHUNKS * ID + MANIFEST_SEALED;

    /// The object as bytes.
    ///
    /// # Errors
    /// When there are more chunks than a parcel can have.
    pub fn encode(&self) -> io::Result<Vec<u8>> {
        let count = u32::try_from(self.chunks.len()).ok();
        let count = count.filter(|_| self.chunks.len() <= Self::CHUNKS);
        let count = count.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a parcel of too many chunks"))?;
        let mut object = Vec::with_capacity(MAGIC.len() + 4 + self.chunks.len() * ID + self.sealed.len());
        object.extend_from_slice(MAGIC);
        object.extend_from_slice(&count.to_be_bytes());
        self.chunks.iter().for_each(|id| object.extend_from_slice(&id.0));
        object.extend_from_slice(&self.sealed);
        Ok(object)
    }

    /// Parses an object; none if it is not that of a manifest.
    #[must_use]
    pub fn decode(object: &Bytes) -> Option<Self> {
        let rest = object.strip_prefix(MAGIC)?;
        let (count, rest) = rest.split_first_chunk::<4>()?;
        let count = u32::from_be_bytes(*count) as usize;
        if count > Self::CHUNKS {
            return None;
        }
        let (ids, sealed) = rest.split_at_checked(count.checked_mul(ID)?)?;
        let chunks = ids.as_chunks::<ID>().0.iter().map(|id| ChunkId(*id)).collect();
        Some(Self {
            chunks,
            sealed: object.slice_ref(sealed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn records_arrive_as_they_were_sent_and_nothing_else_is_one() {
        let id = ChunkId::of_hash([7; ID]);
        let records = [
            Record::Chunk(id, Bytes::from_static(b"content")),
            Record::Known(id),
            Record::Manifest(Bytes::from_static(b"manifest")),
        ];
        let mut sent = Vec::new();
        for record in &records {
            let (head, content) = record.clone().encode();
            sent.extend(head);
            sent.extend_from_slice(&content);
        }
        let mut stream = &sent[..];
        for record in &records {
            assert_eq!(Record::read(&mut stream).await.unwrap(), *record);
        }
        assert!(Record::read(&mut stream).await.is_err());
        for cut in [1, 20, 40] {
            assert!(Record::read(&mut &sent[..cut]).await.is_err(), "{cut}");
        }
        let mut unknown = sent.clone();
        unknown[0] = 9;
        assert!(Record::read(&mut &unknown[..]).await.is_err());
        let mut long = sent.clone();
        long[1 + ID..1 + ID + 4].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(Record::read(&mut &long[..]).await.is_err());
    }

    #[test]
    fn the_object_of_a_manifest_is_read_as_it_was_written() {
        let object = ManifestObject {
            chunks: vec![ChunkId::of_hash([1; ID]), ChunkId::of_hash([2; ID])],
            sealed: Bytes::from_static(b"sealed"),
        };
        let bytes = Bytes::from(object.encode().unwrap());
        assert_eq!(ManifestObject::decode(&bytes), Some(object));
        for cut in [0, 7, 11, 40] {
            assert_eq!(ManifestObject::decode(&bytes.slice(..cut)), None, "{cut}");
        }
    }

    #[test]
    fn an_id_has_one_text() {
        let id = ChunkId::of_hash([0xab; ID]);
        assert_eq!(id.to_string().parse(), Ok(id));
        for text in [String::new(), "ab".repeat(31), "AB".repeat(32), "xy".repeat(32)] {
            assert_eq!(text.parse::<ChunkId>(), Err(NoChunkId), "{text}");
        }
    }
}

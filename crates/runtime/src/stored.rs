//! What the storage of a node is asked for and answers with: plain data.

use std::collections::HashSet;
use std::io;

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use model::lifecycle::Kept;
use model::secret::Secret;
use protocol::parcel::ChunkId;

/// A disk that outlives the processes of its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptDisk {
    /// The sandbox.
    pub id: SandboxId,
    /// The disk.
    pub disk: DiskId,
    /// Whether it is complete and nothing has used it since: [`Storage::save`](crate::storage::Storage::save) was the last that was done with it.
    pub is_saved: bool,
}

/// The sandbox of which a layer is made.
#[derive(Debug, Clone)]
pub struct CommitRequest {
    /// Its disk.
    pub disk: DiskId,
    /// Whether the layer contains the layers below as well.
    pub merge: bool,
    /// Whether the disk was copied together with processes: then it has names that were made only for the copy
    /// (`link_remap.` and a number), of files that had none any more, and the layer has not.
    pub has_processes: bool,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// The disk of a sandbox to copy.
#[derive(Debug, Clone)]
pub struct CopyRequest {
    /// The copy, which must not exist.
    pub to: DiskId,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// A copy of a sandbox.
#[derive(Debug, Clone)]
pub struct Fork {
    /// The sandbox that is to be started from it.
    pub id: SandboxId,
    /// Its disk, which must not exist.
    pub disk: DiskId,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// A layer to make of an archive.
#[derive(Debug, Clone)]
pub struct UnpackRequest {
    /// Its id, which its files must have as their hash.
    pub layer: LayerId,
    /// Maximum size of the layer, in bytes, where each file counts 4 KiB more than its data.
    pub bytes: u64,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// A kept disk to make a parcel of, with its checkpoint if there is one.
#[derive(Debug, Clone)]
pub struct PackParcel {
    /// Its sandbox.
    pub id: SandboxId,
    /// The disk.
    pub disk: DiskId,
    /// The parcel.
    pub parcel: String,
    /// The key of the sandbox's parcels.
    pub key: Secret,
    /// The chunks that need not be sent.
    pub known: HashSet<ChunkId>,
}

/// A parcel to make a kept disk of.
#[derive(Debug, Clone)]
pub struct UnpackParcel {
    /// Its sandbox.
    pub id: SandboxId,
    /// The disk, which must not exist.
    pub disk: DiskId,
    /// The parcel.
    pub parcel: String,
    /// The key of the sandbox's parcels.
    pub key: Secret,
    /// Whether its checkpoint is wanted as well.
    pub with_processes: bool,
    /// Space on the file system of the data directory that has to stay free, in bytes.
    pub keep_free_bytes: u64,
}

/// A parcel of the memory of a snapshot.
#[derive(Debug, Clone)]
pub struct MemoryParcel {
    /// The build of the snapshot.
    pub build: BuildId,
    /// The parcel.
    pub parcel: String,
    /// The key of the parcels of the memory.
    pub key: Secret,
}

/// What was made of a parcel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacked {
    /// What is kept of the sandbox.
    pub kept: Kept,
    /// Space that it takes, in bytes.
    pub bytes: u64,
    /// Why its processes are not kept, if they were wanted and are not. For the client.
    pub without_processes: Option<String>,
}

/// Why a sandbox or an archive did not become a layer, a layer not an archive, or a disk was not copied.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// The layer is not stored.
    #[error("layer {0} is not stored")]
    NoLayer(LayerId),
    /// A file cannot be stored, or the archive is not one of the layer. The text is for the user; names in it are escaped.
    #[error("{0}")]
    Refused(String),
    /// The host has no space for the layer or the copy.
    #[error("{0}")]
    Full(String),
    /// A step failed.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Why the memory of a snapshot was not copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyMemoryError {
    /// The memory is not there, is damaged, or does not fit the host. The text is for the client.
    #[error("{0}")]
    Unusable(String),
    /// A step failed.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

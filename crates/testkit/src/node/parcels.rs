//! What the fake node has as streams: layers, and parcels of one chunk with a manifest that says of which sandbox and parcel it is.

use std::fmt;
use std::io;

use model::id::LayerId;
use model::lifecycle::Kept;
use protocol::node::{
    Committed, Image, LayerStream, MemoryInfo, NodeError, PackMemory, PackSandbox, UnpackMemory, UnpackSandbox,
    UnpackedSandbox,
};
use protocol::parcel::{ChunkId, Record};
use tokio::io::AsyncReadExt as _;

use super::FakeNode;

const CHUNK: ChunkId = ChunkId::of_hash([7; 32]);

impl FakeNode {
    /// The layer that the commit with this number returns, counted from 1.
    #[must_use]
    pub fn layer(number: usize) -> LayerId {
        let mut hash = [0; 32];
        hash[24..].copy_from_slice(&number.to_be_bytes());
        LayerId::from_hash(&hash)
    }

    /// The archive of a layer.
    #[must_use]
    pub fn archive(layer: &LayerId) -> Vec<u8> {
        format!("the archive of {layer}").into_bytes()
    }

    pub(super) async fn import(
        &self,
        id: &LayerId,
        bytes: u64,
        mut archive: LayerStream,
    ) -> Result<Committed, NodeError> {
        let mut read = Vec::new();
        let copied = archive.read_to_end(&mut read).await;
        copied.map_err(|error| NodeError::failed(error.to_string()))?;
        if read != Self::archive(id) || bytes < 4096 {
            return Err(NodeError::Refused("its content is that of another layer".to_owned()));
        }
        self.layers.lock().insert(id.clone(), 4096);
        Ok(Committed {
            layer: id.clone(),
            bytes: 4096,
        })
    }

    pub(super) fn pack(&self, request: &PackSandbox) -> Result<LayerStream, NodeError> {
        if !self.paused.lock().contains(&request.id) && !self.kept.lock().contains(&request.id) {
            return Err(NodeError::NotFound(request.id.clone()));
        }
        Ok(packed(&request.id, &request.parcel, &request.known))
    }

    pub(super) fn pack_memory_of(&self, request: &PackMemory) -> Result<LayerStream, NodeError> {
        if !self.memories.lock().contains_key(&request.build) {
            return Err(NodeError::Unavailable("it has no such memory".to_owned()));
        }
        Ok(packed(&request.build, &request.parcel, &request.known))
    }

    pub(super) async fn unpack_memory_of(
        &self,
        request: UnpackMemory,
        parcel: LayerStream,
    ) -> Result<MemoryInfo, NodeError> {
        let UnpackMemory { build, parcel: id, .. } = request;
        let bytes = unpacked(&build, &id, parcel).await?;
        self.memories.lock().insert(build.clone(), Image::Base);
        Ok(MemoryInfo { build, bytes })
    }

    pub(super) async fn unpack(
        &self,
        request: UnpackSandbox,
        parcel: LayerStream,
    ) -> Result<UnpackedSandbox, NodeError> {
        let disk_bytes = unpacked(&request.id, &request.parcel, parcel).await?;
        self.paused.lock().insert(request.id);
        Ok(UnpackedSandbox {
            kept: Kept::Filesystem,
            disk_bytes,
            without_processes: request.with_processes.then(|| "it is a fake".to_owned()),
        })
    }
}

/// The records of a parcel.
fn packed(of: &dyn fmt::Display, parcel: &str, known: &[ChunkId]) -> LayerStream {
    let chunk = if known.contains(&CHUNK) {
        Record::Known(CHUNK)
    } else {
        Record::Chunk(CHUNK, vec![7; 1 << 20].into())
    };
    let manifest = Record::Manifest(format!("{of} {parcel}").into());
    let mut sent = Vec::new();
    for record in [chunk, manifest] {
        let (head, content) = record.encode();
        sent.extend(head);
        sent.extend_from_slice(&content);
    }
    LayerStream::new(io::Cursor::new(sent))
}

/// Reads a parcel of this, and returns the length of its chunk.
async fn unpacked(of: &(dyn fmt::Display + Sync), parcel: &str, mut stream: LayerStream) -> Result<u64, NodeError> {
    let cut = |error: io::Error| NodeError::Unavailable(error.to_string());
    let own = format!("{of} {parcel}");
    if Record::read(&mut stream).await.map_err(cut)? != Record::Manifest(own.into()) {
        return Err(NodeError::Refused("its manifest is that of another one".to_owned()));
    }
    let Record::Chunk(CHUNK, content) = Record::read(&mut stream).await.map_err(cut)? else {
        return Err(NodeError::Refused("its chunk is another one".to_owned()));
    };
    Ok(content.len() as u64)
}

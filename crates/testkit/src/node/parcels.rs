//! What the fake node has as streams: layers, and parcels of one chunk with a manifest that says of which sandbox and parcel it is.

use std::io;

use model::id::LayerId;
use model::lifecycle::Kept;
use protocol::node::{LayerStream, NodeError, PackSandbox, UnpackSandbox, UnpackedSandbox};
use protocol::parcel::{ChunkId, Record};

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

    pub(super) fn pack(&self, request: &PackSandbox) -> Result<LayerStream, NodeError> {
        if !self.paused.lock().contains(&request.id) {
            return Err(NodeError::NotFound(request.id.clone()));
        }
        let chunk = if request.known.contains(&CHUNK) {
            Record::Known(CHUNK)
        } else {
            Record::Chunk(CHUNK, vec![7; 1 << 20].into())
        };
        let manifest = Record::Manifest(format!("{} {}", request.id, request.parcel).into());
        let mut sent = Vec::new();
        for record in [chunk, manifest] {
            let (head, content) = record.encode();
            sent.extend(head);
            sent.extend_from_slice(&content);
        }
        Ok(LayerStream::new(io::Cursor::new(sent)))
    }

    pub(super) async fn unpack(
        &self,
        request: UnpackSandbox,
        mut parcel: LayerStream,
    ) -> Result<UnpackedSandbox, NodeError> {
        let cut = |error: io::Error| NodeError::Unavailable(error.to_string());
        let own = format!("{} {}", request.id, request.parcel);
        if Record::read(&mut parcel).await.map_err(cut)? != Record::Manifest(own.into()) {
            return Err(NodeError::Refused("its manifest is that of another one".to_owned()));
        }
        let Record::Chunk(CHUNK, content) = Record::read(&mut parcel).await.map_err(cut)? else {
            return Err(NodeError::Refused("its chunk is another one".to_owned()));
        };
        self.paused.lock().insert(request.id);
        Ok(UnpackedSandbox {
            kept: Kept::Filesystem,
            disk_bytes: content.len() as u64,
            without_processes: request.with_processes.then(|| "it is a fake".to_owned()),
        })
    }
}

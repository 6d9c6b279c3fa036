//! Parcels of paused sandboxes: made for a blob store after a pause, and unpacked for a resume on this node.
//!
//! Packing holds nothing: a resume or a removal does not wait for it, and it ends at the next chunk. What it has sent by then is
//! never used, because the manifest comes last.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use model::id::SandboxId;
use protocol::node::{LayerStream, NodeError, PackSandbox, UnpackSandbox, UnpackedSandbox};
use protocol::parcel::Record;
use runtime::stored::{LayerError, PackParcel, UnpackParcel};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use crate::pause;
use crate::shared::Shared;
use crate::start::random_disk;
use crate::work::{blocking, failed, layer_error};

/// Records that are ready and not sent, or have arrived and are not written.
const AHEAD: usize = 2;
/// Bytes that wait to be sent.
const BUFFER: usize = 256 << 10;

/// A sandbox that is being unpacked, until this is dropped.
struct Arriving {
    shared: Arc<Shared>,
    id: SandboxId,
}

impl Drop for Arriving {
    fn drop(&mut self) {
        self.shared.parcels.arriving.lock().remove(&self.id);
    }
}

/// Begins to make a parcel. It ends when the stream is dropped.
pub(crate) async fn pack(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    request: PackSandbox,
) -> Result<LayerStream, NodeError> {
    let PackSandbox { id, parcel, key, known } = request;
    let not_found = || NodeError::NotFound(id.clone());
    let turn = Arc::clone(&shared.parcels.packing)
        .acquire_owned()
        .await
        .map_err(failed)?;
    let kept = shared.kept.get(&id).ok_or_else(not_found)?;
    let changes = {
        let _changing = kept.changing.lock().await;
        kept.changes.load(Ordering::SeqCst)
    };
    let packed = PackParcel {
        id: id.clone(),
        disk: kept.disk.clone(),
        parcel,
        key,
        known: known.into_iter().collect(),
    };
    let (send, mut records) = mpsc::channel::<Record>(AHEAD);
    let packing = {
        let shared = Arc::clone(shared);
        blocking(move || {
            let is_current = || {
                let is_kept = shared.kept.get(&packed.id).is_some_and(|now| Arc::ptr_eq(&now, &kept));
                is_kept && kept.changes.load(Ordering::SeqCst) == changes && !shared.stop.is_cancelled()
            };
            let mut send = |record| {
                send.blocking_send(record)
                    .map_err(|_| io::ErrorKind::Interrupted.into())
            };
            let made = shared.driver.storage().pack_parcel(&packed, &is_current, &mut send);
            // Its files go with it.
            made.map_err(|error| {
                if is_current() {
                    error
                } else {
                    io::ErrorKind::Interrupted.into()
                }
            })
        })
    };
    let (mut to, stream) = tokio::io::duplex(BUFFER);
    let sending = async move {
        while let Some(record) = records.recv().await {
            let (head, content) = record.encode();
            to.write_all(&head).await?;
            to.write_all(&content).await?;
        }
        to.shutdown().await
    };
    tasks.spawn(async move {
        let _turn = turn;
        let (packed, _) = tokio::join!(packing, sending);
        match packed.and_then(|packed| packed) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                tracing::debug!(sandbox.id = %id, "a paused sandbox is copied no further");
            }
            Err(error) => tracing::error!(sandbox.id = %id, "cannot copy a paused sandbox: {error}"),
        }
    });
    Ok(LayerStream::new(stream))
}

/// Makes a kept sandbox of a parcel.
pub(crate) async fn unpack(
    shared: Arc<Shared>,
    tasks: TaskTracker,
    request: UnpackSandbox,
    mut stream: LayerStream,
) -> Result<UnpackedSandbox, NodeError> {
    let UnpackSandbox {
        id,
        parcel,
        key,
        with_processes,
    } = request;
    let exists = || NodeError::failed(format!("sandbox {id} is on this node, or about to be"));
    if !shared.parcels.arriving.lock().insert(id.clone()) {
        return Err(exists());
    }
    let _arriving = Arriving {
        shared: Arc::clone(&shared),
        id: id.clone(),
    };
    let _turn = shared.parcels.unpacking.acquire().await.map_err(failed)?;
    if shared.find(&id).is_some() {
        return Err(exists());
    }
    if shared.kept.get(&id).is_some() {
        // The server knows that it is not the one that counts.
        pause::remove(&shared, &tasks, &id).await?;
    }
    let disk = random_disk().map_err(failed)?;
    let unpacked = UnpackParcel {
        id: id.clone(),
        disk: disk.clone(),
        parcel,
        key,
        with_processes,
        keep_free_bytes: shared.keep_free_bytes(),
    };
    let (send, mut records) = mpsc::channel::<io::Result<Record>>(AHEAD);
    let reading = async move {
        loop {
            let record = Record::read(&mut stream).await;
            let is_last = record.is_err();
            // Whoever has all of it, or refuses it, reads no more.
            if send.send(record).await.is_err() || is_last {
                return;
            }
        }
    };
    let unpacking = {
        let driver = Arc::clone(&shared.driver);
        blocking(move || {
            let obstacle = |checkpoint: &Path| driver.obstacle(checkpoint);
            let mut next = || {
                let ended = || Err(io::ErrorKind::UnexpectedEof.into());
                records.blocking_recv().unwrap_or_else(ended)
            };
            driver.storage().unpack_parcel(&unpacked, &obstacle, &mut next)
        })
    };
    tokio::pin!(reading, unpacking);
    let unpacked = tokio::select! {
        unpacked = &mut unpacking => unpacked,
        () = &mut reading => unpacking.await,
    };
    let unpacked = match unpacked.map_err(failed)? {
        Ok(unpacked) => unpacked,
        Err(LayerError::Failed(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(NodeError::Unavailable(
                "the copy of the sandbox was cut on its way".to_owned(),
            ));
        }
        Err(error) => return Err(layer_error(error)),
    };
    shared.kept.insert(id, disk);
    Ok(UnpackedSandbox {
        kept: unpacked.kept,
        disk_bytes: unpacked.bytes,
        without_processes: unpacked.without_processes,
    })
}

//! Parcels of paused sandboxes, and of the memory of snapshots: made for a blob store, and unpacked for a resume or a start on this
//! node.
//!
//! Packing holds nothing: a resume or a removal does not wait for it, and it ends at the next chunk. What it has sent by then is
//! never used, because the manifest comes last.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use model::id::SandboxId;
use protocol::node::{
    LayerStream, MemoryInfo, NodeError, PackMemory, PackSandbox, UnpackMemory, UnpackSandbox, UnpackedSandbox,
};
use protocol::parcel::Record;
use runtime::stored::{Fork, LayerError, MemoryParcel, PackParcel, UnpackParcel};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::task::TaskTracker;

use crate::shared::Shared;
use crate::start::random_disk;
use crate::work::{blocking, failed, layer_error};
use crate::{memory, pause};

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
    let is_current = {
        let shared = Arc::clone(shared);
        move || {
            let is_kept = shared.kept.get(&id).is_some_and(|now| Arc::ptr_eq(&now, &kept));
            is_kept && kept.changes.load(Ordering::SeqCst) == changes && !shared.stop.is_cancelled()
        }
    };
    let what = format!("paused sandbox {}", packed.id);
    let driver = Arc::clone(&shared.driver);
    Ok(send_parcel(tasks, turn, what, move |send| {
        let made = driver.storage().pack_parcel(&packed, &is_current, send);
        // Its files go with it.
        made.map_err(|error| {
            if is_current() {
                error
            } else {
                io::ErrorKind::Interrupted.into()
            }
        })
    }))
}

/// Begins to make a parcel of the memory of a snapshot. It ends when the stream is dropped.
pub(crate) async fn pack_memory(
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
    request: PackMemory,
) -> Result<LayerStream, NodeError> {
    let PackMemory {
        build,
        parcel,
        key,
        known,
    } = request;
    let turn = Arc::clone(&shared.parcels.packing)
        .acquire_owned()
        .await
        .map_err(failed)?;
    let has_it = memory::list(shared).await?.iter().any(|memory| memory.build == build);
    if !has_it {
        return Err(NodeError::Unavailable(format!(
            "the memory of snapshot {build} is not on this node"
        )));
    }
    let (known, what) = (known.into_iter().collect(), format!("memory of snapshot {build}"));
    let of = MemoryParcel { build, parcel, key };
    let shared = Arc::clone(shared);
    Ok(send_parcel(tasks, turn, what, move |send| {
        let is_current = || !shared.stop.is_cancelled();
        shared.driver.storage().pack_memory(&of, &known, &is_current, send)
    }))
}

/// Sends the records that `pack` makes on a thread, in a turn.
fn send_parcel<F>(tasks: &TaskTracker, turn: OwnedSemaphorePermit, what: String, pack: F) -> LayerStream
where
    F: FnOnce(&mut dyn FnMut(Record) -> io::Result<()>) -> io::Result<()> + Send + 'static,
{
    let (send, mut records) = mpsc::channel::<Record>(AHEAD);
    let packing = blocking(move || {
        pack(&mut |record| {
            send.blocking_send(record)
                .map_err(|_| io::ErrorKind::Interrupted.into())
        })
    });
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
                tracing::debug!("the {what} is copied no further")
            }
            Err(error) => tracing::error!("cannot copy the {what}: {error}"),
        }
    });
    LayerStream::new(stream)
}

/// Makes a kept sandbox of a parcel.
pub(crate) async fn unpack(
    shared: Arc<Shared>,
    tasks: TaskTracker,
    request: UnpackSandbox,
    stream: LayerStream,
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
    let driver = Arc::clone(&shared.driver);
    let unpacked = receive_parcel(stream, move |next| {
        let obstacle = |checkpoint: &Path| driver.obstacle(checkpoint);
        driver.storage().unpack_parcel(&unpacked, &obstacle, next)
    });
    let unpacked = unpacked.await?;
    shared.kept.insert(id, disk);
    Ok(UnpackedSandbox {
        kept: unpacked.kept,
        disk_bytes: unpacked.bytes,
        without_processes: unpacked.without_processes,
    })
}

/// Keeps the memory of a snapshot that a parcel has.
pub(crate) async fn unpack_memory(
    shared: Arc<Shared>,
    request: UnpackMemory,
    stream: LayerStream,
) -> Result<MemoryInfo, NodeError> {
    let UnpackMemory { build, parcel, key } = request;
    if let Some(memory) = memory::list(&shared)
        .await?
        .into_iter()
        .find(|memory| memory.build == build)
    {
        return Ok(memory);
    }
    let _turn = shared.parcels.unpacking.acquire().await.map_err(failed)?;
    let to = Fork {
        id: memory::random_id().map_err(failed)?,
        disk: random_disk().map_err(failed)?,
        keep_free_bytes: shared.keep_free_bytes(),
    };
    let of = MemoryParcel {
        build: build.clone(),
        parcel,
        key,
    };
    let driver = Arc::clone(&shared.driver);
    let unpacked = receive_parcel(stream, move |next| {
        let obstacle = |checkpoint: &Path| driver.obstacle(checkpoint);
        driver.storage().unpack_memory(&of, &to, &obstacle, next)
    });
    match unpacked.await? {
        Ok(bytes) => {
            shared.memories.forget_failures(&build);
            Ok(MemoryInfo { build, bytes })
        }
        Err(why) => {
            // For the log of the sandbox that starts with its files alone then.
            shared.memories.note_failure(&build, Instant::now(), &why);
            Err(NodeError::Unsupported(why))
        }
    }
}

/// Calls `unpack` on a thread, which takes the records of a stream.
async fn receive_parcel<T, F>(mut stream: LayerStream, unpack: F) -> Result<T, NodeError>
where
    T: Send + 'static,
    F: FnOnce(&mut dyn FnMut() -> io::Result<Record>) -> Result<T, LayerError> + Send + 'static,
{
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
    let unpacking = blocking(move || {
        unpack(&mut || {
            let ended = || Err(io::ErrorKind::UnexpectedEof.into());
            records.blocking_recv().unwrap_or_else(ended)
        })
    });
    tokio::pin!(reading, unpacking);
    let unpacked = tokio::select! {
        unpacked = &mut unpacking => unpacked,
        () = &mut reading => unpacking.await,
    };
    match unpacked.map_err(failed)? {
        Ok(unpacked) => Ok(unpacked),
        Err(LayerError::Failed(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(NodeError::Unavailable("the copy was cut on its way".to_owned()))
        }
        Err(error) => Err(layer_error(error)),
    }
}

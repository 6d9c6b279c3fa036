//! Copies of paused sandboxes in the blob store: what is kept of one on the disk of a node, so that another node can go on
//! with it.
//!
//! ```text
//!   paused ──▶ chunks that are new ──▶ manifest ──▶ the row names the copy ──▶ what only earlier copies have is removed
//!   resume ──▶ manifest ──▶ chunks ──▶ another node keeps it ──▶ the row moves there ──▶ the node before throws its own away
//! ```
//!
//! The node encrypts and decrypts under a key of the sandbox that this server makes, keeps sealed in the row, and gives to a node
//! in the call alone. What is moved here is opaque, and an object that was changed is refused by the node ([`protocol::parcel`]).
//!
//! The memory of a snapshot is copied in the same way (`sandboxes::memories`), once: it never changes.
//!
//! A copy counts only while the row says that it is of the current pause. All objects of a sandbox lie in one folder, so that they
//! can be removed without anything that says which there are.

mod progress;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use blobs::{BlobError, Blobs, CopyOf, Name};
use bytes::Bytes;
use futures_util::stream::{Stream, StreamExt as _};
use model::id::{OwnerId, SandboxId};
use model::secret::Secret;
use parking_lot::Mutex;
use protocol::node::{Image, LayerStream, NodeError, NodeFuture, PackSandbox, UnpackSandbox, UnpackedSandbox};
use protocol::parcel::{ChunkId, ManifestObject, Record};
use store::error::StoreError;
use store::keys::SealedSecret;
use store::sandboxes::SandboxRow;
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::io::StreamReader;

use self::progress::Progress;
use crate::layers::turns::{Payer, QueueFull, Turn, Turns};
use crate::metrics::{CopyCounts, Metrics};
use crate::node::kept_bytes;
use crate::nodes::ServedNode;
use crate::outcome::CopyOutcome;
use crate::seal::{SealError, Sealer};

/// Sandboxes that are copied at the same time. A team has half of them at most.
const UPLOADS: usize = 2;
/// Copies that are fetched at the same time. A team has half of them at most.
const DOWNLOADS: usize = 4;
/// Sandboxes whose copies are removed at the same time.
const REMOVALS: usize = 2;
/// Resumes of a team that wait for their copies to be fetched. Its sandboxes that are to be copied may wait in any number: each is a
/// task that waits in any case.
const DOWNLOADS_WAITING: usize = 1024;
/// How long a copy that is being made may stand still: a node sends nothing of it, or the blob store takes none of its chunks. The node
/// may read much that is empty before it has another chunk.
const UPLOAD_STALL: Duration = Duration::from_secs(120);
/// How long a copy that is being fetched may stand still: the blob store sends no chunk of it, or the node takes none.
const DOWNLOAD_STALL: Duration = Duration::from_secs(60);
/// Chunks of one copy that are sent to the blob store, or fetched from it, at the same time.
const CHUNKS: usize = 4;
/// What a copy has at most beyond the disk and the memory of its sandbox, in MiB: files without names, and what describes both.
const MARGIN_MB: u64 = 2048;

/// Why a sandbox was not copied, or not made of its copy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ParcelError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Blobs(#[from] BlobError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("no part of the copy was moved for {} s", .0.as_secs())]
    Stalled(Duration),
    #[error("what the node sends is cut")]
    Cut(#[source] io::Error),
    #[error("what the node sends is no copy: {0}")]
    Invalid(&'static str),
    #[error("the key of the sandbox's copies cannot be used")]
    Key(#[from] SealError),
}

impl ParcelError {
    /// Whether the copy in the blob store is damaged: another attempt finds the same.
    pub(crate) const fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Node(NodeError::Refused(_)) | Self::Blobs(BlobError::NotFound(_))
        )
    }
}

impl From<ParcelError> for NodeError {
    fn from(error: ParcelError) -> Self {
        match error {
            ParcelError::Node(error) => error,
            // One that is missing is not there a moment later either.
            ParcelError::Blobs(BlobError::NotFound(name)) => Self::Refused(format!(
                "the copy of the sandbox in the blob store is damaged: object {name} is missing"
            )),
            error => Self::Unavailable(error.to_string()),
        }
    }
}

/// A sandbox that is being copied, or waits for that.
#[derive(Debug, Default)]
pub(crate) struct Packing {
    /// Whether it has to be looked at again afterwards.
    pub(crate) again: bool,
    /// Whether an attempt has failed.
    is_failing: bool,
}

/// The copies of the sandboxes of one server.
pub(crate) struct Parcels {
    blobs: Arc<Blobs>,
    sealer: Sealer,
    pub(crate) metrics: Arc<Metrics>,
    /// The owner of the leases of this server.
    pub(crate) owner: OwnerId,
    uploads: Arc<Turns>,
    downloads: Arc<Turns>,
    /// Held while the copies of a sandbox that has ended are removed.
    pub(crate) removals: Semaphore,
    /// How much one upload may send, in bytes per second.
    bytes_per_s: Option<u64>,
    /// The sandboxes that are being copied.
    pub(crate) packing: Mutex<HashMap<SandboxId, Packing>>,
    /// The sandboxes that are not copied until their next pause, because the copy of this one would fail again.
    pub(crate) given_up: Mutex<HashSet<SandboxId>>,
    /// Held while a sandbox of a node that is away is brought to another one.
    pub(crate) recalls: Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>,
    /// The sandboxes that were made of a copy, and were not resumed since.
    pub(crate) arrived: Mutex<HashSet<SandboxId>>,
}

impl fmt::Debug for Parcels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parcels")
            .field("blobs", &self.blobs)
            .finish_non_exhaustive()
    }
}

fn owner_of_key(of: &CopyOf) -> String {
    match of {
        CopyOf::Sandbox(id) => format!("sandbox-parcels/{id}"),
        CopyOf::Memory(build) => format!("memory-parcels/{build}"),
    }
}

fn chunk_name(of: &CopyOf, chunk: &ChunkId) -> Name {
    Name::Chunk(of.clone(), chunk.to_string())
}

/// A copy that was stored, and counts once whoever has made it says so.
pub(crate) struct Stored {
    manifest: Name,
    /// Objects that earlier attempts or copies have left.
    unused: Vec<Name>,
    /// How much was sent, in bytes.
    sent: u64,
}

impl Parcels {
    pub(crate) fn new(
        blobs: Arc<Blobs>,
        sealer: Sealer,
        metrics: Arc<Metrics>,
        owner: OwnerId,
        mib_per_s: Option<u32>,
    ) -> Self {
        Self {
            blobs,
            sealer,
            metrics,
            owner,
            uploads: Turns::halved(UPLOADS, usize::MAX),
            downloads: Turns::halved(DOWNLOADS, DOWNLOADS_WAITING),
            removals: Semaphore::new(REMOVALS),
            bytes_per_s: mib_per_s.map(|mib| u64::from(mib) << 20),
            packing: Mutex::default(),
            given_up: Mutex::default(),
            recalls: Mutex::default(),
            arrived: Mutex::default(),
        }
    }

    /// Counts sandboxes that are paused on disk by what there is of their copies.
    pub(crate) fn counts(&self, paused: &[SandboxId]) -> CopyCounts {
        let (packing, given_up) = (self.packing.lock(), self.given_up.lock());
        let mut counts = CopyCounts::default();
        for id in paused {
            match packing.get(id) {
                Some(packing) if packing.is_failing => counts.failing += 1,
                Some(_) => counts.waiting += 1,
                None if given_up.contains(id) => counts.failing += 1,
                None => counts.complete += 1,
            }
        }
        counts
    }

    /// Notes that an attempt to copy a sandbox has failed.
    pub(crate) fn upload_failed(&self, id: &SandboxId, now_us: i64) {
        self.metrics.copy_upload(CopyOutcome::Failed, now_us);
        if let Some(packing) = self.packing.lock().get_mut(id) {
            packing.is_failing = true;
        }
    }

    /// Waits until another sandbox of a team may be copied. None if too many wait.
    pub(crate) async fn upload_turn(&self, payer: &Payer) -> Option<Turn> {
        Some(self.uploads.queue(payer).ok()?.turn().await)
    }

    /// Waits until another copy of a sandbox of a team may be fetched.
    ///
    /// # Errors
    /// When too many of the team wait.
    pub(crate) async fn download_turn(&self, payer: &Payer) -> Result<Turn, NodeError> {
        let place = self.downloads.queue(payer).map_err(|QueueFull| {
            let why =
                format!("{DOWNLOADS_WAITING} sandboxes of the team are waiting for their copies in the blob store");
            NodeError::Unavailable(why)
        })?;
        Ok(place.turn().await)
    }

    /// The key of a row.
    ///
    /// # Errors
    /// When it was sealed with another key, or for something else.
    pub(crate) fn open_key(&self, of: &CopyOf, sealed: &SealedSecret) -> Result<Secret, SealError> {
        Ok(Secret::new(self.sealer.open(&owner_of_key(of), sealed.as_str())?))
    }

    /// A random key, sealed.
    ///
    /// # Errors
    /// When the kernel has no random bytes.
    pub(crate) fn new_key(&self, of: &CopyOf) -> Result<SealedSecret, SealError> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|_| SealError::Random)?;
        Ok(SealedSecret::new(
            self.sealer.seal(&owner_of_key(of), &hex::encode(key))?,
        ))
    }

    /// The objects of something that has no current copy. Attempts that were interrupted have left some: if all together are more than
    /// it can have, of which nothing else keeps account, all are removed.
    async fn objects(&self, of: &CopyOf, most: u64) -> Result<Vec<Name>, BlobError> {
        let (mut names, mut bytes) = (Vec::new(), 0_u64);
        let mut objects = Box::pin(self.blobs.list_of(of));
        while let Some(object) = objects.next().await {
            let (name, object) = object?;
            bytes = bytes.saturating_add(object.size);
            names.push(name);
            if bytes > most || names.len() > ManifestObject::CHUNKS {
                for name in names.drain(..) {
                    self.blobs.delete(&name).await?;
                }
                bytes = 0;
            }
        }
        Ok(names)
    }

    /// Copies a sandbox that is paused on the disk of a node, as its row says. Nothing of it counts if this is dropped. `is_damaged` says
    /// that chunks in the blob store may be others than their names say: none is relied on. Returns how much was sent, in bytes;
    /// none if the sandbox is not paused in this way any more.
    pub(crate) async fn upload(
        &self,
        node: &ServedNode,
        row: &SandboxRow,
        is_damaged: bool,
    ) -> Result<Option<u64>, ParcelError> {
        let id = &row.id;
        let of = CopyOf::Sandbox(id.clone());
        let key = node.rows.sandbox_parcel_key(id, &self.new_key(&of)?).await?;
        let key = self.open_key(&of, &key.ok_or_else(|| NodeError::NotFound(id.clone()))?)?;
        let parcel = uuid::Uuid::new_v4().simple().to_string();
        let most = most_of(row.disk_mb, row.memory_mb);
        let stored = self.store(&of, &parcel, most, is_damaged, |known| {
            let request = PackSandbox {
                id: id.clone(),
                parcel: parcel.clone(),
                key,
                known,
            };
            node.handle.pack_sandbox(request)
        });
        let stored = stored.await?;
        let is_current = node.rows.sandbox_packed(id, &row.execution_id, &parcel).await?;
        self.settle(stored, is_current).await
    }

    /// Removes what is not needed beside a copy that counts now, or the copy if it does not. Returns how much was sent for it, in bytes.
    pub(crate) async fn settle(&self, stored: Stored, counts: bool) -> Result<Option<u64>, ParcelError> {
        if !counts {
            self.blobs.delete(&stored.manifest).await?;
            return Ok(None);
        }
        for name in &stored.unused {
            self.blobs.delete(name).await?;
        }
        Ok(Some(stored.sent))
    }

    /// Stores the parcel that `pack` makes, which need not send the chunks that it is given.
    pub(crate) async fn store<'a>(
        &self,
        of: &CopyOf,
        parcel: &str,
        most: u64,
        is_damaged: bool,
        pack: impl FnOnce(Vec<ChunkId>) -> NodeFuture<'a, Result<LayerStream, NodeError>>,
    ) -> Result<Stored, ParcelError> {
        let before = self.objects(of, most).await?;
        let known: HashSet<ChunkId> = before
            .iter()
            .filter_map(|name| match name {
                Name::Chunk(_, hash) if !is_damaged => hash.parse().ok(),
                _ => None,
            })
            .collect();
        let mut stream = pack(known.iter().copied().collect()).await?;
        let (chunks, sealed, sent) = self.receive(of, &mut stream, &known, most).await?;
        let used: HashSet<Name> = chunks.iter().map(|chunk| chunk_name(of, chunk)).collect();
        let object = ManifestObject { chunks, sealed }.encode().map_err(ParcelError::Cut)?;
        let manifest = Name::Manifest(of.clone(), parcel.to_owned());
        self.blobs.put(&manifest, &object[..]).await?;
        let mut unused = before;
        unused.retain(|name| !used.contains(name) && *name != manifest);
        Ok(Stored { manifest, unused, sent })
    }

    /// Stores the chunks that a node sends, and returns all that its copy has, its manifest, and how many bytes were new.
    async fn receive(
        &self,
        of: &CopyOf,
        stream: &mut LayerStream,
        known: &HashSet<ChunkId>,
        most: u64,
    ) -> Result<(Vec<ChunkId>, Bytes, u64), ParcelError> {
        let mut chunks = Vec::new();
        // They end with this.
        let mut puts = JoinSet::new();
        let (begun, mut sent) = (Instant::now(), 0_u64);
        loop {
            match moving(Record::read(stream)).await?.map_err(ParcelError::Cut)? {
                Record::Known(chunk) if known.contains(&chunk) => chunks.push(chunk),
                Record::Known(_) => return Err(ParcelError::Invalid("a chunk that is not in the blob store")),
                Record::Chunk(chunk, content) => {
                    chunks.push(chunk);
                    sent += content.len() as u64;
                    if sent > most {
                        return Err(ParcelError::Invalid("it is larger than the sandbox can be"));
                    }
                    if puts.len() >= CHUNKS {
                        stored(&mut puts).await?;
                    }
                    let (blobs, name) = (Arc::clone(&self.blobs), chunk_name(of, &chunk));
                    let metrics = Arc::clone(&self.metrics);
                    puts.spawn(async move {
                        let bytes = blobs.put(&name, &content[..]).await?;
                        metrics.copy_uploaded(bytes);
                        Ok(bytes)
                    });
                    if let Some(rate) = self.bytes_per_s {
                        let due = Duration::from_millis(sent.saturating_mul(1000) / rate.max(1));
                        tokio::time::sleep_until(begun + due).await;
                    }
                }
                Record::Manifest(sealed) => {
                    while stored(&mut puts).await? {}
                    return Ok((chunks, sealed, sent));
                }
            }
            if chunks.len() > ManifestObject::CHUNKS {
                return Err(ParcelError::Invalid("it has too many chunks"));
            }
        }
    }

    /// Has a node make a kept sandbox of a copy, in a turn of its team. Layers below its files that the node lacks are fetched
    /// before.
    pub(crate) async fn download(
        &self,
        node: &ServedNode,
        payer: &Payer,
        request: &UnpackSandbox,
    ) -> Result<UnpackedSandbox, ParcelError> {
        let downloaded = self.download_once(node, payer, request).await;
        self.metrics.copy_download(match &downloaded {
            Ok(_) => CopyOutcome::Complete,
            Err(error) if error.is_damage() => CopyOutcome::Damaged,
            Err(_) => CopyOutcome::Failed,
        });
        downloaded
    }

    async fn download_once(
        &self,
        node: &ServedNode,
        payer: &Payer,
        request: &UnpackSandbox,
    ) -> Result<UnpackedSandbox, ParcelError> {
        let of = CopyOf::Sandbox(request.id.clone());
        let unpack = |stream| node.handle.unpack_sandbox(request.clone(), stream);
        let unpacked = self.fetch(node, payer, &of, &request.parcel, unpack).await?;
        Ok(UnpackedSandbox {
            disk_bytes: kept_bytes(unpacked.disk_bytes),
            ..unpacked
        })
    }

    /// Has a node `unpack` a copy. Layers below its files that the node lacks are fetched before.
    pub(crate) async fn fetch<'a, T>(
        &self,
        node: &ServedNode,
        payer: &Payer,
        of: &CopyOf,
        parcel: &str,
        unpack: impl Fn(LayerStream) -> NodeFuture<'a, Result<T, NodeError>>,
    ) -> Result<T, ParcelError> {
        let manifest = Name::Manifest(of.clone(), parcel.to_owned());
        let (_, content) = self.blobs.get(&manifest).await?;
        let mut object = Vec::new();
        let mut content = content.take(ManifestObject::MAX as u64);
        content.read_to_end(&mut object).await.map_err(ParcelError::Cut)?;
        let damaged = || {
            NodeError::Refused(format!(
                "the copy of the sandbox in the blob store is damaged: {manifest}"
            ))
        };
        let object = ManifestObject::decode(&object.into()).ok_or_else(damaged)?;
        // The node says one at a time, and each may be missing once.
        for _ in 0..=Image::LAYERS_MAX {
            let (failed, progress) = (Arc::new(Mutex::new(None)), Progress::begun());
            let stream = self.stream(of, &object, Arc::clone(&failed), progress.clone());
            let unpacked = tokio::select! {
                unpacked = unpack(stream) => unpacked,
                () = progress.until_stalled(DOWNLOAD_STALL) => return Err(ParcelError::Stalled(DOWNLOAD_STALL)),
            };
            let cut = failed.lock().take();
            match (unpacked, node.handle.stored()) {
                (Ok(unpacked), _) => return Ok(unpacked),
                (Err(NodeError::NoLayer(layer)), Some(stored)) => stored.fetch(payer, &layer).await?,
                (Err(error), _) => return Err(cut.map_or(ParcelError::Node(error), ParcelError::Blobs)),
            }
        }
        Err(NodeError::failed("the node lacks one layer after another").into())
    }

    /// The records of a copy: its manifest, and then its chunks. Why they are cut is left in `failed`, and each that is taken is noted.
    fn stream(
        &self,
        of: &CopyOf,
        object: &ManifestObject,
        failed: Arc<Mutex<Option<BlobError>>>,
        progress: Progress,
    ) -> LayerStream {
        let (blobs, of, metrics) = (Arc::clone(&self.blobs), of.clone(), Arc::clone(&self.metrics));
        let manifest = std::future::ready(Ok(Record::Manifest(object.sealed.clone())));
        let fetches = (JoinSet::new(), object.chunks.clone().into_iter());
        // On tasks: they go on while the node does not read. The node takes chunks in any order.
        let chunks = futures_util::stream::unfold(fetches, move |(mut fetching, mut wanted)| {
            for chunk in wanted.by_ref().take(CHUNKS - fetching.len()) {
                let (blobs, of, metrics) = (Arc::clone(&blobs), of.clone(), Arc::clone(&metrics));
                fetching.spawn(async move {
                    let content = chunk_of(&blobs, &of, &chunk).await?;
                    metrics.copy_downloaded(content.len() as u64);
                    Ok(Record::Chunk(chunk, content))
                });
            }
            let failed = Arc::clone(&failed);
            async move {
                let fetched: Result<Result<Record, BlobError>, _> = fetching.join_next().await?;
                let record = fetched.map_err(io::Error::other).and_then(|fetched| {
                    fetched.map_err(|error| {
                        let told = io::Error::other(error.to_string());
                        failed.lock().get_or_insert(error);
                        told
                    })
                });
                Some((record, (fetching, wanted)))
            }
        });
        let mut left = object.chunks.len();
        let records = futures_util::stream::once(manifest).chain(chunks);
        let records = records.inspect(move |_| {
            progress.note();
            if left == 0 {
                progress.end();
            }
            left = left.saturating_sub(1);
        });
        let parts = records.flat_map(|record| {
            let (head, content) = match record.map(Record::encode) {
                Ok((head, content)) => (Ok(head.into()), Some(Ok(content))),
                Err(error) => (Err(error), None),
            };
            futures_util::stream::iter([head].into_iter().chain(content))
        });
        let parts: Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>> = Box::pin(parts);
        LayerStream::new(Records(StreamReader::new(parts)))
    }

    /// Whether there is such an object.
    pub(crate) async fn has(&self, name: &Name) -> Result<bool, BlobError> {
        Ok(self.blobs.head(name).await?.is_some())
    }

    /// Removes all copies of this.
    pub(crate) async fn remove(&self, of: &CopyOf) -> Result<usize, BlobError> {
        self.blobs.delete_of(of).await
    }
}

/// The most that a copy has, in bytes.
pub(crate) fn most_of(disk_mb: u32, memory_mb: u32) -> u64 {
    (u64::from(disk_mb) + u64::from(memory_mb) + MARGIN_MB) << 20
}

/// Waits for a part of a copy that is being made.
async fn moving<T>(part: impl Future<Output = T>) -> Result<T, ParcelError> {
    let moved = tokio::time::timeout(UPLOAD_STALL, part).await;
    moved.map_err(|_| ParcelError::Stalled(UPLOAD_STALL))
}

/// Waits until another chunk is stored. Returns whether one was left.
async fn stored(puts: &mut JoinSet<Result<u64, BlobError>>) -> Result<bool, ParcelError> {
    let Some(put) = moving(puts.join_next()).await? else {
        return Ok(false);
    };
    put.map_err(|error| ParcelError::Cut(io::Error::other(error)))??;
    Ok(true)
}

async fn chunk_of(blobs: &Blobs, of: &CopyOf, chunk: &ChunkId) -> Result<Bytes, BlobError> {
    let name = chunk_name(of, chunk);
    let (size, content) = blobs.get(&name).await?;
    // A longer one is none of ours: the node refuses what is cut here.
    let most = size.min(protocol::parcel::CHUNK as u64 + 64);
    let mut fetched = Vec::with_capacity(usize::try_from(most).unwrap_or_default());
    let read = content.take(most).read_to_end(&mut fetched).await;
    match read {
        Ok(_) => Ok(fetched.into()),
        Err(error) => Err(BlobError::Content {
            name: name.to_string(),
            why: error.to_string(),
        }),
    }
}

/// The bytes of records.
struct Records(StreamReader<Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>, Bytes>);

impl fmt::Debug for Records {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Records")
    }
}

impl AsyncRead for Records {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

#[cfg(test)]
mod tests;

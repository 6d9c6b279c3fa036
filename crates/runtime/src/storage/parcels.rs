//! Parcels: a kept disk, and its checkpoint, become encrypted chunks and a manifest, and a kept disk on another node again. So does
//! the memory of a snapshot, which has the same two.
//!
//! Nothing of a parcel counts before all of it is there: the disk gets the mark that it is saved last, when everything survives
//! a power cut. What is refused, or interrupted, is removed here; what a crash leaves belongs to no sandbox, and the next start
//! removes it.

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use model::id::{DiskId, SandboxId};
use model::lifecycle::Kept;
use protocol::parcel::{ChunkId, Record};

use super::opened::Storage;
use crate::base::packages_of;
use crate::checkpoint::{About, sums};
use crate::parcel::keys::ParcelKeys;
use crate::parcel::manifest::{CheckpointFile, Content, Destination, Manifest, Piece, Pieces, SMALL, is_name};
use crate::parcel::pieces::{self, BLOCK, ZEROES};
use crate::stored::{Fork, LayerError, MemoryParcel, PackParcel, UnpackParcel, Unpacked};
use crate::{disk, kept, usage};

/// Looks at the free space again after this many bytes were written.
const LOOK_AFTER: u64 = 64 << 20;
/// Has what was written reach the disk after this many bytes.
const WRITE_OUT_AFTER: u64 = 16 << 20;
/// The files and directory of a checkpoint, as the process that writes one leaves them.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o711;

/// A parcel that is being made.
struct Packing<'a> {
    keys: ParcelKeys,
    known: &'a HashSet<ChunkId>,
    sent: HashSet<ChunkId>,
    is_current: &'a dyn Fn() -> bool,
    send: &'a mut dyn FnMut(Record) -> io::Result<()>,
}

impl Packing<'_> {
    fn check(&self) -> io::Result<()> {
        if (self.is_current)() {
            Ok(())
        } else {
            Err(io::ErrorKind::Interrupted.into())
        }
    }

    fn pieces(&mut self, file: &File) -> io::Result<Pieces> {
        let bytes = file.metadata()?.len();
        let mut found = Vec::new();
        pieces::each(file, bytes, &mut |at, content| {
            self.check()?;
            let chunk = self.keys.name(content);
            let length = u32::try_from(content.len()).map_err(io::Error::other)?;
            found.push(Piece {
                at,
                bytes: length,
                chunk,
            });
            if self.sent.insert(chunk) {
                (self.send)(if self.known.contains(&chunk) {
                    Record::Known(chunk)
                } else {
                    Record::Chunk(chunk, self.keys.seal_chunk(&chunk, content)?)
                })?;
            }
            Ok(())
        })?;
        Ok(Pieces { bytes, pieces: found })
    }

    fn checkpoint(&mut self, directory: &Path) -> io::Result<Vec<CheckpointFile>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_name(&name) && entry.file_type()?.is_file() {
                names.push(name);
            }
        }
        names.sort();
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            let file = File::open(directory.join(&name))?;
            let bytes = file.metadata()?.len();
            let content = if bytes <= SMALL {
                let mut content = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
                file.read_exact_at(&mut content, 0)?;
                Content::Small(STANDARD_NO_PAD.encode(content))
            } else {
                Content::Pieces(self.pieces(&file)?)
            };
            files.push(CheckpointFile { name, content });
        }
        Ok(files)
    }
}

/// What a parcel is made of.
struct Source<'a> {
    /// The id of the sandbox, or of the build whose memory it is.
    of: &'a str,
    parcel: &'a str,
    disk: &'a DiskId,
    base: Option<String>,
    /// Its checkpoint, if it has one.
    checkpoint: Option<PathBuf>,
}

/// A parcel of which a disk is being made.
struct Unpacking<'a> {
    storage: &'a Storage,
    request: &'a UnpackParcel,
    /// The id of the sandbox, or of the build whose memory it is.
    of: &'a str,
    /// Whether the disk is wanted without its checkpoint as well.
    takes_files_alone: bool,
    keys: ParcelKeys,
    next: &'a mut dyn FnMut() -> io::Result<Record>,
}

fn damaged(why: impl std::fmt::Display) -> LayerError {
    LayerError::Refused(format!("the copy of the sandbox in the blob store is damaged: {why}"))
}

impl Unpacking<'_> {
    fn manifest(&mut self) -> Result<Manifest, LayerError> {
        let Record::Manifest(sealed) = (self.next)()? else {
            return Err(damaged("it does not begin with a manifest"));
        };
        let opened = self.keys.open_manifest(self.of, &self.request.parcel, &sealed);
        let text = opened.ok_or_else(|| damaged("its manifest was changed, or is that of another one"))?;
        let decoded = Manifest::decode(&text).and_then(|manifest| manifest.rootfs.check().map(|()| manifest));
        decoded.map_err(|why| damaged(format_args!("its manifest: {why}")))
    }

    fn require_space(&self, bytes: u64) -> Result<(), LayerError> {
        let free = usage::disk_available(&self.storage.data_dir)?;
        if free >= self.request.keep_free_bytes.saturating_add(bytes) {
            Ok(())
        } else {
            Err(LayerError::Full(
                "the host's disk has no space for the sandbox".to_owned(),
            ))
        }
    }

    /// Makes the files, and removes nothing if it fails.
    fn unpack(
        &mut self,
        manifest: &Manifest,
        obstacle: &dyn Fn(&Path) -> io::Result<Option<String>>,
    ) -> Result<Unpacked, LayerError> {
        let storage = self.storage;
        let UnpackParcel { id, disk, .. } = self.request;
        let mut wanted = manifest.checkpoint.as_ref().filter(|_| self.request.with_processes);
        let directory = storage.kept.note(id, disk, manifest.base.as_deref())?;
        let unfinished = storage.kept.unfinished_checkpoint(id, disk);
        let (mut files, mut without_processes) = (Vec::new(), None);
        if let Some(checkpoint) = wanted {
            DirBuilder::new().mode(0o700).create(&unfinished)?;
            for file in checkpoint {
                files.push(new_file(&unfinished, file)?);
            }
            // What says so lies in the manifest, so nothing is written in vain.
            without_processes = self.unfit(manifest, &unfinished, obstacle)?;
        }
        if without_processes.is_some() {
            wanted = None;
            files.clear();
            storage.kept.forget_checkpoint(id, disk)?;
            if !self.takes_files_alone {
                return Ok(Unpacked {
                    kept: Kept::Filesystem,
                    bytes: 0,
                    without_processes,
                });
            }
        }
        let places = manifest.places(wanted.is_some());
        let all = places.values().flatten();
        self.require_space(all.map(|place| u64::from(place.bytes)).sum())?;
        storage.layers.use_for(disk, &manifest.rootfs)?;
        let image = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(storage.disk_path(disk))?;
        image.set_len(manifest.disk.bytes)?;
        self.write_chunks(places, &image, &files)?;
        image.sync_all()?;
        drop(image);
        for file in files {
            file.sync_all()?;
        }
        storage.layers.write_out(disk)?;
        if wanted.is_some() {
            fs::set_permissions(&unfinished, fs::Permissions::from_mode(DIRECTORY_MODE))?;
            kept::sync(&unfinished)?;
            storage.kept.finish_checkpoint(id, disk)?;
        }
        storage.kept.mark_moved(id, disk)?;
        kept::sync(&directory)?;
        if let Some(above) = directory.parent() {
            kept::sync(above)?;
        }
        // From here on it counts, also after a power cut.
        storage.kept.mark_saved(id, disk)?;
        let checkpoint = storage.kept.checkpoint(id, disk);
        Ok(Unpacked {
            kept: if checkpoint.exists() {
                Kept::Checkpoint
            } else {
                Kept::Filesystem
            },
            bytes: disk::held_bytes(&storage.disk_path(disk))?.saturating_add(sums::space(&checkpoint)?),
            without_processes,
        })
    }

    /// Writes each chunk to where it belongs, as it comes. What is written is written out meanwhile on another thread, so that little is
    /// left to wait for at the end.
    fn write_chunks(
        &mut self,
        places: HashMap<ChunkId, Vec<Destination>>,
        image: &File,
        files: &[File],
    ) -> Result<(), LayerError> {
        thread::scope(|scope| {
            let (more, written) = mpsc::sync_channel(1);
            let writing_out = scope.spawn(move || -> io::Result<()> {
                while written.recv().is_ok() {
                    image.sync_data()?;
                    for file in files {
                        file.sync_data()?;
                    }
                }
                Ok(())
            });
            // One that is due already is enough.
            let received = self.receive_chunks(places, image, files, &|| {
                let _ = more.try_send(());
            });
            drop(more);
            // The kernel tells each file once that something could not be written.
            let written_out = writing_out.join().map_err(|_| io::Error::other("a thread panicked"));
            received?;
            Ok(written_out.flatten()?)
        })
    }

    fn receive_chunks(
        &mut self,
        mut places: HashMap<ChunkId, Vec<Destination>>,
        image: &File,
        files: &[File],
        is_written: &dyn Fn(),
    ) -> Result<(), LayerError> {
        let mut written: u64 = 0;
        while !places.is_empty() {
            let Record::Chunk(chunk, sealed) = (self.next)()? else {
                return Err(damaged("chunks are missing"));
            };
            let content = self.keys.open_chunk(&chunk, sealed);
            let content = content.ok_or_else(|| damaged(format_args!("chunk {chunk} is not what was stored")))?;
            // One of a checkpoint that is not wanted goes nowhere.
            for place in places.remove(&chunk).unwrap_or_default() {
                if content.len() != place.bytes as usize {
                    return Err(damaged(format_args!("chunk {chunk} has another length")));
                }
                let file = match place.file {
                    None => Some(image),
                    Some(number) => files.get(number),
                };
                let file = file.ok_or_else(|| damaged("a chunk of no file"))?;
                write_but_zeroes(file, &content, place.at)?;
                let before = written;
                written = written.saturating_add(content.len() as u64);
                if before / LOOK_AFTER != written / LOOK_AFTER {
                    self.require_space(0)?;
                }
                if before / WRITE_OUT_AFTER != written / WRITE_OUT_AFTER {
                    is_written();
                }
            }
        }
        Ok(())
    }

    /// Why the processes of a parcel cannot be restored on this host, for the client, if that is known already.
    fn unfit(
        &self,
        manifest: &Manifest,
        checkpoint: &Path,
        obstacle: &dyn Fn(&Path) -> io::Result<Option<String>>,
    ) -> Result<Option<String>, LayerError> {
        let storage = self.storage;
        if manifest.rootfs.has_base() {
            let current = storage.base.current();
            if manifest.base.as_deref().map(packages_of) != current.as_deref().map(packages_of) {
                let why = "the packages of this host are others, and its processes use files of those";
                return Ok(Some(why.to_owned()));
            }
        }
        let about = About::of(checkpoint).map_err(|error| damaged(format_args!("about its processes: {error}")))?;
        if about.agent.len() != 64 || !about.agent.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(damaged("the program of its agent is no hash"));
        }
        if storage.agents.obstacle(&about.agent)?.is_some() {
            // It may be the program of this node, which no sandbox of this node was paused with yet.
            storage.agents.keep(&File::open("/proc/self/exe")?)?;
        }
        Ok(obstacle(checkpoint)?)
    }
}

/// Writes content into a new file, without the blocks of zeroes, which take no space there. Blocks that follow each other are one
/// write: each write costs the file system as much as the copy of some blocks.
fn write_but_zeroes(file: &File, content: &[u8], at: u64) -> io::Result<()> {
    let is_zero = |block: &&[u8]| **block == ZEROES[..block.len()];
    let mut blocks = content.chunks(BLOCK).peekable();
    let mut begin = 0;
    while begin < content.len() {
        let holes: usize = std::iter::from_fn(|| blocks.next_if(is_zero)).map(<[u8]>::len).sum();
        let from = begin + holes;
        let used: usize = std::iter::from_fn(|| blocks.next_if(|block| !is_zero(block)))
            .map(<[u8]>::len)
            .sum();
        begin = from + used;
        file.write_all_at(&content[from..begin], at + from as u64)?;
    }
    Ok(())
}

/// A new file of a checkpoint. One whose content lies in the manifest is complete.
fn new_file(directory: &Path, file: &CheckpointFile) -> Result<File, LayerError> {
    let made = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(directory.join(&file.name))?;
    match &file.content {
        Content::Small(content) => {
            let content = STANDARD_NO_PAD.decode(content).map_err(damaged)?;
            made.write_all_at(&content, 0)?;
        }
        Content::Pieces(pieces) => made.set_len(pieces.bytes)?,
    }
    made.set_permissions(fs::Permissions::from_mode(FILE_MODE))?;
    Ok(made)
}

impl Storage {
    /// Makes a parcel of a kept disk that is saved, with its checkpoint if there is one: calls `send` with its chunks, and with the
    /// manifest last. It gives up once `is_current` says that something else happens to the sandbox.
    ///
    /// # Errors
    /// With [`io::ErrorKind::Interrupted`] then, with those of `send`, and when something cannot be read.
    pub fn pack_parcel(
        &self,
        request: &PackParcel,
        is_current: &dyn Fn() -> bool,
        send: &mut dyn FnMut(Record) -> io::Result<()>,
    ) -> io::Result<()> {
        let PackParcel { id, disk, parcel, .. } = request;
        let source = Source {
            of: id.as_str(),
            parcel,
            disk,
            base: self.kept.base_of(id, disk),
            checkpoint: Some(self.kept.checkpoint(id, disk)).filter(|checkpoint| checkpoint.exists()),
        };
        let packing = Packing {
            keys: ParcelKeys::of(&request.key)?,
            known: &request.known,
            sent: HashSet::new(),
            is_current: &|| is_current() && self.kept.is_saved(id, disk),
            send,
        };
        self.pack(&source, packing)
    }

    fn pack(&self, source: &Source<'_>, mut packing: Packing<'_>) -> io::Result<()> {
        packing.check()?;
        let files = match &source.checkpoint {
            Some(checkpoint) => Some(packing.checkpoint(checkpoint)?),
            None => None,
        };
        let pieces = packing.pieces(&File::open(self.disk_path(source.disk))?)?;
        let rootfs = self.layers.rootfs_of(source.disk)?;
        let manifest = Manifest::new(pieces, rootfs, source.base.clone(), files).encode()?;
        let sealed: Bytes = packing.keys.seal_manifest(source.of, source.parcel, &manifest)?;
        // All of it was read while nothing used the disk.
        packing.check()?;
        (packing.send)(Record::Manifest(sealed))
    }

    /// Makes a parcel of the memory of a snapshot, as [`Self::pack_parcel`] does. What is in `known` need not be sent.
    ///
    /// # Errors
    /// With [`io::ErrorKind::NotFound`] when there is none, with [`io::ErrorKind::Interrupted`] once `is_current` says so or it is
    /// removed, with those of `send`, and when something cannot be read.
    pub fn pack_memory(
        &self,
        of: &MemoryParcel,
        known: &HashSet<ChunkId>,
        is_current: &dyn Fn() -> bool,
        send: &mut dyn FnMut(Record) -> io::Result<()>,
    ) -> io::Result<()> {
        let memory = self.memories.find(&of.build)?.ok_or(io::ErrorKind::NotFound)?;
        let source = Source {
            of: of.build.as_str(),
            parcel: &of.parcel,
            disk: &memory.disk,
            base: memory.base(),
            checkpoint: Some(memory.checkpoint()),
        };
        let is_current = || is_current() && memory.path().exists();
        let packing = Packing {
            keys: ParcelKeys::of(&of.key)?,
            known,
            sent: HashSet::new(),
            is_current: &is_current,
            send,
        };
        self.pack(&source, packing).map_err(|error| {
            // Its files go with it.
            if is_current() {
                error
            } else {
                io::ErrorKind::Interrupted.into()
            }
        })
    }

    /// Makes a kept disk of a parcel, which survives a power cut when this returns. `next` yields the manifest, and then the chunks
    /// in any order; what it yields is not trusted. `obstacle` says why a checkpoint cannot be restored on this host
    /// ([`Driver::obstacle`](crate::driver::Driver::obstacle)): then the files alone are kept.
    ///
    /// # Errors
    /// [`LayerError::NoLayer`] when the host lacks a layer below its files, [`LayerError::Refused`] when a part is missing, was
    /// changed, or belongs to something else, and [`LayerError::Full`] when the host has no space. Nothing is left then.
    pub fn unpack_parcel(
        &self,
        request: &UnpackParcel,
        obstacle: &dyn Fn(&Path) -> io::Result<Option<String>>,
        next: &mut dyn FnMut() -> io::Result<Record>,
    ) -> Result<Unpacked, LayerError> {
        let unpacking = Unpacking {
            storage: self,
            request,
            of: request.id.as_str(),
            takes_files_alone: true,
            keys: ParcelKeys::of(&request.key)?,
            next,
        };
        let unpacked = self.unpack(unpacking, obstacle);
        if unpacked.is_err() {
            self.remove_unpacked(&request.id, &request.disk);
        }
        unpacked
    }

    fn unpack(
        &self,
        mut unpacking: Unpacking<'_>,
        obstacle: &dyn Fn(&Path) -> io::Result<Option<String>>,
    ) -> Result<Unpacked, LayerError> {
        let manifest = unpacking.manifest()?;
        if let Some(layer) = self.layers.missing(&manifest.rootfs) {
            return Err(LayerError::NoLayer(layer.clone()));
        }
        unpacking.unpack(&manifest, obstacle)
    }

    /// Keeps the memory of a snapshot that a parcel has, as [`Self::unpack_parcel`] keeps a disk. `to` says under which id and disk,
    /// that nothing has, it is made. Returns the space that it takes, in bytes, or why its processes cannot be restored on this host,
    /// for the client.
    ///
    /// # Errors
    /// As [`Self::unpack_parcel`]. Nothing is left then.
    pub fn unpack_memory(
        &self,
        of: &MemoryParcel,
        to: &Fork,
        obstacle: &dyn Fn(&Path) -> io::Result<Option<String>>,
        next: &mut dyn FnMut() -> io::Result<Record>,
    ) -> Result<Result<u64, String>, LayerError> {
        let request = UnpackParcel {
            id: to.id.clone(),
            disk: to.disk.clone(),
            parcel: of.parcel.clone(),
            key: of.key.clone(),
            with_processes: true,
            keep_free_bytes: to.keep_free_bytes,
        };
        let unpacking = Unpacking {
            storage: self,
            request: &request,
            of: of.build.as_str(),
            takes_files_alone: false,
            keys: ParcelKeys::of(&request.key)?,
            next,
        };
        let kept = self.unpack(unpacking, obstacle).and_then(|unpacked| match unpacked {
            Unpacked {
                without_processes: Some(why),
                ..
            } => Ok(Err(why)),
            Unpacked {
                kept: Kept::Checkpoint, ..
            } => {
                let from = self.kept.path(&to.id, &to.disk);
                match self.memories.take(&from, &of.build, &to.disk) {
                    // Another parcel of it was faster, and has the same.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                        self.remove_unpacked(&to.id, &to.disk);
                        let memory = self.memories.find(&of.build)?;
                        let memory = memory.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
                        Ok(Ok(self.space_of(&memory)?))
                    }
                    memory => Ok(Ok(self.space_of(&memory?)?)),
                }
            }
            _ => Err(damaged("it has no processes")),
        });
        if !matches!(kept, Ok(Ok(_))) {
            self.remove_unpacked(&to.id, &to.disk);
        }
        kept
    }

    fn remove_unpacked(&self, id: &SandboxId, disk: &DiskId) {
        if let Err(error) = self.forget(id, disk).and_then(|()| self.remove_disk(disk)) {
            tracing::warn!("cannot remove what was made of a copy, the next start of the platform does: {error}");
        }
    }
}

#[cfg(test)]
mod tests;

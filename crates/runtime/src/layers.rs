//! The stored layers of a data directory, and which disks use them.
//!
//! ```text
//!   layers/<id>/root, layers/<id>/usr   the directories of a layer; root only, because they contain setuid programs
//!   layers/<id>/bytes                   the space that it takes
//!   layers/new-<random>                 a layer that is not complete
//!   layers/removed-<random>-<id>        a layer that is removed once no disk uses it
//!   disks/<disk>.rootfs                 the file system of the sandbox with this disk, unless it is `base`
//! ```
//!
//! A layer is complete and written out before it has its name, and loses its name before anything of it is deleted. A
//! start records its file system before it looks for its layers, and a removal renames a layer before it looks for
//! records, so one of the two notices the other. Whatever is left after a crash is removed by [`Layers::sweep`].

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use model::id::{DiskId, LayerId};
use parking_lot::Mutex;
use protocol::node::LayerInfo;

use crate::files::if_there;
use crate::rootfs::Rootfs;

/// Beginning of the names of layers that are not complete.
const UNFINISHED: &str = "new-";
/// Beginning of the names of layers that are being removed, before their ids.
const REMOVED: &str = "removed-";
/// File with the size of a layer.
pub(crate) const BYTES: &str = "bytes";
/// Extension of the record of a disk.
const RECORD: &str = "rootfs";
/// Attribute that would make the files of layers inherit permissions of the data directory.
const DEFAULT_ACL: &str = "system.posix_acl_default";

/// The layers of a data directory.
#[derive(Debug)]
pub(crate) struct Layers {
    dir: PathBuf,
    disks: PathBuf,
    /// Names of the layers that are being created.
    unfinished: Mutex<BTreeSet<String>>,
    /// Whether something may be left to remove.
    is_untidy: AtomicBool,
}

impl Layers {
    /// The directory of the layers.
    pub(crate) fn path(data_dir: &Path) -> PathBuf {
        data_dir.join("layers")
    }

    /// Opens the layers, and creates their directory unless it exists.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let dir = Self::path(data_dir);
        match fs::DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        // Most file systems have none, and some no attributes at all.
        let _ = rustix::fs::removexattr(&dir, DEFAULT_ACL);
        Ok(Self {
            dir,
            disks: data_dir.join("disks"),
            unfinished: Mutex::default(),
            is_untidy: AtomicBool::new(true),
        })
    }

    /// The first layer of a file system of which a directory is missing. A layer above `base` has two, any other one.
    pub(crate) fn missing<'a>(&self, rootfs: &'a Rootfs) -> Option<&'a LayerId> {
        let mut stored = rootfs.stored();
        let is_missing = |layer: &LayerId, part: &str| !self.dir.join(layer.as_str()).join(part).is_dir();
        stored
            .find(|(layer, part)| is_missing(layer, part.as_str()))
            .map(|(layer, _)| layer)
    }

    /// Whether a layer is stored.
    pub(crate) fn has(&self, layer: &LayerId) -> bool {
        self.dir.join(layer.as_str()).is_dir()
    }

    /// All layers, in the order of their ids.
    ///
    /// # Errors
    /// When the directory cannot be read.
    pub(crate) fn list(&self) -> io::Result<Vec<LayerInfo>> {
        let mut layers = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let Some(id) = layer_of(&entry?.file_name().to_string_lossy()) else {
                continue;
            };
            // It may have been removed meanwhile.
            if let Ok(bytes) = self.bytes(&id) {
                layers.push(LayerInfo { id, bytes });
            }
        }
        layers.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(layers)
    }

    fn bytes(&self, layer: &LayerId) -> io::Result<u64> {
        let text = fs::read_to_string(self.dir.join(layer.as_str()).join(BYTES))?;
        text.trim().parse().map_err(io::Error::other)
    }

    /// A name for a new layer, whose directory does not exist yet. It is removed when this is dropped.
    ///
    /// # Errors
    /// When there is no randomness.
    pub(crate) fn begin(&self) -> io::Result<Unfinished<'_>> {
        let name = format!("{UNFINISHED}{:016x}", random()?);
        self.unfinished.lock().insert(name.clone());
        Ok(Unfinished { layers: self, name })
    }

    /// Removes a layer, at once or when no disk uses it any more.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn remove(&self, layer: &LayerId) -> io::Result<()> {
        let removed = format!("{REMOVED}{:016x}-{layer}", random()?);
        if if_there(fs::rename(self.dir.join(layer.as_str()), self.dir.join(removed)))?.is_none() {
            return Ok(());
        }
        // The name is lost before the content is, also after a power failure.
        fs::File::open(&self.dir)?.sync_all()?;
        self.is_untidy.store(true, Ordering::Relaxed);
        self.sweep()
    }

    /// Deletes what crashes left, and removed layers that no disk uses any more.
    ///
    /// # Errors
    /// When the data directory cannot be read or written.
    pub(crate) fn sweep(&self) -> io::Result<()> {
        if !self.is_untidy.swap(false, Ordering::Relaxed) {
            return Ok(());
        }
        let swept = self.sweep_all();
        // Otherwise the next call tries again.
        if !matches!(swept, Ok(true)) {
            self.is_untidy.store(true, Ordering::Relaxed);
        }
        swept.map(|_| ())
    }

    /// Returns whether nothing is left.
    fn sweep_all(&self) -> io::Result<bool> {
        let mut is_tidy = true;
        let mut used = None;
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(UNFINISHED) {
                if !self.unfinished.lock().contains(&*name) {
                    self.delete(&name)?;
                }
            } else if let Some((_, id)) = name.strip_prefix(REMOVED).and_then(|rest| rest.split_once('-')) {
                if used.is_none() {
                    used = Some(self.used()?);
                }
                let is_used = layer_of(id).is_some_and(|id| used.as_ref().is_some_and(|used| used.contains(&id)));
                if is_used {
                    is_tidy = false;
                } else {
                    self.delete(&name)?;
                }
            }
        }
        Ok(is_tidy)
    }

    fn delete(&self, name: &str) -> io::Result<()> {
        if_there(fs::remove_dir_all(self.dir.join(name))).map(drop)
    }

    /// The layers that disks use.
    fn used(&self) -> io::Result<BTreeSet<LayerId>> {
        let mut used = BTreeSet::new();
        for entry in fs::read_dir(&self.disks)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == RECORD)
                && let Some(text) = if_there(fs::read(&path))?
            {
                let rootfs: Rootfs = serde_json::from_slice(&text)?;
                used.extend(rootfs.stored().map(|(layer, _)| layer.clone()));
            }
        }
        Ok(used)
    }

    fn record(&self, disk: &DiskId) -> PathBuf {
        self.disks.join(format!("{disk}.{RECORD}"))
    }

    /// The record of a disk, below the data directory.
    pub(crate) fn record_path(disk: &DiskId) -> PathBuf {
        PathBuf::from(format!("disks/{disk}.{RECORD}"))
    }

    /// Records the file system of a new disk.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub(crate) fn use_for(&self, disk: &DiskId, rootfs: &Rootfs) -> io::Result<()> {
        if *rootfs == Rootfs::base() {
            return Ok(());
        }
        // Renamed, so that a record is always complete.
        let unfinished = self.disks.join(format!("{disk}.{RECORD}.new"));
        fs::write(&unfinished, serde_json::to_vec(rootfs)?)?;
        fs::rename(unfinished, self.record(disk))
    }

    /// The file system of a disk.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub(crate) fn rootfs_of(&self, disk: &DiskId) -> io::Result<Rootfs> {
        match if_there(fs::read(self.record(disk)))? {
            Some(text) => Ok(serde_json::from_slice(&text)?),
            None => Ok(Rootfs::base()),
        }
    }

    /// Has the record of a disk survive a power cut.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub(crate) fn write_out(&self, disk: &DiskId) -> io::Result<()> {
        // `base` has no record.
        if let Some(record) = if_there(fs::File::open(self.record(disk)))? {
            record.sync_all()?;
        }
        fs::File::open(&self.disks)?.sync_all()
    }

    /// Forgets the file system of a disk that was removed.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub(crate) fn forget(&self, disk: &DiskId) -> io::Result<()> {
        if_there(fs::remove_file(self.record(disk))).map(drop)
    }

    /// Forgets the file systems of all disks but these.
    ///
    /// # Errors
    /// When the data directory cannot be read or written.
    pub(crate) fn forget_all_but(&self, keep: &[DiskId]) -> io::Result<()> {
        for entry in fs::read_dir(&self.disks)? {
            let name = entry?.file_name();
            let name = name.to_string_lossy();
            let Some((disk, rest)) = name.split_once('.') else {
                continue;
            };
            let is_record = rest == RECORD || rest == "rootfs.new";
            if is_record && !keep.iter().any(|kept| kept.as_str() == disk) {
                if_there(fs::remove_file(self.disks.join(&*name)))?;
            }
        }
        Ok(())
    }
}

/// A layer that is being created, removed on drop.
#[derive(Debug)]
pub(crate) struct Unfinished<'a> {
    layers: &'a Layers,
    name: String,
}

impl Unfinished<'_> {
    /// Name of its directory.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Gives it its name. If the layer exists already, that one is kept. Returns its size.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub(crate) fn finish(self, layer: &LayerId, bytes: u64) -> io::Result<u64> {
        let dir = &self.layers.dir;
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        let (from, to) = (dir.join(&self.name), dir.join(layer.as_str()));
        match rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags) {
            Err(rustix::io::Errno::EXIST) => return self.layers.bytes(layer),
            renamed => renamed?,
        }
        fs::File::open(dir)?.sync_all()?;
        Ok(bytes)
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.layers.delete(&self.name) {
            tracing::warn!("cannot remove an incomplete layer, it is tried again: {error}");
            self.layers.is_untidy.store(true, Ordering::Relaxed);
        }
        self.layers.unfinished.lock().remove(&self.name);
    }
}

fn layer_of(name: &str) -> Option<LayerId> {
    name.parse().ok()
}

fn random() -> io::Result<u64> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(u64::from_ne_bytes(random))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, Layers) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("disks")).unwrap();
        let layers = Layers::open(dir.path()).unwrap();
        (dir, layers)
    }

    fn id(number: u8) -> LayerId {
        LayerId::from_hash(&[number; 32])
    }

    fn add(layers: &Layers, number: u8) -> u64 {
        let unfinished = layers.begin().unwrap();
        let path = layers.dir.join(unfinished.name());
        fs::create_dir_all(path.join("root/files")).unwrap();
        fs::write(path.join(BYTES), "123\n").unwrap();
        unfinished.finish(&id(number), 123).unwrap()
    }

    fn names(layers: &Layers) -> Vec<String> {
        let entries = fs::read_dir(&layers.dir).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn a_layer_is_stored_once_and_listed() {
        let (_dir, layers) = store();
        assert_eq!(add(&layers, 2), 123);
        assert_eq!(add(&layers, 1), 123);
        assert_eq!(add(&layers, 2), 123);
        let listed: Vec<LayerId> = layers.list().unwrap().into_iter().map(|layer| layer.id).collect();
        assert_eq!(listed, [id(1), id(2)]);
        assert_eq!(names(&layers).len(), 2);
        let stored = Rootfs::without_base(&[id(1), id(2)]);
        assert_eq!(layers.missing(&stored), None);
        // It has no part for `/usr`.
        assert_eq!(layers.missing(&Rootfs::above_base(&[id(1)])), Some(&id(1)));
        assert_eq!(layers.missing(&Rootfs::without_base(&[id(1), id(3)])), Some(&id(3)));
    }

    #[test]
    fn what_is_not_complete_is_removed_but_not_under_its_writer() {
        let (_dir, layers) = store();
        fs::create_dir_all(layers.dir.join("new-0/root")).unwrap();
        let unfinished = layers.begin().unwrap();
        fs::create_dir_all(layers.dir.join(unfinished.name()).join("root")).unwrap();
        layers.sweep().unwrap();
        assert_eq!(names(&layers), [unfinished.name()]);
        drop(unfinished);
        assert_eq!(names(&layers), [""; 0]);
    }

    #[test]
    fn a_removed_layer_is_deleted_when_no_disk_uses_it() {
        let (_dir, layers) = store();
        add(&layers, 1);
        let disk: DiskId = "1".parse().unwrap();
        let rootfs = Rootfs::without_base(&[id(1)]);
        layers.use_for(&disk, &rootfs).unwrap();
        assert_eq!(layers.rootfs_of(&disk).unwrap(), rootfs);
        layers.remove(&id(1)).unwrap();
        layers.remove(&id(1)).unwrap();
        assert_eq!(layers.missing(&rootfs), Some(&id(1)));
        assert!(layers.list().unwrap().is_empty());
        assert_eq!(names(&layers).len(), 1, "its files are there");
        layers.forget_all_but(std::slice::from_ref(&disk)).unwrap();
        layers.sweep().unwrap();
        assert_eq!(names(&layers).len(), 1);
        layers.forget(&disk).unwrap();
        layers.sweep().unwrap();
        assert_eq!(names(&layers), [""; 0]);
        assert_eq!(layers.rootfs_of(&disk).unwrap(), Rootfs::base());
    }

    #[test]
    fn records_of_removed_disks_are_forgotten() {
        let (dir, layers) = store();
        for disk in ["1", "2"] {
            layers
                .use_for(&disk.parse().unwrap(), &Rootfs::without_base(&[]))
                .unwrap();
        }
        fs::write(dir.path().join("disks/3.rootfs.new"), "").unwrap();
        fs::write(dir.path().join("disks/2.img"), "").unwrap();
        layers.forget_all_but(&["1".parse().unwrap()]).unwrap();
        let mut left: Vec<_> = fs::read_dir(dir.path().join("disks"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["1.rootfs", "2.img"]);
    }
}

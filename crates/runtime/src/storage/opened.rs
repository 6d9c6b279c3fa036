//! The storage of a data directory that was opened.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use model::id::DiskId;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use crate::checkpoint::agents::Agents;
use crate::checkpoint::sums::Compared;
use crate::kept::KeptDisks;
use crate::launchers::Helpers;
use crate::layers::Layers;
use crate::memories::Memories;
use crate::settings::DriverSettings;
use crate::{base, disk, skeleton};

/// What is known about the version of `base` below the disk of a sandbox.
#[derive(Debug, Clone)]
pub(super) enum Below {
    /// The version.
    Version(String),
    /// The name under which [`base::Versions`] knows the sandbox.
    UserNamed(String),
}

/// The storage of one data directory.
#[derive(Debug)]
pub struct Storage {
    pub(crate) data_dir: PathBuf,
    pub(crate) base: base::Versions,
    /// Held while a sandbox is started on a kept disk, and while the version of `base` changes.
    pub(super) base_changes: RwLock<()>,
    /// The version of `base` below each disk of a sandbox that runs.
    pub(super) bases: Mutex<HashMap<DiskId, Below>>,
    pub(crate) layers: Layers,
    pub(crate) kept: KeptDisks,
    pub(super) memories: Memories,
    pub(crate) agents: Arc<Agents>,
    /// The disks of copied sandboxes that were not restored yet, and what is known of their checkpoints.
    pub(super) forks: Mutex<HashMap<DiskId, Compared>>,
    /// Disk sizes, in MiB, whose template exists.
    pub(super) disk_sizes: Mutex<BTreeSet<u32>>,
    /// None where the driver starts no processes for it.
    helpers: Option<Arc<Helpers>>,
}

impl Storage {
    /// Opens the storage of a data directory, and creates what it lacks. Without [`Storage::with_helpers`] it can neither
    /// make nor move layers.
    ///
    /// # Errors
    /// When the data directory cannot be used, or `base` cannot be made of the host.
    pub fn open(settings: &DriverSettings) -> io::Result<Self> {
        let data_dir = settings.data_dir.canonicalize()?;
        fs::create_dir_all(data_dir.join("disks"))?;
        let layers = Layers::open(&data_dir)?;
        let kept = KeptDisks::open(&data_dir)?;
        let memories = Memories::open(&data_dir)?;
        let agents = Arc::new(Agents::open(&data_dir)?);
        skeleton::create(&data_dir)?;
        let base = base::Versions::new(Path::new("/"), &data_dir);
        if settings.base {
            match base.update_current() {
                // If this fails, for example on a full disk, existing sandboxes must still be adopted.
                Err(error) if base.has_current() => {
                    tracing::warn!("update `base`, continuing with the current version: {error}")
                }
                made => {
                    made?;
                }
            }
        } else {
            fs::create_dir_all(base.path())?;
            base.remove_incomplete()?;
        }
        for &disk_mb in &settings.disks_mb {
            disk::make_template(&data_dir, disk_mb)?;
        }
        Ok(Self {
            data_dir,
            base,
            base_changes: RwLock::default(),
            bases: Mutex::default(),
            layers,
            kept,
            memories,
            agents,
            forks: Mutex::default(),
            disk_sizes: Mutex::new(settings.disks_mb.iter().copied().collect()),
            helpers: None,
        })
    }

    /// This storage, with `helpers` that start its processes.
    #[must_use]
    pub(crate) fn with_helpers(self, helpers: Arc<Helpers>) -> Self {
        Self {
            helpers: Some(helpers),
            ..self
        }
    }

    /// The processes that make and move layers.
    ///
    /// # Errors
    /// With [`io::ErrorKind::Unsupported`] where there are none.
    pub(super) fn helpers(&self) -> io::Result<&Helpers> {
        let missing = || io::Error::new(io::ErrorKind::Unsupported, "the storage starts no processes");
        self.helpers.as_deref().ok_or_else(missing)
    }

    /// The file of a disk.
    #[must_use]
    pub fn disk_path(&self, disk: &DiskId) -> PathBuf {
        self.data_dir.join(disk::path_of(disk))
    }

    /// Keeps the version of `base` as it is for as long as the guard is held.
    pub(crate) fn hold_base(&self) -> RwLockReadGuard<'_, ()> {
        self.base_changes.read()
    }
}

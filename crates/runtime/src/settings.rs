//! Settings of a driver and of the storage below it. The node passes them on; each is read where it is used.

use std::path::PathBuf;

use model::resources::OPEN_FILES;
use serde::{Deserialize, Serialize};

/// Fewest launchers by default.
const LAUNCHERS_MIN: usize = 2;
/// Most launchers by default.
const LAUNCHERS_MAX: usize = 64;

/// Which CRIU is used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CriuChoice {
    /// None, whatever the host has.
    Off,
    /// The first fitting one of the places where packages put it; none where there is none.
    #[default]
    Auto,
    /// The one at this path, which has to fit.
    At(PathBuf),
}

/// Settings of a driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverSettings {
    /// Data directory: disks, layers and versions of `base`.
    pub data_dir: PathBuf,
    /// Number of launcher processes, which start sandboxes in parallel.
    pub launchers: usize,
    /// Run without limits when the host has no usable cgroups.
    pub unlimited: bool,
    /// Disk sizes, in MiB, whose templates are created at startup. The first sandbox with another size waits for its
    /// template.
    pub disks_mb: Vec<u32>,
    /// Allocate the whole disk of a sandbox on the host when it starts, instead of block by block.
    pub reserve_disks: bool,
    /// How many files a process of a sandbox may have open, unless it asks for more.
    pub open_files: u32,
    /// Create `base` and keep it up to date with the host. Without it sandboxes of `base` can only be ended, not started.
    pub base: bool,
    /// CRIU, which writes the processes of paused sandboxes to disk; without it they stay in memory.
    pub criu: CriuChoice,
    /// Move the memory of frozen sandboxes to swap when asked to.
    pub page_out: bool,
}

impl DriverSettings {
    /// Settings with the platform's defaults for a data directory.
    #[must_use]
    pub fn new(data_dir: PathBuf) -> Self {
        Self {
            data_dir,
            launchers: default_launchers(),
            unlimited: false,
            disks_mb: Vec::new(),
            reserve_disks: false,
            open_files: OPEN_FILES,
            base: true,
            criu: CriuChoice::default(),
            page_out: true,
        }
    }
}

/// One launcher per core, but two at least: one that waits for a disk must not hold up all others.
fn default_launchers() -> usize {
    std::thread::available_parallelism()
        .map_or(LAUNCHERS_MIN, usize::from)
        .clamp(LAUNCHERS_MIN, LAUNCHERS_MAX)
}

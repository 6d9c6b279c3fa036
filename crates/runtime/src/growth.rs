//! How far the disk of a sandbox has grown on the host, and how much further it may.
//!
//! Images are sparse: together they are larger than the host's disk. Data that the file system of a sandbox has accepted
//! and that then finds no block on the host is lost, and `fsync` has said that it is there. So a sandbox has to be
//! refused at the moment of the write. ext4 has the means: what is set aside as `reserved_clusters` is given to nobody,
//! root of the sandbox included, and the amount can be changed while the file system is in use. With more of it set
//! aside, the next write that wants a block gets `ENOSPC`; what was accepted before keeps its blocks, and reading,
//! overwriting and deleting go on.
//!
//! What is not held by it: inode tables and bitmaps, which a new file system writes when they are first needed (1.6 %
//! of the size of an image at most), and blocks of the host's own for keeping track of an image.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::container::has_ended;
use crate::usage::statfs_of;

/// Granularity of an image's file system, in bytes.
const CLUSTER: u64 = 4096;
/// What ext4 sets aside by itself: 2 % of the file system, at most 4096 clusters.
const USUAL_CLUSTERS: u64 = 4096;
/// Shortest time between two searches of the host's loop devices.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);

/// The disk of a sandbox at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disk {
    /// Size of the image, in bytes.
    pub size_bytes: u64,
    /// What the host has given for the image, in bytes.
    pub held_bytes: u64,
    /// What the file system in it has promised to files, in bytes, written or not.
    pub used_bytes: u64,
    /// What it could still promise, in bytes.
    pub free_bytes: u64,
    /// What it may still promise, in bytes.
    pub allowed_bytes: u64,
}

impl Disk {
    /// What the host will have to give for what was promised already, in bytes.
    #[must_use]
    pub fn owed_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.held_bytes)
    }

    /// Whether the host has given the whole image, or as good as: it then takes no more, whatever happens inside.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held_bytes / 19 >= self.size_bytes / 20
    }

    /// What ext4 sets aside when nobody tells it otherwise, in bytes.
    fn usual_bytes(&self) -> u64 {
        (self.size_bytes / 50).min(USUAL_CLUSTERS * CLUSTER)
    }

    /// Whether less is allowed than there is.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.free_bytes.saturating_sub(self.allowed_bytes) > self.usual_bytes()
    }
}

/// Reads the state of the disk whose image is `image`, in the sandbox whose agent is `pid` behind `agent`.
pub(crate) fn read(image: &Path, pid: i32, agent: BorrowedFd<'_>) -> io::Result<Disk> {
    // The image first: what is promised in between is then owed, not overlooked.
    let metadata = fs::metadata(image)?;
    let inside = statfs_of(pid)?;
    if has_ended(agent)? {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(Disk {
        size_bytes: metadata.size(),
        held_bytes: metadata.blocks().saturating_mul(512),
        used_bytes: inside.used_bytes,
        free_bytes: inside.free_bytes,
        allowed_bytes: inside.allowed_bytes,
    })
}

/// Lets the file system of an image promise no more than `allowance` bytes beyond what it has, or, when none is given,
/// all that it has. What was promised since `disk` was read counts against it.
pub(crate) fn allow(device: &str, disk: &Disk, allowance: Option<u64>) -> io::Result<()> {
    let set_aside = match allowance {
        None => disk.usual_bytes() / CLUSTER,
        Some(bytes) => disk.free_bytes.saturating_sub(bytes).div_ceil(CLUSTER),
    };
    fs::write(
        format!("/sys/fs/ext4/{device}/reserved_clusters"),
        set_aside.to_string(),
    )
}

/// Which loop device an image is attached to.
#[derive(Debug, Default)]
pub(crate) struct LoopDevices(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    devices: HashMap<PathBuf, String>,
    searched: Option<Instant>,
}

impl LoopDevices {
    /// The device of an image.
    ///
    /// # Errors
    /// When there is none, or the last search is so recent that the next has to wait.
    pub(crate) fn of(&self, image: &Path) -> io::Result<String> {
        let mut known = self.0.lock();
        // Devices are used again for other images as soon as they are free.
        if let Some(device) = known.devices.get(image)
            && backing(device).as_deref() == Some(image)
        {
            return Ok(device.clone());
        }
        if known.searched.is_some_and(|at| at.elapsed() < SEARCH_PAUSE) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        known.devices = search()?;
        known.searched = Some(Instant::now());
        known
            .devices
            .get(image)
            .cloned()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn search() -> io::Result<HashMap<PathBuf, String>> {
    let mut devices = HashMap::new();
    for entry in fs::read_dir("/sys/block")? {
        let Ok(name) = entry?.file_name().into_string() else {
            continue;
        };
        if name.starts_with("loop")
            && let Some(image) = backing(&name)
        {
            devices.insert(image, name);
        }
    }
    Ok(devices)
}

/// The file that a loop device is attached to.
fn backing(device: &str) -> Option<PathBuf> {
    let text = fs::read_to_string(format!("/sys/block/{device}/loop/backing_file")).ok()?;
    Some(PathBuf::from(text.strip_suffix('\n').unwrap_or(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: Disk = Disk {
        size_bytes: 10 << 30,
        held_bytes: 1 << 20,
        used_bytes: 3 << 20,
        free_bytes: 9 << 30,
        allowed_bytes: (9 << 30) - (16 << 20),
    };

    #[test]
    fn what_is_promised_and_not_yet_given_is_owed() {
        assert_eq!(DISK.owed_bytes(), 2 << 20);
        let written = Disk {
            held_bytes: 4 << 20,
            ..DISK
        };
        assert_eq!(written.owed_bytes(), 0);
    }

    #[test]
    fn what_ext4_sets_aside_by_itself_is_no_limit() {
        assert!(!DISK.is_limited());
        let limited = Disk {
            allowed_bytes: 1 << 30,
            ..DISK
        };
        assert!(limited.is_limited());
    }

    #[test]
    fn whole_images_are_told_from_sparse_ones() {
        assert!(!DISK.is_held());
        let whole = Disk {
            held_bytes: 10 << 30,
            ..DISK
        };
        assert!(whole.is_held());
    }
}

//! How much the disk of a sandbox has grown on the host, and limits on further growth.
//!
//! Disks are sparse: together they are larger than the host's disk. Data that the file system of a sandbox has
//! accepted and that then finds no block on the host is lost, although `fsync` reported success. So writes have to be
//! refused when they are made. ext4 has the means: blocks counted in `reserved_clusters` are given to no process, root
//! of the sandbox included, and the number can be changed while the file system is mounted. When it is raised, the next
//! write that needs a block fails with `ENOSPC`; data that was accepted before keeps its blocks, and reading,
//! overwriting and deleting still work.
//!
//! Not limited by this: inode tables and bitmaps, which a new file system writes when they are first needed (1.6 % of
//! the size of a disk at most), and the host's own metadata of a disk.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::process::has_ended;
use crate::usage::statfs_of;

/// Cluster size of a disk's file system, in bytes.
const CLUSTER: u64 = 4096;
/// What ext4 reserves by default: 2 % of the file system, at most 4096 clusters.
const DEFAULT_RESERVED_CLUSTERS: u64 = 4096;
/// Shortest time between two searches of the host's loop devices.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);

/// State of a sandbox's disk at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Disk {
    /// Size of the disk, in bytes.
    pub size_bytes: u64,
    /// Space allocated on the host for the disk, in bytes.
    pub held_bytes: u64,
    /// Space that its file system has promised to files, in bytes, written or not.
    pub used_bytes: u64,
    /// Free space of its file system, in bytes.
    pub free_bytes: u64,
    /// Free space that the file system may still promise to files, in bytes.
    pub allowed_bytes: u64,
}

impl Disk {
    /// Space that is promised to files but not allocated on the host yet, in bytes.
    #[must_use]
    pub fn owed_bytes(&self) -> u64 {
        self.used_bytes.saturating_sub(self.held_bytes)
    }

    /// Whether (almost) the whole disk is allocated on the host: it then cannot grow any more.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.held_bytes / 19 >= self.size_bytes / 20
    }

    /// What ext4 reserves by default, in bytes.
    fn default_reserved_bytes(&self) -> u64 {
        (self.size_bytes / 50).min(DEFAULT_RESERVED_CLUSTERS * CLUSTER)
    }

    /// Whether an allowance below the free space is set.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.free_bytes.saturating_sub(self.allowed_bytes) > self.default_reserved_bytes()
    }
}

/// Reads the state of the disk whose file is `image`, in the sandbox whose agent is `pid` behind `agent`.
pub(crate) fn read(image: &Path, pid: i32, agent: BorrowedFd<'_>) -> io::Result<Disk> {
    // The disk first: what is promised in between is then counted as owed, not overlooked.
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

/// Limits what the file system of a disk may promise to `allowance` bytes beyond what it has, or removes the limit
/// with `None`. What was promised since `disk` was read counts against it.
pub(crate) fn allow(device: &str, disk: &Disk, allowance: Option<u64>) -> io::Result<()> {
    let reserved = match allowance {
        None => disk.default_reserved_bytes() / CLUSTER,
        Some(bytes) => disk.free_bytes.saturating_sub(bytes).div_ceil(CLUSTER),
    };
    fs::write(format!("/sys/fs/ext4/{device}/reserved_clusters"), reserved.to_string())
}

/// Cache of the loop devices that disks are attached to.
#[derive(Debug, Default)]
pub(crate) struct LoopDevices(Mutex<DeviceCache>);

#[derive(Debug, Default)]
struct DeviceCache {
    devices: HashMap<PathBuf, String>,
    searched: Option<Instant>,
}

impl LoopDevices {
    /// The device of a disk.
    ///
    /// # Errors
    /// When there is none, or [`io::ErrorKind::WouldBlock`] when the last search was less than [`SEARCH_PAUSE`] ago.
    pub(crate) fn of(&self, image: &Path) -> io::Result<String> {
        let mut cache = self.0.lock();
        // Loop devices are reused for other disks as soon as they are free.
        if let Some(device) = cache.devices.get(image)
            && backing(device).as_deref() == Some(image)
        {
            return Ok(device.clone());
        }
        if cache.searched.is_some_and(|at| at.elapsed() < SEARCH_PAUSE) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        cache.devices = search()?;
        cache.searched = Some(Instant::now());
        cache
            .devices
            .get(image)
            .cloned()
            .ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Whether a disk is attached to a loop device: its file system is in use, or still being written out.
pub(crate) fn is_attached(image: &Path) -> io::Result<bool> {
    Ok(search()?.contains_key(image))
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
    fn space_promised_but_not_allocated_is_owed() {
        assert_eq!(DISK.owed_bytes(), 2 << 20);
        let written = Disk {
            held_bytes: 4 << 20,
            ..DISK
        };
        assert_eq!(written.owed_bytes(), 0);
    }

    #[test]
    fn the_default_reservation_of_ext4_is_not_a_limit() {
        assert!(!DISK.is_limited());
        let limited = Disk {
            allowed_bytes: 1 << 30,
            ..DISK
        };
        assert!(limited.is_limited());
    }

    #[test]
    fn fully_allocated_images_are_recognized() {
        assert!(!DISK.is_held());
        let whole = Disk {
            held_bytes: 10 << 30,
            ..DISK
        };
        assert!(whole.is_held());
    }
}

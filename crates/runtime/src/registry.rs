//! The host registry, shared by the platforms of one host: the blocks of ids, and kernel settings that are restored at
//! the end.
//!
//! ```text
//!   /run/ringfence/lock          held for the moment of a change
//!   /run/ringfence/regions/N     what has region N: data directories that share it, or one of an earlier version
//!   /run/ringfence/blocks/N      the data directory that has block N, and for which of its slots
//!   /run/ringfence/file-max      what `fs.file-max` was before the first platform raised it
//! ```
//!
//! It is in `/run` because none of it matters after a reboot: a block is needed while processes with its ids live. A
//! data directory has one block from the start of its platform, more while it has that many sandboxes, and keeps them as
//! long as their entries exist; `down` removes those. Correctness does not depend on that: an entry may be taken over if
//! its platform does not run and no process has its ids, and a block without an entry is used only when no process has ids
//! of it. A data directory is identified by its path, as its control groups are, so a copied or moved one counts as
//! another.
//!
//! Earlier versions know only regions, and gave each data directory a whole one: the content of its entry is a path. To
//! them, a region that is shared has an unknown holder, whose entry is locked while one of those that share it runs. They
//! take it over as they do with each other: when nobody has it locked and no process has its ids. The entries of its
//! blocks are void from then on. What an earlier version has is its own as a whole, until no process has ids of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::files::if_there;
use crate::slot::{BLOCKS_PER_REGION, Block, Region, path_hash};

/// Directory of the registry.
const DIRECTORY: &str = "/run/ringfence";
/// Content of the entry of a region that is shared. Earlier versions show it as the holder; it is no absolute path.
const SHARED: &str = "several data directories";
const FILE_MAX: &str = "/proc/sys/fs/file-max";
/// How long another platform may hold the lock. A change takes milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// The registry of a host.
#[derive(Debug)]
pub(crate) struct Registry {
    directory: PathBuf,
    /// The kernel's limit on open files.
    file_max: PathBuf,
    /// The processes of the host.
    processes: PathBuf,
}

/// A block that a data directory has.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) block: Block,
    /// Locked by the platform and its launchers.
    pub(crate) locks: Vec<Arc<OwnedFd>>,
    /// Whether it is part of a region that an earlier version gave to the data directory as a whole.
    pub(crate) is_of_whole_region: bool,
}

/// The blocks of a data directory, by the number that its slots have divided by those of a block.
pub(crate) type Blocks = BTreeMap<u32, Held>;

/// What has a region.
#[derive(Debug, PartialEq, Eq)]
enum Holder {
    /// Data directories that have blocks of the region.
    Shared,
    /// A data directory of an earlier version; empty when its platform died before it had written it.
    Whole(PathBuf),
}

impl Registry {
    /// The registry of this host.
    pub(crate) fn of_host() -> Self {
        Self {
            directory: DIRECTORY.into(),
            file_max: FILE_MAX.into(),
            processes: "/proc".into(),
        }
    }

    /// Claims the blocks that a data directory already has, and the first one if it `starts` sandboxes.
    ///
    /// # Errors
    /// With [`io::ErrorKind::StorageFull`] when every block is in use, and when the registry cannot be written.
    pub(crate) fn claim(&self, data_dir: &Path, starts: bool) -> io::Result<Blocks> {
        let _changing = self.lock()?;
        self.raise_open_files();
        let used = used_blocks(&self.processes);
        for region in Region::all() {
            if self.region_holder(region) != Some(Holder::Whole(data_dir.to_owned())) {
                continue;
            }
            if !is_stale(
                &self.region_entry(region),
                region.blocks().any(|block| used.contains(&block)),
            )? {
                return self.hold_whole(region);
            }
            fs::remove_file(self.region_entry(region))?;
        }
        let mut blocks = Blocks::new();
        for block in Block::all() {
            let Some((index, holder)) = self.block_holder(block) else {
                continue;
            };
            if holder != data_dir {
                continue;
            }
            let is_valid = match self.region_holder(block.region()) {
                Some(Holder::Shared) => true,
                Some(Holder::Whole(_)) => false,
                // Removed by an earlier version, for which it was stale.
                None => !block.region().blocks().any(|block| used.contains(&block)),
            };
            if is_valid && !blocks.contains_key(&index) {
                blocks.insert(index, self.hold(block, index, data_dir)?);
            } else {
                fs::remove_file(self.block_entry(block))?;
            }
        }
        if starts && !blocks.contains_key(&0) {
            blocks.insert(0, self.take(data_dir, 0, &used)?);
        }
        Ok(blocks)
    }

    /// Claims another block, for the slots of a data directory with this number.
    ///
    /// # Errors
    /// As [`Self::claim`].
    pub(crate) fn claim_another(&self, data_dir: &Path, index: u32) -> io::Result<Held> {
        let _changing = self.lock()?;
        self.take(data_dir, index, &used_blocks(&self.processes))
    }

    /// Releases a block that a data directory no longer needs.
    ///
    /// # Errors
    /// When the registry cannot be written.
    pub(crate) fn give_back(&self, block: Block) -> io::Result<()> {
        let _changing = self.lock()?;
        remove_if_there(&self.block_entry(block))?;
        self.tidy(block.region())
    }

    /// Releases the blocks of a data directory, and with the last one restores everything else.
    ///
    /// # Errors
    /// When the registry cannot be written.
    pub(crate) fn release(&self, data_dir: &Path) -> io::Result<()> {
        let _changing = self.lock()?;
        let used = used_blocks(&self.processes);
        for block in Block::all() {
            let entry = self.block_entry(block);
            if let Some((_, holder)) = self.block_holder(block)
                && (holder == data_dir || is_stale(&entry, used.contains(&block))?)
            {
                fs::remove_file(entry)?;
            }
        }
        for region in Region::all() {
            let entry = self.region_entry(region);
            match self.region_holder(region) {
                Some(Holder::Shared) => self.tidy(region)?,
                Some(Holder::Whole(holder))
                    if holder == data_dir || is_stale(&entry, region.blocks().any(|block| used.contains(&block)))? =>
                {
                    fs::remove_file(entry)?;
                }
                _ => {}
            }
        }
        let is_last = Region::all().all(|region| self.region_holder(region).is_none());
        if is_last && Block::all().all(|block| self.block_holder(block).is_none()) {
            self.restore_open_files();
            // Others may wait for the lock, so its file is removed last, and they check whether it still exists.
            let _ = fs::remove_dir(self.directory.join("blocks"));
            let _ = fs::remove_dir(self.directory.join("regions"));
            let _ = fs::remove_file(self.directory.join("lock"));
            let _ = fs::remove_dir(&self.directory);
        }
        Ok(())
    }

    /// Takes a block that is not in use. Regions that are shared already come first: what remains is for earlier versions.
    fn take(&self, data_dir: &Path, index: u32, used: &BTreeSet<Block>) -> io::Result<Held> {
        let preferred = Region::of_hash(path_hash(data_dir));
        let mut holders = BTreeSet::new();
        let (shared, others): (Vec<Region>, Vec<Region>) = preferred
            .iter_from()
            .partition(|region| self.region_holder(*region) == Some(Holder::Shared));
        for region in shared {
            if let Some(block) = self.free_in(region, used, &mut holders)? {
                return self.hold(block, index, data_dir);
            }
        }
        for region in others {
            let is_used = region.blocks().any(|block| used.contains(&block));
            match self.region_holder(region) {
                None if is_used => {
                    // It may have the whole region.
                    holders.insert("processes of an unknown platform".to_owned());
                    continue;
                }
                Some(Holder::Whole(holder)) if !is_stale(&self.region_entry(region), is_used)? => {
                    holders.insert(holder.display().to_string());
                    continue;
                }
                _ => {}
            }
            if let Some(block) = self.free_in(region, used, &mut holders)? {
                remove_if_there(&self.region_entry(region))?;
                return self.hold(block, index, data_dir);
            }
        }
        let holders: Vec<String> = holders.into_iter().collect();
        let why = format!(
            "all id ranges for sandboxes are in use on this host, by {}: end one of them with `ringfence down`",
            holders.join(", ")
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, why))
    }

    /// A block of a region that is not in use.
    fn free_in(
        &self,
        region: Region,
        used: &BTreeSet<Block>,
        holders: &mut BTreeSet<String>,
    ) -> io::Result<Option<Block>> {
        for block in region.blocks() {
            let is_used = used.contains(&block);
            match self.block_holder(block) {
                None if !is_used => return Ok(Some(block)),
                None => holders.insert("processes of an unknown platform".to_owned()),
                Some(_) if is_stale(&self.block_entry(block), is_used)? => return Ok(Some(block)),
                Some((_, holder)) => holders.insert(holder.display().to_string()),
            };
        }
        Ok(None)
    }

    /// Writes and locks the entries of a block.
    fn hold(&self, block: Block, index: u32, data_dir: &Path) -> io::Result<Held> {
        // The region first: an entry of a block alone would not keep an earlier version away.
        let region = locked(&self.region_entry(block.region()), SHARED.as_bytes())?;
        let content = [index.to_string().as_bytes(), b" ", data_dir.as_os_str().as_bytes()].concat();
        let entry = locked(&self.block_entry(block), &content)?;
        Ok(Held {
            block,
            locks: vec![Arc::new(entry), Arc::new(region)],
            is_of_whole_region: false,
        })
    }

    /// The region that an earlier version gave to a data directory, with the blocks in the order of its slots.
    fn hold_whole(&self, region: Region) -> io::Result<Blocks> {
        let lock = open(&self.region_entry(region))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared)?;
        let lock = Arc::new(lock);
        let held = region.blocks().map(|block| Held {
            block,
            locks: vec![Arc::clone(&lock)],
            is_of_whole_region: true,
        });
        Ok((0..BLOCKS_PER_REGION).zip(held).collect())
    }

    /// Removes the entry of a shared region of which nobody has a block any more.
    fn tidy(&self, region: Region) -> io::Result<()> {
        let is_shared = self.region_holder(region) == Some(Holder::Shared);
        if is_shared && region.blocks().all(|block| self.block_holder(block).is_none()) {
            fs::remove_file(self.region_entry(region))
        } else {
            Ok(())
        }
    }

    fn region_entry(&self, region: Region) -> PathBuf {
        self.directory.join(format!("regions/{region}"))
    }

    fn block_entry(&self, block: Block) -> PathBuf {
        self.directory.join(format!("blocks/{block}"))
    }

    fn region_holder(&self, region: Region) -> Option<Holder> {
        let bytes = fs::read(self.region_entry(region)).ok()?;
        Some(if bytes == SHARED.as_bytes() {
            Holder::Shared
        } else {
            Holder::Whole(path_of(&bytes))
        })
    }

    /// The data directory that a block belongs to, and for which of its slots; an empty path when its platform died before
    /// it had written it.
    fn block_holder(&self, block: Block) -> Option<(u32, PathBuf)> {
        let bytes = fs::read(self.block_entry(block)).ok()?;
        let unknown = (0, PathBuf::new());
        let Some(space) = bytes.iter().position(|byte| *byte == b' ') else {
            return Some(unknown);
        };
        let index = std::str::from_utf8(&bytes[..space])
            .ok()
            .and_then(|text| text.parse().ok());
        let known = index.filter(|index| *index < BLOCKS_PER_REGION);
        Some(known.map_or(unknown, |index| (index, path_of(&bytes[space + 1..]))))
    }

    /// Waits for exclusive access to the registry.
    fn lock(&self) -> io::Result<Exclusive> {
        let path = self.directory.join("lock");
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            let mut private = DirBuilder::new();
            private.mode(0o700).recursive(true);
            for entries in ["regions", "blocks"] {
                private.create(self.directory.join(entries))?;
            }
            let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
            let lock = match rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600)) {
                // Removed by the last `down` at the same time.
                Err(rustix::io::Errno::NOENT) => continue,
                other => other?,
            };
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    let file = rustix::fs::fstat(&lock)?;
                    let same = |now: rustix::fs::Stat| (now.st_dev, now.st_ino) == (file.st_dev, file.st_ino);
                    if rustix::fs::stat(&path).is_ok_and(same) && self.has_directories() {
                        return Ok(Exclusive(lock));
                    }
                }
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(error) => return Err(error.into()),
            }
            if Instant::now() > deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("{} is locked by another ringfence process", path.display()),
                ));
            }
            std::thread::sleep(LOCK_PAUSE);
        }
    }

    fn has_directories(&self) -> bool {
        ["regions", "blocks"]
            .iter()
            .all(|entries| self.directory.join(entries).exists())
    }

    /// Raises the host-wide limit on open files, as service managers do at boot: it counts the files of all sandboxes,
    /// and only the host's root is exempt, so one sandbox could exhaust it for the others. What each sandbox may open
    /// is limited by its memory, to which open files are charged.
    fn raise_open_files(&self) {
        let Some(have) = number(&self.file_max) else { return };
        if have >= i64::MAX.unsigned_abs() {
            return;
        }
        // Save the old value first: a platform that dies in between must not leave the raised value as the one to
        // restore.
        let noted = self.directory.join("file-max");
        if noted.exists() || fs::write(&noted, have.to_string()).is_ok() {
            let _ = fs::write(&self.file_max, i64::MAX.to_string());
        }
    }

    /// Restores the limit, unless another program has changed it meanwhile.
    fn restore_open_files(&self) {
        let noted = self.directory.join("file-max");
        if let Some(before) = number(&noted) {
            if number(&self.file_max) == Some(i64::MAX.unsigned_abs()) {
                let _ = fs::write(&self.file_max, before.to_string());
            }
            let _ = fs::remove_file(&noted);
        }
    }
}

/// A lock that no other process may have. Dropping it unlocks the file, which closing it alone would not do: a child that
/// another thread clones meanwhile has the file open, too, until it executes its program.
#[derive(Debug)]
struct Exclusive(OwnedFd);

impl Drop for Exclusive {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn path_of(bytes: &[u8]) -> PathBuf {
    Path::new(std::ffi::OsStr::from_bytes(bytes)).to_owned()
}

fn open(entry: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open(entry, flags, Mode::from_raw_mode(0o600))?)
}

/// Writes an entry, and locks it. Launchers of an earlier platform of the directory hold the same shared lock.
fn locked(entry: &Path, content: &[u8]) -> io::Result<OwnedFd> {
    let lock = open(entry)?;
    if fs::read(entry)? != content {
        rustix::fs::ftruncate(&lock, 0)?;
        rustix::io::pwrite(&lock, content, 0)?;
    }
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared)?;
    Ok(lock)
}

/// Whether an entry is stale: its platform does not run, and no process has its ids.
fn is_stale(entry: &Path, is_used: bool) -> io::Result<bool> {
    if is_used {
        return Ok(false);
    }
    let file = open(entry)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {
            drop(Exclusive(file));
            Ok(true)
        }
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn remove_if_there(entry: &Path) -> io::Result<()> {
    if_there(fs::remove_file(entry)).map(drop)
}

/// The first id on the host of the ids of a process; none if it has those of the host.
pub(crate) fn first_id(pid: i32) -> io::Result<u32> {
    let map = fs::read_to_string(format!("/proc/{pid}/uid_map"))?;
    let mut words = map.split_ascii_whitespace();
    let first = (words.next() == Some("0")).then(|| words.next()).flatten();
    let first = first.and_then(|first| first.parse().ok()).filter(|first| *first > 0);
    first.ok_or_else(|| io::Error::other("the agent has no ids of its own"))
}

/// Blocks of which some process has ids. This also detects other programs that give id ranges to containers.
fn used_blocks(processes: &Path) -> BTreeSet<Block> {
    let mut used = BTreeSet::new();
    let Ok(entries) = fs::read_dir(processes) else {
        return used;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) {
            let map = fs::read_to_string(processes.join(format!("{pid}/uid_map"))).unwrap_or_default();
            used.extend(blocks_of_map(&map));
        }
    }
    used
}

/// Blocks that an id map maps into. A map that begins at the host's root is not a reserved range.
fn blocks_of_map(map: &str) -> impl Iterator<Item = Block> {
    map.lines().flat_map(|line| {
        let numbers: Vec<u64> = line
            .split_ascii_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let range = match numbers[..] {
            [_, first, length] if first > 0 => first..first.saturating_add(length),
            _ => 0..0,
        };
        Block::all().filter(move |block| {
            let ids = block.ids();
            range.start < ids.end && ids.start < range.end
        })
    })
}

#[cfg(test)]
mod tests;

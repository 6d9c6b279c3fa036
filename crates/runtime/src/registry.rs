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
    /// Data directories that have blocks of it.
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
        match is_shared && region.blocks().all(|block| self.block_holder(block).is_none()) {
            true => fs::remove_file(self.region_entry(region)),
            false => Ok(()),
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
        Some(match bytes == SHARED.as_bytes() {
            true => Holder::Shared,
            false => Holder::Whole(path_of(&bytes)),
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
    fn lock(&self) -> io::Result<OwnedFd> {
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
                        return Ok(lock);
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
    match rustix::fs::flock(open(entry)?, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn remove_if_there(entry: &Path) -> io::Result<()> {
    match fs::remove_file(entry) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
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
mod tests {
    use super::*;

    fn registry(at: &Path) -> Registry {
        fs::write(at.join("file-max"), "1000\n").unwrap();
        Registry {
            directory: at.join("run/ringfence"),
            file_max: at.join("file-max"),
            processes: at.join("processes"),
        }
    }

    /// The block for the first slots.
    fn first(blocks: &Blocks) -> Block {
        blocks[&0].block
    }

    /// Claims as an earlier version does.
    fn claim_whole(registry: &Registry, region: Region, data_dir: &str) -> OwnedFd {
        let _changing = registry.lock().unwrap();
        locked(&registry.region_entry(region), data_dir.as_bytes()).unwrap()
    }

    /// Whether an earlier version would take over a region of which no process has ids.
    fn is_free_to_earlier_versions(registry: &Registry, region: Region) -> bool {
        let entry = registry.region_entry(region);
        !entry.exists() || is_stale(&entry, false).unwrap()
    }

    #[test]
    fn directories_with_colliding_hashes_get_separate_blocks() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let wanted = Region::of_hash(path_hash(Path::new("/data/0")));
        let collides = (1..)
            .map(|number| PathBuf::from(format!("/data/{number}")))
            .find(|path| Region::of_hash(path_hash(path)) == wanted)
            .unwrap();
        let one = registry.claim(Path::new("/data/0"), true).unwrap();
        let two = registry.claim(&collides, true).unwrap();
        let blocks = (first(&one), first(&two));
        assert_ne!(blocks.0, blocks.1);
        // Both keep their blocks, whatever the order of the next claims.
        drop((one, two));
        let two = registry.claim(&collides, true).unwrap();
        let one = registry.claim(Path::new("/data/0"), true).unwrap();
        assert_eq!((first(&one), first(&two)), blocks);
    }

    #[test]
    fn the_last_release_restores_everything() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let max = || fs::read_to_string(temp.path().join("file-max")).unwrap();
        let one = registry.claim(Path::new("/one"), true).unwrap();
        let another = registry.claim_another(Path::new("/one"), 1).unwrap();
        let two = registry.claim(Path::new("/two"), true).unwrap();
        assert_eq!(max(), i64::MAX.to_string());
        // The launchers of a platform hold its locks, too, and end shortly after the release.
        registry.release(Path::new("/one")).unwrap();
        drop((one, another));
        assert_eq!(max(), i64::MAX.to_string(), "the second still needs it");
        registry.release(Path::new("/two")).unwrap();
        drop(two);
        assert_eq!(max(), "1000");
        assert!(!temp.path().join("run/ringfence").exists());
        registry.claim(Path::new("/one"), true).unwrap();
        // A value set by another program is kept.
        fs::write(temp.path().join("file-max"), "77").unwrap();
        registry.release(Path::new("/one")).unwrap();
        assert_eq!(max(), "77");
    }

    #[test]
    fn blocks_are_taken_over_only_from_platforms_that_are_gone() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let mut running = Vec::new();
        let refused = loop {
            match registry.claim(&PathBuf::from(format!("/data/{}", running.len())), true) {
                Ok(blocks) => running.push(blocks),
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert!(refused.to_string().contains("/data/0"), "{refused}");
        let blocks: BTreeSet<Block> = running.iter().map(first).collect();
        assert_eq!(blocks.len(), running.len(), "no block twice");
        assert_eq!(blocks.len(), Block::all().count());
        assert!(registry.claim_another(Path::new("/data/0"), 1).is_err());
        // Who only ends sandboxes needs none.
        assert!(registry.claim(Path::new("/new"), false).unwrap().is_empty());
        let freed = first(&running.pop().unwrap());
        assert_eq!(first(&registry.claim(Path::new("/new"), true).unwrap()), freed);
    }

    #[test]
    fn further_blocks_are_found_again_until_they_are_given_back() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let data_dir = Path::new("/with spaces in it");
        let held = registry.claim(data_dir, true).unwrap();
        let had = first(&held);
        let another = registry.claim_another(data_dir, 7).unwrap().block;
        assert_ne!(another, had);
        let blocks = |blocks: &Blocks| {
            blocks
                .iter()
                .map(|(index, held)| (*index, held.block))
                .collect::<Vec<_>>()
        };
        let again = registry.claim(data_dir, true).unwrap();
        assert_eq!(blocks(&again), [(0, had), (7, another)]);
        registry.give_back(another).unwrap();
        assert_eq!(blocks(&registry.claim(data_dir, true).unwrap()), [(0, had)]);
        assert_eq!(registry.claim_another(Path::new("/other"), 0).unwrap().block, another);
    }

    #[test]
    fn a_region_is_not_free_to_earlier_versions_while_one_of_those_that_share_it_runs() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let one = registry.claim(Path::new("/one"), true).unwrap();
        let two = registry.claim(Path::new("/two"), true).unwrap();
        let region = first(&one).region();
        assert_eq!(first(&two).region(), region, "shared before another one is begun");
        let content = fs::read_to_string(registry.region_entry(region)).unwrap();
        assert!(
            !content.starts_with('/'),
            "no data directory of an earlier version is called so"
        );
        assert!(!is_free_to_earlier_versions(&registry, region));
        drop(one);
        assert!(!is_free_to_earlier_versions(&registry, region));
        drop(two);
        assert!(is_free_to_earlier_versions(&registry, region));
        // One that has taken it over has it as a whole, and entries of its blocks are void.
        fs::remove_file(registry.region_entry(region)).unwrap();
        let _whole = claim_whole(&registry, region, "/earlier");
        let one = registry.claim(Path::new("/one"), true).unwrap();
        assert_ne!(first(&one).region(), region);
        assert!(registry.region_holder(region) == Some(Holder::Whole("/earlier".into())));
    }

    #[test]
    fn what_earlier_versions_have_is_never_shared_while_they_run() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let mut whole: Vec<OwnedFd> = Region::all()
            .map(|region| claim_whole(&registry, region, &format!("/earlier/{region}")))
            .collect();
        let refused = registry.claim(Path::new("/new"), true).unwrap_err().to_string();
        assert!(refused.contains("/earlier/12"), "{refused}");
        drop(whole.pop());
        let taken = first(&registry.claim(Path::new("/new"), true).unwrap()).region();
        assert_eq!(Some(taken), Region::all().last());
    }

    #[test]
    fn a_region_of_an_earlier_version_is_kept_while_it_is_locked_and_given_up_afterwards() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let region = Region::all().nth(3).unwrap();
        let lock = claim_whole(&registry, region, "/one");
        let blocks = registry.claim(Path::new("/one"), true).unwrap();
        assert!(blocks.values().map(|held| held.block).eq(region.blocks()));
        assert!(blocks.values().all(|held| held.is_of_whole_region));
        // Nobody runs, and no process has its ids.
        drop((lock, blocks));
        let blocks = registry.claim(Path::new("/one"), true).unwrap();
        assert_eq!(blocks.len(), 1);
        assert!(!blocks[&0].is_of_whole_region);
    }

    #[test]
    fn ids_of_processes_are_not_given_to_others() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let process = temp.path().join("processes/42");
        fs::create_dir_all(&process).unwrap();
        let has =
            |block: Block| fs::write(process.join("uid_map"), format!("0 {} 65536\n", block.ids().start)).unwrap();
        // A sandbox of an earlier version keeps the whole region for its data directory, and for no other.
        let region = Region::of_hash(path_hash(Path::new("/new")));
        has(region.blocks().nth(2).unwrap());
        drop(claim_whole(&registry, region, "/earlier"));
        assert_ne!(
            first(&registry.claim(Path::new("/new"), true).unwrap()).region(),
            region
        );
        let blocks = registry.claim(Path::new("/earlier"), true).unwrap();
        assert!(blocks.values().all(|held| held.is_of_whole_region));
        // Without an entry nobody knows how much of the region is somebody's.
        fs::remove_file(registry.region_entry(region)).unwrap();
        registry.release(Path::new("/new")).unwrap();
        assert_ne!(
            first(&registry.claim(Path::new("/new"), true).unwrap()).region(),
            region
        );
        // A block whose platform is gone, while one of its sandboxes is not.
        let block = first(&registry.claim(Path::new("/gone"), true).unwrap());
        has(block);
        registry.release(Path::new("/new")).unwrap();
        assert_ne!(first(&registry.claim(Path::new("/other"), true).unwrap()), block);
        assert_eq!(first(&registry.claim(Path::new("/gone"), true).unwrap()), block);
    }

    #[test]
    fn concurrent_claims_get_different_blocks() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let claims: Vec<Blocks> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..4)
                .map(|number| {
                    let registry = &registry;
                    scope.spawn(move || registry.claim(&PathBuf::from(format!("/at-once/{number}")), true))
                })
                .collect();
            starts.into_iter().map(|start| start.join().unwrap().unwrap()).collect()
        });
        let blocks: BTreeSet<Block> = claims.iter().map(first).collect();
        assert_eq!(blocks.len(), claims.len());
    }

    #[test]
    fn an_empty_entry_is_taken_over() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let block = first(&registry.claim(Path::new("/one"), true).unwrap());
        fs::write(registry.block_entry(block), "").unwrap();
        assert_eq!(first(&registry.claim(Path::new("/one"), true).unwrap()), block);
        fs::write(registry.region_entry(block.region()), "").unwrap();
        registry.claim(Path::new("/one"), true).unwrap();
    }

    #[test]
    fn used_blocks_are_read_from_id_maps() {
        let blocks = |map: &str| blocks_of_map(map).collect::<Vec<_>>();
        let first = Block::all().next().unwrap();
        let base = first.ids().start;
        assert_eq!(blocks("         0          0 4294967295\n"), []);
        assert_eq!(blocks("0 100000 65536\n"), []);
        assert_eq!(blocks(&format!("0 {base} 65536\n")), [first]);
        assert_eq!(blocks(&format!("0 {} 65536\n", first.ids().end - 65536)), [first]);
        assert_eq!(blocks(&format!("0 {} 65537\n", first.ids().end - 65536)).len(), 2);
        assert_eq!(blocks(&format!("0 {} 1\n", base - 1)), []);
        assert_eq!(blocks(&format!("0 {} 2\n", base - 1)), [first]);
        assert_eq!(blocks("0 1000000 4100000000\n").len(), Block::all().count());
        assert_eq!(blocks("garbage\n1 2\n"), []);
    }
}

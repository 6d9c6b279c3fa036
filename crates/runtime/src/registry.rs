//! The host registry, shared by the platforms of one host: the regions, and kernel settings that are restored at the
//! end.
//!
//! ```text
//!   /run/ringfence/lock          held for the moment of a change
//!   /run/ringfence/regions/N     the data directory that has region N; locked while its platform runs
//!   /run/ringfence/file-max      what `fs.file-max` was before the first platform raised it
//! ```
//!
//! It is in `/run` because none of it matters after a reboot: a region is needed while processes with its ids live. A
//! data directory keeps its region as long as its entry exists; `down` removes the entry. Correctness does not depend
//! on that: an entry may be taken over if its platform does not run and no process has its ids, and a region without an
//! entry is used only when no process has ids of it. A data directory is identified by its path, as its control groups
//! are, so a copied or moved one counts as another.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::identity::user_namespace;
use crate::slot::{Region, path_hash};

/// Directory of the registry.
const DIRECTORY: &str = "/run/ringfence";
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
}

/// A region claimed for a data directory.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) region: Region,
    /// Locked by the platform and its launchers.
    pub(crate) lock: OwnedFd,
}

impl Registry {
    /// The registry of this host.
    pub(crate) fn of_host() -> Self {
        Self {
            directory: DIRECTORY.into(),
            file_max: FILE_MAX.into(),
        }
    }

    /// Claims the region that a data directory already has, or a free one. `own` returns the user namespaces of the
    /// directory's existing sandboxes: those of an earlier version have ids without an entry.
    ///
    /// # Errors
    /// When every region is in use, or the registry cannot be written.
    pub(crate) fn claim(&self, data_dir: &Path, own: &dyn Fn() -> BTreeSet<u64>) -> io::Result<Claim> {
        let _changing = self.lock()?;
        self.raise_open_files();
        let kept = Region::all().find(|region| self.holder(*region).as_deref() == Some(data_dir));
        let region = match kept {
            Some(region) => region,
            None => self.free_region(data_dir, &own())?,
        };
        let lock = self.open(region)?;
        rustix::io::pwrite(&lock, data_dir.as_os_str().as_bytes(), 0)?;
        // Launchers of an earlier platform of this directory hold the same shared lock.
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared)?;
        Ok(Claim { region, lock })
    }

    /// Releases the region of a data directory, and with the last one restores everything else.
    ///
    /// # Errors
    /// When the registry cannot be written.
    pub(crate) fn release(&self, data_dir: &Path) -> io::Result<()> {
        let _changing = self.lock()?;
        for region in Region::all().filter(|region| self.holder(*region).as_deref() == Some(data_dir)) {
            fs::remove_file(self.entry(region))?;
        }
        let used = used_regions(&BTreeSet::new());
        for region in Region::all() {
            if self.holder(region).is_some() && self.is_stale(region, &used)? {
                fs::remove_file(self.entry(region))?;
            }
        }
        if Region::all().all(|region| self.holder(region).is_none()) {
            self.restore_open_files();
            // Others may wait for the lock, so its file is removed last, and they check whether it still exists.
            let _ = fs::remove_dir(self.directory.join("regions"));
            let _ = fs::remove_file(self.directory.join("lock"));
            let _ = fs::remove_dir(&self.directory);
        }
        Ok(())
    }

    /// A region that is not in use, starting with the preferred one of the directory's path.
    fn free_region(&self, data_dir: &Path, own: &BTreeSet<u64>) -> io::Result<Region> {
        let used = used_regions(own);
        let preferred = Region::of_hash(path_hash(data_dir));
        let mut holders = Vec::new();
        for region in preferred.iter_from() {
            match self.holder(region) {
                None if !used.contains(&region) => return Ok(region),
                None => holders.push("processes of an unknown platform".to_owned()),
                Some(_) if self.is_stale(region, &used)? => {
                    fs::remove_file(self.entry(region))?;
                    return Ok(region);
                }
                Some(holder) => holders.push(holder.display().to_string()),
            }
        }
        Err(io::Error::other(format!(
            "all id ranges for sandboxes are in use on this host, by {}: end one of them with `ringfence down`",
            holders.join(", ")
        )))
    }

    /// Whether an entry is stale: its platform does not run, and no process has its ids.
    fn is_stale(&self, region: Region, used: &BTreeSet<Region>) -> io::Result<bool> {
        if used.contains(&region) {
            return Ok(false);
        }
        let lock = self.open(region)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn entry(&self, region: Region) -> PathBuf {
        self.directory.join(format!("regions/{region}"))
    }

    fn open(&self, region: Region) -> io::Result<OwnedFd> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
        Ok(rustix::fs::open(self.entry(region), flags, Mode::from_raw_mode(0o600))?)
    }

    /// The data directory that a region belongs to; empty when its platform died before it had written it.
    fn holder(&self, region: Region) -> Option<PathBuf> {
        let bytes = fs::read(self.entry(region)).ok()?;
        Some(Path::new(std::ffi::OsStr::from_bytes(&bytes)).to_owned())
    }

    /// Waits for exclusive access to the registry.
    fn lock(&self) -> io::Result<OwnedFd> {
        let path = self.directory.join("lock");
        let deadline = Instant::now() + LOCK_TIMEOUT;
        loop {
            let mut private = DirBuilder::new();
            private
                .mode(0o700)
                .recursive(true)
                .create(self.directory.join("regions"))?;
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
                    if rustix::fs::stat(&path).is_ok_and(same) && self.directory.join("regions").exists() {
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

/// Regions of which some process has ids, except processes in the user namespaces `own`. This also detects other
/// programs that give id ranges to containers.
fn used_regions(own: &BTreeSet<u64>) -> BTreeSet<Region> {
    let mut used = BTreeSet::new();
    let Ok(entries) = fs::read_dir("/proc") else {
        return used;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let map = fs::read_to_string(format!("/proc/{pid}/uid_map")).unwrap_or_default();
        let regions: Vec<Region> = regions_of_map(&map).collect();
        if !regions.is_empty() && !user_namespace(pid).is_ok_and(|namespace| own.contains(&namespace)) {
            used.extend(regions);
        }
    }
    used
}

/// Regions that an id map maps into. A map that begins at the host's root is not a reserved range.
fn regions_of_map(map: &str) -> impl Iterator<Item = Region> {
    map.lines().flat_map(|line| {
        let numbers: Vec<u64> = line
            .split_ascii_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let range = match numbers[..] {
            [_, first, length] if first > 0 => first..first.saturating_add(length),
            _ => 0..0,
        };
        Region::all().filter(move |region| {
            let ids = region.ids();
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
        }
    }

    fn no_namespaces() -> BTreeSet<u64> {
        BTreeSet::new()
    }

    #[test]
    fn directories_with_colliding_hashes_get_separate_regions() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let wanted = Region::of_hash(path_hash(Path::new("/data/0")));
        let collides = (1..)
            .map(|number| PathBuf::from(format!("/data/{number}")))
            .find(|path| Region::of_hash(path_hash(path)) == wanted)
            .unwrap();
        let first = registry.claim(Path::new("/data/0"), &no_namespaces).unwrap();
        let second = registry.claim(&collides, &no_namespaces).unwrap();
        assert_ne!(first.region, second.region);
        // Both keep their regions, whatever the order of the next claims.
        let regions = (first.region, second.region);
        drop((first, second));
        let second = registry.claim(&collides, &no_namespaces).unwrap();
        let first = registry.claim(Path::new("/data/0"), &no_namespaces).unwrap();
        assert_eq!((first.region, second.region), regions);
    }

    #[test]
    fn the_last_release_restores_everything() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let max = || fs::read_to_string(temp.path().join("file-max")).unwrap();
        let first = registry.claim(Path::new("/one"), &no_namespaces).unwrap();
        let second = registry.claim(Path::new("/two"), &no_namespaces).unwrap();
        assert_eq!(max(), i64::MAX.to_string());
        // The launchers of a platform hold its lock, too, and end shortly after the release.
        registry.release(Path::new("/one")).unwrap();
        drop(first);
        assert_eq!(max(), i64::MAX.to_string(), "the second still needs it");
        registry.release(Path::new("/two")).unwrap();
        drop(second);
        assert_eq!(max(), "1000");
        assert!(!temp.path().join("run/ringfence").exists());
        registry.claim(Path::new("/one"), &no_namespaces).unwrap();
        // A value set by another program is kept.
        fs::write(temp.path().join("file-max"), "77").unwrap();
        registry.release(Path::new("/one")).unwrap();
        assert_eq!(max(), "77");
    }

    #[test]
    fn regions_are_taken_over_only_from_platforms_that_are_gone() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let mut running = Vec::new();
        let refused = loop {
            match registry.claim(&PathBuf::from(format!("/data/{}", running.len())), &no_namespaces) {
                Ok(claim) => running.push(claim),
                Err(error) => break error.to_string(),
            }
        };
        let regions: BTreeSet<Region> = running.iter().map(|claim| claim.region).collect();
        assert_eq!(regions.len(), running.len(), "no region twice");
        assert!(refused.contains("/data/0"), "{refused}");
        let freed = running.pop().unwrap().region;
        assert_eq!(registry.claim(Path::new("/new"), &no_namespaces).unwrap().region, freed);
    }

    #[test]
    fn concurrent_claims_get_different_regions() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let claims: Vec<Claim> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..4)
                .map(|number| {
                    let registry = &registry;
                    scope.spawn(move || registry.claim(&PathBuf::from(format!("/at-once/{number}")), &no_namespaces))
                })
                .collect();
            starts.into_iter().map(|start| start.join().unwrap().unwrap()).collect()
        });
        let regions: BTreeSet<Region> = claims.iter().map(|claim| claim.region).collect();
        assert_eq!(regions.len(), claims.len());
    }

    #[test]
    fn an_empty_entry_is_taken_over() {
        let temp = tempfile::tempdir().unwrap();
        let registry = registry(temp.path());
        let region = registry.claim(Path::new("/one"), &no_namespaces).unwrap().region;
        fs::write(registry.entry(region), "").unwrap();
        assert_eq!(
            registry.claim(Path::new("/one"), &no_namespaces).unwrap().region,
            region
        );
    }

    #[test]
    fn used_regions_are_read_from_id_maps() {
        let regions = |map: &str| regions_of_map(map).collect::<Vec<_>>();
        let first = Region::all().next().unwrap();
        let base = first.ids().start;
        assert_eq!(regions("         0          0 4294967295\n"), []);
        assert_eq!(regions("0 100000 65536\n"), []);
        assert_eq!(regions(&format!("0 {base} 65536\n")), [first]);
        assert_eq!(regions(&format!("0 {} 1\n", base - 1)), []);
        assert_eq!(regions(&format!("0 {} 2\n", base - 1)), [first]);
        assert_eq!(regions("0 1000000 4000000000\n").len(), Region::all().count());
        assert_eq!(regions("garbage\n1 2\n"), []);
    }
}

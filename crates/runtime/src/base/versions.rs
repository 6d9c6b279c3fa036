//! The versions of `base` in a data directory: created when the host's packages change, kept while they are used.
//!
//! ```text
//!   base/<key>/root, base/<key>/usr   the two lower layers of one version
//!   base/<key>/host                   a copy of the host's `/usr`, where sandboxes cannot be shown itself
//!   base/<key>/bytes                  the space that the copy takes
//!   base/<key>/users                  of a version that was replaced: the sandboxes that existed at that time
//!   base/current                      a link to the version that new sandboxes use
//! ```
//!
//! No step requires the previous one to be finished: after a crash at any point the next platform continues. A sandbox
//! reads `current` after its cgroup was created, so the names that are read after `current` has changed include every
//! sandbox that may use an older version.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use super::{host, packages, root, usr};
use crate::files::if_there;
use crate::mapped::can_map_ids;
use crate::usage::disk_available;

/// The link to the version that new sandboxes use.
pub(crate) const CURRENT: &str = "current";
/// A version that is not complete.
const UNFINISHED: &str = "unfinished";
/// A version that is being removed.
const REMOVED: &str = "removed";
/// In a replaced version: names of the sandboxes that may use it.
const USERS: &str = "users";
/// In a version with a copy of `/usr`: the space that the copy takes, in bytes.
const BYTES: &str = "bytes";

/// Sources of a version, below the root: a change of any of them changes its key.
const SOURCES: [&str; 28] = [
    packages::STATUS,
    "var/lib/dpkg/diversions",
    "var/lib/dpkg/statoverride",
    "var/lib/apt/extended_states",
    "var/lib/rpm/rpmdb.sqlite",
    "usr/lib/sysimage/rpm/rpmdb.sqlite",
    "var/lib/pacman/local",
    "etc/alternatives",
    "etc/apt/keyrings",
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/apt/trusted.gpg",
    "etc/apt/trusted.gpg.d",
    "etc/ca-certificates.conf",
    "etc/ca-certificates/extracted",
    "etc/crypto-policies",
    "etc/ld.so.cache",
    "etc/ld.so.conf.d",
    "etc/pki/ca-trust/extracted/pem",
    "etc/skel",
    "etc/ssl/certs",
    "etc/ssl/certs/ca-certificates.crt",
    "usr/bin/dpkg",
    "usr/bin/npm",
    "usr/bin/python",
    "usr/bin/python3",
    "usr/etc/npmrc",
    "usr/lib",
];

/// A version that matches the host.
#[derive(Debug)]
pub(crate) struct Made {
    name: String,
    /// Whether it has no name yet, because it was never current.
    is_new: bool,
}

/// The versions in a data directory.
#[derive(Debug)]
pub(crate) struct Versions {
    host: PathBuf,
    all: PathBuf,
}

impl Versions {
    /// The versions below `data_dir`, created from the host with this root.
    pub(crate) fn new(host: &Path, data_dir: &Path) -> Self {
        Self {
            host: host.to_owned(),
            all: data_dir.join("base"),
        }
    }

    /// The directory of all versions.
    pub(crate) fn path(&self) -> &Path {
        &self.all
    }

    /// Whether there is a current version.
    pub(crate) fn has_current(&self) -> bool {
        self.all.join(CURRENT).is_dir()
    }

    /// What tells the directories of the version that new sandboxes use from those of any other, also of one that was
    /// removed and made again.
    pub(crate) fn current(&self) -> Option<String> {
        let name = fs::read_link(self.all.join(CURRENT)).ok()?;
        let mut text = name.to_str()?.to_owned();
        for part in ["root", "usr"] {
            let found = fs::metadata(self.all.join(&name).join(part)).ok()?;
            let _ = write!(text, " {} {}.{}", found.ino(), found.ctime(), found.ctime_nsec());
        }
        Some(text)
    }

    /// The version that the sandbox of this name uses, as far as that is known: the current one, unless it existed when
    /// another one was replaced. Then one with the same packages, if all that it may use have the same.
    ///
    /// # Errors
    /// When the versions cannot be read.
    pub(crate) fn of(&self, name: &str) -> io::Result<Option<String>> {
        let Some(current) = self.current() else {
            return Ok(None);
        };
        let mut of = current.clone();
        for entry in fs::read_dir(&self.all)? {
            let entry = entry?;
            let version = entry.file_name().to_string_lossy().into_owned();
            let is_current = current.split(' ').next() == Some(&version);
            if is_current || !entry.file_type()?.is_dir() || [UNFINISHED, REMOVED].contains(&version.as_str()) {
                continue;
            }
            match fs::read_to_string(entry.path().join(USERS)) {
                Ok(users) if !users.lines().any(|user| user == name) => continue,
                // Without the file it was replaced, and nobody has been recorded yet.
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            if packages_of(&version) != packages_of(&current) {
                return Ok(None);
            }
            of = version;
        }
        Ok(Some(of))
    }

    /// Creates the version that matches the host now, unless it exists, and makes it current. Returns whether the
    /// current version changed.
    ///
    /// # Errors
    /// When the host is not supported or the data directory cannot be written.
    pub(crate) fn update_current(&self) -> io::Result<bool> {
        self.make_current(&self.make()?)
    }

    /// Creates the version that matches the host now, unless it exists. A copy of `/usr` can take minutes, and nothing has to wait
    /// for it: what is current does not change before [`Versions::make_current`].
    ///
    /// # Errors
    /// When the host is not supported or the data directory cannot be written. What was made so far is removed then.
    pub(crate) fn make(&self) -> io::Result<Made> {
        let name = key(&self.host)?;
        if self.is_current(&name) || self.all.join(&name).is_dir() {
            return Ok(Made { name, is_new: false });
        }
        if let Some(why) = usr::unsupported_reason(&self.host) {
            return Err(io::Error::other(why));
        }
        let unfinished = self.all.join(UNFINISHED);
        remove_all(&unfinished)?;
        // Without parent directories: a removed data directory must stay removed.
        match fs::create_dir(&self.all) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            // Root's alone: a copy of `/usr` has setuid programs.
            _ => DirBuilder::new().mode(0o700).create(&unfinished)?,
        }
        let filled = self.fill(&unfinished, &name);
        if filled.is_err() {
            // A part of a copy can fill the disk, and the next attempt begins anew.
            let _ = remove_all(&unfinished);
        }
        filled.map(|()| Made { name, is_new: true })
    }

    fn fill(&self, version: &Path, name: &str) -> io::Result<()> {
        root::create(&self.host, &version.join("root"))?;
        usr::create(&self.host, &version.join("usr"))?;
        let Some(bytes) = self.size_of_new_copy()? else {
            return Ok(());
        };
        let available = disk_available(&self.all)?;
        // What the file system needs for itself is unknown, and sandboxes write meanwhile.
        if available < bytes + bytes / 10 {
            return Err(io::Error::other(format!(
                "`base` needs {} MB for a copy of the host's /usr, and {} MB are free in {}: make room there, use another data directory, \
                 or set `base_template = false`",
                megabytes(bytes + bytes / 10),
                megabytes(available),
                self.all.display()
            )));
        }
        tracing::info!(
            "sandboxes cannot be shown the /usr of this host, because its file system has no mapped ids: `base` gets a copy of {} MB, \
             which can take minutes",
            megabytes(bytes)
        );
        host::copy(&self.host.join("usr"), &version.join(host::HOST))?;
        fs::write(version.join(BYTES), format!("{bytes}\n"))?;
        if key(&self.host)? != name {
            return Err(io::Error::other(
                "the host's packages changed while /usr was copied: it has to be copied again once they no longer change",
            ));
        }
        Ok(())
    }

    /// Makes a version current. Returns whether another one was.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub(crate) fn make_current(&self, made: &Made) -> io::Result<bool> {
        let Made { name, is_new } = made;
        if self.is_current(name) {
            return Ok(false);
        }
        let version = self.all.join(name);
        if *is_new {
            fs::rename(self.all.join(UNFINISHED), &version)?;
        }
        // It may have been current before; its users are recorded when it is replaced again.
        if_there(fs::remove_file(version.join(USERS)))?;
        let link = self.all.join(format!("{CURRENT}.new"));
        remove_all(&link)?;
        symlink(name, &link)?;
        fs::rename(&link, self.all.join(CURRENT))?;
        Ok(true)
    }

    fn is_current(&self, name: &str) -> bool {
        fs::read_link(self.all.join(CURRENT)).is_ok_and(|target| target == Path::new(name))
    }

    /// Space that the copy of the host's `/usr` takes, or will take, in bytes; none where sandboxes are shown `/usr` itself.
    ///
    /// # Errors
    /// When neither is known.
    pub(crate) fn copied_bytes(&self) -> io::Result<Option<u64>> {
        let known = fs::read_to_string(self.all.join(CURRENT).join(BYTES)).ok();
        match known.and_then(|text| text.trim().parse().ok()) {
            Some(bytes) => Ok(Some(bytes)),
            None => self.size_of_new_copy(),
        }
    }

    /// Space that a copy of the host's `/usr` would take, in bytes; none where none is needed.
    fn size_of_new_copy(&self) -> io::Result<Option<u64>> {
        let usr = self.host.join("usr");
        if can_map_ids(&usr)
            .map_err(|error| io::Error::new(error.kind(), format!("try to map the ids of /usr: {error}")))?
        {
            return Ok(None);
        }
        host::size_of(&usr).map(Some)
    }

    /// Removes what an earlier platform left incomplete.
    ///
    /// # Errors
    /// When the data directory cannot be written.
    pub(crate) fn remove_incomplete(&self) -> io::Result<()> {
        [UNFINISHED, REMOVED]
            .into_iter()
            .try_for_each(|left| remove_all(&self.all.join(left)))
    }

    /// Whether the host is changing its packages right now, so that a copy would be inconsistent. Its locks are tested
    /// and never taken.
    pub(crate) fn host_is_changing(&self) -> bool {
        packages::LOCKS.iter().any(|lock| {
            File::open(self.host.join(lock)).is_ok_and(|file| {
                let wanted = rustix::process::Flock::from(rustix::process::FlockType::WriteLock);
                rustix::process::fcntl_getlk(&file, &wanted).is_ok_and(|holder| holder.is_some())
            })
        })
    }

    /// Removes the versions that no sandbox uses. `names` returns the names of all sandboxes, running or not yet
    /// cleaned up; it is called only if there is a version to remove.
    ///
    /// # Errors
    /// When the data directory cannot be read or written.
    pub(crate) fn sweep(&self, names: impl FnOnce() -> io::Result<BTreeSet<String>>) -> io::Result<()> {
        self.remove_incomplete()?;
        let current = fs::read_link(self.all.join(CURRENT))?;
        let mut replaced = Vec::new();
        for entry in fs::read_dir(&self.all)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() && entry.file_name() != current.as_os_str() {
                replaced.push(entry.path());
            }
        }
        if replaced.is_empty() {
            return Ok(());
        }
        let names = names()?;
        for version in replaced {
            if !Self::is_used(&version, &names)? {
                // Renamed first, so that a partly removed version is never used.
                let removed = self.all.join(REMOVED);
                fs::rename(&version, &removed)?;
                remove_all(&removed)?;
            }
        }
        Ok(())
    }

    fn is_used(version: &Path, names: &BTreeSet<String>) -> io::Result<bool> {
        let users = version.join(USERS);
        match fs::read_to_string(&users) {
            Ok(text) => Ok(text.lines().any(|name| names.contains(name))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let text = names.iter().fold(String::new(), |mut text, name| {
                    let _ = writeln!(text, "{name}");
                    text
                });
                let unfinished = version.join(format!("{USERS}.new"));
                fs::write(&unfinished, text)?;
                fs::rename(&unfinished, users)?;
                Ok(!names.is_empty())
            }
            Err(error) => Err(error),
        }
    }
}

/// The part of a version, as [`Versions::current`] names it, that says which packages the host has. Processes can be
/// restored from a checkpoint with any version of the same packages: their programs are the same.
pub(crate) fn packages_of(version: &str) -> &str {
    let key = version.split(' ').next().unwrap_or_default();
    key.split('-').next().unwrap_or_default()
}

/// Key of the sources of a version: files that change with the host's packages, and after a hyphen those together with this
/// program and the boot of the host. The boot is included because versions are not synced to disk: what a power failure
/// left of one is not used.
fn key(host: &Path) -> io::Result<String> {
    let mut text = String::new();
    let mut note = |path: &Path, found: Option<&fs::Metadata>| {
        let stamp = found.map(|found| {
            (
                found.ino(),
                found.size(),
                found.mtime(),
                found.mtime_nsec(),
                found.mode(),
            )
        });
        let _ = writeln!(text, "{path:?} {stamp:?}");
    };
    for source in SOURCES {
        let path = host.join(source);
        let found = path.symlink_metadata().ok();
        note(&path, found.as_ref());
        // Files of these directories are also changed in place.
        if source.starts_with("etc/apt/") && found.is_some_and(|found| found.is_dir()) {
            let mut entries: Vec<PathBuf> = fs::read_dir(&path)?.flatten().map(|entry| entry.path()).collect();
            entries.sort();
            for entry in entries {
                note(&entry, entry.symlink_metadata().ok().as_ref());
            }
        }
    }
    for mark in usr::marks(host) {
        note(&mark, None);
    }
    let packages = crate::slot::fnv1a(text.as_bytes());
    text.push_str(&fs::read_to_string("/proc/sys/kernel/random/boot_id")?);
    let program = fs::metadata("/proc/self/exe")?;
    let program = (program.ino(), program.size(), program.mtime(), program.mtime_nsec());
    let _ = writeln!(text, "{program:?}");
    let whole = crate::slot::fnv1a(text.as_bytes());
    Ok(format!("{packages:016x}-{whole:016x}"))
}

/// Converts bytes to megabytes, rounded up.
pub(crate) fn megabytes(bytes: u64) -> u64 {
    bytes.div_ceil(1_000_000)
}

fn remove_all(path: &Path) -> io::Result<()> {
    let removed = match path.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    if_there(removed).map(drop)
}

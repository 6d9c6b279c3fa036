//! The versions of `base` in a data directory: created when the host's packages change, kept while they are used.
//!
//! ```text
//!   base/<key>/root, base/<key>/usr   the two lower layers of one version
//!   base/<key>/users                  of a version that was replaced: the sandboxes that existed at that time
//!   base/current                      a link to the version that new sandboxes use
//! ```
//!
//! No step requires the previous one to be finished: after a crash at any point the next platform continues. A sandbox
//! reads `current` after its cgroup was created, so the names that are read after `current` has changed include every
//! sandbox that may use an older version.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use super::{packages, root, usr};
use crate::files::if_there;

/// The link to the version that new sandboxes use.
pub(crate) const CURRENT: &str = "current";
/// A version that is not complete.
const UNFINISHED: &str = "unfinished";
/// A version that is being removed.
const REMOVED: &str = "removed";
/// In a replaced version: names of the sandboxes that may use it.
const USERS: &str = "users";

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
        let name = key(&self.host)?;
        if fs::read_link(self.all.join(CURRENT)).is_ok_and(|target| target == Path::new(&name)) {
            return Ok(false);
        }
        let version = self.all.join(&name);
        if !version.is_dir() {
            if let Some(why) = usr::unsupported_reason(&self.host) {
                return Err(io::Error::other(why));
            }
            let unfinished = self.all.join(UNFINISHED);
            remove_all(&unfinished)?;
            // Without parent directories: a removed data directory must stay removed.
            match fs::create_dir(&self.all) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => fs::create_dir(&unfinished)?,
            }
            root::create(&self.host, &unfinished.join("root"))?;
            usr::create(&self.host, &unfinished.join("usr"))?;
            fs::rename(&unfinished, &version)?;
        }
        // It may have been current before; its users are recorded when it is replaced again.
        if_there(fs::remove_file(version.join(USERS)))?;
        let link = self.all.join(format!("{CURRENT}.new"));
        remove_all(&link)?;
        symlink(&name, &link)?;
        fs::rename(&link, self.all.join(CURRENT))?;
        Ok(true)
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
        for left in [UNFINISHED, REMOVED] {
            remove_all(&self.all.join(left))?;
        }
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

fn remove_all(path: &Path) -> io::Result<()> {
    let removed = match path.symlink_metadata() {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    if_there(removed).map(drop)
}

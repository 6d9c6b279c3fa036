//! The fixtures of a sandbox: its device nodes, and files that take the place of the host's in `/proc` and `/sys`.
//!
//! Every sandbox has a small file system of its own with them, although they are the same in all. A lock, a watch and
//! the times of a file belong to its inode, whatever the rights to its content: on a shared inode, sandboxes could
//! hold locks for each other, send each other signs, and see when another one reads random numbers.
//!
//! The file system belongs to the host's root, which is not mapped in sandboxes, so nothing inside can change it. What
//! of it is attached where is in `mounts`.
//!
//! ```text
//!   dev/       the sandbox's /dev. dev/null also covers files of /proc
//!   fuse       the node at /dev/fuse
//!   sys/       the sandbox's /sys: mount points for what it has of the kernel's
//!   empty/     covers directories of /proc
//!   cgroups    /proc/cgroups
//!   boot_id    /proc/sys/kernel/random/boot_id
//!   cpu/       /sys/devices/system/cpu    } where the sandbox does not see
//!   cpuinfo    /proc/cpuinfo              } all processors of the host
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

use crate::boot_id::BootId;
use crate::cgroup_view::{self, Shown};
use crate::processors::{ProcessorFiles, View};
use crate::{mounting, mounts};

/// Device nodes: path, major, minor. The kernel lets programs open all but the last one, whose mount forbids it.
const NODES: [(&str, u32, u32); 7] = [
    ("dev/null", 1, 3),
    ("dev/zero", 1, 5),
    ("dev/full", 1, 7),
    ("dev/random", 1, 8),
    ("dev/urandom", 1, 9),
    ("dev/tty", 5, 0),
    ("fuse", 10, 229),
];
const DIRECTORIES: [&str; 18] = [
    "dev",
    "dev/pts",
    "dev/shm",
    "dev/mqueue",
    "empty",
    "sys",
    "sys/class",
    "sys/class/misc",
    "sys/class/net",
    "sys/devices",
    "sys/devices/system",
    "sys/devices/system/cpu",
    "sys/devices/virtual",
    "sys/devices/virtual/misc",
    GENERATOR,
    "sys/devices/virtual/net",
    "sys/fs",
    GROUPS,
];
const GENERATOR: &str = "sys/devices/virtual/misc/hw_random";
const GROUPS: &str = "sys/fs/cgroup";
const LINKS: [(&str, &str); 6] = [
    ("dev/fd", "/proc/self/fd"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
    ("dev/stderr", "/proc/self/fd/2"),
    ("dev/ptmx", "pts/ptmx"),
    ("sys/class/misc/hw_random", "../../devices/virtual/misc/hw_random"),
];
/// The values of a machine without a hardware generator; programs read them to choose their source of randomness.
const GENERATOR_FILES: [(&str, &str); 3] = [
    ("rng_current", "none\n"),
    ("rng_available", "\n"),
    ("rng_selected", "0\n"),
];

/// What all fixtures of a launcher have in common.
#[derive(Debug)]
pub(super) struct Fixtures {
    /// The hierarchies that a sandbox sees in a directory of its own, by their names.
    groups: Vec<String>,
    controllers: String,
}

impl Fixtures {
    /// Fixtures for sandboxes that see these groups.
    ///
    /// # Errors
    /// When the host's controllers cannot be read.
    pub(super) fn new(groups: &[Shown]) -> io::Result<Self> {
        let named = groups.iter().filter(|group| !group.name.is_empty());
        Ok(Self {
            groups: named.map(|group| group.name.clone()).collect(),
            controllers: cgroup_view::controllers()?,
        })
    }

    /// Creates those of one sandbox, which are not attached yet, without what [`add_run`] and [`add_processors`] add. Takes a
    /// tenth of a millisecond.
    ///
    /// # Errors
    /// When there is no memory.
    pub(super) fn make(&self) -> io::Result<OwnedFd> {
        let fixtures = mounting::create("tmpfs", &[("mode", "755")], mounts::FIXTURES)?;
        with_modes_as_given(|| self.fill(fixtures.as_fd()))?;
        Ok(fixtures)
    }

    fn fill(&self, fixtures: BorrowedFd<'_>) -> io::Result<()> {
        for directory in DIRECTORIES {
            make_dir(fixtures, directory)?;
        }
        for (path, major, minor) in NODES {
            let device = rustix::fs::makedev(major, minor);
            rustix::fs::mknodat(fixtures, path, FileType::CharacterDevice, 0o666.into(), device)?;
        }
        // Where the node is attached.
        write(fixtures, "dev/fuse", "")?;
        for (path, target) in LINKS {
            rustix::fs::symlinkat(target, fixtures, path)?;
        }
        for (name, text) in GENERATOR_FILES {
            write(fixtures, &format!("{GENERATOR}/{name}"), text)?;
        }
        for name in &self.groups {
            make_dir(fixtures, &format!("{GROUPS}/{name}"))?;
            // Links as service managers create them where one hierarchy has both.
            if name == "cpu,cpuacct" {
                for link in ["cpu", "cpuacct"] {
                    rustix::fs::symlinkat(name.as_str(), fixtures, format!("{GROUPS}/{link}"))?;
                }
            }
        }
        write(fixtures, "cgroups", &self.controllers)
    }
}

/// Adds what is different in each run of a sandbox.
///
/// # Errors
/// When there is no memory.
pub(super) fn add_run(fixtures: BorrowedFd<'_>, boot_id: &BootId) -> io::Result<()> {
    with_modes_as_given(|| write(fixtures, "boot_id", &format!("{boot_id}\n")))
}

/// Adds what a sandbox reads about its processors, where that is not the same as on the host.
///
/// # Errors
/// When there is no memory.
pub(super) fn add_processors(fixtures: BorrowedFd<'_>, processors: &View) -> io::Result<()> {
    let Some(ProcessorFiles { lists, info }) = &processors.files else {
        return Ok(());
    };
    with_modes_as_given(|| {
        make_dir(fixtures, "cpu")?;
        // Mount points for the directories of the kernel's sysfs.
        for number in &processors.numbers {
            make_dir(fixtures, &format!("cpu/cpu{number}"))?;
        }
        for (names, text) in lists {
            let mut paths = names.iter().map(|name| format!("cpu/{name}"));
            let Some(first) = paths.next() else { continue };
            write(fixtures, &first, text)?;
            // Each file takes a page.
            for path in paths {
                rustix::fs::linkat(fixtures, &first, fixtures, path, AtFlags::empty())?;
            }
        }
        write(fixtures, "cpuinfo", info)
    })
}

/// Runs `work` without a file mode creation mask. A launcher has one thread.
fn with_modes_as_given<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mask = rustix::process::umask(Mode::empty());
    let done = work();
    rustix::process::umask(mask);
    done
}

fn make_dir(fixtures: BorrowedFd<'_>, path: &str) -> io::Result<()> {
    Ok(rustix::fs::mkdirat(fixtures, path, 0o755.into())?)
}

fn write(fixtures: BorrowedFd<'_>, path: &str, text: &str) -> io::Result<()> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(fixtures, path, flags, 0o644.into())?;
    let mut left = text.as_bytes();
    while !left.is_empty() {
        let written = rustix::io::write(&file, left)?;
        left = &left[written..];
    }
    Ok(())
}

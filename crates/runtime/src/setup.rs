//! What happens inside a sandbox before its first program: the steps of the cloned child on its way to the agent.
//!
//! The child shares nothing with the launcher but a packet socket. It sets up its network while the launcher makes
//! the disk, receives the two overlays, builds the tree around them, leaves the launcher's mounts for good and
//! becomes the agent. Paths in the new tree are resolved from a held descriptor without following links out of it.

use std::convert::Infallible;
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use protocol::agent::{BOOT_FD, SPAWNER_FD};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};

use crate::sys::attr;
use crate::{base, confine, netlink, sys, wire};

/// Files of /proc that tell about the host or its other tenants: covered with /dev/null.
const MASKED_FILES: [&str; 23] = [
    "buddyinfo",
    "cmdline",
    "consoles",
    "devices",
    "diskstats",
    "dma",
    "interrupts",
    "iomem",
    "ioports",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "latency_stats",
    "locks",
    "misc",
    "modules",
    "mtrr",
    "partitions",
    "sched_debug",
    "swaps",
    "timer_list",
    "zoneinfo",
];
/// Directories of /proc that tell about the host: covered with an empty one.
const MASKED_DIRS: [&str; 8] = ["acpi", "asound", "bus", "driver", "dynamic_debug", "fs", "irq", "scsi"];
/// Parts of /proc that may be read but not written.
const READ_ONLY: [&str; 2] = ["sys", "sysrq-trigger"];
/// Parts of the sandbox's own sysfs that appear in its /sys; everything else there is made by the launcher.
const SYS_OF_NETWORK: [&str; 2] = ["class/net", "devices/virtual/net"];

/// Places in the launcher's root file system, from which a child's mount namespace is copied.
pub(crate) mod place {
    /// Where the new tree grows.
    pub(crate) const NEW: &str = "/new";
    /// The shared, minimal /dev.
    pub(crate) const DEV: &str = "/dev";
    /// The shared part of /sys.
    pub(crate) const SYS: &str = "/sandbox-sys";
    /// Where a child mounts its own sysfs to take parts of it.
    pub(crate) const SYSFS: &str = "/sysfs";
    /// An empty directory.
    pub(crate) const EMPTY: &str = "/empty";
    /// Where layers get a path each on kernels whose overlayfs needs one.
    pub(crate) const LAYERS: &str = "/layers";
    /// Where the disk gets one.
    pub(crate) const DISK: &str = "/disk";
    /// The agent's binary.
    pub(crate) const AGENT: &str = "/agent";
}

/// Descriptors from here on are never the target of a placement before exec.
pub(crate) const ABOVE_PLACES: i32 = 10;

/// What a child says when its tree is complete.
pub(crate) const READY: &[u8] = b"ready";

/// A step that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    what: &'static str,
    error: io::Error,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.error)
    }
}

trait Step<T> {
    fn step(self, what: &'static str) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> Step<T> for Result<T, E> {
    fn step(self, what: &'static str) -> Result<T, Failure> {
        self.map_err(|error| Failure {
            what,
            error: error.into(),
        })
    }
}

/// Runs in the child that is pid 1 of the sandbox. Returns only if it fails.
pub(crate) fn become_agent(
    socket: BorrowedFd<'_>,
    interface: &str,
    shared_memory_mb: u32,
    boot: OwnedFd,
    spawner: OwnedFd,
) -> Result<Infallible, Failure> {
    // Nothing of the host may stay open in a process of the sandbox.
    let kept = [socket.as_raw_fd(), boot.as_raw_fd(), spawner.as_raw_fd()];
    sys::close_all_but(&kept).step("close the launcher's descriptors")?;
    netlink::configure(interface).step("network")?;
    rustix::system::sethostname(base::HOST_NAME.as_bytes()).step("host name")?;
    let Some((_, mounts)) = wire::receive(socket).step("receive the file system")? else {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step("receive the file system");
    };
    let [root, usr] = <[OwnedFd; 2]>::try_from(mounts)
        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
        .step("receive the file system")?;
    // The id maps are written by now, so 0 is the sandbox's root.
    sys::set_ids(0, 0, 0).step("become root of the sandbox")?;
    sys::clear_groups().step("drop groups")?;
    build_tree(root.as_fd(), usr, shared_memory_mb)?;
    check_overlays()?;
    wire::send(socket, READY, &[]).step("report")?;
    become_program(&[(boot, BOOT_FD), (spawner, SPAWNER_FD)], &[c"ringfence", c"agent"])
}

/// Runs in a process that has joined a sandbox's namespaces and its workload's cgroup. Returns only if it fails.
pub(crate) fn become_spawner(spawner: Option<OwnedFd>) -> Result<Infallible, Failure> {
    sys::set_ids(0, 0, 0).step("become root of the sandbox")?;
    sys::clear_groups().step("drop groups")?;
    match spawner {
        Some(fd) => become_program(&[(fd, SPAWNER_FD)], &[c"ringfence", c"spawner"]),
        None => become_program(&[], &[c"ringfence", c"spawner", c"connect"]),
    }
}

/// Puts descriptors where the program expects them, confines the process and executes it.
fn become_program(placed: &[(OwnedFd, i32)], arguments: &[&CStr]) -> Result<Infallible, Failure> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).step("open /dev/null")?;
    // First out of the way of the places, then into them. The socket to report a failed exec on is above already.
    let raise = |fd: &dyn AsRawFd| sys::raise_fd(fd.as_raw_fd(), ABOVE_PLACES).step("move descriptors");
    let null = raise(&null)?;
    let placed = placed
        .iter()
        .map(|(fd, target)| Ok((raise(fd)?, *target)))
        .collect::<Result<Vec<_>, Failure>>()?;
    sys::close_from_at_exec(3).step("close descriptors")?;
    for (fd, target) in [(null, 0), (null, 1), (null, 2)].into_iter().chain(placed) {
        sys::place_fd(fd, target).step("place descriptors")?;
    }
    confine::confine().step("confine")?;
    Err(sys::exec(c"/run/ringfence/agent", arguments)).step("execute the agent")
}

fn build_tree(root: BorrowedFd<'_>, usr: OwnedFd, shared_memory_mb: u32) -> Result<(), Failure> {
    attach(root, CWD, place::NEW).step("attach the root")?;
    let new = rustix::fs::open(
        place::NEW,
        OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .step("open the root")?;
    let put = |mount: OwnedFd, target: &str| {
        let target = inside(new.as_fd(), target)?;
        attach(mount.as_fd(), target.as_fd(), "")
    };
    put(usr, "usr").step("attach /usr")?;
    put(clone_tree(place::DEV, true)?, "dev").step("attach /dev")?;
    let pts = [
        ("newinstance", ""),
        ("ptmxmode", "0666"),
        ("mode", "0620"),
        ("gid", "5"),
    ];
    put(mount("devpts", &pts, attr::NOSUID | attr::NOEXEC)?, "dev/pts").step("attach /dev/pts")?;
    let size = format!("{shared_memory_mb}m");
    put(
        mount(
            "tmpfs",
            &[("mode", "1777"), ("size", &size)],
            attr::NOSUID | attr::NODEV,
        )?,
        "dev/shm",
    )
    .step("attach /dev/shm")?;
    put(
        mount("mqueue", &[], attr::NOSUID | attr::NODEV | attr::NOEXEC)?,
        "dev/mqueue",
    )
    .step("attach mqueue")?;

    // Both need one that is fully visible in this namespace, so they come before the launcher's mounts go.
    let harmless = attr::NOSUID | attr::NODEV | attr::NOEXEC;
    put(mount("proc", &[], harmless)?, "proc").step("attach /proc")?;
    attach(mount("sysfs", &[], harmless | attr::RDONLY)?.as_fd(), CWD, place::SYSFS).step("attach sysfs")?;
    put(clone_tree(place::SYS, true)?, "sys").step("attach /sys")?;
    for part in SYS_OF_NETWORK {
        put(
            clone_tree(&format!("{}/{part}", place::SYSFS), false)?,
            &format!("sys/{part}"),
        )
        .step("attach /sys/.../net")?;
    }
    mask_proc(new.as_fd())?;

    let agent = clone_tree(place::AGENT, false)?;
    sys::mount_setattr(agent.as_fd(), false, attr::RDONLY | attr::NOSUID | attr::NODEV, None)
        .step("protect the agent")?;
    put(agent, base::AGENT).step("attach the agent")?;

    rustix::process::fchdir(&new).step("enter the root")?;
    sys::pivot_to_current_directory().step("change the root")
}

fn mask_proc(new: BorrowedFd<'_>) -> Result<(), Failure> {
    let proc = inside(new, "proc").step("open /proc")?;
    let cover = |source: &str, target: &str| -> Result<(), Failure> {
        match inside(proc.as_fd(), target) {
            Ok(at) => attach(clone_tree(source, false)?.as_fd(), at.as_fd(), "").step("mask /proc"),
            // Kernels differ in what they offer.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error).step("mask /proc"),
        }
    };
    for name in MASKED_FILES {
        cover("/dev/null", name)?;
    }
    for name in MASKED_DIRS {
        cover(place::EMPTY, name)?;
    }
    for name in READ_ONLY {
        let Ok(at) = inside(proc.as_fd(), name) else { continue };
        let tree =
            rustix::mount::open_tree(&at, "", clone_flags() | OpenTreeFlags::AT_EMPTY_PATH).step("clone /proc")?;
        sys::mount_setattr(tree.as_fd(), false, attr::RDONLY, None).step("protect /proc")?;
        attach(tree.as_fd(), at.as_fd(), "").step("protect /proc")?;
    }
    Ok(())
}

/// Overlayfs falls back silently, to a read-only mount or to one without the properties that layers need, so what it
/// did is read back.
fn check_overlays() -> Result<(), Failure> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").step("read mountinfo")?;
    let overlays: Vec<&str> = mounts.lines().filter(|line| line.contains(" - overlay ")).collect();
    let sound = |line: &&str| {
        let (_, options) = line.split_once(" - overlay ").unwrap_or_default();
        let has = |option: &str| options.split([' ', ',']).any(|have| have == option);
        has("rw") && has("index=on") && has("nfs_export=on")
    };
    if overlays.len() == 2 && overlays.iter().all(sound) {
        return Ok(());
    }
    Err(io::Error::other(
        "overlayfs switched to read-only, or index or nfs_export off",
    ))
    .step("check the overlays")
}

/// A descriptor of a place in the new tree, reached without leaving it and without following any link.
fn inside(root: BorrowedFd<'_>, path: &str) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(
        root,
        path,
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
        resolve,
    )?)
}

fn clone_flags() -> OpenTreeFlags {
    OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC
}

fn clone_tree(path: &str, recursive: bool) -> Result<OwnedFd, Failure> {
    let flags = if recursive {
        clone_flags() | OpenTreeFlags::AT_RECURSIVE
    } else {
        clone_flags()
    };
    rustix::mount::open_tree(CWD, path, flags).step("clone a mount")
}

/// A new file system, attached nowhere yet.
fn mount(kind: &str, options: &[(&str, &str)], attributes: u64) -> Result<OwnedFd, Failure> {
    let fs = rustix::mount::fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).step("open a file system")?;
    for (key, value) in options {
        if value.is_empty() {
            rustix::mount::fsconfig_set_flag(&fs, *key).step("configure a file system")?;
        } else {
            rustix::mount::fsconfig_set_string(&fs, *key, *value).step("configure a file system")?;
        }
    }
    rustix::mount::fsconfig_create(&fs).step("create a file system")?;
    let attributes = MountAttrFlags::from_bits_retain(u32::try_from(attributes).unwrap_or(0));
    rustix::mount::fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes).step("mount a file system")
}

/// Attaches a mount at a path below `dir`, or with an empty path at `dir` itself.
pub(crate) fn attach(mount: BorrowedFd<'_>, dir: BorrowedFd<'_>, path: &str) -> io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    }
    Ok(rustix::mount::move_mount(mount, "", dir, path, flags)?)
}

/// A failure of the launcher's own part of a child.
pub(crate) fn failure(what: &'static str, error: io::Error) -> Failure {
    Failure { what, error }
}

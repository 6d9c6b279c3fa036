//! Setup of a sandbox before its first program: the steps of the cloned child until it becomes the agent.
//!
//! The child shares only a packet socket with the launcher. It sets up its network while the launcher creates the disk,
//! receives the overlays, builds the tree around them, leaves the launcher's mounts and becomes the agent. Paths in the
//! new tree are resolved from an open descriptor without following links out of it.

use std::convert::Infallible;
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use protocol::agent::{BOOT_FD, SPAWNER_FD};
use protocol::figures::{FIGURES_FD, FILES};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};
use rustix::time::{ClockId, Timespec};

use crate::cgroup_view::{Scope, Shown};
use crate::files::write_at;
use crate::processors::{self, View};
use crate::rootfs::Overlay;
use crate::sys::attr;
use crate::{base, boot_id, confine, netlink, sys, wire};

/// Files of /proc that expose the host or its other tenants: covered with the sandbox's /dev/null.
const MASKED_FILES: [&str; 28] = [
    "allocinfo",
    "bootconfig",
    "buddyinfo",
    "cmdline",
    "config.gz",
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
    "schedstat",
    "softirqs",
    "swaps",
    "timer_list",
    "zoneinfo",
];
/// Directories of /proc that expose the host: covered with an empty directory.
pub(crate) const MASKED_DIRS: [&str; 9] = [
    "acpi",
    "asound",
    "bus",
    "driver",
    "dynamic_debug",
    "fs",
    "irq",
    "pressure",
    "scsi",
];
/// Maximum number of open terminals in a sandbox: they count against the host-wide `kernel.pty.max`.
const TERMINALS: &str = "128";
/// Parts of /proc that may be read but not written.
const READ_ONLY: [&str; 2] = ["sys", "sysrq-trigger"];
/// Parts of the sandbox's own sysfs that appear in its /sys, besides its processors; the rest is the launcher's.
pub(crate) const SYS_OF_NETWORK: [&str; 2] = ["class/net", "devices/virtual/net"];
/// Directory of the processors in sysfs.
pub(crate) const CPU: &str = "devices/system/cpu";

/// Places in the launcher's root file system, from which a child's mount namespace is copied.
pub(crate) mod place {
    /// Mount point of the new tree.
    pub(crate) const NEW: &str = "/new";
    /// Where the fixtures of a sandbox are attached to take parts of them.
    pub(crate) const FIXTURES: &str = "/fixtures";
    /// Where a sysfs of the sandbox's own is attached to take parts of it.
    pub(crate) const SYSFS: &str = "/sysfs";
    /// An empty directory.
    pub(crate) const EMPTY: &str = "/empty";
    /// Mount points of layers, for kernels whose overlayfs needs a path for each.
    pub(crate) const LAYERS: &str = "/layers";
    /// Mount point of the disk, for the same kernels.
    pub(crate) const DISK: &str = "/disk";
    /// The agent's binary.
    pub(crate) const AGENT: &str = "/agent";
    /// Directories of the cgroups that sandboxes see, by number.
    pub(crate) const CGROUPS: &str = "/cgroups";
    /// Where a child attaches its FUSE file system to take the `/proc` files.
    pub(crate) const FIGURES: &str = "/figures";
}

/// Inodes in /dev/shm for each MiB of its size. Each takes about a kibibyte of the sandbox's memory that the size does
/// not count, so all together take a sixteenth of it.
const INODES_PER_MB: u64 = 64;

/// How often a connection request is repeated without an answer: for 4 s, before Linux 6.5 for 15 s. Requests while the
/// platform restarts are answered late.
const SYN_RETRIES: &str = "3";

/// What the options of a socket may take, in bytes, uncharged. As it was on all kernels before Linux 6.8, where it became
/// 128 KiB: enough for the control messages of any program.
const OPTION_MEMORY: &str = "20480";

/// Descriptors from here on are never a fixed target before exec.
pub(crate) const ABOVE_PLACES: i32 = 10;

/// The parameters of a new sandbox.
#[derive(Debug)]
pub(crate) struct Parameters<'a> {
    /// Name of its cgroups.
    pub(crate) name: &'a str,
    /// Kind of the interface `eth0`.
    pub(crate) interface: &'a str,
    /// The overlays of its file system. Their mounts are sent in this order.
    pub(crate) overlays: &'a [Overlay],
    pub(crate) shared_memory_mb: u32,
    pub(crate) processors: &'a View,
    /// The cgroups that it sees.
    pub(crate) groups: &'a [Shown],
    /// How many files its processes may have open, unless they ask for more.
    pub(crate) open_files: u32,
    /// Its start time.
    pub(crate) began: Clocks,
}

/// Message of the child: it has its clocks and its network.
pub(crate) const BEGUN: &[u8] = b"begun";
/// Message of the child: its tree is complete.
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
    parameters: &Parameters<'_>,
    boot: OwnedFd,
    spawner: OwnedFd,
) -> Result<Infallible, Failure> {
    // No descriptor of the host may stay open in a process of the sandbox.
    let kept = [socket.as_raw_fd(), boot.as_raw_fd(), spawner.as_raw_fd()];
    sys::close_all_but(&kept).step("close the launcher's descriptors")?;
    begin_time(parameters.began).step("create the time namespace")?;
    netlink::configure(parameters.interface).step("network")?;
    limit_network().step("limit the network")?;
    rustix::system::sethostname(base::HOST_NAME.as_bytes()).step("host name")?;
    // The spawner must be in the same time namespace.
    wire::send(socket, BEGUN, &[]).step("report")?;
    let Some((_, mounts)) = wire::receive(socket).step("receive the file system")? else {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step("receive the file system");
    };
    let mut mounts = mounts.into_iter();
    let overlays: Vec<OwnedFd> = mounts.by_ref().take(parameters.overlays.len()).collect();
    if overlays.len() != parameters.overlays.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidData)).step("receive the file system");
    }
    let fixtures = mounts.next().ok_or(io::ErrorKind::InvalidData);
    let fixtures = fixtures.step("receive the file system")?;
    let (figures, kernel) = (mounts.next(), mounts.next());
    // The id maps are written by now, so 0 is the sandbox's root.
    sys::set_ids(0, 0, 0).step("become root of the sandbox")?;
    sys::clear_groups().step("drop groups")?;
    limit_shared_memory(parameters.shared_memory_mb / 2).step("limit shared memory")?;
    attach(fixtures.as_fd(), CWD, place::FIXTURES).step("attach the fixtures")?;
    build_tree(socket, parameters, overlays, figures)?;
    check_overlays(parameters.overlays.len())?;
    wire::send(socket, READY, &[]).step("report")?;
    let mut placed = vec![(boot, BOOT_FD), (spawner, SPAWNER_FD)];
    placed.extend(kernel.map(|kernel| (kernel, FIGURES_FD)));
    become_program(&placed, &[c"ringfence", c"agent"], parameters.open_files)
}

/// Runs in a process that is root of a sandbox, in its namespaces and in its workload's cgroup. Returns only if it
/// fails.
pub(crate) fn become_spawner(spawner: OwnedFd, open_files: u32) -> Result<Infallible, Failure> {
    processors::pin_to_window().step("set the CPU affinity")?;
    if !is_root_of_namespace().step("read its cgroups")? {
        // In a sandbox of an earlier version, the agent has another cgroup namespace than the workload.
        sys::unshare(libc::CLONE_NEWCGROUP).step("create the cgroup namespace")?;
    }
    // Whoever has two user ids at exec is not dumpable after it, also where the program can be read. It is in a sandbox
    // that was restored, and root inside could otherwise trace the spawner until it has seen to that itself.
    sys::set_ids_of_user(NOBODY, 0, 0).step("set a second user id")?;
    become_program(&[(spawner, SPAWNER_FD)], &[c"ringfence", c"spawner"], open_files)
}

/// A user id that is not root's.
const NOBODY: u32 = 65_534;

/// Whether the groups of the calling process are the roots that it sees. Named hierarchies of others do not count.
fn is_root_of_namespace() -> io::Result<bool> {
    let groups = std::fs::read_to_string("/proc/self/cgroup")?;
    let mut paths = groups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    Ok(paths.all(|path| path == "/"))
}

/// Puts descriptors where the program expects them, confines the process and executes it.
fn become_program(placed: &[(OwnedFd, i32)], arguments: &[&CStr], open_files: u32) -> Result<Infallible, Failure> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).step("open /dev/null")?;
    // First move the descriptors above all target numbers, then to their targets. The socket that reports a failed exec
    // is already above.
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
    // A new session: input on the platform's terminal must not reach a sandbox.
    rustix::process::setsid().step("leave the session")?;
    confine::confine(open_files).step("confine")?;
    Err(sys::exec(c"/run/ringfence/agent", arguments)).step("execute the agent")
}

/// The host's clocks at one time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clocks([(&'static str, Timespec); 2]);

impl Clocks {
    pub(crate) fn now() -> Self {
        let now = |name, clock| (name, rustix::time::clock_gettime(clock));
        Self([now("monotonic", ClockId::Monotonic), now("boottime", ClockId::Boottime)])
    }

    /// Offsets, in the kernel's format, of a time namespace that starts at this time.
    fn offsets(&self) -> String {
        let lines = self.0.map(|(name, then)| match then.tv_nsec {
            0 => format!("{name} -{} 0\n", then.tv_sec),
            // Nanoseconds count upwards from the second before.
            nanoseconds => format!("{name} -{} {}\n", then.tv_sec + 1, 1_000_000_000 - nanoseconds),
        });
        lines.concat()
    }
}

/// Moves the calling process into a time namespace that starts at `began`: uptime, and with it the start times of
/// processes, which are relative to that, are the sandbox's and not the host's. Kernels without time namespaces keep
/// showing the host's.
fn begin_time(began: Clocks) -> io::Result<()> {
    match sys::unshare(libc::CLONE_NEWTIME) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
        other => other?,
    }
    // The file is writable only while this process is dumpable, and no process that could inspect it exists in here
    // yet.
    sys::prctl(libc::PR_SET_DUMPABLE, 1)?;
    write_at(CWD, "/proc/self/timens_offsets", &began.offsets())?;
    let children = rustix::fs::open(
        "/proc/self/ns/time_for_children",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    sys::setns(children.as_fd(), libc::CLONE_NEWTIME)?;
    sys::prctl(libc::PR_SET_DUMPABLE, 0)
}

/// Sets the limits of the network namespace of the calling process. Nothing in a sandbox can change them: there, `/proc/sys`
/// is read-only, and nobody has CAP_NET_ADMIN.
pub(crate) fn limit_network() -> io::Result<()> {
    // Without a gateway nothing answers: connections fail after seconds and not after minutes.
    write_at(CWD, "/proc/sys/net/ipv4/tcp_syn_retries", SYN_RETRIES)?;
    match write_at(CWD, "/proc/sys/net/core/optmem_max", OPTION_MEMORY) {
        // Before Linux 6.8 it was one for the whole host.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// The parts of a sysfs of the calling process's network namespace that appear in a sandbox's `/sys`, with their places.
/// The sysfs is mounted at `/sys` of the calling process: before Linux 6.15, only what is attached can be cloned.
pub(crate) fn sysfs_of_network() -> Result<Vec<(String, OwnedFd)>, Failure> {
    attach(sysfs()?.as_fd(), CWD, "/sys").step("attach sysfs")?;
    let part = |part: &str| {
        let place = format!("/sys/{part}");
        let tree = clone_tree(&place, false)?;
        Ok((place, tree))
    };
    SYS_OF_NETWORK.into_iter().map(part).collect()
}

/// Limits System V shared memory. Like files in memory, segments remain when their creators are gone, so that killing
/// processes does not free them, and unlike files they have no size limit of their own. Older kernels do not allow
/// setting this inside, and then only the sandbox's own limit applies.
fn limit_shared_memory(memory_mb: u32) -> io::Result<()> {
    let pages = (u64::from(memory_mb) << 20) / sys::page_size();
    match write_at(CWD, "/proc/sys/kernel/shmall", &pages.to_string()) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        other => other,
    }
}

fn build_tree(
    socket: BorrowedFd<'_>,
    parameters: &Parameters<'_>,
    overlays: Vec<OwnedFd>,
    figures: Option<OwnedFd>,
) -> Result<(), Failure> {
    let mut overlays = parameters.overlays.iter().zip(overlays);
    if let Some((_, root)) = overlays.next() {
        attach(root.as_fd(), CWD, place::NEW).step("attach the root")?;
    }
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
    for (overlay, mount) in overlays {
        put(mount, overlay.target.trim_start_matches('/')).step("attach an overlay")?;
    }
    // Both require an instance that is fully visible in this namespace, so they come before the launcher's mounts are
    // left.
    put(mount("proc", &[], HARMLESS)?, "proc").step("attach /proc")?;
    attach(sysfs()?.as_fd(), CWD, place::SYSFS).step("attach sysfs")?;
    mask_proc(new.as_fd())?;
    for (point, piece) in pieces(parameters.processors)? {
        put(piece, point.trim_start_matches('/')).step("attach the fixtures")?;
    }
    let pts = [
        ("newinstance", ""),
        ("ptmxmode", "0666"),
        ("mode", "0620"),
        ("gid", "5"),
        ("max", TERMINALS),
    ];
    put(mount("devpts", &pts, attr::NOSUID | attr::NOEXEC)?, "dev/pts").step("attach /dev/pts")?;
    let size = format!("{}m", parameters.shared_memory_mb);
    let inodes = (u64::from(parameters.shared_memory_mb) * INODES_PER_MB).to_string();
    put(
        mount(
            "tmpfs",
            &[("mode", "1777"), ("size", &size), ("nr_inodes", &inodes)],
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

    for part in SYS_OF_NETWORK {
        put(
            clone_tree(&format!("{}/{part}", place::SYSFS), false)?,
            &format!("sys/{part}"),
        )
        .step("attach /sys/.../net")?;
    }
    // The launcher creates the workload's groups meanwhile.
    let namespace = match wire::receive(socket).step("wait for the cgroups")? {
        Some((_, mut namespaces)) if namespaces.len() == 1 => namespaces.swap_remove(0),
        _ => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step("wait for the cgroups"),
    };
    // That of the workload, in which its group is the root.
    sys::setns(namespace.as_fd(), libc::CLONE_NEWCGROUP).step("enter the cgroup namespace")?;
    for (index, group) in parameters.groups.iter().enumerate() {
        let own = match group.scope {
            Scope::Workload => format!("/{}/work", parameters.name),
            Scope::Sandbox => format!("/{}", parameters.name),
        };
        let group_tree = read_only(&format!("{}/{index}{own}", place::CGROUPS))?;
        put(group_tree, &format!("sys/fs/cgroup/{}", group.name)).step("attach a cgroup")?;
    }
    if let Some(figures) = figures {
        // Older kernels cannot clone from a detached mount.
        attach(figures.as_fd(), CWD, place::FIGURES).step("attach the FUSE file system")?;
        for file in FILES {
            let tree = clone_tree(&format!("{}/{file}", place::FIGURES), false)?;
            put(tree, &format!("proc/{file}")).step("attach a file of /proc")?;
        }
    }

    put(program(place::AGENT)?, base::AGENT).step("attach the agent")?;

    rustix::process::fchdir(&new).step("enter the root")?;
    sys::pivot_to_current_directory().step("change the root")
}

/// Attributes of mounts of the kernel's own file systems.
const HARMLESS: u64 = attr::NOSUID | attr::NODEV | attr::NOEXEC;

/// A sysfs of the network namespace of the calling process. There is one for each, so it is shared with nobody else.
pub(crate) fn sysfs() -> Result<OwnedFd, Failure> {
    mount("sysfs", &[], HARMLESS | attr::RDONLY)
}

/// What a sandbox has of its fixtures and of its sysfs, with the mount points, in the order in which they are attached.
/// Both are attached at [`place::FIXTURES`] and [`place::SYSFS`].
pub(crate) fn pieces(processors: &View) -> Result<Vec<(String, OwnedFd)>, Failure> {
    let of = |path: &str| format!("{}/{path}", place::FIXTURES);
    let fuse = clone_tree(&of("fuse"), false)?;
    // Programs check whether it exists and who may use it. No sandbox may, so no device can be opened on this mount:
    // EACCES, even for root inside, and the host's FUSE is never reached.
    sys::mount_setattr(fuse.as_fd(), false, attr::NODEV, None).step("protect /dev/fuse")?;
    let mut pieces = vec![
        ("/dev".to_owned(), clone_tree(&of("dev"), false)?),
        ("/dev/fuse".to_owned(), fuse),
        ("/sys".to_owned(), clone_tree(&of("sys"), false)?),
        ("/proc/cgroups".to_owned(), read_only(&of("cgroups"))?),
        (boot_id::POINT.to_owned(), read_only(&of("boot_id"))?),
    ];
    let of_sysfs = match &processors.files {
        None => vec![CPU.to_owned()],
        Some(_) => {
            pieces.push((format!("/sys/{CPU}"), read_only(&of("cpu"))?));
            pieces.push(("/proc/cpuinfo".to_owned(), read_only(&of("cpuinfo"))?));
            let numbers = processors.numbers.iter();
            numbers.map(|number| format!("{CPU}/cpu{number}")).collect()
        }
    };
    for part in of_sysfs {
        let tree = clone_tree(&format!("{}/{part}", place::SYSFS), false)?;
        pieces.push((format!("/sys/{part}"), tree));
    }
    Ok(pieces)
}

/// What covers files and directories of `/proc`, from the fixtures.
pub(crate) fn masks() -> [String; 2] {
    ["dev/null", "empty"].map(|path| format!("{}/{path}", place::FIXTURES))
}

/// A clone of the mount of an agent's program.
pub(crate) fn program(path: &str) -> Result<OwnedFd, Failure> {
    let agent = clone_tree(path, false)?;
    let attributes = attr::RDONLY | attr::NOSUID | attr::NODEV;
    sys::mount_setattr(agent.as_fd(), false, attributes, None).step("protect the agent")?;
    Ok(agent)
}

fn mask_proc(new: BorrowedFd<'_>) -> Result<(), Failure> {
    let proc = inside(new, "proc").step("open /proc")?;
    let cover = |source: &str, target: &str| -> Result<(), Failure> {
        match inside(proc.as_fd(), target) {
            Ok(at) => attach(clone_tree(source, false)?.as_fd(), at.as_fd(), "").step("mask /proc"),
            // Not every kernel has all of them.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error).step("mask /proc"),
        }
    };
    let [file, directory] = masks();
    for name in MASKED_FILES {
        cover(&file, name)?;
    }
    for name in MASKED_DIRS {
        cover(&directory, name)?;
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

/// Overlayfs falls back silently to a read-only mount or to one without the properties that layers need, so its mount
/// options are read back.
fn check_overlays(count: usize) -> Result<(), Failure> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").step("read mountinfo")?;
    let overlays: Vec<&str> = mounts.lines().filter(|line| line.contains(" - overlay ")).collect();
    let sound = |line: &&str| {
        let (_, options) = line.split_once(" - overlay ").unwrap_or_default();
        let has = |option: &str| options.split([' ', ',']).any(|have| have == option);
        has("rw") && has("index=on") && has("nfs_export=on")
    };
    if overlays.len() == count && overlays.iter().all(sound) {
        return Ok(());
    }
    Err(io::Error::other(
        "overlayfs fell back to read-only, or disabled index or nfs_export",
    ))
    .step("check the overlays")
}

/// Opens a path in the new tree without leaving it and without following any link.
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

pub(crate) fn clone_tree(path: &str, recursive: bool) -> Result<OwnedFd, Failure> {
    let flags = if recursive {
        clone_flags() | OpenTreeFlags::AT_RECURSIVE
    } else {
        clone_flags()
    };
    rustix::mount::open_tree(CWD, path, flags).step("clone a mount")
}

/// A clone of one of the launcher's mounts that the sandbox cannot write.
pub(crate) fn read_only(path: &str) -> Result<OwnedFd, Failure> {
    let tree = clone_tree(path, false)?;
    let attributes = attr::RDONLY | attr::NOSUID | attr::NODEV | attr::NOEXEC;
    sys::mount_setattr(tree.as_fd(), false, attributes, None).step("protect a mount")?;
    Ok(tree)
}

/// A new file system, not attached yet.
pub(crate) fn mount(kind: &str, options: &[(&str, &str)], attributes: u64) -> Result<OwnedFd, Failure> {
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

/// Creates a failure of one of the launcher's own steps.
pub(crate) fn failure(what: &'static str, error: io::Error) -> Failure {
    Failure { what, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_namespace_starts_at_zero() {
        let at = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        let clocks = Clocks([("monotonic", at(7, 0)), ("boottime", at(8, 1))]);
        assert_eq!(clocks.offsets(), "monotonic -7 0\nboottime -9 999999999\n");
    }
}

//! Setup of a sandbox before its first program: the steps of the cloned child until it becomes the agent.
//!
//! The child shares only a packet socket with the launcher. It sets up its network while the launcher creates the disk,
//! receives the overlays, builds the tree around them (`mounts` has the list), leaves the launcher's mounts and becomes the
//! agent.

use std::convert::Infallible;
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use protocol::agent::{BOOT_FD, SPAWNER_FD};
use protocol::figures::FIGURES_FD;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::time::{ClockId, Timespec};

use crate::cgroup_view::Shown;
use crate::files::write_at;
use crate::mounts::trees::Trees;
use crate::mounts::{self, Cover, Layout, MOUNTS, Mount, Source, When};
use crate::processors::{self, View};
use crate::rootfs::Overlay;
use crate::{base, confine, mounting, netlink, place, sys, wire};

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
    let (made, kernel) = receive(socket, parameters.overlays.len())?;
    // The id maps are written by now, so 0 is the sandbox's root.
    sys::set_ids(0, 0, 0).step("become root of the sandbox")?;
    sys::clear_groups().step("drop groups")?;
    limit_shared_memory(parameters.shared_memory_mb / 2).step("limit shared memory")?;
    build_tree(socket, parameters, made)?;
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

/// The parts of a sysfs of the calling process's network namespace that a sandbox has, with their mount points. The sysfs is
/// attached at `/sys` of the calling process.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn sysfs_of_network() -> io::Result<Vec<(&'static str, OwnedFd)>> {
    let sysfs = sysfs()?;
    mounting::attach(sysfs.as_fd(), CWD, "/sys")?;
    let part = |mount: &'static Mount| match mount.source {
        Source::SysfsOfNetwork(path) => Some(mounting::clone(sysfs.as_fd(), path).map(|part| (mount.point, part))),
        _ => None,
    };
    MOUNTS.iter().filter_map(part).collect()
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

/// The file systems that the launcher has made, not attached yet.
#[derive(Debug)]
struct Made {
    overlays: Vec<OwnedFd>,
    fixtures: OwnedFd,
    /// The one with files of `/proc`.
    figures: Option<OwnedFd>,
}

/// Receives the file systems from the launcher, and the descriptor on which the agent serves files of `/proc`.
fn receive(socket: BorrowedFd<'_>, overlays: usize) -> Result<(Made, Option<OwnedFd>), Failure> {
    let what = "receive the file system";
    let Some((_, mounts)) = wire::receive(socket).step(what)? else {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step(what);
    };
    let mut mounts = mounts.into_iter();
    let received: Vec<OwnedFd> = mounts.by_ref().take(overlays).collect();
    let (fixtures, figures, kernel) = (mounts.next(), mounts.next(), mounts.next());
    match fixtures {
        Some(fixtures) if received.len() == overlays => {
            let made = Made {
                overlays: received,
                fixtures,
                figures,
            };
            Ok((made, kernel))
        }
        _ => Err(io::Error::from(io::ErrorKind::InvalidData)).step(what),
    }
}

/// Builds the tree of the sandbox from the list of its mounts, and makes it the root.
fn build_tree(socket: BorrowedFd<'_>, parameters: &Parameters<'_>, made: Made) -> Result<(), Failure> {
    let Made {
        overlays,
        fixtures,
        figures,
    } = made;
    let mut overlays = overlays.into_iter();
    let attached = |mount: BorrowedFd<'_>, place: &str| mounting::attach(mount, CWD, place);
    if let Some(root) = overlays.next() {
        attached(root.as_fd(), place::NEW).step("attach the root")?;
    }
    let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
    let new = rustix::fs::open(place::NEW, flags, Mode::empty()).step("open the root")?;
    let sysfs = sysfs().step("create sysfs")?;
    attached(fixtures.as_fd(), place::FIXTURES).step("attach the fixtures")?;
    attached(sysfs.as_fd(), place::SYSFS).step("attach sysfs")?;
    if let Some(figures) = &figures {
        attached(figures.as_fd(), place::FIGURES).step("attach the FUSE file system")?;
    }
    let trees = Trees {
        fixtures: fixtures.as_fd(),
        sysfs: sysfs.as_fd(),
        figures: figures.as_ref().map(AsFd::as_fd),
    };
    let layout = Layout {
        name: parameters.name,
        overlays: parameters.overlays,
        processors: parameters.processors,
        groups: parameters.groups,
        figures: figures.is_some(),
        agent: place::AGENT,
    };
    // So that a cover that cannot be found is only ever missing where the kernel has nothing to hide.
    for cover in [Cover::File, Cover::Directory] {
        mounting::inside(fixtures.as_fd(), cover.path()).step("open a cover")?;
    }
    let mut put = |mount: &Mount, point: &str, path: &str| -> io::Result<()> {
        if matches!(mount.source, Source::Hidden(_)) && point.starts_with("/proc/") {
            return cover(mount, point, path);
        }
        let at = match mounting::inside(new.as_fd(), point) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && mount.when == When::KernelHasIt => return Ok(()),
            at => at?,
        };
        let piece = match mount.source {
            Source::Root | Source::Overlay => overlays.next().ok_or(io::ErrorKind::InvalidData)?,
            Source::New(kind, options) => mounting::create(kind, options, mount.attributes)?,
            Source::SharedMemory => shared_memory(parameters.shared_memory_mb, mount.attributes)?,
            Source::Again => {
                let again = mounting::clone(at.as_fd(), "")?;
                mounting::protect(again.as_fd(), mount.attributes)?;
                again
            }
            Source::Fixture(_)
            | Source::Hidden(_)
            | Source::Sysfs(_)
            | Source::Processor
            | Source::SysfsOfNetwork(_)
            | Source::Group
            | Source::Figure(_)
            | Source::Agent => trees.part(mount, path)?,
        };
        mounting::attach(piece.as_fd(), at.as_fd(), "")
    };
    for mount in MOUNTS {
        match mount.source {
            // It is there already.
            Source::Root => continue,
            Source::Group => enter_groups(socket)?,
            _ => {}
        }
        layout
            .each(mount, |point, path| {
                let failed = |error: io::Error| {
                    let what = mount.source.name();
                    io::Error::new(error.kind(), format!("attach {what} at {point}: {error}"))
                };
                put(mount, point, path).map_err(failed)
            })
            .step("build the tree")?;
    }
    rustix::process::fchdir(&new).step("enter the root")?;
    sys::pivot_to_current_directory().step("change the root")
}

/// Attaches a cover on the kernel's own `/proc`, which was mounted a moment ago, so no link is there. They are most of the mounts.
fn cover(mount: &Mount, point: &str, path: &str) -> io::Result<()> {
    let (from, to) = (format!("{}/{path}", place::FIXTURES), format!("{}{point}", place::NEW));
    match mounting::bind(&from, &to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && mount.when == When::KernelHasIt => Ok(()),
        other => other,
    }
}

/// Waits for the workload's groups, which the launcher creates meanwhile, and enters their namespace, in which they are the
/// roots.
fn enter_groups(socket: BorrowedFd<'_>) -> Result<(), Failure> {
    let namespace = match wire::receive(socket).step("wait for the cgroups")? {
        Some((_, mut namespaces)) if namespaces.len() == 1 => namespaces.swap_remove(0),
        _ => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)).step("wait for the cgroups"),
    };
    sys::setns(namespace.as_fd(), libc::CLONE_NEWCGROUP).step("enter the cgroup namespace")
}

/// A file system for shared memory of this size.
fn shared_memory(size_mb: u32, attributes: u64) -> io::Result<OwnedFd> {
    let size = format!("{size_mb}m");
    let inodes = (u64::from(size_mb) * INODES_PER_MB).to_string();
    let options = [("mode", "1777"), ("size", &size), ("nr_inodes", &inodes)];
    mounting::create("tmpfs", &options, attributes)
}

/// A sysfs of the network namespace of the calling process. There is one for each, so it is shared with nobody else.
///
/// # Errors
/// Those of the kernel.
pub(crate) fn sysfs() -> io::Result<OwnedFd> {
    mounting::create("sysfs", &[], mounts::SYSFS)
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

//! The list of what is mounted in a sandbox.
//!
//! A start attaches the entries of [`MOUNTS`] in their order (`setup`), a checkpoint tells CRIU about each mount of a sandbox
//! (`checkpoint::mounts`), and a restore has a source for each that CRIU does not make itself (`launcher::restore`). What the
//! three do with an entry follows from its [`Source`]: they match on all of them, so none can lack what another one has.
//!
//! `tests/mounts.txt` is the list as a sandbox sees it. A test compares the file with the list; others compare it with the
//! mount tables of sandboxes that were started and restored.

pub(crate) mod kinds;
pub(crate) mod trees;

pub(crate) use self::kinds::{Cover, FIGURES, FIXTURES, Mount, OVERLAY, SYSFS, Source, Treatment, When};
use self::kinds::{HARMLESS, UNCHANGED};
use crate::boot_id;
use crate::cgroup_view::Shown;
use crate::place;
use crate::processors::View;
use crate::rootfs::Overlay;
use crate::sys::attr;

/// Directory of the processors in sysfs.
const CPU: &str = "devices/system/cpu";
/// Mount point of that directory.
const CPU_POINT: &str = "/sys/devices/system/cpu";
/// Maximum number of open terminals in a sandbox: they count against the host-wide `kernel.pty.max`.
const TERMINALS: &str = "128";
/// Options of the terminals.
const PTS: &[(&str, &str)] = &[
    ("newinstance", ""),
    ("ptmxmode", "0666"),
    ("mode", "0620"),
    ("gid", "5"),
    ("max", TERMINALS),
];

/// The list, in the order in which a start attaches the mounts.
///
/// `/proc` requires an instance that is fully visible, so it comes before a start leaves the launcher's mounts. The launcher
/// creates the workload's groups meanwhile, and answers for the files of `/proc` after that, so these are late.
pub(crate) static MOUNTS: &[Mount] = &[
    always("/", Source::Root, OVERLAY),
    always("{overlay}", Source::Overlay, OVERLAY),
    always("/proc", Source::New("proc", &[]), HARMLESS),
    // What exposes the host or its other tenants.
    hidden_file("/proc/allocinfo"),
    hidden_file("/proc/bootconfig"),
    hidden_file("/proc/buddyinfo"),
    hidden_file("/proc/cmdline"),
    hidden_file("/proc/config.gz"),
    hidden_file("/proc/consoles"),
    hidden_file("/proc/devices"),
    hidden_file("/proc/diskstats"),
    hidden_file("/proc/dma"),
    hidden_file("/proc/interrupts"),
    hidden_file("/proc/iomem"),
    hidden_file("/proc/ioports"),
    hidden_file("/proc/kallsyms"),
    hidden_file("/proc/kcore"),
    hidden_file("/proc/key-users"),
    hidden_file("/proc/keys"),
    hidden_file("/proc/latency_stats"),
    hidden_file("/proc/locks"),
    hidden_file("/proc/misc"),
    hidden_file("/proc/modules"),
    hidden_file("/proc/mtrr"),
    hidden_file("/proc/partitions"),
    hidden_file("/proc/sched_debug"),
    hidden_file("/proc/schedstat"),
    hidden_file("/proc/softirqs"),
    hidden_file("/proc/swaps"),
    hidden_file("/proc/timer_list"),
    hidden_file("/proc/zoneinfo"),
    hidden_directory("/proc/acpi"),
    hidden_directory("/proc/asound"),
    hidden_directory("/proc/bus"),
    hidden_directory("/proc/driver"),
    hidden_directory("/proc/dynamic_debug"),
    hidden_directory("/proc/fs"),
    hidden_directory("/proc/irq"),
    hidden_directory("/proc/pressure"),
    hidden_directory("/proc/scsi"),
    // What may be read but not written.
    entry("/proc/sys", Source::Again, UNCHANGED, When::KernelHasIt),
    entry("/proc/sysrq-trigger", Source::Again, UNCHANGED, When::KernelHasIt),
    always("/dev", Source::Fixture("dev"), FIXTURES),
    // Programs check whether it exists and who may use it. No sandbox may, so no device can be opened on this mount:
    // EACCES, even for root inside, and the host's FUSE is never reached.
    always("/dev/fuse", Source::Fixture("fuse"), FIXTURES | attr::NODEV),
    always("/sys", Source::Fixture("sys"), FIXTURES),
    always("/proc/cgroups", Source::Fixture("cgroups"), UNCHANGED),
    always(boot_id::POINT, Source::Fixture("boot_id"), UNCHANGED),
    entry(CPU_POINT, Source::Sysfs(CPU), SYSFS, When::AllProcessors),
    entry(CPU_POINT, Source::Fixture("cpu"), UNCHANGED, When::SomeProcessors),
    entry(
        "/proc/cpuinfo",
        Source::Fixture("cpuinfo"),
        UNCHANGED,
        When::SomeProcessors,
    ),
    entry(
        "/sys/devices/system/cpu/cpu{processor}",
        Source::Processor,
        SYSFS,
        When::SomeProcessors,
    ),
    always("/dev/pts", Source::New("devpts", PTS), attr::NOSUID | attr::NOEXEC),
    always("/dev/shm", Source::SharedMemory, attr::NOSUID | attr::NODEV),
    always("/dev/mqueue", Source::New("mqueue", &[]), HARMLESS),
    always("/sys/class/net", Source::SysfsOfNetwork("class/net"), SYSFS),
    always(
        "/sys/devices/virtual/net",
        Source::SysfsOfNetwork("devices/virtual/net"),
        SYSFS,
    ),
    always("/sys/fs/cgroup/{group}", Source::Group, UNCHANGED),
    figure("/proc/meminfo", "meminfo"),
    figure("/proc/stat", "stat"),
    figure("/proc/uptime", "uptime"),
    figure("/proc/loadavg", "loadavg"),
    figure("/proc/vmstat", "vmstat"),
    always(
        "/run/ringfence/agent",
        Source::Agent,
        attr::RDONLY | attr::NOSUID | attr::NODEV,
    ),
];

const fn entry(point: &'static str, source: Source, attributes: u64, when: When) -> Mount {
    Mount {
        point,
        source,
        attributes,
        when,
    }
}

const fn always(point: &'static str, source: Source, attributes: u64) -> Mount {
    entry(point, source, attributes, When::Always)
}

const fn hidden_file(point: &'static str) -> Mount {
    entry(point, Source::Hidden(Cover::File), FIXTURES, When::KernelHasIt)
}

const fn hidden_directory(point: &'static str) -> Mount {
    entry(point, Source::Hidden(Cover::Directory), FIXTURES, When::KernelHasIt)
}

const fn figure(point: &'static str, name: &'static str) -> Mount {
    entry(point, Source::Figure(name), FIGURES, When::Figures)
}

/// The entry for a mount point of a sandbox, unless the point is not the same in all sandboxes.
pub(crate) fn at(point: &str) -> Option<&'static Mount> {
    MOUNTS.iter().find(|mount| mount.point == point)
}

/// The processors that a sandbox with these mount points sees one by one, ascending; none where it sees all of the host's.
pub(crate) fn processors(points: &[String]) -> Vec<u32> {
    let number = |point: &String| point.strip_prefix(CPU_POINT)?.strip_prefix("/cpu")?.parse().ok();
    let mut numbers: Vec<u32> = points.iter().filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

/// What decides which mounts one sandbox has, and where.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout<'a> {
    /// Name of its groups.
    pub(crate) name: &'a str,
    /// The overlays of its root file system, the first at `/`.
    pub(crate) overlays: &'a [Overlay],
    pub(crate) processors: &'a View,
    /// The groups that it sees.
    pub(crate) groups: &'a [Shown],
    /// Whether its agent serves files of `/proc`.
    pub(crate) figures: bool,
    /// Path of the agent's program, in the launcher.
    pub(crate) agent: &'a str,
}

impl Layout<'_> {
    /// Calls `visit` with each mount point that the sandbox has of an entry, and with the path in what the mount is a part of
    /// ([`trees::Trees::part`]); the path is empty where the mount is not a part of anything.
    ///
    /// # Errors
    /// Those of `visit`.
    pub(crate) fn each<E>(&self, mount: &Mount, mut visit: impl FnMut(&str, &str) -> Result<(), E>) -> Result<(), E> {
        let is_there = match mount.when {
            When::Always | When::KernelHasIt => true,
            When::AllProcessors => self.processors.files.is_none(),
            When::SomeProcessors => self.processors.files.is_some(),
            When::Figures => self.figures,
        };
        if !is_there {
            return Ok(());
        }
        match mount.source {
            Source::Root | Source::New(..) | Source::SharedMemory | Source::Again => visit(mount.point, ""),
            Source::Fixture(path) | Source::Sysfs(path) | Source::SysfsOfNetwork(path) | Source::Figure(path) => {
                visit(mount.point, path)
            }
            Source::Hidden(cover) => visit(mount.point, cover.path()),
            Source::Agent => visit(mount.point, self.agent),
            Source::Overlay => {
                let mut others = self.overlays.iter().skip(1);
                others.try_for_each(|overlay| visit(&overlay.target, ""))
            }
            Source::Processor => {
                let mut numbers = self.processors.numbers.iter();
                numbers.try_for_each(|number| {
                    let path = format!("{CPU}/cpu{number}");
                    visit(&format!("/sys/{path}"), &path)
                })
            }
            Source::Group => {
                let mut groups = self.groups.iter().enumerate();
                groups.try_for_each(|(index, group)| {
                    let path = format!("{}/{index}{}", place::CGROUPS, group.path(self.name));
                    visit(&group.point(), &path)
                })
            }
        }
    }
}

#[cfg(test)]
mod tests;

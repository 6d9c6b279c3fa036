//! Checks what this host supports, what each gap costs, and how to close it.

use std::os::fd::AsFd;
use std::path::Path;
use std::{fs, io};

use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions};

use crate::cgroup::Backend;
use crate::checkpoint::program;
use crate::egress::EgressSockets;
use crate::kernel::release_numbers;
use crate::mapped::can_map_ids;
use crate::settings::{CriuChoice, DriverSettings};
use crate::sys::{self, Cloned};
use crate::{base, container};

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// The host has no gap.
    Ok,
    /// The platform runs, but something is weaker, slower or missing.
    Degraded,
    /// The platform cannot run.
    Missing,
}

/// Result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// Outcome of the check.
    pub status: Status,
    /// What was found.
    pub detail: String,
    /// Consequence of the gap; empty when there is none.
    pub cost: &'static str,
    /// How to close the gap; empty when there is none.
    pub fix: &'static str,
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self {
            name,
            status: Status::Ok,
            detail: detail.into(),
            cost: "",
            fix: "",
        }
    }

    fn gap(
        name: &'static str,
        status: Status,
        detail: impl Into<String>,
        cost: &'static str,
        fix: &'static str,
    ) -> Self {
        Self {
            name,
            status,
            detail: detail.into(),
            cost,
            fix,
        }
    }
}

/// Runs all checks of a host whose sandboxes are containers, also of CRIU. Changes nothing.
#[must_use]
pub(crate) fn containers(settings: &DriverSettings) -> Vec<Check> {
    let mut checks = vec![
        root(),
        architecture(),
        kernel(),
        cgroups(settings),
        user_namespaces(),
        figures(),
        egress(),
        file_system("overlay", "sandboxes cannot be created", "enable CONFIG_OVERLAY_FS"),
        file_system("ext4", "sandboxes cannot be created", "enable CONFIG_EXT4_FS"),
        loop_devices(),
        mkfs(),
        base_template(settings),
        sudo(),
        pid_space(),
        kvm(),
        criu(&settings.criu),
    ];
    checks.extend(data_directory(&settings.data_dir));
    checks
}

fn root() -> Check {
    if !rustix::process::geteuid().is_root() {
        return Check::gap(
            "root",
            Status::Missing,
            format!("running as uid {}", rustix::process::geteuid().as_raw()),
            "sandboxes cannot be created",
            "run ringfence as root",
        );
    }
    /// SETUID 7, SETPCAP 8, NET_ADMIN 12, SYS_CHROOT 18, SYS_ADMIN 21, MKNOD 27, by capability number.
    const NEEDED: [(u32, &str); 8] = [
        (0, "CHOWN"),
        (1, "DAC_OVERRIDE"),
        (7, "SETUID"),
        (8, "SETPCAP"),
        (18, "SYS_CHROOT"),
        (19, "SYS_PTRACE"),
        (21, "SYS_ADMIN"),
        (27, "MKNOD"),
    ];
    let Ok(status) = fs::read_to_string("/proc/self/status") else {
        return Check::gap(
            "root",
            Status::Missing,
            "/proc is not mounted, so it does not say which capabilities this process has",
            "sandboxes cannot be created",
            "mount -t proc proc /proc",
        );
    };
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    let missing: Vec<&str> = NEEDED
        .iter()
        .filter(|(bit, _)| effective & (1 << bit) == 0)
        .map(|(_, name)| *name)
        .collect();
    if missing.is_empty() {
        Check::ok("root", "uid 0 with the capabilities needed")
    } else {
        Check::gap(
            "root",
            Status::Missing,
            format!("uid 0 without the capabilities {}", missing.join(", ")),
            "sandboxes cannot be created",
            "run ringfence outside a container, or in a privileged one",
        )
    }
}

fn architecture() -> Check {
    if cfg!(target_arch = "x86_64") {
        Check::ok("architecture", "x86-64")
    } else {
        Check::gap(
            "architecture",
            Status::Missing,
            std::env::consts::ARCH,
            "no sandbox was ever started on this architecture by a test",
            "use an x86-64 host",
        )
    }
}

fn kernel() -> Check {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    match release_numbers(&release) {
        Some(version) if version >= (6, 13) => Check::ok("kernel", release),
        Some(version) if version >= (6, 1) => Check::ok("kernel", format!("{release} (overlay layers by path)")),
        _ => Check::gap(
            "kernel",
            Status::Missing,
            release,
            "id-mapped overlay layers and other parts need Linux 6.1",
            "run Linux 6.1 or newer",
        ),
    }
}

/// The control groups, which are not needed where sandboxes may run without limits.
fn cgroups(settings: &DriverSettings) -> Check {
    let check = usable_cgroups(&settings.data_dir);
    match check.status {
        Status::Missing if settings.unlimited => Check {
            status: Status::Degraded,
            ..check
        },
        _ => check,
    }
}

fn usable_cgroups(data_dir: &Path) -> Check {
    match Backend::detect() {
        Ok(backend) if backend.is_occupied() => Check::gap(
            "cgroups",
            Status::Missing,
            "the root cgroup of this container contains processes, so no limits can be set below it",
            "sandboxes cannot be created",
            "this is a container: in it, mkdir /sys/fs/cgroup/init; \
             xargs -n 1 < /sys/fs/cgroup/cgroup.procs > /sys/fs/cgroup/init/cgroup.procs",
        ),
        Ok(Backend::V2(root)) => Check::ok("cgroups", format!("version 2 at {}", root.display())),
        Ok(Backend::Hybrid(root, _)) => Check::ok(
            "cgroups",
            format!("version 2 at {} with version 1 controllers", root.display()),
        ),
        Ok(Backend::None(_)) | Err(_) => Check::gap(
            "cgroups",
            Status::Missing,
            container::tree_of(data_dir, false)
                .err()
                .map(|e| e.to_string())
                .unwrap_or_default(),
            "no limits on memory, processes and CPU: one sandbox can exhaust the host",
            "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1), or set `unlimited = true` to run without limits",
        ),
    }
}

fn user_namespaces() -> Check {
    let max: u64 = fs::read_to_string("/proc/sys/user/max_user_namespaces")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0);
    if max == 0 {
        return Check::gap(
            "user namespaces",
            Status::Missing,
            "user.max_user_namespaces is 0 or the kernel has none",
            "sandboxes cannot be created",
            "sysctl -w user.max_user_namespaces=65536",
        );
    }
    // Others may be refused what root may do, and `root` is missing then.
    if rustix::process::geteuid().is_root()
        && let Err(error) = make_user_namespace()
    {
        let (why, fix) = match error.raw_os_error() {
            Some(libc::EPERM) => (
                "the kernel refuses this process a user namespace, as it does in a chroot",
                "run ringfence outside the chroot, or enter that root by pivot_root, as systemd-nspawn and container engines do",
            ),
            Some(libc::ENOSPC | libc::EUSERS) => (
                "there are as many user namespaces as the limits allow, or they are nested too deeply",
                "sysctl -w user.max_user_namespaces=65536, or run ringfence in fewer containers inside each other",
            ),
            _ => (
                "this process may not make a user namespace",
                "run ringfence outside a container, or in a privileged one",
            ),
        };
        let detail = format!("{why}: {error}");
        return Check::gap(
            "user namespaces",
            Status::Missing,
            detail,
            "sandboxes cannot be created",
            fix,
        );
    }
    Check::ok("user namespaces", format!("at most {max} per user"))
}

/// Makes a user namespace, which ends at once with the process that is born in it. The kernel has reasons to refuse that
/// nothing shows: a root that is not the one of the mount namespace, filters, modules of security.
fn make_user_namespace() -> io::Result<()> {
    match sys::clone3(libc::CLONE_NEWUSER, None)? {
        Cloned::Child => sys::exit_now(0),
        Cloned::Parent { pidfd, .. } => {
            let ended = rustix::process::waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
            match ended {
                // Reaped by the kernel, where this process ignores its children.
                Ok(_) | Err(Errno::CHILD) => Ok(()),
                Err(error) => Err(error.into()),
            }
        }
    }
}

fn file_system(name: &'static str, cost: &'static str, fix: &'static str) -> Check {
    let known = |text: &str| text.lines().any(|line| line.split_whitespace().last() == Some(name));
    if known(&fs::read_to_string("/proc/filesystems").unwrap_or_default()) {
        return Check::ok(name, "in the kernel");
    }
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let module = format!("/{name}.ko");
    let modules = fs::read_to_string(format!("/lib/modules/{release}/modules.dep")).unwrap_or_default();
    if modules
        .lines()
        .any(|line| line.split(':').next().is_some_and(|path| path.contains(&module)))
    {
        Check::ok(name, "as a module, loaded at first use")
    } else {
        Check::gap(name, Status::Missing, "not in the kernel", cost, fix)
    }
}

fn loop_devices() -> Check {
    if Path::new("/dev/loop-control").exists() {
        Check::ok("loop devices", "/dev/loop-control")
    } else {
        Check::gap(
            "loop devices",
            Status::Missing,
            "/dev/loop-control is missing",
            "sandboxes have no disk with a size limit",
            "modprobe loop",
        )
    }
}

fn mkfs() -> Check {
    let found = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"]
        .iter()
        .map(|dir| Path::new(dir).join("mkfs.ext4"));
    match found.into_iter().find(|path| path.exists()) {
        Some(path) => Check::ok("mkfs.ext4", path.display().to_string()),
        None => Check::gap(
            "mkfs.ext4",
            Status::Missing,
            "not found",
            "the disk template of sandboxes cannot be created",
            "apt-get install e2fsprogs",
        ),
    }
}

fn base_template(settings: &DriverSettings) -> Check {
    const NAME: &str = "base template";
    const COST: &str = "the template `base` is not available";
    if let Some(why) = base::unsupported_reason(Path::new("/")) {
        let fix = "merge /usr (Debian: apt-get install usrmerge) and install bash";
        return Check::gap(NAME, Status::Missing, why, COST, fix);
    }
    let suitable = Check::ok(NAME, "the host's /usr is suitable");
    // Others may not try, and `root` is missing then.
    if !settings.base || !rustix::process::geteuid().is_root() {
        return suitable;
    }
    match base::Versions::new(Path::new("/"), &settings.data_dir).copied_bytes() {
        Ok(None) => suitable,
        Ok(Some(bytes)) => {
            let kind = if is_overlay(Path::new("/usr")) {
                ", an overlay,"
            } else {
                ""
            };
            Check::ok(
                NAME,
                format!(
                    "the file system of /usr{kind} cannot have mapped ids: `base` keeps a copy of it, {} MB, in the data directory",
                    base::megabytes(bytes)
                ),
            )
        }
        Err(error) => untried(NAME, error.to_string()),
    }
}

/// The data directory, if sandboxes cannot have their layers there.
fn data_directory(data_dir: &Path) -> Option<Check> {
    const NAME: &str = "data directory";
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    // It may not exist yet, and is made in the nearest directory that does.
    let path = data_dir.ancestors().find(|path| path.is_dir())?;
    match can_map_ids(path) {
        Ok(true) => None,
        Ok(false) => {
            let kind = if is_overlay(path) { " (an overlay)" } else { "" };
            Some(Check::gap(
                NAME,
                Status::Missing,
                format!("the file system of {}{kind} cannot have mapped ids", path.display()),
                "sandboxes cannot be created",
                "choose a directory on ext4, XFS or btrfs with --data-dir; in a container, mount a volume on such a disk there",
            ))
        }
        Err(error) => Some(untried(
            NAME,
            format!("try to map the ids of {}: {error}", path.display()),
        )),
    }
}

/// A finding about mapped ids that could not be made. What forbids to try is mostly what other checks find missing.
fn untried(name: &'static str, why: String) -> Check {
    let fix = "close the other gaps first, and run `ringfence doctor` again";
    Check::gap(name, Status::Degraded, why, "sandboxes may not start", fix)
}

fn is_overlay(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| found.f_type == libc::OVERLAYFS_SUPER_MAGIC)
}

fn sudo() -> Check {
    if Path::new("/usr/bin/sudo").exists() {
        Check::ok("sudo", "/usr/bin/sudo, without a password for `user`")
    } else {
        Check::gap(
            "sudo",
            Status::Degraded,
            "not installed on the host",
            "`sudo` is missing in sandboxes of `base`; commands can still be run as root through the API",
            "apt-get install sudo",
        )
    }
}

fn pid_space() -> Check {
    let max: u64 = fs::read_to_string("/proc/sys/kernel/pid_max")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0);
    /// Service managers set 4 Mi on 64-bit machines; below this value many sandboxes may reach the limit.
    const ENOUGH: u64 = 131_072;
    if max >= ENOUGH {
        Check::ok("pid space", format!("{max}"))
    } else {
        Check::gap(
            "pid space",
            Status::Degraded,
            format!("kernel.pid_max is {max}"),
            "all sandboxes together share this many processes, less a reserve for the host",
            "sysctl -w kernel.pid_max=4194304",
        )
    }
}

fn kvm() -> Check {
    if Path::new("/dev/kvm").exists() {
        Check::ok("kvm", "/dev/kvm (not used by the container driver)")
    } else {
        Check::ok("kvm", "absent (not needed)")
    }
}

/// FUSE, which serves `/proc` files about memory, processor time and load in sandboxes.
fn figures() -> Check {
    let check = file_system(
        "fuse",
        "programs in sandboxes that read /proc/meminfo, stat or loadavg see the host's values",
        "enable CONFIG_FUSE_FS",
    );
    match check.status {
        Status::Missing => Check {
            status: Status::Degraded,
            ..check
        },
        _ => check,
    }
}

/// The kernel's part of the gateway to the internet.
fn egress() -> Check {
    match EgressSockets::probe() {
        Ok(()) => Check::ok("egress", "BPF programs of type sk_lookup"),
        Err(error) => Check::gap(
            "egress",
            Status::Degraded,
            format!("a BPF program of type sk_lookup was refused: {error}"),
            "sandboxes reach nothing outside",
            "enable CONFIG_BPF_SYSCALL and run ringfence with CAP_BPF and CAP_NET_ADMIN",
        ),
    }
}

fn criu(setting: &CriuChoice) -> Check {
    const COST: &str = "paused sandboxes keep their memory, those on disk cannot be resumed with their processes, and forks are refused";
    let gap = |why, fix| Check::gap("criu", Status::Degraded, why, COST, fix);
    match (program::choose(setting), setting) {
        (Ok(Some(criu)), _) => {
            let mut found = vec![format!(
                "{} at {}: pauses write processes to disk",
                criu.version,
                criu.path.display()
            )];
            if *setting == CriuChoice::Auto {
                let others = program::passed_over(&criu.path);
                found.extend(others.iter().map(|why| format!("passed over {why}")));
            }
            Check::ok("criu", found.join("; "))
        }
        (Ok(None), _) => Check::ok("criu", "off: paused sandboxes keep their memory"),
        (Err(why), CriuChoice::At(_)) => gap(
            why,
            "install CRIU 4.2 or later at the path in `pause.criu`, or remove the key",
        ),
        (Err(why), _) => gap(
            why,
            "install CRIU 4.2 or later as /usr/sbin/criu (Debian: the package criu of sid), or set `pause.criu = \"off\"`",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gap_says_what_it_costs_and_how_to_close_it() {
        let settings = DriverSettings::new("/nonexistent".into());
        let with_criu = DriverSettings {
            criu: CriuChoice::At("/nonexistent".into()),
            ..settings.clone()
        };
        for check in containers(&settings).into_iter().chain(containers(&with_criu)) {
            assert_eq!(check.status == Status::Ok, check.fix.is_empty(), "{check:?}");
            assert_eq!(check.status == Status::Ok, check.cost.is_empty(), "{check:?}");
        }
    }

    #[test]
    fn a_data_directory_whose_layers_cannot_have_mapped_ids_is_a_gap() {
        let (dir, beside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        assert_eq!(data_directory(&dir.path().join("not/yet")), None);
        crate::mapped::tests::with_overlay(dir.path(), beside.path(), || {
            let check = data_directory(&dir.path().join("not/yet")).unwrap();
            assert_eq!((check.name, check.status), ("data directory", Status::Missing));
            assert!(check.detail.contains("(an overlay)"), "{check:?}");
            assert!(check.fix.contains("volume"), "{check:?}");
        });
    }
}

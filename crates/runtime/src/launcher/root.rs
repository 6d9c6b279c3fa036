//! The mounts of a launcher: only what sandboxes are created from.

use std::ffi::CString;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{CWD, Mode};
use rustix::mount::{MountFlags, MountPropagationFlags};

use super::{BASE, HOST_DEV, SKELETON, STORED};
use crate::cgroup_view::{self, Shown};
use crate::layers::Layers;
use crate::rootfs::LAYERS_MAX;
use crate::setup::place;
use crate::{base, skeleton, sys};

/// Device nodes of the shared /dev: name, major, minor.
const NODES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// Replaces the host's mounts by a root with only what sandboxes are created from.
pub(super) fn make_private_root(data_dir: &Path, groups: &[Shown]) -> io::Result<()> {
    sys::unshare(libc::CLONE_NEWNS)?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    let root = data_dir.join("mnt");
    std::fs::create_dir_all(&root)?;
    tmpfs(&root)?;
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    for dir in [
        place::NEW,
        place::DEV,
        place::SYS,
        place::SYSFS,
        place::EMPTY,
        place::PROCESSORS,
        place::FIGURES,
        HOST_DEV,
        BASE,
        STORED,
        SKELETON,
        "/usr",
        "/proc",
    ] {
        std::fs::create_dir(at(dir))?;
    }
    for dir in ["/sys", "/cgroup-lock", place::LAYERS, place::DISK] {
        std::fs::create_dir(at(dir))?;
    }
    for index in 0..LAYERS_MAX {
        std::fs::create_dir(at(place::LAYERS).join(index.to_string()))?;
    }
    // A copy, so that a sandbox's mount table does not reveal where the platform is on the host, and an upgrade in
    // place does not affect running sandboxes.
    std::fs::copy("/proc/self/exe", at(place::AGENT))?;
    // Executable but not readable: the kernel then treats the memory of an agent as the host's, whatever its user id,
    // and keeps root inside from tracing it and from writing to its files in /proc.
    std::fs::set_permissions(at(place::AGENT), Permissions::from_mode(0o711))?;
    bind(Path::new("/dev"), &at(HOST_DEV))?;
    bind(Path::new("/usr"), &at("/usr"))?;
    bind(base::Versions::new(Path::new("/"), data_dir).path(), &at(BASE))?;
    bind(&Layers::path(data_dir), &at(STORED))?;
    bind(&skeleton::path(data_dir), &at(SKELETON))?;
    rustix::mount::mount("proc", at("/proc"), "proc", MountFlags::empty(), None)?;
    rustix::mount::mount("sysfs", at("/sys"), "sysfs", MountFlags::empty(), None)?;
    // An unused hierarchy, whose only effect is to make joining any cgroup cheap while it is mounted (0.1 ms instead of
    // 10 ms). Kernels before 6.0 do not have the option and are only slower.
    let faster = CString::new("none,name=ringfence,favordynmods")?;
    let _ = rustix::mount::mount(
        "cgroup",
        at("/cgroup-lock"),
        "cgroup",
        MountFlags::empty(),
        Some(faster.as_c_str()),
    );
    make_dev(&at(place::DEV))?;
    make_sys(&at(place::SYS))?;
    for (index, group) in groups.iter().enumerate() {
        let tree = at(place::CGROUPS).join(index.to_string());
        std::fs::create_dir_all(&tree)?;
        bind(&group.tree, &tree)?;
        let shown = at(place::SYS).join("fs/cgroup").join(&group.name);
        std::fs::create_dir_all(&shown)?;
        // Links as service managers create them where one hierarchy has both.
        if group.name == "cpu,cpuacct" {
            for name in ["cpu", "cpuacct"] {
                symlink(&group.name, shown.with_file_name(name))?;
            }
        }
    }
    std::fs::write(at(place::CONTROLLERS), cgroup_view::controllers()?)?;
    std::env::set_current_dir(&root)?;
    sys::pivot_to_current_directory()
}

fn tmpfs(at: &Path) -> io::Result<()> {
    tmpfs_with(at, MountFlags::NOSUID)
}

fn tmpfs_with(at: &Path, flags: MountFlags) -> io::Result<()> {
    Ok(rustix::mount::mount("tmpfs", at, "tmpfs", flags, Some(c"mode=755"))?)
}

fn bind(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(from, to)?)
}

/// The /dev that all sandboxes share. They cannot change it: it belongs to the host's root, which is not mapped in
/// them.
fn make_dev(dev: &Path) -> io::Result<()> {
    tmpfs(dev)?;
    for (name, major, minor) in NODES {
        let path = dev.join(name);
        let device = rustix::fs::makedev(major, minor);
        rustix::fs::mknodat(
            CWD,
            &path,
            rustix::fs::FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            device,
        )?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o666))?;
    }
    for dir in ["pts", "shm", "mqueue"] {
        std::fs::create_dir(dev.join(dir))?;
    }
    make_fuse(dev)?;
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ] {
        symlink(target, dev.join(link))?;
    }
    Ok(())
}

/// Programs check whether `/dev/fuse` exists and who may use it. No sandbox may, so the node is on a mount where no
/// device can be opened: EACCES, even for root inside, and the host's FUSE is never reached.
fn make_fuse(dev: &Path) -> io::Result<()> {
    let (at, aside) = (dev.join("fuse"), dev.join(".fuse"));
    std::fs::create_dir(&aside)?;
    tmpfs_with(&aside, MountFlags::NOSUID | MountFlags::NODEV)?;
    let node = aside.join("fuse");
    let device = rustix::fs::makedev(10, 229);
    let kind = rustix::fs::FileType::CharacterDevice;
    rustix::fs::mknodat(CWD, &node, kind, Mode::from_raw_mode(0o666), device)?;
    std::fs::set_permissions(&node, Permissions::from_mode(0o666))?;
    std::fs::write(&at, "")?;
    bind(&node, &at)?;
    rustix::mount::unmount(&aside, rustix::mount::UnmountFlags::DETACH)?;
    std::fs::remove_dir(&aside)
}

/// The part of /sys that all sandboxes share: mount points for what each has of its own.
fn make_sys(sys: &Path) -> io::Result<()> {
    tmpfs(sys)?;
    for dir in ["class/net", "devices/system/cpu", "devices/virtual/net", "fs/cgroup"] {
        std::fs::create_dir_all(sys.join(dir))?;
    }
    // The values of a machine without a hardware generator; programs read them to choose their source of randomness.
    let generator = sys.join("devices/virtual/misc/hw_random");
    std::fs::create_dir_all(&generator)?;
    for (file, text) in [
        ("rng_current", "none\n"),
        ("rng_available", "\n"),
        ("rng_selected", "0\n"),
    ] {
        std::fs::write(generator.join(file), text)?;
    }
    std::fs::create_dir(sys.join("class/misc"))?;
    symlink("../../devices/virtual/misc/hw_random", sys.join("class/misc/hw_random"))
}

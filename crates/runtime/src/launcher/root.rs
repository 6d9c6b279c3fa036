//! The mounts of a launcher: only what sandboxes are created from.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::mount::{MountFlags, MountPropagationFlags};

use super::program;
use crate::cgroup_view::Shown;
use crate::files::open_dir;
use crate::layers::Layers;
use crate::rootfs::LAYERS_MAX;
use crate::{base, mounting, place, skeleton, sys};

/// Path of the host's /dev in the launcher.
pub(super) const HOST_DEV: &str = "/host-dev";
/// Path of the versions of `base` in the launcher.
pub(super) const BASE: &str = "/base";
/// Path of the stored layers in the launcher.
pub(super) const STORED: &str = "/stored";
/// Path of the skeleton of file systems without `base` in the launcher.
pub(super) const SKELETON: &str = "/skeleton";

/// Replaces the host's mounts by a root with only what sandboxes are created from. The root is `memory`, which has the program
/// of agents ([`program::in_memory`]), or a new file system with a copy of it.
pub(super) fn make_private_root(data_dir: &Path, groups: &[Shown], memory: Option<OwnedFd>) -> io::Result<()> {
    sys::unshare(libc::CLONE_NEWNS)?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    let root = data_dir.join("mnt");
    std::fs::create_dir_all(&root)?;
    // A copy, so that a sandbox's mount table does not reveal where the platform is on the host, and an upgrade in
    // place does not affect running sandboxes.
    let memory = match memory {
        Some(memory) => memory,
        None => {
            let memory = program::memory()?;
            program::copy(File::open("/proc/self/exe")?, memory.as_fd(), program::file_name())?;
            memory
        }
    };
    mounting::attach(memory.as_fd(), open_dir(&root)?.as_fd(), "")?;
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    for dir in [
        place::NEW,
        place::FIXTURES,
        place::SYSFS,
        place::EMPTY,
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
    for (index, group) in groups.iter().enumerate() {
        let tree = at(place::CGROUPS).join(index.to_string());
        std::fs::create_dir_all(&tree)?;
        bind(&group.tree, &tree)?;
    }
    std::env::set_current_dir(&root)?;
    sys::pivot_to_current_directory()
}

fn bind(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(from, to)?)
}

//! What a launcher holds: the descriptors that it opened at its start, and what it has made ahead for the next sandbox.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::mount::FsOpenFlags;
use rustix::net::SocketType;

use super::child::{pair, reported};
use super::fixtures::Fixtures;
use super::root::{HOST_DEV, make_private_root};
use super::steps::During;
use crate::cgroup::open::OpenTree;
use crate::cgroup_view::Shown;
use crate::disk::{Loops, Spare, Template};
use crate::processors::Views;
use crate::settings::DriverSettings;
use crate::sys::{self, Cloned};
use crate::wire::{self, Hello};
use crate::{netlink, place};

/// How long a launcher waits for requests before it creates a disk and fixtures for the next one.
const IDLE: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 3_000_000,
};

/// A launcher of sandboxes, or one that restores them.
#[derive(Debug)]
pub(super) struct Launcher {
    pub(super) data_dir: OwnedFd,
    /// Path of the data directory on the host.
    pub(super) data_path: PathBuf,
    pub(super) settings: DriverSettings,
    /// The mounts of the host.
    pub(super) host_mounts: OwnedFd,
    pub(super) tree: OpenTree,
    pub(super) loops: Loops,
    pub(super) templates: Vec<Template>,
    /// A disk for the next sandbox.
    pub(super) spare: Option<Spare>,
    pub(super) fixtures: Fixtures,
    /// Fixtures for the next sandbox.
    pub(super) spare_fixtures: Option<OwnedFd>,
    /// Kind of the interface `eth0` on this host.
    pub(super) interface: &'static str,
    /// Whether overlayfs takes layers as descriptors (kernel 6.13). Older kernels get paths.
    pub(super) layer_fds: bool,
    /// Whether sandboxes have limits.
    pub(super) limited: bool,
    /// Whether sandboxes have their own `/proc` files.
    pub(super) figures: bool,
    /// The cgroups that sandboxes see.
    pub(super) groups: Vec<Shown>,
    pub(super) views: Views,
}

impl Launcher {
    /// Opens what a launcher holds, and makes its mounts.
    ///
    /// # Errors
    /// When the host lacks what sandboxes need.
    pub(super) fn prepare(hello: &Hello, tree: OpenTree, in_cpuset: bool, memory: Option<OwnedFd>) -> io::Result<Self> {
        let data_dir = crate::files::open_dir(&hello.settings.data_dir).during("open the data directory")?;
        sys::keep_capabilities_over_setuid(true).during("keep capabilities")?;
        let groups = hello.tree.shown(in_cpuset);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let host_mounts =
            rustix::fs::open("/proc/self/ns/mnt", flags, Mode::empty()).during("open the host's mounts")?;
        let fixtures = Fixtures::new(&groups).during("read the host's controllers")?;
        make_private_root(&hello.settings.data_dir, &groups, memory).during("create the launcher's mounts")?;
        let interface = find_interface().during("find a kind of network interface")?;
        let loops = Loops::open(Path::new(HOST_DEV)).during("open /dev/loop-control")?;
        Ok(Self {
            data_dir,
            data_path: hello.settings.data_dir.clone(),
            settings: hello.settings.clone(),
            host_mounts,
            tree,
            loops,
            templates: Vec::new(),
            spare: None,
            spare_fixtures: Some(fixtures.make().during("create fixtures")?),
            fixtures,
            interface,
            layer_fds: takes_layer_fds().during("open overlayfs")?,
            limited: hello.tree.is_limited(),
            figures: hello.tree.is_limited() && crate::figures::are_possible(Path::new(HOST_DEV)),
            groups,
            views: Views::default(),
        })
    }

    /// Creates a disk of this size and fixtures for the next sandbox, unless they are waiting already. Disks that are
    /// allocated in full are not created in advance: they would take space from others.
    pub(super) fn prepare_next(&mut self, disk_mb: Option<u32>, socket: &OwnedFd) {
        let is_ready = |disk_mb: &u32| self.spare.as_ref().is_some_and(|spare| spare.disk_mb == *disk_mb);
        let disk_mb = disk_mb.filter(|disk_mb| !self.settings.reserve_disks && !is_ready(disk_mb));
        if disk_mb.is_none() && self.spare_fixtures.is_some() {
            return;
        }
        let mut waiting = [PollFd::new(socket, PollFlags::IN)];
        if !matches!(rustix::event::poll(&mut waiting, Some(&IDLE)), Ok(0)) {
            return;
        }
        // If one of them fails, the next start reports why.
        if self.spare_fixtures.is_none() {
            self.spare_fixtures = self.fixtures.make().ok();
        }
        if let Some(disk_mb) = disk_mb {
            let spare = self
                .template(disk_mb)
                .and_then(|index| Spare::make(self.data_dir.as_fd(), &self.templates[index], &self.loops));
            self.spare = spare.ok();
        }
    }

    /// Index of the template for disks of a size.
    ///
    /// # Errors
    /// When there is none for this size.
    pub(super) fn template(&mut self, disk_mb: u32) -> io::Result<usize> {
        if let Some(index) = self.templates.iter().position(|template| template.disk_mb == disk_mb) {
            return Ok(index);
        }
        let template = Template::load(self.data_dir.as_fd(), disk_mb).during("load the disk template")?;
        self.templates.push(template);
        Ok(self.templates.len() - 1)
    }
}

/// Determines, in a temporary network namespace, which kind of interface the kernel has.
fn find_interface() -> io::Result<&'static str> {
    let (ours, theirs) = pair(SocketType::SEQPACKET)?;
    if let Cloned::Child = sys::clone3(libc::CLONE_NEWNET, None)? {
        let answer = match netlink::first_kind() {
            Ok(index) => netlink::KINDS[index].to_owned(),
            Err(error) => error.to_string(),
        };
        let _ = wire::send(theirs.as_fd(), answer.as_bytes(), &[]);
        sys::exit_now(0);
    }
    drop(theirs);
    let answer = reported(wire::receive(ours.as_fd())?).to_string();
    netlink::KINDS
        .into_iter()
        .find(|kind| **kind == answer)
        .ok_or_else(|| io::Error::other(answer))
}

/// Whether overlayfs takes layers as descriptors, which it does since 6.13. From 6.5 on it has the option but requires
/// a path, and before that fsconfig rejects descriptors for it.
fn takes_layer_fds() -> io::Result<bool> {
    let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let layer = crate::files::open_dir(Path::new(place::EMPTY))?;
    Ok(rustix::mount::fsconfig_set_fd(&fs, "lowerdir+", &layer).is_ok())
}

//! The launcher: the process that clones sandboxes.
//!
//! Code after `clone` is only sound in a process with one thread, and the platform has many, so the platform executes
//! itself again as this process and sends it requests over a packet socket. It has its own mount namespace with a
//! handful of mounts, because a child's namespace starts as a copy of its parent's, and it keeps every descriptor it
//! needs open, because the host's paths are not reachable there. It ends when the platform closes the socket, even in
//! the middle of a start: every wait polls both.
//!
//! What a start and a restore have in common is in `prepare`, what each does with it in `start` and `restore`.
//!
//! Launchers that restore sandboxes (see `restore`) are others, so that no start waits for a restore. Another one only gives
//! new spawners to sandboxes that have lost theirs.

mod child;
mod fixtures;
mod ids;
mod pages;
mod prepare;
mod program;
mod progress;
mod restore;
mod root;
mod spawner;
mod start;
mod steps;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::FsOpenFlags;
use rustix::net::SocketType;

use self::child::{pair, reported};
use self::fixtures::Fixtures;
use self::root::{HOST_DEV, make_private_root};
use self::steps::During;
use crate::cgroup::open::OpenTree;
use crate::cgroup_view::Shown;
use crate::disk::{Loops, Spare, Template};
use crate::files::write_at;
use crate::processors::Views;
use crate::settings::DriverSettings;
use crate::setup;
use crate::slot::Name;
use crate::sys::{self, Cloned};
use crate::wire::{self, Hello, Reply, Request, Work};
use crate::{archive, checkpoint, commit, netlink, place, rebase, schedule, seccomp};

/// How long a launcher waits for requests before it creates a disk and fixtures for the next one.
const IDLE: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 3_000_000,
};

/// Runs a launcher on the socket that is its standard input, until the platform closes it.
#[must_use]
pub fn main() -> ExitCode {
    let memory = program::in_memory();
    let socket = match rustix::io::fcntl_dupfd_cloexec(io::stdin(), setup::ABOVE_PLACES) {
        Ok(socket) => socket,
        Err(_) => return ExitCode::FAILURE,
    };
    match serve(&socket, memory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The platform, waiting for the first reply, includes this in its own error.
            let _ = wire::send_message(&socket, &Reply::Failed(error.to_string()), &[]);
            ExitCode::FAILURE
        }
    }
}

fn serve(socket: &OwnedFd, memory: Option<OwnedFd>) -> io::Result<()> {
    sys::ignore_children();
    // A new session: input on the platform's terminal is for the platform only, and a launcher ends when its socket
    // closes. Cannot fail: a new process does not lead a group.
    let _ = rustix::process::setsid();
    sys::hide_memory()?;
    // Where the kernel rejects it, starts are only slower.
    let _ = schedule::platform();
    // Attached are entries of the registry, which stay locked while this process lives.
    let Some((hello, _entries)) = wire::receive_message::<Hello>(socket)? else {
        return Ok(());
    };
    let in_cpuset = hello.tree.join_cpuset();
    let tree = OpenTree::open(&hello.tree, in_cpuset).during("open the cgroups")?;
    tree.join_v1().during("join the cgroups")?;
    LazyLock::force(&seccomp::PROGRAM);
    reset_oom_score().during("reset oom_score_adj")?;
    match hello.work {
        Work::Sandboxes | Work::Restores => Launcher::prepare(&hello, tree, in_cpuset, memory)?.serve(socket),
        Work::Spawners => spawner::serve(socket, &tree, hello.settings.open_files),
        Work::Commit => commit::serve(socket, &hello.settings.data_dir),
        Work::Rebase => rebase::serve(socket, &hello.settings.data_dir),
        Work::Dump => checkpoint::dump::serve(socket, &hello.tree),
        Work::Facts => {
            drop(tree);
            checkpoint::facts::serve(socket)
        }
        Work::Archive => {
            // The process keeps no directory of the host.
            drop(tree);
            archive::serve(socket, &hello.settings.data_dir)
        }
    }
}

#[derive(Debug)]
struct Launcher {
    data_dir: OwnedFd,
    /// Path of the data directory on the host.
    data_path: PathBuf,
    settings: DriverSettings,
    /// The mounts of the host.
    host_mounts: OwnedFd,
    tree: OpenTree,
    loops: Loops,
    templates: Vec<Template>,
    /// A disk for the next sandbox.
    spare: Option<Spare>,
    fixtures: Fixtures,
    /// Fixtures for the next sandbox.
    spare_fixtures: Option<OwnedFd>,
    /// Kind of the interface `eth0` on this host.
    interface: &'static str,
    /// Whether overlayfs takes layers as descriptors (kernel 6.13). Older kernels get paths.
    layer_fds: bool,
    /// Whether sandboxes have limits.
    limited: bool,
    /// Whether sandboxes have their own `/proc` files.
    figures: bool,
    /// The cgroups that sandboxes see.
    groups: Vec<Shown>,
    views: Views,
}

impl Launcher {
    fn prepare(hello: &Hello, tree: OpenTree, in_cpuset: bool, memory: Option<OwnedFd>) -> io::Result<Self> {
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

    fn serve(&mut self, socket: &OwnedFd) -> io::Result<()> {
        wire::send_message(socket, &Reply::Ready, &[])?;
        let mut disk_mb = None;
        loop {
            self.prepare_next(disk_mb.take(), socket);
            // The entries of the registry stay locked until processes show that the ids are in use.
            let Some((request, _entries)) = wire::receive_message::<Request>(socket)? else {
                return Ok(());
            };
            let Request::Start {
                name,
                base_id,
                rootfs,
                resources,
                on_kept_disk,
                processes,
            } = request
            else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            disk_mb = (!on_kept_disk).then_some(resources.disk_mb);
            let started = Name::parse(&name).ok_or(io::ErrorKind::InvalidInput.into());
            let started = started.and_then(|name| match &processes {
                None => self.start(&name, base_id, &rootfs, on_kept_disk, &resources, socket.as_fd()),
                Some(checkpoint) => self.restore(&name, base_id, &rootfs, &resources, checkpoint, socket.as_fd()),
            });
            let (reply, fds) = started.unwrap_or_else(|error| (Reply::Failed(error.to_string()), Vec::new()));
            let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
            wire::send_message(socket, &reply, &fds)?;
        }
    }

    /// Creates a disk of this size and fixtures for the next sandbox, unless they are waiting already. Disks that are
    /// allocated in full are not created in advance: they would take space from others.
    fn prepare_next(&mut self, disk_mb: Option<u32>, socket: &OwnedFd) {
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
    fn template(&mut self, disk_mb: u32) -> io::Result<usize> {
        if let Some(index) = self.templates.iter().position(|template| template.disk_mb == disk_mb) {
            return Ok(index);
        }
        let template = Template::load(self.data_dir.as_fd(), disk_mb).during("load the disk template")?;
        self.templates.push(template);
        Ok(self.templates.len() - 1)
    }
}

/// A service manager may have protected the platform from the OOM killer. Sandboxes must not inherit that, nor be able
/// to restore it.
fn reset_oom_score() -> io::Result<()> {
    const FILE: &str = "/proc/self/oom_score_adj";
    if std::fs::read_to_string(FILE)?.starts_with('-') {
        write_at(CWD, FILE, "0")
    } else {
        Ok(())
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

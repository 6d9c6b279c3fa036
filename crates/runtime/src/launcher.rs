//! The launcher: the process that clones sandboxes.
//!
//! Code after `clone` is only sound in a process with one thread, and the platform has many, so the platform executes
//! itself again as this process and sends it requests over a packet socket. It has its own mount namespace with a
//! handful of mounts, because a child's namespace starts as a copy of its parent's, and it keeps every descriptor it
//! needs open, because the host's paths are not reachable there. It ends when the platform closes the socket, even in
//! the middle of a start: every wait polls both.
//!
//! A start, with the child's side in `setup`:
//!
//! ```text
//!   launcher                                    child (pid 1 of the sandbox)
//!   create the sandbox's cgroup and the agent's, with limits
//!   clone3 into the agent's cgroup  ──────────▶ set up lo and eth0
//!   write the id maps
//!   create the disk, mount the overlays,
//!   create the fixtures
//!   send them  ───────────────────────────────▶ build the tree, change the root
//!   create the workload's cgroup, with limits
//!                       ◀────────────────────── ready
//!   clone the spawner into the workload's        confine, exec the agent
//!   cgroup and the sandbox's namespaces
//!   (see `spawner`)
//!   both sockets closed by exec: reply
//! ```
//!
//! Launchers that restore sandboxes (see `restore`) are others, so that no start waits for a restore. Another one only gives
//! new spawners to sandboxes that have lost theirs.
//!
//! The user namespace is created by a thread whose user id is the first of the sandbox's range: inotify instances,
//! pending signals, message queues and locked memory are charged to the creator, and would otherwise be shared with the
//! host's root.

mod child;
mod fixtures;
mod progress;
mod restore;
mod root;
mod spawner;
mod steps;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::LazyLock;

use model::resources::Resources;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, OpenTreeFlags};
use rustix::net::SocketType;

use self::child::{ChildWait, Unfinished, has_report, pair, reported, run_child};
use self::fixtures::Fixtures;
use self::root::{BASE, HOST_DEV, SKELETON, STORED, make_private_root};
use self::steps::{During, STEP, Stages};
use crate::boot_id::BootId;
use crate::cgroup::open::OpenTree;
use crate::cgroup_view::Shown;
use crate::disk::{self, Loops, Spare, Template};
use crate::figures::Figures;
use crate::files::write_at;
use crate::processors::{View, Views};
use crate::rootfs::{Layer, Overlay, Rootfs};
use crate::setup::{self, Clocks, Parameters, place};
use crate::slot::{IDS_PER_SLOT, Name};
use crate::sys::{self, Cloned, attr};
use crate::wire::{self, Hello, Reply, Request, Work};
use crate::{archive, base, checkpoint, commit, netlink, rebase, schedule, seccomp, skeleton};

/// How long a launcher waits for requests before it creates a disk and fixtures for the next one.
const IDLE: rustix::time::Timespec = rustix::time::Timespec {
    tv_sec: 0,
    tv_nsec: 3_000_000,
};
/// Value of `oom_score_adj` that exempts a process from the OOM killer.
const NEVER_KILLED: &str = "-1000";

/// Runs a launcher on the socket that is its standard input, until the platform closes it.
#[must_use]
pub fn main() -> ExitCode {
    let socket = match rustix::io::fcntl_dupfd_cloexec(io::stdin(), setup::ABOVE_PLACES) {
        Ok(socket) => socket,
        Err(_) => return ExitCode::FAILURE,
    };
    match serve(&socket) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The platform, waiting for the first reply, includes this in its own error.
            let _ = wire::send_message(&socket, &Reply::Failed(error.to_string()), &[]);
            ExitCode::FAILURE
        }
    }
}

fn serve(socket: &OwnedFd) -> io::Result<()> {
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
        Work::Sandboxes | Work::Restores => Launcher::prepare(&hello, tree, in_cpuset)?.serve(socket),
        Work::Spawners => spawner::serve(socket, &tree, hello.open_files),
        Work::Commit => commit::serve(socket, &hello.data_dir),
        Work::Rebase => rebase::serve(socket, &hello.data_dir),
        Work::Dump => checkpoint::dump::serve(socket, &hello.tree),
        Work::Facts => {
            drop(tree);
            checkpoint::facts::serve(socket)
        }
        Work::Archive => {
            // The process keeps no directory of the host.
            drop(tree);
            archive::serve(socket, &hello.data_dir)
        }
    }
}

#[derive(Debug)]
struct Launcher {
    data_dir: OwnedFd,
    /// Path of the data directory on the host.
    data_path: PathBuf,
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
    /// Whether disks are allocated in full.
    reserve_disks: bool,
    /// How many files a process of a sandbox may have open, unless it asks for more.
    open_files: u32,
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
    fn prepare(hello: &Hello, tree: OpenTree, in_cpuset: bool) -> io::Result<Self> {
        let data_dir = crate::files::open_dir(&hello.data_dir).during("open the data directory")?;
        sys::keep_capabilities_over_setuid(true).during("keep capabilities")?;
        let groups = hello.tree.shown(in_cpuset);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let host_mounts =
            rustix::fs::open("/proc/self/ns/mnt", flags, Mode::empty()).during("open the host's mounts")?;
        let fixtures = Fixtures::new(&groups).during("read the host's controllers")?;
        make_private_root(&hello.data_dir, &groups).during("create the launcher's mounts")?;
        let interface = find_interface().during("find a kind of network interface")?;
        let loops = Loops::open(Path::new(HOST_DEV)).during("open /dev/loop-control")?;
        Ok(Self {
            data_dir,
            data_path: hello.data_dir.clone(),
            host_mounts,
            tree,
            loops,
            templates: Vec::new(),
            spare: None,
            spare_fixtures: Some(fixtures.make().during("create fixtures")?),
            fixtures,
            reserve_disks: hello.reserve_disks,
            open_files: hello.open_files,
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
                None => self.start((&name, base_id), (&rootfs, on_kept_disk), &resources, socket.as_fd()),
                Some(image) => self.restore((&name, base_id), &rootfs, &resources, image, socket.as_fd()),
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
        let disk_mb = disk_mb.filter(|disk_mb| !self.reserve_disks && !is_ready(disk_mb));
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

    /// The fixtures of a new run with these processors, not attached yet.
    fn make_fixtures(&mut self, processors: &View, boot_id: &BootId) -> io::Result<OwnedFd> {
        let fixtures = match self.spare_fixtures.take() {
            Some(fixtures) => fixtures,
            None => self.fixtures.make()?,
        };
        fixtures::add_run(fixtures.as_fd(), boot_id)?;
        fixtures::add_processors(fixtures.as_fd(), processors)?;
        Ok(fixtures)
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

    fn start(
        &mut self,
        (name, base_id): (&Name, u32),
        (rootfs, on_kept_disk): (&Rootfs, bool),
        resources: &Resources,
        asked_by: BorrowedFd<'_>,
    ) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let wait = ChildWait { asked_by, step: STEP };
        let mut stages = Stages::new();
        let agent_groups = self.tree.create(name, resources).during("create the cgroups")?;
        stages.end("cgroup");

        let cores = self.limited.then_some(resources.cpu_count);
        let processors = self.views.of(cores, name.slot).during("select processors")?;
        let (setup, theirs) = pair(SocketType::SEQPACKET)?;
        let (boot, agent_boot) = pair(SocketType::STREAM)?;
        let (agent_spawner, spawner) = pair(SocketType::SEQPACKET)?;
        sys::set_ids(base_id, base_id, 0).during("switch to the sandbox's user id")?;
        let parameters = Parameters {
            name: &name.to_string(),
            interface: self.interface,
            overlays: &rootfs.overlays,
            // Files there count as memory of the sandbox, and the OOM killer does not free them: with a larger size, a
            // full /dev/shm would leave no memory for the `rm` that empties it.
            shared_memory_mb: resources.memory_mb / 2,
            processors: &processors,
            groups: &self.groups,
            open_files: self.open_files,
            began: Clocks::now(),
        };
        let cloned = sys::clone3(sys::NAMESPACES, agent_groups.birth.as_ref().map(AsFd::as_fd));
        let (pid, pidfd) = match cloned {
            Ok(Cloned::Child) => run_child(&theirs, |socket| {
                let joined = agent_groups.join();
                joined.map_err(|error| setup::failure("join the cgroup", error))?;
                setup::become_agent(socket, &parameters, agent_boot, agent_spawner)
            }),
            Ok(Cloned::Parent { pid, pidfd }) => (pid, pidfd),
            Err(error) => {
                sys::set_ids(0, 0, 0)?;
                return Err(error).during("clone");
            }
        };
        let child = Unfinished::new(pidfd);
        sys::set_ids(0, 0, 0)?;
        drop((theirs, agent_boot, agent_spawner));
        self.tree.record_agent(name, pid, place::AGENT)?;
        let of_child = |file: &str| format!("/proc/{pid}/{file}");
        let map = format!("0 {base_id} {IDS_PER_SLOT}\n");
        // When the sandbox runs out of memory, its agent is killed last. Where this process may not set that, the
        // workload's processes are killed first as long as they keep their own score.
        let _ = write_at(CWD, &of_child("oom_score_adj"), NEVER_KILLED);
        write_at(CWD, &of_child("uid_map"), &map)?;
        write_at(CWD, &of_child("gid_map"), &map)?;
        let namespace = |kind: &str| {
            rustix::fs::open(
                of_child(&format!("ns/{kind}")),
                OFlags::RDONLY | OFlags::CLOEXEC,
                Mode::empty(),
            )
        };
        let user = namespace("user").during("open the user namespace")?;
        let net = namespace("net").during("open the network namespace")?;
        stages.end("clone");

        let disk = if on_kept_disk {
            self.kept_disk(name)?
        } else {
            self.make_disk(name, rootfs, resources.disk_mb)?
        };
        sys::mount_setattr(disk.as_fd(), false, attr::IDMAP, Some(user.as_fd())).during("map the disk's ids")?;
        stages.end("disk");
        let overlays = self.overlays(rootfs, disk.as_fd(), user.as_fd(), base_id)?;
        let figures = if self.figures {
            Figures::make(Path::new(HOST_DEV)).during("mount the FUSE file system")?
        } else {
            None
        };
        let fixtures = BootId::new().and_then(|boot_id| self.make_fixtures(&processors, &boot_id));
        let fixtures = fixtures.during("create the fixtures")?;
        let mut mounts: Vec<BorrowedFd<'_>> = overlays.iter().chain([&fixtures]).map(AsFd::as_fd).collect();
        mounts.extend(
            figures
                .iter()
                .flat_map(|figures| [figures.mount.as_fd(), figures.kernel.as_fd()]),
        );
        wire::send(setup.as_fd(), b"go", &mounts).during("send the file system")?;
        drop((overlays, fixtures, disk));
        stages.end("overlay");

        // In parallel with the child building its tree.
        let work = self
            .tree
            .create_work(name, resources)
            .during("create the workload's cgroups")?;
        match wait.receive(setup.as_fd()).during("set up")? {
            Some((message, _)) if message == setup::BEGUN => {}
            other => return Err(reported(other)).during("set up"),
        }
        let spawned = spawner::begin(child.first(), &work, Some(spawner), self.open_files)?;
        let joined = spawned
            .namespace(wait)
            .during("create the cgroup namespace")
            .and_then(|namespace| wire::send(setup.as_fd(), b"groups", &[namespace.as_fd()]));
        if let Err(error) = joined {
            // Either fails as well when the child has failed meanwhile, which then has said why.
            return if has_report(setup.as_fd()) {
                Err(reported(wait.receive(setup.as_fd()).during("set up")?)).during("set up")
            } else {
                Err(error)
            };
        }
        if let Some(figures) = figures {
            let answered = wait.serve(setup.as_fd(), figures.kernel.as_fd(), || figures.answer());
            answered.during("serve the FUSE file system")?;
        }
        match wait.receive(setup.as_fd()).during("set up")? {
            Some((message, _)) if message == setup::READY => {}
            other => return Err(reported(other)).during("set up"),
        }
        stages.end("setup");
        spawned.enter().during("start the spawner")?;
        wait.finished(setup.as_fd()).during("agent")?;
        spawned.finish(wait).during("spawner")?;
        stages.end("exec");
        let mut fds = child.finish();
        fds.extend([net, boot]);
        Ok((Reply::Started { pid, stages: stages.0 }, fds))
    }

    /// Mounts the overlays of a sandbox, in their order.
    fn overlays(
        &self,
        rootfs: &Rootfs,
        disk: BorrowedFd<'_>,
        user: BorrowedFd<'_>,
        base_id: u32,
    ) -> io::Result<Vec<OwnedFd>> {
        // Once for all overlays: a detached mount cannot be attached again.
        let _disk_at = if self.layer_fds {
            None
        } else {
            Some(Attached::at(place::DISK, disk).during("attach the disk")?)
        };
        // Opened once, so that all layers are of one version.
        let base = if rootfs.has_base() {
            format!("{BASE}/{}", base::CURRENT)
        } else {
            place::EMPTY.to_owned()
        };
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        let base = rustix::fs::open(base, flags, Mode::empty()).during("open the base")?;
        rootfs
            .overlays
            .iter()
            .map(|overlay| {
                let mount = self.overlay(overlay, base.as_fd(), disk, user, base_id);
                mount.during(&format!("mount {}", overlay.target))
            })
            .collect()
    }

    /// Mounts a disk that exists.
    fn kept_disk(&self, name: &Name) -> io::Result<OwnedFd> {
        let image = disk::open(self.data_dir.as_fd(), &name.disk).during("open the disk")?;
        let mounted = self.loops.mount(image.as_fd(), !self.reserve_disks);
        mounted.during("mount the disk")
    }

    fn make_disk(&mut self, name: &Name, rootfs: &Rootfs, disk_mb: u32) -> io::Result<OwnedFd> {
        let spare = self.spare.take().filter(|spare| spare.disk_mb == disk_mb);
        let disk = match spare.map(|spare| spare.into_disk(&name.disk)) {
            Some(Ok(disk)) => disk,
            // Its image may have been removed.
            Some(Err(_)) | None => {
                let index = self.template(disk_mb)?;
                let image = self.templates[index]
                    .instantiate(self.data_dir.as_fd(), &name.disk, self.reserve_disks)
                    .during("create the disk")?;
                self.loops
                    .mount(image.as_fd(), !self.reserve_disks)
                    .during("mount the disk")?
            }
        };
        for overlay in &rootfs.overlays {
            disk::make_upper(disk.as_fd(), &overlay.upper).during("create an upper")?;
        }
        Ok(disk)
    }

    /// An overlay with the ids of its layers mapped into the sandbox, not attached yet. Where overlayfs takes layers by
    /// path only, the disk is attached at [`place::DISK`], and the others get a path during the mount.
    fn overlay(
        &self,
        Overlay { layers, upper, .. }: &Overlay,
        base: BorrowedFd<'_>,
        disk: BorrowedFd<'_>,
        user: BorrowedFd<'_>,
        base_id: u32,
    ) -> io::Result<OwnedFd> {
        let lowers = layers
            .iter()
            .map(|layer| match layer {
                Layer::BaseRoot => mapped_layer(base, "root", user),
                Layer::BaseUsr => mapped_layer(base, "usr", user),
                Layer::HostUsr => mapped_layer(CWD, "/usr", user),
                Layer::Stored { layer, part } => {
                    mapped_layer(CWD, &format!("{STORED}/{layer}/{}", part.as_str()), user)
                }
                Layer::Skeleton(part) => mapped_layer(CWD, &format!("{SKELETON}/{}", skeleton::name(*part)), user),
            })
            .collect::<io::Result<Vec<_>>>()?;
        let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        for (key, value) in [
            ("index", "on"),
            ("nfs_export", "on"),
            ("metacopy", "off"),
            ("redirect_dir", "off"),
        ] {
            rustix::mount::fsconfig_set_string(&fs, key, value)?;
        }
        if self.layer_fds {
            // What a new one has otherwise, and the mount table shows it when the disk is mounted again, too.
            rustix::mount::fsconfig_set_string(&fs, "uuid", "on")?;
            for lower in &lowers {
                rustix::mount::fsconfig_set_fd(&fs, "lowerdir+", lower)?;
            }
            for part in ["upper", "work"] {
                let dir = crate::files::open_dir_at(disk, &format!("{upper}/{part}"))?;
                rustix::mount::fsconfig_set_fd(&fs, format!("{part}dir"), &dir)?;
            }
            return create_as(&fs, base_id);
        }
        let attached = lowers
            .iter()
            .enumerate()
            .map(|(index, lower)| Attached::at(&format!("{}/{index}", place::LAYERS), lower.as_fd()))
            .collect::<io::Result<Vec<_>>>()?;
        let paths: Vec<&str> = attached.iter().map(|lower| lower.0.as_str()).collect();
        rustix::mount::fsconfig_set_string(&fs, "lowerdir", paths.join(":"))?;
        for part in ["upper", "work"] {
            rustix::mount::fsconfig_set_string(&fs, format!("{part}dir"), format!("{}/{upper}/{part}", place::DISK))?;
        }
        create_as(&fs, base_id)
    }
}

/// A temporarily attached layer.
struct Attached(String);

impl Attached {
    fn at(path: &str, mount: BorrowedFd<'_>) -> io::Result<Self> {
        setup::attach(mount, CWD, path)?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.as_str(), rustix::mount::UnmountFlags::DETACH);
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

/// A clone of one of the launcher's mounts with its ids mapped, read-only.
fn mapped_layer(dir: BorrowedFd<'_>, path: &str, user: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let layer = rustix::mount::open_tree(dir, path, flags)?;
    sys::mount_setattr(layer.as_fd(), false, attr::IDMAP | attr::RDONLY, Some(user))?;
    Ok(layer)
}

/// Creates and mounts an overlay with the file-system ids of the sandbox's root: an id that is not in the layers' maps
/// could not create the work directory, and overlayfs would fall back to read-only.
fn create_as(fs: &OwnedFd, base_id: u32) -> io::Result<OwnedFd> {
    sys::set_ids(base_id, base_id, 0)?;
    let created = rustix::mount::fsconfig_create(fs);
    sys::set_ids(0, 0, 0)?;
    created?;
    Ok(rustix::mount::fsmount(
        fs,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::MOUNT_ATTR_NODEV,
    )?)
}

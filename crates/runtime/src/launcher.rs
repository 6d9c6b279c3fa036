//! The launcher: the one process that makes sandboxes.
//!
//! Code after `clone` is only sound in a process with one thread, and the platform has many, so the platform runs
//! this: itself, executed anew, told what to do over a packet socket. It lives in a mount namespace of its own with
//! a handful of mounts, because a child's namespace starts as a copy of its parent's, and it holds every descriptor
//! it needs, because the host's paths are out of reach there. It ends when the platform closes the socket.
//!
//! A start, with the child's side in `setup`:
//!
//! ```text
//!   launcher                                    child (pid 1 of the sandbox)
//!   make and limit the cgroups
//!   clone3 into the agent's cgroup  ──────────▶ set up lo and eth0
//!   write the id maps
//!   make the disk, mount the overlays
//!   send both overlays  ──────────────────────▶ build the tree, change the root
//!                       ◀────────────────────── ready
//!   clone the spawner into the workload's        confine, exec the agent
//!   cgroup and the sandbox's namespaces
//!   both sockets closed by exec: answer
//! ```
//!
//! The user namespace is made by a thread whose user id is the first of the sandbox's range: inotify instances,
//! pending signals, message queues and locked memory are charged to the creator, and would otherwise be shared with
//! the host's root. The spawner's first process is a child of the launcher, so that it can be born in its cgroup; its
//! second, left by its parent, becomes a child of the agent.

use std::ffi::CString;
use std::fs::Permissions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use model::resources::Resources;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, OpenTreeFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::cgroup::{OpenTree, WorkGroups};
use crate::disk::{Loops, Template};
use crate::files::write_at;
use crate::setup::{self, place};
use crate::slot::{IDS_PER_SLOT, Name};
use crate::sys::{self, Cloned, attr};
use crate::wire::{self, Hello, Reply, Request};
use crate::{base, netlink};

/// Where the launcher sees the host's /dev.
const HOST_DEV: &str = "/host-dev";
/// Lower layers of the base image, top first, by overlay.
const ROOT_LAYERS: [&str; 1] = ["/base/root"];
const USR_LAYERS: [&str; 2] = ["/base/usr", "/usr"];
/// Nodes of the shared /dev: name, major, minor.
const NODES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

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
            // The platform, waiting for the first answer, puts this into its own error.
            let _ = wire::send_message(&socket, &Reply::Failed(error.to_string()), &[]);
            ExitCode::FAILURE
        }
    }
}

fn serve(socket: &OwnedFd) -> io::Result<()> {
    sys::ignore_children();
    let Some((hello, _)) = wire::receive_message::<Hello>(socket)? else {
        return Ok(());
    };
    let mut launcher = Launcher::prepare(&hello)?;
    wire::send_message(socket, &Reply::Ready, &[])?;
    while let Some((request, fds)) = wire::receive_message::<Request>(socket)? {
        let (reply, fds) = match launcher.carry_out(request, fds) {
            Ok((reply, fds)) => (reply, fds),
            Err(error) => (Reply::Failed(error.to_string()), Vec::new()),
        };
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        wire::send_message(socket, &reply, &fds)?;
    }
    Ok(())
}

#[derive(Debug)]
struct Launcher {
    data_dir: OwnedFd,
    own_pid_namespace: OwnedFd,
    tree: OpenTree,
    loops: Loops,
    templates: Vec<Template>,
    first_id: u32,
    /// What `eth0` is in the sandboxes of this host.
    interface: &'static str,
    /// Whether overlayfs takes layers as descriptors (kernel 6.13). Older kernels get paths.
    layer_fds: bool,
}

/// Adds what was being done to an error.
trait During<T> {
    fn during(self, what: &str) -> io::Result<T>;
}

impl<T, E: Into<io::Error>> During<T> for Result<T, E> {
    fn during(self, what: &str) -> io::Result<T> {
        self.map_err(|error| {
            let error: io::Error = error.into();
            io::Error::new(error.kind(), format!("{what}: {error}"))
        })
    }
}

impl Launcher {
    fn prepare(hello: &Hello) -> io::Result<Self> {
        let data_dir = crate::files::open_dir(&hello.data_dir).during("open the data directory")?;
        let tree = OpenTree::open(&hello.tree).during("open the cgroups")?;
        tree.join_v1().during("join the cgroups")?;
        let own_pid_namespace = rustix::fs::open("/proc/self/ns/pid", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        sys::keep_capabilities_over_setuid(true).during("keep capabilities")?;
        make_private_root(&hello.data_dir).during("make the launcher's mounts")?;
        let interface = find_interface().during("find a kind of network interface")?;
        let loops = Loops::open(Path::new(HOST_DEV)).during("open /dev/loop-control")?;
        Ok(Self {
            data_dir,
            own_pid_namespace,
            tree,
            loops,
            templates: Vec::new(),
            first_id: hello.first_id,
            interface,
            layer_fds: takes_layer_fds().during("open overlayfs")?,
        })
    }

    fn carry_out(&mut self, request: Request, fds: Vec<OwnedFd>) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let named = |name: &str| Name::parse(name).ok_or(io::Error::from(io::ErrorKind::InvalidInput));
        match request {
            Request::Start { name, resources } => self.start(&named(&name)?, &resources),
            Request::Respawn { name } => {
                let [agent] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| io::ErrorKind::InvalidInput)?;
                let work = self.tree.open_work(&named(&name)?)?;
                let outcome = self.spawn(agent.as_fd(), &work, None)?;
                finished(&outcome)?;
                Ok((Reply::Done, Vec::new()))
            }
        }
    }

    fn start(&mut self, name: &Name, resources: &Resources) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let mut stages = Stages::new();
        let groups = self.tree.create(name, resources).during("make cgroups")?;
        stages.end("cgroup");

        let base_id = self.first_id + name.slot.0 * IDS_PER_SLOT;
        let interface = self.interface;
        // What lies there counts as memory of the sandbox, and nothing gives it back when memory runs out: with more
        // than this, a full /dev/shm would leave no room for the `rm` that empties it.
        let shared_memory_mb = resources.memory_mb / 2;
        let (setup, theirs) = pair(SocketType::SEQPACKET)?;
        let (boot, agent_boot) = pair(SocketType::STREAM)?;
        let (agent_spawner, spawner) = pair(SocketType::SEQPACKET)?;
        sys::set_ids(base_id, base_id, 0).during("take the sandbox's id")?;
        let cloned = sys::clone3(sys::NAMESPACES, groups.agent.as_ref().map(AsFd::as_fd));
        let (pid, pidfd) = match cloned {
            Ok(Cloned::Child) => run_child(&theirs, |socket| {
                setup::become_agent(socket, interface, shared_memory_mb, agent_boot, agent_spawner)
            }),
            Ok(Cloned::Parent { pid, pidfd }) => (pid, pidfd),
            Err(error) => {
                sys::set_ids(0, 0, 0)?;
                return Err(error).during("clone");
            }
        };
        let child = Unfinished(Some(pidfd));
        sys::set_ids(0, 0, 0)?;
        drop((theirs, agent_boot, agent_spawner));
        self.tree.record_agent(name, pid)?;
        let of_child = |file: &str| format!("/proc/{pid}/{file}");
        let map = format!("0 {base_id} {IDS_PER_SLOT}\n");
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

        let disk = self.make_disk(name, resources.disk_mb, user.as_fd())?;
        stages.end("disk");
        // For both overlays: what was detached once cannot be attached again.
        let disk_at = match self.layer_fds {
            true => None,
            false => Some(Attached::at(place::DISK, disk.as_fd()).during("attach the disk")?),
        };
        let root = self
            .overlay(&ROOT_LAYERS, disk.as_fd(), "root", user.as_fd(), base_id)
            .during("mount the root")?;
        let usr = self
            .overlay(&USR_LAYERS, disk.as_fd(), "usr", user.as_fd(), base_id)
            .during("mount /usr")?;
        drop(disk_at);
        wire::send(setup.as_fd(), b"go", &[root.as_fd(), usr.as_fd()]).during("hand over the file system")?;
        drop((root, usr, disk));
        stages.end("overlay");

        match wire::receive(setup.as_fd())? {
            Some((message, _)) if message == setup::READY => {}
            other => return Err(reported(other)).during("set up"),
        }
        stages.end("setup");
        let spawned = self.spawn(child.pidfd(), &groups.work, Some(spawner))?;
        finished(&setup).during("agent")?;
        finished(&spawned).during("spawner")?;
        stages.end("exec");
        Ok((
            Reply::Started { pid, stages: stages.0 },
            vec![child.finish(), net, boot],
        ))
    }

    fn make_disk(&mut self, name: &Name, disk_mb: u32, user: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let known = self.templates.iter().position(|template| template.disk_mb == disk_mb);
        let index = match known {
            Some(index) => index,
            None => {
                self.templates
                    .push(Template::load(self.data_dir.as_fd(), disk_mb).during("load the disk template")?);
                self.templates.len() - 1
            }
        };
        let image = self.templates[index]
            .instantiate(self.data_dir.as_fd(), name.slot)
            .during("make the disk")?;
        let disk = self.loops.mount(image.as_fd()).during("mount the disk")?;
        sys::mount_setattr(disk.as_fd(), false, attr::IDMAP, Some(user)).during("map the disk's ids")?;
        Ok(disk)
    }

    /// An overlay whose layers' ids are mapped into the sandbox, attached nowhere yet. Where overlayfs knows layers by
    /// path only, the disk is attached at [`place::DISK`], and the others get a path for the length of the mount.
    fn overlay(
        &self,
        layers: &[&str],
        disk: BorrowedFd<'_>,
        upper: &str,
        user: BorrowedFd<'_>,
        base_id: u32,
    ) -> io::Result<OwnedFd> {
        let lowers = layers
            .iter()
            .map(|path| mapped_layer(path, user))
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

    /// Starts a spawner in the namespaces of the sandbox whose agent this is, born in its workload's cgroup. Returns
    /// the socket on which it reports a failure and which its exec closes.
    fn spawn(&self, agent: BorrowedFd<'_>, work: &WorkGroups, spawner: Option<OwnedFd>) -> io::Result<OwnedFd> {
        let (ours, theirs) = pair(SocketType::SEQPACKET)?;
        sys::setns(agent, libc::CLONE_NEWPID).during("enter the pid namespace")?;
        let cloned = sys::clone3(0, work.birth.as_ref().map(AsFd::as_fd));
        if !matches!(cloned, Ok(Cloned::Child)) {
            sys::setns(self.own_pid_namespace.as_fd(), libc::CLONE_NEWPID).during("leave the pid namespace")?;
        }
        match cloned.during("clone the spawner")? {
            Cloned::Parent { .. } => Ok(ours),
            Cloned::Child => run_child(&theirs, |socket| {
                let fail = |what: &'static str| move |error: io::Error| setup::failure(what, error);
                for group in &work.join {
                    rustix::io::write(group, b"0")
                        .map_err(io::Error::from)
                        .map_err(fail("join the cgroup"))?;
                }
                // Others in the sandbox can see this process already, so nothing of the host may stay open in it.
                let kept = [Some(socket), Some(agent), spawner.as_ref().map(AsFd::as_fd)];
                let kept: Vec<_> = kept.iter().flatten().map(AsRawFd::as_raw_fd).collect();
                sys::close_all_but(&kept).map_err(fail("close the launcher's descriptors"))?;
                let all = sys::NAMESPACES & !libc::CLONE_NEWPID;
                sys::setns(agent, all).map_err(fail("enter the namespaces"))?;
                match sys::clone3(0, None).map_err(fail("clone"))? {
                    // Its parent gone, the second process becomes a child of the agent.
                    Cloned::Parent { .. } => sys::exit_now(0),
                    Cloned::Child => setup::become_spawner(spawner),
                }
            }),
        }
    }
}

/// Kills a half-made sandbox unless it is finished.
#[derive(Debug)]
struct Unfinished(Option<OwnedFd>);

impl Unfinished {
    fn pidfd(&self) -> BorrowedFd<'_> {
        self.0
            .as_ref()
            .map(AsFd::as_fd)
            .expect("taken only by finish, which takes self")
    }

    fn finish(mut self) -> OwnedFd {
        self.0.take().expect("taken only here")
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(pidfd) = &self.0 {
            crate::container::kill_and_wait(pidfd.as_fd());
        }
    }
}

/// A layer attached for a moment.
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

/// Durations of the stages of a start, in microseconds.
struct Stages(Vec<(String, u64)>, Instant);

impl Stages {
    fn new() -> Self {
        Self(Vec::new(), Instant::now())
    }

    fn end(&mut self, name: &str) {
        let now = Instant::now();
        let took = now.duration_since(self.1).as_micros();
        self.0.push((name.to_owned(), u64::try_from(took).unwrap_or(u64::MAX)));
        self.1 = now;
    }
}

/// Runs `work` in a fresh child, which reports its failure on `socket` and ends.
fn run_child(
    socket: &OwnedFd,
    work: impl FnOnce(BorrowedFd<'_>) -> Result<std::convert::Infallible, setup::Failure>,
) -> ! {
    let report = match rustix::io::fcntl_dupfd_cloexec(socket, setup::ABOVE_PLACES) {
        Ok(report) => report,
        Err(_) => sys::exit_now(1),
    };
    let Err(failure) = work(report.as_fd());
    let _ = wire::send(report.as_fd(), failure.to_string().as_bytes(), &[]);
    sys::exit_now(1)
}

/// Tries, in a network namespace that ends at once, which kind of interface the kernel has.
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

/// Whether overlayfs takes layers as descriptors, which it does since 6.13. From 6.5 on it knows the option but wants
/// a path, and before that fsconfig refuses descriptors for it altogether.
fn takes_layer_fds() -> io::Result<bool> {
    let fs = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let layer = crate::files::open_dir(Path::new(place::EMPTY))?;
    Ok(rustix::mount::fsconfig_set_fd(&fs, "lowerdir+", &layer).is_ok())
}

/// Waits until exec has closed the other end.
fn finished(socket: &OwnedFd) -> io::Result<()> {
    match wire::receive(socket.as_fd())? {
        None => Ok(()),
        message => Err(reported(message)),
    }
}

fn reported(message: Option<(Vec<u8>, Vec<OwnedFd>)>) -> io::Error {
    match message {
        Some((text, _)) => io::Error::other(String::from_utf8_lossy(&text).into_owned()),
        None => io::Error::other("the child ended without a word"),
    }
}

fn pair(kind: SocketType) -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        kind,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// A clone of one of the launcher's mounts with its ids mapped, read-only.
fn mapped_layer(path: &str, user: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let layer = rustix::mount::open_tree(CWD, path, flags)?;
    sys::mount_setattr(layer.as_fd(), false, attr::IDMAP | attr::RDONLY, Some(user))?;
    Ok(layer)
}

/// Creates and mounts an overlay with the file-system ids of the sandbox's root: an id that the layers' maps do not
/// know could not make the work directory, and overlayfs would go read-only.
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

/// Leaves the host's mounts for a root with just what sandboxes are made of.
fn make_private_root(data_dir: &Path) -> io::Result<()> {
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
        HOST_DEV,
        "/base",
        "/usr",
        "/proc",
    ] {
        std::fs::create_dir(at(dir))?;
    }
    for dir in ["/sys", "/cgroup-lock", place::LAYERS, place::DISK] {
        std::fs::create_dir(at(dir))?;
    }
    for index in 0..USR_LAYERS.len() {
        std::fs::create_dir(at(place::LAYERS).join(index.to_string()))?;
    }
    // A copy, so that a sandbox's mount table does not tell where on the host the platform lies, and an upgrade in
    // place touches no sandbox that runs.
    std::fs::copy("/proc/self/exe", at(place::AGENT))?;
    std::fs::set_permissions(at(place::AGENT), Permissions::from_mode(0o755))?;
    bind(Path::new("/dev"), &at(HOST_DEV))?;
    bind(Path::new("/usr"), &at("/usr"))?;
    bind(&base::path(data_dir), &at("/base"))?;
    rustix::mount::mount("proc", at("/proc"), "proc", MountFlags::empty(), None)?;
    rustix::mount::mount("sysfs", at("/sys"), "sysfs", MountFlags::empty(), None)?;
    // A hierarchy nobody uses, whose only effect is to make joining any cgroup cheap while it is mounted (0.1 ms
    // instead of 10 ms). Kernels before 6.0 do not know it and are only slower.
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
    std::env::set_current_dir(&root)?;
    sys::pivot_to_current_directory()
}

fn tmpfs(at: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount(
        "tmpfs",
        at,
        "tmpfs",
        MountFlags::NOSUID,
        Some(c"mode=755"),
    )?)
}

fn bind(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(from, to)?)
}

/// The /dev that all sandboxes share. They cannot change it: its owner is the host's root, whom they do not know.
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

/// The part of /sys that all sandboxes share: what programs ask to size themselves, and places for the network's.
fn make_sys(sys: &Path) -> io::Result<()> {
    tmpfs(sys)?;
    for dir in ["class/net", "devices/virtual/net", "fs/cgroup"] {
        std::fs::create_dir_all(sys.join(dir))?;
    }
    for part in ["devices/system/cpu", "devices/system/node"] {
        let from = Path::new("/sys").join(part);
        if from.exists() {
            let to = sys.join(part);
            std::fs::create_dir_all(&to)?;
            bind(&from, &to)?;
            let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
            rustix::mount::mount_remount(&to, flags, "")?;
        }
    }
    Ok(())
}

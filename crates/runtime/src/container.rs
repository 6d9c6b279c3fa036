//! The container driver: namespaces, cgroups and overlays of one Linux host.
//!
//! The driver is the platform's side. It keeps a few launchers, hands each start to a free one, and does by itself
//! what needs no clone: finding, watching, killing and cleaning up. A sandbox here is the pidfd of its agent, whose
//! end takes every process of the sandbox with it, and its network namespace.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use model::resources::Resources;
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::cgroup::{Backend, Tree};
use crate::driver::{Driver, Found, Sandbox, Started};
use crate::netns::SocketMaker;
use crate::slot::{Name, Region, Slot, path_hash};
use crate::usage::{self, Meter, Room, Usage};
use crate::wire::{self, Hello, Reply, Request};
use crate::{base, disk, spawners};

/// Names of the stages that a launcher reports, so that they can be told on without owning text.
const STAGES: [&str; 6] = ["cgroup", "clone", "disk", "overlay", "setup", "exec"];

/// What the driver is told at its start.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where images and the skeleton of `base` lie.
    pub data_dir: PathBuf,
    /// Processes that make sandboxes side by side.
    pub launchers: usize,
    /// Run without limits when the host has no usable cgroups.
    pub unlimited: bool,
    /// Disk sizes, in MiB, that are made ready at the start.
    pub disks_mb: Vec<u32>,
}

/// The driver of one data directory.
#[derive(Debug)]
pub struct Container {
    data_dir: PathBuf,
    tree: Tree,
    free: Mutex<Vec<Launcher>>,
    freed: Condvar,
    hello: Hello,
    itself: std::sync::Weak<Self>,
}

#[derive(Debug)]
struct Launcher {
    socket: OwnedFd,
    process: Child,
    /// It did not answer in time, so it will not notice that its socket closes either.
    stuck: bool,
}

/// How long a launcher may take for one sandbox. It takes milliseconds; the bound is for a host that has come to a
/// stop, so that a create fails instead of waiting for ever.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(30);

impl Drop for Launcher {
    fn drop(&mut self) {
        // Closing the socket ends it; a new socket pair's other half takes its place for the moment.
        if let Ok((unconnected, _)) = UnixStream::pair() {
            self.socket = unconnected.into();
        }
        if self.stuck {
            let _ = self.process.kill();
        }
        let _ = self.process.wait();
    }
}

/// The cgroup tree of a data directory, and whether it holds limits.
///
/// # Errors
/// When the host has no usable cgroups and `unlimited` does not allow that.
pub fn tree_of(data_dir: &Path, unlimited: bool) -> io::Result<Tree> {
    let backend = match Backend::detect() {
        Ok(backend) if unlimited && backend.is_occupied() => Backend::None(data_dir.join("run")),
        Ok(backend) => backend,
        Err(_) if unlimited => Backend::None(data_dir.join("run")),
        Err(why) => {
            return Err(io::Error::other(format!(
                "{why}; set `unlimited = true` to run without any limits"
            )));
        }
    };
    Ok(Tree::new(backend, path_hash(data_dir)))
}

impl Container {
    /// Prepares the data directory and starts the launchers. Waits for launchers of an earlier platform to end, so
    /// that nothing appears behind the back of [`Driver::find`].
    ///
    /// # Errors
    /// With what is missing on the host or wrong with the directory.
    pub fn open(settings: &Settings) -> io::Result<Arc<Self>> {
        let data_dir = settings.data_dir.canonicalize()?;
        fs::create_dir_all(data_dir.join("disks"))?;
        let lock = rustix::fs::open(
            data_dir.join("launchers.lock"),
            OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o600),
        )?;
        rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
        rustix::fs::flock(&lock, FlockOperation::LockShared)?;
        base::make(&data_dir)?;
        for &disk_mb in &settings.disks_mb {
            disk::make_template(&data_dir, disk_mb)?;
        }
        raise_open_files_of_host();
        load_interface_module();
        let tree = tree_of(&data_dir, settings.unlimited)?;
        tree.create()?;
        let region = Region::of_hash(path_hash(&data_dir));
        let hello = Hello {
            data_dir: data_dir.clone(),
            tree: tree.clone(),
            first_id: region.base_id(Slot(0)),
        };
        let launchers = (0..settings.launchers.max(1))
            .map(|_| Launcher::start(&hello, &lock))
            .collect::<io::Result<_>>()?;
        Ok(Arc::new_cyclic(|itself| Self {
            data_dir,
            tree,
            free: Mutex::new(launchers),
            freed: Condvar::new(),
            hello,
            itself: itself.clone(),
        }))
    }

    /// Makes disks of another size ready.
    ///
    /// # Errors
    /// When `mkfs.ext4` fails.
    pub fn prepare_disks(&self, disk_mb: u32) -> io::Result<()> {
        disk::make_template(&self.data_dir, disk_mb)
    }

    /// Whether the host holds the limits of sandboxes.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.tree.is_limited()
    }

    fn ask(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let mut launcher = {
            let mut free = self.free.lock();
            loop {
                match free.pop() {
                    Some(launcher) => break launcher,
                    None => self.freed.wait(&mut free),
                }
            }
        };
        let answer = wire::send_message(&launcher.socket, request, fds)
            .and_then(|()| wire::receive_message(&launcher.socket))
            .and_then(|answer| answer.ok_or_else(|| io::Error::other("the launcher ended")));
        // A launcher that failed to answer may be in any state; its place is taken by a new one.
        let launcher = match &answer {
            Ok(_) => Ok(launcher),
            Err(_) => {
                launcher.stuck = true;
                drop(launcher);
                self.launchers_lock()
                    .and_then(|lock| Launcher::start(&self.hello, &lock))
            }
        };
        if let Ok(launcher) = launcher {
            self.free.lock().push(launcher);
            self.freed.notify_one();
        }
        answer
    }

    fn launchers_lock(&self) -> io::Result<OwnedFd> {
        let path = self.data_dir.join("launchers.lock");
        let lock = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        rustix::fs::flock(&lock, FlockOperation::LockShared)?;
        Ok(lock)
    }

    fn running(&self, name: &Name, pid: i32, agent: OwnedFd, net: OwnedFd) -> Arc<dyn Sandbox> {
        Arc::new(Running {
            name: name.clone(),
            pid,
            agent,
            net,
            meter: OnceLock::new(),
            driver: self.itself.clone(),
        })
    }

    /// The sandbox of this name, if its agent lives.
    fn adopt(&self, name: &Name) -> Option<Arc<dyn Sandbox>> {
        let pid = self.tree.agent_pid(name)?;
        let agent = rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        let net = rustix::fs::open(
            format!("/proc/{pid}/ns/net"),
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        // Still the agent after both were opened, so neither belongs to a later process with the same pid.
        (self.tree.agent_pid(name) == Some(pid)).then_some(())?;
        Some(self.running(name, pid, agent, net.ok()?))
    }
}

impl Launcher {
    fn start(hello: &Hello, lock: &OwnedFd) -> io::Result<Self> {
        let (socket, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // The launcher's standard output is nowhere; what it inherits there holds the lock while it lives.
        let process = Command::new("/proc/self/exe")
            .arg("launcher")
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::from(lock.try_clone()?))
            .spawn()?;
        rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, Some(LAUNCH_TIMEOUT))?;
        let launcher = Self {
            socket,
            process,
            stuck: false,
        };
        wire::send_message(&launcher.socket, hello, &[])?;
        match wire::receive_message(&launcher.socket)? {
            Some((Reply::Ready, _)) => Ok(launcher),
            Some((Reply::Failed(why), _)) => Err(io::Error::other(why)),
            _ => Err(io::Error::other("the launcher ended at its start")),
        }
    }
}

impl Driver for Container {
    fn start(&self, name: &Name, resources: &Resources) -> io::Result<Started> {
        let (reply, fds) = self.ask(
            &Request::Start {
                name: name.to_string(),
                resources: *resources,
            },
            &[],
        )?;
        match (reply, <[OwnedFd; 3]>::try_from(fds)) {
            (Reply::Started { pid, stages }, Ok([agent, net, boot])) => {
                let known = |stage: &str| STAGES.into_iter().find(|known| *known == stage).unwrap_or("other");
                let stages = stages
                    .iter()
                    .map(|(name, us)| (known(name), Duration::from_micros(*us)))
                    .collect();
                Ok(Started {
                    sandbox: self.running(name, pid, agent, net),
                    boot,
                    stages,
                })
            }
            (Reply::Failed(why), _) => Err(io::Error::other(why)),
            _ => Err(io::Error::other("an answer of the launcher that does not fit")),
        }
    }

    fn find(&self) -> io::Result<Vec<Found>> {
        let names = self.tree.names()?;
        Ok(names
            .into_iter()
            .map(|name| Found {
                alive: self.adopt(&name),
                name,
            })
            .collect())
    }

    fn clean(&self, name: &Name) -> bool {
        let _ = fs::remove_file(self.data_dir.join(disk::image_path(name.slot)));
        if self.tree.remove_groups(name) {
            return true;
        }
        self.tree.kill(name);
        self.tree.remove_groups(name)
    }

    fn sweep(&self, keep: &[Name]) -> io::Result<()> {
        let kept: Vec<PathBuf> = keep
            .iter()
            .map(|name| self.data_dir.join(disk::image_path(name.slot)))
            .collect();
        for entry in fs::read_dir(self.data_dir.join("disks"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "img") && !kept.contains(&path) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    fn room(&self) -> io::Result<Room> {
        usage::room(&self.data_dir)
    }
}

impl Container {
    /// Removes the cgroup tree itself. For the very end: no sandbox can be started after.
    pub fn dismantle(&self) {
        self.free.lock().clear();
        self.tree.remove();
    }
}

/// A sandbox of this driver.
#[derive(Debug)]
struct Running {
    name: Name,
    pid: i32,
    agent: OwnedFd,
    net: OwnedFd,
    /// Opened when it is first read.
    meter: OnceLock<Meter>,
    driver: std::sync::Weak<Container>,
}

impl Running {
    fn meter(&self) -> io::Result<&Meter> {
        if let Some(meter) = self.meter.get() {
            return Ok(meter);
        }
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        let meter = Meter::open(&driver.tree, &self.name)?;
        Ok(self.meter.get_or_init(|| meter))
    }
}

impl Sandbox for Running {
    fn ended(&self) -> BorrowedFd<'_> {
        self.agent.as_fd()
    }

    fn tcp_socket(&self, maker: &SocketMaker, ipv6: bool) -> io::Result<OwnedFd> {
        let family = if ipv6 {
            AddressFamily::INET6
        } else {
            AddressFamily::INET
        };
        maker.stream(self.net.as_fd(), family)
    }

    fn control(&self, maker: &SocketMaker) -> io::Result<OwnedFd> {
        let socket = maker.stream(self.net.as_fd(), AddressFamily::UNIX)?;
        let address = rustix::net::SocketAddrUnix::new_abstract_name(protocol::agent::CONTROL_SOCKET.as_bytes())?;
        rustix::net::connect(&socket, &address)?;
        let peer = rustix::net::sockopt::socket_peercred(&socket)?;
        if peer.pid.as_raw_nonzero().get() == self.pid {
            Ok(socket)
        } else {
            Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "another process listens on the agent's socket",
            ))
        }
    }

    fn respawn(&self) -> io::Result<()> {
        let driver = self.driver.upgrade().ok_or(io::ErrorKind::NotConnected)?;
        // Where the kernel does not list children, a spawner that was only stopped stays; better that than no new one.
        let _ = spawners::end_all(self.pid);
        match driver.ask(
            &Request::Respawn {
                name: self.name.to_string(),
            },
            &[self.agent.as_fd()],
        )? {
            (Reply::Done, _) => Ok(()),
            (Reply::Failed(why), _) => Err(io::Error::other(why)),
            _ => Err(io::Error::other("an answer of the launcher that does not fit")),
        }
    }

    fn usage(&self) -> io::Result<Usage> {
        self.meter()?.read(self.pid, self.agent.as_fd())
    }

    fn memory_kills(&self) -> io::Result<u64> {
        self.meter()?.memory_kills()
    }

    fn kill(&self) {
        kill_and_wait(self.agent.as_fd());
    }
}

/// Kills a process and, when it is pid 1 of a pid namespace, everything in there, and waits for the end.
pub(crate) fn kill_and_wait(process: BorrowedFd<'_>) {
    let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
    let mut poll = [PollFd::new(&process, PollFlags::IN)];
    while let Err(rustix::io::Errno::INTR) = rustix::event::poll(&mut poll, None) {}
}

/// Lifts the host-wide bound on open files, as service managers do at boot: it counts the files of every sandbox, and
/// only the host's root is exempt from it, so one sandbox could use it up for its neighbours. What each sandbox may
/// open is bounded by its memory, to which open files are charged.
fn raise_open_files_of_host() {
    const PATH: &str = "/proc/sys/fs/file-max";
    let have: u64 = fs::read_to_string(PATH)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(u64::MAX);
    if have < i64::MAX.unsigned_abs() {
        let _ = fs::write(PATH, i64::MAX.to_string());
    }
}

/// Loads the module of the interfaces that stand for `eth0`. The kernel would load it by itself, and would then make
/// an interface for the host, too. Where this does not work, because modules are built in or modprobe is not there,
/// the launchers find out what there is.
fn load_interface_module() {
    [("dummy", "numdummies=0"), ("ifb", "numifbs=0")]
        .iter()
        .any(|(module, none)| {
            Command::new("modprobe")
                .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
                .args(["-q", module, none])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success())
        });
}

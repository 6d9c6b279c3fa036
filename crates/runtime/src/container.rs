//! The container driver: namespaces, cgroups and overlays of one Linux host.
//!
//! The driver is the platform's side. It has a pool of launchers, passes each start to a free one, and does itself what
//! needs no clone: finding, watching, killing and cleaning up. A sandbox here consists of the pidfd of its agent, whose
//! end kills every process of the sandbox, and its network namespace.

mod copies;
mod disks;
mod forks;
mod host;
mod memories;
mod processes;
mod running;
mod state;

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use model::id::{BuildId, DiskId, LayerId, SandboxId};
use parking_lot::{Mutex, RwLock};
use protocol::node::{Committed, LayerInfo, MemoryInfo};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags};

use self::host::egress_support;
use self::running::Running;
pub use self::state::ContainerDriver;
use crate::cgroup::{Backend, Tree};
use crate::checkpoint::agents::Agents;
use crate::checkpoint::program;
use crate::driver::{
    ArchiveError, Capabilities, CommitError, CommitRequest, Driver, Fork, Found, KeptDisk, Sandbox, StartDisk,
    StartError, StartRequest, Started, UnpackRequest,
};
use crate::growth::LoopDevices;
use crate::kept::KeptDisks;
use crate::launchers::{self, LauncherPool};
use crate::layers::Layers;
use crate::memories::Memories;
use crate::netns::SocketMaker;
use crate::process_counter::{ProcessCounter, ProcessesOf};
use crate::registry::Registry;
use crate::rootfs::Rootfs;
use crate::slot::{Name, path_hash};
use crate::slots::Slots;
use crate::usage::{self, Capacity, HostPulse, HostUncharged};
use crate::wire::{Hello, Reply, Request, Work};
use crate::{base, disk, modules, skeleton};

/// Names of the stages that a launcher reports, so that they can be passed on as static strings.
const STAGES: [&str; 6] = ["cgroup", "clone", "disk", "overlay", "setup", "exec"];

/// Restores that can go on at the same time, for each start. A restore keeps a core busy for most of its time, so as many as
/// there are cores would do if none ever hung. One that hangs takes no processor time, only its place: with twice as many
/// places, half of them can hang and the cores stay in use.
const RESTORES_PER_START: usize = 2;
/// How long a disk may take to be written out after its sandbox has ended, and to be copied.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// How long an archive of a layer may take to be read or written, its transfer included.
const ARCHIVE_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// Settings of the container driver.
#[derive(Debug, Clone)]
pub struct DriverSettings {
    /// Data directory: disk images and versions of `base`.
    pub data_dir: PathBuf,
    /// Number of launcher processes, which start sandboxes in parallel.
    pub launchers: usize,
    /// Run without limits when the host has no usable cgroups.
    pub unlimited: bool,
    /// Disk sizes, in MiB, whose templates are created at startup. The first sandbox with another size waits for its
    /// template.
    pub disks_mb: Vec<u32>,
    /// Allocate the whole disk of a sandbox on the host when it starts, instead of block by block.
    pub reserve_disks: bool,
    /// How many files a process of a sandbox may have open, unless it asks for more.
    pub open_files: u32,
    /// Create `base` and keep it up to date with the host. Without it sandboxes can only be ended, not started.
    pub base: bool,
    /// CRIU, which writes the processes of paused sandboxes to disk; without it they stay in memory.
    pub criu: Option<PathBuf>,
    /// Move the memory of frozen sandboxes to swap when asked to ([`Sandbox::page_out`]).
    pub page_out: bool,
}

/// Interval between checks for changes of the host's packages: about thirty names in its directories.
const BASE_INTERVAL: Duration = Duration::from_secs(5);

/// The cgroup tree of a data directory.
///
/// # Errors
/// When the host has no usable cgroups and `unlimited` does not allow that.
pub(crate) fn tree_of(data_dir: &Path, unlimited: bool) -> io::Result<Tree> {
    let backend = match Backend::detect() {
        Ok(backend) if unlimited && backend.is_occupied() => Backend::None(data_dir.join("run")),
        Ok(backend) => backend,
        Err(_) if unlimited => Backend::None(data_dir.join("run")),
        Err(why) => {
            return Err(io::Error::other(format!(
                "{why}; set `unlimited = true` to run without limits"
            )));
        }
    };
    Ok(Tree::new(backend, path_hash(data_dir)).with_all_of_version_1())
}

impl ContainerDriver {
    /// Prepares the data directory and starts the launchers. Waits for launchers of an earlier platform to end, so that
    /// no sandbox appears after [`Driver::find`].
    ///
    /// # Errors
    /// When the host lacks something or the data directory cannot be used.
    pub fn open(settings: &DriverSettings) -> io::Result<Arc<Self>> {
        let data_dir = settings.data_dir.canonicalize()?;
        fs::create_dir_all(data_dir.join("disks"))?;
        let lock = launchers::lock(&data_dir.join("launchers.lock"))?;
        let layers = Layers::open(&data_dir)?;
        let kept = KeptDisks::open(&data_dir)?;
        let memories = Memories::open(&data_dir)?;
        let agents = Arc::new(Agents::open(&data_dir)?);
        skeleton::create(&data_dir)?;
        let base = base::Versions::new(Path::new("/"), &data_dir);
        if settings.base {
            match base.update_current() {
                // If this fails, for example on a full disk, existing sandboxes must still be adopted.
                Err(error) if base.has_current() => {
                    tracing::warn!("update `base`, continuing with the current version: {error}")
                }
                made => {
                    made?;
                }
            }
        } else {
            fs::create_dir_all(base.path())?;
        }
        for &disk_mb in &settings.disks_mb {
            disk::make_template(&data_dir, disk_mb)?;
        }
        let disk_sizes = settings.disks_mb.iter().copied().collect();
        modules::load_for_interfaces();
        modules::load_for_figures();
        let tree = tree_of(&data_dir, settings.unlimited)?;
        let registry = Registry::of_host();
        // Before the groups are created, so that a platform that is refused leaves none.
        let blocks = registry
            .claim(&data_dir, settings.base)
            .map_err(|error| io::Error::new(error.kind(), format!("claim an id range for sandboxes: {error}")))?;
        tree.create()?;
        let hello = Hello {
            data_dir: data_dir.clone(),
            tree: tree.clone(),
            work: Work::Sandboxes,
            reserve_disks: settings.reserve_disks,
            open_files: settings.open_files,
        };
        // Those of further blocks come with the starts that need them.
        let entries = blocks.get(&0).map(|held| held.locks.clone()).unwrap_or_default();
        let starts = settings.launchers.max(1);
        let restores = starts * RESTORES_PER_START;
        let launchers = LauncherPool::start((lock, entries), hello, (starts, restores))?;
        let processes = ProcessCounter::start(&tree);
        let criu = settings.criu.as_deref().and_then(|path| {
            let found = program::find(path);
            let why = |why: &String| tracing::error!("the processes of paused sandboxes stay in memory: {why}");
            found.inspect_err(why).ok()
        });
        let capabilities = Capabilities {
            concurrent_starts: starts,
            concurrent_restores: restores,
            limits: tree.is_limited(),
            disk_limits: true,
            uncharged_memory: tree.sum().is_some(),
            process_counter: processes.is_some(),
            freeze: tree.can_freeze(),
            images: criu.is_some(),
            layers: true,
            egress: egress_support(),
        };
        let sockets = Arc::new(SocketMaker::new()?);
        let container = Arc::new_cyclic(|itself| Self {
            data_dir,
            tree,
            registry,
            launchers,
            capabilities,
            base,
            base_changes: RwLock::default(),
            bases: Mutex::default(),
            layers,
            kept,
            memories,
            agents,
            forks: Mutex::default(),
            criu,
            page_out: settings.page_out,
            loops: LoopDevices::default(),
            processes,
            slots: Mutex::new(Slots::new(blocks)),
            disk_sizes: Mutex::new(disk_sizes),
            sockets,
            itself: itself.clone(),
        });
        processes::find_facts(&container)?;
        processes::prepare_restores(&container, starts)?;
        if settings.base {
            let itself = Arc::downgrade(&container);
            std::thread::Builder::new()
                .name("base".to_owned())
                .spawn(move || keep_base_current(&itself))?;
        }
        Ok(container)
    }

    fn running(&self, name: &Name, pid: i32, agent: OwnedFd, net: OwnedFd) -> Running {
        let counter = self.processes.as_ref().map(Arc::clone);
        Running {
            name: name.clone(),
            pid,
            agent,
            net,
            meter: OnceLock::new(),
            processes: counter.map(|counter| ProcessesOf::new(counter, self.tree.work_group(name))),
            sockets: Arc::clone(&self.sockets),
            driver: self.itself.clone(),
            ending: Mutex::default(),
        }
    }

    /// The sandbox with this name, if its agent is running.
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
        Some(Arc::new(self.running(name, pid, agent, net.ok()?)))
    }
}

impl Driver for ContainerDriver {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn start(&self, request: &StartRequest) -> Result<Started, StartError> {
        let (name, block) = self.allocate_slot(&request.id, request.disk.id())?;
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let _unchanging;
        let rootfs = match &request.disk {
            StartDisk::New { disk, rootfs } => {
                rootfs.check().map_err(invalid)?;
                self.layers.use_for(disk, rootfs)?;
                rootfs.clone()
            }
            StartDisk::Kept(disk) => {
                _unchanging = self.base_changes.read();
                self.layers.rootfs_of(disk)?
            }
        };
        let on_kept_disk = matches!(request.disk, StartDisk::Kept(_));
        if let Some(layer) = self.layers.missing(&rootfs) {
            let layer = layer.clone();
            if !on_kept_disk {
                self.layers.forget(request.disk.id())?;
            }
            self.release_slot(&request.id);
            return Err(StartError::NoLayer(layer));
        }
        let base = rootfs.has_base().then(|| self.base.current()).flatten();
        let processes = match request.restore {
            true => match self.restorable(&name, base.as_deref()) {
                Err(refused @ StartError::Unrestorable(_)) => {
                    self.release_slot(&request.id);
                    return Err(refused);
                }
                image => Some(image?),
            },
            false => None,
        };
        match on_kept_disk {
            true => self.prepare_kept(&name, base.as_deref())?,
            false => self.prepare_disks(request.resources.disk_mb)?,
        }
        let start = Request::Start {
            name: name.to_string(),
            base_id: block.block.base_id(name.slot),
            rootfs,
            resources: request.resources,
            on_kept_disk,
            processes,
        };
        let locks: Vec<BorrowedFd<'_>> = block.locks.iter().map(|lock| lock.as_fd()).collect();
        let (reply, fds) = self.launchers.request(&start, &locks)?;
        if let Some(base) = base
            && self.base.current().as_ref() == Some(&base)
        {
            self.bases.lock().insert(name.disk.clone(), base);
        }
        let mut fds = fds.into_iter();
        match (reply, fds.next(), fds.next(), fds.next()) {
            (Reply::Started { pid, stages }, Some(agent), Some(net), third) => {
                let known = |stage: &str| STAGES.into_iter().find(|known| *known == stage).unwrap_or("other");
                let stages = stages
                    .iter()
                    .map(|(name, us)| (known(name), Duration::from_micros(*us)))
                    .collect();
                let running = self.running(&name, pid, agent, net);
                let boot = match (request.restore, third) {
                    (false, Some(boot)) => boot,
                    (false, None) => return Err(io::Error::other("unexpected reply from the launcher").into()),
                    (true, figures) => {
                        let subject = running.subject(self);
                        match self.forks.lock().contains_key(&name.disk) {
                            true => subject.wake_copy(figures.as_ref())?,
                            false => subject.wake_agent(figures.as_ref())?,
                        }
                        running.control()?
                    }
                };
                Ok(Started {
                    sandbox: Arc::new(running),
                    boot,
                    stages,
                })
            }
            (Reply::Refused(why), ..) => {
                // Before anything but the place was taken.
                self.release_slot(&request.id);
                Err(StartError::Unrestorable(why))
            }
            (Reply::Failed(why), ..) => Err(io::Error::other(why).into()),
            _ => Err(io::Error::other("unexpected reply from the launcher").into()),
        }
    }

    fn find(&self) -> io::Result<Vec<Found>> {
        let names = {
            // Locked while the names are read, so that no sandbox that was cleaned up in between is added.
            let mut slots = self.slots.lock();
            let names = self.tree.names()?;
            names.iter().for_each(|name| slots.mark_used(name));
            names
        };
        Ok(names
            .into_iter()
            .map(|name| Found {
                alive: self.adopt(&name),
                id: name.id,
                disk: name.disk,
            })
            .collect())
    }

    fn clean(&self, id: &SandboxId) -> bool {
        let Some(name) = self.slots.lock().name(id).cloned() else {
            return true;
        };
        let is_gone = self.tree.remove_groups(&name) || {
            self.tree.kill(&name);
            self.tree.remove_groups(&name)
        };
        if is_gone {
            self.release_slot(id);
        }
        is_gone
    }

    fn remove_disk(&self, disk: &DiskId) -> io::Result<()> {
        self.bases.lock().remove(disk);
        self.forks.lock().remove(disk);
        match fs::remove_file(self.image(disk)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.layers.forget(disk),
        }
    }

    fn sweep_disks(&self, keep: &[DiskId]) -> io::Result<()> {
        self.memories.tidy()?;
        let of_memories = self.memories.list()?.into_iter().map(|memory| memory.disk);
        let keep: Vec<DiskId> = keep.iter().cloned().chain(of_memories).collect();
        let kept: Vec<PathBuf> = keep.iter().map(|disk| self.image(disk)).collect();
        for entry in fs::read_dir(self.data_dir.join("disks"))? {
            let entry = entry?;
            let path = entry.path();
            let is_image = path.extension().is_some_and(|extension| extension == "img");
            if (is_image && !kept.contains(&path)) || disk::is_spare(&entry.file_name()) {
                match fs::remove_file(path) {
                    // A launcher has just used or removed its spare one.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    removed => removed?,
                }
            }
        }
        self.kept.forget_all_but(&keep)?;
        self.sweep_agents()?;
        self.layers.forget_all_but(&keep)
    }

    fn keep(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        self.layers.write_out(disk)?;
        let base = self.base_below(id, disk)?;
        self.kept.keep(id, disk, base.as_deref())
    }

    fn save(&self, id: &SandboxId, disk: &DiskId, is_cancelled: &dyn Fn() -> bool) -> io::Result<u64> {
        self.save_disk(id, disk, is_cancelled)
    }

    fn kept(&self) -> io::Result<Vec<KeptDisk>> {
        let mut kept = self.kept.list()?;
        kept.retain(|kept| self.image(&kept.disk).exists());
        Ok(kept)
    }

    fn forget(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        self.kept.forget(id, disk)
    }

    fn has_image(&self, id: &SandboxId, disk: &DiskId) -> bool {
        self.kept.image(id, disk).exists()
    }

    fn forget_image(&self, id: &SandboxId, disk: &DiskId) -> io::Result<()> {
        // Before a sandbox is paused, nothing of it has to survive a power cut.
        match self.forks.lock().remove(disk) {
            Some(_) => self.kept.forget_copy(id, disk),
            None => self.kept.forget_image(id, disk),
        }
    }

    fn copy_fork(&self, from: &Fork, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> io::Result<()> {
        self.copy_again(from, to, is_cancelled)
    }

    fn rootfs_of(&self, disk: &DiskId) -> io::Result<Rootfs> {
        self.layers.rootfs_of(disk)
    }

    fn keep_memory(&self, build: &BuildId, copy: &Fork) -> io::Result<u64> {
        self.make_memory(build, copy)
    }

    fn memories(&self) -> io::Result<Vec<MemoryInfo>> {
        self.list_memories()
    }

    fn copy_memory(&self, build: &BuildId, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> Result<(), StartError> {
        self.use_memory(build, to, is_cancelled)
    }

    fn remove_memory(&self, build: &BuildId) -> io::Result<()> {
        self.drop_memory(build)
    }

    fn commit(&self, request: &CommitRequest, is_cancelled: &dyn Fn() -> bool) -> Result<Committed, CommitError> {
        let deadline = Instant::now() + COMMIT_TIMEOUT;
        let sources = self.layers.rootfs_of(&request.disk)?.sources(request.merge);
        self.wait_for_disk(&request.disk, deadline, is_cancelled)?;
        let unfinished = self.layers.begin()?;
        let order = Request::Commit {
            disk: request.disk.clone(),
            sources,
            unfinished: unfinished.name().to_owned(),
            keep_free_bytes: request.keep_free_bytes,
            has_processes: request.has_processes,
        };
        match self
            .launchers
            .request_once(Work::Commit, (&order, &[]), deadline, is_cancelled)?
        {
            Reply::Committed { layer, bytes } => {
                let bytes = unfinished.finish(&layer, bytes)?;
                Ok(Committed { layer, bytes })
            }
            Reply::Refused(why) => Err(CommitError::Refused(why)),
            Reply::Full(why) => Err(CommitError::Full(why)),
            Reply::Failed(why) => Err(io::Error::other(why).into()),
            _ => Err(io::Error::other("unexpected reply").into()),
        }
    }

    fn layers(&self) -> io::Result<Vec<LayerInfo>> {
        self.layers.list()
    }

    fn remove_layer(&self, layer: &LayerId) -> io::Result<()> {
        self.layers.remove(layer)
    }

    fn pack_layer(&self, layer: &LayerId, to: OwnedFd, is_cancelled: &dyn Fn() -> bool) -> Result<(), ArchiveError> {
        if !self.layers.has(layer) {
            return Err(ArchiveError::NoLayer(layer.clone()));
        }
        let order = Request::Pack { layer: layer.clone() };
        match self.archive(&order, to, is_cancelled)? {
            Reply::Done => Ok(()),
            Reply::Refused(why) => Err(ArchiveError::Refused(why)),
            Reply::Failed(why) => Err(io::Error::other(why).into()),
            _ => Err(io::Error::other("unexpected reply").into()),
        }
    }

    fn unpack_layer(
        &self,
        request: &UnpackRequest,
        from: OwnedFd,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, ArchiveError> {
        let unfinished = self.layers.begin()?;
        let order = Request::Unpack {
            layer: request.layer.clone(),
            unfinished: unfinished.name().to_owned(),
            bytes: request.bytes,
            keep_free_bytes: request.keep_free_bytes,
        };
        match self.archive(&order, from, is_cancelled)? {
            Reply::Committed { layer, bytes } if layer == request.layer => Ok(unfinished.finish(&layer, bytes)?),
            Reply::Refused(why) => Err(ArchiveError::Refused(why)),
            Reply::Full(why) => Err(ArchiveError::Full(why)),
            Reply::Failed(why) => Err(io::Error::other(why).into()),
            _ => Err(io::Error::other("unexpected reply").into()),
        }
    }

    fn capacity(&self) -> io::Result<Capacity> {
        usage::capacity(&self.data_dir)
    }

    fn disk_available(&self) -> io::Result<u64> {
        usage::disk_available(&self.data_dir)
    }

    fn uncharged(&self) -> io::Result<HostUncharged> {
        let sum = self.tree.sum().ok_or(io::ErrorKind::Unsupported)?;
        usage::uncharged(&sum)
    }

    fn pulse(&self) -> HostPulse {
        usage::pulse()
    }

    fn processes_created(&self) -> io::Result<u64> {
        self.processes.as_ref().ok_or(io::ErrorKind::Unsupported)?.sum()
    }

    fn dismantle(&self) {
        self.launchers.end();
        self.tree.remove();
        if let Err(error) = self.registry.release(&self.data_dir) {
            tracing::warn!("release the id range: {error}");
        }
    }
}

impl ContainerDriver {
    /// Runs a process that reads or writes an archive.
    fn archive(&self, order: &Request, stream: OwnedFd, is_cancelled: &dyn Fn() -> bool) -> io::Result<Reply> {
        let deadline = Instant::now() + ARCHIVE_TIMEOUT;
        let request = (order, &[stream.as_fd()][..]);
        // The only ends of a pipe are then that of the process and that of the caller.
        let replied = self
            .launchers
            .request_once(Work::Archive, request, deadline, is_cancelled);
        drop(stream);
        replied
    }

    fn refresh_base(&self) -> io::Result<()> {
        let update = || {
            let _changing = self.base_changes.write();
            self.base.update_current()
        };
        if !self.base.host_is_changing() && update()? {
            tracing::info!("the host's packages changed: new sandboxes use a new version of `base`");
        }
        self.base.sweep(|| {
            let names = self.tree.names()?;
            Ok(names.iter().map(ToString::to_string).collect())
        })
    }
}

/// Creates a new version of `base` when the host's packages have changed, and removes versions that no sandbox uses, and
/// layers that were removed while sandboxes used them.
/// Runs on a thread of its own: it reads and writes thousands of files, and no create request waits for it.
fn keep_base_current(container: &std::sync::Weak<ContainerDriver>) {
    let mut last = None;
    while let Some(container) = container.upgrade() {
        if let Err(error) = container.layers.sweep() {
            tracing::warn!("remove layers: {error}");
        }
        let outcome = container.refresh_base().map_err(|error| error.to_string());
        if let Err(error) = &outcome
            && last.as_ref() != Some(error)
        {
            tracing::warn!("update `base` after a change of the host's packages: {error}");
        }
        last = outcome.err();
        drop(container);
        std::thread::park_timeout(BASE_INTERVAL);
    }
}

//! The container driver: namespaces, cgroups and overlays of one Linux host.
//!
//! The driver is the platform's side. It has a pool of launchers, passes each start to a free one, and does itself what
//! needs no clone: finding, watching, killing and cleaning up. A sandbox here consists of the pidfd of its agent, whose
//! end kills every process of the sandbox, and its network namespace.

mod copies;
mod forks;
mod host;
mod processes;
mod running;
mod state;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use model::id::SandboxId;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags};

use self::host::egress_support;
use self::processes::NO_CRIU;
use self::running::Running;
pub use self::state::ContainerDriver;
use crate::cgroup::{Backend, Tree};
use crate::checkpoint::program;
use crate::driver::{Capabilities, Driver, Found, Sandbox, StartDisk, StartError, StartRequest, Started};
use crate::growth::LoopDevices;
use crate::launchers::{self, Helpers, LauncherPool};
use crate::modules;
use crate::netns::SocketMaker;
use crate::process_counter::{ProcessCounter, ProcessesOf};
use crate::registry::Registry;
use crate::settings::{CriuChoice, DriverSettings};
use crate::slot::{Name, path_hash};
use crate::slots::Slots;
use crate::storage::Storage;
use crate::usage::{self, HostUncharged};
use crate::wire::{Hello, Reply, Request, Work};

/// Names of the stages that a launcher reports, so that they can be passed on as static strings.
const STAGES: [&str; 6] = ["cgroup", "clone", "disk", "overlay", "setup", "exec"];

/// Restores that can go on at the same time, for each start. A restore keeps a core busy for most of its time, so as many as
/// there are cores would do if none ever hung. One that hangs takes no processor time, only its place: with twice as many
/// places, half of them can hang and the cores stay in use.
const RESTORES_PER_START: usize = 2;
/// Interval between checks for changes of the host's packages: about thirty names in its directories.
const BASE_INTERVAL: Duration = Duration::from_secs(5);
/// Doublings of that interval after as many failures, less one: five minutes at most. An attempt may copy all of `/usr`.
const BASE_DOUBLINGS: u32 = 6;

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
        let lock = launchers::lock(&data_dir.join("launchers.lock"))?;
        let storage = Storage::open(settings)?;
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
            settings: DriverSettings {
                data_dir,
                ..settings.clone()
            },
            tree: tree.clone(),
            work: Work::Sandboxes,
        };
        // Those of further blocks come with the starts that need them.
        let entries = blocks.get(&0).map(|held| held.locks.clone()).unwrap_or_default();
        let starts = settings.launchers.max(1);
        let restores = starts * RESTORES_PER_START;
        let helpers = Arc::new(Helpers::new(lock, entries, hello));
        let storage = storage.with_helpers(Arc::clone(&helpers));
        let launchers = LauncherPool::start(helpers, starts, restores)?;
        let processes = ProcessCounter::start(&tree);
        let criu = program::choose(&settings.criu).unwrap_or_else(|why| {
            match settings.criu {
                // Nobody asked for one.
                CriuChoice::Auto => tracing::info!("the processes of paused sandboxes stay in memory: {why}"),
                _ => tracing::error!("the processes of paused sandboxes stay in memory: {why}"),
            }
            None
        });
        let capabilities = Capabilities {
            concurrent_starts: starts,
            concurrent_restores: restores,
            limits: tree.is_limited(),
            disk_limits: true,
            uncharged_memory: tree.sum().is_some(),
            process_counter: processes.is_some(),
            freeze: tree.can_freeze(),
            checkpoints: criu.is_some(),
            layers: true,
            egress: egress_support(),
        };
        let sockets = Arc::new(SocketMaker::new()?);
        let container = Arc::new_cyclic(|itself| Self {
            storage,
            tree,
            registry,
            launchers,
            capabilities,
            criu,
            page_out: settings.page_out,
            loops: LoopDevices::default(),
            processes,
            slots: Mutex::new(Slots::new(blocks)),
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

    fn storage(&self) -> &Storage {
        &self.storage
    }

    fn start(&self, request: &StartRequest) -> Result<Started, StartError> {
        let (name, block) = self.allocate_slot(&request.id, request.disk.id())?;
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let _unchanging;
        let rootfs = match &request.disk {
            StartDisk::New { disk, rootfs } => {
                rootfs.check().map_err(invalid)?;
                self.storage.layers.use_for(disk, rootfs)?;
                rootfs.clone()
            }
            StartDisk::Kept(disk) => {
                _unchanging = self.storage.hold_base();
                self.storage.rootfs_of(disk)?
            }
        };
        let on_kept_disk = matches!(request.disk, StartDisk::Kept(_));
        if let Some(layer) = self.storage.layers.missing(&rootfs) {
            let layer = layer.clone();
            if !on_kept_disk {
                self.storage.layers.forget(request.disk.id())?;
            }
            self.release_slot(&request.id);
            return Err(StartError::NoLayer(layer));
        }
        let base = rootfs.has_base().then(|| self.storage.base.current()).flatten();
        let processes = if request.restore {
            match self.restorable(&name, base.as_deref()) {
                Err(refused @ StartError::Unrestorable(_)) => {
                    self.release_slot(&request.id);
                    return Err(refused);
                }
                checkpoint => Some(checkpoint?),
            }
        } else {
            None
        };
        if on_kept_disk {
            self.storage.prepare_kept(&name.id, &name.disk, base.as_deref())?
        } else {
            self.storage.prepare_disks(request.resources.disk_mb)?
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
        if let Some(base) = base {
            self.storage.note_base(&name.disk, base, &name.to_string());
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
                        match self.storage.copied_checkpoint(&name.disk) {
                            Some(_) => subject.wake_copy(figures.as_ref())?,
                            None => subject.wake_agent(figures.as_ref())?,
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
            (Reply::Damaged(why), ..) => Err(StartError::Damaged(why)),
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
        for name in &names {
            self.storage.note_user_of_base(&name.disk, &name.to_string());
        }
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
            self.storage.forget_user_of_base(&name.disk);
        }
        is_gone
    }

    fn obstacle(&self, checkpoint: &Path) -> io::Result<Option<String>> {
        match &self.criu {
            None => Ok(Some(NO_CRIU.to_owned())),
            Some(criu) => self.unfit(criu, checkpoint),
        }
    }

    fn uncharged(&self) -> io::Result<HostUncharged> {
        let sum = self.tree.sum().ok_or(io::ErrorKind::Unsupported)?;
        usage::uncharged(&sum)
    }

    fn processes_created(&self) -> io::Result<u64> {
        self.processes.as_ref().ok_or(io::ErrorKind::Unsupported)?.sum()
    }

    fn dismantle(&self) {
        self.launchers.end();
        self.tree.remove();
        if let Err(error) = self.registry.release(&self.storage.data_dir) {
            tracing::warn!("cannot release the id range of the data directory: {error}");
        }
    }
}

/// Creates a new version of `base` when the host's packages have changed, and removes versions that no sandbox uses, and
/// layers that were removed while sandboxes used them.
/// Runs on a thread of its own: it reads and writes thousands of files, and no create request waits for it.
fn keep_base_current(container: &std::sync::Weak<ContainerDriver>) {
    let mut last = None;
    // Failures in a row, and rounds that are left out after them.
    let (mut failures, mut left) = (0_u32, 0_u32);
    while let Some(container) = container.upgrade() {
        if let Err(error) = container.storage.layers.sweep() {
            tracing::warn!("cannot remove layers that nothing uses, it is tried again: {error}");
        }
        if left > 0 {
            left -= 1;
        } else {
            let names = || Ok(container.tree.names()?.iter().map(ToString::to_string).collect());
            let outcome = container.storage.refresh_base(names).map_err(|error| error.to_string());
            if let Err(error) = &outcome
                && last.as_ref() != Some(error)
            {
                tracing::warn!(
                    "cannot update `base` after a change of the host's packages, it is tried again: {error}"
                );
            }
            last = outcome.err();
            failures = if last.is_some() { failures.saturating_add(1) } else { 0 };
            left = (1 << failures.saturating_sub(1).min(BASE_DOUBLINGS)) - 1;
        }
        drop(container);
        std::thread::park_timeout(BASE_INTERVAL);
    }
}

//! Starts a sandbox. The child's side is in `setup`:
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
//! The user namespace is created by a thread whose user id is the first of the sandbox's range: inotify instances,
//! pending signals, message queues and locked memory are charged to the creator, and would otherwise be shared with the
//! host's root.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use model::resources::Resources;
use rustix::fs::{CWD, Mode, OFlags};
use rustix::net::SocketType;

use super::child::{ChildWait, Unfinished, has_report, pair, reported, run_child};
use super::held::Launcher;
use super::ids::{clone_as, map_ids};
use super::prepare::{FileSystems, Wanted};
use super::spawner;
use super::steps::{During, STEP, Stages};
use crate::boot_id::BootId;
use crate::files::write_at;
use crate::place;
use crate::rootfs::Rootfs;
use crate::setup::{self, Clocks, Parameters};
use crate::slot::Name;
use crate::sys::{self, Cloned};
use crate::wire::{self, Reply};

/// Value of `oom_score_adj` that exempts a process from the OOM killer.
const NEVER_KILLED: &str = "-1000";

impl Launcher {
    /// Starts a sandbox, whose disk exists or is created.
    ///
    /// # Errors
    /// When a step fails. Then no process is left.
    pub(super) fn start(
        &mut self,
        name: &Name,
        base_id: u32,
        rootfs: &Rootfs,
        on_kept_disk: bool,
        resources: &Resources,
        asked_by: BorrowedFd<'_>,
    ) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let wait = ChildWait { asked_by, step: STEP };
        let mut stages = Stages::new();
        let agent_groups = self.agent_groups(name, resources)?;
        stages.end("cgroup");

        let cores = self.limited.then_some(resources.cpu_count);
        let processors = self.views.of(cores, name.slot).during("select processors")?;
        let (setup, theirs) = pair(SocketType::SEQPACKET)?;
        let (boot, agent_boot) = pair(SocketType::STREAM)?;
        let (agent_spawner, spawner) = pair(SocketType::SEQPACKET)?;
        let parameters = Parameters {
            name: &name.to_string(),
            interface: self.interface,
            overlays: &rootfs.overlays,
            // Files there count as memory of the sandbox, and the OOM killer does not free them: with a larger size, a
            // full /dev/shm would leave no memory for the `rm` that empties it.
            shared_memory_mb: resources.memory_mb / 2,
            processors: &processors,
            groups: &self.groups,
            open_files: self.settings.open_files,
            began: Clocks::now(),
        };
        let group = agent_groups.birth.as_ref().map(AsFd::as_fd);
        let (pid, child) = match clone_as(base_id, sys::NAMESPACES, group).during("clone")? {
            Cloned::Child => run_child(&theirs, |socket| {
                let joined = agent_groups.join();
                joined.map_err(|error| setup::failure("join the cgroup", error))?;
                setup::become_agent(socket, &parameters, agent_boot, agent_spawner)
            }),
            Cloned::Parent { pid, pidfd } => (pid, Unfinished::new(pidfd)),
        };
        drop((theirs, agent_boot, agent_spawner));
        self.tree.record_agent(name, pid, place::AGENT)?;
        let of_child = |file: &str| format!("/proc/{pid}/{file}");
        // When the sandbox runs out of memory, its agent is killed last. Where this process may not set that, the
        // workload's processes are killed first as long as they keep their own score.
        let _ = write_at(CWD, &of_child("oom_score_adj"), NEVER_KILLED);
        map_ids(pid, base_id)?;
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

        let boot_id = BootId::new().during("create the boot id")?;
        let wanted = Wanted {
            name,
            base_id,
            user: user.as_fd(),
            rootfs,
            new_disk_mb: (!on_kept_disk).then_some(resources.disk_mb),
            processors: &processors,
            boot_id: &boot_id,
        };
        let FileSystems {
            overlays,
            fixtures,
            figures,
            disk,
        } = self.file_systems(&wanted, &mut stages)?;
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
        let work = self.work_groups(name, resources)?;
        match wait.receive(setup.as_fd()).during("set up")? {
            Some((message, _)) if message == setup::BEGUN => {}
            other => return Err(reported(other)).during("set up"),
        }
        let spawned = spawner::begin(child.first(), &work, Some(spawner), self.settings.open_files)?;
        let joined = spawned
            .namespace(wait)
            .during("create the cgroup namespace")
            .and_then(|namespace| wire::send(setup.as_fd(), b"groups", &[namespace.as_fd()]));
        if let Err(error) = joined {
            // Either fails as well when the child has failed meanwhile, which then has said why.
            if has_report(setup.as_fd()) {
                return Err(reported(wait.receive(setup.as_fd()).during("set up")?)).during("set up");
            }
            return Err(error);
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
}

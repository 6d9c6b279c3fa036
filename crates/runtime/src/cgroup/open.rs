//! The cgroup tree in a launcher: creating groups, and moving processes into them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use model::resources::Resources;

use super::backend::{Backend, CONTROLLERS};
use super::files::named;
use super::limits::{Limits, Weight};
use super::tree::{ENABLE, Role, Tree, child, side_by_side};
use crate::files::{if_there, open_dir, open_dir_at, open_for_writing, read_at, write_at};
use crate::identity::AgentRecord;
use crate::slot::Name;

/// The file of a v1 group through which a thread enters it.
const TASKS: &str = "tasks";

/// Positions of hierarchies of version 1 among the roots.
const MEMORY: usize = 1;
const CPU: usize = 3;

/// What [`while_restored`] adds.
const ROOM_MB: u32 = 128;
const ROOM_PIDS: u32 = 64;
/// Memory that a restored workload may have beyond what it cannot free, in bytes.
const SLACK: u64 = 4 << 20;

/// The cgroup tree by descriptors instead of paths, because the launcher leaves the host's mounts.
#[derive(Debug)]
pub(crate) struct OpenTree {
    backend: Backend,
    roots: Vec<OwnedFd>,
    /// The tree's group of the `cpuset` hierarchy, if sandboxes have groups in it.
    cpuset: Option<OwnedFd>,
}

/// Descriptors with which a process enters the groups of a role.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    /// v2 directory in which the process is cloned; `None` without cgroups.
    pub(crate) birth: Option<OwnedFd>,
    /// v1 `tasks` files. The kernel checks who opened them, so they are opened by the host's root.
    v1: Vec<File>,
}

impl Entry {
    /// Moves the calling process, which was cloned into [`Entry::birth`] and has one thread, into the other groups.
    ///
    /// Through `tasks` and not `cgroup.procs`: a thread that moves itself does not take the kernel's global lock
    /// against fork and exit, for which it would wait for an RCU grace period, tens of milliseconds next to a fork
    /// bomb.
    pub(crate) fn join(&self) -> io::Result<()> {
        for tasks in &self.v1 {
            rustix::io::write(tasks, b"0")?;
        }
        Ok(())
    }

    /// The `tasks` files of version 1.
    pub(crate) fn v1(&self) -> impl Iterator<Item = &File> {
        self.v1.iter()
    }

    /// The descriptors that a process needs for [`Entry::join`].
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let v1 = self.v1.iter().map(AsRawFd::as_raw_fd);
        self.birth.iter().map(AsRawFd::as_raw_fd).chain(v1)
    }
}

impl OpenTree {
    /// Opens a tree, with or without its group of the `cpuset` hierarchy.
    pub(crate) fn open(tree: &Tree, with_cpuset: bool) -> io::Result<Self> {
        let roots = tree
            .roots()
            .iter()
            .map(|root| open_dir(root).map_err(|e| named(root, &e)))
            .collect::<io::Result<_>>()?;
        let cpuset = tree.cpuset().filter(|_| with_cpuset);
        let cpuset = cpuset.map(|root| open_dir(&root).map_err(|e| named(&root, &e)));
        Ok(Self {
            backend: tree.backend.clone(),
            roots,
            cpuset: cpuset.transpose()?,
        })
    }

    /// Moves the calling process into the tree's v1 groups, so that its children are not in the service's. Except that
    /// of `cpu`, where it would be one among all sandboxes, see [`crate::schedule`].
    pub(crate) fn join_v1(&self) -> io::Result<()> {
        self.roots[1..]
            .iter()
            .zip(CONTROLLERS)
            .filter(|(_, controller)| *controller != "cpu")
            .try_for_each(|(root, _)| write_at(root.as_fd(), "cgroup.procs", "0"))
    }

    /// Creates a sandbox's own group and its agent's, with limits. The record comes first, and no process is cloned
    /// before the rest exists.
    pub(crate) fn create(&self, name: &Name, resources: &Resources) -> io::Result<Entry> {
        let limits = Limits::of(resources).with_margin();
        let whole_name = name.to_string();
        let whole = make(&self.roots[0], &whole_name)?;
        if let Backend::V2(_) = &self.backend {
            // Before the children are created, so that each is created with its controllers.
            write_at(whole.as_fd(), "cgroup.subtree_control", ENABLE)?;
            limits.hold_v2(whole.as_fd())?;
            write_at(whole.as_fd(), "cpu.weight", Weight::Starting.v2())?;
        }
        let birth = match &self.backend {
            Backend::Hybrid(..) => whole,
            Backend::V2(_) | Backend::None(_) => make(&self.roots[0], &child(name, Role::Agent))?,
        };
        self.entry(birth, || {
            let mut tasks = self.create_v1(&whole_name, &limits)?;
            if let Backend::Hybrid(..) = &self.backend {
                let shares = format!("{whole_name}/cpu.shares");
                write_at(self.roots[CPU].as_fd(), &shares, Weight::Starting.v1())?;
            }
            for root in self.counting() {
                tasks.push(open_for_writing(make(root, &whole_name)?.as_fd(), TASKS)?);
            }
            Ok(tasks)
        })
    }

    /// Creates the workload's groups, with limits. A separate step, so that the launcher can do it while the sandbox's
    /// first process, which needs only the others, does something else.
    pub(crate) fn create_work(&self, name: &Name, resources: &Resources) -> io::Result<Entry> {
        let limits = Limits::of(resources);
        let work_name = child(name, Role::Work);
        let birth = make(&self.roots[0], &work_name)?;
        if let Backend::V2(_) = &self.backend {
            limits.hold_v2(birth.as_fd())?;
        }
        self.entry(birth, || {
            let mut tasks = self.create_v1(&work_name, &limits)?;
            for root in self.counting() {
                tasks.push(open_for_writing(root.as_fd(), &format!("{name}/{TASKS}"))?);
            }
            Ok(tasks)
        })
    }

    /// Sets the limits of a sandbox that was restored in groups with [`while_restored`], now that only its own processes
    /// are in them. The workload may be charged for memory that was the agent's before, because CRIU has restored both
    /// in its group; what cannot be freed of it is allowed to stay.
    pub(crate) fn hold(&self, name: &Name, resources: &Resources) -> io::Result<()> {
        let limits = Limits::of(resources);
        let work = child(name, Role::Work);
        let raised = |memory: BorrowedFd<'_>, usage: &str| -> io::Result<Limits> {
            let needed = unreclaimable(memory, usage)?.saturating_add(SLACK);
            let memory = limits.memory.max(needed);
            Ok(Limits { memory, ..limits })
        };
        match &self.backend {
            Backend::None(_) => Ok(()),
            Backend::V2(_) => {
                let group = open_dir_at(self.roots[0].as_fd(), &work)?;
                raised(group.as_fd(), "memory.current")?.hold_v2(group.as_fd())?;
                let whole = open_dir_at(self.roots[0].as_fd(), &name.to_string())?;
                limits.with_margin().hold_v2(whole.as_fd())
            }
            Backend::Hybrid(..) => {
                let memory = open_dir_at(self.roots[MEMORY].as_fd(), &work)?;
                let of_work = raised(memory.as_fd(), "memory.usage_in_bytes")?;
                for (limits, path) in [(of_work, work), (limits.with_margin(), name.to_string())] {
                    for (root, hold) in self.roots[1..].iter().zip(Limits::HOLD_V1) {
                        hold(&limits, open_dir_at(root.as_fd(), &path)?.as_fd())?;
                    }
                }
                Ok(())
            }
        }
    }

    /// Freezes the workload of a sandbox, and does not wait until it stands still.
    pub(crate) fn freeze_work(&self, name: &Name) -> io::Result<()> {
        let file = format!("{}/cgroup.freeze", child(name, Role::Work));
        write_at(self.roots[0].as_fd(), &file, "1")
    }

    /// The v1 hierarchies without limits, in which a sandbox has one group for all of its processes.
    fn counting(&self) -> impl Iterator<Item = &OwnedFd> {
        self.roots[1..].iter().skip(CONTROLLERS.len()).chain(&self.cpuset)
    }

    /// Creates a group with limits in each v1 hierarchy that has them, and opens its entry file.
    fn create_v1(&self, path: &str, limits: &Limits) -> io::Result<Vec<File>> {
        self.roots[1..]
            .iter()
            .zip(Limits::HOLD_V1)
            .map(|(root, hold)| {
                let dir = make(root, path)?;
                hold(limits, dir.as_fd())?;
                open_for_writing(dir.as_fd(), TASKS)
            })
            .collect()
    }

    fn entry(&self, birth: OwnedFd, v1: impl FnOnce() -> io::Result<Vec<File>>) -> io::Result<Entry> {
        Ok(match self.backend {
            Backend::V2(_) | Backend::Hybrid(..) => Entry {
                birth: Some(birth),
                v1: v1()?,
            },
            Backend::None(_) => Entry::default(),
        })
    }

    /// Opens the workload's groups of a running sandbox.
    pub(crate) fn open_work(&self, name: &Name) -> io::Result<Entry> {
        let open = |path: &str| -> io::Result<Entry> {
            let birth = open_dir_at(self.roots[0].as_fd(), path)?;
            self.entry(birth, || {
                let limited = self.roots[1..].iter().take(CONTROLLERS.len());
                let mut tasks = limited
                    .map(|root| open_for_writing(root.as_fd(), &format!("{path}/{TASKS}")))
                    .collect::<io::Result<Vec<_>>>()?;
                for root in self.counting() {
                    // Earlier versions had groups for limits alone.
                    tasks.extend(if_there(open_for_writing(root.as_fd(), &format!("{name}/{TASKS}")))?);
                }
                Ok(tasks)
            })
        };
        match if_there(open(&child(name, Role::Work)))? {
            Some(opened) => Ok(opened),
            None => open(&side_by_side(name, Role::Work)),
        }
    }

    /// Records the process that is going to execute the agent's `program`, where [`Tree::agent_pid`] looks for it
    /// without cgroups.
    pub(crate) fn record_agent(&self, name: &Name, pid: i32, program: &str) -> io::Result<()> {
        if matches!(self.backend, Backend::None(_)) {
            let path = format!("{}/cgroup.procs", child(name, Role::Agent));
            let file = rustix::fs::openat(
                &self.roots[0],
                path.as_str(),
                rustix::fs::OFlags::CREATE
                    | rustix::fs::OFlags::TRUNC
                    | rustix::fs::OFlags::WRONLY
                    | rustix::fs::OFlags::CLOEXEC,
                0o600.into(),
            )?;
            let record = AgentRecord::of(pid, program)?.to_string();
            rustix::io::write(&file, record.as_bytes())?;
        }
        Ok(())
    }
}

/// Limits of a sandbox while CRIU restores it: CRIU is in its groups, too, and reads the checkpoint through them. A sandbox
/// that had used up its limits could not be restored otherwise.
pub(crate) fn while_restored(resources: &Resources) -> Resources {
    Resources {
        memory_mb: resources.memory_mb.saturating_add(ROOM_MB),
        pids: resources.pids.saturating_add(ROOM_PIDS),
        ..*resources
    }
}

/// The memory of a group that the kernel cannot take back from it, in bytes.
fn unreclaimable(group: BorrowedFd<'_>, usage: &str) -> io::Result<u64> {
    let number = |text: &str| text.trim().parse::<u64>().map_err(|_| io::ErrorKind::InvalidData);
    let stat = read_at(group, "memory.stat")?;
    let field = |names: [&str; 2]| {
        let mut fields = stat.lines().filter_map(|line| line.split_once(' '));
        let found = fields.find(|(name, _)| names.contains(name));
        found.map_or(Ok(0), |(_, text)| number(text))
    };
    // The page cache of version 2 and of version 1, without files in memory.
    let cache = field(["file", "cache"])?.saturating_sub(field(["shmem", "shmem"])?);
    Ok(number(&read_at(group, usage)?)?.saturating_sub(cache))
}

fn make(root: &OwnedFd, path: &str) -> io::Result<OwnedFd> {
    rustix::fs::mkdirat(root, path, 0o755.into())?;
    open_dir_at(root.as_fd(), path)
}

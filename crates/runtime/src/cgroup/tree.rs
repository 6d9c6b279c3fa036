//! The tree of groups of one data directory: its directories, and what is done with the groups of a sandbox by path.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

use super::backend::Backend;
use super::files::{named, write};
use super::freezer::Freezer;
use super::limits::{Weight, pids_of_all_sandboxes};
use crate::cgroup_view::{self, Scope, Shown, UnlimitedMounts};
use crate::identity::{self, AgentRecord};
use crate::slot::Name;

/// The two groups of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Only the agent: it must respond when the workload has used up its limits.
    Agent,
    /// The spawner and everything it starts.
    Work,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Work => "work",
        }
    }
}

/// The cgroup tree of one data directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Tree {
    pub(super) backend: Backend,
    pub(super) name: String,
    /// Further mounts of version 1 that programs inside look for.
    #[serde(default)]
    pub(super) unlimited: UnlimitedMounts,
}

impl Tree {
    /// The tree called `ringfence-<hash>`.
    #[must_use]
    pub(crate) fn new(backend: Backend, hash: u64) -> Self {
        Self {
            backend,
            name: format!("ringfence-{hash:016x}"),
            unlimited: UnlimitedMounts::default(),
        }
    }

    /// Adds the further version 1 mounts of this host.
    #[must_use]
    pub(crate) fn with_all_of_version_1(mut self) -> Self {
        if let Backend::Hybrid(..) = self.backend {
            self.unlimited =
                UnlimitedMounts::from_mountinfo(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default());
        }
        self
    }

    /// Whether limits are enforced.
    #[must_use]
    pub(crate) fn is_limited(&self) -> bool {
        !matches!(self.backend, Backend::None(_))
    }

    /// Whether sandboxes can be frozen. Version 2 is mounted in both layouts, and needs no controller for it.
    #[must_use]
    pub(crate) fn can_freeze(&self) -> bool {
        !matches!(self.backend, Backend::None(_)) && Freezer::is_supported(&self.naming_root())
    }

    /// The freezer of a sandbox.
    ///
    /// # Errors
    /// With [`io::ErrorKind::Unsupported`] where there are no groups.
    pub(crate) fn freezer(&self, name: &Name) -> io::Result<Freezer> {
        match self.backend {
            Backend::None(_) => Err(io::ErrorKind::Unsupported.into()),
            // All processes of the sandbox are in this group of version 2, or below it.
            Backend::V2(_) | Backend::Hybrid(..) => Ok(Freezer::new(self.naming_root().join(name.to_string()))),
        }
    }

    /// The freezer of the workload of a sandbox.
    ///
    /// # Errors
    /// As [`Self::freezer`].
    pub(crate) fn work_freezer(&self, name: &Name) -> io::Result<Freezer> {
        match self.backend {
            Backend::None(_) => Err(io::ErrorKind::Unsupported.into()),
            Backend::V2(_) | Backend::Hybrid(..) => Ok(Freezer::new(self.naming_root().join(child(name, Role::Work)))),
        }
    }

    /// The directories of the tree itself, starting with the one that has the names.
    pub(super) fn roots(&self) -> Vec<PathBuf> {
        match &self.backend {
            Backend::V2(root) => vec![root.join(&self.name)],
            Backend::Hybrid(unified, v1) => std::iter::once(unified)
                .chain(v1)
                .chain(self.unlimited.counting(&v1[2]))
                .map(|root| root.join(&self.name))
                .collect(),
            Backend::None(dir) => vec![dir.clone()],
        }
    }

    pub(super) fn cpuset(&self) -> Option<PathBuf> {
        Some(self.unlimited.cpuset.as_ref()?.join(&self.name))
    }

    /// Moves the calling process, and its future children, into the tree's group of the `cpuset` hierarchy, if there is
    /// one. Returns whether it is in the group.
    pub(crate) fn join_cpuset(&self) -> bool {
        self.cpuset().is_some_and(|group| cgroup_view::join_cpuset(&group))
    }

    /// The groups that are shown to a sandbox.
    pub(crate) fn shown(&self, cpuset: bool) -> Vec<Shown> {
        let of = |tree: &Path, name: &str| Shown {
            tree: tree.join(&self.name),
            name: name.to_owned(),
            scope: Scope::Workload,
        };
        match &self.backend {
            Backend::V2(root) => vec![of(root, "")],
            Backend::Hybrid(unified, [memory, pids, cpu]) => {
                let cpu_name = match &self.unlimited.cpuacct {
                    Some(path) if path == cpu => "cpu,cpuacct",
                    _ => "cpu",
                };
                let mut shown = vec![
                    of(unified, "unified"),
                    of(memory, "memory"),
                    of(pids, "pids"),
                    of(cpu, cpu_name),
                ];
                shown.extend(self.unlimited.counting(cpu).map(|path| Shown {
                    scope: Scope::Sandbox,
                    ..of(path, "cpuacct")
                }));
                shown.extend(self.cpuset().filter(|_| cpuset).map(|tree| Shown {
                    tree,
                    name: "cpuset".to_owned(),
                    scope: Scope::Sandbox,
                }));
                shown
            }
            Backend::None(_) => Vec::new(),
        }
    }

    pub(super) fn naming_root(&self) -> PathBuf {
        self.roots().swap_remove(0)
    }

    /// Every directory that a sandbox may have, in this layout and in earlier ones, children before their parents and
    /// the record last.
    pub(super) fn groups(&self, name: &Name) -> Vec<PathBuf> {
        let roles = [Role::Agent, Role::Work];
        let roots = self.roots();
        let of_roots = roots.iter().rev().flat_map(|root| {
            let sides = roles.map(|role| root.join(side_by_side(name, role))).into_iter();
            let sides = sides.filter(|_| name.is_of_earlier_version());
            let children = roles.map(|role| root.join(child(name, role)));
            sides.chain(children).chain([root.join(name.to_string())])
        });
        let of_cpuset = self.cpuset().map(|group| group.join(name.to_string()));
        of_cpuset.into_iter().chain(of_roots).collect()
    }

    /// Creates the tree and limits the total of all sandboxes. Existing groups are kept.
    ///
    /// # Errors
    /// When the host's cgroup file systems cannot be written.
    pub(crate) fn create(&self) -> io::Result<()> {
        for root in self.roots() {
            fs::create_dir_all(&root).map_err(|e| named(&root, &e))?;
        }
        if let Some(group) = self.cpuset() {
            cgroup_view::make_cpuset(&group);
        }
        match &self.backend {
            Backend::V2(root) => {
                write(&root.join("cgroup.subtree_control"), ENABLE)?;
                write(&root.join(&self.name).join("cgroup.subtree_control"), ENABLE)?;
                write(
                    &root.join(&self.name).join("pids.max"),
                    &pids_of_all_sandboxes()?.to_string(),
                )
            }
            Backend::Hybrid(_, [memory, pids, _]) => {
                // In v1, charges of a child count for its parents only with this, and it cannot be changed later.
                let hierarchy = memory.join(&self.name).join("memory.use_hierarchy");
                if hierarchy.exists() && fs::read_to_string(&hierarchy)?.trim() != "1" {
                    write(&hierarchy, "1")?;
                }
                write(
                    &pids.join(&self.name).join("pids.max"),
                    &pids_of_all_sandboxes()?.to_string(),
                )
            }
            Backend::None(_) => Ok(()),
        }
    }

    /// Removes the tree of groups, if it is empty.
    pub(crate) fn remove(&self) {
        let mut attempts = REMOVE_ATTEMPTS;
        for root in self.roots().into_iter().chain(self.cpuset()) {
            while let Err(error) = fs::remove_dir(&root)
                && error.kind() == io::ErrorKind::ResourceBusy
                && attempts > 0
            {
                attempts -= 1;
                std::thread::sleep(REMOVE_PAUSE);
            }
        }
    }

    /// Every sandbox that has a group here, running or not.
    ///
    /// # Errors
    /// When the tree cannot be read.
    pub(crate) fn names(&self) -> io::Result<Vec<Name>> {
        let mut names: Vec<Name> = Vec::new();
        for root in self.roots() {
            let entries = match fs::read_dir(&root) {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(named(&root, &error)),
            };
            for entry in entries {
                let file_name = entry?.file_name();
                let Some(text) = file_name.to_str() else { continue };
                let of_side = || Name::parse(text.rsplit_once('.')?.0);
                if let Some(name) = Name::parse(text).or_else(of_side)
                    && !names.contains(&name)
                {
                    names.push(name);
                }
            }
        }
        Ok(names)
    }

    /// Pid of the agent of a sandbox, if it is running. The agent's group never contains another process.
    #[must_use]
    pub(crate) fn agent_pid(&self, name: &Name) -> Option<i32> {
        let root = self.naming_root();
        // With version 1 it is in the sandbox's own group; earlier versions used a child group there, too.
        let groups = [
            child(name, Role::Agent),
            name.to_string(),
            side_by_side(name, Role::Agent),
        ];
        let mut texts = groups
            .iter()
            .filter_map(|group| fs::read_to_string(root.join(group).join("cgroup.procs")).ok());
        if matches!(self.backend, Backend::None(_)) {
            let text = texts.next()?;
            // The record may be outdated.
            return match AgentRecord::parse(&text) {
                Some(record) => record.living(),
                None => identity::agent_by_number(text.trim().parse().ok()?),
            };
        }
        texts.find_map(|text| text.lines().find_map(|line| line.parse().ok()))
    }

    /// Ends the preference that a sandbox has on the processors while it is being started.
    ///
    /// # Errors
    /// When its group cannot be written.
    pub(crate) fn settle(&self, name: &Name) -> io::Result<()> {
        let (root, file, weight) = match &self.backend {
            Backend::V2(root) => (root, "cpu.weight", Weight::Normal.v2()),
            Backend::Hybrid(_, [_, _, cpu]) => (cpu, "cpu.shares", Weight::Normal.v1()),
            Backend::None(_) => return Ok(()),
        };
        match write(&root.join(&self.name).join(name.to_string()).join(file), weight) {
            // Earlier versions had no group for a whole sandbox.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Lets the memory of a sandbox be moved to swap, or not any more. What is there remains until it is used. With version 1
    /// memory and swap have one limit for both, so nothing has to be changed.
    ///
    /// # Errors
    /// When its group cannot be written.
    pub(crate) fn allow_swap(&self, name: &Name, is_allowed: bool) -> io::Result<()> {
        let Backend::V2(root) = &self.backend else {
            return Ok(());
        };
        let root = root.join(&self.name);
        for group in [name.to_string(), child(name, Role::Work)] {
            match write(
                &root.join(group).join("memory.swap.max"),
                if is_allowed { "max" } else { "0" },
            ) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Frees what can be freed of the memory of a sandbox: page cache, and what is in swap already. Best effort: the kernel
    /// reports it as an error when something is left, and old ones have no such file in version 2.
    ///
    /// # Errors
    /// When its group is gone.
    pub(crate) fn reclaim(&self, name: &Name) -> io::Result<()> {
        let (group, file, wanted) = match &self.backend {
            Backend::V2(root) => {
                let group = root.join(&self.name).join(name.to_string());
                let used = fs::read_to_string(group.join("memory.current"))?;
                (group, "memory.reclaim", used.trim_end().to_owned())
            }
            Backend::Hybrid(_, [memory, ..]) => (
                memory.join(&self.name).join(name.to_string()),
                "memory.force_empty",
                "0".to_owned(),
            ),
            Backend::None(_) => return Ok(()),
        };
        match fs::write(group.join(file), wanted) {
            Err(_) if group.exists() => Ok(()),
            other => other,
        }
    }

    /// Kills everything in the groups of a sandbox. Only needed without an agent: the end of an agent kills all
    /// processes of its sandbox.
    pub(crate) fn kill(&self, name: &Name) {
        if matches!(self.backend, Backend::None(_)) {
            kill_all_of(&|| self.agent_pid(name).into_iter().collect());
            return;
        }
        // From the sandbox's own group down: where the kernel supports killing groups, that ends all of them.
        for dir in self.groups(name).iter().rev() {
            if fs::write(dir.join("cgroup.kill"), "1").is_ok() {
                continue;
            }
            let procs = dir.join("cgroup.procs");
            let pids = || {
                let text = fs::read_to_string(&procs).unwrap_or_default();
                text.lines().filter_map(|line| line.parse().ok()).collect()
            };
            kill_all_of(&pids);
        }
    }

    /// Removes the groups of a sandbox. `false` when a process is still in one of them.
    #[must_use]
    pub(crate) fn remove_groups(&self, name: &Name) -> bool {
        if matches!(self.backend, Backend::None(_)) && self.agent_pid(name).is_some() {
            return false;
        }
        let mut gone = true;
        for dir in self.groups(name) {
            if matches!(self.backend, Backend::None(_)) {
                let _ = fs::remove_file(dir.join("cgroup.procs"));
            }
            gone &= match fs::remove_dir(&dir) {
                Ok(()) => true,
                Err(error) => error.kind() == io::ErrorKind::NotFound,
            };
        }
        gone
    }
}

/// Kills the processes with these pids, unless their pids change before each has a pidfd to signal it by.
fn kill_all_of(pids: &dyn Fn() -> Vec<i32>) {
    let taken: Vec<(i32, OwnedFd)> = pids()
        .into_iter()
        .filter_map(|pid| {
            let pidfd = rustix::process::pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
            Some((pid, pidfd))
        })
        .collect();
    let still = pids();
    for (_, process) in taken.iter().filter(|(pid, _)| still.contains(pid)) {
        let _ = rustix::process::pidfd_send_signal(process, Signal::KILL);
    }
}

/// The group of a role, below a root of the tree.
pub(super) fn child(name: &Name, role: Role) -> String {
    format!("{name}/{}", role.name())
}

/// The group of a role in the earlier layout without a common parent group.
pub(super) fn side_by_side(name: &Name, role: Role) -> String {
    format!("{name}.{}", role.name())
}

/// The controllers, in the format of `cgroup.subtree_control`.
pub(super) const ENABLE: &str = "+memory +pids +cpu";

/// Number of attempts, and pause between them, to remove a busy group. A launcher that has exited leaves the groups
/// that it had joined only when it is switched out for the last time.
const REMOVE_ATTEMPTS: u32 = 200;
const REMOVE_PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

//! Control groups, behind one type with three back ends.
//!
//! - **v2**: one tree with the memory, pids and cpu controllers; processes are born in their group.
//! - **hybrid**: controllers in v1 hierarchies, and a v2 tree without them beside. Processes are born in the v2
//!   group, which names them and kills them, and join the v1 groups, which limit them.
//! - **none**: no limits. Only when the operator says so.
//!
//! The tree of a data directory is `ringfence-<hash>`, outside the service's own group, so that ending the service
//! does not end the sandboxes. Below it lies one group per sandbox, named by [`Name`], with two children: `work` holds
//! everything that the sandbox runs and has its limits; `agent` holds the agent and nothing else. The sandbox's own
//! group has the limits and a margin more: what the agent does for a client (files in memory, page cache, compression,
//! descriptors that it was handed) is charged to the sandbox and bounded with it, and the margin is what the agent has
//! left to answer with when the workload has used up everything. Where version 1 has the limits, processes may be in
//! inner groups, so there the agent is in the sandbox's own group, and there is no `agent`. Each group costs a tenth of
//! a millisecond of processor time from its creation to its removal, so there is none that nothing needs.
//!
//! These names are the record by which sandboxes are found again after a crash. Versions before called the group
//! `<id>.<slot>`, and those before them made two groups side by side, `<id>.<slot>.agent` without limits and
//! `<id>.<slot>.work`; sandboxes of theirs are still found.

mod limits;
pub(crate) mod meters;
pub(crate) mod open;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal};
use serde::{Deserialize, Serialize};

use self::limits::pids_of_all_sandboxes;
use crate::cgroup_view::{self, Beside, Shown, Whose};
use crate::identity::{self, AgentRecord};
use crate::slot::Name;

/// Controllers that hold a sandbox's limits.
pub(crate) const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

/// Which of a sandbox's two groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// The agent alone: it must answer when the workload has used up its limits.
    Agent,
    /// The spawner and everything it starts.
    Work,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Work => "work",
        }
    }
}

/// What the host offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Backend {
    /// The v2 mount.
    V2(PathBuf),
    /// The v2 mount and the v1 mounts of [`CONTROLLERS`], in that order.
    Hybrid(PathBuf, [PathBuf; 3]),
    /// A directory that takes the place of the tree as the record.
    None(PathBuf),
}

impl Backend {
    /// What `/proc/self/mountinfo` text offers, or what is missing, in words for the operator.
    ///
    /// # Errors
    /// When there is no cgroup v2 mount, or some controller is in neither hierarchy.
    pub(crate) fn from_mountinfo(mountinfo: &str, v2_controllers: impl Fn(&Path) -> String) -> Result<Self, String> {
        let mut unified = None;
        let mut v1: [Option<PathBuf>; 3] = [None, None, None];
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else {
                continue;
            };
            let Some(point) = left.split(' ').nth(4) else { continue };
            let mut right = right.split(' ');
            match right.next() {
                Some("cgroup2") => unified = unified.or_else(|| Some(PathBuf::from(point))),
                Some("cgroup") => {
                    let options = right.nth(1).unwrap_or_default();
                    for (place, controller) in v1.iter_mut().zip(CONTROLLERS) {
                        if options.split(',').any(|option| option == controller) {
                            *place = Some(PathBuf::from(point));
                        }
                    }
                }
                _ => {}
            }
        }
        let unified = unified.ok_or("no cgroup2 file system is mounted")?;
        let offered = v2_controllers(&unified);
        let has = |name: &str| offered.split_whitespace().any(|have| have == name);
        if CONTROLLERS.iter().all(|name| has(name)) {
            return Ok(Self::V2(unified));
        }
        match v1 {
            [Some(memory), Some(pids), Some(cpu)] => Ok(Self::Hybrid(unified, [memory, pids, cpu])),
            _ => Err(format!(
                "controllers missing in both cgroup versions: {}",
                CONTROLLERS
                    .iter()
                    .zip(&v1)
                    .filter(|(name, place)| place.is_none() && !has(name))
                    .map(|(name, _)| *name)
                    .collect::<Vec<_>>()
                    .join(", ")
            )),
        }
    }

    /// Whether processes lie in the very group below which the tree would grow, and keep controllers from being enabled
    /// there. The real root of v2 is free of that rule (and has no `cgroup.type`); what a container sees as the root is
    /// an ordinary group.
    #[must_use]
    pub(crate) fn is_occupied(&self) -> bool {
        let Self::V2(root) = self else { return false };
        let read = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
        let enabled = read("cgroup.subtree_control");
        let lacking = |name: &&str| !enabled.split_whitespace().any(|have| have == *name);
        root.join("cgroup.type").exists() && CONTROLLERS.iter().any(lacking) && !read("cgroup.procs").trim().is_empty()
    }

    /// What this host offers.
    ///
    /// # Errors
    /// As [`Backend::from_mountinfo`].
    pub(crate) fn detect() -> Result<Self, String> {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").map_err(|e| format!("read mountinfo: {e}"))?;
        Self::from_mountinfo(&mountinfo, |root| {
            fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default()
        })
    }
}

/// The tree of one data directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Tree {
    backend: Backend,
    name: String,
    /// What programs inside want to see of version 1 besides.
    #[serde(default)]
    beside: Beside,
}

impl Tree {
    /// The tree called `ringfence-<hash>`.
    #[must_use]
    pub(crate) fn new(backend: Backend, hash: u64) -> Self {
        Self {
            backend,
            name: format!("ringfence-{hash:016x}"),
            beside: Beside::default(),
        }
    }

    /// The same, with what this host has of version 1 besides.
    #[must_use]
    pub(crate) fn with_all_of_version_1(mut self) -> Self {
        if let Backend::Hybrid(..) = self.backend {
            self.beside = Beside::from_mountinfo(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default());
        }
        self
    }

    /// Whether limits are held.
    #[must_use]
    pub(crate) fn is_limited(&self) -> bool {
        !matches!(self.backend, Backend::None(_))
    }

    /// The directories of the tree itself, the naming one first.
    fn roots(&self) -> Vec<PathBuf> {
        match &self.backend {
            Backend::V2(root) => vec![root.join(&self.name)],
            Backend::Hybrid(unified, v1) => std::iter::once(unified)
                .chain(v1)
                .chain(self.beside.counting(&v1[2]))
                .map(|root| root.join(&self.name))
                .collect(),
            Backend::None(dir) => vec![dir.clone()],
        }
    }

    fn cpuset(&self) -> Option<PathBuf> {
        Some(self.beside.cpuset.as_ref()?.join(&self.name))
    }

    /// Puts the calling process, and what it clones, into the tree's group of the `cpuset` hierarchy, if there is one.
    /// Whether it is in there.
    pub(crate) fn join_cpuset(&self) -> bool {
        self.cpuset().is_some_and(|group| cgroup_view::join_cpuset(&group))
    }

    /// The groups that a sandbox sees.
    pub(crate) fn shown(&self, cpuset: bool) -> Vec<Shown> {
        let of = |tree: &Path, name: &str| Shown {
            tree: tree.join(&self.name),
            name: name.to_owned(),
            whose: Whose::Workload,
        };
        match &self.backend {
            Backend::V2(root) => vec![of(root, "")],
            Backend::Hybrid(unified, [memory, pids, cpu]) => {
                let cpu_name = match &self.beside.cpuacct {
                    Some(path) if path == cpu => "cpu,cpuacct",
                    _ => "cpu",
                };
                let mut shown = vec![
                    of(unified, "unified"),
                    of(memory, "memory"),
                    of(pids, "pids"),
                    of(cpu, cpu_name),
                ];
                shown.extend(self.beside.counting(cpu).map(|path| Shown {
                    whose: Whose::Sandbox,
                    ..of(path, "cpuacct")
                }));
                shown.extend(self.cpuset().filter(|_| cpuset).map(|tree| Shown {
                    tree,
                    name: "cpuset".to_owned(),
                    whose: Whose::All,
                }));
                shown
            }
            Backend::None(_) => Vec::new(),
        }
    }

    fn naming_root(&self) -> PathBuf {
        self.roots().swap_remove(0)
    }

    /// Every directory that a sandbox may have, of this layout and of earlier ones, children before their parents
    /// and the record last.
    fn groups(&self, name: &Name) -> Vec<PathBuf> {
        let roles = [Role::Agent, Role::Work];
        self.roots()
            .iter()
            .rev()
            .flat_map(|root| {
                let sides = roles.map(|role| root.join(side_by_side(name, role))).into_iter();
                let sides = sides.filter(|_| name.is_of_earlier_version());
                let children = roles.map(|role| root.join(child(name, role)));
                sides.chain(children).chain([root.join(name.to_string())])
            })
            .collect()
    }

    /// Makes the tree and bounds what all sandboxes use together. Does nothing to what is there.
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
                // Charges of a child count for its parents in v1 only with this, and it cannot change later.
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

    /// Removes the tree, if it is empty.
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

    /// Every sandbox that has a group here, living or not.
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

    /// Pid of the agent of a sandbox, if it lives. The agent's group never holds anything else.
    #[must_use]
    pub(crate) fn agent_pid(&self, name: &Name) -> Option<i32> {
        let root = self.naming_root();
        // With version 1 it is in the sandbox's own group; versions before put it into one below also there.
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
            // A file tells what was, not what is.
            return match AgentRecord::parse(&text) {
                Some(record) => record.living(),
                None => identity::agent_by_number(text.trim().parse().ok()?),
            };
        }
        texts.find_map(|text| text.lines().find_map(|line| line.parse().ok()))
    }

    /// Kills everything in the groups of a sandbox. For what has no agent any more: the end of an agent takes all
    /// processes of its sandbox with it.
    pub(crate) fn kill(&self, name: &Name) {
        if matches!(self.backend, Backend::None(_)) {
            kill_all_of(&|| self.agent_pid(name).into_iter().collect());
            return;
        }
        // From the sandbox's own group down: where the kernel kills groups, that one ends all at once.
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

/// Kills the processes with these numbers that still have them once there is a pidfd to signal each by.
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
fn child(name: &Name, role: Role) -> String {
    format!("{name}/{}", role.name())
}

/// The group of a role in the layout before the groups of a sandbox had one above them.
fn side_by_side(name: &Name, role: Role) -> String {
    format!("{name}.{}", role.name())
}

/// The controllers, as `cgroup.subtree_control` takes them.
const ENABLE: &str = "+memory +pids +cpu";

/// How often, and how far apart, to try to remove a group that is busy. A launcher that was waited for leaves the groups
/// it had joined a moment later, when it is switched out for the last time.
const REMOVE_ATTEMPTS: u32 = 200;
const REMOVE_PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

fn write(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text).map_err(|e| named(path, &e))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests;

//! Control groups, behind one type with three back ends.
//!
//! - **v2**: one tree with the memory, pids and cpu controllers; processes are born in their group.
//! - **hybrid**: controllers in v1 hierarchies, and a v2 tree without them beside. Processes are born in the v2
//!   group, which names them and kills them, and join the v1 groups, which limit them.
//! - **none**: no limits. Only when the operator says so.
//!
//! The tree of a data directory is `ringfence-<hash>`, outside the service's own group, so that ending the service
//! does not end the sandboxes. Below it lie, per sandbox, `<id>.<slot>.agent`, which holds the agent and nothing
//! else and is unlimited, and `<id>.<slot>.work`, which holds everything the sandbox runs. These names are the record
//! by which sandboxes are found again after a crash.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use model::resources::Resources;
use serde::{Deserialize, Serialize};

use crate::files::{open_dir, write_at};
use crate::slot::Name;

/// Controllers that hold a sandbox's limits.
pub const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

/// Which of a sandbox's two groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The agent alone, without limits: it must answer when the workload has used up its own.
    Agent,
    /// The spawner and everything it starts.
    Work,
}

impl Role {
    fn suffix(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Work => "work",
        }
    }
}

/// What the host offers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backend {
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
    pub fn from_mountinfo(mountinfo: &str, v2_controllers: impl Fn(&Path) -> String) -> Result<Self, String> {
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
    pub fn is_occupied(&self) -> bool {
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
    pub fn detect() -> Result<Self, String> {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").map_err(|e| format!("read mountinfo: {e}"))?;
        Self::from_mountinfo(&mountinfo, |root| {
            fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default()
        })
    }
}

/// The tree of one data directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tree {
    backend: Backend,
    name: String,
}

impl Tree {
    /// The tree called `ringfence-<hash>`.
    #[must_use]
    pub fn new(backend: Backend, hash: u64) -> Self {
        Self {
            backend,
            name: format!("ringfence-{hash:016x}"),
        }
    }

    /// Whether limits are held.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        !matches!(self.backend, Backend::None(_))
    }

    /// The directories of the tree itself, the naming one first.
    fn roots(&self) -> Vec<PathBuf> {
        match &self.backend {
            Backend::V2(root) => vec![root.join(&self.name)],
            Backend::Hybrid(unified, v1) => std::iter::once(unified)
                .chain(v1)
                .map(|root| root.join(&self.name))
                .collect(),
            Backend::None(dir) => vec![dir.clone()],
        }
    }

    fn naming_root(&self) -> PathBuf {
        self.roots().swap_remove(0)
    }

    fn group(root: &Path, name: &Name, role: Role) -> PathBuf {
        root.join(format!("{name}.{}", role.suffix()))
    }

    /// Every directory of one sandbox.
    fn groups(&self, name: &Name) -> Vec<PathBuf> {
        let roots = self.roots();
        let (naming, limiting) = roots.split_at(1);
        [Role::Agent, Role::Work]
            .into_iter()
            .map(|role| Self::group(&naming[0], name, role))
            .chain(limiting.iter().map(|root| Self::group(root, name, Role::Work)))
            .collect()
    }

    /// Makes the tree and bounds what all sandboxes use together. Does nothing to what is there.
    ///
    /// # Errors
    /// When the host's cgroup file systems cannot be written.
    pub fn create(&self) -> io::Result<()> {
        for root in self.roots() {
            fs::create_dir_all(&root).map_err(|e| named(&root, &e))?;
        }
        let enable = "+memory +pids +cpu";
        match &self.backend {
            Backend::V2(root) => {
                write(&root.join("cgroup.subtree_control"), enable)?;
                write(&root.join(&self.name).join("cgroup.subtree_control"), enable)?;
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
    pub fn remove(&self) {
        let mut attempts = REMOVE_ATTEMPTS;
        for root in self.roots() {
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
    pub fn names(&self) -> io::Result<Vec<Name>> {
        let mut names: Vec<Name> = Vec::new();
        for root in self.roots() {
            let entries = match fs::read_dir(&root) {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(named(&root, &error)),
            };
            for entry in entries {
                let file_name = entry?.file_name();
                let Some((text, _)) = file_name.to_str().and_then(|text| text.rsplit_once('.')) else {
                    continue;
                };
                if let Some(name) = Name::parse(text)
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
    pub fn agent_pid(&self, name: &Name) -> Option<i32> {
        let dir = Self::group(&self.naming_root(), name, Role::Agent);
        fs::read_to_string(dir.join("cgroup.procs"))
            .ok()?
            .lines()
            .find_map(|line| line.parse().ok())
    }

    /// Kills everything in the groups of a sandbox. For what has no agent any more: the end of an agent takes all
    /// processes of its sandbox with it.
    pub fn kill(&self, name: &Name) {
        for dir in self.groups(name) {
            if fs::write(dir.join("cgroup.kill"), "1").is_ok() {
                continue;
            }
            let procs = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            for pid in procs
                .lines()
                .filter_map(|line| line.parse().ok())
                .filter_map(rustix::process::Pid::from_raw)
            {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }

    /// Where the kernel counts what a sandbox's workload uses; `None` without cgroups.
    pub(crate) fn meters(&self, name: &Name) -> Option<Meters> {
        let of = |root: &Path| Self::group(&root.join(&self.name), name, Role::Work);
        match &self.backend {
            Backend::V2(root) => {
                let group = of(root);
                Some(Meters {
                    cpu: group.join("cpu.stat"),
                    memory_charged: group.join("memory.current"),
                    memory_limit: group.join("memory.max"),
                    memory_stat: group.join("memory.stat"),
                    memory_kills: group.join("memory.events"),
                    cache_field: "file",
                    shared_field: "shmem",
                })
            }
            Backend::Hybrid(unified, [memory, ..]) => {
                let group = of(memory);
                Some(Meters {
                    cpu: of(unified).join("cpu.stat"),
                    memory_charged: group.join("memory.usage_in_bytes"),
                    memory_limit: group.join("memory.limit_in_bytes"),
                    memory_stat: group.join("memory.stat"),
                    memory_kills: group.join("memory.oom_control"),
                    cache_field: "total_cache",
                    shared_field: "total_shmem",
                })
            }
            Backend::None(_) => None,
        }
    }

    /// Removes the groups of a sandbox. `false` when a process is still in one of them.
    #[must_use]
    pub fn remove_groups(&self, name: &Name) -> bool {
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

/// Files in which the kernel counts what a workload uses.
#[derive(Debug)]
pub(crate) struct Meters {
    /// Has a line `usage_usec`.
    pub(crate) cpu: PathBuf,
    pub(crate) memory_charged: PathBuf,
    pub(crate) memory_limit: PathBuf,
    pub(crate) memory_stat: PathBuf,
    /// Has a line `oom_kill`.
    pub(crate) memory_kills: PathBuf,
    /// Line of `memory_stat` with the page cache, files in memory included.
    pub(crate) cache_field: &'static str,
    /// Line of `memory_stat` with the files in memory alone.
    pub(crate) shared_field: &'static str,
}

/// The tree as the launcher sees it: descriptors instead of paths, because the launcher leaves the host's mounts.
#[derive(Debug)]
pub(crate) struct OpenTree {
    backend: Backend,
    roots: Vec<OwnedFd>,
}

/// The groups of one sandbox, made and limited.
#[derive(Debug)]
pub(crate) struct Groups {
    /// v2 directory that the agent is born in; none without cgroups.
    pub(crate) agent: Option<OwnedFd>,
    /// What a process needs to be in the workload's groups.
    pub(crate) work: WorkGroups,
}

/// How a process gets into the workload's groups.
#[derive(Debug)]
pub(crate) struct WorkGroups {
    /// v2 directory to be born in.
    pub(crate) birth: Option<OwnedFd>,
    /// v1 `cgroup.procs` files to write `0` to.
    pub(crate) join: Vec<File>,
}

impl OpenTree {
    pub(crate) fn open(tree: &Tree) -> io::Result<Self> {
        let roots = tree
            .roots()
            .iter()
            .map(|root| open_dir(root).map_err(|e| named(root, &e)))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            backend: tree.backend.clone(),
            roots,
        })
    }

    /// Puts the calling process into the tree's v1 groups, so that what it clones is not in the service's.
    pub(crate) fn join_v1(&self) -> io::Result<()> {
        self.roots[1..]
            .iter()
            .try_for_each(|root| write_at(root.as_fd(), "cgroup.procs", "0"))
    }

    /// Makes the groups of a sandbox and sets its limits.
    pub(crate) fn create(&self, name: &Name, resources: &Resources) -> io::Result<Groups> {
        let make = |root: &OwnedFd, role: Role| -> io::Result<OwnedFd> {
            let dir = format!("{name}.{}", role.suffix());
            rustix::fs::mkdirat(root, dir.as_str(), 0o755.into())?;
            crate::files::open_dir_at(root.as_fd(), &dir)
        };
        let agent = make(&self.roots[0], Role::Agent)?;
        let work = make(&self.roots[0], Role::Work)?;
        let memory = u64::from(resources.memory_mb) << 20;
        let quota_us = u64::from(resources.cpu_count) * CPU_PERIOD_US;
        match &self.backend {
            Backend::V2(_) => {
                write_at(work.as_fd(), "memory.max", &memory.to_string())?;
                // Swap would let a sandbox use more than its memory; the file is absent where there is no swap.
                optional(write_at(work.as_fd(), "memory.swap.max", "0"))?;
                write_at(work.as_fd(), "pids.max", &resources.pids.to_string())?;
                write_at(work.as_fd(), "cpu.max", &format!("{quota_us} {CPU_PERIOD_US}"))?;
                Ok(Groups {
                    agent: Some(agent),
                    work: WorkGroups {
                        birth: Some(work),
                        join: Vec::new(),
                    },
                })
            }
            Backend::Hybrid(..) => {
                let [memory_dir, pids_dir, cpu_dir] = [1, 2, 3].map(|i| make(&self.roots[i], Role::Work));
                let (memory_dir, pids_dir, cpu_dir) = (memory_dir?, pids_dir?, cpu_dir?);
                write_at(memory_dir.as_fd(), "memory.limit_in_bytes", &memory.to_string())?;
                optional(write_at(
                    memory_dir.as_fd(),
                    "memory.memsw.limit_in_bytes",
                    &memory.to_string(),
                ))?;
                // Version 1 counts socket buffers apart from memory, and the host's bound for them is one for all.
                let sockets = (memory / SOCKET_MEMORY_SHARE).to_string();
                optional(write_at(memory_dir.as_fd(), "memory.kmem.tcp.limit_in_bytes", &sockets))?;
                write_at(pids_dir.as_fd(), "pids.max", &resources.pids.to_string())?;
                write_at(cpu_dir.as_fd(), "cpu.cfs_period_us", &CPU_PERIOD_US.to_string())?;
                write_at(cpu_dir.as_fd(), "cpu.cfs_quota_us", &quota_us.to_string())?;
                let join = [memory_dir, pids_dir, cpu_dir]
                    .iter()
                    .map(|dir| crate::files::open_for_writing(dir.as_fd(), "cgroup.procs"))
                    .collect::<io::Result<_>>()?;
                Ok(Groups {
                    agent: Some(agent),
                    work: WorkGroups {
                        birth: Some(work),
                        join,
                    },
                })
            }
            Backend::None(_) => Ok(Groups {
                agent: None,
                work: WorkGroups {
                    birth: None,
                    join: Vec::new(),
                },
            }),
        }
    }

    /// The workload's groups of a sandbox that lives already.
    pub(crate) fn open_work(&self, name: &Name) -> io::Result<WorkGroups> {
        let dir = format!("{name}.{}", Role::Work.suffix());
        if matches!(self.backend, Backend::None(_)) {
            return Ok(WorkGroups {
                birth: None,
                join: Vec::new(),
            });
        }
        let birth = crate::files::open_dir_at(self.roots[0].as_fd(), &dir)?;
        let join = self.roots[1..]
            .iter()
            .map(|root| crate::files::open_for_writing(root.as_fd(), &format!("{dir}/cgroup.procs")))
            .collect::<io::Result<_>>()?;
        Ok(WorkGroups {
            birth: Some(birth),
            join,
        })
    }

    /// Without cgroups: writes the agent's pid where [`Tree::agent_pid`] looks for it.
    pub(crate) fn record_agent(&self, name: &Name, pid: i32) -> io::Result<()> {
        if matches!(self.backend, Backend::None(_)) {
            let path = format!("{name}.{}/cgroup.procs", Role::Agent.suffix());
            let file = rustix::fs::openat(
                &self.roots[0],
                path.as_str(),
                rustix::fs::OFlags::CREATE | rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC,
                0o600.into(),
            )?;
            rustix::io::write(&file, pid.to_string().as_bytes())?;
        }
        Ok(())
    }
}

/// Part of a sandbox's memory that its TCP buffers may take where they are counted apart from it.
const SOCKET_MEMORY_SHARE: u64 = 4;

/// How often, and how far apart, to try to remove a group that is busy. A launcher that was waited for leaves the groups
/// it had joined a moment later, when it is switched out for the last time.
const REMOVE_ATTEMPTS: u32 = 200;
const REMOVE_PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

/// The kernel's default period for CPU quotas, in microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// Most processes that all sandboxes together may have: what the host can have less an eighth, and at least 1,024,
/// which stay for the host itself. Whichever of the two kernel-wide bounds is lower counts: on large machines that is
/// often the one on threads.
fn pids_of_all_sandboxes() -> io::Result<u64> {
    let bound = |name: &str| -> io::Result<u64> {
        let text = fs::read_to_string(format!("/proc/sys/kernel/{name}"))?;
        text.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
    };
    let most = bound("pid_max")?.min(bound("threads-max")?);
    Ok(most.saturating_sub((most / 8).max(1024)).max(64))
}

fn optional(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    fs::write(path, text).map_err(|e| named(path, &e))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
    const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw";

    fn v1(controllers: &str) -> String {
        format!("31 23 0:27 / /sys/fs/cgroup/{controllers} rw - cgroup cgroup rw,{controllers}")
    }

    fn detect(lines: &[&str], controllers: &str) -> Result<Backend, String> {
        Backend::from_mountinfo(&lines.join("\n"), |_| controllers.to_owned())
    }

    #[test]
    fn the_back_end_follows_from_the_mounts() {
        assert_eq!(
            detect(&[V2], "cpuset cpu io memory pids"),
            Ok(Backend::V2("/sys/fs/cgroup".into()))
        );
        let (memory, pids, cpu) = (v1("memory"), v1("pids"), v1("cpu,cpuacct"));
        assert_eq!(
            detect(&[UNIFIED, &memory, &pids, &cpu], "hugetlb"),
            Ok(Backend::Hybrid(
                "/sys/fs/cgroup/unified".into(),
                [
                    "/sys/fs/cgroup/memory".into(),
                    "/sys/fs/cgroup/pids".into(),
                    "/sys/fs/cgroup/cpu,cpuacct".into()
                ]
            ))
        );
        let missing = detect(&[UNIFIED, &memory, &cpu], "hugetlb").unwrap_err();
        assert!(missing.ends_with(": pids"), "{missing}");
        assert!(detect(&[&memory, &pids, &cpu], "").is_err());
        assert!(detect(&[V2], "cpu").unwrap_err().contains("memory, pids"));
        assert!(detect(&[], "").is_err());
    }

    #[test]
    fn without_cgroups_a_directory_is_the_record() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(Backend::None(dir.path().join("run")), 7);
        tree.create().unwrap();
        let name = Name::parse("iabc.3").unwrap();
        let open = OpenTree::open(&tree).unwrap();
        open.create(&name, &Resources::default()).unwrap();
        assert_eq!(tree.agent_pid(&name), None);
        open.record_agent(&name, 4711).unwrap();
        assert_eq!(tree.agent_pid(&name), Some(4711));
        assert_eq!(tree.names().unwrap(), std::slice::from_ref(&name));
        assert!(tree.remove_groups(&name));
        assert_eq!(tree.names().unwrap(), []);
        tree.remove();
        assert!(!dir.path().join("run").exists());
    }
}

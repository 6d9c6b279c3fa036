//! The files in which the kernel counts the usage of sandboxes.

use std::path::{Path, PathBuf};

use super::backend::Backend;
use super::tree::{Role, Tree, child, side_by_side};
use crate::slot::Name;

/// Files in which the kernel counts the usage of a sandbox.
#[derive(Debug)]
pub(crate) struct Meters {
    /// Has a line `usage_usec`.
    pub(crate) cpu: PathBuf,
    /// Processor time of the workload alone.
    pub(crate) work_cpu: PathBuf,
    /// Number of processes and threads of the workload.
    pub(crate) processes: PathBuf,
    pub(crate) memory_charged: PathBuf,
    /// The workload's limit, which is that of the sandbox's resources.
    pub(crate) memory_limit: PathBuf,
    pub(crate) memory_stat: PathBuf,
    /// Has a line `oom_kill`. The workload's: version 1 counts a kill only for the victim's group.
    pub(crate) memory_kills: PathBuf,
    /// Line of `memory_stat` with the page cache, including files in memory.
    pub(crate) cache_field: &'static str,
    /// Line of `memory_stat` with only the files in memory.
    pub(crate) shared_field: &'static str,
    /// Socket memory, where the kernel counts it separately; otherwise it is the line `sock` of `memory_stat`.
    pub(crate) sockets: Option<PathBuf>,
}

/// Files in which the kernel counts the usage of all sandboxes together.
#[derive(Debug)]
pub(crate) struct Sum {
    /// Memory of the kernel that the sandboxes are charged for: a number, or with version 2 the lines `kernel`,
    /// `slab_unreclaimable` and `sock` of a `memory.stat`.
    pub(crate) kernel: PathBuf,
    /// Socket memory, where it is counted separately: with version 1.
    pub(crate) sockets: Option<PathBuf>,
}

impl Tree {
    /// The sandbox's own group below a root, which counts the workload and the agent, and the workload's group. The
    /// earlier layout had no common group.
    fn metered(&self, root: &Path, name: &Name) -> [PathBuf; 2] {
        let root = root.join(&self.name);
        let whole = root.join(name.to_string());
        if whole.exists() {
            return [whole, root.join(child(name, Role::Work))];
        }
        let work = root.join(side_by_side(name, Role::Work));
        [work.clone(), work]
    }

    /// The counters of a sandbox, including the agent's work for it; `None` without cgroups.
    pub(crate) fn meters(&self, name: &Name) -> Option<Meters> {
        match &self.backend {
            Backend::V2(root) => {
                let [whole, work] = self.metered(root, name);
                Some(Meters {
                    cpu: whole.join("cpu.stat"),
                    work_cpu: work.join("cpu.stat"),
                    processes: work.join("pids.current"),
                    memory_charged: whole.join("memory.current"),
                    memory_limit: work.join("memory.max"),
                    memory_stat: whole.join("memory.stat"),
                    memory_kills: work.join("memory.events"),
                    cache_field: "file",
                    shared_field: "shmem",
                    sockets: None,
                })
            }
            Backend::Hybrid(unified, [memory, pids, _]) => {
                let [_, processes] = self.metered(pids, name);
                let [cpu, work_cpu] = self.metered(unified, name);
                let [whole, work] = self.metered(memory, name);
                Some(Meters {
                    cpu: cpu.join("cpu.stat"),
                    work_cpu: work_cpu.join("cpu.stat"),
                    processes: processes.join("pids.current"),
                    memory_charged: whole.join("memory.usage_in_bytes"),
                    memory_limit: work.join("memory.limit_in_bytes"),
                    memory_stat: whole.join("memory.stat"),
                    memory_kills: work.join("memory.oom_control"),
                    cache_field: "total_cache",
                    shared_field: "total_shmem",
                    sockets: Some(whole.join("memory.kmem.tcp.usage_in_bytes")),
                })
            }
            Backend::None(_) => None,
        }
    }

    /// The counters of all sandboxes together; `None` without cgroups.
    pub(crate) fn sum(&self) -> Option<Sum> {
        match &self.backend {
            Backend::V2(root) => {
                let all = root.join(&self.name);
                Some(Sum {
                    kernel: all.join("memory.stat"),
                    sockets: None,
                })
            }
            Backend::Hybrid(_, [memory, ..]) => {
                let all = memory.join(&self.name);
                Some(Sum {
                    kernel: all.join("memory.kmem.usage_in_bytes"),
                    sockets: Some(all.join("memory.kmem.tcp.usage_in_bytes")),
                })
            }
            Backend::None(_) => None,
        }
    }
}

//! Counts the processes and threads that sandboxes create.
//!
//! The kernel has no such counter per control group. So a program of a few instructions runs whenever a process or
//! thread is created on the host, and counts those whose creator is in the version 2 group of a workload. That costs less
//! than a tenth of a microsecond, and reading a counter takes one system call, whatever the sandbox does meanwhile.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::bpf::{self, Instruction, op};
use crate::cgroup::Tree;

/// Maximum number of counted sandboxes, more than a data directory can have.
const ENTRIES: u32 = 8192;
/// Key of the sum. The ids of groups begin at 1.
const SUM: u64 = 0;

/// The counters of all sandboxes of a data directory. Counting ends on drop.
#[derive(Debug)]
pub(crate) struct ProcessCounter {
    map: OwnedFd,
    _link: OwnedFd,
}

impl ProcessCounter {
    /// Begins to count where there are groups and the kernel can.
    pub(crate) fn start(tree: &Tree) -> Option<Arc<Self>> {
        if !tree.is_limited() {
            return None;
        }
        let counter = Self::new().inspect_err(|error| {
            tracing::warn!(
                "sandboxes that create many processes are not slowed down: the kernel refuses a BPF program of type \
                 raw_tracepoint: {error}"
            );
        });
        counter.ok().map(Arc::new)
    }

    fn new() -> io::Result<Self> {
        let map = bpf::sys::counter_map(ENTRIES)?;
        bpf::sys::set_counter(map.as_fd(), SUM, 0)?;
        let program = bpf::sys::load_tracepoint(&program(map.as_fd()))?;
        let link = bpf::sys::attach_tracepoint(program.as_fd(), c"sched_process_fork")?;
        Ok(Self { map, _link: link })
    }

    /// What all counted groups have created together.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub(crate) fn sum(&self) -> io::Result<u64> {
        bpf::sys::counter(self.map.as_fd(), SUM)
    }
}

/// The counter of one workload. It is removed on drop.
#[derive(Debug)]
pub(crate) struct ProcessesOf {
    counter: Arc<ProcessCounter>,
    /// The version 2 group of the workload.
    group: PathBuf,
    /// The id by which the kernel knows it, once it was asked for.
    id: OnceLock<u64>,
}

impl ProcessesOf {
    pub(crate) fn new(counter: Arc<ProcessCounter>, group: PathBuf) -> Self {
        Self {
            counter,
            group,
            id: OnceLock::new(),
        }
    }

    /// What the workload has created since it was asked for first.
    ///
    /// # Errors
    /// When its group is gone, or there are too many counters.
    pub(crate) fn read(&self) -> io::Result<u64> {
        let map = self.counter.map.as_fd();
        if let Some(id) = self.id.get() {
            return bpf::sys::counter(map, *id);
        }
        let id = rustix::fs::stat(&self.group)?.st_ino;
        bpf::sys::set_counter(map, id, 0)?;
        let _ = self.id.set(id);
        Ok(0)
    }
}

impl Drop for ProcessesOf {
    fn drop(&mut self) {
        if let Some(id) = self.id.get() {
            let _ = bpf::sys::remove_counter(self.counter.map.as_fd(), *id);
        }
    }
}

/// Adds one to the counter of the group of the calling process, and to the sum, if it is counted.
fn program(map: BorrowedFd<'_>) -> Vec<u64> {
    // Helpers.
    const MAP_LOOKUP: i32 = 1;
    const CURRENT_CGROUP_ID: i32 = 80;
    let (r0, r1, r2, r10) = (0, 1, 2, 10);
    // Adds one to the counter whose key is on the stack.
    let count = [
        Instruction(op::LOAD_MAP, r1, 1, 0, map.as_raw_fd()),
        Instruction(op::COPY, r2, r10, 0, 0),
        Instruction(op::ADD, r2, 0, 0, -8),
        Instruction(op::CALL, 0, 0, 0, MAP_LOOKUP),
        // Over the end of the program.
        Instruction(op::IF_NOT_EQUAL, r0, 0, 2, 0),
        Instruction(op::MOVE, r0, 0, 0, 0),
        Instruction(op::EXIT, 0, 0, 0, 0),
        Instruction(op::MOVE, r1, 0, 0, 1),
        Instruction(op::ADD_ATOMIC, r0, r1, 0, 0),
    ];
    let group = [
        Instruction(op::CALL, 0, 0, 0, CURRENT_CGROUP_ID),
        Instruction(op::STORE_LONG, r10, r0, -8, 0),
    ];
    let sum = [
        Instruction(op::MOVE, r1, 0, 0, 0),
        Instruction(op::STORE_LONG, r10, r1, -8, 0),
    ];
    let end = [Instruction(op::MOVE, r0, 0, 0, 0), Instruction(op::EXIT, 0, 0, 0, 0)];
    let mut program = Vec::new();
    for instruction in group.iter().chain(&count).chain(&sum).chain(&count).chain(&end) {
        bpf::push(&mut program, *instruction);
    }
    program
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The group of version 2 that the calling process is in.
    fn own_group() -> Option<PathBuf> {
        let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
        let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].map(PathBuf::from);
        let mount = mounts.into_iter().find(|mount| mount.join("cgroup.procs").exists())?;
        Some(mount.join(path))
    }

    #[test]
    fn processes_and_threads_of_a_group_are_counted() {
        let counter = Arc::new(ProcessCounter::new().unwrap());
        let own = ProcessesOf::new(Arc::clone(&counter), own_group().unwrap());
        assert_eq!(counter.sum().unwrap(), 0);
        assert_eq!(own.read().unwrap(), 0);
        let create = || {
            std::thread::spawn(|| ()).join().unwrap();
            assert!(std::process::Command::new("true").status().unwrap().success());
        };
        create();
        // Others of the same group may create some, too.
        let created = own.read().unwrap();
        assert!(created >= 2, "{created}");
        assert!(counter.sum().unwrap() >= created);
        drop(own);
        // A processor that looked the group up before may count for a moment longer.
        let is_counted = || {
            let sum = counter.sum().unwrap();
            create();
            counter.sum().unwrap() != sum
        };
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while is_counted() {
            assert!(
                std::time::Instant::now() < deadline,
                "a group that is dropped is not counted"
            );
        }
    }
}

//! Resource limits of a sandbox.

use serde::{Deserialize, Serialize};

/// How many files a process of a sandbox may have open where nobody asks for more, and to which number each may raise that for
/// itself. As service managers set them: programs that close all descriptors that there could be are slow with a high one.
pub const OPEN_FILES: u32 = 1024;
pub const OPEN_FILES_MAX: u32 = 524_288;

/// The resource limits of one sandbox, enforced by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// CPU time per wall-clock time, in cores.
    pub cpu_count: u32,
    /// Memory of the workload, page cache included, in MiB.
    pub memory_mb: u32,
    /// Size of the writable disk, in MiB.
    pub disk_mb: u32,
    /// Number of processes and threads of the workload.
    pub pids: u32,
}

impl Default for Resources {
    fn default() -> Self {
        Self {
            cpu_count: 2,
            memory_mb: 1024,
            disk_mb: 10 * 1024,
            pids: 512,
        }
    }
}

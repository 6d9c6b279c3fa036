//! Processor time of workloads: a lower limit for some time.

use std::fs;
use std::io;
use std::path::PathBuf;

use super::backend::Backend;
use super::files::{named, write};
use super::limits::{CPU_PERIOD_US, Limits};
use super::tree::{Role, Tree, child};
use crate::slot::Name;

/// Shortest quota that the kernel accepts, in microseconds.
const QUOTA_MIN_US: u64 = 1000;

impl Tree {
    /// The version 2 group of the workload of a sandbox.
    pub(crate) fn work_group(&self, name: &Name) -> PathBuf {
        self.naming_root().join(child(name, Role::Work))
    }

    /// Limits the processor time of a workload, in microseconds per [`CPU_PERIOD_US`], or with `None` to what the
    /// sandbox may have. That is read from the group of the whole sandbox, whose limit never changes, so nothing has to
    /// be remembered.
    ///
    /// # Errors
    /// When the groups cannot be read or written; with [`io::ErrorKind::Unsupported`] without groups.
    pub(crate) fn limit_cpu(&self, name: &Name, milli_cores: Option<u32>) -> io::Result<()> {
        let (root, file) = match &self.backend {
            Backend::V2(root) => (root, "cpu.max"),
            Backend::Hybrid(_, [_, _, cpu]) => (cpu, "cpu.cfs_quota_us"),
            Backend::None(_) => return Err(io::ErrorKind::Unsupported.into()),
        };
        let root = root.join(&self.name);
        let whole = root.join(name.to_string()).join(file);
        let text = fs::read_to_string(&whole).map_err(|error| named(&whole, &error))?;
        let full_us = text
            .split_ascii_whitespace()
            .next()
            .and_then(|quota| quota.parse().ok())
            .map(Limits::cpu_of_work)
            .ok_or(io::ErrorKind::InvalidData)?;
        let quota_us = match milli_cores {
            Some(milli_cores) => (u64::from(milli_cores) * CPU_PERIOD_US / 1000).clamp(QUOTA_MIN_US, full_us),
            None => full_us,
        };
        let text = match &self.backend {
            Backend::V2(_) => format!("{quota_us} {CPU_PERIOD_US}"),
            _ => quota_us.to_string(),
        };
        write(&root.join(child(name, Role::Work)).join(file), &text)
    }
}

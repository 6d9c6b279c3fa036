//! The cgroup back end of a host: where its hierarchies are mounted, and which of them has the controllers.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Controllers that enforce a sandbox's limits.
pub(crate) const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

/// The cgroup back end of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Backend {
    /// The v2 mount.
    V2(PathBuf),
    /// The v2 mount and the v1 mounts of [`CONTROLLERS`], in that order.
    Hybrid(PathBuf, [PathBuf; 3]),
    /// A directory that replaces the tree as the record.
    None(PathBuf),
}

impl Backend {
    /// Detects the back end from the text of `/proc/self/mountinfo`. The error names what is missing, for the operator.
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

    /// Whether there are processes in the group below which the tree would be created, which prevents enabling
    /// controllers there. The real root of v2 is exempt from that rule (and has no `cgroup.type`); what a container
    /// sees as the root is an ordinary group.
    #[must_use]
    pub(crate) fn is_occupied(&self) -> bool {
        let Self::V2(root) = self else { return false };
        let read = |file: &str| fs::read_to_string(root.join(file)).unwrap_or_default();
        let enabled = read("cgroup.subtree_control");
        let lacking = |name: &&str| !enabled.split_whitespace().any(|have| have == *name);
        root.join("cgroup.type").exists() && CONTROLLERS.iter().any(lacking) && !read("cgroup.procs").trim().is_empty()
    }

    /// Detects the back end of this host.
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

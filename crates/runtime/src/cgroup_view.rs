//! The control groups that a sandbox sees: its workload's own, read-only, where programs look for their limits.
//!
//! With version 2 that is the workload's group at `/sys/fs/cgroup`. With version 1 a program looks in one directory per
//! controller, and some fail when a controller that they know is missing; so two more are shown than have limits:
//! `cpuacct`, which counts for workload and agent together, and `cpuset`. Each sandbox has a group of its own of
//! both, although it would be the same for all in `cpuset`: where several can open a group, they can watch each other read it
//! and hold locks for each other. The workload is at the root of a cgroup namespace, so its own path is `/` everywhere.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::files::write_at;

/// Mounts of version 1 without limits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UnlimitedMounts {
    /// May be the same mount as that of `cpu`.
    pub(crate) cpuacct: Option<PathBuf>,
    pub(crate) cpuset: Option<PathBuf>,
}

/// A group that a sandbox sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shown {
    /// Directory of the tree on the host, and later in the launcher.
    pub(crate) tree: PathBuf,
    /// Path below `/sys/fs/cgroup`; empty for that directory itself.
    pub(crate) name: String,
    /// Processes that the group contains.
    pub(crate) scope: Scope,
}

impl Shown {
    /// The mount point in a sandbox.
    pub(crate) fn point(&self) -> String {
        match self.name.as_str() {
            "" => "/sys/fs/cgroup".to_owned(),
            name => format!("/sys/fs/cgroup/{name}"),
        }
    }

    /// The path, in the tree, of the group of the sandbox whose groups have this name.
    pub(crate) fn path(&self, of: &str) -> String {
        match self.scope {
            Scope::Workload => format!("/{of}/work"),
            Scope::Sandbox => format!("/{of}"),
        }
    }
}

/// Which processes are in the group that a sandbox sees of a hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Processes of the workload.
    Workload,
    /// All processes of the sandbox, the agent's included.
    Sandbox,
}

impl UnlimitedMounts {
    /// Parses the text of `/proc/self/mountinfo`.
    pub(crate) fn from_mountinfo(mountinfo: &str) -> Self {
        let of = |controller: &str| {
            mountinfo.lines().find_map(|line| {
                let (left, right) = line.split_once(" - cgroup ")?;
                let options = right.split(' ').nth(1)?;
                let has = options.split(',').any(|option| option == controller);
                has.then(|| left.split(' ').nth(4).map(PathBuf::from))?
            })
        };
        Self {
            cpuacct: of("cpuacct"),
            cpuset: of("cpuset"),
        }
    }

    /// The hierarchy that counts processor time, unless it is the one that limits it.
    pub(crate) fn counting(&self, cpu: &Path) -> Option<&PathBuf> {
        self.cpuacct.as_ref().filter(|path| *path != cpu)
    }
}

/// Creates the group of the `cpuset` hierarchy for all sandboxes, with what the platform itself may use, because its
/// own group there may be narrower than the root. Groups that are created in it begin with the same values. Without it
/// programs of version 1 see less and nothing else is lost, so errors are ignored.
pub(crate) fn make_cpuset(group: &Path) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let _ = fs::create_dir(group);
    for (file, name) in [
        ("cpuset.cpus", "Cpus_allowed_list:"),
        ("cpuset.mems", "Mems_allowed_list:"),
    ] {
        let path = group.join(file);
        let Some(list) = allowed(name) else { continue };
        // On some kernels writing resets the affinity of processes in the group.
        if fs::read_to_string(&path).is_ok_and(|have| have.trim() != list) && fs::write(&path, list).is_err() {
            // A group cannot have less than those in it, which are those of sandboxes that run.
            for shown in fs::read_dir(group).into_iter().flatten().flatten() {
                let _ = fs::write(shown.path().join(file), list);
            }
            let _ = fs::write(&path, list);
        }
    }
    let _ = fs::write(group.join("cgroup.clone_children"), "1");
}

/// Moves the calling process into a group created by [`make_cpuset`]. Returns whether that worked.
pub(crate) fn join_cpuset(group: &Path) -> bool {
    write_at(rustix::fs::CWD, &group.join("cgroup.procs").to_string_lossy(), "0").is_ok()
}

/// `/proc/cgroups` as a sandbox sees it: the host's controllers, each with one group.
pub(crate) fn controllers() -> io::Result<String> {
    Ok(one_group_each(&fs::read_to_string("/proc/cgroups")?))
}

fn one_group_each(cgroups: &str) -> String {
    cgroups
        .lines()
        .map(|line| {
            let mut columns: Vec<&str> = line.split('\t').collect();
            if !line.starts_with('#')
                && let Some(count) = columns.get_mut(2)
            {
                *count = "1";
            }
            columns.join("\t") + "\n"
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_without_limits_are_found() {
        let line = |path: &str, options: &str| format!("31 23 0:27 / {path} rw - cgroup cgroup rw,{options}\n");
        let together = line("/c/cpu,cpuacct", "cpu,cpuacct") + &line("/c/set", "cpuset,clone_children");
        let mounts = UnlimitedMounts::from_mountinfo(&together);
        assert_eq!(mounts.cpuset.as_deref(), Some(Path::new("/c/set")));
        assert_eq!(mounts.counting(Path::new("/c/cpu,cpuacct")), None);
        let apart = UnlimitedMounts::from_mountinfo(&(line("/c/cpu", "cpu") + &line("/c/cpuacct", "cpuacct")));
        assert_eq!(apart.cpuset, None);
        assert_eq!(apart.counting(Path::new("/c/cpu")), Some(&PathBuf::from("/c/cpuacct")));
        assert_eq!(
            UnlimitedMounts::from_mountinfo("30 23 0:26 / /c rw - cgroup2 cgroup2 rw\n"),
            UnlimitedMounts::default()
        );
    }

    #[test]
    fn the_number_of_groups_is_hidden() {
        let host = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpuset\t3\t17\t1\nmemory\t4\t91\t1\n";
        let shown = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpuset\t3\t1\t1\nmemory\t4\t1\t1\n";
        assert_eq!(one_group_each(host), shown);
    }
}

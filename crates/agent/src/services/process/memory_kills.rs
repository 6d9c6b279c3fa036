//! How often the kernel has killed a process of the workload for lack of memory, as its control group counts it.
//!
//! The file is opened before anything of the workload runs, because root of the sandbox may mount something else over
//! it. Where the sandbox is shown no control group, nothing is known, and nothing is reported.

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

/// Where the count is, with version 2 of control groups and with version 1.
const PLACES: [&str; 2] = [
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",
];

/// The kernel's counter of such kills, and how many of them were reported.
#[derive(Debug, Default)]
pub(crate) struct MemoryKills {
    file: Option<File>,
    reported: Cell<u64>,
}

impl MemoryKills {
    /// Opens the counter of this sandbox.
    pub(crate) fn open() -> Self {
        Self {
            file: PLACES.iter().find_map(|path| File::open(path).ok()),
            reported: Cell::default(),
        }
    }

    /// Number of kills so far.
    pub(super) fn count(&self) -> u64 {
        let mut buffer = [0; 1024];
        let read = self.file.as_ref().and_then(|file| file.read_at(&mut buffer, 0).ok());
        parse(&buffer[..read.unwrap_or(0)])
    }

    /// Whether there was one that can have been of a process which began when the count was `before`, and has now ended
    /// as one that was killed. No kill is reported for two.
    pub(super) fn explains(&self, before: u64) -> bool {
        let reported = self.reported.get().max(before);
        let is_new = self.count() > reported;
        if is_new {
            self.reported.set(reported + 1);
        }
        is_new
    }
}

fn parse(text: &[u8]) -> u64 {
    let text = String::from_utf8_lossy(text);
    let count = text
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
    count.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn both_versions_are_read() {
        assert_eq!(parse(b"low 0\nhigh 0\nmax 9\noom 4\noom_kill 3\noom_group_kill 0\n"), 3);
        assert_eq!(parse(b"oom_kill_disable 0\nunder_oom 0\noom_kill 12\n"), 12);
        assert_eq!(parse(b"oom_kill_disable 0\nunder_oom 0\n"), 0);
        assert_eq!(parse(b""), 0);
    }

    #[test]
    fn each_kill_explains_one_end() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let kills = MemoryKills {
            file: Some(file.reopen().unwrap()),
            reported: Cell::default(),
        };
        let mut set = |count: u64| {
            file.as_file_mut().set_len(0).unwrap();
            file.as_file()
                .write_all_at(format!("oom_kill {count}\n").as_bytes(), 0)
                .unwrap();
            file.flush().unwrap();
        };
        assert!(!kills.explains(0));
        set(2);
        assert!(kills.explains(0) && kills.explains(0) && !kills.explains(0));
        set(3);
        // One that began after it did not die of it.
        assert!(!kills.explains(3));
        assert!(kills.explains(2));
        assert_eq!(MemoryKills::default().count(), 0);
    }
}

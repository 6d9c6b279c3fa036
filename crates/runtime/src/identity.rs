//! Identifies processes permanently. A pid alone does not: the kernel reuses it, and after a reboot it may belong to
//! any process.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags};

/// A process: its pid, its start time and the boot of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessIdentity {
    pid: i32,
    /// Start time, in clock ticks since boot.
    began: u64,
    boot: String,
}

impl ProcessIdentity {
    /// The process that has this pid now.
    ///
    /// # Errors
    /// When there is none, or it is a zombie.
    pub fn of(pid: i32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The second field is the program's name in parentheses, which may contain anything.
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .map(|(_, rest)| rest.split_ascii_whitespace().collect())
            .unwrap_or_default();
        if matches!(fields.first(), Some(&("Z" | "X"))) {
            return Err(io::ErrorKind::NotFound.into());
        }
        // Field 22 of the line is the 20th after the name.
        let began = fields.get(19).and_then(|field| field.parse().ok());
        Ok(Self {
            pid,
            began: began.ok_or(io::ErrorKind::InvalidData)?,
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
        })
    }

    /// The current process.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn own() -> io::Result<Self> {
        Self::of(std::process::id().cast_signed())
    }

    /// Pid of the process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether this process is still running.
    #[must_use]
    pub fn is_running(&self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now == *self)
    }

    /// A pidfd of this process, if it is running.
    #[must_use]
    pub fn open(&self) -> Option<OwnedFd> {
        let pidfd = rustix::process::pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        // It is still running after the pidfd was opened, so the pidfd does not refer to a later process.
        self.is_running().then_some(pidfd)
    }

    /// Reads what [`fmt::Display`] writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let [pid, began, boot] = text.split_ascii_whitespace().collect::<Vec<_>>().try_into().ok()?;
        Some(Self {
            pid: pid.parse().ok()?,
            began: began.parse().ok()?,
            boot: boot.to_owned(),
        })
    }
}

impl fmt::Display for ProcessIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.pid, self.began, self.boot)
    }
}

/// Record of an agent where no control group identifies it: the process, its user namespace and its program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentRecord {
    process: ProcessIdentity,
    user_namespace: u64,
    /// Device and inode.
    program: (u64, u64),
}

impl AgentRecord {
    /// The record of a process that will become the agent by executing this program.
    pub(crate) fn of(pid: i32, program: &str) -> io::Result<Self> {
        let program = fs::metadata(program)?;
        Ok(Self {
            process: ProcessIdentity::of(pid)?,
            user_namespace: user_namespace(pid)?,
            program: (program.st_dev(), program.st_ino()),
        })
    }

    /// Pid of the agent, if it still runs.
    pub(crate) fn living(&self) -> Option<i32> {
        let pid = self.process.pid();
        let program = fs::metadata(format!("/proc/{pid}/exe")).ok()?;
        let same = (program.st_dev(), program.st_ino()) == self.program
            && user_namespace(pid).ok()? == self.user_namespace
            && self.process.is_running();
        same.then_some(pid)
    }

    /// Reads what [`fmt::Display`] writes.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (process, rest) = text.trim_end().split_once(';')?;
        let [namespace, device, inode] = rest.split(';').map(|word| word.parse().ok()).collect::<Vec<_>>()[..] else {
            return None;
        };
        Some(Self {
            process: ProcessIdentity::parse(process)?,
            user_namespace: namespace?,
            program: (device?, inode?),
        })
    }
}

impl fmt::Display for AgentRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (device, inode) = self.program;
        write!(f, "{};{};{device};{inode}", self.process, self.user_namespace)
    }
}

/// Inode number of a process's user namespace.
pub(crate) fn user_namespace(pid: i32) -> io::Result<u64> {
    Ok(fs::metadata(format!("/proc/{pid}/ns/user"))?.st_ino())
}

/// The agent of a sandbox of which an earlier version recorded only a pid. The pid is accepted only for a process that
/// is the first of a pid namespace, has its own user namespace and runs the agent.
pub(crate) fn agent_by_number(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    let is_first = matches!(numbers.split_ascii_whitespace().collect::<Vec<_>>()[..], [_, .., "1"]);
    let is_agent = fs::read(format!("/proc/{pid}/cmdline")).ok()? == b"ringfence\0agent\0";
    let is_apart = user_namespace(pid).ok()? != user_namespace(std::process::id().cast_signed()).ok()?;
    (is_first && is_agent && is_apart).then_some(pid)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_identified_by_start_time_and_boot() {
        let own = ProcessIdentity::own().unwrap();
        assert!(own.is_running());
        assert!(own.open().is_some());
        assert_eq!(ProcessIdentity::parse(&own.to_string()), Some(own.clone()));
        let earlier = ProcessIdentity {
            began: own.began - 1,
            ..own.clone()
        };
        let before_the_reboot = ProcessIdentity {
            boot: "another".to_owned(),
            ..own
        };
        for other in [earlier, before_the_reboot] {
            assert!(!other.is_running(), "{other}");
            assert!(other.open().is_none(), "{other}");
        }
        for bad in ["", "1", "1 2", "x 2 boot", "1 x boot", "1 2 boot more"] {
            assert_eq!(ProcessIdentity::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_zombie_is_not_running() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let identity = ProcessIdentity::of(child.id().cast_signed()).unwrap();
        assert!(identity.is_running());
        child.kill().unwrap();
        while identity.is_running() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!identity.is_running());
    }

    #[test]
    fn an_agent_is_distinguished_from_a_later_process_with_its_pid() {
        let own = std::process::id().cast_signed();
        let record = AgentRecord::of(own, "/proc/self/exe").unwrap();
        assert_eq!(record.living(), Some(own));
        let read = AgentRecord::parse(&record.to_string()).unwrap();
        assert_eq!(read, record);
        let others = [
            AgentRecord {
                user_namespace: 1,
                ..record.clone()
            },
            AgentRecord {
                program: (1, 1),
                ..record.clone()
            },
            AgentRecord {
                process: ProcessIdentity {
                    began: 1,
                    ..record.process.clone()
                },
                ..record.clone()
            },
            AgentRecord {
                process: ProcessIdentity {
                    boot: "earlier".to_owned(),
                    ..record.process.clone()
                },
                ..record
            },
        ];
        for other in others {
            assert_eq!(other.living(), None, "{other}");
        }
        // This process is not an agent, whatever a file says.
        assert_eq!(agent_by_number(own), None);
        assert_eq!(agent_by_number(1), None);
        for bad in ["", "4711", "1 2 boot;3;4", "1 2 boot;3;4;5;6", "1 2;3;4;5"] {
            assert_eq!(AgentRecord::parse(bad), None, "{bad}");
        }
    }
}

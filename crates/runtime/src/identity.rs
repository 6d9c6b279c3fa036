//! What names a process for good. A number alone does not: the kernel gives it to another process later, after a reboot
//! to any at all.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::fs::MetadataExt;

use rustix::process::{Pid, PidfdFlags};

/// A process: its number, when it began, and in which life of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessIdentity {
    pid: i32,
    /// In clock ticks since the machine started.
    began: u64,
    boot: String,
}

impl ProcessIdentity {
    /// That of the process that has this number now.
    ///
    /// # Errors
    /// When there is none, or it has ended and nobody has waited for it yet.
    pub fn of(pid: i32) -> io::Result<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The second field is the program's name in parentheses, with whatever is in it.
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

    /// That of this process.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn own() -> io::Result<Self> {
        Self::of(std::process::id().cast_signed())
    }

    /// The number.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether this very process runs.
    #[must_use]
    pub fn lives(&self) -> bool {
        Self::of(self.pid).is_ok_and(|now| now == *self)
    }

    /// A pidfd of this very process, if it runs.
    #[must_use]
    pub fn open(&self) -> Option<OwnedFd> {
        let pidfd = rustix::process::pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok()?;
        // It was there after the pidfd was taken, so the pidfd is of no later one.
        self.lives().then_some(pidfd)
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

/// An agent as it is written down where no control group names it: the process, its user namespace and its program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AgentRecord {
    process: ProcessIdentity,
    user_namespace: u64,
    /// Device and inode.
    program: (u64, u64),
}

impl AgentRecord {
    /// That of a process which is to become the agent by executing this program.
    pub(crate) fn of(pid: i32, program: &str) -> io::Result<Self> {
        let program = fs::metadata(program)?;
        Ok(Self {
            process: ProcessIdentity::of(pid)?,
            user_namespace: user_namespace(pid)?,
            program: (program.st_dev(), program.st_ino()),
        })
    }

    /// The pid, if it is the agent's still.
    pub(crate) fn living(&self) -> Option<i32> {
        let pid = self.process.pid();
        let program = fs::metadata(format!("/proc/{pid}/exe")).ok()?;
        let same = (program.st_dev(), program.st_ino()) == self.program
            && user_namespace(pid).ok()? == self.user_namespace
            && self.process.lives();
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

/// The number of a process's user namespace.
pub(crate) fn user_namespace(pid: i32) -> io::Result<u64> {
    Ok(fs::metadata(format!("/proc/{pid}/ns/user"))?.st_ino())
}

/// The agent of a sandbox of which an earlier version wrote down no more than a number: a process that is the first of a
/// pid namespace, has a user namespace of its own and runs the agent. Of any other the number is not believed.
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
    fn a_process_is_itself_and_no_other() {
        let own = ProcessIdentity::own().unwrap();
        assert!(own.lives());
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
            assert!(!other.lives(), "{other}");
            assert!(other.open().is_none(), "{other}");
        }
        for bad in ["", "1", "1 2", "x 2 boot", "1 x boot", "1 2 boot more"] {
            assert_eq!(ProcessIdentity::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_process_that_nobody_waited_for_is_gone() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let identity = ProcessIdentity::of(child.id().cast_signed()).unwrap();
        assert!(identity.lives());
        child.kill().unwrap();
        while identity.lives() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!identity.lives());
    }

    #[test]
    fn an_agent_is_told_from_whoever_has_its_number_now() {
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
        // This process is no agent, whatever a file says.
        assert_eq!(agent_by_number(own), None);
        assert_eq!(agent_by_number(1), None);
        for bad in ["", "4711", "1 2 boot;3;4", "1 2 boot;3;4;5;6", "1 2;3;4;5"] {
            assert_eq!(AgentRecord::parse(bad), None, "{bad}");
        }
    }
}

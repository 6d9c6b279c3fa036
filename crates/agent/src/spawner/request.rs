//! What the agent asks of the spawner, and the answer, as bytes.
//!
//! Both ends are the same program, so the format has no version; it is checked all the same, because a process of
//! the sandbox's root may pose as a spawner.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;

use crate::sys::Child;

/// Descriptors that travel with a request: its text, stdin, stdout, stderr.
pub(crate) const DESCRIPTORS: usize = 4;

/// Directories that a program is looked for in when the environment names none.
pub(crate) const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A process to start.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
    /// Whether the three descriptors are a terminal.
    pub(crate) terminal: bool,
    pub(crate) cwd: Vec<u8>,
    /// The program and its arguments; the program is looked up in `PATH` unless it has a slash.
    pub(crate) argv: Vec<Vec<u8>>,
    /// Environment as `KEY=value`.
    pub(crate) env: Vec<Vec<u8>>,
}

impl Request {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let number = |out: &mut Vec<u8>, value: u32| out.extend_from_slice(&value.to_le_bytes());
        number(&mut out, self.uid);
        number(&mut out, self.gid);
        number(&mut out, u32::from(self.terminal));
        number(&mut out, length(&self.groups));
        for group in &self.groups {
            number(&mut out, *group);
        }
        for list in [std::slice::from_ref(&self.cwd), &self.argv, &self.env] {
            number(&mut out, length(list));
            for text in list {
                number(&mut out, length(text));
                out.extend_from_slice(text);
            }
        }
        out
    }

    /// `None` when the bytes are not a request.
    pub(crate) fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let uid = take_number(&mut bytes)?;
        let gid = take_number(&mut bytes)?;
        let terminal = take_number(&mut bytes)? != 0;
        let count = take_number(&mut bytes)?;
        let groups = (0..count).map(|_| take_number(&mut bytes)).collect::<Option<_>>()?;
        let [cwd] = take_list(&mut bytes)?.try_into().ok()?;
        let argv = take_list(&mut bytes)?;
        let env = take_list(&mut bytes)?;
        bytes.is_empty().then_some(Self {
            uid,
            gid,
            groups,
            terminal,
            cwd,
            argv,
            env,
        })
    }

    /// Everything that the new process needs, as system calls want it.
    ///
    /// # Errors
    /// EINVAL for a NUL byte in a text.
    pub(crate) fn into_child(self, stdio: [OwnedFd; 3]) -> io::Result<Child> {
        let path = self.env.iter().rev().find_map(|entry| entry.strip_prefix(b"PATH="));
        let candidates = candidates(
            self.argv.first().map_or(&[], Vec::as_slice),
            path.unwrap_or(DEFAULT_PATH.as_bytes()),
        );
        Ok(Child {
            candidates: to_c(candidates)?,
            cwd: CString::new(self.cwd)?,
            argv: to_c(self.argv)?,
            env: to_c(self.env)?,
            uid: self.uid,
            gid: self.gid,
            groups: self.groups,
            terminal: self.terminal,
            stdio,
        })
    }
}

fn to_c(texts: Vec<Vec<u8>>) -> io::Result<Vec<CString>> {
    texts
        .into_iter()
        .map(|text| CString::new(text).map_err(io::Error::from))
        .collect()
}

/// The files that a program name may mean, as execvp would try them.
fn candidates(program: &[u8], path: &[u8]) -> Vec<Vec<u8>> {
    if program.is_empty() {
        return Vec::new();
    }
    if program.contains(&b'/') {
        return vec![program.to_vec()];
    }
    let directories = path.split(|byte| *byte == b':');
    directories
        .map(|directory| match directory {
            [] => program.to_vec(),
            directory => [directory, b"/", program].concat(),
        })
        .collect()
}

fn length<T>(list: &[T]) -> u32 {
    // Requests are bounded at megabytes long before they get here.
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}

fn take_number(bytes: &mut &[u8]) -> Option<u32> {
    let (number, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u32::from_le_bytes(*number))
}

fn take_list(bytes: &mut &[u8]) -> Option<Vec<Vec<u8>>> {
    let count = take_number(bytes)?;
    (0..count)
        .map(|_| {
            let length = take_number(bytes)?;
            let (text, rest) = bytes.split_at_checked(length as usize)?;
            *bytes = rest;
            Some(text.to_vec())
        })
        .collect()
}

/// The part of starting a process that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// No process could be made.
    Process,
    /// Its terminal or its stdin, stdout or stderr could not be set up.
    Terminal,
    /// The user could not be switched to.
    User,
    /// The user cannot enter the working directory.
    Directory,
}

const FAILURES: [Failure; 4] = [Failure::Process, Failure::Terminal, Failure::User, Failure::Directory];

/// The spawner's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The process runs under this pid.
    Started(u32),
    /// The process could not be started: what failed, and the error number.
    Failed(Failure, i32),
}

impl Outcome {
    pub(crate) fn started(pid: u32) -> Self {
        Self::Started(pid)
    }

    pub(crate) fn failed(failure: Failure, error: &io::Error) -> Self {
        Self::Failed(failure, error.raw_os_error().unwrap_or(libc::EINVAL))
    }

    pub(crate) fn to_bytes(self) -> [u8; 8] {
        let (kind, value) = match self {
            Self::Started(pid) => (0, pid.to_le_bytes()),
            Self::Failed(failure, errno) => (failure as u32 + 1, errno.to_le_bytes()),
        };
        let mut out = [0; 8];
        out[..4].copy_from_slice(&kind.to_le_bytes());
        out[4..].copy_from_slice(&value);
        out
    }

    /// `None` when the bytes are not an answer, or name a pid that no new process can have.
    pub(crate) fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let kind = take_number(&mut bytes)?;
        let value = take_number(&mut bytes)?;
        if !bytes.is_empty() {
            return None;
        }
        match kind.checked_sub(1) {
            // Pid 1 is the agent; anything above the largest signed number would mean a group to kill().
            None => (2..=i32::MAX.cast_unsigned())
                .contains(&value)
                .then_some(Self::Started(value)),
            Some(index) => Some(Self::Failed(*FAILURES.get(index as usize)?, value.cast_signed())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_the_wire() {
        let request = Request {
            uid: 1000,
            gid: 1000,
            groups: vec![27, 1000],
            terminal: true,
            cwd: b"/home/user".to_vec(),
            argv: vec![b"a".to_vec(), Vec::new(), vec![0xff; 100_000]],
            env: vec![b"K=V".to_vec()],
        };
        let bytes = request.to_bytes();
        assert!(Request::from_bytes(&bytes) == Some(request));
        for cut in [0, 1, 4, 20, bytes.len() - 1] {
            assert!(Request::from_bytes(&bytes[..cut]).is_none(), "{cut}");
        }
        assert!(Request::from_bytes(&[0xff; 64]).is_none());
    }

    #[test]
    fn answers_survive_the_wire() {
        for outcome in [
            Outcome::Started(2),
            Outcome::Failed(Failure::Process, libc::EAGAIN),
            Outcome::Failed(Failure::Terminal, libc::EIO),
            Outcome::Failed(Failure::User, libc::EPERM),
            Outcome::Failed(Failure::Directory, libc::ENOENT),
        ] {
            assert_eq!(Outcome::from_bytes(&outcome.to_bytes()), Some(outcome));
        }
        for pid in [0, 1, u32::MAX, i32::MIN.cast_unsigned()] {
            assert_eq!(Outcome::from_bytes(&Outcome::Started(pid).to_bytes()), None, "{pid}");
        }
        assert_eq!(Outcome::from_bytes(&[9, 0, 0, 0, 0, 0, 0, 0]), None);
        assert_eq!(Outcome::from_bytes(&[0; 7]), None);
    }

    #[test]
    fn programs_are_looked_up_like_execvp() {
        let check = |program: &str, path: &str, expect: &[&str]| {
            let expect: Vec<_> = expect.iter().map(|text| text.as_bytes().to_vec()).collect();
            assert_eq!(candidates(program.as_bytes(), path.as_bytes()), expect);
        };
        check("", "/bin", &[]);
        check("ls", "/a:/b", &["/a/ls", "/b/ls"]);
        check("ls", ":/b", &["ls", "/b/ls"]);
        check("./ls", "/a", &["./ls"]);
    }
}

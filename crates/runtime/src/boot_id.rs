//! Boot ids of sandboxes.
//!
//! The kernel has one id for each boot of the machine, which all sandboxes of a host would share, in all of their runs. A
//! sandbox has one of its own for each run: the same as long as its processes continue, also after a pause, and another one
//! when it is started from files or is a copy of another sandbox. Programs tell by it whether what they wrote down about
//! processes still holds.
//!
//! It is a file of the sandbox's fixtures, which covers that of the kernel, and is noted in its checkpoint.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::rand::GetRandomFlags;
use serde::{Deserialize, Serialize};

/// Path at which programs read the boot id.
pub(crate) const POINT: &str = "/proc/sys/kernel/random/boot_id";

/// Positions of the hyphens in the text of an id.
const HYPHENS: [usize; 4] = [8, 13, 18, 23];
const LENGTH: usize = 36;

/// The boot id of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct BootId(String);

impl BootId {
    /// Creates a random boot id.
    ///
    /// # Errors
    /// When the kernel has no random numbers.
    pub(crate) fn new() -> io::Result<Self> {
        let mut bytes = [0; 16];
        rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
        // Version 4, like the kernel's.
        bytes[6] = (bytes[6] & 0x0f) | 0x40;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        let mut text = hex::encode(bytes);
        for at in HYPHENS {
            text.insert(at, '-');
        }
        Ok(Self(text))
    }

    /// The id in a text, which may have a line end.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let text = text.trim_end();
        let is_valid = |(at, character): (usize, char)| {
            if HYPHENS.contains(&at) {
                character == '-'
            } else {
                matches!(character, '0'..='9' | 'a'..='f')
            }
        };
        (text.len() == LENGTH && text.char_indices().all(is_valid)).then(|| Self(text.to_owned()))
    }

    /// The id that a process finds, if it has the root directory of its sandbox.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn of(pid: i32) -> io::Result<Self> {
        let root = format!("/proc/{pid}/root");
        let root = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Self::below(root.as_fd())
    }

    fn below(root: BorrowedFd<'_>) -> io::Result<Self> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat2(root, POINT, flags, Mode::empty(), resolve)?;
        let mut buffer = [0; 64];
        let length = rustix::io::read(&file, &mut buffer)?;
        let text = std::str::from_utf8(&buffer[..length]).map_err(io::Error::other)?;
        Self::parse(text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "invalid boot id"))
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for BootId {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or("invalid boot id")
    }
}

impl From<BootId> for String {
    fn from(id: BootId) -> Self {
        id.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_one_looks_like_that_of_the_kernel() {
        let of_kernel = std::fs::read_to_string(POINT).unwrap();
        let of_kernel = BootId::parse(&of_kernel).unwrap();
        let (one, other) = (BootId::new().unwrap(), BootId::new().unwrap());
        assert_ne!(one, other);
        for id in [&of_kernel, &one, &other] {
            assert_eq!(BootId::parse(&id.to_string()).as_ref(), Some(id));
            assert_eq!(id.to_string().as_bytes()[14], b'4');
            assert!(b"89ab".contains(&id.to_string().as_bytes()[19]));
        }
        let own = std::process::id().cast_signed();
        assert_eq!(BootId::of(own).unwrap(), of_kernel);
    }

    #[test]
    fn nothing_else_is_one() {
        let valid = "9508f0e2-0567-4e4f-9a58-00d492274140";
        assert!(BootId::parse(valid).is_some());
        for bad in [
            "",
            &valid[1..],
            &valid.to_uppercase(),
            &valid.replace('-', "0"),
            &format!("{valid}0"),
        ] {
            assert_eq!(BootId::parse(bad), None, "{bad}");
        }
        let noted = serde_json::to_string(&BootId::parse(valid).unwrap()).unwrap();
        assert_eq!(noted, format!("\"{valid}\""));
        serde_json::from_str::<BootId>("\"../x\"").unwrap_err();
    }
}

//! Users and groups of an image, from its own `/etc/passwd` and `/etc/group`.
//!
//! libc's lookups are not used: in a static program they load shared code out of the image.

use std::io::Read;
use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use formats::accounts::{self, id};
use rustix::fs::{FileType, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::files;

/// Maximum size of other text files.
const TEXT_MAX: u64 = 4 << 20;

/// One line of `/etc/passwd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) home: String,
    pub(crate) shell: String,
}

impl User {
    /// An id without a line.
    pub(crate) fn nameless(uid: u32) -> Self {
        Self {
            name: String::new(),
            uid,
            gid: 0,
            home: "/".to_owned(),
            shell: String::new(),
        }
    }
}

/// The contents of `/etc/passwd` and `/etc/group`.
#[derive(Debug, Default)]
pub(crate) struct Users {
    passwd: Vec<u8>,
    group: Vec<u8>,
}

impl Users {
    /// Reads both files below a root. A missing file is an empty one.
    pub(crate) fn read(root: impl AsFd) -> Result<Self> {
        let read = |path: &[u8]| -> Result<Vec<u8>> {
            let found = read_accounts(&root, path)?;
            Ok(found.map(|(bytes, _)| bytes).unwrap_or_default())
        };
        Ok(Self {
            passwd: read(b"etc/passwd")?,
            group: read(b"etc/group")?,
        })
    }

    #[cfg(test)]
    fn of(passwd: &str, group: &str) -> Self {
        Self {
            passwd: passwd.into(),
            group: group.into(),
        }
    }

    /// All users whose line is valid.
    pub(crate) fn all(&self) -> impl Iterator<Item = User> {
        accounts::users(&self.passwd).map(|line| User {
            name: line.name.to_owned(),
            uid: line.uid,
            gid: line.gid,
            home: line.home.to_owned(),
            shell: line.shell.to_owned(),
        })
    }

    pub(crate) fn find(&self, name: &str) -> Option<User> {
        self.all().find(|user| user.name == name)
    }

    /// Whether a group has an id.
    pub(crate) fn has_gid(&self, gid: u32) -> bool {
        accounts::groups(&self.group).any(|group| group.gid == gid)
    }

    pub(crate) fn group(&self, name: &str) -> Option<u32> {
        let found = accounts::groups(&self.group).find(|group| group.name == name);
        found.map(|group| group.gid)
    }

    /// Home directory of a user by name or id; `/root` or `/` for one that has no line. A group after it is ignored.
    pub(crate) fn home(&self, user: &str) -> String {
        let user = user.split(':').next().unwrap_or_default();
        let by_id = || {
            let id: u32 = user.parse().ok()?;
            self.all().find(|found| found.uid == id)
        };
        let home = self.find(user).or_else(by_id).map(|user| user.home);
        match home {
            Some(home) if home.starts_with('/') => home,
            _ if user == "root" => "/root".to_owned(),
            _ => "/".to_owned(),
        }
    }

    /// Ids of `user`, `user:group` or numeric ids. A name wins over the number that it looks like. Without a group, it is
    /// the one with the name of the user, and if there is none, the primary group.
    pub(crate) fn owner(&self, owner: &str) -> Result<(u32, u32)> {
        let (name, group) = match owner.split_once(':') {
            Some((name, group)) => (name, Some(group).filter(|group| !group.is_empty())),
            None => (owner, None),
        };
        let user = self.find(name);
        let uid = match &user {
            Some(user) => user.uid,
            None if name == "root" => 0,
            None => id(name).with_context(|| format!("unknown user {name:?} in owner {owner:?}"))?,
        };
        let gid = match group {
            Some(group) => match self.group(group) {
                Some(gid) => gid,
                None if group == "root" => 0,
                None => id(group).with_context(|| format!("unknown group {group:?} in owner {owner:?}"))?,
            },
            None => match (self.group(name), &user) {
                (Some(gid), _) => gid,
                (None, Some(user)) => user.gid,
                (None, None) => uid,
            },
        };
        Ok((uid, gid))
    }
}

/// A text file below a root; none if it does not exist. Bytes that are not UTF-8 are replaced.
pub(crate) fn read(root: impl AsFd, path: &[u8]) -> Result<Option<String>> {
    let bytes = read_bytes(root, path, TEXT_MAX)?;
    Ok(bytes.map(|(bytes, _)| String::from_utf8_lossy(&bytes).into_owned()))
}

/// A file of users or groups below a root, and its state; none if it does not exist.
pub(crate) fn read_accounts(root: impl AsFd, path: &[u8]) -> Result<Option<(Vec<u8>, Stat)>> {
    read_bytes(root, path, accounts::FILE_MAX)
}

/// A regular file below a root, links followed within, and its state; none if it does not exist.
fn read_bytes(root: impl AsFd, path: &[u8], most: u64) -> Result<Option<(Vec<u8>, Stat)>> {
    let name = || format!("read /{}", String::from_utf8_lossy(path));
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match files::open(root, path, flags, ResolveFlags::IN_ROOT) {
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        other => other.with_context(name)?,
    };
    let file = std::fs::File::from(file);
    let stat = rustix::fs::fstat(&file).with_context(name)?;
    if files::kind(&stat) != FileType::RegularFile {
        bail!("{}: not a regular file", name());
    }
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).with_context(name)?;
    if bytes.len() as u64 > most {
        bail!("{}: larger than {most} bytes", name());
    }
    Ok(Some((bytes, stat)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users() -> Users {
        Users::of(
            "root:x:0:0:root:/root:/bin/bash\nbroken\n#c:x:1:1::/:\nuser:x:1000:1001::/home/user:/bin/sh\n\
             nobody:x:65534:65534::/none:\n1234:x:77:78::/home/1234:/bin/sh\nnohome:x:5:5::relative:\n",
            "root:x:0:\nuser:x:1001:\nnogroup:x:65534:\n1234:x:79:\nstaff:x:50:user,other\n",
        )
    }

    #[test]
    fn owners_are_names_or_ids() {
        let users = users();
        for (owner, expect) in [
            ("root", (0, 0)),
            ("user", (1000, 1001)),
            ("user:", (1000, 1001)),
            ("user:staff", (1000, 50)),
            ("nobody", (65534, 65534)),
            // The name wins over the number.
            ("1234", (77, 79)),
            ("1234:1234", (77, 79)),
            ("1000", (1000, 1000)),
            ("1000:50", (1000, 50)),
            ("0:0", (0, 0)),
            ("4294967294:1", (4_294_967_294, 1)),
        ] {
            assert_eq!(users.owner(owner).unwrap(), expect, "{owner}");
        }
        for owner in [
            "",
            ":",
            "who",
            "user:who",
            "-1",
            "4294967295",
            "4294967296",
            "user:staff:x",
            "+1",
            "#c",
        ] {
            assert!(users.owner(owner).is_err(), "{owner}");
        }
        assert_eq!(Users::default().owner("root:root").unwrap(), (0, 0));
    }

    #[test]
    fn homes_are_absolute() {
        let users = users();
        for (user, expect) in [
            ("user", "/home/user"),
            ("1000", "/home/user"),
            ("nohome", "/"),
            ("who", "/"),
            ("1234", "/home/1234"),
            ("user:staff", "/home/user"),
            ("1000:5", "/home/user"),
            ("4321:5", "/"),
        ] {
            assert_eq!(users.home(user), expect, "{user}");
        }
        assert_eq!(Users::default().home("root"), "/root");
    }
}

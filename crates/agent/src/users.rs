//! Users of the sandbox, out of its own `/etc/passwd` and `/etc/group`.
//!
//! Both files belong to root in the sandbox, so reading them is bounded and never blocks: a regular file
//! of at most [`accounts::FILE_MAX`] bytes, anything malformed skipped. libc's lookups are not used; in a static program they load
//! shared code out of the image.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use formats::accounts;
use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};

/// The largest id that a sandbox has.
const ID_MAX: u32 = 65_535;
/// The most supplementary groups that a process gets; the kernel's own limit is 65,536.
const GROUP_LIMIT: usize = 1024;

/// One line of `/etc/passwd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) home: PathBuf,
    /// Whether the client named the group, so that it is the only one.
    pub(crate) has_one_group: bool,
}

/// Paths of the two files; they are elsewhere only in tests.
#[derive(Debug, Clone)]
pub(crate) struct Users {
    passwd: PathBuf,
    group: PathBuf,
}

impl Default for Users {
    fn default() -> Self {
        Self {
            passwd: PathBuf::from("/etc/passwd"),
            group: PathBuf::from("/etc/group"),
        }
    }
}

impl Users {
    /// The user of that name, or of `USER` of a Dockerfile: `user[:group]`, each a name or a number. An id that has no
    /// line has the group 0 unless another is named, and its home is `/`. A name wins over the number that it looks like.
    pub(crate) fn find(&self, name: &str) -> Option<User> {
        let passwd = read_bounded(&self.passwd).unwrap_or_default();
        let (account, group) = match name.split_once(':') {
            Some((account, group)) => (account, Some(group)),
            None => (name, None),
        };
        let mut user = find_user(&passwd, account).or_else(|| Some(user_of_id(&passwd, id(account)?)))?;
        if let Some(group) = group {
            let groups = read_bounded(&self.group).unwrap_or_default();
            user.gid = find_group(&groups, group).or_else(|| id(group))?;
            user.has_one_group = true;
        }
        Some(user)
    }

    /// Primary and supplementary groups of a user. An unreadable file means the primary one alone.
    pub(crate) fn groups(&self, user: &User) -> Vec<u32> {
        if user.has_one_group {
            return vec![user.gid];
        }
        let text = read_bounded(&self.group).unwrap_or_default();
        groups_of(&text, user)
    }

    /// Names of all users and groups, as both files have them now.
    pub(crate) fn names(&self) -> Names {
        let passwd = read_bounded(&self.passwd).unwrap_or_default();
        let group = read_bounded(&self.group).unwrap_or_default();
        Names::of(&passwd, &group)
    }
}

/// Names of users and groups by their ids.
#[derive(Debug, Default)]
pub(crate) struct Names {
    users: HashMap<u32, String>,
    groups: HashMap<u32, String>,
}

impl Names {
    /// The first name of an id counts.
    fn of(passwd: &[u8], group: &[u8]) -> Self {
        let mut names = Self::default();
        for user in accounts::users(passwd) {
            names.users.entry(user.uid).or_insert_with(|| user.name.to_owned());
        }
        for group in accounts::groups(group) {
            names.groups.entry(group.gid).or_insert_with(|| group.name.to_owned());
        }
        names
    }

    /// The user's name, or the id of one that has none.
    pub(crate) fn user(&self, id: u32) -> String {
        self.users.get(&id).cloned().unwrap_or_else(|| id.to_string())
    }

    /// The group's name, or the id of one that has none.
    pub(crate) fn group(&self, id: u32) -> String {
        self.groups.get(&id).cloned().unwrap_or_else(|| id.to_string())
    }
}

/// A regular file's first [`accounts::FILE_MAX`] bytes. Never waits, whatever is under that name.
fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    // A link out of the directory's own file system is not followed: where it leads there may be a file that this
    // program itself answers for, and it would wait for itself. What is mounted at the very name was put there by who
    // made the sandbox: no process inside can mount.
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let directory = rustix::fs::open(
        directory,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let open = |resolve| openat2(&directory, name, flags, Mode::empty(), resolve);
    let file = match open(ResolveFlags::NO_XDEV) {
        Err(rustix::io::Errno::XDEV) => open(ResolveFlags::NO_SYMLINKS),
        other => other,
    };
    let file = File::from(file?);
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut text = Vec::new();
    file.take(accounts::FILE_MAX).read_to_end(&mut text)?;
    Ok(text)
}

fn find_user(passwd: &[u8], name: &str) -> Option<User> {
    accounts::users(passwd).find(|user| user.name == name).map(User::from)
}

impl From<accounts::User<'_>> for User {
    fn from(line: accounts::User<'_>) -> Self {
        Self {
            name: line.name.to_owned(),
            uid: line.uid,
            gid: line.gid,
            home: PathBuf::from(line.home),
            has_one_group: false,
        }
    }
}

/// A text as an id of the sandbox.
fn id(text: &str) -> Option<u32> {
    accounts::id(text).filter(|id| *id <= ID_MAX)
}

/// The first user with an id, or one that has no name.
fn user_of_id(passwd: &[u8], id: u32) -> User {
    let found = accounts::users(passwd).find(|user| user.uid == id);
    found.map_or_else(
        || User {
            name: id.to_string(),
            uid: id,
            gid: 0,
            home: PathBuf::from("/"),
            has_one_group: false,
        },
        User::from,
    )
}

fn find_group(group: &[u8], name: &str) -> Option<u32> {
    let found = accounts::groups(group).find(|group| group.name == name);
    found.map(|group| group.gid)
}

fn groups_of(group: &[u8], user: &User) -> Vec<u32> {
    let mut ids = vec![user.gid];
    for group in accounts::groups(group) {
        let is_member = group.members().any(|member| member == user.name);
        if is_member && !ids.contains(&group.gid) && ids.len() < GROUP_LIMIT {
            ids.push(group.gid);
        }
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\n# comment\n\nbroken:x:0\nuser:x:1000:1001:,,,:/home/user:/bin/sh\n\
        \xff\xfe:x:1:1::/:\nbig:x:4294967296:0::/:\nnoshell:x:7:8::/n\n+nis:x:1:1::/:/bin/sh\nuser:x:0:0::/:/bin/sh\nlast:x:9:9::/last:";

    #[test]
    fn users_are_found_by_name() {
        let check = |name: &str, expect: Option<(u32, u32, &str)>| {
            let found = find_user(PASSWD, name);
            let found = found
                .as_ref()
                .map(|user| (user.uid, user.gid, user.home.to_str().unwrap()));
            assert_eq!(found, expect, "{name}");
        };
        check("root", Some((0, 0, "/root")));
        check("user", Some((1000, 1001, "/home/user")));
        check("noshell", Some((7, 8, "/n")));
        check("last", Some((9, 9, "/last")));
        for name in ["", "broken", "big", "nobody", "+nis", "roo", "root:x", "# comment", "0"] {
            check(name, None);
        }
    }

    #[test]
    fn groups_are_collected() {
        let user = find_user(PASSWD, "user").unwrap();
        let group = b"sudo:x:27:other,user\nuser:x:1001:user\nx:y\nbad:x:z:user\nuser2:x:5:user2\ndocker:x:99:user\nagain:x:99:user";
        assert_eq!(groups_of(group, &user), [1001, 27, 99]);
        assert_eq!(groups_of(b"", &user), [1001]);
        let many: String = (2000..9000).map(|id| format!("g:x:{id}:user\n")).collect();
        assert_eq!(groups_of(many.as_bytes(), &user).len(), GROUP_LIMIT);
    }

    #[test]
    fn users_are_found_by_number_and_with_a_group() {
        let directory = tempfile::tempdir().unwrap();
        let users = Users {
            passwd: directory.path().join("passwd"),
            group: directory.path().join("group"),
        };
        let check = |name: &str, expect: Option<(&str, u32, &[u32], &str)>| {
            let found = users.find(name);
            let groups = found.as_ref().map(|user| users.groups(user));
            let found = found
                .as_ref()
                .zip(groups.as_deref())
                .map(|(user, groups)| (user.name.as_str(), user.uid, groups, user.home.to_str().unwrap()));
            assert_eq!(found, expect, "{name}");
        };
        // Without either file.
        check("1000", Some(("1000", 1000, &[0], "/")));
        check("1000:5", Some(("1000", 1000, &[5], "/")));
        check("user", None);
        std::fs::write(&users.passwd, [PASSWD, b"\n42:x:77:78::/named:/bin/sh\n"].concat()).unwrap();
        std::fs::write(&users.group, "user:x:1001:\nstaff:x:50:user\n99:x:60:\nbad:x:y:\n").unwrap();
        check("user", Some(("user", 1000, &[1001, 50], "/home/user")));
        check("1000", Some(("user", 1000, &[1001, 50], "/home/user")));
        check("user:staff", Some(("user", 1000, &[50], "/home/user")));
        check("1000:1001", Some(("user", 1000, &[1001], "/home/user")));
        check("1000:7", Some(("user", 1000, &[7], "/home/user")));
        check("5:user", Some(("5", 5, &[1001], "/")));
        check("0", Some(("root", 0, &[0], "/root")));
        // Names win over numbers.
        check("42", Some(("42", 77, &[78], "/named")));
        check("user:99", Some(("user", 1000, &[60], "/home/user")));
        check("65535:65535", Some(("65535", 65535, &[65535], "/")));
        for name in [
            "65536",
            "4294967295",
            "-1",
            "+1",
            "1 ",
            "0x1",
            "user:",
            ":",
            ":0",
            "",
            "user:65536",
            "user:bad",
            "user:nobody",
            "user:staff:0",
            "1:2:3",
            "99999999999999999999",
        ] {
            check(name, None);
        }
    }

    #[test]
    fn names_are_found_by_id() {
        let names = Names::of(PASSWD, b"wheel:x:0:\n");
        for (id, expect) in [(0, "root"), (1000, "user"), (7, "noshell"), (5, "5")] {
            assert_eq!(names.user(id), expect);
        }
        assert_eq!((names.group(0).as_str(), names.group(1).as_str()), ("wheel", "1"));
    }

    #[test]
    fn only_regular_files_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        let users = Users {
            passwd: fifo.clone(),
            group: fifo,
        };
        assert_eq!(users.find("root"), None);
        let user = find_user(PASSWD, "root").unwrap();
        assert_eq!(users.groups(&user), [0]);
        assert!(read_bounded(directory.path()).is_err());
    }
}

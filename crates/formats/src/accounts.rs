//! The files of users and groups, `/etc/passwd` and `/etc/group`, as they are in images and sandboxes.
//!
//! Whoever wrote them may be hostile. A line that is not valid is left out, as libc leaves it out: one without its fields,
//! with a number that is not one, or of another source of users (`+`, `-`). Only fields that are used must be UTF-8. Lines are
//! borrowed from the text, so reading costs one pass and no memory.

/// The most bytes of a file that are read. Large installations have thousands of users, of about 60 bytes each.
pub const FILE_MAX: u64 = 1024 * 1024;

/// A user, as a line of `/etc/passwd` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User<'a> {
    /// Never empty.
    pub name: &'a str,
    /// Need not be an id of the sandbox.
    pub uid: u32,
    /// The primary group.
    pub gid: u32,
    /// Need not be an absolute path.
    pub home: &'a str,
    /// Empty if the line has none.
    pub shell: &'a str,
}

/// A group, as a line of `/etc/group` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group<'a> {
    /// Never empty.
    pub name: &'a str,
    /// Need not be an id of the sandbox.
    pub gid: u32,
    members: &'a str,
}

impl<'a> Group<'a> {
    /// The names of users that belong to it besides those whose primary group it is.
    pub fn members(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.members.split(',').filter(|member| !member.is_empty())
    }
}

/// The users of a `/etc/passwd`, in its order.
pub fn users(passwd: &[u8]) -> impl Iterator<Item = User<'_>> {
    lines(passwd).filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        Some(User {
            name: name(fields.next()?)?,
            uid: id(text(fields.nth(1)?)?)?,
            gid: id(text(fields.next()?)?)?,
            home: text(fields.nth(1)?)?,
            shell: fields.next().and_then(text).unwrap_or_default(),
        })
    })
}

/// The groups of a `/etc/group`, in its order.
pub fn groups(group: &[u8]) -> impl Iterator<Item = Group<'_>> {
    lines(group).filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        Some(Group {
            name: name(fields.next()?)?,
            gid: id(text(fields.nth(1)?)?)?,
            members: fields.next().and_then(text).unwrap_or_default(),
        })
    })
}

/// A text as the id of a user or group. The largest number of the type is none: to the kernel it means "unchanged".
#[must_use]
pub fn id(text: &str) -> Option<u32> {
    let is_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let id = is_digits.then(|| text.parse().ok()).flatten();
    id.filter(|id| *id != u32::MAX)
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n')
        .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
}

/// A name that is one. Those of other sources of users begin with a sign, and comments with `#`.
fn name(field: &[u8]) -> Option<&str> {
    text(field).filter(|name| !name.is_empty() && !name.starts_with(['+', '-', '#']))
}

fn text(field: &[u8]) -> Option<&str> {
    std::str::from_utf8(field).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_those_of_valid_lines() {
        let passwd = b"root:x:0:0:root:/root:/bin/bash\n# comment\n\nbroken:x:0\nuser:x:1000:1001:,,,:/home/user:/bin/sh\r\n\
            \xff\xfe:x:1:1::/:\nlatin:x:3:4:Jos\xe9:/l:\nbig:x:4294967296:0::/:\nunchanged:x:4294967295:0::/:\nsign:x:+1:1::/:\n\
            group:x:1:4294967295::/:\n#off:x:1:1::/:\n:x:1:1::/:\n+nis:x:1:1::/:/bin/sh\n-nis:x:1:1::/:\nnoshell:x:7:8::/n\n\
            many:x:9:9::/m:/s:rest\nuser:x:0:0::/:/bin/sh";
        let found: Vec<_> = users(passwd)
            .map(|user| (user.name, user.uid, user.gid, user.home, user.shell))
            .collect();
        assert_eq!(
            found,
            [
                ("root", 0, 0, "/root", "/bin/bash"),
                ("user", 1000, 1001, "/home/user", "/bin/sh"),
                ("latin", 3, 4, "/l", ""),
                ("noshell", 7, 8, "/n", ""),
                ("many", 9, 9, "/m", "/s"),
                ("user", 0, 0, "/", "/bin/sh"),
            ]
        );
        assert_eq!(users(b"").count(), 0);
    }

    #[test]
    fn groups_are_those_of_valid_lines() {
        let group = b"root:x:0:\nsudo:x:27:other,user\nx:y\nbad:x:z:user\nunchanged:x:4294967295:user\n+nis:x:1:user\n\
            bare:x:5\nodd:x:6:,a,,\xff\nlast:x:7:,a,,";
        let found: Vec<_> = groups(group)
            .map(|group| (group.name, group.gid, group.members().collect::<Vec<_>>()))
            .collect();
        assert_eq!(
            found,
            [
                ("root", 0, vec![]),
                ("sudo", 27, vec!["other", "user"]),
                ("bare", 5, vec![]),
                ("odd", 6, vec![]),
                ("last", 7, vec!["a"]),
            ]
        );
    }

    #[test]
    fn ids_are_digits() {
        for (text, want) in [
            ("0", Some(0)),
            ("007", Some(7)),
            ("4294967294", Some(4_294_967_294)),
            ("4294967295", None),
            ("4294967296", None),
            ("", None),
            ("+1", None),
            ("-1", None),
            ("1 ", None),
            ("0x1", None),
        ] {
            assert_eq!(id(text), want, "{text}");
        }
    }
}

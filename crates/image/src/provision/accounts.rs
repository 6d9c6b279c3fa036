//! The files of users and groups, edited line by line: what is not understood stays as it is.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::fs::{Gid, Mode, OFlags, Uid};

use super::directory::{INSIDE, make};
use super::image;
use crate::files;
use crate::users::{self, User, Users};

/// Ids of ordinary users.
const IDS: std::ops::Range<u32> = 1000..60_000;
const ROOT_USER: &str = "root:x:0:0:root:/root:/bin/sh";
const ROOT_GROUP: &str = "root:x:0:";

pub(super) struct Accounts<'a> {
    root: &'a OwnedFd,
}

impl<'a> Accounts<'a> {
    pub(super) fn new(root: &'a OwnedFd) -> Self {
        Self { root }
    }

    /// Creates a user with a group of the same name. An administrator has an empty password, others have none.
    pub(super) fn create(&self, name: &str, admin: bool) -> Result<User> {
        let users = Users::read(self.root)?;
        let is_used = |id: u32| users.all().any(|user| user.uid == id);
        let has_group = |id: u32| users.has_gid(id);
        let uid = IDS.clone().find(|id| !is_used(*id)).context("no free user id")?;
        let gid = match users.group(name) {
            Some(gid) => gid,
            None if !has_group(uid) => uid,
            None => IDS.clone().find(|id| !has_group(*id)).context("no free group id")?,
        };
        let has_bash = image::exists(self.root, "bin/bash");
        let user = User {
            name: name.to_owned(),
            uid,
            gid,
            home: format!("/home/{name}"),
            shell: if has_bash { "/bin/bash" } else { "/bin/sh" }.to_owned(),
        };
        // The user comes last: a run that was killed before starts again with it.
        self.edit("group", Some((0o644, ROOT_GROUP)), |lines| {
            lines.add(name, &format!("{name}:x:{gid}:"));
        })?;
        self.edit("gshadow", None, |lines| lines.add(name, &format!("{name}:!::")))?;
        let password = if admin { "" } else { "!" };
        self.edit("shadow", None, |lines| {
            lines.add(name, &format!("{name}:{password}:::::::"))
        })?;
        self.edit("passwd", Some((0o644, ROOT_USER)), |lines| {
            let User { home, shell, .. } = &user;
            lines.add(name, &format!("{name}:x:{uid}:{gid}::{home}:{shell}"));
        })?;
        Ok(user)
    }

    /// Lets a user become root without a password: by the group of administrators, and by a file of sudo, which need not
    /// be installed yet.
    pub(super) fn allow(&self, name: &str, default_group: &str) -> Result<()> {
        let users = Users::read(self.root)?;
        let group = ["sudo", "wheel"].into_iter().find(|group| users.group(group).is_some());
        let group = group.unwrap_or(default_group);
        let gid = (100..IDS.start)
            .rev()
            .find(|id| !users.has_gid(*id))
            .context("no free group id")?;
        self.edit("group", Some((0o644, ROOT_GROUP)), |lines| {
            lines.add(group, &format!("{group}:x:{gid}:"));
            lines.join(group, name);
        })?;
        self.edit("gshadow", None, |lines| {
            lines.add(group, &format!("{group}:!::"));
            lines.join(group, name);
        })?;
        self.edit("shadow", None, |lines| lines.unlock(name))?;
        let directory = make(self.root, b"etc/sudoers.d", 0o750)?;
        // sudo skips files with a dot in their name.
        let file = format!("90-ringfence-{}", name.replace('.', "_"));
        let line = format!("{name} ALL=(ALL:ALL) NOPASSWD: ALL\n");
        let owner = (Uid::ROOT, Gid::ROOT);
        replace(&directory, &file, line.as_bytes(), Mode::from_raw_mode(0o440), owner)
            .with_context(|| format!("write /etc/sudoers.d/{file}"))
    }

    /// Edits a file in `/etc`. One that is missing is made with a mode and a first line, or left out.
    fn edit(&self, name: &str, missing: Option<(u32, &str)>, change: impl FnOnce(&mut Lines)) -> Result<()> {
        let path = format!("etc/{name}");
        let (bytes, mode, owner) = match (users::read_accounts(self.root, path.as_bytes())?, missing) {
            (Some((bytes, stat)), _) => {
                let owner = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
                (bytes, stat.st_mode & 0o7777, owner)
            }
            (None, Some((mode, first))) => (format!("{first}\n").into_bytes(), mode, (Uid::ROOT, Gid::ROOT)),
            (None, None) => return Ok(()),
        };
        let mut lines = Lines(bytes);
        let before = lines.0.clone();
        change(&mut lines);
        if lines.0 == before && missing.is_none() {
            return Ok(());
        }
        let directory = files::open_dir(self.root, b"etc", INSIDE)?;
        if lines.0 != before || files::stat(&directory, name.as_bytes())?.is_none() {
            replace(&directory, name, &lines.0, Mode::from_raw_mode(mode), owner)
                .with_context(|| format!("write /{path}"))?;
        }
        Ok(())
    }
}

/// Writes a file and gives it its name when it is complete.
fn replace(directory: &OwnedFd, name: &str, contents: &[u8], mode: Mode, owner: (Uid, Gid)) -> Result<()> {
    let temporary = format!(".{name}.ringfence");
    files::remove(directory, temporary.as_bytes())?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(
        directory,
        &temporary,
        flags,
        Mode::RUSR | Mode::WUSR,
    )?);
    file.write_all(contents)?;
    rustix::fs::fchown(&file, Some(owner.0), Some(owner.1))?;
    rustix::fs::fchmod(&file, mode)?;
    file.sync_all()?;
    Ok(rustix::fs::renameat(directory, &temporary, directory, name)?)
}

/// A file of lines with fields between colons, of which the first is a name.
struct Lines(Vec<u8>);

impl Lines {
    /// Adds a line if no other has its name.
    fn add(&mut self, name: &str, line: &str) {
        if self.find(name).is_some() {
            return;
        }
        if self.0.last().is_some_and(|byte| *byte != b'\n') {
            self.0.push(b'\n');
        }
        self.0.extend_from_slice(line.as_bytes());
        self.0.push(b'\n');
    }

    /// Adds a member to a group, which the last field lists.
    fn join(&mut self, group: &str, member: &str) {
        let Some((begin, end)) = self.find(group) else { return };
        let line = &self.0[begin..end];
        let members = line.rsplit(|byte| *byte == b':').next().unwrap_or_default();
        if members
            .split(|byte| *byte == b',')
            .any(|other| other == member.as_bytes())
        {
            return;
        }
        let comma = if members.is_empty() { "" } else { "," };
        self.0.splice(end..end, format!("{comma}{member}").into_bytes());
    }

    /// Replaces a disabled password of a user with an empty one. A password that is set stays.
    fn unlock(&mut self, name: &str) {
        let Some((begin, end)) = self.find(name) else { return };
        let fields: Vec<&[u8]> = self.0[begin..end].split(|byte| *byte == b':').collect();
        if let [_, password, ..] = fields.as_slice()
            && matches!(*password, b"!" | b"!!" | b"*" | b"!*")
        {
            let at = begin + name.len() + 1;
            let length = password.len();
            self.0.drain(at..at + length);
        }
    }

    /// Range of the line of a name, without its end.
    fn find(&self, name: &str) -> Option<(usize, usize)> {
        let mut begin = 0;
        for line in self.0.split(|byte| *byte == b'\n') {
            if line
                .strip_prefix(name.as_bytes())
                .is_some_and(|rest| rest.starts_with(b":"))
            {
                return Some((begin, begin + line.len()));
            }
            begin += line.len() + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_added_once_and_others_stay() {
        let mut lines = Lines(b"a:x:1:b\n\xff broken\nsudo:x:27:\nlast:x:5:".to_vec());
        for _ in 0..2 {
            lines.add("user", "user:x:1000:");
            lines.join("sudo", "user");
            lines.join("a", "user");
            lines.join("absent", "user");
        }
        assert_eq!(
            lines.0,
            b"a:x:1:b,user\n\xff broken\nsudo:x:27:user\nlast:x:5:\nuser:x:1000:\n"
        );
    }

    #[test]
    fn only_users_without_a_password_are_unlocked() {
        let mut lines = Lines(b"user:!:1::\nkept:$6$hash:1::\nopen::1::\n".to_vec());
        for name in ["user", "kept", "open", "absent"] {
            lines.unlock(name);
        }
        assert_eq!(lines.0, b"user::1::\nkept:$6$hash:1::\nopen::1::\n");
    }
}

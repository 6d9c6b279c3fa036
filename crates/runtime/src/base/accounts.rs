//! User and group accounts of a sandbox: root, `user`, and the names that files and programs of a distribution refer
//! to.
//!
//! Of the host's own accounts only these are copied: those that are the same on every machine of its distribution (ids
//! below 100), `_apt`, and those that its package database refers to: `dpkg` fails where it does not know them. Only
//! name and number are copied.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use formats::accounts;

use super::fixed::USER;

/// Ids from here on are assigned by each machine in the order in which packages were installed.
const FIRST_DYNAMIC_ID: u32 = 100;
/// Ids from here on are not in a sandbox's range, or are `nobody`.
const NOBODY: u32 = 65_534;
/// Users of every sandbox: name, uid and gid, home, shell.
const USERS: [(&str, u32, &str, &str); 8] = [
    ("root", 0, "/root", "/bin/bash"),
    ("daemon", 1, "/usr/sbin", NO_LOGIN),
    ("bin", 2, "/bin", NO_LOGIN),
    ("sys", 3, "/dev", NO_LOGIN),
    ("mail", 8, "/var/mail", NO_LOGIN),
    ("www-data", 33, "/var/www", NO_LOGIN),
    ("nobody", NOBODY, "/nonexistent", NO_LOGIN),
    ("user", USER, "/home/user", "/bin/bash"),
];
const GROUPS: [(&str, u32); 16] = [
    ("root", 0),
    ("daemon", 1),
    ("bin", 2),
    ("sys", 3),
    ("adm", 4),
    ("tty", 5),
    ("disk", 6),
    ("mail", 8),
    ("sudo", 27),
    ("www-data", 33),
    ("shadow", 42),
    ("utmp", 43),
    ("staff", 50),
    ("users", 100),
    ("nogroup", NOBODY),
    ("user", USER),
];
const NO_LOGIN: &str = "/usr/sbin/nologin";

/// The tables of a sandbox's accounts.
#[derive(Debug)]
pub(super) struct Accounts {
    users: Vec<User>,
    groups: Vec<(String, u32)>,
}

#[derive(Debug)]
struct User {
    name: String,
    uid: u32,
    gid: u32,
    home: String,
    shell: &'static str,
}

impl Accounts {
    /// The accounts for a `base` of this host.
    pub(super) fn of(host: &Path) -> Self {
        let read = |file: &str| fs::read(host.join(file)).unwrap_or_default();
        let overrides = read("var/lib/dpkg/statoverride");
        let overrides = String::from_utf8(overrides).unwrap_or_default();
        let column = |index: usize| -> BTreeSet<&str> {
            let names = overrides.lines().filter_map(|line| line.split(' ').nth(index));
            names.chain(["_apt"]).collect()
        };
        let mut made = Self::fixed();
        for group in accounts::groups(&read("etc/group")) {
            made.add_group(&group, &column(1));
        }
        for user in accounts::users(&read("etc/passwd")) {
            made.add_user(&user, &column(0));
        }
        made
    }

    fn fixed() -> Self {
        let users = USERS.map(|(name, id, home, shell)| User {
            name: name.to_owned(),
            uid: id,
            gid: id,
            home: home.to_owned(),
            shell,
        });
        Self {
            users: users.into(),
            groups: GROUPS.map(|(name, gid)| (name.to_owned(), gid)).into(),
        }
    }

    fn add_group(&mut self, group: &accounts::Group<'_>, named: &BTreeSet<&str>) {
        let is_taken = |(name, gid): &(String, u32)| name == group.name || *gid == group.gid;
        if is_copied(group.name, group.gid, named) && !self.groups.iter().any(is_taken) {
            self.groups.push((group.name.to_owned(), group.gid));
        }
    }

    fn add_user(&mut self, user: &accounts::User<'_>, named: &BTreeSet<&str>) {
        let is_taken = |other: &User| other.name == user.name || other.uid == user.uid;
        if !is_copied(user.name, user.uid, named) || self.users.iter().any(is_taken) {
            return;
        }
        let known_places = ["/bin", "/dev", "/run/", "/usr/", "/var/"];
        let known = known_places.iter().any(|place| user.home.starts_with(place));
        self.users.push(User {
            name: user.name.to_owned(),
            uid: user.uid,
            gid: if self.has_gid(user.gid) { user.gid } else { NOBODY },
            home: if known { user.home } else { "/nonexistent" }.to_owned(),
            shell: NO_LOGIN,
        });
    }

    /// The uid of a user, if it exists.
    pub(super) fn uid(&self, name: &str) -> Option<u32> {
        self.users.iter().find(|user| user.name == name).map(|user| user.uid)
    }

    pub(super) fn has_uid(&self, uid: u32) -> bool {
        self.users.iter().any(|user| user.uid == uid)
    }

    pub(super) fn has_gid(&self, gid: u32) -> bool {
        self.groups.iter().any(|(_, have)| *have == gid)
    }

    pub(super) fn passwd(&self) -> String {
        self.users.iter().fold(String::new(), |mut text, user| {
            let User {
                name,
                uid,
                gid,
                home,
                shell,
            } = user;
            let _ = writeln!(text, "{name}:x:{uid}:{gid}:{name}:{home}:{shell}");
            text
        })
    }

    pub(super) fn group(&self) -> String {
        self.groups.iter().fold(String::new(), |mut text, (name, gid)| {
            let _ = writeln!(text, "{name}:x:{gid}:{}", members(name));
            text
        })
    }

    /// No account has a password: `sudoers` decides who may become whom.
    pub(super) fn shadow(&self) -> String {
        self.users.iter().fold(String::new(), |mut text, user| {
            let _ = writeln!(text, "{}:*:19000:0:99999:7:::", user.name);
            text
        })
    }

    pub(super) fn gshadow(&self) -> String {
        self.groups.iter().fold(String::new(), |mut text, (name, _)| {
            let _ = writeln!(text, "{name}:*::{}", members(name));
            text
        })
    }
}

fn members(group: &str) -> &'static str {
    if group == "sudo" { "user" } else { "" }
}

/// Whether an account of the host is copied.
fn is_copied(name: &str, id: u32, named: &BTreeSet<&str>) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let is_wanted = id < FIRST_DYNAMIC_ID || named.contains(name);
    is_wanted && id < NOBODY && name.chars().all(plain)
}

//! The package database of a Debian host, as a copy that `apt` and `dpkg` in a sandbox can use.
//!
//! The programs are those of the host's `/usr`, so the database must say which packages they came from. Outside `/usr`
//! a sandbox gets only what the database lists: the directories and links of packages, and those files of `/etc` whose
//! content is unchanged since the package was installed. What an administrator wrote or changed is never copied, and
//! neither are answers to package questions, caches, logs and service state.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Component, Path};

use md5::{Digest, Md5};

use super::accounts::Accounts;
use super::copy::{create_dir, put, put_link, read_public};
use super::sources;

/// The database, below the root.
const DATABASE: &str = "var/lib/dpkg";
/// The list of installed packages; replaced by each run of `dpkg`.
pub(super) const STATUS: &str = "var/lib/dpkg/status";
/// What `dpkg` and `apt` lock while they change the database.
pub(super) const LOCKS: [&str; 2] = ["var/lib/dpkg/lock", "var/lib/dpkg/lock-frontend"];
/// Files of the database besides the status, where they exist.
const TABLES: [&str; 4] = ["arch", "cmethopt", "diversions", "statoverride"];
/// Packages that boot the host: an upgrade inside must skip them, because their scripts cannot work in a sandbox.
const BOOT: [&str; 16] = [
    "dracut",
    "flash-kernel",
    "grub-",
    "initramfs-tools",
    "linux-aws",
    "linux-azure",
    "linux-gcp",
    "linux-generic",
    "linux-image",
    "linux-kvm",
    "linux-oracle",
    "linux-raspi",
    "linux-virtual",
    "raspi-firmware",
    "shim-signed",
    "systemd-boot",
];
/// Prefixes that targets of links may have.
const REACHED: [&str; 7] = ["/bin/", "/dev/null", "/etc/", "/lib/", "/run/", "/usr/", "/var/"];
/// Non-interactive: modified files of `/etc` are kept, missing ones restored, and no file is synced: a sandbox that was
/// not saved completely is not kept at all.
const DPKG: &str = "force-confdef\nforce-confold\nforce-confmiss\nforce-unsafe-io\n";

/// Whether the host has a dpkg database.
pub(super) fn is_debian(host: &Path) -> bool {
    host.join(STATUS).is_file() && host.join("usr/bin/dpkg").exists()
}

/// Copies the database, and what it lists outside `/usr`, into the skeleton of a root.
pub(super) fn copy(host: &Path, root: &Path, accounts: &Accounts) -> io::Result<()> {
    let status = String::from_utf8_lossy(&fs::read(host.join(STATUS))?).into_owned();
    let listed = copy_database(host, root, &status)?;
    let mut links = Vec::new();
    for path in &listed {
        let Ok(found) = host.join(path).symlink_metadata() else {
            continue;
        };
        if found.is_dir() {
            copy_dir(&root.join(path), &found, accounts)?;
        } else if found.is_symlink() && path.starts_with("etc/") {
            links.push(path);
        }
    }
    for (path, checksum) in conffiles(&status) {
        copy_unchanged(host, root, path, checksum)?;
    }
    // Last, so that nothing is written through a link.
    for path in links {
        copy_link(host, root, path)?;
    }
    create_dir(&root.join("etc/dpkg/dpkg.cfg.d"), 0o755)?;
    put(&root.join("etc/dpkg/dpkg.cfg.d/sandbox"), 0o644, DPKG)?;
    sources::copy(host, &root.join("etc"))?;
    create_apt_state(host, root, accounts)
}

/// Copies the database and returns the paths in `/etc` and `/var` that packages own.
fn copy_database(host: &Path, root: &Path, status: &str) -> io::Result<BTreeSet<String>> {
    let (from, to) = (host.join(DATABASE), root.join(DATABASE));
    for dir in ["", "alternatives", "info", "parts", "triggers", "updates"] {
        create_dir(&to.join(dir), 0o755)?;
    }
    for table in TABLES {
        if let Some(content) = read_public(&from.join(table))? {
            put(&to.join(table), 0o644, content)?;
        }
    }
    put(&to.join("available"), 0o644, "")?;
    put(&to.join("status"), 0o644, held(status))?;
    for lock in LOCKS {
        put(&root.join(lock), 0o640, "")?;
    }
    for dir in ["alternatives", "triggers"] {
        copy_files(&from.join(dir), &to.join(dir), |_| {})?;
    }
    let mut listed = BTreeSet::new();
    copy_files(&from.join("info"), &to.join("info"), |list| {
        for line in list.split(|byte| *byte == b'\n') {
            if (line.starts_with(b"/etc/") || line.starts_with(b"/var/"))
                && let Some(path) = std::str::from_utf8(line).ok().and_then(below_root)
            {
                listed.insert(path.to_owned());
            }
        }
    })?;
    Ok(listed)
}

/// Copies the plain files of a directory, and calls `list` with those that list files of a package.
fn copy_files(from: &Path, to: &Path, mut list: impl FnMut(&[u8])) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name == "Lock" || !entry.file_type()?.is_file() {
            continue;
        }
        let copied = if name.ends_with(".list") {
            fs::read(entry.path()).and_then(|content| {
                list(&content);
                put(&to.join(&*name), 0o644, content)
            })
        } else {
            fs::copy(entry.path(), to.join(&*name)).map(|_| ())
        };
        match copied {
            // The host's packages may change while they are copied.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}

/// The status with the packages that boot the host held at their version.
pub(super) fn held(status: &str) -> String {
    let mut text = String::with_capacity(status.len() + 256);
    let mut boots = false;
    for line in status.split_inclusive('\n') {
        if let Some(name) = line.strip_prefix("Package: ") {
            boots = BOOT.iter().any(|prefix| name.starts_with(prefix));
        }
        match line.strip_prefix("Status: install ") {
            Some(rest) if boots => {
                text.push_str("Status: hold ");
                text.push_str(rest);
            }
            _ => text.push_str(line),
        }
    }
    text
}

/// The files of `/etc` that belong to packages, relative to the root, with the MD5 sums of their original content.
pub(super) fn conffiles(status: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    let mut within = false;
    for line in status.lines() {
        match line.strip_prefix(' ') {
            Some(entry) if within => {
                let mut words = entry.split(' ');
                if let (Some(path), Some(checksum)) = (words.next(), words.next())
                    && path.starts_with("/etc/")
                    && let Some(path) = below_root(path)
                {
                    found.push((path, checksum));
                }
            }
            Some(_) => {}
            None => within = line == "Conffiles:",
        }
    }
    found
}

/// A path of the host relative to a root, if it has only normal components.
fn below_root(path: &str) -> Option<&str> {
    let path = path.strip_prefix('/')?;
    let mut parts = Path::new(path).components();
    (!path.is_empty() && parts.all(|part| matches!(part, Component::Normal(_)))).then_some(path)
}

/// Creates a directory with the mode of the host's and, if the sandbox has the account, its owner.
fn copy_dir(to: &Path, host: &fs::Metadata, accounts: &Accounts) -> io::Result<()> {
    if to.symlink_metadata().is_ok() {
        return Ok(());
    }
    create_dir(to, 0o755)?;
    let uid = Some(host.uid()).filter(|uid| accounts.has_uid(*uid)).unwrap_or(0);
    let gid = Some(host.gid()).filter(|gid| accounts.has_gid(*gid)).unwrap_or(0);
    chown(to, Some(uid), Some(gid))?;
    fs::set_permissions(to, Permissions::from_mode(host.mode() & 0o7777))
}

fn copy_unchanged(host: &Path, root: &Path, path: &str, checksum: &str) -> io::Result<()> {
    let from = host.join(path);
    let to = root.join(path);
    let open = |dir: &Path| host.join(dir).metadata().is_ok_and(|found| found.mode() & 0o001 != 0);
    if !Path::new(path).ancestors().skip(1).all(open) {
        return Ok(());
    }
    let Some(content) = read_public(&from)? else {
        return Ok(());
    };
    if hex::encode(Md5::digest(&content)) != checksum || !to.parent().is_some_and(Path::is_dir) {
        return Ok(());
    }
    let mode = from.symlink_metadata().map_or(0o644, |found| found.mode() & 0o755);
    put(&to, mode, content)
}

/// Copies a link unchanged, if its target is in a directory that sandboxes have, too.
fn copy_link(host: &Path, root: &Path, path: &str) -> io::Result<()> {
    let target = fs::read_link(host.join(path))?;
    let inside = target.is_relative() || REACHED.iter().any(|place| target.to_string_lossy().starts_with(place));
    let to = root.join(path);
    if !inside || to.symlink_metadata().is_ok() || !to.parent().is_some_and(Path::is_dir) {
        return Ok(());
    }
    put_link(target, &to)
}

/// The state of `apt`: which packages were installed as dependencies. Lists and archives are left to its user.
fn create_apt_state(host: &Path, root: &Path, accounts: &Accounts) -> io::Result<()> {
    for dir in [
        "var/lib/apt/lists",
        "var/lib/apt/mirrors",
        "var/cache/apt/archives",
        "var/log/apt",
    ] {
        create_dir(&root.join(dir), 0o755)?;
    }
    // `apt` downloads as an unprivileged user.
    for partial in [
        "var/lib/apt/lists/partial",
        "var/lib/apt/mirrors/partial",
        "var/cache/apt/archives/partial",
    ] {
        create_dir(&root.join(partial), 0o700)?;
        chown(root.join(partial), accounts.uid("_apt"), None)?;
    }
    match read_public(&host.join("var/lib/apt/extended_states"))? {
        Some(states) => put(&root.join("var/lib/apt/extended_states"), 0o644, states),
        None => Ok(()),
    }
}

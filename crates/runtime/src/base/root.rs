//! The skeleton of the root: everything outside `/usr`.

use std::fs;
use std::io;
use std::os::unix::fs::{chown, symlink};
use std::path::Path;

use super::accounts::Accounts;
use super::copy::{create_dir, put};
use super::fixed::{AGENT, USER};
use super::{etc, packages, usr};

const DIRECTORIES: [(&str, u32); 31] = [
    ("", 0o755),
    ("boot", 0o755),
    ("code", 0o777),
    ("dev", 0o755),
    ("etc", 0o755),
    ("home", 0o755),
    ("home/user", 0o755),
    ("media", 0o755),
    ("mnt", 0o755),
    ("opt", 0o755),
    ("proc", 0o555),
    ("root", 0o700),
    ("run", 0o755),
    ("run/lock", 0o1777),
    ("run/ringfence", 0o755),
    ("run/sudo", 0o711),
    ("srv", 0o755),
    ("sys", 0o555),
    ("tmp", 0o1777),
    ("usr", 0o755),
    ("var", 0o755),
    ("var/backups", 0o755),
    ("var/cache", 0o755),
    ("var/lib", 0o755),
    ("var/lib/sudo", 0o700),
    ("var/local", 0o755),
    ("var/log", 0o755),
    ("var/mail", 0o755),
    ("var/opt", 0o755),
    ("var/spool", 0o755),
    ("var/tmp", 0o1777),
];

/// Creates the skeleton of the root.
pub(super) fn create(host: &Path, root: &Path) -> io::Result<()> {
    for (dir, mode) in DIRECTORIES {
        create_dir(&root.join(dir), mode)?;
    }
    for name in ["bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        if let Ok(target) = fs::read_link(host.join(name)) {
            symlink(target, root.join(name))?;
        }
    }
    symlink("/run", root.join("var/run"))?;
    symlink("/run/lock", root.join("var/lock"))?;
    put(&root.join(AGENT), 0o644, "")?;
    let accounts = Accounts::of(host);
    // What packages of the host put into /etc comes first, so that the sandbox's own files replace it.
    if packages::is_debian(host) {
        packages::copy(host, root, &accounts)?;
    }
    etc::create(host, &root.join("etc"), &accounts)?;
    for file in [".bashrc", ".profile", ".bash_logout"] {
        let text = fs::read(host.join("etc/skel").join(file)).unwrap_or_default();
        for home in ["home/user", "root"] {
            put(&root.join(home).join(file), 0o644, &text)?;
        }
        chown(root.join("home/user").join(file), Some(USER), Some(USER))?;
    }
    for version in usr::pythons(host)? {
        // An interpreter looks there only if it exists when it starts.
        let mut directory = root.join("home/user");
        for name in [".local", "lib", &version, "site-packages"] {
            directory.push(name);
            create_dir(&directory, 0o755)?;
            chown(&directory, Some(USER), Some(USER))?;
        }
        let placeholder = directory.join(usr::PLACEHOLDER);
        put(&placeholder, 0o644, usr::PLACEHOLDER_TEXT)?;
        chown(&placeholder, Some(USER), Some(USER))?;
    }
    chown(root.join("home/user"), Some(USER), Some(USER))
}

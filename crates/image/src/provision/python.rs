//! Directories that let an ordinary user install packages with `pip` and import them in programs that run already.
//!
//! An interpreter looks for the user's packages only if their directory exists when it starts, and the first `pip` of a
//! user would be too late for that. On Debian, headers of packages belong below `/usr/include`, also of packages that go
//! to `/usr/local`, which is open to everyone.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::fs::{Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::directory::{INSIDE, STRICT, make};
use crate::files;
use crate::users::User;

/// Directories with interpreters.
const PROGRAMS: [&[u8]; 2] = [b"usr/bin", b"usr/local/bin"];
/// A file that keeps a directory of packages: `pip` removes one that it has emptied.
const PLACEHOLDER: &str = "README.txt";
const PLACEHOLDER_TEXT: &[u8] = b"Packages that pip installs are put here.\n";
/// Limit of the files of a directory of programs.
const NAMES_MAX: usize = 100_000;

/// `python3.N` of every interpreter.
fn versions(root: &OwnedFd) -> Result<Vec<Vec<u8>>> {
    let mut found = Vec::new();
    for directory in PROGRAMS {
        let Ok(directory) = files::open_dir(root, directory, INSIDE) else {
            continue;
        };
        found.extend(
            files::names(&directory, NAMES_MAX)?
                .into_iter()
                .filter(|name| is_version(name)),
        );
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

fn is_version(name: &[u8]) -> bool {
    name.strip_prefix(b"python3.")
        .is_some_and(|minor| (1..=3).contains(&minor.len()) && minor.iter().all(u8::is_ascii_digit))
}

/// Makes the directory for packages of a user, of each interpreter. The user may have put anything in their place, which
/// stays.
pub(super) fn user_packages(root: &OwnedFd, user: &User) -> Result<()> {
    let path = files::clean(user.home.as_bytes()).context("invalid path")?;
    if path.is_empty() || user.uid == 0 {
        return Ok(());
    }
    let Ok(home) = files::open_dir(root, &path, INSIDE) else {
        return Ok(());
    };
    for version in versions(root)? {
        let owner = (Some(Uid::from_raw(user.uid)), Some(Gid::from_raw(user.gid)));
        let mut directory = home.try_clone()?;
        let mut made = false;
        for name in [b".local".as_slice(), b"lib", &version, b"site-packages"] {
            made = match rustix::fs::mkdirat(&directory, name, Mode::RWXU) {
                Ok(()) => true,
                Err(Errno::EXIST) => false,
                Err(error) => return Err(error.into()),
            };
            let Ok(next) = files::open_dir(&directory, name, STRICT) else {
                made = false;
                break;
            };
            if made {
                rustix::fs::fchown(&next, owner.0, owner.1)?;
                rustix::fs::fchmod(&next, Mode::from_raw_mode(0o755))?;
            }
            directory = next;
        }
        if made {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let mode = Mode::from_raw_mode(0o644);
            let mut file = File::from(rustix::fs::openat(&directory, PLACEHOLDER, flags, mode)?);
            file.write_all(PLACEHOLDER_TEXT)?;
            rustix::fs::fchown(&file, owner.0, owner.1)?;
        }
    }
    Ok(())
}

/// Lets every user add headers of packages where Debian installs them. What is there stays its owner's.
pub(super) fn open_headers(root: &OwnedFd) -> Result<()> {
    for version in versions(root)? {
        let name = String::from_utf8_lossy(&version);
        let packages = format!("usr/local/lib/{name}/dist-packages");
        if files::open_dir(root, packages.as_bytes(), INSIDE).is_err() {
            continue;
        }
        let headers = make(root, format!("usr/include/{name}").as_bytes(), 0o1777)?;
        rustix::fs::fchmod(&headers, Mode::from_raw_mode(0o1777))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_are_known_by_their_names() {
        for name in ["python3.8", "python3.11"] {
            assert!(is_version(name.as_bytes()), "{name}");
        }
        for name in [
            "python3",
            "python3.",
            "python3.11-config",
            "python3.11m",
            "python2.7",
            "python3.1111",
        ] {
            assert!(!is_version(name.as_bytes()), "{name}");
        }
    }
}

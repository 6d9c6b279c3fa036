//! Makes an image fit for sandboxes: users, their homes and rights, and directories that every template has.
//!
//! No program of the image is needed. Files are replaced as a whole, so that a kill leaves the old or the new one, and
//! a second run changes nothing.

mod accounts;
mod directory;
mod image;
mod python;

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use formats::accounts::id;
use protocol::image::{ProvisionJob, ProvisionReport};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Uid};

use self::accounts::Accounts;
use self::directory::{INSIDE, STRICT, make};
use self::image::OsRelease;
use crate::files;
use crate::message::show;
use crate::users::{User, Users};

/// Directories that programs expect, with their modes.
const DIRECTORIES: [(&[u8], u32); 6] = [
    (b"etc", 0o755),
    (b"home", 0o755),
    (b"root", 0o700),
    (b"tmp", 0o1777),
    (b"var", 0o755),
    (b"var/tmp", 0o1777),
];
/// Directories that everyone may change: installers that run as the user need them.
const OPEN: [&[u8]; 2] = [b"code", b"usr/local"];

/// The largest id of a user or a group that a sandbox has.
const ID_MAX: u32 = 65_535;

/// Runs a job of `image-provision`.
pub(crate) fn run(job: &ProvisionJob) -> Result<ProvisionReport> {
    let (name, group) = match job.user.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (job.user.as_str(), None),
    };
    let number = id(name);
    match number {
        Some(id) => ensure!(
            id <= ID_MAX,
            "a sandbox has the ids 0 to {ID_MAX}, and {id} is none of them"
        ),
        None => check_name(name)?,
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, &job.root, flags, Mode::empty())
        .with_context(|| format!("open directory {}", job.root.display()))?;
    make(&root, b"etc", 0o755)?;
    if job.prepare {
        for (path, mode) in DIRECTORIES {
            make(&root, path, mode)?;
        }
    }
    let os = OsRelease::read(&root)?;
    let accounts = Accounts::new(&root);
    let known = Users::read(&root)?;
    let gid = match group {
        None => None,
        Some(group) => {
            let number = id(group).filter(|id| *id <= ID_MAX);
            let gid = known.group(group).or(number);
            let unknown = || format!("there is no group {group:?} for user {name:?}: create it first");
            Some(gid.with_context(unknown)?)
        }
    };
    let existing = match number {
        Some(id) => known.find(name).or_else(|| known.all().find(|user| user.uid == id)),
        None => known.find(name),
    };
    let created = existing.is_none() && number.is_none() && !job.only_interpreters;
    let mut user = match (existing, number) {
        (Some(user), _) => user,
        // An id needs no user: it has no name, and no home.
        (None, Some(uid)) => User::nameless(uid),
        (None, None) if job.only_interpreters => User::nameless(0),
        (None, None) => accounts.create(name, job.admin)?,
    };
    ensure!(
        !job.admin || !user.name.is_empty(),
        "a user with the id {name} could not become root: it has no name. Create a user first, or do not ask for that"
    );
    user.gid = gid.unwrap_or(user.gid);
    if created || job.prepare {
        home(&root, &user, job.prepare).with_context(|| format!("home directory of user {}", user.name))?;
    }
    python::user_packages(&root, &user).context("directories for packages of Python")?;
    if job.admin {
        accounts.allow(&user.name, os.admin_group())?;
    }
    if job.prepare {
        for path in OPEN {
            let directory = make(&root, path, 0o777)?;
            open_to_all(&directory).with_context(|| format!("modes below /{}", show(path)))?;
        }
        python::open_headers(&root).context("directories for headers of Python")?;
        let etc = files::open_dir(&root, b"etc", INSIDE)?;
        files::remove(&etc, b"machine-id").context("remove /etc/machine-id")?;
    }
    Ok(ProvisionReport {
        uid: user.uid,
        gid: user.gid,
        home: user.home,
        shell: user.shell,
        created,
        packages: os.tool(),
        wanted: image::wanted(&root, os.tool()),
        os: os.id,
        missing: image::missing(&root)?,
    })
}

/// Names that every tool takes: in `/etc/passwd` and in a file of sudo nothing else may be meant.
fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let is_valid = !name.is_empty()
        && name.len() <= 32
        && name.chars().all(is_plain)
        && name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_');
    ensure!(
        is_valid,
        "invalid user name {name:?}: use up to 32 letters, digits, '_', '-' and '.', first a letter or '_'"
    );
    Ok(())
}

/// Creates the home directory with the files of `/etc/skel`. With `all`, everything in it becomes the user's.
fn home(root: &OwnedFd, user: &User, all: bool) -> Result<()> {
    let path = files::clean(user.home.as_bytes()).context("invalid path")?;
    // The root directory is the home of users that need none.
    if path.is_empty() || user.uid == 0 {
        return Ok(());
    }
    let existed = files::open_dir(root, &path, INSIDE).is_ok();
    let home = make(root, &path, 0o755)?;
    let owner = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    if !existed {
        rustix::fs::fchown(&home, Some(owner.0), Some(owner.1))?;
        rustix::fs::fchmod(&home, Mode::from_raw_mode(0o755))?;
    }
    if let Ok(skeleton) = files::open_dir(root, b"etc/skel", INSIDE) {
        copy_missing(&skeleton, &home, owner).context("copy /etc/skel")?;
    }
    if all {
        own(&home, owner)?;
    }
    Ok(())
}

/// Copies what is not there yet. Only files, directories and links.
fn copy_missing(from: &OwnedFd, to: &OwnedFd, owner: (Uid, Gid)) -> Result<()> {
    for entry in Dir::read_from(from)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        let Some(stat) = files::stat(from, name)?.filter(|_| name != b"." && name != b"..") else {
            continue;
        };
        let exists = files::stat(to, name)?;
        let mode = Mode::from_raw_mode(stat.st_mode & 0o777);
        match (files::kind(&stat), exists) {
            (FileType::Directory, None) => {
                rustix::fs::mkdirat(to, name, Mode::RWXU)?;
                let made = files::open_dir(to, name, STRICT)?;
                rustix::fs::fchown(&made, Some(owner.0), Some(owner.1))?;
                rustix::fs::fchmod(&made, mode)?;
                copy_missing(&files::open_dir(from, name, STRICT)?, &made, owner)?;
            }
            (FileType::Directory, Some(there)) if files::kind(&there) == FileType::Directory => {
                copy_missing(
                    &files::open_dir(from, name, STRICT)?,
                    &files::open_dir(to, name, STRICT)?,
                    owner,
                )?;
            }
            (FileType::RegularFile, None) => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mut source = std::fs::File::from(rustix::fs::openat(from, name, flags, Mode::empty())?);
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let mut target = std::fs::File::from(rustix::fs::openat(to, name, flags, Mode::RUSR | Mode::WUSR)?);
                std::io::copy(&mut source, &mut target)?;
                rustix::fs::fchown(&target, Some(owner.0), Some(owner.1))?;
                rustix::fs::fchmod(&target, mode)?;
            }
            (FileType::Symlink, None) => {
                let target = rustix::fs::readlinkat(from, name, Vec::new())?;
                rustix::fs::symlinkat(target, to, name)?;
                rustix::fs::chownat(to, name, Some(owner.0), Some(owner.1), AtFlags::SYMLINK_NOFOLLOW)?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Changes the owner of a directory and of everything in it. What has it already is not touched: a change copies the
/// file.
fn own(directory: &OwnedFd, owner: (Uid, Gid)) -> Result<()> {
    let differs = |uid, gid| (uid, gid) != (owner.0.as_raw(), owner.1.as_raw());
    let stat = rustix::fs::fstat(directory)?;
    if differs(stat.st_uid, stat.st_gid) {
        rustix::fs::fchown(directory, Some(owner.0), Some(owner.1))?;
    }
    each(directory, &mut |parent, name, stat| {
        if files::kind(stat) == FileType::Directory {
            return own(&files::open_dir(parent, name, STRICT)?, owner);
        }
        if differs(stat.st_uid, stat.st_gid) {
            rustix::fs::chownat(parent, name, Some(owner.0), Some(owner.1), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    })
}

/// Mode 0777 for a directory and everything in it, except links.
fn open_to_all(directory: &OwnedFd) -> Result<()> {
    let all = Mode::from_raw_mode(0o777);
    if rustix::fs::fstat(directory)?.st_mode & 0o7777 != 0o777 {
        rustix::fs::fchmod(directory, all)?;
    }
    each(directory, &mut |parent, name, stat| {
        match files::kind(stat) {
            FileType::Directory => return open_to_all(&files::open_dir(parent, name, STRICT)?),
            FileType::RegularFile if stat.st_mode & 0o7777 != 0o777 => {
                rustix::fs::chmodat(parent, name, all, AtFlags::empty())?;
            }
            _ => {}
        }
        Ok(())
    })
}

/// What is done with an entry: its directory, name and state.
type Visit<'a> = &'a mut dyn FnMut(&OwnedFd, &[u8], &rustix::fs::Stat) -> Result<()>;

/// Calls a function for each entry of a directory.
fn each(directory: &OwnedFd, function: Visit<'_>) -> Result<()> {
    for entry in Dir::read_from(directory.as_fd())? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"."
            && name != b".."
            && let Some(stat) = files::stat(directory, name)?
        {
            function(directory, name, &stat)?;
        }
    }
    Ok(())
}

//! Copies of sandboxes that go on: what other sandboxes are started from, which have the same processes and files.
//!
//! ```text
//!   stop the processes ─▶ write the image ─▶ write out and copy the disk ─▶ let them go on ─▶ check the copy
//!   └──────────────────────── the sandbox stands still ──────────────────────────────────┘
//! ```
//!
//! A copy is a kept disk with an image beside it, for a sandbox that does not exist yet. Its file system was in use when
//! it was copied, so it is checked once, and what belonged to files without a name is given back: these are in the image.
//! Further copies share the files of the image, which are only read, and have a disk each. Their file systems keep the
//! UUID, which is in the index of the overlays and in the handles of files that are watched.
//!
//! Nothing is written out: a copy is used at once or never. What a crash leaves belongs to no sandbox, and the next start
//! removes it.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use model::id::DiskId;

use super::processes::{DUMP_TIMEOUT, failure};
use super::running::Running;
use super::state::ContainerDriver;
use crate::base::packages_of;
use crate::cancel::Cancel;
use crate::checkpoint::sums;
use crate::driver::{Fork, WriteError};
use crate::launchers::Once;
use crate::process::has_ended;
use crate::wire::{Reply, Request, Work};
use crate::{disk, usage};

/// What a copy is copied from: nothing changes it.
#[derive(Debug)]
pub(super) struct Source<'a> {
    pub(super) disk: &'a DiskId,
    /// The image of the processes, and its size in bytes.
    pub(super) image: &'a Path,
    pub(super) bytes: u64,
    /// The version of `base` below the files.
    pub(super) base: Option<String>,
}

impl ContainerDriver {
    pub(super) fn fork(
        &self,
        of: &Running,
        to: &Fork,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Duration, WriteError> {
        let rootfs = self.layers.rootfs_of(&of.name.disk)?;
        let base = self.base_below(&of.name.id, &of.name.disk)?;
        let now = rootfs.has_base().then(|| self.base.current()).flatten();
        if rootfs.has_base() && base.as_deref().map(packages_of) != now.as_deref().map(packages_of) {
            let why = "the packages of the host have changed since the sandbox was started, and its processes use files \
                       of the earlier ones";
            return Err(WriteError::Refused(why.to_owned()));
        }
        self.layers.use_for(&to.disk, &rootfs)?;
        self.kept.note(&to.id, &to.disk, base.as_deref())?;
        // Most of what has to be written, while it still runs.
        of.write_out()?;
        let stopped = self.copy(of, to, is_cancelled);
        if stopped.is_err() {
            self.let_go_on(of)?;
        }
        let stopped = stopped?;
        let image = self.image(&to.disk);
        if !disk::is_clean(&image)? {
            disk::repair(&image, is_cancelled)?;
        }
        let directory = self.kept.image(&to.id, &to.disk);
        fs::rename(self.kept.unfinished_image(&to.id, &to.disk), &directory)?;
        self.forks.lock().insert(to.disk.clone(), sums::space(&directory)?);
        Ok(stopped)
    }

    /// Copies the processes and the disk. When this fails, the sandbox goes on, unless the process for it was killed.
    fn copy(&self, of: &Running, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, WriteError> {
        let agent = self.keep_agent(of, &Cancel::new()?)?;
        let order = self.order(of, agent, self.kept.unfinished_image(&to.id, &to.disk), true, false)?;
        let deadline = Instant::now() + DUMP_TIMEOUT;
        let mut process = self.launchers.begin_once(Work::Dump)?;
        let begun = Instant::now();
        match ask(&mut process, (&order, &[of.agent.as_fd()]), deadline, is_cancelled)? {
            Reply::Stopped => {}
            other => return Err(failure(other)),
        }
        // Its network stays: what it is connected to does not notice.
        match ask(&mut process, (&Request::Write, &[]), deadline, is_cancelled)? {
            Reply::Done => {}
            other => return Err(failure(other)),
        }
        let copied = of
            .write_out()
            .and_then(|()| self.copy_image(&self.image(&of.name.disk), to, is_cancelled))
            // The end of a process, even of one that is stopped, changes the file system.
            .and_then(|()| match has_ended(of.agent.as_fd())? {
                true => Err(io::ErrorKind::NotFound.into()),
                false => Ok(()),
            });
        if let Err(error) = copied {
            let _ = process.ask((&Request::GiveUp, &[]), deadline, &|| false);
            return Err(error.into());
        }
        match process.ask((&Request::LetGoOn, &[]), deadline, &|| false)? {
            Reply::Done => Ok(begun.elapsed()),
            other => Err(failure(other)),
        }
    }

    /// Copies the image of a disk that nothing changes meanwhile. One that is allocated in full stays so.
    fn copy_image(&self, from: &Path, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> io::Result<()> {
        let has_space = |bytes: u64| {
            let free = usage::disk_available(&self.data_dir)?;
            match free >= to.keep_free_bytes.saturating_add(bytes) {
                true => Ok(()),
                false => Err(io::Error::from(io::ErrorKind::StorageFull)),
            }
        };
        let held = disk::held_bytes(from)?;
        has_space(held)?;
        let image = self.image(&to.disk);
        disk::copy(from, &image, &mut || match is_cancelled() {
            true => Err(io::ErrorKind::Interrupted.into()),
            false => has_space(0),
        })?;
        let size = fs::metadata(from)?.size();
        match held >= size {
            true => disk::reserve(&image, size),
            false => Ok(()),
        }
    }

    pub(super) fn copy_again(&self, from: &Fork, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> io::Result<()> {
        let bytes = self.forks.lock().get(&from.disk).copied();
        let source = Source {
            disk: &from.disk,
            image: &self.kept.image(&from.id, &from.disk),
            base: self.kept.base_of(&from.id, &from.disk),
            bytes: bytes.ok_or(io::ErrorKind::NotFound)?,
        };
        self.copy_from(&source, to, is_cancelled)
    }

    pub(super) fn copy_from(&self, from: &Source<'_>, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> io::Result<()> {
        let rootfs = self.layers.rootfs_of(from.disk)?;
        self.layers.use_for(&to.disk, &rootfs)?;
        self.kept.note(&to.id, &to.disk, from.base.as_deref())?;
        self.copy_image(&self.image(from.disk), to, is_cancelled)?;
        let unfinished = self.kept.unfinished_image(&to.id, &to.disk);
        share(from.image, &unfinished)?;
        fs::rename(unfinished, self.kept.image(&to.id, &to.disk))?;
        self.forks.lock().insert(to.disk.clone(), from.bytes);
        Ok(())
    }
}

/// As [`Once::ask`]. When that fails, this waits until the process has put everything back.
fn ask(
    process: &mut Once,
    request: (&Request, &[BorrowedFd<'_>]),
    deadline: Instant,
    is_cancelled: &dyn Fn() -> bool,
) -> io::Result<Reply> {
    let reply = process.ask(request, deadline, is_cancelled);
    if reply.is_err() {
        process.give_up();
    }
    reply
}

/// Makes a directory with the same files as that of an image. They are never written again: what differs between
/// sandboxes that are restored from it is mounted above.
fn share(image: &Path, to: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o711).create(to)?;
    for entry in fs::read_dir(image)? {
        let entry = entry?;
        let name = entry.file_name();
        let path = Path::new(&name);
        let is_read = path
            .extension()
            .is_some_and(|extension| extension == "img" || extension == "json");
        if is_read && entry.file_type()?.is_file() {
            fs::hard_link(entry.path(), to.join(path))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_share_the_files_of_an_image() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        for name in ["pages-1.img", "about.json", "dump.log", "script"] {
            fs::write(from.join(name), name).unwrap();
        }
        share(&from, &to).unwrap();
        let mut names: Vec<_> = fs::read_dir(&to)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        // Not what belongs to the run that wrote the image, such as the log of an earlier version.
        assert_eq!(names, ["about.json", "pages-1.img"]);
        let inode = |dir: &Path| fs::metadata(dir.join("pages-1.img")).unwrap().ino();
        assert_eq!(inode(&from), inode(&to));
        // The first one goes, and the other stays.
        fs::remove_dir_all(&from).unwrap();
        assert_eq!(fs::read_to_string(to.join("pages-1.img")).unwrap(), "pages-1.img");
    }
}

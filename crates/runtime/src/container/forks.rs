//! Copies of sandboxes that go on: what other sandboxes are started from, which have the same processes and files.
//!
//! ```text
//!   stop the processes ─▶ write the checkpoint ─▶ write out and copy the disk ─▶ let them go on ─▶ check the copy
//!   └──────────────────────── the sandbox stands still ──────────────────────────────────┘
//! ```
//!
//! The file system of the copy was in use when it was copied, so it is checked once, and what belonged to files without a
//! name is given back: these are in the checkpoint. What a copy consists of, `storage` knows.

use std::io;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use super::processes::{DUMP_TIMEOUT, failure};
use super::running::Running;
use super::state::ContainerDriver;
use crate::base::packages_of;
use crate::cancel::Cancel;
use crate::disk;
use crate::driver::WriteError;
use crate::launchers::Once;
use crate::process::has_ended;
use crate::stored::Fork;
use crate::wire::{Message, Reply, Request, Work};

impl ContainerDriver {
    pub(super) fn fork(
        &self,
        of: &Running,
        to: &Fork,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<Duration, WriteError> {
        let rootfs = self.storage.layers.rootfs_of(&of.name.disk)?;
        let base = self.storage.base_below(&of.name.disk)?;
        let now = rootfs.has_base().then(|| self.storage.base.current()).flatten();
        if rootfs.has_base() && base.as_deref().map(packages_of) != now.as_deref().map(packages_of) {
            let why = "the packages of the host have changed since the sandbox was started, and its processes use files \
                       of the earlier ones";
            return Err(WriteError::Refused(why.to_owned()));
        }
        self.storage.layers.use_for(&to.disk, &rootfs)?;
        self.storage.kept.note(&to.id, &to.disk, base.as_deref())?;
        // Most of what has to be written, while it still runs.
        of.write_out()?;
        let stopped = self.copy(of, to, is_cancelled);
        if stopped.is_err() {
            self.let_go_on(of)?;
        }
        let stopped = stopped?;
        let path = self.storage.disk_path(&to.disk);
        if !disk::is_clean(&path)? {
            disk::repair(&path, is_cancelled)?;
        }
        self.storage.finish_copy(to)?;
        Ok(stopped)
    }

    /// Copies the processes and the disk. When this fails, the sandbox goes on, unless the process for it was killed.
    fn copy(&self, of: &Running, to: &Fork, is_cancelled: &dyn Fn() -> bool) -> Result<Duration, WriteError> {
        let agent = self.keep_agent(of, &Cancel::new()?)?;
        let order = self.order(
            of,
            agent,
            self.storage.kept.unfinished_checkpoint(&to.id, &to.disk),
            true,
            false,
        )?;
        let deadline = Instant::now() + DUMP_TIMEOUT;
        let mut process = self.launchers.helpers().begin_once(Work::Dump)?;
        let begun = Instant::now();
        match ask(&mut process, order.with(&[of.agent.as_fd()]), deadline, is_cancelled)? {
            Reply::Stopped => {}
            other => return Err(failure(other)),
        }
        // Its network stays: what it is connected to does not notice.
        match ask(&mut process, Request::Write.alone(), deadline, is_cancelled)? {
            Reply::Done => {}
            other => return Err(failure(other)),
        }
        let copied = of
            .write_out()
            .and_then(|()| {
                self.storage
                    .copy_disk(&self.storage.disk_path(&of.name.disk), to, is_cancelled)
            })
            // The end of a process, even of one that is stopped, changes the file system.
            .and_then(|()| {
                if has_ended(of.agent.as_fd())? {
                    Err(io::ErrorKind::NotFound.into())
                } else {
                    Ok(())
                }
            });
        if let Err(error) = copied {
            let _ = process.ask(Request::GiveUp.alone(), deadline, &|| false);
            return Err(error.into());
        }
        match process.ask(Request::LetGoOn.alone(), deadline, &|| false)? {
            Reply::Done => Ok(begun.elapsed()),
            other => Err(failure(other)),
        }
    }
}

/// As [`Once::ask`]. When that fails, this waits until the process has put everything back.
fn ask(
    process: &mut Once,
    request: Message<'_>,
    deadline: Instant,
    is_cancelled: &dyn Fn() -> bool,
) -> io::Result<Reply> {
    let reply = process.ask(request, deadline, is_cancelled);
    if reply.is_err() {
        process.give_up();
    }
    reply
}

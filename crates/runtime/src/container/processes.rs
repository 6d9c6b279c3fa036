//! Checkpoints in the driver: where they are, and when they are complete.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::running::Running;
use super::state::ContainerDriver;
use crate::base::packages_of;
use crate::cancel::{Cancel, Raced};
use crate::checkpoint::host::HostFeatures;
use crate::checkpoint::program::Program;
use crate::checkpoint::save::AtRest;
use crate::checkpoint::sums::Compared;
use crate::checkpoint::{About, criu, facts, sums};
use crate::driver::{StartError, WriteError};
use crate::launchers::Once;
use crate::registry::first_id;
use crate::slot::Name;
use crate::wire::{Checkpoint, Dump, Reply, Request, Work};

/// How long writing a checkpoint may take.
pub(super) const DUMP_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// Maximum size of an open file without a name in a checkpoint, in bytes.
const DELETED_FILES: u64 = 1 << 30;

/// Why no checkpoint can be restored where there is no CRIU, for the client.
pub(super) const NO_CRIU: &str =
    "its processes were written by CRIU, which the host does not have, or only too old a version of it";

/// How long CRIU may take to probe the kernel.
const FACTS_TIMEOUT: Duration = Duration::from_secs(15);

/// Has CRIU probe the kernel, in the background. Until the result is there, every run does so itself.
///
/// # Errors
/// When what an earlier platform found cannot be removed, or no thread can be created.
pub(super) fn find_facts(driver: &Arc<ContainerDriver>) -> io::Result<()> {
    let file = driver.storage.data_dir.join(facts::FILE);
    // The host may have another kernel since.
    match std::fs::remove_file(&file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let Some(criu) = &driver.criu else {
        return Ok(());
    };
    let program = criu.clone();
    let driver = Arc::downgrade(driver);
    std::thread::Builder::new()
        .name("criu-facts".to_owned())
        .spawn(move || {
            let Some(driver) = driver.upgrade() else { return };
            let request = Request::FindFacts { program, file };
            let deadline = Instant::now() + FACTS_TIMEOUT;
            let found = driver
                .launchers
                .helpers()
                .request_once(Work::Facts, request.alone(), deadline, &|| false);
            let why = match found {
                Ok(Reply::Failed(why)) => why,
                Ok(_) => return,
                Err(error) => error.to_string(),
            };
            tracing::debug!("CRIU probes the kernel in each of its runs: {why}");
        })?;
    Ok(())
}

/// Starts launchers for restores, in the background, if there can be any: each takes some tens of milliseconds.
///
/// # Errors
/// When no thread can be created.
pub(super) fn prepare_restores(driver: &Arc<ContainerDriver>, count: usize) -> io::Result<()> {
    if driver.criu.is_none() {
        return Ok(());
    }
    let driver = Arc::downgrade(driver);
    std::thread::Builder::new().name("restores".to_owned()).spawn(move || {
        let Some(driver) = driver.upgrade() else { return };
        if let Err(error) = driver.launchers.prepare_restores(count) {
            tracing::warn!("cannot start launchers for restores in advance, the first restores take longer: {error}");
        }
    })?;
    Ok(())
}

/// What is called while the processes of a sandbox are written.
struct Moments<'a> {
    /// All of it stands still.
    stopped: &'a mut dyn FnMut(),
    /// Everything is written: what fails here lets the sandbox go on.
    complete: &'a mut dyn FnMut() -> io::Result<()>,
}

impl ContainerDriver {
    pub(super) fn write_processes(
        &self,
        of: &Running,
        stopped: &mut dyn FnMut(),
        complete: &mut dyn FnMut() -> io::Result<()>,
        cancel: &Arc<Cancel>,
    ) -> Result<(), WriteError> {
        let (id, disk) = (&of.name.id, &of.name.disk);
        of.until_ended(cancel)?;
        self.storage.kept.forget_checkpoint(id, disk)?;
        let stays = self.tree.freezer(&of.name)?.is_frozen()?;
        let written = self.dump(of, stays, &mut Moments { stopped, complete }, cancel);
        if written.is_err() {
            let _ = self.storage.kept.forget_checkpoint(id, disk);
            if stays {
                // The process that does so may have been killed.
                self.tree.freezer(&of.name)?.freeze()?
            } else {
                self.let_go_on(of)?
            }
        }
        written
    }

    /// Lets a sandbox go on if it still stands still after a checkpoint of it was not written.
    pub(super) fn let_go_on(&self, of: &Running) -> io::Result<()> {
        let is_stopped = self.tree.work_freezer(&of.name)?.is_frozen()? || self.tree.freezer(&of.name)?.is_frozen()?;
        if is_stopped {
            // The process that lets it go on was killed, and with it the kernel's side of the `/proc` files is gone.
            of.subject(self).go_on(&AtRest::default())
        } else {
            Ok(())
        }
    }

    /// Keeps the program of a sandbox's agent, and returns its hash.
    ///
    /// # Errors
    /// When it cannot be kept, and when this is cancelled.
    pub(super) fn keep_agent(&self, of: &Running, cancel: &Cancel) -> io::Result<String> {
        let (agents, program) = (
            Arc::clone(&self.storage.agents),
            File::open(format!("/proc/{}/exe", of.pid))?,
        );
        match cancel.race(move || agents.keep(&program))? {
            Raced::Done(kept) => kept,
            Raced::Cancelled(_) => Err(Cancel::error()),
        }
    }

    /// The order to write a checkpoint of a sandbox, whose agent's program is kept.
    pub(super) fn order(
        &self,
        of: &Running,
        program_of_agent: String,
        checkpoint: PathBuf,
        goes_on: bool,
        stays: bool,
    ) -> Result<Request, WriteError> {
        let Some(criu) = &self.criu else {
            return Err(WriteError::Failed(io::ErrorKind::Unsupported.into()));
        };
        Ok(Request::Dump(Dump {
            program: criu.current().map_err(io::Error::other)?,
            name: of.name.to_string(),
            pid: of.pid,
            program_of_agent,
            base_id: first_id(of.pid)?,
            checkpoint,
            facts: self.storage.data_dir.join(facts::FILE),
            goes_on,
            stays,
            deleted_files: DELETED_FILES,
        }))
    }

    /// Writes a checkpoint of a sandbox, and ends its processes. When this fails, they go on, or stay stopped, unless the
    /// process for it was killed.
    fn dump(
        &self,
        of: &Running,
        stays: bool,
        moments: &mut Moments<'_>,
        cancel: &Arc<Cancel>,
    ) -> Result<(), WriteError> {
        let mut process = self.launchers.helpers().begin_once(Work::Dump)?;
        let mut writing_out = None;
        let written = self.dump_by(&mut process, &mut writing_out, of, stays, moments, cancel);
        if written.is_err() {
            // Who waits for the sandbox does not wait for the end of a process that has put everything back. Another one is
            // killed first.
            let process = process.has_put_back().then_some(process);
            of.end_later(move || {
                drop(process);
                let _ = writing_out.map(JoinHandle::join);
            });
        }
        written
    }

    fn dump_by(
        &self,
        process: &mut Once,
        writing_out: &mut Option<JoinHandle<io::Result<()>>>,
        of: &Running,
        stays: bool,
        moments: &mut Moments<'_>,
        cancel: &Arc<Cancel>,
    ) -> Result<(), WriteError> {
        let (id, disk) = (&of.name.id, &of.name.disk);
        let unfinished = self.storage.kept.unfinished_checkpoint(id, disk);
        let request = self.order(of, self.keep_agent(of, cancel)?, unfinished.clone(), false, stays)?;
        let deadline = Instant::now() + DUMP_TIMEOUT;
        match process.ask_unless(request.with(&[of.agent.as_fd()]), deadline, cancel)? {
            Reply::Stopped => {}
            other => return Err(failure(other)),
        }
        (moments.stopped)();
        match process.ask_unless(Request::Write.alone(), deadline, cancel)? {
            Reply::Done => {}
            other => return Err(failure(other)),
        }
        let written = cancel.race({
            // Not by its name, which another one has once this is cancelled.
            let (checkpoint, cancel) = (crate::files::open_dir(&unfinished)?, Arc::clone(cancel));
            move || sums::write(Path::new(&format!("/proc/self/fd/{}", checkpoint.as_raw_fd())), &cancel)
        });
        let written = match written {
            Ok(Raced::Done(written)) => written.and_then(|()| cancel.check()),
            Ok(Raced::Cancelled(rest)) => {
                *writing_out = Some(rest);
                Err(Cancel::error())
            }
            Err(error) => Err(error),
        };
        if let Err(error) = written {
            // The checkpoint has no name yet, so it does not have to be removed before.
            process.give_up();
            return Err(error.into());
        }
        let finished = self
            .storage
            .kept
            .finish_checkpoint(id, disk)
            .and_then(|()| (moments.complete)());
        if let Err(error) = finished {
            // The checkpoint is not what the sandbox is once it goes on.
            let forgotten = self.storage.kept.forget_checkpoint(id, disk);
            process.give_up();
            forgotten?;
            return Err(error.into());
        }
        // From here on the sandbox is what was written. Its processes are killed by others as well, so that it does not
        // matter what becomes of this.
        let _ = process.ask(Request::EndDumped.alone(), deadline, &|| false);
        Ok(())
    }

    /// The checkpoint to restore a sandbox from.
    ///
    /// # Errors
    /// When it cannot be restored, with a reason for the client.
    pub(super) fn restorable(&self, name: &Name, base: Option<&str>) -> Result<Checkpoint, StartError> {
        let refused = |why: &str| StartError::Unrestorable(why.to_owned());
        let directory = self.storage.kept.checkpoint(&name.id, &name.disk);
        let Some(criu) = &self.criu else {
            return Err(refused(NO_CRIU));
        };
        let program = criu.current().map_err(StartError::Unrestorable)?;
        let written = self.storage.kept.base_of(&name.id, &name.disk);
        if base.is_some() && written.as_deref().map(packages_of) != base.map(packages_of) {
            return Err(refused(
                "the packages of the host have changed, and its processes use files of the earlier ones",
            ));
        }
        if let Some(Compared { bytes, pages_remain }) = self.storage.copied_checkpoint(&name.disk) {
            // Checked when it was copied, as far as it has to be.
            return Ok(Checkpoint {
                program,
                directory,
                bytes,
                pages_remain,
            });
        }
        match sums::check_but_pages(&directory) {
            Ok(Compared { bytes, pages_remain }) => {
                if let Some(why) = self.unfit(&program, &directory)? {
                    return Err(StartError::Unrestorable(why));
                }
                Ok(Checkpoint {
                    program,
                    directory,
                    bytes,
                    pages_remain,
                })
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(refused(&error.to_string())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(refused("the checkpoint of its processes is missing"))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Why a checkpoint that is whole cannot be restored here, if it cannot.
    pub(super) fn unfit(&self, criu: &Program, checkpoint: &Path) -> io::Result<Option<String>> {
        let about = About::of(checkpoint)?;
        match HostFeatures::with(&criu.version).unfit_for(&about.host) {
            None => self.storage.agents.obstacle(&about.agent),
            why => Ok(why),
        }
    }
}

pub(super) fn failure(reply: Reply) -> WriteError {
    match reply {
        Reply::Refused(why) if criu::is_passing(&why) => WriteError::Passing(why),
        Reply::Refused(why) => WriteError::Refused(why),
        Reply::Failed(why) => io::Error::other(why).into(),
        _ => io::Error::other("unexpected reply").into(),
    }
}

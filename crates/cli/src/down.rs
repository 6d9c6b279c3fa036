//! `ringfence down`: the end of every sandbox of a data directory.
//!
//! An operator who types `down` wants it all to be down, so a platform that runs is ended first. It is told apart from
//! any other process by the lock on the data directory: whoever holds that lock wrote its number there, and a pidfd
//! taken while the lock is still held cannot name another process afterwards.

use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use node::Node;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::config::Settings;
use crate::data_dir::{DataDir, InUse, Lock};
use crate::{doctor, open_store, output};

/// How long a platform may take to drain. It bounds its own drain by less.
const DRAIN_BOUND: Duration = Duration::from_secs(60);

/// Ends everything and says how much that was.
///
/// # Errors
/// When the data directory is not ours, its platform does not end, or something cannot be removed.
pub(crate) fn run(settings: &Settings) -> Result<ExitCode> {
    doctor::require_root()?;
    let dir = DataDir::existing(&settings.data_dir)?;
    let _lock = take(&dir)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start the async runtime")?;
    let ended = runtime.block_on(end_all(settings, &dir))?;
    let what = if ended == 1 { "sandbox" } else { "sandboxes" };
    output::line(&format!("ended {ended} {what} of {}", dir.path().display()))?;
    Ok(ExitCode::SUCCESS)
}

async fn end_all(settings: &Settings, dir: &DataDir) -> Result<usize> {
    let node = Node::start(node::Settings {
        data_dir: dir.path().to_owned(),
        launchers: 1,
        // What is to be removed may have been started without limits, and nothing new is started here.
        unlimited: true,
        disks_mb: Vec::new(),
    })
    .await
    .context("prepare the host for cleaning up")?;
    // The host first: a row without a sandbox is removed by the next start, a sandbox without a row could be lost.
    node.remove_everything().await.context("remove sandboxes")?;
    let store = open_store(settings).await?;
    let live = store.sandbox_list_live().await.context("list sandboxes")?;
    for sandbox in &live {
        store
            .sandbox_delete(&sandbox.id)
            .await
            .with_context(|| format!("remove the row of sandbox {}", sandbox.id))?;
    }
    store.close().await;
    Ok(live.len())
}

/// Locks the data directory, after ending the platform that has it.
fn take(dir: &DataDir) -> Result<Lock> {
    let in_use = match dir.lock() {
        Ok(lock) => return Ok(lock),
        Err(error) => error.downcast::<InUse>()?,
    };
    let Some(pid) = in_use.pid.and_then(Pid::from_raw) else {
        return Err(in_use.into());
    };
    let process = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => process,
        // It ended a moment ago, or lives in another pid namespace, where its number means something else.
        Err(_) => return dir.lock(),
    };
    match dir.lock() {
        Ok(lock) => return Ok(lock),
        Err(error) => {
            if error.downcast_ref::<InUse>().and_then(|in_use| in_use.pid) != Some(pid.as_raw_nonzero().get()) {
                return Err(error);
            }
        }
    }
    rustix::process::pidfd_send_signal(&process, Signal::TERM)
        .with_context(|| format!("end the platform, process {}", pid.as_raw_nonzero()))?;
    wait_for_end(&process).with_context(|| format!("wait for the platform, process {}", pid.as_raw_nonzero()))?;
    dir.lock()
}

fn wait_for_end(process: &OwnedFd) -> Result<()> {
    let timeout = Timespec {
        tv_sec: DRAIN_BOUND.as_secs().cast_signed(),
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    if rustix::event::poll(&mut fds, Some(&timeout))? == 0 {
        bail!("it did not end within {} s", DRAIN_BOUND.as_secs());
    }
    Ok(())
}

//! `ringfence down`: the end of every sandbox of a data directory.
//!
//! An operator who types `down` wants it all to be down, so a platform that runs is ended first. It is told apart from
//! any other process by the lock on the data directory: its holder wrote its number there, and a pidfd
//! taken while the lock is still held cannot name another process afterwards.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use node::Node;
use proxy::egress::EgressSettings;
use runtime::settings::{CriuChoice, DriverSettings};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};
use server::clock::Clock;
use server::lease::{NodeIdentity, NodeLease};

use crate::config::Config;
use crate::data_dir::{DataDir, InUse, Lock};
use crate::database::{open_store, require_current};
use crate::{doctor, node_files, node_identity, output, runtimes};

/// How long a platform may take to drain. It bounds its own drain by less.
const DRAIN_BOUND: Duration = Duration::from_secs(60);

/// Ends everything and prints how much was ended.
///
/// # Errors
/// When the data directory is not ours, its platform does not end, or something cannot be removed.
pub(crate) fn run(settings: &Config) -> Result<ExitCode> {
    doctor::require_root()?;
    let path = &settings.data_dir;
    if DataDir::is_unused(path) {
        // A volume or a directory that was made for a platform which never started.
        output::line(&format!("nothing to end: {} is empty", path.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let dir = DataDir::existing(path)?;
    if dir.path().join(node_files::SERVER).exists() {
        bail!(
            "{} is the data directory of a server, whose sandboxes are on its node: run this command there",
            dir.path().display()
        );
    }
    let is_node = node_files::joined(&dir)?.is_some();
    let lock = take(&dir)?;
    if is_node {
        return run_on_node(&dir);
    }
    require_current(settings)?;
    let identity = node_identity::load(&dir, &lock, settings.has_own_database())?;
    let runtime = runtimes::small()?;
    let ended = runtime.block_on(end_all(settings, &dir, identity))?;
    let what = if ended == 1 { "sandbox" } else { "sandboxes" };
    output::line(&format!("ended {ended} {what} of {}", dir.path().display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Ends everything on a node. Its server finds out when the node connects again, and removes the rows.
fn run_on_node(dir: &DataDir) -> Result<ExitCode> {
    let runtime = runtimes::small()?;
    runtime.block_on(async {
        let node = Node::start(without_sandboxes(dir.path()))
            .await
            .context("prepare the host for cleaning up")?;
        node.remove_everything().await.context("remove sandboxes")
    })?;
    output::line(&format!("ended the sandboxes of {}", dir.path().display()))?;
    Ok(ExitCode::SUCCESS)
}

async fn end_all(settings: &Config, dir: &DataDir, identity: NodeIdentity) -> Result<usize> {
    let node = Node::start(without_sandboxes(dir.path()))
        .await
        .context("prepare the host for cleaning up")?;
    // The host first: a row without a sandbox is removed by the next start, a sandbox without a row could be lost.
    node.remove_everything().await.context("remove sandboxes")?;
    let store = open_store(settings).await?;
    // The rows of this node only: others may share the database.
    let lease = NodeLease::take(&store, identity, Clock::system())
        .await
        .context("take the lease of this node")?;
    let ended = lease.remove_node().await.context("remove the rows of this node")?;
    store.close().await;
    Ok(ended)
}

/// The settings of a node that starts no sandbox.
pub(crate) fn without_sandboxes(data_dir: &Path) -> node::NodeSettings {
    node::NodeSettings {
        driver: DriverSettings {
            launchers: 1,
            // What is to be removed may have been started without limits.
            unlimited: true,
            base: false,
            criu: CriuChoice::Off,
            page_out: false,
            ..DriverSettings::new(data_dir.to_owned())
        },
        process_rate: None,
        egress: EgressSettings {
            enabled: false,
            ..EgressSettings::default()
        },
        ..node::NodeSettings::new(data_dir.to_owned())
    }
}

/// Locks the data directory, after ending the platform that holds the lock.
fn take(dir: &DataDir) -> Result<Lock> {
    let in_use = match dir.lock() {
        Ok(lock) => return Ok(lock),
        Err(error) => error.downcast::<InUse>()?,
    };
    let Some(owner) = in_use.owner.clone() else {
        return Err(in_use.into());
    };
    let pid = owner.pid();
    let process = Pid::from_raw(pid).map(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
    let Some(Ok(process)) = process else {
        // It ended a moment ago.
        return dir.lock();
    };
    match dir.lock() {
        Ok(lock) => return Ok(lock),
        Err(error) => {
            if error.downcast_ref::<InUse>().and_then(|in_use| in_use.owner.as_ref()) != Some(&owner) {
                return Err(error);
            }
        }
    }
    rustix::process::pidfd_send_signal(&process, Signal::TERM)
        .with_context(|| format!("end the platform, process {pid}"))?;
    wait_for_end(&process).with_context(|| format!("wait for the platform, process {pid}"))?;
    dir.lock()
}

fn wait_for_end(process: &OwnedFd) -> Result<()> {
    let timeout = Timespec {
        tv_sec: DRAIN_BOUND.as_secs().cast_signed(),
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    if rustix::event::poll(&mut fds, Some(&timeout))? == 0 {
        bail!("the process did not end within {} s", DRAIN_BOUND.as_secs());
    }
    Ok(())
}

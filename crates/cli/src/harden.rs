//! What the process of the platform gives up before it holds a secret, and what it needs for a thousand sandboxes.

use anyhow::{Context, Result};
use rustix::process::{DumpableBehavior, Resource, Rlimit};

/// File descriptors for a full host: about ten for each of some thousand sandboxes and their connections.
const OPEN_FILES: u64 = 1 << 20;

/// Forbids core dumps of this process and of its children, and raises the limit of open files.
///
/// Keys and tokens are in this process's memory; a core file would put them on disk. Not being dumpable also keeps
/// processes of the same user from reading that memory through `/proc`. The core limit of 1 and not 0 is on purpose: it
/// is the one value at which the kernel does not run a crash handler named in `core_pattern` either.
///
/// # Errors
/// When the kernel refuses to forbid core dumps.
pub(crate) fn harden() -> Result<()> {
    let no_cores = Rlimit {
        current: Some(1),
        maximum: Some(1),
    };
    rustix::process::setrlimit(Resource::Core, no_cores).context("forbid core dumps")?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).context("forbid core dumps")?;
    raise_open_files();
    Ok(())
}

fn raise_open_files() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= OPEN_FILES) {
        return;
    }
    let wanted = Rlimit {
        current: Some(OPEN_FILES),
        maximum: Some(limit.maximum.unwrap_or(OPEN_FILES).max(OPEN_FILES)),
    };
    // A container manager may have taken the right to go above the hard limit; then the hard limit it is.
    let raised = rustix::process::setrlimit(Resource::Nofile, wanted).or_else(|_| {
        rustix::process::setrlimit(
            Resource::Nofile,
            Rlimit {
                current: limit.maximum,
                maximum: limit.maximum,
            },
        )
    });
    if let Err(error) = raised {
        tracing::warn!("the limit of open files stays at {:?}: {error}", limit.current);
    }
}

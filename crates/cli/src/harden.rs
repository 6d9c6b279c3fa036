//! Process limits: disables core dumps before any secret is in memory, and raises the limit on open files.

use anyhow::{Context, Result};
use rustix::process::{DumpableBehavior, Resource, Rlimit};

/// File descriptors for a full host: about ten for each of some thousand sandboxes and their connections.
const OPEN_FILES: u64 = 1 << 20;

/// OOM score adjustment of the platform: killed after everything that runs in a sandbox, and still
/// in reach of a kernel that finds nothing else.
const OOM_SCORE: i32 = -900;

/// Forbids core dumps of this process and of its children, raises the limit of open files, and sets the umask.
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
    rustix::process::setrlimit(Resource::Core, no_cores).context("disable core dumps")?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).context("disable core dumps")?;
    // Templates are made of files that sandboxes must be able to read; what is private has a mode of its own.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    raise_open_files();
    lower_oom_score();
    if let Err(error) = runtime::schedule::platform() {
        tracing::debug!("cannot raise the scheduling priority of the platform: {error}");
    }
    Ok(())
}

/// Asks the kernel to end programs of sandboxes before this process when the whole host is out of memory: without it all
/// of them are out of reach. What is started for sandboxes gives that up again.
fn lower_oom_score() {
    const FILE: &str = "/proc/self/oom_score_adj";
    let present = std::fs::read_to_string(FILE)
        .ok()
        .and_then(|text| text.trim().parse().ok());
    if present.is_some_and(|present: i32| present > OOM_SCORE)
        && let Err(error) = std::fs::write(FILE, OOM_SCORE.to_string())
    {
        // It takes a right that container managers may keep.
        tracing::debug!("cannot lower the OOM score; the kernel may kill the platform when memory runs out: {error}");
    }
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
        tracing::warn!(
            "cannot raise the limit on open files, which stays at {}: {error}; raise it where the platform is started \
             (ulimit -n, LimitNOFILE= of a systemd unit, --ulimit nofile of a container)",
            limit.current.unwrap_or_default()
        );
    }
}

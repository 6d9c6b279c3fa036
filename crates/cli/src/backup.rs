//! `ringfence backup`: everything that a data directory needs to start again on another host, as files that are copied
//! while the platform runs.
//!
//! The platform holds what backups copy (`/backup` of the operator socket): layers, the memory of snapshots and uploaded
//! files do not change, and are not removed meanwhile. The database is copied first, so all that it names is there. Disks
//! of paused sandboxes are copied without a lock, because a resume must not wait for a copy: every resume raises the version of
//! the row before it touches the disk, so a copy counts if the version is the same afterwards.

mod copy;
mod create;
mod manifest;
mod restore;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use self::manifest::{Manifest, damaged};
use crate::args::BackupCommand;
use crate::config::{Config, Sources};
use crate::output;

/// Runs the command.
///
/// # Errors
/// When the backup cannot be made, read or restored.
pub(crate) fn run(config: &Config, sources: &Sources, command: &BackupCommand) -> Result<ExitCode> {
    match command {
        BackupCommand::Create { to, skip_missing } => create::run(config, sources.file_path(), to, *skip_missing),
        BackupCommand::Restore { from } => restore::run(config, from),
        BackupCommand::Check { from } => check(from),
    }
}

/// Reads every file of a backup.
fn check(backup: &Path) -> Result<ExitCode> {
    let manifest = Manifest::read(backup)?;
    for file in &manifest.files {
        let path = backup.join(&file.path);
        let read = copy::check(&path).with_context(|| format!("read {}", path.display()))?;
        if !file.is(&read) {
            bail!(damaged(file));
        }
    }
    output::line(&format!(
        "{} is complete: a backup of {} with {} files",
        backup.display(),
        manifest.created_at,
        manifest.files.len()
    ))?;
    Ok(ExitCode::SUCCESS)
}

//! The operator inside a sandbox: `ringfence sandbox exec|shell|cp|forward`.
//!
//! The commands speak the protocol of the agent, over byte streams that the platform opens through the operator socket. The
//! platform records that the operator enters, and gives out the token of the agent, which stays in this process.
//!
//! Everything that comes from a sandbox is untrusted: messages have a size limit, names never become paths of the host by
//! themselves, and only `exec` and `shell` write output of a sandbox to the terminal as it is.

mod agent;
mod copy;
mod entered;
mod exec;
mod forward;
mod host_files;
mod process;
mod progress;
mod shell;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::SandboxCommand;
use crate::data_dir::DataDir;

/// Runs one of the commands that enter a sandbox; none if it is another one.
///
/// # Errors
/// When the sandbox cannot be entered, or what the command does fails.
pub(crate) async fn run(dir: &DataDir, command: &SandboxCommand) -> Option<Result<ExitCode>> {
    Some(match command {
        SandboxCommand::Exec(args) => Box::pin(exec::run(dir, args)).await,
        SandboxCommand::Shell(args) => Box::pin(shell::run(dir, args)).await,
        SandboxCommand::Cp(args) => Box::pin(copy::run(dir, args)).await,
        SandboxCommand::Forward(args) => Box::pin(forward::run(dir, args)).await,
        SandboxCommand::List { .. }
        | SandboxCommand::Show { .. }
        | SandboxCommand::Kill { .. }
        | SandboxCommand::Logs { .. } => return None,
    })
}

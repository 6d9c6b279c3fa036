//! The sandbox that is measured, and its agent.

use anyhow::{Context as _, Result};
use measure::client::{Client, Sandbox, Target};
use measure::process::{Command, ProcessEvent};
use uuid::Uuid;

use crate::bench::host::{Process, agents, processes};

/// A sandbox under measurement.
pub(super) struct Subject {
    pub(super) platform: Target,
    pub(super) sandbox: Sandbox,
    /// The platform's process.
    pub(super) server: Process,
}

/// The agent of a sandbox, found with the help of a process started in it, which runs until its client disconnects.
///
/// # Errors
/// When it cannot be found.
pub(super) async fn agent_of(subject: &Subject) -> Result<Process> {
    let mark = format!("{:x}", Uuid::new_v4().as_u128());
    let script = format!(": {mark}; read _; :");
    let args = ["-c", script.as_str()];
    let command = Command {
        stdin: true,
        ..Command::new("/bin/sh", &args)
    };
    let mut client = Client::new(subject.platform.clone());
    let mut events = client.start(&subject.sandbox, &command).await?;
    while !matches!(
        events.next().await?.context("the process ended")?,
        ProcessEvent::Started
    ) {}
    let marked = processes().find(|process| {
        let line = process.command_line();
        line.windows(mark.len()).any(|window| window == mark.as_bytes())
    });
    let namespace = marked
        .and_then(Process::namespace)
        .context("the sandbox's processes are not to be seen")?;
    agents()
        .into_iter()
        .find(|agent| agent.namespace().as_ref() == Some(&namespace))
        .context("the sandbox has no first process")
}

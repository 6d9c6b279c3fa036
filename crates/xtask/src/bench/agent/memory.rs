//! Memory of an agent: idle, and with processes and clients that follow them.
//!
//! The pages of its program count as private to the only agent on a host, and as shared from the second one on, so an
//! idle agent is looked at alone and beside another.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use measure::client::Client;
use measure::process::{Command, ProcessEvent};
use measure::table;

use super::subject::{Subject, agent_of};
use crate::bench::host::{self, Memory, Process};

/// Number of processes of the large measurement, each with a client that follows it.
const PROCESSES: usize = 100;
/// Time after which background work of the agent has finished.
const SETTLE: Duration = Duration::from_secs(3);

/// Measures the memory of an agent that is idle, and of one with many processes. `before` are the agents that were
/// there before the sandbox.
pub(super) async fn measure(subject: &Subject, before: &[Process]) -> Result<String> {
    let (agent, alone) = fresh(subject, before).await?;
    let now = host::agents();
    let mut client = Client::new(subject.platform.clone());
    let second = Subject {
        platform: subject.platform.clone(),
        sandbox: client.create().await?.sandbox,
        server: subject.server,
    };
    let beside = fresh(&second, &now).await;
    client.delete(&second.sandbox.id).await?;
    let (_, beside) = beside?;
    let mut listeners = Vec::new();
    for _ in 0..PROCESSES {
        let mut client = Client::new(subject.platform.clone());
        let mut events = client
            .start(&subject.sandbox, &Command::new("/bin/sleep", &["3600"]))
            .await?;
        match events.next().await? {
            Some(ProcessEvent::Started) => listeners.push((client, events)),
            other => bail!("instead of a start came {other:?}"),
        }
    }
    tokio::time::sleep(SETTLE).await;
    let busy = agent.memory()?;
    drop(listeners);
    let others = match before.len() {
        0 => "alone on this host".to_owned(),
        others => format!("beside {others} others"),
    };
    let rows = [
        alone.row(&format!("agent, right after its start, {others}")),
        beside.row("agent, right after its start, beside one more"),
        busy.row(&format!("agent, {PROCESSES} processes with a listener each")),
    ];
    Ok(format!("\n{}", table::columns(&host::HEADER, rows)))
}

/// Finds the agent of a sandbox that was just created, and its memory before any request.
async fn fresh(subject: &Subject, before: &[Process]) -> Result<(Process, Memory)> {
    // Which of the new ones is ours, only a process in the sandbox tells, and after that the agent is not fresh.
    let fresh: Vec<_> = host::agents()
        .into_iter()
        .filter(|agent| !before.contains(agent))
        .filter_map(|agent| Some((agent, agent.memory().ok()?)))
        .collect();
    let agent = agent_of(subject).await?;
    let memory = fresh.into_iter().find(|(fresh, _)| *fresh == agent);
    memory.context("the agent was there before its sandbox")
}

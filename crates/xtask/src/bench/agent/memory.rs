//! What an agent costs the host: idle, and with processes that clients listen to.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use measure::client::Client;
use measure::process::{Command, Event};
use measure::table;

use super::Subject;
use super::host::{self, Process};

/// Processes, each with a client that listens.
const PROCESSES: usize = 100;
/// What the agent does by itself after a change is over by then.
const SETTLE: Duration = Duration::from_secs(3);

/// Measures. `before` are the agents that were there before the sandbox.
pub(super) async fn measure(subject: &Subject, before: &[Process]) -> Result<String> {
    // Which of the new ones is ours, only a process in the sandbox tells, and after that the agent is not fresh.
    let fresh: Vec<_> = host::agents()
        .into_iter()
        .filter(|agent| !before.contains(agent))
        .filter_map(|agent| Some((agent, agent.memory().ok()?)))
        .collect();
    let agent = host::agent_of(subject).await?;
    let (_, idle) = fresh
        .into_iter()
        .find(|(fresh, _)| *fresh == agent)
        .context("the agent was there before its sandbox")?;
    let mut listeners = Vec::new();
    for _ in 0..PROCESSES {
        let mut client = Client::new(subject.platform.clone());
        let mut events = client
            .start(&subject.sandbox, &Command::new("/bin/sleep", &["3600"]))
            .await?;
        match events.next().await? {
            Some(Event::Started) => listeners.push((client, events)),
            other => bail!("instead of a start came {other:?}"),
        }
    }
    tokio::time::sleep(SETTLE).await;
    let busy = agent.memory()?;
    drop(listeners);
    let rows = [
        idle.row("agent, right after its start"),
        busy.row(&format!("agent, {PROCESSES} processes with a listener each")),
    ];
    Ok(format!("\n{}", table::columns(&host::HEADER, rows)))
}

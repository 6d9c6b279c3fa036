//! Runs the start command of a template in a sandbox that no client knows yet, and waits until it is ready.

use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::agent::{Agent, AgentError, EndsWith, Output};
use crate::builds::recipe::StartCommand;

/// Delay between two attempts of the ready command: the shortest, and the longest. In between, it is a part of what was
/// waited for so far, which bounds both the attempts and how much later than necessary a sandbox is ready.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
const PAUSE_PART: u32 = 4;
/// How long a start command without a ready command may run before its sandbox counts as ready: as long as the build
/// has watched it.
const WATCHED: Duration = Duration::from_secs(20);

/// Whether anybody waits for the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waiting {
    /// A client waits: times of the template that are only waited for are left out, because they were for the build.
    Client,
    /// No client waits: such times are waited for, so that what the start command has begun is as far as in the build.
    Nobody,
}

/// A sink for output that is not used.
struct Ignored;

impl Output for Ignored {
    async fn take(&mut self, _: Bytes) -> io::Result<()> {
        Ok(())
    }
}

/// Whether a ready command only waits for a time.
fn only_waits(ready: &str) -> bool {
    let mut words = ready.split_whitespace();
    words.next() == Some("sleep") && words.next().is_some() && words.next().is_none()
}

/// Whether becoming ready takes as long with a client that waits as with nobody.
pub(crate) fn waits_as_long_for_a_client(start: &StartCommand) -> bool {
    start.ready.as_deref().is_some_and(|ready| !only_waits(ready))
}

/// Begins the start command, and returns once the sandbox is ready. The caller bounds the time.
///
/// # Errors
/// When the agent fails, or refuses a command.
pub(crate) async fn become_ready(agent: &Agent<'_>, start: &StartCommand, waiting: Waiting) -> Result<(), AgentError> {
    if let Some(command) = &start.command {
        agent.begin(&start.user, start.process(command)).await?;
    }
    let ready = match (start.ready.as_deref(), waiting) {
        (None, Waiting::Client) => return Ok(()),
        (None, Waiting::Nobody) => {
            tokio::time::sleep(WATCHED).await;
            return Ok(());
        }
        (Some(ready), Waiting::Client) if only_waits(ready) => return Ok(()),
        (Some(ready), _) => ready,
    };
    let attempt = async || {
        let ready = start.process(ready);
        agent.run(&start.user, ready, EndsWith::Exit, &mut Ignored).await
    };
    let begun = Instant::now();
    while attempt().await?.code != 0 {
        let pause = begun.elapsed() / PAUSE_PART;
        tokio::time::sleep(pause.clamp(SHORTEST_PAUSE, LONGEST_PAUSE)).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_commands_that_only_wait_are_recognized() {
        for ready in ["sleep 20", " sleep  1 "] {
            assert!(only_waits(ready), "{ready}");
        }
        for ready in ["", "sleep", "sleep 1; true", "curl localhost", "true"] {
            assert!(!only_waits(ready), "{ready}");
        }
    }
}

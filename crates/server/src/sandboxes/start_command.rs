//! The start command of a template: begun in each new sandbox, which is announced once its ready command has succeeded.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use protocol::node::Stage;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::create::CreateError;
use crate::agent::{Agent, AgentError, Output};
use crate::builds::recipe::StartCommand;

/// Delay between two attempts of the ready command: the first, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How long a sandbox may take to become ready: less than a create request may take, so that its client is told why.
const READY_S: u64 = 25;

/// Output that nobody reads.
struct Ignored;

impl Output for Ignored {
    async fn take(&mut self, _: Bytes) -> io::Result<()> {
        Ok(())
    }
}

impl StartCommand {
    /// Whether the ready command only waits for a time. That was for the build: a sandbox does not become ready by it.
    fn only_waits(ready: &str) -> bool {
        let mut words = ready.split_whitespace();
        words.next() == Some("sleep") && words.next().is_some() && words.next().is_none()
    }
}

impl Sandboxes {
    /// Begins the start command of a sandbox that no client knows yet, and waits until it is ready. On an error the
    /// sandbox is ended.
    pub(super) async fn run_start_command(
        self: &Arc<Self>,
        row: &SandboxRow,
        start: &StartCommand,
    ) -> Result<Stage, CreateError> {
        let clock = Instant::now();
        let ready = tokio::time::timeout(Duration::from_secs(READY_S), self.become_ready(row, start)).await;
        let error = match ready {
            Ok(Ok(())) => return Ok(Stage::new("start-command", clock.elapsed())),
            Ok(Err(error)) => CreateError::StartCommand(error),
            Err(_) => CreateError::NotReady { limit_s: READY_S },
        };
        self.discard(&row.id).await;
        Err(error)
    }

    async fn become_ready(&self, row: &SandboxRow, start: &StartCommand) -> Result<(), AgentError> {
        let agent = Agent {
            node: &self.node,
            id: &row.id,
            token: self.tokens.access_token(&row.id),
            work: &self.work,
        };
        if let Some(command) = &start.command {
            agent.begin(&start.user, start.process(command)).await?;
        }
        let Some(ready) = start.ready.as_deref().filter(|ready| !StartCommand::only_waits(ready)) else {
            return Ok(());
        };
        let mut pause = FIRST_PAUSE;
        while agent.run(&start.user, start.process(ready), &mut Ignored).await?.code != 0 {
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_commands_that_only_wait_are_recognized() {
        for ready in ["sleep 20", " sleep  1 "] {
            assert!(StartCommand::only_waits(ready), "{ready}");
        }
        for ready in ["", "sleep", "sleep 1; true", "curl localhost", "true"] {
            assert!(!StartCommand::only_waits(ready), "{ready}");
        }
    }
}

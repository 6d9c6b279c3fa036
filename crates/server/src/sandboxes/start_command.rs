//! The start command of a template: begun in each new sandbox, which is announced once its ready command has succeeded.

use std::sync::Arc;
use std::time::{Duration, Instant};

use protocol::node::Stage;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use super::create::CreateError;
use crate::builds::recipe::StartCommand;
use crate::nodes::ServedNode;
use crate::start_command::{Waiting, become_ready};

/// How long a sandbox may take to become ready: less than a create request may take, so that its client is told why.
const READY_S: u64 = 25;

impl Sandboxes {
    /// Begins the start command of a sandbox that no client knows yet, and waits until it is ready. On an error the
    /// sandbox is ended.
    pub(super) async fn run_start_command(
        self: &Arc<Self>,
        node: &Arc<ServedNode>,
        row: &SandboxRow,
        start: &StartCommand,
    ) -> Result<Stage, CreateError> {
        let clock = Instant::now();
        let agent = self.agent(node, &row.id);
        let ready = become_ready(&agent, start, Waiting::Client);
        let error = match tokio::time::timeout(Duration::from_secs(READY_S), ready).await {
            Ok(Ok(())) => return Ok(Stage::new("start-command", clock.elapsed())),
            Ok(Err(error)) => CreateError::StartCommand(error),
            Err(_) => CreateError::NotReady { limit_s: READY_S },
        };
        self.discard(node, &row.id).await;
        Err(error)
    }
}

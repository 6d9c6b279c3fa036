//! Connecting to a sandbox, and detecting its end.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use protocol::agent;
use protocol::node::{DialError, NodeApi, SandboxStream};
use tokio_util::sync::CancellationToken;

use super::route::Target;

/// Waits between attempts: a server that has just been started needs some time until it listens. Longer waits would slow
/// down programs that poll for a server. Refusals come directly from the network stack of the sandbox, so a new port is
/// visible immediately.
const RETRY_WAITS_MS: [u64; 2] = [25, 75];
/// Longest wait for one attempt; a full accept queue inside would otherwise hold the request for minutes.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait for the agent to accept a connection. A full accept queue means that the agent is running.
const LIFE_TIMEOUT: Duration = Duration::from_secs(1);

/// Connects to the target, retrying while the port is closed and the sandbox is running.
pub(super) async fn dial(
    node: &dyn NodeApi,
    target: &Target,
    ending: &CancellationToken,
) -> Result<SandboxStream, DialError> {
    let mut waits = RETRY_WAITS_MS.into_iter();
    loop {
        let attempt = tokio::select! {
            biased;
            () = ending.cancelled() => return Err(DialError::Gone),
            attempt = tokio::time::timeout(ATTEMPT_TIMEOUT, node.dial(&target.id, target.port)) => attempt,
        };
        match attempt.unwrap_or(Err(DialError::PortClosed)) {
            Ok(stream) => return Ok(stream),
            Err(error @ (DialError::Gone | DialError::Unreachable)) => return Err(error),
            Err(DialError::PortClosed) => {
                let wait_ms = waits.next().ok_or(DialError::PortClosed)?;
                tokio::select! {
                    biased;
                    () = ending.cancelled() => return Err(DialError::Gone),
                    () = tokio::time::sleep(Duration::from_millis(wait_ms)) => {}
                }
            }
        }
    }
}

/// Resolves to whether a sandbox is still running, see [`alive_check`]. Does nothing before it is polled.
pub(super) type AliveCheck = Pin<Box<dyn Future<Output = bool> + Send>>;

/// Checks whether the sandbox is still running, after one of its streams ended without an explicit end.
///
/// For a sandbox that exits by itself, the node reports the end only when all processes are gone, which is after the end
/// of its streams. But its agent is always first: the kernel kills the other processes because pid 1 is gone, and has
/// closed the port of the agent by then. So if the port of the agent is open after a stream has ended, the sandbox did
/// not cause that end.
pub(super) fn alive_check(node: Arc<dyn NodeApi>, id: SandboxId, ending: CancellationToken) -> AliveCheck {
    Box::pin(async move {
        tokio::select! {
            biased;
            () = ending.cancelled() => false,
            answer = tokio::time::timeout(LIFE_TIMEOUT, node.dial(&id, agent::PORT)) => !matches!(answer, Ok(Err(_))),
        }
    })
}

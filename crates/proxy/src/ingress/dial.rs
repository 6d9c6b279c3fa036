//! Opening a stream into a sandbox, and noticing that the sandbox ends.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use protocol::agent;
use protocol::node::{DialError, NodeApi, SandboxStream};
use tokio::sync::watch;

use super::route::Target;

/// Waits between attempts. A server that was just started inside needs a moment until it listens, and clients of the
/// platform count on this second.
const RETRY_WAITS_MS: [u64; 4] = [100, 200, 300, 400];
/// Longest wait for one attempt; a full accept queue inside would otherwise hold the request for minutes.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait for the agent to take a connection. What keeps it waiting is a queue, and only somebody alive has one.
const LIFE_TIMEOUT: Duration = Duration::from_secs(1);

/// Opens a stream to the target, trying again while the port is closed and the sandbox lives.
pub(super) async fn dial(
    node: &dyn NodeApi,
    target: &Target,
    ending: &mut watch::Receiver<bool>,
) -> Result<SandboxStream, DialError> {
    let mut waits = RETRY_WAITS_MS.into_iter();
    loop {
        let attempt = tokio::select! {
            biased;
            () = ended(ending) => return Err(DialError::Gone),
            attempt = tokio::time::timeout(ATTEMPT_TIMEOUT, node.dial(&target.id, target.port)) => attempt,
        };
        match attempt.unwrap_or(Err(DialError::PortClosed)) {
            Ok(stream) => {
                // Small writes of an interactive session must not wait for an acknowledgement.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Err(DialError::Gone) => return Err(DialError::Gone),
            Err(DialError::PortClosed) => {
                let wait_ms = waits.next().ok_or(DialError::PortClosed)?;
                tokio::select! {
                    biased;
                    () = ended(ending) => return Err(DialError::Gone),
                    () = tokio::time::sleep(Duration::from_millis(wait_ms)) => {}
                }
            }
        }
    }
}

/// Returns once the sandbox begins to end. A watch that nobody feeds any more belongs to one that has ended.
pub(super) async fn ended(ending: &mut watch::Receiver<bool>) {
    let _ = ending.wait_for(|ending| *ending).await;
}

/// Whether the sandbox has begun to end.
pub(super) fn has_ended(ending: &watch::Receiver<bool>) -> bool {
    *ending.borrow() || ending.has_changed().is_err()
}

/// Whether a sandbox still lives, see [`lives`]. Nothing is asked before it is polled.
pub(super) type Lives = Pin<Box<dyn Future<Output = bool> + Send>>;

/// Asks whether the sandbox still lived at this moment, for a stream out of it that has just ended without saying so.
///
/// A sandbox that dies by itself begins to end for the node only when all its processes are gone, so its streams end
/// before that. But its agent is the first to go: the kernel kills the others because their pid 1 is gone, and by then
/// has closed the port on which that listened. So whoever finds the agent's port open after the end of another stream
/// knows that this was not the sandbox's.
pub(super) fn lives(node: Arc<dyn NodeApi>, id: SandboxId, mut ending: watch::Receiver<bool>) -> Lives {
    Box::pin(async move {
        tokio::select! {
            biased;
            () = ended(&mut ending) => false,
            answer = tokio::time::timeout(LIFE_TIMEOUT, node.dial(&id, agent::PORT)) => !matches!(answer, Ok(Err(_))),
        }
    })
}

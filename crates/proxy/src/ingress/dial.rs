//! Connecting to a sandbox, and detecting its end.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use protocol::agent;
use protocol::node::{DialError, NodeApi, NodeFuture, SandboxStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_util::sync::CancellationToken;

use super::route::Target;

/// Waits between attempts: a server that has just been started needs some time until it listens. Longer waits would slow
/// down programs that poll for a server. Refusals come directly from the network stack of the sandbox, so a new port is
/// visible immediately.
const RETRY_WAITS_MS: [u64; 2] = [25, 75];
/// Longest wait for one attempt; a full accept queue inside would otherwise hold the request for minutes.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest wait for an answer of the agent. An agent that is too busy to answer is running.
const LIFE_TIMEOUT: Duration = Duration::from_secs(1);
/// The smallest request that the agent answers without credentials.
const HEALTH_REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// What connects to ports of sandboxes: their node, or what reaches the server that has it.
pub trait Dial: Send + Sync {
    /// Connects to a port of a sandbox.
    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>>;

    /// Whether streams end only if what is in the sandbox has ended them, and are cut if the sandbox has ended.
    fn has_certain_ends(&self) -> bool {
        false
    }
}

/// A node.
pub(super) struct OfNode(pub(super) Arc<dyn NodeApi>);

impl Dial for OfNode {
    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        self.0.dial(id, port)
    }
}

/// Connects to the target, retrying while the port is closed and the sandbox is running.
pub(super) async fn dial(
    node: &dyn Dial,
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
/// of its streams. Its agent is pid 1, and the kernel kills the other processes once every thread of pid 1 is exiting, so
/// an agent that answers a request after a stream has ended was running when it ended. That its port is open proves
/// nothing: an exiting thread still holds the port until it has released its memory, which can take longer than the end
/// of a small server beside it.
pub(super) fn alive_check(node: Arc<dyn Dial>, id: SandboxId, ending: CancellationToken) -> AliveCheck {
    Box::pin(async move {
        if node.has_certain_ends() {
            return !ending.is_cancelled();
        }
        tokio::select! {
            biased;
            () = ending.cancelled() => false,
            answered = tokio::time::timeout(LIFE_TIMEOUT, agent_answers(&*node, &id)) => answered.unwrap_or(true),
        }
    })
}

/// Whether the agent sends at least one byte in response to a health request; an agent that exits closes the connection.
async fn agent_answers(node: &dyn Dial, id: &SandboxId) -> bool {
    let Ok(mut agent) = node.dial(id, agent::PORT).await else {
        return false;
    };
    if agent.write_all(HEALTH_REQUEST).await.is_err() {
        return false;
    }
    agent.read_u8().await.is_ok()
}

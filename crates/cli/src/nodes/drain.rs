//! `ringfence node drain` and `undrain`: a node gets no new sandboxes, so that its host can be restarted.
//!
//! The server keeps the drain; what waits is the command, which can be ended and started again at any time.

use std::time::Duration;

use anyhow::{Result, bail};
use bytes::Bytes;
use http::Method;
use http_body_util::Full;
use server::operator::{OperatorLeft, OperatorNode, OperatorNodeChange, OperatorNodeStatus, OperatorPaused};
use tokio::time::Instant;

use crate::data_dir::DataDir;
use crate::operator::{ask, decode, exchange, read};
use crate::output;

/// Pause between two looks at what is left.
const LOOK: Duration = Duration::from_secs(1);

/// How long a drain is waited for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Until {
    /// The node gets no new sandboxes.
    Begun,
    /// Nothing is left that a restart of its host would end.
    Empty,
    /// As [`Self::Empty`], or as much time has passed: what is left is paused then.
    Left(Duration),
}

/// Drains a node.
pub(super) async fn drain(dir: &DataDir, id: &str, until: Until) -> Result<()> {
    let node = change(dir, id, OperatorNodeStatus::Draining).await?;
    output::line(&format!("node {id} drains: no new sandboxes come to it"))?;
    let left = describe(node.left.unwrap_or_default());
    match until {
        Until::Begun => {
            output::line(&format!("left there: {left}"))?;
            output::line(&format!("see what is left with: ringfence node show {id}"))
        }
        Until::Empty => {
            output::line(&format!("left there: {left}; waiting until nothing runs"))?;
            wait(dir, node, None).await?;
            empty()
        }
        Until::Left(within) => {
            let seconds = within.as_secs();
            output::line(&format!("left there: {left}; waiting {seconds} s at most"))?;
            if !wait(dir, node, Some(Instant::now() + within)).await? {
                pause(dir, id).await?;
            }
            empty()
        }
    }
}

/// Ends the drain of a node.
pub(super) async fn undrain(dir: &DataDir, id: &str) -> Result<()> {
    change(dir, id, OperatorNodeStatus::Ready).await?;
    output::line(&format!("node {id} does not drain: new sandboxes come to it"))
}

/// What is left on a node.
pub(super) fn describe(left: OperatorLeft) -> String {
    let OperatorLeft {
        running,
        paused_in_memory,
        paused_on_disk,
    } = left;
    format!("{running} running, {paused_in_memory} paused in memory, {paused_on_disk} paused on disk")
}

fn empty() -> Result<()> {
    output::line("nothing is left that a restart of the host would end")
}

/// Waits until a node has nothing left that a restart of its host would end. `false` when it has some at the end of the time.
async fn wait(dir: &DataDir, mut node: OperatorNode, end: Option<Instant>) -> Result<bool> {
    loop {
        if node.draining_at.is_none() {
            bail!(
                "node {} does not drain any more: its drain was ended, or the node was forgotten",
                node.id
            );
        }
        if node.ending_with_host() == 0 {
            return Ok(true);
        }
        let next = Instant::now() + LOOK;
        match end {
            Some(end) if end <= Instant::now() => return Ok(false),
            end => tokio::time::sleep_until(end.map_or(next, |end| end.min(next))).await,
        }
        node = ask(dir, Method::GET, &format!("/nodes/{}", node.id)).await?;
    }
}

/// Pauses what is left on a node.
async fn pause(dir: &DataDir, id: &str) -> Result<()> {
    let OperatorPaused { paused, failed } = ask(dir, Method::POST, &format!("/nodes/{id}/pause")).await?;
    output::line(&format!("paused {paused} on disk"))?;
    if failed > 0 {
        bail!("{failed} could not be paused and would end with the host: the log of the server says why");
    }
    let node: OperatorNode = ask(dir, Method::GET, &format!("/nodes/{id}")).await?;
    let left = node.ending_with_host();
    if left > 0 {
        bail!("{left} run there nevertheless, as sandboxes that were resumed meanwhile, or steps of builds: try again");
    }
    Ok(())
}

async fn change(dir: &DataDir, id: &str, status: OperatorNodeStatus) -> Result<OperatorNode> {
    let body = serde_json::to_vec(&OperatorNodeChange { status })?;
    let path = format!("/nodes/{id}");
    let answer = exchange(dir, Method::POST, &path, Full::new(Bytes::from(body)), read).await?;
    decode(&answer)
}

//! What the parts of a node note about the deadlines of their sandboxes. Nothing, where the node keeps none.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use model::id::SandboxId;
use protocol::node::{NodeDeadline, NodeError};

use crate::deadlines::Deadlines;
use crate::shared::Shared;
use crate::work::{blocking, failed};

/// Notes the deadline of a sandbox that has just been started or resumed; without one, there is none any more.
pub(crate) async fn note(shared: &Shared, id: &SandboxId, deadline: Option<NodeDeadline>) {
    let changed = change(shared, id, move |deadlines, id| match deadline {
        Some(deadline) => deadlines.set(id, deadline),
        None => {
            deadlines.forget(id);
            true
        }
    });
    if !changed.await {
        tracing::error!(sandbox.id = %id, "a sandbox was started that is being ended or paused at its deadline");
    }
}

/// Changes the deadline of a sandbox that runs.
pub(crate) async fn set(shared: &Shared, id: &SandboxId, deadline: NodeDeadline) -> Result<(), NodeError> {
    let handle = shared.find(id).filter(|handle| !handle.is_ending());
    let runs = handle.is_some_and(|handle| handle.condition().runs_or_is_copied());
    if runs && change(shared, id, move |deadlines, id| deadlines.set(id, deadline)).await {
        return Ok(());
    }
    Err(NodeError::NotFound(id.clone()))
}

/// Forgets the deadline of a sandbox that does not run any more. What the node has done by itself is known nevertheless.
pub(crate) async fn ended(shared: &Shared, id: &SandboxId) {
    change(shared, id, |deadlines, id| {
        deadlines.ended(id);
        true
    })
    .await;
}

/// Forgets what is noted of a sandbox, for which a server has asked for something else.
pub(crate) async fn forget(shared: &Shared, id: &SandboxId) {
    change(shared, id, |deadlines, id| {
        deadlines.forget(id);
        true
    })
    .await;
}

/// Forgets that these were ended or paused by the node itself.
pub(crate) async fn forget_all(shared: &Shared, ids: Vec<SandboxId>) -> Result<(), NodeError> {
    let Some(deadlines) = shared.deadlines.get() else {
        return Ok(());
    };
    let deadlines = Arc::clone(deadlines);
    blocking(move || deadlines.forget_acted(&ids)).await.map_err(failed)
}

/// Has the deadlines be those of what a server has just taken over, which also keeps those of `paused`.
pub(crate) async fn take_over(
    shared: &Shared,
    deadlines: HashMap<SandboxId, NodeDeadline>,
    paused: HashSet<SandboxId>,
) -> Result<(), NodeError> {
    let Some(kept) = shared.deadlines.get() else {
        return Ok(());
    };
    let kept = Arc::clone(kept);
    blocking(move || kept.take_over(&deadlines, &paused))
        .await
        .map_err(failed)
}

/// Changes a note on disk, where the node keeps deadlines; `true` otherwise.
async fn change(
    shared: &Shared,
    id: &SandboxId,
    change: impl FnOnce(&Deadlines, &SandboxId) -> bool + Send + 'static,
) -> bool {
    let Some(deadlines) = shared.deadlines.get() else {
        return true;
    };
    let (deadlines, of) = (Arc::clone(deadlines), id.clone());
    match blocking(move || change(&deadlines, &of)).await {
        Ok(is_changed) => is_changed,
        Err(error) => {
            tracing::error!(sandbox.id = %id, "cannot note the deadline of a sandbox: {error}");
            false
        }
    }
}

//! Sandboxes that are started in advance: frozen until a client gets them.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use protocol::node::{ClaimSandbox, Failure, FrozenSandbox, NodeError, Stage, StartedSandbox};

use crate::control::AGENT_TIMEOUT;
use crate::handle::SandboxHandle;
use crate::noted;
use crate::shared::Shared;
use crate::start::init_of;
use crate::supervisor::connect_control;
use crate::work::{blocking, failed};

/// Freezes a sandbox, once the events of its agent are followed: a frozen agent could not be asked for them.
pub(crate) async fn freeze(shared: &Shared, handle: Arc<SandboxHandle>) -> Result<FrozenSandbox, NodeError> {
    tokio::select! {
        biased;
        () = handle.condition().until_ending() => return Err(NodeError::NotFound(handle.id().clone())),
        followed = tokio::time::timeout(AGENT_TIMEOUT, handle.condition().until_followed()) => {
            followed.map_err(|_| NodeError::failed("the agent does not report events"))?;
        }
    }
    let freezes = shared.driver.capabilities().freeze;
    if freezes {
        handle.condition().freeze();
    }
    let frozen = blocking(move || {
        if freezes && let Err(error) = handle.sandbox().freeze() {
            handle.condition().go_on();
            return Err(error);
        }
        match handle.sandbox().usage() {
            Ok(usage) => Ok(FrozenSandbox {
                memory_bytes: usage.memory_used_bytes,
            }),
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(FrozenSandbox { memory_bytes: 0 }),
            Err(error) => Err(error),
        }
    });
    frozen.await.map_err(failed)?.map_err(failed)
}

/// Gives a frozen sandbox its identity, and then its network.
pub(crate) async fn claim(
    shared: &Shared,
    handle: &Arc<SandboxHandle>,
    request: ClaimSandbox,
) -> Result<StartedSandbox, NodeError> {
    let begun = Instant::now();
    let ClaimSandbox {
        id,
        init,
        egress,
        deadline,
    } = request;
    let claimed = async {
        if shared.driver.capabilities().freeze {
            // One write to a file of the kernel.
            handle.sandbox().thaw()?;
            if !handle.condition().go_on() {
                return Err(io::Error::other("the sandbox is not frozen"));
            }
        }
        let mut control = connect_control(handle).await?;
        let version = if handle.trusts(&egress) {
            control.init(&init).await?
        } else {
            control.init(&*init_of(shared, &init, &egress)?).await?
        };
        io::Result::Ok(version)
    };
    let claimed = tokio::select! {
        biased;
        () = handle.condition().until_ending() => return Err(NodeError::NotFound(id)),
        claimed = claimed => claimed,
    };
    let agent_version =
        claimed.map_err(|error| NodeError::Failed(Failure::during("the agent did not respond", &error)))?;
    // Last: nothing is open for a sandbox that has not got its identity.
    handle.set_egress(egress);
    noted::note(shared, &id, deadline).await;
    Ok(StartedSandbox {
        is_restored: false,
        agent_version,
        stages: vec![Stage::new("claim", begun.elapsed())],
    })
}

//! Forks of the fake node.

use std::sync::atomic::Ordering;

use protocol::node::{ForkSandbox, NodeError, StartedSandbox};

use super::{FakeNode, SECRET};

impl FakeNode {
    pub(super) async fn fork_all(
        &self,
        request: ForkSandbox,
    ) -> Result<Vec<Result<StartedSandbox, NodeError>>, NodeError> {
        let behaviour = *self.fork.lock();
        self.behave(behaviour).await?;
        if !self.running.lock().contains(&request.id) || self.paused.lock().contains(&request.id) {
            return Err(NodeError::NotFound(request.id));
        }
        let most = self.forks_started.load(Ordering::SeqCst);
        let fails = *self.forks_fail.lock();
        let failed = self
            .behave(fails)
            .await
            .err()
            .unwrap_or_else(|| NodeError::failed(SECRET));
        let started = request.children.iter().enumerate().map(|(index, child)| {
            if index >= most {
                return Err(failed.clone());
            }
            let _begun = self.begin(&child.id)?;
            self.running.lock().insert(child.id.clone());
            self.egress.lock().insert(child.id.clone(), child.egress.clone());
            Ok(StartedSandbox {
                is_restored: false,
                agent_version: self.agent_version.lock().clone(),
                stages: Vec::new(),
            })
        });
        let started = started.collect();
        self.forked.lock().push(request);
        Ok(started)
    }
}

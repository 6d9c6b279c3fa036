//! Starting a sandbox anew of which only the disk is kept: what its processes need, and the start command of its template.
//!
//! Like a computer after a power cut, it has its files and none of its programs. What it was created with is the same: its
//! id and tokens, its environment, default user and working directory, its policy and its certificate authority. The start
//! command of its template runs as in every new sandbox. The sandbox may have changed what that needs, so a failure does
//! not fail the resume: nobody could reach the sandbox again to repair it.

use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::sandbox::EnvVars;
use protocol::node::{Boot, Stage};
use store::error::StoreError;
use store::keys::SealedSecret;
use store::sandboxes::SandboxRow;

use super::Sandboxes;
use crate::builds::recipe::{BuildSpec, StartCommand};
use crate::chain::Chain;
use crate::nodes::ServedNode;
use crate::records::LifecycleEvent;
use crate::seal::SealError;
use crate::start_command::{Waiting, become_ready};

/// How long the start command may take until the sandbox is ready, as for a new one.
const READY: Duration = Duration::from_secs(25);

/// How a sandbox is started anew.
#[derive(Debug)]
pub(super) struct Restart {
    pub(super) boot: Boot,
    start: Option<StartCommand>,
}

fn owner(id: &SandboxId) -> String {
    format!("sandbox-environment/{id}")
}

impl Sandboxes {
    /// The column of the environment of a new sandbox; none without one.
    pub(super) fn seal_environment(
        &self,
        id: &SandboxId,
        environment: &EnvVars,
    ) -> Result<Option<SealedSecret>, SealError> {
        let variables = environment.clone().into_map();
        if variables.is_empty() {
            return Ok(None);
        }
        let text = serde_json::to_string(&variables).map_err(|_| SealError::Corrupt)?;
        let sealed = self.policies.sealer.seal(&owner(id), &text)?;
        Ok(Some(SealedSecret::new(sealed)))
    }

    /// The environment that a sandbox was created with. One that cannot be read is empty.
    pub(super) async fn environment_of(&self, id: &SandboxId) -> Result<EnvVars, StoreError> {
        let Some(sealed) = self.store().sandbox_environment(id).await? else {
            return Ok(EnvVars::default());
        };
        let read = match self.policies.sealer.open(&owner(id), sealed.as_str()) {
            Ok(text) => serde_json::from_str(&text).ok().and_then(EnvVars::new),
            Err(_) => None,
        };
        if read.is_none() {
            tracing::error!(sandbox.id = %id, "invalid environment of a sandbox, it gets none");
        }
        Ok(read.unwrap_or_default())
    }

    /// How the sandbox of a row is started anew.
    pub(super) async fn restart_of(&self, row: &SandboxRow) -> Result<Restart, StoreError> {
        let environment = self.environment_of(&row.id).await?;
        // Builds stay as long as sandboxes have been started from them, also those of deleted templates.
        let build = self.store().build_by_id(&row.template_id, &row.build_id).await?;
        let spec = build.as_ref().and_then(BuildSpec::of).unwrap_or_else(BuildSpec::base);
        let mut resources = self.defaults.resources;
        resources.cpu_count = row.cpu_count;
        resources.memory_mb = row.memory_mb;
        resources.disk_mb = row.disk_mb;
        Ok(Restart {
            boot: Boot {
                template: row.template_id.clone(),
                resources,
                init: self.init_of(row, &spec, environment),
                owner: Some(row.team_id.to_string()),
            },
            start: spec.start,
        })
    }

    /// Runs the start command in a sandbox that was started anew, and waits until it is ready.
    pub(super) async fn run_again(&self, node: &ServedNode, id: &SandboxId, restart: &Restart) -> Option<Stage> {
        let start = restart.start.as_ref()?;
        let clock = Instant::now();
        let agent = self.agent(node, id);
        let failed = match tokio::time::timeout(READY, become_ready(&agent, start, Waiting::Client)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => {
                tracing::warn!(sandbox.id = %id, error = %Chain(&error), "the start command of a resumed sandbox");
                Some("the start command could not be run")
            }
            Err(_) => Some("the ready command did not succeed in time"),
        };
        if let Some(why) = failed {
            self.tracked.log(id, &LifecycleEvent::NotReady(why));
        }
        Some(Stage::new("start-command", clock.elapsed()))
    }
}

//! Making a sandbox: row first, then the node, then memory.
//!
//! It runs on a task of its own, so that a client that hangs up changes nothing, and within a bound: one that takes too
//! long is ended when it comes, because its client was told that there is none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use model::id::{SandboxId, TeamId, UserId};
use model::lifecycle::Transition;
use model::sandbox::{EnvVars, SandboxSpec};
use protocol::agent::{self, Init};
use protocol::node::{Image, NodeError, Stage, StartSandbox};
use secrecy::ExposeSecret;
use store::Change;
use store::error::StoreError;
use store::sandboxes::{NewSandbox, SandboxRow};

use super::Sandboxes;
use super::idempotency::KeyClaim;
use crate::admission::Admission;
use crate::clock::{SECOND_US, rfc3339};
use crate::outcome::CreateOutcome;
use crate::records::LifecycleEvent;

/// User that runs commands and owns files when a request names none.
const DEFAULT_USER: &str = "user";
/// How long a sandbox may take to start. With the time that a body may take to arrive, it ends well before the bound on
/// answering a request.
const CREATE_BOUND: Duration = Duration::from_secs(30);

/// A sandbox to create, for which there is room.
#[derive(Debug)]
pub(crate) struct CreateRequest {
    /// Its id to be.
    pub(crate) id: SandboxId,
    /// The owning team.
    pub(crate) team: TeamId,
    /// The user that asks.
    pub(crate) user: UserId,
    /// What it is to be.
    pub(crate) spec: SandboxSpec,
    /// What it takes of its team's limits and of the host.
    pub(crate) admission: Admission,
    /// The idempotency key of the request, if it had one.
    pub(crate) claim: Option<Box<KeyClaim>>,
}

/// A sandbox that runs.
#[derive(Debug)]
pub(crate) struct Created {
    /// Its row.
    pub(crate) row: SandboxRow,
    /// How long each stage took, in order.
    pub(crate) stages: Vec<Stage>,
}

/// Why a sandbox could not be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Node(NodeError),
    #[error("{why}")]
    NoCapacity {
        why: String,
        /// Seconds until there may be.
        retry_after_s: u32,
    },
    #[error("it did not start in time")]
    TimedOut,
    #[error("it ended while it was being started")]
    Died,
    #[error("the task panicked or was cancelled")]
    TaskFailed,
}

impl Sandboxes {
    /// Starts a sandbox and returns once its agent answered. One that takes too long is ended when it comes, because its
    /// client is told that there is none.
    pub(crate) async fn create(self: &Arc<Self>, create: CreateRequest) -> Result<Created, CreateError> {
        let id = create.id.clone();
        let sandboxes = Arc::clone(self);
        // Set by whoever decides first: the task that there is a sandbox, or the time that there is none.
        let decided = Arc::new(AtomicBool::new(false));
        let mut task = self.work.spawn({
            let decided = Arc::clone(&decided);
            async move { Box::pin(sandboxes.create_claimed(create, &decided)).await }
        });
        let result = match tokio::time::timeout(CREATE_BOUND, &mut task).await {
            Ok(result) => result,
            Err(_) if decided.swap(true, Ordering::AcqRel) => task.await,
            Err(_) => {
                let sandboxes = Arc::clone(self);
                self.work.spawn(async move {
                    if task.await.is_err() {
                        sandboxes.discard(&id).await;
                    }
                });
                return Err(CreateError::TimedOut);
            }
        };
        match result {
            Ok(result) => result,
            Err(_) => {
                self.metrics.create(CreateOutcome::Failed);
                // It panicked somewhere in between; what it left is removed like any failed start.
                let sandboxes = Arc::clone(self);
                self.work.spawn(async move { sandboxes.discard(&id).await });
                Err(CreateError::TaskFailed)
            }
        }
    }

    /// Creates, and says so to the key of the request before anyone else is told.
    async fn create_claimed(
        self: &Arc<Self>,
        mut create: CreateRequest,
        decided: &AtomicBool,
    ) -> Result<Created, CreateError> {
        let claim = create.claim.take();
        let mut result = self.create_on_task(create).await;
        if let Ok(created) = &result
            && decided.swap(true, Ordering::AcqRel)
        {
            if let Some(entry) = self.registry.get(&created.row.id) {
                self.stop(&entry).await;
            }
            result = Err(CreateError::TimedOut);
        }
        self.metrics.create(match &result {
            Ok(_) => CreateOutcome::Created,
            Err(CreateError::NoCapacity { .. }) => CreateOutcome::NoCapacity,
            Err(_) => CreateOutcome::Failed,
        });
        match (claim, &result) {
            (Some(claim), Ok(created)) => claim.complete(created.row.clone()).await,
            (Some(claim), Err(_)) => claim.abandon().await,
            (None, _) => {}
        }
        result
    }

    async fn create_on_task(self: &Arc<Self>, create: CreateRequest) -> Result<Created, CreateError> {
        let CreateRequest {
            id,
            team,
            user,
            mut spec,
            admission,
            claim: _,
        } = create;
        let (timeout_s, env_vars) = (spec.timeout_s, std::mem::take(&mut spec.env_vars));
        let row = self.row_of(id, team, user, spec);
        let clock = Instant::now();
        let row = self.rows.sandbox_insert(row).await?;
        let mut store_time = clock.elapsed();
        let entry = self.register(&row, admission);

        let started = match self.node.start(self.start_request(&row, env_vars)).await {
            Ok(started) => started,
            Err(error) => {
                if matches!(error, NodeError::Unreachable(_)) {
                    // It may have started all the same.
                    self.discard(&row.id).await;
                } else {
                    self.forget(&row.id).await;
                }
                return Err(match error {
                    NodeError::Capacity(why) => CreateError::NoCapacity {
                        why,
                        retry_after_s: self.deadlines.capacity_retry_s(&self.clock),
                    },
                    NodeError::NotFound(_) | NodeError::Failed(_) | NodeError::Unreachable(_) => {
                        CreateError::Node(error)
                    }
                });
            }
        };

        // Start-up does not eat lifetime, so the times are taken now.
        let now_us = self.clock.now_us();
        let end_us = (now_us + i64::from(timeout_s) * SECOND_US).min(row.max_end_us);
        let version = known_version(&started.agent_version);
        let clock = Instant::now();
        let change = self
            .rows
            .sandbox_started(&row.id, row.version, now_us, end_us, version)
            .await;
        store_time += clock.elapsed();
        let row = match change {
            Ok(Change::Applied(row)) => row,
            Ok(Change::Stale | Change::Missing) => {
                self.discard(&row.id).await;
                return Err(CreateError::Died);
            }
            Err(error) => {
                self.discard(&row.id).await;
                return Err(error.into());
            }
        };
        entry.update(row.version, row.end_us);
        if !entry.apply(Transition::Started) {
            self.discard(&row.id).await;
            return Err(CreateError::Died);
        }
        self.deadlines.set(&row.id, row.end_us);
        self.records.start_sampling(&row);
        self.records.log_event(&row.id, &LifecycleEvent::Created(&row));
        let mut stages = vec![Stage::new("store", store_time)];
        stages.extend(started.stages);
        Ok(Created { row, stages })
    }

    fn row_of(&self, id: SandboxId, team: TeamId, user: UserId, spec: SandboxSpec) -> NewSandbox {
        let now_us = self.clock.now_us();
        NewSandbox {
            id,
            team_id: team,
            user_id: user,
            template_id: spec.template,
            build_id: spec.build,
            alias: spec.alias,
            execution_id: uuid::Uuid::new_v4().to_string(),
            end_us: now_us + i64::from(spec.timeout_s) * SECOND_US,
            max_end_us: now_us + i64::from(spec.max_lifetime_s) * SECOND_US,
            cpu_count: spec.cpu_count,
            memory_mb: spec.memory_mb,
            disk_mb: spec.disk_mb,
            agent_version: spec.agent_version,
            metadata: spec.metadata,
            secure: spec.secure || self.defaults.always_secure,
            allow_public_traffic: spec.network.is_none_or(|network| network.allow_public_traffic),
            allow_internet_access: spec.allow_internet_access,
            network_json: spec
                .network
                .map(|network| serde_json::to_string(&network).expect("flags are always JSON")),
            lifecycle_json: None,
            created_us: now_us,
        }
    }

    fn start_request(&self, row: &SandboxRow, env_vars: EnvVars) -> StartSandbox {
        let token = self.tokens.access_token(&row.id);
        let mut resources = self.defaults.resources;
        resources.cpu_count = row.cpu_count;
        resources.memory_mb = row.memory_mb;
        resources.disk_mb = row.disk_mb;
        StartSandbox {
            id: row.id.clone(),
            template: row.template_id.clone(),
            image: Image::Base,
            resources,
            init: Init {
                env_vars: Some(env_vars.into_map()),
                access_token: Some(token.expose_secret().to_owned()),
                timestamp: Some(rfc3339(self.clock.now_us())),
                default_user: Some(DEFAULT_USER.to_owned()),
                default_workdir: None,
                sandbox_id: Some(row.id.as_str().to_owned()),
                template_id: Some(row.template_id.as_str().to_owned()),
                ca_bundle: None,
                open_to_anonymous: !row.secure,
                cpu_count: Some(row.cpu_count),
                memory_mb: Some(row.memory_mb),
            },
        }
    }
}

/// The version to report for an agent. What comes from inside a sandbox is not repeated unless it is a plain version,
/// because SDKs parse it and break on anything else.
fn known_version(reported: &str) -> &str {
    match agent::is_version(reported) {
        true => reported,
        false => agent::VERSION,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_valid_agent_versions_are_reported() {
        for (reported, want) in [
            ("0.6.13", "0.6.13"),
            ("1.2.3", "1.2.3"),
            ("", agent::VERSION),
            ("0.6", agent::VERSION),
            ("0.6.x", agent::VERSION),
            ("0..1", agent::VERSION),
            ("0.6.13\0", agent::VERSION),
        ] {
            assert_eq!(known_version(reported), want);
        }
    }
}

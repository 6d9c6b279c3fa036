//! The policy of create requests: what a team may create, and what its sandbox takes of the limits, the pool and the host.
//!
//! A front reads a request, in whatever form, and hands it over as a [`SandboxRequest`]; nothing here depends on HTTP. The
//! order of the checks is part of the contract with clients: the template, the timeout, then the rest. Only when all of
//! them have passed is anything of a sandbox created, by [`Sandboxes::create`].

pub(crate) mod error;
pub(crate) mod repositories;
pub(crate) mod settings;

use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::{SandboxId, TeamId, UserId};
use protocol::node::{NodeError, Stage};
use store::builds::BuildRow;

use self::error::CreationError;
use self::settings::SandboxSettings;
use crate::admission::quota::{Reservation, ResourceUse, TeamQuota};
use crate::admission::rate::{Level, RateSlot};
use crate::admission::{Admission, AdmissionError};
use crate::builds::recipe::BuildSpec;
use crate::ids::new_sandbox_id;
use crate::injections::SandboxInjections;
use crate::nodes::placement::Sent;
use crate::nodes::{ADMISSION_BOUND, Needs, ServedNode};
use crate::outcome::CreateOutcome;
use crate::pool::{Asked, PoolKey, Taken};
use crate::repositories::RepositoryRequest;
use crate::sandboxes::Sandboxes;
use crate::sandboxes::create::{CreateError, CreateRequest, Created};
use crate::sandboxes::idempotency::{Claimed, Claims, IdempotencyKey, KeyedRequest, StoredSandbox};
use crate::templates::TemplateName;

/// The shortest lifetime that a request can ask for, in seconds.
const LIFETIME_MIN_S: u32 = 1;

/// The client on whose behalf sandboxes are created.
#[derive(Debug, Clone)]
pub(crate) struct Creator {
    /// The team that owns the sandboxes.
    pub(crate) team: TeamId,
    /// The user that sent the request.
    pub(crate) user: UserId,
    /// What the team may use.
    pub(crate) quota: Arc<TeamQuota>,
    /// Gets the level of the rate limit, for the answer to the client.
    pub(crate) rate: RateSlot,
}

impl Creator {
    /// Counts a sandbox against the rate limit of the team.
    ///
    /// # Errors
    /// When the limit is reached.
    pub(crate) fn count(&self, now_us: i64) -> Result<(), Level> {
        let creates = self.quota.creates.as_ref();
        creates.map_or(Ok(()), |creates| self.rate.take(creates, now_us))
    }
}

/// A request for a sandbox, in which nothing is checked but its form.
pub(crate) struct SandboxRequest {
    /// The template from which the sandbox is created.
    pub(crate) template: TemplateName,
    /// Seconds until the deadline of the sandbox, counted from when it runs.
    pub(crate) timeout_s: u32,
    /// All else, or what is wrong with it: the client is told that only if the template and the timeout are right.
    pub(crate) settings: Result<SandboxSettings, String>,
    /// The key of a request that may be repeated.
    pub(crate) key: Option<RequestKey>,
    /// How long it took to authenticate the client.
    pub(crate) auth_time: Duration,
    /// When the front began with the request.
    pub(crate) begun: Instant,
}

/// An idempotency key, and the request that it stands for.
pub(crate) struct RequestKey {
    /// The key.
    pub(crate) key: IdempotencyKey,
    /// The operation: the same text means something else to another one, so a key cannot be reused there.
    pub(crate) operation: &'static str,
    /// The request in a canonical form. Only a digest of it is stored.
    pub(crate) canonical: String,
}

/// The sandbox of a request that succeeded.
#[derive(Debug)]
pub(crate) enum Creation {
    /// The sandbox was created.
    Created(Box<Created>),
    /// The request repeats one that was answered before, with this sandbox.
    Repeated(StoredSandbox),
}

/// A request that was accepted.
enum Accepted {
    New(Box<CreateRequest>),
    Repeated(StoredSandbox),
}

/// Creates sandboxes for clients.
#[derive(Debug, Clone)]
pub(crate) struct SandboxCreation {
    pub(crate) sandboxes: Arc<Sandboxes>,
    /// Idempotency keys.
    pub(crate) claims: Arc<Claims>,
}

impl SandboxCreation {
    /// Creates a sandbox, unless the same request was answered before, and counts the outcome.
    pub(crate) async fn create(&self, creator: &Creator, request: SandboxRequest) -> Result<Creation, CreationError> {
        let metrics = &self.sandboxes.tracked.metrics;
        let (begun, auth_time) = (request.begun, request.auth_time);
        let create = match self.accept(creator, request).await {
            Ok(Accepted::New(create)) => *create,
            Ok(Accepted::Repeated(stored)) => {
                metrics.create(CreateOutcome::Repeated);
                return Ok(Creation::Repeated(stored));
            }
            Err(error) => {
                metrics.create(error.outcome());
                return Err(error);
            }
        };
        let resolve_time = begun.elapsed();
        // After acceptance, the create task counts the outcome itself: the client may have disconnected by then.
        let created = self.sandboxes.create(create).await?;
        let mut stages = vec![Stage::new("auth", auth_time), Stage::new("template", resolve_time)];
        stages.extend(created.stages);
        stages.push(Stage::new("total", auth_time + begun.elapsed()));
        metrics.create_stages(&stages);
        Ok(Creation::Created(Box::new(Created { stages, ..created })))
    }

    /// Claims the key of a request, checks the request, and reserves everything that its sandbox needs.
    async fn accept(&self, creator: &Creator, mut request: SandboxRequest) -> Result<Accepted, CreationError> {
        let id = new_sandbox_id()?;
        let Some(key) = request.key.take() else {
            return self.prepare(creator, request, id).await.map(Accepted::New);
        };
        let RequestKey {
            key,
            operation,
            canonical,
        } = key;
        let keyed = KeyedRequest {
            team: creator.team.clone(),
            key,
            body_hash: self.sandboxes.policies.tokens.request_digest(operation, &canonical),
            sandbox: id.clone(),
        };
        let claim = match self.claims.claim(keyed).await.map_err(CreationError::Key)? {
            Claimed::First(claim) => claim,
            Claimed::Repeated(stored) => return Ok(Accepted::Repeated(stored)),
        };
        match self.prepare(creator, request, id).await {
            Ok(mut create) => {
                create.claim = Some(claim);
                Ok(Accepted::New(create))
            }
            Err(error) => {
                // Before the response, because the client may retry immediately.
                claim.abandon().await;
                Err(error)
            }
        }
    }

    /// Makes all checks before anything is created: the template, the settings, the quota, the capacity.
    async fn prepare(
        &self,
        creator: &Creator,
        request: SandboxRequest,
        id: SandboxId,
    ) -> Result<Box<CreateRequest>, CreationError> {
        let name = &request.template;
        let (template, build) = name.find_build(self.sandboxes.store(), &creator.team).await?;
        let built = self.spec_of(&build, &name.name)?;
        let timeout_s = creator.quota.lifetime(request.timeout_s, LIFETIME_MIN_S)?;
        let mut settings = request.settings.map_err(CreationError::Invalid)?;

        let resources = std::mem::take(&mut settings.repositories);
        let resources = repositories::accepted(&resources).map_err(CreationError::Invalid)?;
        let injections = SandboxInjections {
            user: creator.user.clone(),
            items: std::mem::take(&mut settings.injections),
        };
        let (key, owner) = (PoolKey::of(&build), template.team_id.clone());
        let memory = built.memory.as_ref().map(|_| build.id.clone());
        let needs = Needs {
            image: &built.image,
            memory: memory.as_ref(),
            memory_mb: build.memory_mb,
            pool: Some(&key),
        };
        let first = self.sandboxes.nodes.choose(needs).into_iter().next();
        let mut creating = first.as_ref().map(|node| node.pool.creating());
        let max_lifetime_s = creator.quota.limits.max_lifetime_s;
        let mut spec = settings
            .spec(template, build, &name.name, timeout_s, max_lifetime_s)
            .map_err(CreationError::Invalid)?;
        let repositories = match resources {
            None => Vec::new(),
            Some(RepositoryRequest { repositories, token }) => {
                let explicit = self
                    .sandboxes
                    .policies
                    .injections
                    .with_token(injections.clone(), &token)
                    .await?;
                if explicit.is_some() {
                    let why = "injections: repositories in resources do not support an explicit injection of the code \
                               host; their own token is injected";
                    return Err(CreationError::Invalid(why.to_owned()));
                }
                spec.network.get_or_insert_default().repository_token = Some(token);
                repositories
            }
        };
        if let Some(network) = &spec.network {
            let policies = &self.sandboxes.policies;
            policies
                .check(network, spec.allow_internet_access)
                .map_err(|error| CreationError::Invalid(format!("network: {error}")))?;
            policies.check_rules(&creator.team, network).await?;
        }
        self.sandboxes.policies.injections.check(&injections).await?;
        if spec.lifecycle.auto_pause {
            creator.quota.check_auto_pause().map_err(AdmissionError::from)?;
        }
        creator
            .count(self.sandboxes.clock.now_us())
            .map_err(CreationError::TooOften)?;

        let share = ResourceUse::one_sandbox(spec.cpu_count, spec.memory_mb);
        // Held while it waits: a request that is refused waits for nothing, and what starts for one is in its quota.
        let reservation = Arc::new(creator.quota.reserve(share).map_err(AdmissionError::from)?);
        let asked = Asked {
            template: &spec.template,
            owner: owner.as_ref(),
            key: &key,
            spec: &built,
        };
        // Again, with those that were placed meanwhile.
        let nodes = self.sandboxes.nodes.choose(needs);
        if nodes.is_empty() && self.sandboxes.nodes.is_kept_off(&[]) {
            return Err(CreateError::Draining.into());
        }
        let is_only_server = !self.sandboxes.nodes.have_several_servers();
        let Placed {
            node,
            others,
            admission,
            sent,
            pooled,
        } = Box::pin(place(nodes, is_only_server, &id, asked, reservation)).await?;
        if first.is_none_or(|first| !Arc::ptr_eq(&first, &node)) {
            creating = Some(node.pool.creating());
        }
        Ok(Box::new(CreateRequest {
            id,
            team: creator.team.clone(),
            user: creator.user.clone(),
            spec,
            build: built,
            injections,
            repositories,
            admission,
            sent,
            node,
            others,
            claim: None,
            pooled,
            creating,
        }))
    }

    /// What sandboxes of a build are started with, on any node of this service.
    fn spec_of(&self, build: &BuildRow, template: &str) -> Result<BuildSpec, CreationError> {
        let (home, nodes) = (&self.sandboxes.home, &self.sandboxes.nodes);
        let built_by = build.node_id.as_ref();
        if built_by.is_some_and(|built_by| built_by != home && !nodes.has_server(built_by)) {
            return Err(CreationError::BuiltElsewhere {
                template: template.to_owned(),
            });
        }
        BuildSpec::of(build).ok_or_else(|| CreationError::Unreadable {
            template: template.to_owned(),
        })
    }
}

/// Where a sandbox is placed, and with what.
struct Placed {
    node: Arc<ServedNode>,
    /// The nodes to try if that one refuses.
    others: Vec<Arc<ServedNode>>,
    admission: Admission,
    /// The request for it.
    sent: Option<Sent>,
    pooled: Option<Taken>,
}

/// Places a sandbox on the first of these nodes that has room for it.
async fn place(
    nodes: Vec<Arc<ServedNode>>,
    is_only_server: bool,
    id: &SandboxId,
    asked: Asked<'_>,
    reservation: Arc<Reservation>,
) -> Result<Placed, CreationError> {
    let mut nodes = nodes.into_iter();
    let Some(mut node) = nodes.next() else {
        return Err(CreateError::Node(NodeError::Away).into());
    };
    let pooled = Box::pin(node.pool.take(asked)).await;
    // Where there are others, also those of other servers, they are asked if it does not answer: a start would have to be waited for.
    // And a memory may have to be brought before the start, which is not done for nothing.
    let is_the_only_one = nodes.len() == 0 && is_only_server;
    let with_start = match (&pooled, &asked.spec.memory) {
        (None, None) if is_the_only_one => node.admit_with_start(&reservation),
        _ => None,
    };
    let (admission, sent) = match (&pooled, with_start) {
        (Some(pooled), _) => (Admission::of_started(reservation, pooled.permit()), None),
        (None, Some(admitted)) => admitted,
        (None, None) => {
            let mut others = nodes.len();
            loop {
                let admitted = node.admit(id, &reservation);
                if others == 0 {
                    break admitted.await?;
                }
                if let Ok(Ok(admission)) = tokio::time::timeout(ADMISSION_BOUND, admitted).await {
                    break admission;
                }
                let Some(next) = nodes.next() else {
                    return Err(CreateError::Node(NodeError::Away).into());
                };
                node = next;
                others -= 1;
            }
        }
    };
    Ok(Placed {
        node,
        others: nodes.collect(),
        admission,
        sent,
        pooled,
    })
}

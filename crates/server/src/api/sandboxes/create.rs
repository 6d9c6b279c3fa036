//! `POST /sandboxes` and `POST /v2/sandboxes`.
//!
//! The order of the checks is part of the contract: schema of the body, syntax of the template reference, the template,
//! the timeout, then the rest. Every key of a request is either supported or refused by name, never ignored silently.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use http::{HeaderName, HeaderValue, StatusCode};
use model::id::SandboxId;
use model::limits::{ATTACHMENTS_MAX, DEFAULT_TIMEOUT_V1_S, DEFAULT_TIMEOUT_V2_S, HTTPS_PORTS_MAX};
use model::sandbox::{EnvVars, HostMask, LifecycleSpec, NetworkSpec, SandboxSpec};
use protocol::agent;
use protocol::node::Stage;
use store::builds::BuildRow;
use store::templates::TemplateRow;

use super::idempotency::IdempotencyHeader;
use super::network::{EgressRules, ports};
use super::{ConnectionInfo, injections};
use crate::admission::{Admission, AdmissionError, quota::ResourceUse};
use crate::api::auth::Caller;
use crate::api::body::RequiredBody;
use crate::api::body::shape::{Body, Lenient, Nullable, body};
use crate::api::body::values::{
    AnyArray, AnyObject, HttpsPort, Lifetime, List, RepositoryAddress, RepositoryToken, RequestHost, ResourceType,
    TemplateReference, Texts, Variables, WorkingTreePath,
};
use crate::api::error::{ApiError, ErrorBody};
use crate::api::injection_values::ItemValue;
use crate::api::json::json;
use crate::api::state::ApiState;
use crate::builds::recipe::BuildSpec;
use crate::injections::SandboxInjections;
use crate::outcome::CreateOutcome;
use crate::pool::PoolKey;
use crate::repositories::{Repository, RepositoryRequest};
use crate::sandboxes::create::CreateRequest;
use crate::sandboxes::idempotency::{Claimed, KeyedRequest, StoredSandbox};
use crate::sandboxes::repositories::code_hosts;
use crate::templates::TemplateName;

pub(super) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// The path of a create request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ApiVersion {
    V1,
    V2,
}

impl ApiVersion {
    /// Part of the request digest: the same body means something else on the other path, so a key cannot be reused
    /// there.
    fn operation(self) -> &'static str {
        match self {
            Self::V1 => "create-v1",
            Self::V2 => "create-v2",
        }
    }

    /// The status for a key that was used with another request (API contract).
    fn mismatch_status(self) -> StatusCode {
        match self {
            Self::V1 => StatusCode::CONFLICT,
            Self::V2 => StatusCode::UNPROCESSABLE_ENTITY,
        }
    }
}

body! {
    /// The keys that both paths have in common.
    struct NewSandboxFields {
        /// The template: its id, or `[namespace/]name[:tag]`.
        "templateID" template: TemplateReference;
        /// Metadata, by which lists can be filtered.
        "metadata" metadata: Option<Texts>;
        /// Environment variables of its processes.
        "envVars" env_vars: Option<Variables>;
        /// `false` closes everything that `allowOut` does not open.
        "allow_internet_access" allow_internet_access: Option<bool>;
        "network" network: Option<NewSandboxNetwork>;
        /// Whether it is paused at its deadline, and not killed.
        "autoPause" auto_pause: Nullable<bool> = false;
        /// `false`: only its files are kept when it is paused at its deadline. Requires `autoPause`, and excludes
        /// `autoResume`.
        "autoPauseMemory" auto_pause_memory: Nullable<bool> = true;
        "autoResume" auto_resume: Option<AutoResume>;
        "iam" iam: Option<Iam> => hidden;
        "volumeMounts" volume_mounts: Option<AnyArray<{ usize::MAX }>> => hidden;
        /// Headers that are set on its HTTPS requests: `type` and the keys of that type, described on the page about injection.
        "injections" injections: Option<List<ItemValue, 0, ATTACHMENTS_MAX>>;
        /// Repositories that it gets as working trees before the request is answered.
        "resources" resources: Option<List<SandboxResource, 0, ATTACHMENTS_MAX>>;
        ignored {
            /// Used by clients to set up MCP servers in the sandbox; ignored by the platform.
            "mcp": Nullable<AnyObject>;
        }
    }
}

body! {
    /// A sandbox to create.
    pub(crate) struct NewSandboxV1 {
        flatten common: NewSandboxFields;
        /// Timeout in seconds, counted from when it runs.
        "timeout" timeout: Nullable<Lifetime<1>> = DEFAULT_TIMEOUT_V1_S;
        /// Whether its agent requires its token. If absent, it does so if `allowPublicTraffic` is `false`; `false`
        /// together with that is refused.
        "secure" secure: Option<bool>;
    }
}

body! {
    /// A sandbox to create.
    pub(crate) struct NewSandbox {
        flatten common: NewSandboxFields;
        /// Timeout in seconds, counted from when it runs.
        "timeout" timeout: Nullable<Lifetime<1>> = DEFAULT_TIMEOUT_V2_S;
        "secure" secure: Lenient<bool> => hidden;
    }
}

body! {
    /// How a sandbox is reached, and what it may reach.
    struct NewSandboxNetwork {
        flatten egress: EgressRules;
        /// With `false`, every port but the agent's requires `trafficAccessToken` as header `e2b-traffic-access-token`.
        "allowPublicTraffic" allow_public_traffic: Nullable<bool> = true;
        /// The host that requests have inside, except those to the agent: a host with an optional port, in which
        /// `${PORT}` stands for the port of the request. Inside, `X-Forwarded-Host` is the host before.
        "maskRequestHost" mask_request_host: Option<RequestHost>;
        /// Ports whose servers speak TLS; not that of the agent. Their certificates are not verified.
        "httpsPorts" https_ports: Option<List<HttpsPort, 0, HTTPS_PORTS_MAX>>;
    }
}

body! {
    /// Whether traffic resumes a paused sandbox.
    struct AutoResume {
        /// Whether any request to a port of the sandbox resumes it while it is paused, if it has the required tokens.
        "enabled" enabled: bool;
    }
}

body! {
    /// Identities of a sandbox.
    struct Iam {
        "tokens" tokens: Nullable<AnyObject>;
    }
}

/// Creates a sandbox, with the defaults of version 1.
#[utoipa::path(
    post,
    path = "/sandboxes",
    tag = "sandboxes",
    params((
        "Idempotency-Key" = Option<String>, Header,
        description = "Makes it safe to repeat the request: for 24 hours, the same key with the same body is answered \
                       with the same sandbox",
        min_length = 1, max_length = 255, pattern = "^[!-~]+$",
    )),
    request_body(content = NewSandboxV1),
    responses(
        (
            status = 201,
            description = "The sandbox runs and its agent answers",
            body = ConnectionInfo,
            headers(("Server-Timing" = String, description = "How long each stage took")),
        ),
        (status = 404, description = "The team can use no such template", body = ErrorBody),
        (
            status = 409,
            description = "The `Idempotency-Key` was used with another request, or the first one is in progress; \
                           see `error_code`",
            body = ErrorBody,
        ),
        (
            status = 429,
            description = "The team is at one of its limits. With `Should-Retry: false`, a sandbox has to end \
                           first; with `Retry-After`, a later retry can work",
            body = ErrorBody,
            headers(
                ("Should-Retry" = String, description = "`false` if a retry cannot work by itself"),
                ("Retry-After" = u32, description = "Seconds after which a retry can work"),
            ),
        ),
        (
            status = 503,
            description = "There is no capacity for another sandbox (`error_code` is `sandbox_capacity_unavailable`), \
                           the database is unavailable, or the platform is starting or stopping; try again",
            body = ErrorBody,
            headers(("Retry-After" = u32, description = "Seconds after which a retry may work")),
        ),
        (status = 408, description = "Cloning the repositories took too long, and the sandbox was ended", body = ErrorBody),
        (status = 504, description = "The sandbox did not start in time and was ended", body = ErrorBody),
    )
)]
pub(crate) async fn create_sandbox_v1(
    State(state): State<ApiState>,
    caller: Caller,
    key: IdempotencyHeader,
    body: RequiredBody<NewSandboxV1>,
) -> Result<Response, ApiError> {
    create(&state, &caller, (key, &body), ApiVersion::V1).await
}

/// Creates a sandbox.
#[utoipa::path(
    post,
    path = "/v2/sandboxes",
    tag = "sandboxes",
    params((
        "Idempotency-Key" = Option<String>, Header,
        description = "Makes it safe to repeat the request: for 24 hours, the same key with the same body is answered \
                       with the same sandbox",
        min_length = 1, max_length = 255, pattern = "^[!-~]+$",
    )),
    request_body(content = NewSandbox),
    responses(
        (
            status = 201,
            description = "The sandbox runs and its agent answers",
            body = ConnectionInfo,
            headers(("Server-Timing" = String, description = "How long each stage took")),
        ),
        (status = 404, description = "The team can use no such template", body = ErrorBody),
        (
            status = 409,
            description = "The first request with the `Idempotency-Key` is in progress",
            body = ErrorBody,
            headers(("Retry-After" = u32, description = "Seconds after which it has most likely ended")),
        ),
        (status = 422, description = "The `Idempotency-Key` was used with another request", body = ErrorBody),
        (
            status = 429,
            description = "The team is at one of its limits. With `Should-Retry: false`, a sandbox has to end \
                           first; with `Retry-After`, a later retry can work",
            body = ErrorBody,
            headers(
                ("Should-Retry" = String, description = "`false` if a retry cannot work by itself"),
                ("Retry-After" = u32, description = "Seconds after which a retry can work"),
            ),
        ),
        (
            status = 503,
            description = "There is no capacity for another sandbox (`error_code` is `sandbox_capacity_unavailable`), \
                           the database is unavailable, or the platform is starting or stopping; try again",
            body = ErrorBody,
            headers(("Retry-After" = u32, description = "Seconds after which a retry may work")),
        ),
        (status = 408, description = "Cloning the repositories took too long, and the sandbox was ended", body = ErrorBody),
        (status = 504, description = "The sandbox did not start in time and was ended", body = ErrorBody),
    )
)]
pub(crate) async fn create_sandbox(
    State(state): State<ApiState>,
    caller: Caller,
    key: IdempotencyHeader,
    body: RequiredBody<NewSandbox>,
) -> Result<Response, ApiError> {
    create(&state, &caller, (key, &body), ApiVersion::V2).await
}

body! {
    /// A repository that a sandbox gets as a working tree.
    pub(super) struct SandboxResource {
        /// The repository: `https://github.com/OWNER/NAME`, or `git@github.com:OWNER/NAME`.
        "url" url: RepositoryAddress;
        /// Where the working tree stands: an absolute path, which must not exist or be an empty directory.
        "mount_path" mount_path: WorkingTreePath;
        /// The token with which it is fetched. It is never in the sandbox, and requests of git inside get it outside. The
        /// same for all repositories of a sandbox.
        "authorization_token" token: RepositoryToken;
        ignored {
            "type": ResourceType;
        }
    }
}

async fn create<T: Body + Into<CreateParameters>>(
    state: &ApiState,
    caller: &Caller,
    request: (IdempotencyHeader, &RequiredBody<T>),
    version: ApiVersion,
) -> Result<Response, ApiError> {
    let begun = Instant::now();
    let has_key = request.0.0.is_some();
    // After acceptance, the create task counts the outcome itself: the client may have disconnected by then.
    let create = match accept(state, caller, request, version).await {
        Ok(Accepted::New(create)) => *create,
        Ok(Accepted::Repeated(stored)) => {
            state.metrics.create(CreateOutcome::Repeated);
            return json(StatusCode::CREATED, &ConnectionInfo::from_stored(stored, &state.access));
        }
        Err(error) => {
            state.metrics.create(error.create_outcome());
            return Err(error);
        }
    };
    let resolve_time = begun.elapsed();
    let created = state.sandboxes.create(create).await.map_err(|error| match has_key {
        true => ApiError::from(error).or_retry_with_key(),
        false => error.into(),
    })?;

    let mut stages = vec![
        Stage::new("auth", caller.auth_time),
        Stage::new("template", resolve_time),
    ];
    stages.extend(created.stages);
    stages.push(Stage::new("total", caller.auth_time + begun.elapsed()));
    state.metrics.create_stages(&stages);
    let info = ConnectionInfo::new(created.row, &state.access);
    let mut response = json(StatusCode::CREATED, &info)?;
    if let Ok(value) = HeaderValue::try_from(server_timing(&stages)) {
        response.headers_mut().insert(SERVER_TIMING, value);
    }
    Ok(response)
}

/// A request that was accepted.
enum Accepted {
    New(Box<CreateRequest>),
    /// It repeats a request that was answered before.
    Repeated(StoredSandbox),
}

/// Parses and checks a request, and reserves everything that its sandbox needs.
async fn accept<T: Body + Into<CreateParameters>>(
    state: &ApiState,
    caller: &Caller,
    (IdempotencyHeader(key), body): (IdempotencyHeader, &RequiredBody<T>),
    version: ApiVersion,
) -> Result<Accepted, ApiError> {
    let parameters: CreateParameters = body.read()?.into();
    let name = TemplateName::parse(&parameters.common.template.0)?;
    let id = random_id()?;
    let Some(key) = key else {
        return prepare(state, caller, parameters, &name, id).await.map(Accepted::New);
    };
    let request = KeyedRequest {
        team: caller.team.clone(),
        key,
        body_hash: state.tokens.request_digest(version.operation(), &body.canonical()),
        sandbox: id.clone(),
    };
    let claim = match state.claims.claim(request).await {
        Ok(Claimed::First(claim)) => claim,
        Ok(Claimed::Repeated(stored)) => return Ok(Accepted::Repeated(stored)),
        Err(error) => return Err(ApiError::idempotency(error, version.mismatch_status())),
    };
    match prepare(state, caller, parameters, &name, id).await {
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

/// All checks before anything is created: the template, the parameters, the quota, the capacity.
async fn prepare(
    state: &ApiState,
    caller: &Caller,
    parameters: CreateParameters,
    name: &TemplateName,
    id: SandboxId,
) -> Result<Box<CreateRequest>, ApiError> {
    let pool = &state.sandboxes.pool;
    let creating = pool.creating();
    let (template, build) = name.find_build(&state.store, &caller.team).await?;
    let mut parameters = parameters;
    let resources = parameters.common.resources()?;
    let injections = SandboxInjections {
        user: caller.user.clone(),
        items: injections::items(parameters.common.injections.take().unwrap_or(List(Vec::new())))?,
    };
    let built = spec_of(state, &build, &name.name)?;
    let (key, owner) = (PoolKey::of(&build), template.team_id.clone());
    let mut spec = parameters.spec(caller, (template, build), &name.name)?;
    let repositories = match resources {
        None => Vec::new(),
        Some(RepositoryRequest { repositories, token }) => {
            let explicit = state
                .sandboxes
                .injections
                .with_token(injections.clone(), &token)
                .await?;
            if explicit.is_some() {
                let why = "injections: repositories in resources do not support an explicit injection of the code host; \
                           their own token is injected";
                return Err(ApiError::invalid(why));
            }
            let network = spec.network.get_or_insert_default();
            network.repository_token = Some(token);
            repositories
        }
    };
    if let Some(network) = &spec.network {
        let checked = state.sandboxes.policies.check(network, spec.allow_internet_access);
        checked.map_err(|error| ApiError::invalid(format!("network: {error}")))?;
        let checked = state.sandboxes.policies.check_rules(&caller.team, network).await;
        checked.map_err(|error| ApiError::header_rules(error, "network: "))?;
    }
    let checked = state.sandboxes.injections.check(&injections).await;
    checked.map_err(injections::refused)?;
    if spec.lifecycle.auto_pause {
        caller.quota.check_auto_pause()?;
    }
    caller.count_create(state.clock.now_us())?;
    let share = ResourceUse::one_sandbox(spec.cpu_count, spec.memory_mb);
    // Held while it waits: a request that is refused waits for nothing, and what starts for one is in its quota.
    let reservation = Arc::new(caller.quota.reserve(share).map_err(AdmissionError::from)?);
    let pooled = Box::pin(pool.take((&spec.template, owner.as_ref()), &key, &built)).await;
    let admission = match &pooled {
        Some(pooled) => Admission::of_started(reservation, pooled.permit()),
        None => pool.admit(&reservation).await?,
    };
    Ok(Box::new(CreateRequest {
        id,
        team: caller.team.clone(),
        user: caller.user.clone(),
        spec,
        build: built,
        injections,
        repositories,
        admission,
        claim: None,
        pooled,
        creating,
    }))
}

/// What sandboxes of a build are started with.
fn spec_of(state: &ApiState, build: &BuildRow, name: &str) -> Result<BuildSpec, ApiError> {
    if build
        .node_id
        .as_ref()
        .is_some_and(|node| node != state.sandboxes.rows.node())
    {
        return Err(ApiError::no_template(format!(
            "template \"{name}\" was built on another node of this platform: build it again through this server"
        )));
    }
    BuildSpec::of(build).ok_or_else(|| {
        ApiError::no_template(format!(
            "the build of template \"{name}\" cannot be read: build it again"
        ))
    })
}

pub(super) fn random_id() -> Result<SandboxId, ApiError> {
    let mut random = [0; 20];
    getrandom::fill(&mut random).map_err(|error| ApiError::internal().caused_by(error))?;
    Ok(SandboxId::from_random(&random))
}

/// The stages as a `Server-Timing` header: milliseconds with three digits.
pub(super) fn server_timing(stages: &[Stage]) -> String {
    stages.iter().fold(String::new(), |mut text, Stage { name, took }| {
        let separator = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{separator}{name};dur={:.3}", took.as_secs_f64() * 1000.0);
        text
    })
}

/// The parameters of a create request on either path.
struct CreateParameters {
    common: NewSandboxFields,
    timeout: Lifetime<1>,
    /// Whether its agent requires its token, if the client or the path defines it.
    secure: Option<bool>,
    /// Whether the client sent `secure: false`, on either path. On version 2 it has no other effect.
    wants_open_agent: bool,
}

impl From<NewSandboxV1> for CreateParameters {
    fn from(body: NewSandboxV1) -> Self {
        Self {
            common: body.common,
            timeout: body.timeout,
            secure: body.secure,
            wants_open_agent: body.secure == Some(false),
        }
    }
}

impl From<NewSandbox> for CreateParameters {
    fn from(body: NewSandbox) -> Self {
        Self {
            common: body.common,
            timeout: body.timeout,
            secure: Some(true),
            wants_open_agent: body.secure.0 == Some(false),
        }
    }
}

impl CreateParameters {
    /// Whether the agent requires its token. By default, it does if the ports of the sandbox require a token.
    fn is_secure(&self) -> bool {
        self.secure.unwrap_or_else(|| self.is_private())
    }

    /// Whether its ports require a token.
    fn is_private(&self) -> bool {
        let network = self.common.network.as_ref();
        network.is_some_and(|network| !network.allow_public_traffic)
    }

    /// The sandbox to create from the resolved template. Refuses valid requests that this platform does not support.
    fn spec(
        self,
        caller: &Caller,
        (template, build): (TemplateRow, BuildRow),
        name: &str,
    ) -> Result<SandboxSpec, ApiError> {
        let max_lifetime_s = caller.quota.limits.max_lifetime_s;
        let timeout_s = self.timeout.within(max_lifetime_s)?;
        let secure = self.is_secure();
        let network = self.network();
        let common = self.common;
        let env_vars = common
            .env_vars
            .map_or_else(Texts::new, |Variables(variables)| variables);
        let env_vars = EnvVars::new(env_vars).ok_or_else(|| {
            ApiError::invalid(
                "envVars: a name must not be empty or contain '=', and neither name nor value may contain a NUL",
            )
        })?;
        let network = network?;
        Ok(SandboxSpec {
            template: template.id,
            build: build.id,
            alias: shown_alias(template.aliases, name),
            cpu_count: build.cpu_count,
            memory_mb: build.memory_mb,
            disk_mb: build.disk_mb,
            agent_version: build.agent_version.unwrap_or_else(|| agent::VERSION.to_owned()),
            timeout_s,
            max_lifetime_s,
            metadata: common.metadata.unwrap_or_default(),
            env_vars,
            secure,
            allow_internet_access: common.allow_internet_access,
            network,
            lifecycle: LifecycleSpec {
                auto_pause: common.auto_pause,
                auto_pause_discards: !common.auto_pause_memory,
                auto_resume: common.auto_resume.is_some_and(|resume| resume.enabled),
                paused_for_files: false,
                timeout_s,
            },
        })
    }

    /// The network settings, or the first reason why the request is not supported.
    fn network(&self) -> Result<Option<NetworkSpec>, ApiError> {
        self.refusal().map_or(Ok(()), |why| Err(ApiError::invalid(why)))?;
        let common = &self.common;
        let network = common.network.as_ref().map(NewSandboxNetwork::spec).transpose()?;
        let settings = network.clone().unwrap_or_default();
        let policy = settings.egress(common.allow_internet_access);
        policy.map_err(|error| ApiError::invalid(format!("network: {error}")))?;
        match common.unavailable() {
            None => Ok(network),
            Some(key) => Err(ApiError::invalid(unavailable(key))),
        }
    }

    /// The first reason why the request is not supported, from a key that is checked before the network settings.
    fn refusal(&self) -> Option<String> {
        let common = &self.common;
        if self.wants_open_agent && self.is_private() {
            // A client of the agent reaches every port through it. Clients compare this text.
            return Some(
                "You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag."
                    .to_owned(),
            );
        }
        if !common.auto_pause_memory {
            let resumes = common.auto_resume.as_ref().is_some_and(|resume| resume.enabled);
            match (common.auto_pause, resumes) {
                (false, _) => return Some("autoPauseMemory: false requires autoPause: true".to_owned()),
                (true, true) => return Some("autoPauseMemory: false excludes autoResume".to_owned()),
                (true, false) => {}
            }
        }
        let iam = common.iam.as_ref().and_then(|iam| iam.tokens.0);
        iam.is_some_and(|tokens| !tokens.is_empty).then(|| unavailable("iam"))
    }
}

impl NewSandboxFields {
    /// The repositories; none if there are none.
    fn resources(&self) -> Result<Option<RepositoryRequest>, ApiError> {
        let invalid = |index: usize, why: &str| Err(ApiError::invalid(format!("resources[{index}].{why}")));
        let resources = self.resources.as_ref().map_or(&[][..], |List(resources)| resources);
        let Some(first) = resources.first() else {
            return Ok(None);
        };
        let hosts = code_hosts();
        let host = hosts.first().map(String::as_str).unwrap_or_default();
        let mut repositories: Vec<Repository> = Vec::new();
        for (index, resource) in resources.iter().enumerate() {
            let (RepositoryAddress(url), WorkingTreePath(mount_path)) = (&resource.url, &resource.mount_path);
            if url.host != host {
                return invalid(index, &format!("url: only repositories of {host} are supported"));
            }
            if resource.token.0 != first.token.0 {
                return invalid(
                    index,
                    "authorization_token: all repositories of a sandbox must have the same authorization_token",
                );
            }
            let other = repositories
                .iter()
                .position(|other| other.mount_path.overlaps(mount_path));
            if let Some(other) = other {
                let why = format!("mount_path: the same as that of resources[{other}], or one is inside the other");
                return invalid(index, &why);
            }
            repositories.push(Repository {
                url: url.clone(),
                mount_path: mount_path.clone(),
            });
        }
        Ok(Some(RepositoryRequest {
            repositories,
            token: first.token.0.clone(),
        }))
    }

    /// The first key that asks for something that this platform does not have.
    fn unavailable(&self) -> Option<&'static str> {
        [(
            "volumeMounts",
            self.volume_mounts.is_some_and(|mounts| !mounts.is_empty),
        )]
        .into_iter()
        .find_map(|(key, is_requested)| is_requested.then_some(key))
    }
}

impl NewSandboxNetwork {
    fn https_ports(&self) -> Vec<u16> {
        self.https_ports.as_ref().map(ports).unwrap_or_default()
    }

    /// The settings, of which the egress part is not checked yet.
    fn spec(&self) -> Result<NetworkSpec, ApiError> {
        let mask = self.mask_request_host.as_ref().map(|RequestHost(mask)| mask.as_str());
        let mask = mask.filter(|mask| !mask.is_empty()).map(str::parse::<HostMask>);
        let invalid = |error| ApiError::invalid(format!("network.maskRequestHost {error}"));
        Ok(NetworkSpec {
            allow_public_traffic: self.allow_public_traffic,
            mask_request_host: mask.transpose().map_err(invalid)?,
            https_ports: self.https_ports(),
            ..self.egress.spec()?
        })
    }
}

/// The refusal of a key that asks for something that this platform does not have.
fn unavailable(key: &str) -> String {
    format!("{key} is not available on this platform")
}

/// The alias to return: the requested one, else the first.
fn shown_alias(aliases: Vec<String>, requested: &str) -> Option<String> {
    if aliases.iter().any(|alias| alias == requested) {
        return Some(requested.to_owned());
    }
    aliases.into_iter().next()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn server_timing_is_in_milliseconds() {
        let stages = [
            Stage::new("auth", Duration::from_micros(250)),
            Stage::new("total", Duration::from_micros(12_345)),
        ];
        assert_eq!(server_timing(&stages), "auth;dur=0.250, total;dur=12.345");
    }
}

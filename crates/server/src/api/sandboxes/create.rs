//! `POST /sandboxes` and `POST /v2/sandboxes`.
//!
//! The order of the checks is part of the contract: schema of the body, syntax of the template reference, and then those of
//! [`crate::creation`]. Every key of a request is either supported or refused by name, never ignored silently.

use std::fmt::Write as _;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use http::{HeaderName, HeaderValue, StatusCode};
use model::limits::{ATTACHMENTS_MAX, DEFAULT_TIMEOUT_V1_S, DEFAULT_TIMEOUT_V2_S, HTTPS_PORTS_MAX};
use model::sandbox::{HostMask, NetworkSpec};
use protocol::node::{NodeError, Stage};

use super::idempotency::IdempotencyHeader;
use super::network::{EgressRules, ports};
use super::{ConnectionInfo, injections};
use crate::api::auth::Caller;
use crate::api::body::RequiredBody;
use crate::api::body::shape::{Body, Lenient, Nullable, body};
use crate::api::body::values::{
    AnyArray, AnyObject, HttpsPort, Lifetime, List, RepositoryAddress, RepositoryToken, RequestHost, ResourceType,
    TemplateReference, Texts, Variables, WorkingTreePath,
};
use crate::api::describe::error_sets;
use crate::api::error::{ApiError, DRAINING_AFTER_S, NODE_AWAY, NODE_DRAINING, SOON_S};
use crate::api::injection_values::ItemValue;
use crate::api::json::json;
use crate::api::state::ApiState;
use crate::creation::error::CreationError;
use crate::creation::repositories::RequestedRepository;
use crate::creation::settings::SandboxSettings;
use crate::creation::{Creation, RequestKey, SandboxRequest};
use crate::outcome::CreateOutcome;
use crate::repositories::RepositoryError;
use crate::sandboxes::create::CreateError;
use crate::sandboxes::idempotency::ClaimError;
use crate::telemetry::Stages;
use crate::templates::TemplateName;

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

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

error_sets! {
    /// No sandbox was created.
    NotCreated {
        404 "The team can use no such template";
        408 "Cloning the repositories took too long, and the sandbox was ended";
        429 "The team is at one of its limits. With `Should-Retry: false`, a sandbox has to end first; with `Retry-After`, \
             a later retry can work" {
            "Should-Retry": String = "`false` if a retry cannot work by itself",
            "Retry-After": u32 = "Seconds after which a retry can work",
        };
        503 "There is no capacity for another sandbox (`error_code` is `sandbox_capacity_unavailable`), the database is \
             unavailable, or the platform is starting or stopping; try again" {
            "Retry-After": u32 = "Seconds after which a retry may work",
        };
        504 "The sandbox did not start in time and was ended";
    }
}

/// Creates a sandbox, with the defaults of version 1.
#[utoipa::path(
    post,
    path = "/sandboxes",
    tag = "sandboxes",
    params(IdempotencyHeader),
    request_body(content = NewSandboxV1),
    responses(
        (
            status = 201,
            description = "The sandbox runs and its agent answers",
            body = ConnectionInfo,
            headers(("Server-Timing" = String, description = "How long each stage took")),
        ),
        (
            status = 409,
            description = "The `Idempotency-Key` was used with another request, or the first one is in progress; see \
                           `error_code`",
        ),
        NotCreated,
    )
)]
pub(crate) async fn create_sandbox_v1(
    State(state): State<ApiState>,
    caller: Caller,
    key: IdempotencyHeader,
    body: RequiredBody<NewSandboxV1>,
) -> Result<Response, ApiError> {
    create(&state, &caller, ApiVersion::V1, key, &body).await
}

/// Creates a sandbox.
#[utoipa::path(
    post,
    path = "/v2/sandboxes",
    tag = "sandboxes",
    params(IdempotencyHeader),
    request_body(content = NewSandbox),
    responses(
        (
            status = 201,
            description = "The sandbox runs and its agent answers",
            body = ConnectionInfo,
            headers(("Server-Timing" = String, description = "How long each stage took")),
        ),
        (
            status = 409,
            description = "The first request with the `Idempotency-Key` is in progress",
            headers(("Retry-After" = u32, description = "Seconds after which it has most likely ended")),
        ),
        (status = 422, description = "The `Idempotency-Key` was used with another request"),
        NotCreated,
    )
)]
pub(crate) async fn create_sandbox(
    State(state): State<ApiState>,
    caller: Caller,
    key: IdempotencyHeader,
    body: RequiredBody<NewSandbox>,
) -> Result<Response, ApiError> {
    create(&state, &caller, ApiVersion::V2, key, &body).await
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
    version: ApiVersion,
    IdempotencyHeader(key): IdempotencyHeader,
    body: &RequiredBody<T>,
) -> Result<Response, ApiError> {
    let begun = Instant::now();
    let parameters = body.read().and_then(|parameters| {
        let parameters: CreateParameters = parameters.into();
        let template = TemplateName::parse(&parameters.common.template.0)?;
        Ok((template, parameters))
    });
    let (template, parameters) = parameters.inspect_err(|_| state.metrics.create(CreateOutcome::Refused))?;
    let has_key = key.is_some();
    let request = SandboxRequest {
        template,
        timeout_s: parameters.timeout.unchecked(),
        settings: parameters.settings(),
        key: key.map(|key| RequestKey {
            key,
            operation: version.operation(),
            canonical: body.canonical(),
        }),
        auth_time: caller.auth_time,
        begun,
    };
    let created = match state.creation.create(&caller.creator(), request).await {
        Ok(Creation::Created(created)) => created,
        Ok(Creation::Repeated(stored)) => {
            return json(StatusCode::CREATED, &ConnectionInfo::from_stored(stored, &state.access));
        }
        Err(error) if has_key => return Err(not_created(error, version).or_retry_with_key()),
        Err(error) => return Err(not_created(error, version)),
    };
    let response = json(StatusCode::CREATED, &ConnectionInfo::new(created.row, &state.access))?;
    Ok(timed(response, &created.stages))
}

/// Adds how long the stages took to a response: for its client as a `Server-Timing` header, and for its span.
pub(super) fn timed(mut response: Response, stages: &[Stage]) -> Response {
    if !stages.is_empty()
        && let Ok(value) = HeaderValue::try_from(server_timing(stages))
    {
        response.headers_mut().insert(SERVER_TIMING, value);
        response.extensions_mut().insert(Stages(stages.into()));
    }
    response
}

/// The stages as a `Server-Timing` header: milliseconds with three digits.
fn server_timing(stages: &[Stage]) -> String {
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
    /// The settings of the sandbox.
    ///
    /// # Errors
    /// With what is wrong, for the client.
    fn settings(self) -> Result<SandboxSettings, String> {
        let common = self.common;
        let unavailable = common.unavailable();
        let injections = common.injections.map_or_else(|| Ok(Vec::new()), injections::items)?;
        let network = common.network.as_ref().map(NewSandboxNetwork::spec).transpose()?;
        if let Some(key) = unavailable {
            return Err(format!("{key} is not available on this platform"));
        }
        Ok(SandboxSettings {
            injections,
            network,
            metadata: common.metadata.unwrap_or_default(),
            env_vars: common
                .env_vars
                .map(|Variables(variables)| variables)
                .unwrap_or_default(),
            secure: self.secure,
            wants_open_agent: self.wants_open_agent,
            allow_internet_access: common.allow_internet_access,
            auto_pause: common.auto_pause,
            auto_pause_memory: common.auto_pause_memory,
            auto_resume: common.auto_resume.is_some_and(|resume| resume.enabled),
            repositories: common.resources.map_or_else(Vec::new, |List(resources)| {
                resources.into_iter().map(RequestedRepository::from).collect()
            }),
        })
    }
}

impl NewSandboxFields {
    /// The first key that asks for something that this platform does not have.
    fn unavailable(&self) -> Option<&'static str> {
        let has_tokens = self.iam.as_ref().and_then(|iam| iam.tokens.0);
        let volumes = self.volume_mounts;
        if has_tokens.is_some_and(|tokens| !tokens.is_empty) {
            Some("iam")
        } else if volumes.is_some_and(|mounts| !mounts.is_empty) {
            Some("volumeMounts")
        } else {
            None
        }
    }
}

impl From<SandboxResource> for RequestedRepository {
    fn from(resource: SandboxResource) -> Self {
        let RepositoryAddress(url) = resource.url;
        let WorkingTreePath(mount_path) = resource.mount_path;
        let RepositoryToken(token) = resource.token;
        Self { url, mount_path, token }
    }
}

impl NewSandboxNetwork {
    /// The settings, of which the egress part is not checked yet.
    fn spec(&self) -> Result<NetworkSpec, String> {
        let mask = self.mask_request_host.as_ref().map(|RequestHost(mask)| mask.as_str());
        let mask = mask.filter(|mask| !mask.is_empty()).map(str::parse::<HostMask>);
        let mask = mask.transpose();
        Ok(NetworkSpec {
            allow_public_traffic: self.allow_public_traffic,
            mask_request_host: mask.map_err(|error| format!("network.maskRequestHost {error}"))?,
            https_ports: self.https_ports.as_ref().map(ports).unwrap_or_default(),
            ..self.egress.spec()?
        })
    }
}

impl ApiError {
    /// The response when an idempotency key could not be claimed. `mismatch` is the status for another request with the
    /// same key, which depends on the path.
    pub(in crate::api) fn idempotency(error: ClaimError, mismatch: StatusCode) -> Self {
        match error {
            ClaimError::Store(error) => error.into(),
            ClaimError::Mismatch => Self::new(
                mismatch,
                "this Idempotency-Key was used with another request: send a new key with a new request",
            )
            .code("idempotency_request_mismatch"),
            ClaimError::InProgress => Self::new(
                StatusCode::CONFLICT,
                "the first request with this Idempotency-Key is still in progress: try again in a moment",
            )
            .code("idempotency_in_progress")
            .retry_after(SOON_S),
        }
    }

    /// This error, with the advice to send the request again if that is safe because of its idempotency key.
    fn or_retry_with_key(mut self) -> Self {
        if self.status == StatusCode::REQUEST_TIMEOUT {
            self.message
                .push_str(": send the request again with the same Idempotency-Key");
        }
        self
    }
}

/// The response to a request that did not lead to a sandbox.
fn not_created(error: CreationError, version: ApiVersion) -> ApiError {
    match error {
        CreationError::Store(error) => error.into(),
        CreationError::Random(error) => ApiError::failed(error),
        CreationError::Key(error) => ApiError::idempotency(error, version.mismatch_status()),
        CreationError::Template(error) => error.into(),
        CreationError::BuiltElsewhere { template } => ApiError::no_template(format!(
            "template \"{template}\" was built on another node of this platform: build it again through this server"
        )),
        CreationError::Unreadable { template } => ApiError::no_template(format!(
            "the build of template \"{template}\" cannot be read: build it again"
        )),
        CreationError::Lifetime(error) => ApiError::invalid(error.to_string()),
        CreationError::Invalid(why) => ApiError::invalid(why),
        CreationError::TooOften(level) => ApiError::creating_too_often(level),
        CreationError::Admission(error) => error.into(),
        CreationError::Create(error) => error.into(),
    }
}

impl From<CreateError> for ApiError {
    fn from(error: CreateError) -> Self {
        let failed = |error: CreateError| {
            Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the sandbox could not be created")
                .code("sandbox_create_failed")
                .caused_by(error)
        };
        match error {
            CreateError::Store(error) => error.into(),
            CreateError::OverQuota(over) => over.into(),
            CreateError::NotReady { .. } => Self::new(StatusCode::GATEWAY_TIMEOUT, error.to_string()),
            CreateError::TimedOut => Self::new(StatusCode::GATEWAY_TIMEOUT, "the sandbox did not start in time")
                .code("sandbox_placement_timeout"),
            CreateError::NoCapacity { retry_after_s, .. } => Self::no_capacity(retry_after_s).caused_by(error),
            CreateError::Busy { team_limit } => Self::restores_busy(team_limit),
            CreateError::NotFetched(_) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the layers of the template are not on the node yet and could not be fetched in time: try again",
            )
            .code("template_unavailable")
            .caused_by(error),
            CreateError::Node(NodeError::Away) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "no node is connected on which the sandbox could run, so it was not created: try again",
            )
            .code(NODE_AWAY)
            .retry_after(SOON_S)
            .caused_by(error),
            CreateError::Draining => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the operator of this platform drains every node on which the sandbox could run, so it was not created: try \
                 again later, or ask the operator",
            )
            .code(NODE_DRAINING)
            .retry_after(DRAINING_AFTER_S)
            .caused_by(error),
            CreateError::Node(NodeError::NoLayer(ref layer)) => Self::lost_template(layer).caused_by(error),
            CreateError::Repositories(RepositoryError::Refused(why)) => Self::invalid(format!("resources: {why}")),
            CreateError::Repositories(RepositoryError::TimedOut { limit_s }) => Self::new(
                StatusCode::REQUEST_TIMEOUT,
                format!(
                    "cloning the repositories in resources took longer than {limit_s} s, and the sandbox was ended"
                ),
            ),
            CreateError::Repositories(RepositoryError::Unreachable { ref url, .. }) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("repository {url} could not be fetched from the code host: try again later"),
            )
            .code("repository_unavailable")
            .caused_by(error),
            CreateError::Repositories(RepositoryError::Sandbox(_)) => failed(error),
            CreateError::Seal(_)
            | CreateError::Node(_)
            | CreateError::StartCommand(_)
            | CreateError::Died
            | CreateError::TaskFailed => failed(error),
        }
    }
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

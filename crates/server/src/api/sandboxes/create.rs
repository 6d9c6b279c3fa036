//! `POST /sandboxes` and `POST /v2/sandboxes`.
//!
//! The order of the checks is part of the contract: shape of the body, syntax of the template's name, the template,
//! the timeout, then the rest. What a client asks for is done or refused with the name of the field, never dropped.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{FromRequestParts, State};
use axum::response::Response;
use http::{HeaderName, HeaderValue, StatusCode, request};
use model::id::{SandboxId, TeamId};
use model::limits::{ATTACHMENTS_MAX, DEFAULT_TIMEOUT_V1_S, DEFAULT_TIMEOUT_V2_S};
use protocol::agent;
use serde_json::json;
use store::error::StoreError;
use store::sandboxes::NewSandbox;
use store::templates::{BuildRow, TemplateRow};
use utoipa::ToSchema;
use utoipa::openapi::schema::AdditionalProperties;
use utoipa::openapi::{Object, ObjectBuilder, Type};

use super::ConnectionInfo;
use crate::api::auth::Caller;
use crate::api::body::{Fields, Null, RequiredBody};
use crate::api::error::{ApiError, ErrorBody};
use crate::clock::SECOND_US;
use crate::idempotency::{Claimed, IdempotencyKey, KeptSandbox, KeyedRequest};
use crate::keys;
use crate::lifecycle::{Create, EnvVars, Platform};
use crate::metrics::CreateOutcome;
use crate::quota::Used;

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Which of the two paths a create came by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// What a key of one path is not good for on the other: the same body means something else there.
    fn operation(self) -> &'static str {
        match self {
            Self::V1 => "create-v1",
            Self::V2 => "create-v2",
        }
    }

    /// The status for a key that was used with another request (API contract).
    fn mismatch(self) -> StatusCode {
        match self {
            Self::V1 => StatusCode::CONFLICT,
            Self::V2 => StatusCode::UNPROCESSABLE_ENTITY,
        }
    }
}

/// A sandbox to make.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[expect(dead_code, reason = "it describes a body that `Fields` reads")]
struct NewSandboxV1 {
    /// What to make it from: a template's id, or `[namespace/]name[:tag]`.
    #[schema(
        rename = "templateID",
        example = "base",
        pattern = r"^([A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+(:[A-Za-z0-9_.-]+)?$"
    )]
    template_id: String,
    /// Seconds from the moment it runs until it is ended.
    #[schema(minimum = 1, maximum = 86_400, default = 15)]
    timeout: Option<i32>,
    /// What to find it by.
    #[schema(required = false)]
    metadata: BTreeMap<String, String>,
    /// Environment variables of its processes.
    #[schema(required = false, schema_with = env_vars_schema)]
    env_vars: BTreeMap<String, String>,
    /// `false` cuts it off the internet.
    #[schema(rename = "allow_internet_access", required = false)]
    allow_internet_access: bool,
    /// Whether its agent answers only those who have its token.
    #[schema(required = false, default = false)]
    secure: bool,
    #[schema(required = false)]
    network: NewSandboxNetwork,
    /// For clients: they set up MCP servers inside the sandbox by it.
    #[schema(value_type = Option<Object>)]
    mcp: Option<()>,
}

/// A sandbox to make.
#[derive(ToSchema)]
#[schema(as = NewSandbox, rename_all = "camelCase")]
#[expect(dead_code, reason = "it describes a body that `Fields` reads")]
struct NewSandboxBody {
    /// What to make it from: a template's id, or `[namespace/]name[:tag]`.
    #[schema(
        rename = "templateID",
        example = "base",
        pattern = r"^([A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+(:[A-Za-z0-9_.-]+)?$"
    )]
    template_id: String,
    /// Seconds from the moment it runs until it is ended.
    #[schema(minimum = 1, maximum = 86_400, default = 300)]
    timeout: Option<i32>,
    /// What to find it by.
    #[schema(required = false)]
    metadata: BTreeMap<String, String>,
    /// Environment variables of its processes.
    #[schema(required = false, schema_with = env_vars_schema)]
    env_vars: BTreeMap<String, String>,
    /// `false` cuts it off the internet.
    #[schema(rename = "allow_internet_access", required = false)]
    allow_internet_access: bool,
    #[schema(required = false)]
    network: NewSandboxNetwork,
    /// For clients: they set up MCP servers inside the sandbox by it.
    #[schema(value_type = Option<Object>)]
    mcp: Option<()>,
}

/// How a sandbox is reached.
#[derive(ToSchema)]
#[schema(rename_all = "camelCase")]
#[expect(dead_code, reason = "it describes a body that `Fields` reads")]
struct NewSandboxNetwork {
    /// `false` asks for `trafficAccessToken`, as header `e2b-traffic-access-token`, on every port but the agent's.
    #[schema(default = true)]
    allow_public_traffic: Option<bool>,
}

fn env_vars_schema() -> Object {
    let text = |pattern: &str| {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .pattern(Some(pattern))
            .build()
    };
    ObjectBuilder::new()
        .property_names(Some(text(r"^[^=\x00]+$")))
        .additional_properties(Some(AdditionalProperties::RefOr(text(r"^[^\x00]*$").into())))
        .description(Some("Environment variables of its processes."))
        .build()
}

/// Creates a sandbox, with the defaults of the older path.
#[utoipa::path(
    post,
    path = "/sandboxes",
    tag = "sandboxes",
    params((
        "Idempotency-Key" = Option<String>, Header,
        description = "Makes a repetition of this request harmless: within 24 hours the same key with the same body \
                       is answered with the same sandbox",
        min_length = 1, max_length = 255, pattern = "^[!-~]+$",
    )),
    request_body(content = NewSandboxV1),
    responses(
        (
            status = 201,
            description = "It runs and its agent answers",
            body = ConnectionInfo,
            headers(("Server-Timing" = String, description = "How long each stage took")),
        ),
        (status = 404, description = "There is no such template that the team may use", body = ErrorBody),
        (
            status = 409,
            description = "The `Idempotency-Key` was used with another request, or the first one is in progress; \
                           `error_code` tells which",
            body = ErrorBody,
        ),
        (
            status = 429,
            description = "The team is at one of its limits. With `Should-Retry: false`, only the end of a sandbox \
                           makes room; with `Retry-After`, time does",
            body = ErrorBody,
            headers(
                ("Should-Retry" = String, description = "`false` where another try cannot work by itself"),
                ("Retry-After" = u32, description = "Seconds after which another try can work"),
            ),
        ),
        (
            status = 503,
            description = "There is no room for another sandbox (`error_code` is `sandbox_capacity_unavailable`), \
                           the database cannot be reached, or the platform starts or ends; try again",
            body = ErrorBody,
            headers(("Retry-After" = u32, description = "Seconds after which another try may work")),
        ),
        (status = 504, description = "It did not start in time, and there is none", body = ErrorBody),
    )
)]
pub(crate) async fn create_sandbox_v1(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    key: Keyed,
    body: RequiredBody,
) -> Result<Response, ApiError> {
    create(&platform, &caller, key, &body, Version::V1).await
}

/// Creates a sandbox.
#[utoipa::path(
    post,
    path = "/v2/sandboxes",
    tag = "sandboxes",
    params((
        "Idempotency-Key" = Option<String>, Header,
        description = "Makes a repetition of this request harmless: within 24 hours the same key with the same body \
                       is answered with the same sandbox",
        min_length = 1, max_length = 255, pattern = "^[!-~]+$",
    )),
    request_body(content = NewSandboxBody),
    responses(
        (
            status = 201,
            description = "It runs and its agent answers",
            body = ConnectionInfo,
            headers(("Server-Timing" = String, description = "How long each stage took")),
        ),
        (status = 404, description = "There is no such template that the team may use", body = ErrorBody),
        (
            status = 409,
            description = "The first request with the `Idempotency-Key` is in progress",
            body = ErrorBody,
            headers(("Retry-After" = u32, description = "Seconds after which it has most likely ended")),
        ),
        (status = 422, description = "The `Idempotency-Key` was used with another request", body = ErrorBody),
        (
            status = 429,
            description = "The team is at one of its limits. With `Should-Retry: false`, only the end of a sandbox \
                           makes room; with `Retry-After`, time does",
            body = ErrorBody,
            headers(
                ("Should-Retry" = String, description = "`false` where another try cannot work by itself"),
                ("Retry-After" = u32, description = "Seconds after which another try can work"),
            ),
        ),
        (
            status = 503,
            description = "There is no room for another sandbox (`error_code` is `sandbox_capacity_unavailable`), \
                           the database cannot be reached, or the platform starts or ends; try again",
            body = ErrorBody,
            headers(("Retry-After" = u32, description = "Seconds after which another try may work")),
        ),
        (status = 504, description = "It did not start in time, and there is none", body = ErrorBody),
    )
)]
pub(crate) async fn create_sandbox(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    key: Keyed,
    body: RequiredBody,
) -> Result<Response, ApiError> {
    create(&platform, &caller, key, &body, Version::V2).await
}

async fn create(
    platform: &Arc<Platform>,
    caller: &Caller,
    key: Keyed,
    body: &RequiredBody,
    version: Version,
) -> Result<Response, ApiError> {
    let begun = Instant::now();
    // What the platform makes of it from there on, it counts itself: the client may be gone by then.
    let create = match accept(platform, caller, key, body, version).await {
        Ok(Accepted::New(create)) => *create,
        Ok(Accepted::Before(kept)) => {
            platform.metrics.create(CreateOutcome::Repeated);
            return crate::api::json(StatusCode::CREATED, &ConnectionInfo::again(kept, platform));
        }
        Err(error) => {
            platform.metrics.create(error.create_outcome());
            return Err(error);
        }
    };
    let resolve_time = begun.elapsed();
    let created = platform.create(create).await?;

    let mut stages = vec![("auth", caller.auth_time), ("template", resolve_time)];
    stages.extend(created.stages);
    stages.push(("total", caller.auth_time + begun.elapsed()));
    platform.metrics.create_stages(&stages);
    let info = ConnectionInfo::new(created.row, platform);
    let mut response = crate::api::json(StatusCode::CREATED, &info)?;
    if let Ok(value) = HeaderValue::try_from(server_timing(&stages)) {
        response.headers_mut().insert(SERVER_TIMING, value);
    }
    Ok(response)
}

/// A request that is not refused.
enum Accepted {
    New(Box<Create>),
    /// It was answered before.
    Before(KeptSandbox),
}

/// Reads a request and refuses it, or takes everything that a sandbox for it needs.
async fn accept(
    platform: &Arc<Platform>,
    caller: &Caller,
    Keyed(key): Keyed,
    body: &RequiredBody,
    version: Version,
) -> Result<Accepted, ApiError> {
    let wish = Wish::parse(&body.fields(), version)?;
    let name = TemplateName::parse(&wish.template)?;
    let id = random_id()?;
    let Some(key) = key else {
        return prepare(platform, caller, wish, &name, id).await.map(Accepted::New);
    };
    let seed = &platform.settings.token_seed;
    let request = KeyedRequest {
        team: caller.team.clone(),
        key,
        body_hash: keys::request_digest(seed, version.operation(), &body.canonical()),
        sandbox: id.clone(),
    };
    let claim = match platform.claim(request).await {
        Ok(Claimed::First(claim)) => claim,
        Ok(Claimed::Before(kept)) => return Ok(Accepted::Before(kept)),
        Err(error) => return Err(ApiError::not_claimed(error, version.mismatch())),
    };
    match prepare(platform, caller, wish, &name, id).await {
        Ok(mut create) => {
            create.claim = Some(claim);
            Ok(Accepted::New(create))
        }
        Err(error) => {
            // Before the answer, because the client may try again at once.
            claim.abandon().await;
            Err(error)
        }
    }
}

/// Everything that can be refused before anything is made: the template, what was asked for, the limits, the room.
async fn prepare(
    platform: &Platform,
    caller: &Caller,
    wish: Wish,
    name: &TemplateName,
    id: SandboxId,
) -> Result<Box<Create>, ApiError> {
    let (template, build) = find_build(platform, &caller.team, name).await?;
    wish.check(caller)?;
    let now_us = platform.settings.clock.now_us();
    caller.count_create(now_us)?;
    let place = platform
        .reserve(&caller.quota, Used::by_one(build.cpu_count, build.memory_mb))
        .await?;
    let row = NewSandbox {
        id,
        team_id: caller.team.clone(),
        user_id: caller.user.clone(),
        template_id: template.id,
        build_id: build.id,
        alias: shown_alias(template.aliases, &name.name),
        execution_id: uuid::Uuid::new_v4().to_string(),
        end_us: now_us + i64::from(wish.timeout_s) * SECOND_US,
        max_end_us: now_us + i64::from(caller.quota.limits.max_lifetime_s) * SECOND_US,
        cpu_count: build.cpu_count,
        memory_mb: build.memory_mb,
        disk_mb: build.disk_mb,
        agent_version: build.agent_version.unwrap_or_else(|| agent::VERSION.to_owned()),
        metadata: wish.metadata,
        secure: wish.secure || platform.settings.always_secure,
        allow_public_traffic: wish.allow_public_traffic.unwrap_or(true),
        allow_internet_access: wish.allow_internet_access,
        network_json: wish
            .has_network
            .then(|| json!({"allowPublicTraffic": wish.allow_public_traffic.unwrap_or(true)}).to_string()),
        lifecycle_json: None,
        created_us: now_us,
    };
    Ok(Box::new(Create {
        place,
        claim: None,
        row,
        timeout_s: wish.timeout_s,
        env_vars: EnvVars(wish.env_vars),
    }))
}

/// The `Idempotency-Key` of a request, if it has one.
pub(crate) struct Keyed(Option<IdempotencyKey>);

impl<S: Send + Sync> FromRequestParts<S> for Keyed {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, _: &S) -> Result<Self, ApiError> {
        let mut sent = parts.headers.get_all(IDEMPOTENCY_KEY).iter();
        let Some(value) = sent.next() else {
            return Ok(Self(None));
        };
        match IdempotencyKey::parse(value.as_bytes()) {
            Some(key) if sent.next().is_none() => Ok(Self(Some(key))),
            _ => Err(ApiError::schema(format_args!(
                "header Idempotency-Key must be sent once and be 1 to {} visible ASCII characters",
                IdempotencyKey::MAX_LENGTH
            ))),
        }
    }
}

fn random_id() -> Result<SandboxId, ApiError> {
    let mut random = [0; 20];
    getrandom::fill(&mut random).map_err(|error| ApiError::internal().caused_by(error))?;
    Ok(SandboxId::from_random(&random))
}

/// The stages as a `Server-Timing` header: milliseconds with three digits.
fn server_timing(stages: &[(&str, Duration)]) -> String {
    stages.iter().fold(String::new(), |mut text, (stage, time)| {
        let separator = if text.is_empty() { "" } else { ", " };
        let _ = write!(text, "{separator}{stage};dur={:.3}", time.as_secs_f64() * 1000.0);
        text
    })
}

/// What a client asks for.
struct Wish {
    template: String,
    timeout_s: u32,
    secure: bool,
    metadata: BTreeMap<String, String>,
    env_vars: BTreeMap<String, String>,
    allow_internet_access: Option<bool>,
    has_network: bool,
    allow_public_traffic: Option<bool>,
    refusal: Option<String>,
}

impl Wish {
    /// Reads the body. What is well-formed and cannot be done is kept for [`Self::check`], which comes later.
    fn parse(fields: &Fields<'_>, version: Version) -> Result<Self, ApiError> {
        let default_timeout_s = match version {
            Version::V1 => DEFAULT_TIMEOUT_V1_S,
            Version::V2 => DEFAULT_TIMEOUT_V2_S,
        };
        let template = fields.required_text("templateID")?.to_owned();
        let timeout_s = fields.count("timeout", Null::Absent)?.unwrap_or(default_timeout_s);
        let metadata = fields.texts("metadata")?.unwrap_or_default();
        let env_vars = fields.texts("envVars")?.unwrap_or_default();
        let allow_internet_access = fields.flag("allow_internet_access", Null::Refused)?;
        // On the older path the client chooses whether its agent also answers callers without any credential.
        let secure = match version {
            Version::V1 => fields.flag("secure", Null::Refused)?.unwrap_or(false),
            Version::V2 => true,
        };
        // The SDK does all of it inside the sandbox; nothing is left to do here.
        fields.object("mcp", Null::Absent)?;

        let mut refusal = None;
        let network = fields.object("network", Null::Refused)?;
        let allow_public_traffic = match &network {
            Some(network) => network.flag("allowPublicTraffic", Null::Absent)?,
            None => None,
        };
        refuse_pausing(fields, &mut refusal)?;
        refuse_iam(fields, &mut refusal)?;
        if let Some(network) = &network {
            refuse_egress(network, &mut refusal)?;
        }
        if fields.array("volumeMounts")?.is_some_and(|mounts| !mounts.is_empty()) {
            refusal.get_or_insert_with(|| fields.unavailable("volumeMounts"));
        }
        for key in ["injections", "resources"] {
            let items = fields.array(key)?.map_or(0, Vec::len);
            if items > ATTACHMENTS_MAX {
                return Err(fields.fault(key, &format!("maximum number of items is {ATTACHMENTS_MAX}")));
            }
            if items > 0 {
                refusal.get_or_insert_with(|| fields.unavailable(key));
            }
        }
        Ok(Self {
            template,
            timeout_s,
            secure,
            metadata,
            env_vars,
            allow_internet_access,
            has_network: network.is_some(),
            allow_public_traffic,
            refusal,
        })
    }

    /// Refuses what is well-formed and cannot be done.
    fn check(&self, caller: &Caller) -> Result<(), ApiError> {
        check_timeout(self.timeout_s, caller)?;
        for (name, value) in &self.env_vars {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                return Err(ApiError::invalid(
                    "envVars: a name must not be empty or hold '=', and neither name nor value may hold a NUL",
                ));
            }
        }
        match &self.refusal {
            Some(why) => Err(ApiError::invalid(why.clone())),
            None => Ok(()),
        }
    }
}

/// Refuses a timeout that a new life of a sandbox cannot have.
pub(super) fn check_timeout(timeout_s: u32, caller: &Caller) -> Result<(), ApiError> {
    if timeout_s == 0 {
        return Err(ApiError::invalid("timeout must be greater than 0"));
    }
    check_longest(timeout_s, caller)
}

/// Refuses a timeout beyond the longest life of a sandbox of the team.
pub(super) fn check_longest(timeout_s: u32, caller: &Caller) -> Result<(), ApiError> {
    let longest_s = caller.quota.limits.max_lifetime_s;
    if timeout_s <= longest_s {
        return Ok(());
    }
    let hours = f64::from(longest_s) / 3600.0;
    Err(ApiError::invalid(format!(
        "timeout cannot be greater than {hours} hours"
    )))
}

fn refuse_pausing(fields: &Fields<'_>, refusal: &mut Option<String>) -> Result<(), ApiError> {
    let pauses = fields.flag("autoPause", Null::Absent)?.unwrap_or(false);
    let keeps_memory = fields.flag("autoPauseMemory", Null::Absent)?.unwrap_or(true);
    let resumes = match fields.object("autoResume", Null::Refused)? {
        None => false,
        Some(resume) => resume
            .flag("enabled", Null::Refused)?
            .ok_or_else(|| resume.missing("enabled"))?,
    };
    let why = if pauses {
        "autoPause is not available on this platform: a sandbox is killed when its timeout ends"
    } else if !keeps_memory {
        "autoPauseMemory: false needs autoPause: true, which is not available on this platform"
    } else if resumes {
        "autoResume is not available on this platform: a sandbox is killed when its timeout ends"
    } else {
        return Ok(());
    };
    refusal.get_or_insert_with(|| why.to_owned());
    Ok(())
}

fn refuse_iam(fields: &Fields<'_>, refusal: &mut Option<String>) -> Result<(), ApiError> {
    let Some(iam) = fields.object("iam", Null::Refused)? else {
        return Ok(());
    };
    let tokens = iam.object("tokens", Null::Absent)?;
    if tokens.is_some_and(|tokens| !tokens.is_empty()) {
        refusal.get_or_insert_with(|| fields.unavailable("iam"));
    }
    Ok(())
}

fn refuse_egress(network: &Fields<'_>, refusal: &mut Option<String>) -> Result<(), ApiError> {
    for key in ["allowOut", "denyOut"] {
        if network.array(key)?.is_some_and(|items| !items.is_empty()) {
            refusal.get_or_insert_with(|| network.unavailable(key));
        }
    }
    if network.text("maskRequestHost")?.is_some_and(|host| !host.is_empty()) {
        refusal.get_or_insert_with(|| network.unavailable("maskRequestHost"));
    }
    for (key, null) in [("rules", Null::Refused), ("egressProxy", Null::Absent)] {
        if network.object(key, null)?.is_some_and(|value| !value.is_empty()) {
            refusal.get_or_insert_with(|| network.unavailable(key));
        }
    }
    Ok(())
}

/// A template as a client names it: `[namespace/]name[:tag]`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TemplateName {
    namespace: Option<String>,
    name: String,
    /// Set unless it is the tag that everything has.
    pub(super) tag: Option<String>,
}

impl TemplateName {
    pub(super) fn parse(text: &str) -> Result<Self, ApiError> {
        let invalid = || ApiError::invalid(format!("invalid template reference {text:?}"));
        let lower = text.trim().to_ascii_lowercase();
        let (path, tag) = match lower.split_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (lower.as_str(), None),
        };
        let (namespace, name) = match path.split_once('/') {
            Some((namespace, name)) => (Some(namespace), name),
            None => (None, path),
        };
        let word = |text: &str, extra: &[u8]| {
            let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || extra.contains(&byte);
            !text.is_empty() && text.bytes().all(allowed)
        };
        let valid = word(name, b"-_")
            && namespace.is_none_or(|namespace| word(namespace, b"-_"))
            && tag.is_none_or(|tag| word(tag, b"-_."));
        if !valid {
            return Err(invalid());
        }
        Ok(Self {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            tag: tag.filter(|tag| *tag != "default").map(str::to_owned),
        })
    }

    /// The template that the name means to a team, if any.
    pub(super) async fn resolve(&self, platform: &Platform, team: &TeamId) -> Result<Option<TemplateRow>, StoreError> {
        if let Some(namespace) = &self.namespace {
            // Only the team's own namespace has anything for it.
            let owner = platform.store.team_by_name(namespace).await?;
            if owner.is_none_or(|owner| owner.id != *team) {
                return Ok(None);
            }
        }
        let found = platform.store.template_resolve(team, &self.name).await?;
        Ok(found.filter(|row| self.namespace.is_none() || row.team_id.as_ref() == Some(team)))
    }
}

async fn find_build(
    platform: &Platform,
    team: &TeamId,
    name: &TemplateName,
) -> Result<(TemplateRow, BuildRow), ApiError> {
    let Some(template) = name.resolve(platform, team).await? else {
        return Err(ApiError::no_template(format!(
            "template \"{}\" does not exist or you have no access to it",
            name.name
        )));
    };
    if let Some(tag) = &name.tag {
        return Err(ApiError::no_template(format!(
            "template \"{}\" has no build with tag \"{tag}\"",
            name.name
        )));
    }
    match platform.store.build_latest_ready(&template.id).await? {
        Some(build) => Ok((template, build)),
        None => Err(ApiError::no_template(format!(
            "template \"{}\" has no finished build with tag \"default\"",
            name.name
        ))),
    }
}

/// The alias to show: the one that was asked by, else the first.
fn shown_alias(aliases: Vec<String>, asked: &str) -> Option<String> {
    if aliases.iter().any(|alias| alias == asked) {
        return Some(asked.to_owned());
    }
    aliases.into_iter().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_names_are_taken_apart() {
        let check = |text: &str, want: Option<(Option<&str>, &str, Option<&str>)>| {
            let want = want.map(|(namespace, name, tag)| TemplateName {
                namespace: namespace.map(str::to_owned),
                name: name.to_owned(),
                tag: tag.map(str::to_owned),
            });
            assert_eq!(TemplateName::parse(text).ok(), want, "{text}");
        };
        check("base", Some((None, "base", None)));
        check("  BASE ", Some((None, "base", None)));
        check("team/base:v1.2", Some((Some("team"), "base", Some("v1.2"))));
        check("base:default", Some((None, "base", None)));
        for bad in ["", ":", "a/b/c", "a:b:c", "ba se", "a/", "/a", "a:", "é", "a.b", "a\0"] {
            check(bad, None);
        }
    }

    #[test]
    fn stages_are_told_in_milliseconds() {
        let stages = [
            ("auth", Duration::from_micros(250)),
            ("total", Duration::from_micros(12_345)),
        ];
        assert_eq!(server_timing(&stages), "auth;dur=0.250, total;dur=12.345");
    }
}

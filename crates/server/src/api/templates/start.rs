//! Starting a build: `POST /v2/templates/{templateID}/builds/{buildID}`.
//!
//! Mistakes of the request are refused with 400, and the build still waits. A template that does not exist, and steps
//! that are wrong, fail the build instead: that is where clients look for it.

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use model::id::{BuildId, TemplateId};
use model::secret::Secret;
use protocol::node::Image;
use store::Change;
use store::builds::{BuildReason, BuildStart, BuildStatus};
use store::keys::SealedSecret;

use super::build::build_of;
use super::find_own;
use super::status::BuildPath;
use crate::api::auth::Caller;
use crate::api::body::RequiredBody;
use crate::api::body::shape::{Nullable, body};
use crate::api::body::values::List;
use crate::api::error::{ApiError, ErrorBody};
use crate::api::state::ApiState;
use crate::builds::recipe::{BuildSpec, Recipe, Registry, Source, Step};
use crate::templates::{TemplateError, TemplateName};

/// Maximum number of steps.
const STEPS_MAX: usize = 1000;
/// Maximum number of arguments of a step.
const ARGS_MAX: usize = 10_000;
/// Names of the image that SDKs take if a client names none. This platform has it built in.
const BASE_IMAGES: [&str; 4] = [
    "e2bdev/base",
    "e2bdev/base:latest",
    "docker.io/e2bdev/base",
    "docker.io/e2bdev/base:latest",
];
/// The version of SDKs from which on steps run as the user of sandboxes.
const STEPS_AS_USER: (u64, u64, u64) = (2, 3, 0);

body! {
    /// A build to start: one of `fromImage` and `fromTemplate`, and what to do with it.
    pub(crate) struct BuildToStart {
        /// An image of an OCI registry.
        "fromImage" from_image: Option<String>;
        /// A template, `[namespace/]name[:tag]`, where the tag may be the id of a build.
        "fromTemplate" from_template: Option<String>;
        /// The credentials for the registry of `fromImage`.
        "fromImageRegistry" registry: Nullable<RegistryCredentials>;
        /// Whether nothing is taken from earlier builds.
        "force" force: Nullable<bool> = false;
        "steps" steps: Option<List<BuildStep, 0, STEPS_MAX>>;
        /// What sandboxes run from their start on.
        "startCmd" start_cmd: Nullable<String>;
        /// What says that a sandbox is ready by ending with 0.
        "readyCmd" ready_cmd: Nullable<String>;
    }
}

body! {
    /// A step of a build.
    struct BuildStep {
        /// `RUN`, `COPY`, `ENV`, `WORKDIR` or `USER`, in either case.
        "type" kind: String;
        "args" args: Option<List<String, 0, ARGS_MAX>>;
        /// The hash of the uploaded files that it copies from.
        "filesHash" files_hash: Nullable<String>;
        /// Whether this step and all later ones take nothing from earlier builds.
        "force" force: Nullable<bool> = false;
    }
}

body! {
    /// The credentials for a registry.
    struct RegistryCredentials {
        /// `registry`, `aws` or `gcp`.
        "type" kind: String;
        /// With `registry`, required.
        "username" username: Nullable<String>;
        /// With `registry`, required.
        "password" password: Nullable<String>;
        /// With `aws`, required.
        "awsAccessKeyId" aws_key_id: Nullable<String>;
        /// With `aws`, required.
        "awsSecretAccessKey" aws_secret: Nullable<String>;
        /// With `aws`, required.
        "awsRegion" aws_region: Nullable<String>;
        /// With `gcp`, required: the key of a service account, as JSON.
        "serviceAccountJson" service_account: Nullable<String>;
    }
}

impl RegistryCredentials {
    fn read(self) -> Result<Registry, ApiError> {
        let needs = |value: Nullable<String>, key: &str| {
            let missing = || ApiError::schema(format_args!("/fromImageRegistry/{key}: property \"{key}\" is missing"));
            value.0.ok_or_else(missing)
        };
        match self.kind.as_str() {
            "registry" => Ok(Registry::Basic {
                username: needs(self.username, "username")?,
                password: Secret::new(needs(self.password, "password")?),
            }),
            "aws" => Ok(Registry::Aws {
                access_key_id: needs(self.aws_key_id, "awsAccessKeyId")?,
                secret_access_key: Secret::new(needs(self.aws_secret, "awsSecretAccessKey")?),
                region: needs(self.aws_region, "awsRegion")?,
            }),
            "gcp" => Ok(Registry::Gcp {
                service_account: Secret::new(needs(self.service_account, "serviceAccountJson")?),
            }),
            _ => Err(ApiError::schema(
                "/fromImageRegistry/type: value is not one of the allowed values [\"registry\",\"aws\",\"gcp\"]",
            )),
        }
    }
}

/// Whether the client is an SDK from before steps ran as the user of sandboxes.
fn runs_steps_as_root(headers: &HeaderMap) -> Result<bool, ApiError> {
    let agent = headers.get(header::USER_AGENT).and_then(|value| value.to_str().ok());
    let versions = agent
        .unwrap_or_default()
        .split_ascii_whitespace()
        .filter_map(|product| {
            let (name, version) = product.split_once('/')?;
            matches!(name, "e2b-js-sdk" | "e2b-python-sdk").then_some(version)
        });
    let Some(version) = versions.into_iter().next() else {
        return Ok(false);
    };
    let release = version.split(['-', '+']).next().unwrap_or_default();
    let mut parts = release.split('.').map(str::parse::<u64>);
    match (parts.next(), parts.next(), parts.next()) {
        (Some(Ok(major)), Some(Ok(minor)), Some(Ok(patch))) => Ok((major, minor, patch) < STEPS_AS_USER),
        _ => Err(ApiError::invalid(format!(
            "invalid SDK version in User-Agent: {version:?}"
        ))),
    }
}

/// A text that is not blank.
fn text(value: Option<String>) -> Option<String> {
    value.filter(|text| !text.trim().is_empty())
}

/// What a build begins with; otherwise why it fails.
async fn source_of(
    state: &ApiState,
    caller: &Caller,
    (image, template, registry): (Option<String>, Option<String>, Option<Registry>),
) -> Result<Result<Source, String>, ApiError> {
    let name = match (image, template) {
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "fromImage and fromTemplate exclude each other: send one of them",
            ));
        }
        (None, None) => {
            return Err(ApiError::invalid(
                "fromImage or fromTemplate is missing: send one of them",
            ));
        }
        (Some(image), None) => {
            let is_base = BASE_IMAGES.contains(&image.trim());
            return Ok(Ok(match is_base {
                true => Source::Base,
                false => Source::Image {
                    reference: image.trim().to_owned(),
                    registry,
                },
            }));
        }
        (None, Some(name)) => name,
    };
    let parsed = match TemplateName::parse(&name) {
        Ok(parsed) => parsed,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let (_, build) = match parsed.find_build(&state.store, &caller.team).await {
        Ok(found) => found,
        Err(TemplateError::Store(error)) => return Err(error.into()),
        Err(error) => return Ok(Err(error.to_string())),
    };
    if build
        .node_id
        .as_ref()
        .is_some_and(|node| node != state.builds.rows.node())
    {
        return Ok(Err(format!(
            "template {name:?} was built on another node of this platform"
        )));
    }
    let Some(spec) = BuildSpec::of(&build) else {
        return Ok(Err(format!("template {name:?} has no stored layers: build it again")));
    };
    Ok(Ok(match spec.image {
        Image::Base if spec.start.is_none() => Source::Base,
        Image::Base | Image::Layers { .. } | Image::Import => Source::Template { build: build.id, spec },
    }))
}

/// Starts a build. Its status tells what becomes of it.
#[utoipa::path(
    post,
    path = "/v2/templates/{templateID}/builds/{buildID}",
    tag = "templates",
    params(
        ("templateID" = String, Path, description = "The id of the template"),
        ("buildID" = String, Path, description = "The id of the build"),
    ),
    request_body(content = BuildToStart),
    responses(
        (status = 202, description = "The build was started"),
        (status = 400, description = "The request is invalid, or the build was started before", body = ErrorBody),
        (status = 403, description = "The template belongs to another team", body = ErrorBody),
        (status = 404, description = "The team has no such template, or it has no such build", body = ErrorBody),
    )
)]
pub(crate) async fn start_build(
    State(state): State<ApiState>,
    caller: Caller,
    path: BuildPath,
    headers: HeaderMap,
    body: RequiredBody<BuildToStart>,
) -> Result<Response, ApiError> {
    let body = body.read()?;
    let registry = body.registry.0.map(RegistryCredentials::read).transpose()?;
    let _: BuildId = path.build.to_ascii_lowercase().parse()?;
    let template = find_own(&path.template, &caller.team, &state.store).await?;
    let build = build_of(&state.builds, &template.id, &path.build).await?;
    if build.status != BuildStatus::Waiting {
        return Err(not_waiting(&build.id));
    }
    let steps_as_root = runs_steps_as_root(&headers)?;
    let sources = (text(body.from_image), text(body.from_template), registry);
    let source = match source_of(&state, &caller, sources).await? {
        Ok(source) => source,
        Err(why) => return refuse(&state, &template.id, &build.id, why).await,
    };
    let registry = match &source {
        Source::Image { registry, .. } => registry.as_ref(),
        Source::Base | Source::Template { .. } => None,
    };
    let sealed = registry.map(|registry| state.builds.seal(&build.id, registry));
    let sealed = sealed
        .transpose()
        .map_err(|error| ApiError::internal().caused_by(error))?;
    let steps = body.steps.map_or_else(Vec::new, |List(steps)| steps);
    let recipe = Recipe {
        source,
        steps: steps.into_iter().map(step).collect(),
        start_cmd: text(body.start_cmd.0),
        ready_cmd: text(body.ready_cmd.0),
        force: body.force,
        steps_as_root,
    };
    let start = BuildStart {
        recipe_json: serde_json::to_string(&recipe).map_err(|error| ApiError::internal().caused_by(error))?,
        registry_sealed: sealed.map(SealedSecret::new),
        now_us: state.clock.now_us(),
    };
    match state.builds.rows.build_start(&template.id, &build.id, &start).await? {
        Change::Applied(started) => {
            tracing::info!(template.id = %template.id, build.id = %build.id, "started a build");
            state.builds.note_started(&started.cancelled);
            Ok(accepted())
        }
        Change::Stale | Change::Missing => Err(not_waiting(&build.id)),
    }
}

fn step(step: BuildStep) -> Step {
    Step {
        kind: step.kind,
        args: step.args.map_or_else(Vec::new, |List(args)| args),
        files_hash: step.files_hash.0,
        force: step.force,
    }
}

/// Fails a build that cannot begin.
async fn refuse(
    state: &ApiState,
    template: &TemplateId,
    build: &BuildId,
    message: String,
) -> Result<Response, ApiError> {
    let reason = BuildReason {
        message,
        step: Some("base".to_owned()),
    };
    let now_us = state.clock.now_us();
    match state.store.build_refuse(template, build, &reason, now_us).await? {
        true => Ok(accepted()),
        false => Err(not_waiting(build)),
    }
}

fn not_waiting(build: &BuildId) -> ApiError {
    ApiError::invalid(format!(
        "build \"{build}\" was started before, or has ended: request another build"
    ))
}

/// 202 without a body. Clients need its length to know that there is none.
fn accepted() -> Response {
    let empty = HeaderValue::from_static("0");
    (StatusCode::ACCEPTED, [(header::CONTENT_LENGTH, empty)]).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_old_sdks_run_as_root() {
        for (agent, want) in [
            ("e2b-python-sdk/2.63.0", Some(false)),
            ("e2b-js-sdk/2.3.0 e2b-cli/2.0", Some(false)),
            ("e2b-js-sdk/2.2.9", Some(true)),
            ("x/1 e2b-python-sdk/1.0.0-beta.1", Some(true)),
            ("curl/8", Some(false)),
            ("e2b-js-sdk/new", None),
            ("", Some(false)),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::USER_AGENT, HeaderValue::from_static(agent));
            assert_eq!(runs_steps_as_root(&headers).ok(), want, "{agent}");
        }
    }
}

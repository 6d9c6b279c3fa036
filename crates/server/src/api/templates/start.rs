//! Starting a build: `POST /v2/templates/{templateID}/builds/{buildID}`, and its form of version 1.
//!
//! Mistakes of the request are refused with 400, and the build still waits. A template that does not exist, and steps
//! that are wrong, fail the build instead: that is where clients look for it.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use model::id::{BuildId, TemplateId};
use model::secret::Secret;
use protocol::node::Image;
use recipes::Carried;
use serde::Deserialize;
use store::Change;
use store::builds::{BuildReason, BuildStart, BuildStatus};
use store::keys::SealedSecret;

use super::error::NotOwnBuild;
use super::status::BuildPath;
use crate::api::auth::Caller;
use crate::api::body::RequiredBody;
use crate::api::body::shape::{Nullable, body};
use crate::api::body::values::{List, Texts};
use crate::api::error::ApiError;
use crate::api::state::ApiState;
use crate::builds::files::is_hash;
use crate::builds::recipe::{BuildSpec, DockerfileSource, Logins, Recipe, Registry, Source, Step};
use crate::templates::{TemplateError, TemplateName};

/// Maximum number of steps.
const STEPS_MAX: usize = 1000;
/// Maximum number of arguments of a step.
const ARGS_MAX: usize = 10_000;
/// Maximum length of the host of a registry.
const HOST_MAX: usize = 260;
/// Maximum number of registries with credentials.
const REGISTRIES_MAX: usize = 16;
/// The version of SDKs from which on steps run as the user of sandboxes.
const STEPS_AS_USER: (u64, u64, u64) = (2, 3, 0);

body! {
    /// A build to start: one of `fromImage`, `fromTemplate`, `fromDockerfile`, `fromArchive` and `fromReadyMade`, and what to do with it.
    pub(crate) struct BuildToStart {
        /// An image of an OCI registry.
        "fromImage" from_image: Option<String>;
        /// A template, `[namespace/]name[:tag]`, where the tag may be the id of a build.
        "fromTemplate" from_template: Option<String>;
        /// A Dockerfile, which the platform executes.
        "fromDockerfile" from_dockerfile: Nullable<DockerfileToBuild>;
        /// The hash of an uploaded archive: a root file system, or an image as `docker save` writes it or in OCI format.
        "fromArchive" from_archive: Nullable<String>;
        /// A recipe that comes with the program. Its start command and its ready command are those of the template, unless others are sent.
        "fromReadyMade" from_ready_made: Nullable<ReadyMadeToBuild>;
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
    /// A Dockerfile to execute.
    struct DockerfileToBuild {
        /// The Dockerfile.
        "dockerfile" dockerfile: String;
        /// Arguments of the build, by name. They are not for secrets: the template shows them.
        "buildArgs" args: Option<Texts>;
        /// The stage to build; default: the last one.
        "target" target: Nullable<String>;
        /// The hashes of uploaded files, by the line of the `COPY` or `ADD` that copies from them.
        "files" files: Option<Texts>;
        /// The credentials for the registries of its images.
        "registries" registries: Option<List<RegistryLogin, 0, REGISTRIES_MAX>>;
    }
}

body! {
    /// A recipe of `GET /ready-made-templates`.
    struct ReadyMadeToBuild {
        /// Name of the recipe.
        "name" name: String;
        /// Arguments of the build, by name. They are not for secrets: the template shows them.
        "buildArgs" args: Option<Texts>;
    }
}

body! {
    /// The credentials for one registry.
    struct RegistryLogin {
        /// `host` or `host:port`, as in the names of images; `docker.io` for names without one. The credentials are sent
        /// to this registry, and to where it has tokens given out.
        "host" host: String;
        /// The credentials.
        "credentials" credentials: RegistryCredentials;
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
    /// What they are, at a place in the body.
    fn read(self, at: &str) -> Result<Registry, ApiError> {
        let needs = |value: Nullable<String>, key: &str| {
            let missing = || ApiError::schema(format_args!("{at}/{key}: property \"{key}\" is missing"));
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
            _ => Err(ApiError::schema(format_args!(
                "{at}/type: value is not one of the allowed values [\"registry\",\"aws\",\"gcp\"]"
            ))),
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

impl DockerfileToBuild {
    fn read(self) -> Result<DockerfileSource, ApiError> {
        let files = self.files.unwrap_or_default().into_iter().map(|(line, hash)| {
            let number = line.parse::<usize>().ok().filter(|_| is_hash(&hash));
            number.map(|number| (number, hash)).ok_or_else(|| {
                ApiError::invalid(format!(
                    "fromDockerfile: files: {line:?} must be the number of a line, and its value 64 hexadecimal digits"
                ))
            })
        });
        let mut registries = Logins::new();
        let logins = self.registries.map_or_else(Vec::new, |List(logins)| logins);
        for RegistryLogin { host, credentials } in logins {
            let is_host = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
            if host.is_empty() || host.len() > HOST_MAX || !host.bytes().all(is_host) {
                return Err(ApiError::invalid(
                    "fromDockerfile: registries: host must be host or host:port, without a scheme and a path",
                ));
            }
            let credentials = credentials.read("/fromDockerfile/registries/credentials")?;
            if registries.insert(host.to_ascii_lowercase(), credentials).is_some() {
                return Err(ApiError::invalid(format!(
                    "fromDockerfile: registries: host \"{host}\" is there twice"
                )));
            }
        }
        Ok(DockerfileSource {
            registries,
            text: self.dockerfile,
            args: self.args.unwrap_or_default(),
            target: self.target.0,
            files: files.collect::<Result<_, _>>()?,
        })
    }
}

impl ReadyMadeToBuild {
    /// The recipe, and the arguments of its build.
    fn read(self) -> Result<ReadyMade, ApiError> {
        let recipe = recipes::named(&self.name).ok_or_else(|| {
            let names: Vec<_> = recipes::all().iter().map(|one| one.name).collect();
            ApiError::invalid(format!(
                "fromReadyMade: there is no {:?}; there is {}",
                self.name,
                names.join(", ")
            ))
        })?;
        let args = self.args.unwrap_or_default();
        let known = recipe.arguments().map_err(ApiError::failed)?;
        match args.keys().find(|name| known.iter().all(|one| one.name != **name)) {
            None => Ok(ReadyMade { recipe, args }),
            Some(name) => Err(ApiError::invalid(format!(
                "fromReadyMade: {} takes no argument {name:?}: see GET /ready-made-templates",
                recipe.name
            ))),
        }
    }
}

/// A recipe that comes with the program, to be built.
struct ReadyMade {
    recipe: &'static Carried,
    args: BTreeMap<String, String>,
}

/// What a request names to begin with.
struct Sources {
    image: Option<String>,
    template: Option<String>,
    registry: Option<Registry>,
    dockerfile: Option<DockerfileSource>,
    archive: Option<String>,
    ready_made: Option<ReadyMade>,
}

/// What a build begins with; otherwise why it fails.
async fn source_of(state: &ApiState, caller: &Caller, sources: Sources) -> Result<Result<Source, String>, ApiError> {
    let Sources {
        image,
        template,
        registry,
        dockerfile,
        archive,
        ready_made,
    } = sources;
    let given = [
        image.is_some(),
        template.is_some(),
        dockerfile.is_some(),
        archive.is_some(),
        ready_made.is_some(),
    ];
    match given.into_iter().filter(|given| *given).count() {
        0 => {
            return Err(ApiError::invalid(
                "fromImage or fromTemplate is missing: send one of them",
            ));
        }
        1 => {}
        _ => {
            return Err(ApiError::invalid(
                "fromImage and fromTemplate exclude each other, as do fromDockerfile, fromArchive and fromReadyMade: send one of them",
            ));
        }
    }
    if registry.is_some() && (dockerfile.is_some() || archive.is_some() || ready_made.is_some()) {
        return Err(ApiError::invalid(
            "fromImageRegistry is for fromImage: the credentials for images of a Dockerfile are fromDockerfile.registries",
        ));
    }
    if let Some(dockerfile) = dockerfile {
        return Ok(match dockerfile.plan() {
            Ok(_) => Ok(Source::Dockerfile(dockerfile)),
            Err(refusal) => Err(refusal.to_string()),
        });
    }
    if let Some(ReadyMade { recipe, args }) = ready_made {
        let files = state.builds.files.store_recipe(&caller.team, recipe).await;
        return Ok(Ok(Source::Dockerfile(DockerfileSource {
            text: recipe.dockerfile().to_owned(),
            args,
            target: None,
            files: files.map_err(ApiError::upload)?,
            registries: Logins::new(),
        })));
    }
    if let Some(hash) = archive {
        return if is_hash(&hash) {
            Ok(Ok(Source::Archive { hash }))
        } else {
            Err(ApiError::invalid(
                "fromArchive must be 64 lower-case hexadecimal digits",
            ))
        };
    }
    let name = match (image, template) {
        (Some(image), _) => {
            return Ok(Ok(Source::image(image.trim(), registry)));
        }
        (None, name) => name.unwrap_or_default(),
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
        .is_some_and(|node| !state.builds.is_of_service(node))
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
        Image::Base | Image::Layers { .. } | Image::Import | Image::Copy { .. } => {
            let spec = spec.without_memory();
            Source::Template { build: build.id, spec }
        }
    }))
}

/// Starts a build. Its status tells what becomes of it.
#[utoipa::path(
    post,
    path = "/v2/templates/{templateID}/builds/{buildID}",
    tag = "templates",
    params(BuildPath),
    request_body(content = BuildToStart),
    responses(
        (status = 202, description = "The build was started"),
        (status = 400, description = "The request is invalid, or the build was started before"),
        NotOwnBuild,
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
    let registry = body.registry.0;
    let registry = registry.map(|registry| registry.read("/fromImageRegistry"));
    let registry = registry.transpose()?;
    let (template, build) = path.find(&caller, &state.builds).await?;
    if build.status != BuildStatus::Waiting {
        return Err(not_waiting(&build.id));
    }
    let steps_as_root = runs_steps_as_root(&headers)?;
    let ready_made = body.from_ready_made.0.map(ReadyMadeToBuild::read).transpose()?;
    let settings = ready_made.as_ref().map(|one| one.recipe.settings()).transpose();
    let settings = settings.map_err(ApiError::failed)?.unwrap_or_default();
    let sources = Sources {
        image: text(body.from_image),
        template: text(body.from_template),
        registry,
        dockerfile: body.from_dockerfile.0.map(DockerfileToBuild::read).transpose()?,
        archive: text(body.from_archive.0),
        ready_made,
    };
    let source = match source_of(&state, &caller, sources).await? {
        Ok(source) => source,
        Err(why) => return refuse(&state, &template.id, &build.id, why).await,
    };
    let sealed = state.builds.seal(&build.id, &source);
    let sealed = sealed.map_err(ApiError::failed)?;
    let steps = body.steps.map_or_else(Vec::new, |List(steps)| steps);
    let recipe = Recipe {
        source,
        steps: steps.into_iter().map(step).collect(),
        start_cmd: text(body.start_cmd.0).or(settings.start_cmd),
        ready_cmd: text(body.ready_cmd.0).or(settings.ready_cmd),
        force: body.force,
        steps_as_root,
    };
    start(&state, &template.id, &build.id, &recipe, sealed).await
}

/// What the request of a build of version 1 left.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Requested {
    dockerfile: String,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

/// Starts a build that was requested with a Dockerfile, which the platform executes. No files are uploaded for it, so it
/// can copy only from its own stages and from images. Its status tells what becomes of it.
#[utoipa::path(
    post,
    path = "/templates/{templateID}/builds/{buildID}",
    tag = "templates",
    params(BuildPath),
    responses(
        (status = 202, description = "The build was started"),
        (status = 400, description = "The build was started before, or was requested without a Dockerfile"),
        NotOwnBuild,
    )
)]
pub(crate) async fn start_build_v1(
    State(state): State<ApiState>,
    caller: Caller,
    path: BuildPath,
) -> Result<Response, ApiError> {
    let (template, build) = path.find(&caller, &state.builds).await?;
    if build.status != BuildStatus::Waiting {
        return Err(not_waiting(&build.id));
    }
    let sent = state.store.build_request_json(&build.id).await?;
    let Some(sent) = sent.and_then(|sent| serde_json::from_str::<Requested>(&sent).ok()) else {
        return Err(ApiError::invalid(format!(
            "build \"{}\" was requested without a Dockerfile: start it with POST /v2/templates/{}/builds/{}",
            build.id, template.id, build.id
        )));
    };
    let dockerfile = DockerfileSource {
        text: sent.dockerfile,
        args: BTreeMap::new(),
        target: None,
        files: BTreeMap::new(),
        registries: Logins::new(),
    };
    if let Err(refusal) = dockerfile.plan() {
        return refuse(&state, &template.id, &build.id, refusal.to_string()).await;
    }
    let recipe = Recipe {
        source: Source::Dockerfile(dockerfile),
        steps: Vec::new(),
        start_cmd: text(sent.start_cmd),
        ready_cmd: text(sent.ready_cmd),
        force: false,
        steps_as_root: false,
    };
    start(&state, &template.id, &build.id, &recipe, None).await
}

/// Starts a build with a recipe.
async fn start(
    state: &ApiState,
    template: &TemplateId,
    build: &BuildId,
    recipe: &Recipe,
    sealed: Option<String>,
) -> Result<Response, ApiError> {
    let start = BuildStart {
        recipe_json: serde_json::to_string(recipe).map_err(ApiError::failed)?,
        registry_sealed: sealed.map(SealedSecret::new),
        now_us: state.clock.now_us(),
    };
    match state.builds.rows.build_start(template, build, &start).await? {
        Change::Applied(started) => {
            tracing::info!(template.id = %template, build.id = %build, "started a build");
            state.builds.note_started(&started.cancelled);
            Ok(accepted())
        }
        Change::Stale | Change::Missing => Err(not_waiting(build)),
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
    if state.store.build_refuse(template, build, &reason, now_us).await? {
        Ok(accepted())
    } else {
        Err(not_waiting(build))
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

//! Operations that clients know and that are not built yet.
//!
//! Without a route they would be answered 404, which clients take for a missing sandbox. So each has a route that
//! answers 501 and names what is missing, after the checks of any other route: 401 without valid credentials, and 404
//! for a sandbox that the team does not have. The API document marks them as not built. To build one,
//! delete its entry here and in the list in `tests/it/not_built.rs`.

use axum::extract::RawPathParams;
use axum::extract::State;
use axum::extract::rejection::RawPathParamsRejection;
use axum::routing::{MethodFilter, on};
use http::StatusCode;
use model::id::SandboxId;
use model::lifecycle;
use utoipa::openapi::path::{HttpMethod, Operation, OperationBuilder, Parameter};
use utoipa_axum::router::OpenApiRouter;

use super::auth::{Caller, SANDBOX_ID_PATTERN};
use super::describe::{error, path_parameter};
use super::error::ApiError;
use super::state::ApiState;

/// An operation that is not built yet.
struct NotBuilt {
    method: HttpMethod,
    path: &'static str,
    id: &'static str,
    tag: &'static str,
    /// What it does, as the subject of a sentence.
    what: &'static str,
}

const VOLUMES: &str = "volumes";

macro_rules! not_built {
    ($($method:ident $path:literal $id:ident $tag:ident $what:literal;)*) => {
        &[$(NotBuilt {
            method: HttpMethod::$method,
            path: $path,
            id: stringify!($id),
            tag: $tag,
            what: $what,
        }),*]
    };
}

/// All operations that are not built yet.
const NOT_BUILT: &[NotBuilt] = not_built! {
    Get "/volumes" list_volumes VOLUMES "listing volumes";
    Post "/volumes" create_volume VOLUMES "creating a volume";
    Get "/volumes/{volumeID}" get_volume VOLUMES "reading a volume";
    Delete "/volumes/{volumeID}" delete_volume VOLUMES "deleting a volume";
};

/// Adds their routes, each with its operation.
pub(super) fn add(mut router: OpenApiRouter<ApiState>) -> OpenApiRouter<ApiState> {
    for missing in NOT_BUILT {
        let (filter, method) = match missing.method {
            HttpMethod::Put => (MethodFilter::PUT, "PUT"),
            HttpMethod::Post => (MethodFilter::POST, "POST"),
            HttpMethod::Patch => (MethodFilter::PATCH, "PATCH"),
            HttpMethod::Delete => (MethodFilter::DELETE, "DELETE"),
            _ => (MethodFilter::GET, "GET"),
        };
        let handler = move |State(state): State<ApiState>, caller: Caller, parameters: Parameters| async move {
            match parameters.check(&caller, &state).await {
                Ok(()) => ApiError::not_built(missing.what, method, missing.path),
                Err(refusal) => refusal,
            }
        };
        router = router.route(missing.path, on(filter, handler));
        let paths = &mut router.get_openapi_mut().paths;
        paths.add_path_operation(missing.path, vec![missing.method.clone()], operation(missing, method));
    }
    router
}

impl ApiError {
    /// 501: an operation that clients know and that is not built yet.
    pub(super) fn not_built(what: &str, method: &str, path: &str) -> Self {
        let why = format!("{what} is not built yet: this platform does not have {method} {path}");
        Self::new(StatusCode::NOT_IMPLEMENTED, why).code("not_built")
    }
}

/// The parameters of any path.
type Parameters = Result<RawPathParams, RawPathParamsRejection>;

trait Check {
    async fn check(self, caller: &Caller, state: &ApiState) -> Result<(), ApiError>;
}

impl Check for Parameters {
    /// Refuses ids of resources that the team does not have.
    async fn check(self, caller: &Caller, state: &ApiState) -> Result<(), ApiError> {
        let parameters = self.map_err(|_| ApiError::invalid("invalid path: not valid UTF-8"))?;
        for (name, text) in &parameters {
            match name {
                "sandboxID" => {
                    let id = SandboxId::from_path(text)?;
                    let entry = caller.sandbox(&state.sandboxes, &id).await?;
                    if entry.state() != lifecycle::State::Running {
                        return Err(ApiError::no_sandbox(id));
                    }
                }
                "teamID" if text != caller.team.as_str() => return Err(ApiError::no_team(text)),
                _ => {}
            }
        }
        Ok(())
    }
}

fn operation(missing: &NotBuilt, method: &str) -> Operation {
    let mut operation = OperationBuilder::new()
        .operation_id(Some(missing.id))
        .tag(missing.tag)
        .summary(Some(format!("Not built yet: {}", missing.what)))
        .response(
            "501",
            error(&format!("This platform does not have {method} {} yet", missing.path)),
        );
    for name in missing
        .path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
    {
        operation = operation.parameter(parameter(name));
    }
    if missing.path.contains("{sandboxID}") {
        operation = operation.response("404", error("The team has no such sandbox, or it is not running"));
    }
    operation.build()
}

fn parameter(name: &str) -> Parameter {
    let pattern = match name {
        "sandboxID" => SANDBOX_ID_PATTERN,
        _ => "^[A-Za-z0-9_.:-]+$",
    };
    path_parameter(name, None, Some(pattern))
}

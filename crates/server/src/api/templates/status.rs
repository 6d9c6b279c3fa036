//! The status and the log of a build.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::{StatusCode, request};
use model::id::BuildId;
use model::log::Level;
use serde::Serialize;
use store::Store;
use store::builds::{BuildLogQuery, BuildLogRow, BuildReason, BuildRow, BuildStatus};
use store::records::LogOrder;
use store::templates::TemplateRow;
use utoipa::openapi::path::{Parameter, ParameterIn};
use utoipa::{IntoParams, ToSchema};

use super::error::NotOwnBuild;
use super::{TemplateBuildStatus, find_own};
use crate::api::auth::Caller;
use crate::api::describe::path_parameter;
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::api::query::shape::{EnumParameter, Number, OneOf, Params, query};
use crate::builds::Builds;
use crate::builds::lost::lost_layer;
use crate::clock::{Clock, SECOND_US, rfc3339};

/// Default and maximum number of log entries in a response (API contract).
const LIMIT: i64 = 100;
/// How far back a log is read, in seconds (API contract).
const WINDOW_S: i64 = 7 * 24 * 3600;

query! {
    /// Which entries of the log the status has.
    pub(crate) struct StatusParameters {
        /// How many entries to leave out, of those with the level.
        "logsOffset" offset: Number<0, { i32::MAX as i64 }> = 0;
        /// Maximum number of entries, oldest first.
        "limit" limit: Number<0, LIMIT> = LIMIT;
        /// Minimum level.
        "level" level: OneOf<Level>;
    }
}

query! {
    /// Which entries of the log.
    pub(crate) struct BuildLogParameters {
        /// Where to begin, in milliseconds since the Unix epoch; default: the oldest entry, or the newest with
        /// `direction=backward`.
        "cursor" cursor_ms: Number<0, { i64::MAX }>;
        /// Maximum number of entries.
        "limit" limit: Number<0, LIMIT> = LIMIT;
        /// Reading direction from `cursor`; default: `forward`.
        "direction" direction: OneOf<LogOrder>;
        /// Minimum level.
        "level" level: OneOf<Level>;
        /// Where the log is read from. There is one place, so both are the same.
        "source" source: OneOf<LogSource>;
    }
}

/// Where the log of a build is read from.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LogSource {
    Temporary,
    Persistent,
}

impl EnumParameter for LogSource {
    const VALUES: &'static [(&'static str, Self)] = &[("temporary", Self::Temporary), ("persistent", Self::Persistent)];
    const DESCRIPTION: &'static str = "Where the log of a build is read from.";
}

/// Severity of a line in the log of a build.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum BuildLogLevel {
    Debug,
    Info,
    Warn,
    Error,
}

/// A line in the log of a build.
#[derive(Serialize, ToSchema)]
struct BuildLogEntry {
    #[schema(format = DateTime)]
    timestamp: String,
    message: String,
    #[schema(inline)]
    level: BuildLogLevel,
    /// The step: `base`, a number from 1, or `finalize`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    step: Option<String>,
}

/// Why a build failed.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct BuildStatusReason {
    message: String,
    /// The step that failed, if it was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    step: Option<String>,
    /// Warnings and errors of this step, among the entries of this response.
    log_entries: Vec<BuildLogEntry>,
}

/// The status of a build, with a part of its log.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TemplateBuildInfo {
    #[serde(rename = "templateID")]
    template_id: String,
    #[serde(rename = "buildID")]
    build_id: String,
    status: TemplateBuildStatus,
    /// The entries as lines.
    logs: Vec<String>,
    log_entries: Vec<BuildLogEntry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    reason: Option<BuildStatusReason>,
}

/// The log of a build.
#[derive(Serialize, ToSchema)]
struct BuildLogs {
    logs: Vec<BuildLogEntry>,
}

impl From<&BuildLogRow> for BuildLogEntry {
    fn from(row: &BuildLogRow) -> Self {
        Self {
            timestamp: rfc3339(row.at_us),
            message: row.message.clone(),
            level: match row.level {
                Level::Debug => BuildLogLevel::Debug,
                Level::Info => BuildLogLevel::Info,
                Level::Warn => BuildLogLevel::Warn,
                Level::Error => BuildLogLevel::Error,
            },
            step: row.step.clone(),
        }
    }
}

/// The template and the build of a path, as text.
pub(crate) struct BuildPath {
    pub(super) template: String,
    pub(super) build: String,
}

impl IntoParams for BuildPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![
            path_parameter("templateID", Some("The id of the template"), None),
            path_parameter("buildID", Some("The id of the build"), None),
        ]
    }
}

impl BuildPath {
    /// The template, which must be one of the team, and its build.
    pub(super) async fn find(&self, caller: &Caller, builds: &Builds) -> Result<(TemplateRow, BuildRow), ApiError> {
        let id: BuildId = self.build.to_ascii_lowercase().parse()?;
        let store = builds.rows.store();
        let template = find_own(&self.template, &caller.team, store).await?;
        match store.build_by_id(&template.id, &id).await? {
            Some(build) => Ok((template, build)),
            None => Err(ApiError::no_template(format!(
                "template \"{}\" has no build \"{id}\"",
                template.id
            ))),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for BuildPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let Path((template, build)) = Path::<(String, String)>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("invalid template reference: not valid UTF-8"))?;
        Ok(Self { template, build })
    }
}

fn whole(number: i64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Returns the status of a build, with a part of its log. It is complete once the status is `ready` or `error`.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/builds/{buildID}/status",
    tag = "templates",
    params(
        BuildPath,
        StatusParameters,
    ),
    responses((status = 200, description = "The status", body = TemplateBuildInfo), NotOwnBuild)
)]
pub(crate) async fn get_build_status(
    State(store): State<Store>,
    State(builds): State<Arc<Builds>>,
    caller: Caller,
    path: BuildPath,
    Params(which): Params<StatusParameters>,
) -> Result<Response, ApiError> {
    // The status is read before the log, which is complete when the status is final.
    let (template, mut build) = path.find(&caller, &builds).await?;
    if let Some(layer) = builds.lost([&build]).await.remove(&build.id) {
        build.status = BuildStatus::Failed;
        build.reason = Some(BuildReason {
            message: lost_layer(&layer),
            step: None,
        });
    }
    let query = BuildLogQuery {
        from_us: 0,
        to_us: i64::MAX,
        level: which.level.unwrap_or(Level::Debug),
        offset: whole(which.offset),
        limit: whole(which.limit),
        is_backward: false,
    };
    let rows = store.build_log_list(&build.id, &query).await?;
    let lines = rows
        .iter()
        .map(|row| format!("[{}] {}\n", rfc3339(row.at_us), row.message));
    let info = TemplateBuildInfo {
        template_id: template.id.into(),
        logs: lines.collect(),
        log_entries: rows.iter().map(BuildLogEntry::from).collect(),
        status: build.status.into(),
        reason: reason(&build, &rows),
        build_id: build.id.into(),
    };
    json(StatusCode::OK, &info)
}

fn reason(build: &BuildRow, rows: &[BuildLogRow]) -> Option<BuildStatusReason> {
    if build.status != BuildStatus::Failed {
        return None;
    }
    let reason = build.reason.as_ref()?;
    let about = rows
        .iter()
        .filter(|row| row.level >= Level::Warn && reason.step.is_some() && row.step == reason.step);
    Some(BuildStatusReason {
        message: reason.message.clone(),
        step: reason.step.clone(),
        log_entries: about.map(BuildLogEntry::from).collect(),
    })
}

/// Returns the log of a build, of the last 7 days.
#[utoipa::path(
    get,
    path = "/templates/{templateID}/builds/{buildID}/logs",
    tag = "templates",
    params(
        BuildPath,
        BuildLogParameters,
    ),
    responses((status = 200, description = "The log", body = BuildLogs), NotOwnBuild)
)]
pub(crate) async fn get_build_logs(
    State(store): State<Store>,
    State(builds): State<Arc<Builds>>,
    State(clock): State<Clock>,
    caller: Caller,
    path: BuildPath,
    Params(which): Params<BuildLogParameters>,
) -> Result<Response, ApiError> {
    let (_, build) = path.find(&caller, &builds).await?;
    // One place has all entries.
    let (Some(LogSource::Temporary | LogSource::Persistent) | None) = which.source;
    // The whole millisecond of the cursor is included, so a pager sees the entry at the boundary again.
    let cursor_us = which.cursor_ms.map(|ms| ms.saturating_mul(1000));
    let is_backward = matches!(which.direction, Some(LogOrder::Backward));
    let oldest_us = clock.now_us() - WINDOW_S * SECOND_US;
    let (from_us, to_us) = if is_backward {
        (0, cursor_us.map_or(i64::MAX, |us| us.saturating_add(999)))
    } else {
        (cursor_us.unwrap_or(0), i64::MAX)
    };
    let query = BuildLogQuery {
        from_us: from_us.max(oldest_us),
        to_us,
        level: which.level.unwrap_or(Level::Debug),
        offset: 0,
        limit: whole(which.limit),
        is_backward,
    };
    let rows = store.build_log_list(&build.id, &query).await?;
    let logs = BuildLogs {
        logs: rows.iter().map(BuildLogEntry::from).collect(),
    };
    json(StatusCode::OK, &logs)
}

//! `GET /teams/{teamID}/limits`: what the operator allows the caller's team, and what of it is in use.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::auth::Caller;
use super::error::ApiError;
use super::json::json;
use super::team_metrics::{NotTheTeam, TeamPath};
use crate::builds::Builds;

const MIB: u64 = 1024 * 1024;

/// A limit of a team.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TeamLimit {
    /// What is limited.
    name: LimitName,
    /// The most that there may be; absent where the operator has set none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    limit: Option<u32>,
    /// How much of it is in use on the server that answers; absent for what is not used up, or has no limit and is not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    used: Option<u64>,
}

/// What is limited for a team, with its unit.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
enum LimitName {
    /// Sandboxes that run.
    Sandboxes,
    /// Cores of all sandboxes that run.
    CpuCount,
    /// Memory of all sandboxes, in MiB.
    #[serde(rename = "memoryMB")]
    MemoryMb,
    /// Sandboxes that are paused.
    PausedSandboxes,
    /// Disks of sandboxes that are paused, in MiB.
    #[serde(rename = "pausedDiskMB")]
    PausedDiskMb,
    /// Layers of templates and snapshots, in MiB.
    #[serde(rename = "templateDiskMB")]
    TemplateDiskMb,
    /// Builds that have not ended.
    Builds,
    /// Cores of one template.
    TemplateCpuCount,
    /// Memory of one template, in MiB.
    #[serde(rename = "templateMemoryMB")]
    TemplateMemoryMb,
    /// Time that a sandbox runs at most from its start, in seconds.
    MaxLifetimeSeconds,
    /// Requests that create sandboxes, per minute.
    CreatesPerMinute,
    /// Requests to the API, per second.
    RequestsPerSecond,
}

/// Returns the limits of the team, and what it uses of those that can be used up.
#[utoipa::path(
    get,
    path = "/teams/{teamID}/limits",
    tag = "teams",
    params(TeamPath),
    responses((status = 200, description = "The limits", body = Vec<TeamLimit>), NotTheTeam)
)]
pub(crate) async fn list_team_limits(
    State(builds): State<Arc<Builds>>,
    caller: Caller,
    team: TeamPath,
) -> Result<Response, ApiError> {
    team.check(&caller)?;
    let limits = &caller.quota.limits;
    let used = caller.quota.used();
    // Nobody else asks for it, and it has to be added up.
    let template_mb = match limits.template_disk_mb {
        Some(_) => Some(builds.template_bytes(&caller.team).await.map_err(ApiError::failed)? / MIB),
        None => None,
    };
    let of = |name, limit, used| TeamLimit { name, limit, used };
    let all = [
        of(LimitName::Sandboxes, limits.sandboxes, Some(used.sandboxes)),
        of(LimitName::CpuCount, limits.cpu_count, Some(used.cpu_count)),
        of(LimitName::MemoryMb, limits.memory_mb, Some(used.memory_mb)),
        of(
            LimitName::PausedSandboxes,
            Some(limits.paused_sandboxes),
            Some(used.paused),
        ),
        of(
            LimitName::PausedDiskMb,
            limits.paused_disk_mb,
            Some(used.paused_disk_mb),
        ),
        of(LimitName::TemplateDiskMb, limits.template_disk_mb, template_mb),
        of(LimitName::Builds, Some(limits.builds), None),
        of(LimitName::TemplateCpuCount, Some(limits.template_cpu_count), None),
        of(LimitName::TemplateMemoryMb, Some(limits.template_memory_mb), None),
        of(LimitName::MaxLifetimeSeconds, Some(limits.max_lifetime_s), None),
        of(LimitName::CreatesPerMinute, limits.creates_per_minute, None),
        of(LimitName::RequestsPerSecond, limits.requests_per_second, None),
    ];
    json(StatusCode::OK, &all)
}

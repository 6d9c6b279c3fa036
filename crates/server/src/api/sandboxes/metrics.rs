//! `GET /sandboxes/{sandboxID}/metrics` and `GET /sandboxes/metrics`.
//!
//! Metrics outlive their sandbox for a while, so whether it exists is not asked: one that is not there, or is another
//! team's, has none.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::{StatusCode, Uri};
use model::id::SandboxId;
use serde::Serialize;
use utoipa::{IntoParams, ToSchema};

use super::SandboxParameter;
use crate::api::auth::{Caller, SandboxPath};
use crate::api::error::ApiError;
use crate::api::json;
use crate::api::query::Query;
use crate::clock::{SECOND_US, rfc3339};
use crate::lifecycle::Platform;
use crate::records::Sample;
use crate::records::buckets::thin;

/// Most sandboxes of one request (API contract).
const BATCH_MAX: usize = 100;

/// Which samples are wanted.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "it describes a query that `Query` reads")]
struct MetricParameters {
    /// The first second that counts, since the Unix epoch. Without it, that of the first sample.
    #[param(required = false, minimum = 0)]
    start: i64,
    /// The last second that counts, since the Unix epoch. Without it, that of the last sample.
    #[param(required = false, minimum = 0)]
    end: i64,
}

/// Which sandboxes are wanted.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "it describes a query that `Query` reads")]
struct BatchParameters {
    /// Ids of sandboxes, joined by commas, each once.
    #[param(style = Form, explode = false, min_items = 1, max_items = 100, inline)]
    sandbox_ids: BTreeSet<ShownId>,
}

/// The id of a sandbox, as paths have it too.
#[derive(PartialEq, Eq, PartialOrd, Ord, ToSchema)]
#[schema(pattern = "^[a-z0-9]{1,60}(-[a-z0-9]+)?$")]
struct ShownId(String);

/// What a sandbox used at one moment.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SandboxMetric {
    #[schema(format = DateTime)]
    timestamp: String,
    /// The same time, in seconds since the Unix epoch.
    timestamp_unix: i64,
    cpu_count: u32,
    /// Share of its cores that it used since the sample before, in percent: 100 is all of them.
    cpu_used_pct: f64,
    /// Bytes that its processes hold.
    mem_used: u64,
    mem_total: u64,
    /// Bytes of page cache, which the kernel drops when the memory is wanted.
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

impl SandboxMetric {
    fn new(sample: &Sample) -> Self {
        Self {
            timestamp: rfc3339(sample.at_us),
            timestamp_unix: sample.at_us.div_euclid(SECOND_US),
            cpu_count: sample.cpu_count,
            cpu_used_pct: f64::from(sample.cpu_used_centi) / 100.0,
            mem_used: sample.memory_used,
            mem_total: sample.memory_total,
            mem_cache: sample.memory_cache,
            disk_used: sample.disk_used,
            disk_total: sample.disk_total,
        }
    }
}

/// The newest samples of some sandboxes.
#[derive(Serialize, ToSchema)]
struct SandboxesMetrics {
    /// By id. A sandbox without samples is left out.
    sandboxes: BTreeMap<String, SandboxMetric>,
}

/// What a sandbox used over time, oldest sample first. There is one every five seconds; over an hour and more, each
/// stands for a longer time and has the greatest of each value.
#[utoipa::path(
    get,
    path = "/sandboxes/{sandboxID}/metrics",
    tag = "sandboxes",
    params(SandboxParameter, MetricParameters),
    responses((status = 200, description = "The samples; none of a sandbox that is not there", body = Vec<SandboxMetric>))
)]
pub(crate) async fn get_sandbox_metrics(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
) -> Result<Response, ApiError> {
    let query = Query::of(&uri)?;
    let start_s = query.integer("start", 0..=i64::MAX)?;
    let end_s = query.integer("end", 0..=i64::MAX)?;
    if let (Some(start_s), Some(end_s)) = (start_s, end_s)
        && start_s > end_s
    {
        return Err(ApiError::invalid(
            "invalid time range: \"start\" must not be later than \"end\"",
        ));
    }
    let from_us = start_s.unwrap_or(0).saturating_mul(SECOND_US);
    // The last second counts to its end.
    let to_us = end_s.map_or(i64::MAX, |end_s| {
        end_s.saturating_mul(SECOND_US).saturating_add(SECOND_US - 1)
    });
    let samples = platform
        .records
        .samples(&platform.store, &caller.team, &id, from_us, to_us)
        .await?;
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return json(StatusCode::OK, &[(); 0]);
    };
    let begun_s = start_s.unwrap_or(first.at_us.div_euclid(SECOND_US));
    let ended_s = end_s.unwrap_or(last.at_us.div_euclid(SECOND_US));
    let metrics: Vec<SandboxMetric> = thin(&samples, ended_s - begun_s)
        .iter()
        .map(SandboxMetric::new)
        .collect();
    json(StatusCode::OK, &metrics)
}

/// The newest sample of each of some sandboxes.
#[utoipa::path(
    get,
    path = "/sandboxes/metrics",
    tag = "sandboxes",
    params(BatchParameters),
    responses((status = 200, description = "The samples", body = SandboxesMetrics))
)]
pub(crate) async fn list_sandboxes_metrics(
    State(platform): State<Arc<Platform>>,
    caller: Caller,
    uri: Uri,
) -> Result<Response, ApiError> {
    let ids = parse_ids(&Query::of(&uri)?)?;
    let mut sandboxes = BTreeMap::new();
    for id in ids {
        if let Some(sample) = platform.records.latest(&platform.store, &caller.team, &id).await? {
            sandboxes.insert(id.into(), SandboxMetric::new(&sample));
        }
    }
    json(StatusCode::OK, &SandboxesMetrics { sandboxes })
}

fn parse_ids(query: &Query) -> Result<BTreeSet<SandboxId>, ApiError> {
    const NAME: &str = "sandbox_ids";
    let fault = |why: &str| ApiError::schema(format_args!("parameter \"{NAME}\": {why}"));
    let mut values = query.all(NAME);
    let Some(text) = values.next() else {
        return Err(fault("value is required but missing"));
    };
    if values.next().is_some() {
        return Err(fault("it must be given once, with all ids in it, joined by commas"));
    }
    // Two forms of one id, with and without what older hosts put behind it, are no duplicates.
    let (mut ids, mut words) = (BTreeSet::new(), BTreeSet::new());
    for (place, word) in text.split(',').enumerate() {
        if place >= BATCH_MAX {
            return Err(fault(&format!("maximum number of items is {BATCH_MAX}")));
        }
        if !words.insert(word) {
            return Err(fault("duplicate items found"));
        }
        ids.insert(SandboxId::from_path(word)?);
    }
    Ok(ids)
}

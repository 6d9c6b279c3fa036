//! `GET /sandboxes/{sandboxID}/metrics` and `GET /sandboxes/metrics`.
//!
//! Metrics outlive their sandbox for some time, so its existence is not checked: a sandbox that does not exist, or
//! belongs to another team, has no metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::id::SandboxId;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa::openapi::path::{ParameterBuilder, ParameterStyle};
use utoipa::openapi::schema::ArrayBuilder;
use utoipa::openapi::{ObjectBuilder, RefOr, Schema, Type};

use crate::api::auth::{Caller, SANDBOX_ID_PATTERN, SandboxPath};
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::api::query::Query;
use crate::api::query::shape::{Number, Parameter, Params, query};
use crate::clock::{SECOND_US, rfc3339};
use crate::records::buckets::downsample;
use crate::records::{Records, Sample};

/// Maximum number of sandboxes in one request (API contract).
const BATCH_MAX: usize = 100;

query! {
    /// The time range of the samples.
    pub(crate) struct MetricParameters {
        /// First second of the range, since the Unix epoch; default: that of the first sample.
        "start" start_s: Number<0, { i64::MAX }>;
        /// Last second of the range, since the Unix epoch; default: that of the last sample.
        "end" end_s: Number<0, { i64::MAX }>;
    }
}

query! {
    /// The requested sandboxes.
    pub(crate) struct BatchParameters {
        /// Ids of sandboxes, separated by commas, without duplicates.
        "sandbox_ids" ids: SandboxIds => required;
    }
}

/// Ids of sandboxes, in the same form as in paths.
struct SandboxIds;

impl Parameter for SandboxIds {
    type Value = BTreeSet<SandboxId>;

    fn take(query: &Query, name: &str) -> Result<Option<Self::Value>, ApiError> {
        let fault = |why: &str| ApiError::schema(format_args!("parameter \"{name}\": {why}"));
        let mut values = query.all(name);
        let Some(text) = values.next() else {
            return Ok(None);
        };
        if values.next().is_some() {
            return Err(fault("must be given once, with all ids separated by commas"));
        }
        // The same id with and without an old client id is not a duplicate.
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
        Ok(Some(ids))
    }

    fn schema() -> RefOr<Schema> {
        let id = ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some("The id of a sandbox, in the same form as in paths."))
            .pattern(Some(SANDBOX_ID_PATTERN));
        ArrayBuilder::new()
            .items(id)
            .min_items(Some(1))
            .max_items(Some(BATCH_MAX))
            .unique_items(true)
            .into()
    }

    fn describe(parameter: ParameterBuilder) -> ParameterBuilder {
        parameter.style(Some(ParameterStyle::Form)).explode(Some(false))
    }
}

/// A sample of the usage of a sandbox.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SandboxMetric {
    #[schema(format = DateTime)]
    timestamp: String,
    /// The time of `timestamp`, in seconds since the Unix epoch.
    timestamp_unix: i64,
    cpu_count: u32,
    /// Share of its cores used since the previous sample, in percent: 100 is all of them.
    cpu_used_pct: f64,
    /// Memory of its processes, in bytes.
    #[serde(rename = "memUsed")]
    memory_used_bytes: u64,
    #[serde(rename = "memTotal")]
    memory_total_bytes: u64,
    /// Page cache, in bytes; the kernel frees it when memory is needed.
    #[serde(rename = "memCache")]
    memory_cache_bytes: u64,
    #[serde(rename = "diskUsed")]
    disk_used_bytes: u64,
    #[serde(rename = "diskTotal")]
    disk_total_bytes: u64,
    /// What it has received from clients and from outside since it was created, in bytes; an addition to the contract.
    #[serde(rename = "networkReceived")]
    received_bytes: u64,
    /// What it has sent to clients and to the outside since it was created, in bytes; an addition to the contract.
    #[serde(rename = "networkSent")]
    sent_bytes: u64,
}

impl SandboxMetric {
    fn new(sample: &Sample) -> Self {
        Self {
            timestamp: rfc3339(sample.at_us),
            timestamp_unix: sample.at_us.div_euclid(SECOND_US),
            cpu_count: sample.cpu_count,
            cpu_used_pct: f64::from(sample.cpu_used_centi) / 100.0,
            memory_used_bytes: sample.memory_used_bytes,
            memory_total_bytes: sample.memory_total_bytes,
            memory_cache_bytes: sample.memory_cache_bytes,
            disk_used_bytes: sample.disk_used_bytes,
            disk_total_bytes: sample.disk_total_bytes,
            received_bytes: sample.received_bytes,
            sent_bytes: sample.sent_bytes,
        }
    }
}

/// The newest samples of some sandboxes.
#[derive(Serialize, ToSchema)]
struct SandboxesMetrics {
    /// By id, without sandboxes that have no samples.
    sandboxes: BTreeMap<String, SandboxMetric>,
}

/// Returns samples of the usage of a sandbox, oldest first. There is one every five seconds; for ranges of an hour and
/// more, each covers a longer time and has the maximum of each value.
#[utoipa::path(
    get,
    path = "/sandboxes/{sandboxID}/metrics",
    tag = "sandboxes",
    params(SandboxPath, MetricParameters),
    responses((status = 200, description = "The samples; empty for an unknown sandbox", body = Vec<SandboxMetric>))
)]
pub(crate) async fn get_sandbox_metrics(
    State(records): State<Arc<Records>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Params(parameters): Params<MetricParameters>,
) -> Result<Response, ApiError> {
    let MetricParameters { start_s, end_s } = parameters;
    if let (Some(start_s), Some(end_s)) = (start_s, end_s)
        && start_s > end_s
    {
        return Err(ApiError::invalid(
            "invalid time range: \"start\" must not be later than \"end\"",
        ));
    }
    let from_us = start_s.unwrap_or(0).saturating_mul(SECOND_US);
    // The last second is included completely.
    let to_us = end_s.map_or(i64::MAX, |end_s| {
        end_s.saturating_mul(SECOND_US).saturating_add(SECOND_US - 1)
    });
    let samples = records.samples(&caller.team, &id, from_us, to_us).await?;
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
        return json(StatusCode::OK, &[(); 0]);
    };
    let begun_s = start_s.unwrap_or(first.at_us.div_euclid(SECOND_US));
    let ended_s = end_s.unwrap_or(last.at_us.div_euclid(SECOND_US));
    let metrics: Vec<SandboxMetric> = downsample(&samples, ended_s - begun_s)
        .iter()
        .map(SandboxMetric::new)
        .collect();
    json(StatusCode::OK, &metrics)
}

/// Returns the newest sample of each requested sandbox.
#[utoipa::path(
    get,
    path = "/sandboxes/metrics",
    tag = "sandboxes",
    params(BatchParameters),
    responses((status = 200, description = "The samples", body = SandboxesMetrics))
)]
pub(crate) async fn list_sandboxes_metrics(
    State(records): State<Arc<Records>>,
    caller: Caller,
    Params(parameters): Params<BatchParameters>,
) -> Result<Response, ApiError> {
    let mut sandboxes = BTreeMap::new();
    for id in parameters.ids {
        if let Some(sample) = records.latest(&caller.team, &id).await? {
            sandboxes.insert(id.into(), SandboxMetric::new(&sample));
        }
    }
    json(StatusCode::OK, &SandboxesMetrics { sandboxes })
}

//! `GET /sandboxes/{sandboxID}/logs` and `GET /v2/sandboxes/{sandboxID}/logs`.
//!
//! Logs outlive their sandbox, so its existence is not checked: the log of an unknown sandbox, or of another team's, is
//! empty. The key `logs` has raw lines in version 1 and structured entries in version 2.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use model::log::Level;
use serde::Serialize;
use serde_json::{Map, Value};
use store::records::{LogOrder, LogQuery, LogRow};
use utoipa::ToSchema;

use crate::api::auth::{Caller, SandboxPath};
use crate::api::error::ApiError;
use crate::api::json::json;
use crate::api::query::shape::{EnumParameter, Number, OneOf, Params, ShortText, query};
use crate::clock::rfc3339;
use crate::records::Records;

/// Default maximum number of entries in a response.
const LIMIT_DEFAULT: i64 = 1000;
/// Largest `limit` in version 2 (API contract).
const LIMIT_MAX: i64 = 1000;
/// Maximum number of entries in a response of version 1. The contract has no bound for `limit` there, so larger values
/// are accepted, and a response of this length has some megabytes.
const LIMIT_V1_MAX: i64 = 10_000;
/// Longest search text, in characters (API contract).
const SEARCH_MAX: usize = 256;
/// Microseconds in a millisecond.
const MILLISECOND_US: i64 = 1000;

query! {
    /// Parameters of version 1.
    pub(crate) struct LogParametersV1 {
        /// Only entries from this time on, in milliseconds since the Unix epoch.
        "start" start_ms: Number<0, { i64::MAX }>;
        /// Maximum number of entries, oldest first; larger values count as 10,000.
        "limit" limit: Number<0, { i64::MAX }> = LIMIT_DEFAULT;
    }
}

query! {
    /// Parameters of version 2.
    pub(crate) struct LogParameters {
        /// Where to begin, in milliseconds since the Unix epoch; default: the newest entry, or the oldest with
        /// `direction=forward`.
        "cursor" cursor_ms: Number<0, { i64::MAX }>;
        /// Maximum number of entries.
        "limit" limit: Number<0, LIMIT_MAX> = LIMIT_DEFAULT;
        /// Reading direction from `cursor`; default: `backward`.
        "direction" direction: OneOf<LogOrder>;
        /// Minimum level.
        "level" level: OneOf<Level>;
        /// Only entries whose message contains this text (case-sensitive).
        "search" search: ShortText<SEARCH_MAX>;
    }
}

impl EnumParameter for LogOrder {
    const VALUES: &'static [(&'static str, Self)] = &[("forward", Self::Forward), ("backward", Self::Backward)];
    const DESCRIPTION: &'static str = "Chronological order in which a log is read.";
}

impl EnumParameter for Level {
    const VALUES: &'static [(&'static str, Self)] = &[
        ("debug", Self::Debug),
        ("info", Self::Info),
        ("warn", Self::Warn),
        ("error", Self::Error),
    ];
    const DESCRIPTION: &'static str = "Severity of a log entry.";
}

/// Severity of a log entry.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum LogLevel {
    Debug,
    Info,
    Warn,
    Error,
}

impl From<Level> for LogLevel {
    fn from(level: Level) -> Self {
        match level {
            Level::Debug => Self::Debug,
            Level::Info => Self::Info,
            Level::Warn => Self::Warn,
            Level::Error => Self::Error,
        }
    }
}

/// A log, in version 1.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SandboxLogsV1 {
    /// The entries as lines.
    logs: Vec<SandboxLogLine>,
    /// The entries with separate fields.
    log_entries: Vec<SandboxLogEntry>,
}

/// A log.
#[derive(Serialize, ToSchema)]
struct SandboxLogs {
    logs: Vec<SandboxLogEntry>,
}

/// A log entry as one line.
#[derive(Serialize, ToSchema)]
struct SandboxLogLine {
    #[schema(format = DateTime)]
    timestamp: String,
    /// A flat JSON object of strings, including `timestamp`, `level`, `logger` and `message`.
    line: String,
}

/// A log entry.
#[derive(Serialize, ToSchema)]
struct SandboxLogEntry {
    #[schema(format = DateTime)]
    timestamp: String,
    #[schema(inline)]
    level: LogLevel,
    message: String,
    /// Further fields, including `logger` and `event_type`.
    fields: BTreeMap<String, String>,
}

impl SandboxLogEntry {
    fn new(row: LogRow) -> Self {
        let mut fields = row.fields;
        fields.insert("logger".to_owned(), row.logger);
        Self {
            timestamp: rfc3339(row.at_us),
            level: row.level.into(),
            message: row.message,
            fields,
        }
    }
}

impl SandboxLogLine {
    /// Fields of the entry cannot override the fixed keys of the line.
    fn new(row: &LogRow, sandbox: &str, team: &str) -> Self {
        let timestamp = rfc3339(row.at_us);
        let fixed = [
            ("timestamp", timestamp.as_str()),
            ("level", row.level.as_str()),
            ("logger", &row.logger),
            ("message", &row.message),
            ("sandboxID", sandbox),
            ("teamID", team),
            ("service", "ringfence"),
        ];
        let own = row.fields.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let line: Map<String, Value> = own
            .chain(fixed)
            .map(|(key, value)| (key.to_owned(), Value::from(value)))
            .collect();
        Self {
            line: Value::Object(line).to_string(),
            timestamp,
        }
    }
}

/// Returns the log of a sandbox, oldest entry first, as lines and as structured entries. It is kept for some days after
/// the sandbox has ended; the log of an unknown sandbox is empty.
#[utoipa::path(
    get,
    path = "/sandboxes/{sandboxID}/logs",
    tag = "sandboxes",
    params(SandboxPath, LogParametersV1),
    responses((status = 200, description = "The entries", body = SandboxLogsV1))
)]
pub(crate) async fn get_sandbox_logs_v1(
    State(records): State<Arc<Records>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Params(parameters): Params<LogParametersV1>,
) -> Result<Response, ApiError> {
    let query = LogQuery {
        from_us: parameters.start_ms.unwrap_or(0).saturating_mul(MILLISECOND_US),
        to_us: i64::MAX,
        level: Level::Debug,
        search: String::new(),
        order: LogOrder::Forward,
        limit: count(parameters.limit.min(LIMIT_V1_MAX)),
    };
    let rows = records.log(&caller.team, &id, &query).await?;
    let (sandbox, team) = (id.as_str(), caller.team.as_str());
    let logs = rows.iter().map(|row| SandboxLogLine::new(row, sandbox, team)).collect();
    let log_entries = rows.into_iter().map(SandboxLogEntry::new).collect();
    json(StatusCode::OK, &SandboxLogsV1 { logs, log_entries })
}

/// Returns the log of a sandbox, newest entry first by default. It is kept for some days after the sandbox has ended;
/// the log of an unknown sandbox is empty.
#[utoipa::path(
    get,
    path = "/v2/sandboxes/{sandboxID}/logs",
    tag = "sandboxes",
    params(SandboxPath, LogParameters),
    responses((status = 200, description = "The entries", body = SandboxLogs))
)]
pub(crate) async fn get_sandbox_logs(
    State(records): State<Arc<Records>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Params(parameters): Params<LogParameters>,
) -> Result<Response, ApiError> {
    let query = log_query(parameters);
    let rows = records.log(&caller.team, &id, &query).await?;
    let logs = rows.into_iter().map(SandboxLogEntry::new).collect();
    json(StatusCode::OK, &SandboxLogs { logs })
}

fn log_query(parameters: LogParameters) -> LogQuery {
    let order = parameters.direction.unwrap_or(LogOrder::Backward);
    // A cursor is a millisecond, and its entries are included in both directions.
    let from_us = parameters.cursor_ms.unwrap_or(0).saturating_mul(MILLISECOND_US);
    let to_us = parameters.cursor_ms.map_or(i64::MAX, |ms| {
        ms.saturating_mul(MILLISECOND_US).saturating_add(MILLISECOND_US - 1)
    });
    LogQuery {
        from_us: if order == LogOrder::Forward { from_us } else { 0 },
        to_us: if order == LogOrder::Backward { to_us } else { i64::MAX },
        level: parameters.level.unwrap_or(Level::Debug),
        search: parameters.search.unwrap_or_default(),
        order,
        limit: count(parameters.limit),
    }
}

fn count(limit: i64) -> u32 {
    u32::try_from(limit).expect("bounded by the callers")
}

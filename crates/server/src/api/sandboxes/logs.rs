//! `GET /sandboxes/{sandboxID}/logs` and `GET /v2/sandboxes/{sandboxID}/logs`.
//!
//! Logs outlive their sandbox, so whether it exists is not asked: a log that is not there, or is another team's, is an
//! empty one. The name `logs` means raw lines on the older path and structured entries on the newer one.

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

/// Entries of an answer, when the request does not say.
const LIMIT_DEFAULT: i64 = 1000;
/// Most entries that a client of the newer path may ask for (API contract).
const LIMIT_MAX: i64 = 1000;
/// Most entries of an answer on the older path, whatever is asked for. The contract has no bound there, so nobody is
/// refused, and an answer of this length is some megabytes.
const LIMIT_V1_MAX: i64 = 10_000;
/// Longest text to look for, in characters (API contract).
const SEARCH_MAX: usize = 256;
/// Microseconds in a millisecond.
const MILLISECOND_US: i64 = 1000;

query! {
    /// What a log is asked for on the older path.
    pub(crate) struct LogParametersV1 {
        /// No entries from before that time, in milliseconds since the Unix epoch.
        "start" start_ms: Number<0, { i64::MAX }>;
        /// Most entries of the answer, the oldest; no more than 10,000 come however large it is.
        "limit" limit: Number<0, { i64::MAX }> = LIMIT_DEFAULT;
    }
}

query! {
    /// What a log is asked for.
    pub(crate) struct LogParameters {
        /// Where to begin, in milliseconds since the Unix epoch. Without it, at the newest entry, or with
        /// `direction=forward` at the oldest.
        "cursor" cursor_ms: Number<0, { i64::MAX }>;
        /// Most entries of the answer.
        "limit" limit: Number<0, LIMIT_MAX> = LIMIT_DEFAULT;
        /// The order of time in which to read on from `cursor`; `backward`, when left out.
        "direction" direction: OneOf<LogOrder>;
        /// The least level.
        "level" level: OneOf<Level>;
        /// Only entries whose message contains this text, letter for letter.
        "search" search: ShortText<SEARCH_MAX>;
    }
}

impl EnumParameter for LogOrder {
    const VALUES: &'static [(&'static str, Self)] = &[("forward", Self::Forward), ("backward", Self::Backward)];
    const DESCRIPTION: &'static str = "In which order of time a log is read.";
}

impl EnumParameter for Level {
    const VALUES: &'static [(&'static str, Self)] = &[
        ("debug", Self::Debug),
        ("info", Self::Info),
        ("warn", Self::Warn),
        ("error", Self::Error),
    ];
    const DESCRIPTION: &'static str = "How much an entry matters.";
}

/// How much an entry matters.
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

/// A log on the older path.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct SandboxLogsV1 {
    /// The entries as lines.
    logs: Vec<SandboxLogLine>,
    /// The same entries in parts.
    log_entries: Vec<SandboxLogEntry>,
}

/// A log.
#[derive(Serialize, ToSchema)]
struct SandboxLogs {
    logs: Vec<SandboxLogEntry>,
}

/// An entry of a log, as one line.
#[derive(Serialize, ToSchema)]
struct SandboxLogLine {
    #[schema(format = DateTime)]
    timestamp: String,
    /// A flat JSON object whose values are strings, `timestamp`, `level`, `logger` and `message` among them.
    line: String,
}

/// An entry of a log.
#[derive(Serialize, ToSchema)]
struct SandboxLogEntry {
    #[schema(format = DateTime)]
    timestamp: String,
    #[schema(inline)]
    level: LogLevel,
    message: String,
    /// What else is known of it, `logger` and `event_type` among them.
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
    /// Whatever an entry's own fields are called, they do not take the place of what the line is read by.
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

/// The log of a sandbox, oldest entry first, as lines and in parts. It is kept for some days after the sandbox has
/// ended; a log that is not there is empty.
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

/// The log of a sandbox, newest entry first unless it is asked for otherwise. It is kept for some days after the sandbox
/// has ended; a log that is not there is empty.
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
    // A cursor is a millisecond, and what happened within it is on its near side either way.
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

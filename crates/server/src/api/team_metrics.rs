//! `/teams/{teamID}/metrics`: how many sandboxes of the caller's team ran, and how often they were started.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::{StatusCode, request};
use serde::Serialize;
use store::records::TeamUsage;
use utoipa::openapi::path::{Parameter as PathParameter, ParameterIn};
use utoipa::{IntoParams, ToSchema};

use super::auth::Caller;
use super::describe::{error_sets, path_parameter};
use super::error::ApiError;
use super::json::json;
use super::query::shape::{EnumParameter, Number, OneOf, Params, query};
use crate::clock::{Clock, SECOND_US, rfc3339};
use crate::records::Records;
use crate::records::buckets::step_s;
use crate::records::team_usage::MINUTE_S;

/// How long a range is that has no beginning, in seconds (API contract).
const RANGE_DEFAULT_S: i64 = 7 * 24 * 3600;

query! {
    /// The time range of the samples.
    pub(crate) struct TeamMetricParameters {
        /// First second of the range, since the Unix epoch; default: seven days before its end.
        "start" start_s: Number<0, { i64::MAX }>;
        /// Last second of the range, since the Unix epoch; default: now.
        "end" end_s: Number<0, { i64::MAX }>;
    }
}

query! {
    /// The value that is looked for.
    pub(crate) struct PeakParameters {
        /// The value.
        "metric" metric: OneOf<TeamMetricName> => required;
    }
}

/// A value of which there are samples.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TeamMetricName {
    Sandboxes,
    StartRate,
}

impl EnumParameter for TeamMetricName {
    const VALUES: &'static [(&'static str, Self)] = &[
        ("concurrent_sandboxes", Self::Sandboxes),
        ("sandbox_start_rate", Self::StartRate),
    ];
    const DESCRIPTION: &'static str = "A value of which a team has samples.";
}

/// A sample of what a team used.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct TeamMetric {
    #[schema(format = DateTime)]
    timestamp: String,
    /// The time of `timestamp`, in seconds since the Unix epoch.
    timestamp_unix: i64,
    /// The most sandboxes that ran at a time.
    concurrent_sandboxes: u32,
    /// How many were started per second, by create requests, forks and resumes.
    sandbox_start_rate: f64,
}

/// The largest value of a range.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct MaxTeamMetric {
    #[schema(format = DateTime)]
    timestamp: String,
    /// The time of `timestamp`, in seconds since the Unix epoch.
    timestamp_unix: i64,
    value: f64,
}

/// The team of a path, which must be that of the caller.
#[derive(Debug)]
pub(crate) struct TeamPath(String);

impl IntoParams for TeamPath {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<PathParameter> {
        vec![path_parameter(
            "teamID",
            Some("The id of the team"),
            Some("^[A-Za-z0-9_.:-]+$"),
        )]
    }
}

impl TeamPath {
    /// Refuses any team but the caller's.
    pub(super) fn check(&self, caller: &Caller) -> Result<(), ApiError> {
        let Self(team) = self;
        if team == caller.team.as_str() {
            Ok(())
        } else {
            Err(ApiError::no_team(team))
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for TeamPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut request::Parts, state: &S) -> Result<Self, ApiError> {
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::invalid("invalid team ID: it is not text"))?;
        Ok(Self(text))
    }
}

error_sets! {
    /// The team is not that of the caller.
    NotTheTeam {
        404 "The team does not exist, or is not that of the credential";
    }
}

/// A sample with the time that it stands for.
#[derive(Debug, Clone, Copy, PartialEq)]
struct UsageSample {
    /// The last second of its time, since the Unix epoch.
    at_s: i64,
    sandboxes: u32,
    starts: u32,
    /// How long its time is, in seconds.
    length_s: i64,
}

impl UsageSample {
    fn new(minute: TeamUsage, now_us: i64) -> Self {
        let begin_s = minute.at_us.div_euclid(SECOND_US);
        let now_s = now_us.div_euclid(SECOND_US);
        // The current minute is not over yet.
        let at_s = (begin_s + MINUTE_S - 1).min(now_s).max(begin_s);
        Self {
            at_s,
            sandboxes: minute.sandboxes,
            starts: minute.starts,
            length_s: at_s - begin_s + 1,
        }
    }

    fn rate(&self) -> f64 {
        let length_s = u32::try_from(self.length_s.max(1)).unwrap_or(u32::MAX);
        f64::from(self.starts) / f64::from(length_s)
    }

    fn value(&self, metric: TeamMetricName) -> f64 {
        match metric {
            TeamMetricName::Sandboxes => f64::from(self.sandboxes),
            TeamMetricName::StartRate => self.rate(),
        }
    }
}

/// The samples of a range of `range_s` seconds, oldest first, as one per step.
fn downsample(samples: &[UsageSample], range_s: i64) -> Vec<UsageSample> {
    let step_s = step_s(range_s).max(MINUTE_S);
    let mut steps: Vec<UsageSample> = Vec::new();
    for sample in samples {
        match steps.last_mut() {
            Some(last) if last.at_s.div_euclid(step_s) == sample.at_s.div_euclid(step_s) => {
                *last = UsageSample {
                    at_s: sample.at_s,
                    sandboxes: last.sandboxes.max(sample.sandboxes),
                    starts: last.starts.saturating_add(sample.starts),
                    length_s: last.length_s + sample.length_s,
                };
            }
            Some(_) | None => steps.push(*sample),
        }
    }
    steps
}

/// The samples of a range, and how long it is in seconds.
async fn samples(
    records: &Records,
    clock: &Clock,
    caller: &Caller,
    team: &TeamPath,
    range: &TeamMetricParameters,
) -> Result<(Vec<UsageSample>, i64), ApiError> {
    team.check(caller)?;
    let now_us = clock.now_us();
    let end_s = range.end_s.unwrap_or(now_us.div_euclid(SECOND_US));
    let start_s = range.start_s.unwrap_or(end_s.saturating_sub(RANGE_DEFAULT_S).max(0));
    if start_s > end_s {
        return Err(ApiError::invalid(
            "invalid time range: \"start\" must not be later than \"end\"",
        ));
    }
    let from_us = start_s.saturating_sub(MINUTE_S).saturating_mul(SECOND_US);
    let minutes = records
        .team_usage(&caller.team, from_us, end_s.saturating_mul(SECOND_US))
        .await?;
    let all = minutes.into_iter().map(|minute| UsageSample::new(minute, now_us));
    let within = all.filter(|sample| (start_s..=end_s).contains(&sample.at_s)).collect();
    Ok((within, end_s - start_s))
}

/// Returns how many sandboxes of the team ran and were started, oldest first: one sample per minute, or per several minutes
/// for ranges of 12 hours and more. The last one is of the minute that is not over yet.
#[utoipa::path(
    get,
    path = "/teams/{teamID}/metrics",
    tag = "teams",
    params(TeamPath, TeamMetricParameters),
    responses((status = 200, description = "The samples", body = Vec<TeamMetric>), NotTheTeam)
)]
pub(crate) async fn get_team_metrics(
    State(records): State<Arc<Records>>,
    State(clock): State<Clock>,
    caller: Caller,
    team: TeamPath,
    Params(range): Params<TeamMetricParameters>,
) -> Result<Response, ApiError> {
    let (samples, range_s) = samples(&records, &clock, &caller, &team, &range).await?;
    let samples = downsample(&samples, range_s);
    let metrics: Vec<TeamMetric> = samples
        .iter()
        .map(|sample| TeamMetric {
            timestamp: rfc3339(sample.at_s.saturating_mul(SECOND_US)),
            timestamp_unix: sample.at_s,
            concurrent_sandboxes: sample.sandboxes,
            sandbox_start_rate: sample.rate(),
        })
        .collect();
    json(StatusCode::OK, &metrics)
}

/// Returns the largest value of a range, with the time of its minute; 0 at the end of the range if there are no samples.
#[utoipa::path(
    get,
    path = "/teams/{teamID}/metrics/max",
    tag = "teams",
    params(TeamPath, TeamMetricParameters, PeakParameters),
    responses((status = 200, description = "The largest value", body = MaxTeamMetric), NotTheTeam)
)]
pub(crate) async fn get_team_metrics_max(
    State(records): State<Arc<Records>>,
    State(clock): State<Clock>,
    caller: Caller,
    team: TeamPath,
    Params(range): Params<TeamMetricParameters>,
    Params(peak): Params<PeakParameters>,
) -> Result<Response, ApiError> {
    let (samples, _) = samples(&records, &clock, &caller, &team, &range).await?;
    let none_s = range.end_s.unwrap_or(clock.now_us().div_euclid(SECOND_US));
    let none = (none_s, 0.0);
    let largest = samples.iter().fold(none, |(at_s, largest), sample| {
        let value = sample.value(peak.metric);
        if value > largest {
            (sample.at_s, value)
        } else {
            (at_s, largest)
        }
    });
    let (timestamp_unix, value) = largest;
    let metric = MaxTeamMetric {
        timestamp: rfc3339(timestamp_unix.saturating_mul(SECOND_US)),
        timestamp_unix,
        value,
    };
    json(StatusCode::OK, &metric)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_s: i64, sandboxes: u32, starts: u32) -> UsageSample {
        UsageSample {
            at_s,
            sandboxes,
            starts,
            length_s: MINUTE_S,
        }
    }

    #[test]
    fn long_ranges_have_the_most_and_the_average_of_several_minutes() {
        let minutes = [sample(59, 1, 60), sample(119, 5, 0), sample(179, 2, 6)];
        assert_eq!(downsample(&minutes, 3600), minutes);
        let steps = downsample(&minutes, 12 * 3600);
        assert_eq!(steps.len(), 2);
        assert_eq!((steps[0].at_s, steps[0].sandboxes), (119, 5));
        assert!((steps[0].rate() - 0.5).abs() < 1e-9, "{steps:?}");
        assert_eq!(steps[1], minutes[2]);
    }

    #[test]
    fn the_current_minute_stands_for_what_has_passed_of_it() {
        let minute = TeamUsage {
            at_us: 600 * SECOND_US,
            sandboxes: 3,
            starts: 5,
        };
        let now = UsageSample::new(minute, 604 * SECOND_US);
        assert_eq!((now.at_s, now.length_s), (604, 5));
        assert!((now.rate() - 1.0).abs() < 1e-9);
        let later = UsageSample::new(minute, 700 * SECOND_US);
        assert_eq!((later.at_s, later.length_s), (659, 60));
        // A clock that was set back.
        let before = UsageSample::new(minute, 0);
        assert_eq!((before.at_s, before.length_s), (600, 1));
    }
}

//! What is exported by OTLP for the operator: traces, of what the API did for a request and how long each stage of it took,
//! and the metrics.
//!
//! A span has the route, the operation, the status and the team of a request, and the id by which the log finds the rest;
//! never a path, a query, a header, a body or a name. It is made when the request has been answered, from what the handler
//! measured anyway, so that nothing is done for requests that are not recorded. [`WorkSpan`] is for what no request waits for.
//! `record` says what can be in a span, `queue` and `export` what bounds it all. Metrics are those of `/metrics`, which
//! `push` sends and `exposition` converts.

mod client;
mod context;
mod export;
mod exposition;
mod message;
mod push;
mod queue;
mod record;
mod said;
pub(crate) mod settings;
mod work;

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::MatchedPath;
use http::{Request, Response, Version};
use model::id::{BuildId, NodeId, SandboxId, TeamId};
use protocol::node::Stage;
use tokio_util::sync::CancellationToken;

use self::client::ExportClient;
use self::context::{Parent, Sampler, SpanId, TraceId, random};
use self::export::Exporter;
use self::message::Resource;
use self::push::Pusher;
pub(crate) use self::push::ReadMetrics;
use self::queue::Queue;
use self::record::{Attribute, Kind, Record, Value};
use self::settings::TelemetrySettings;
pub(crate) use self::work::{WorkSpan, traced};
use crate::clock::Clock;
use crate::metrics::Metrics;

/// The stage that is the sum of the others.
const TOTAL: &str = "total";
/// The method of a request that is no usual one.
pub(crate) const OTHER_METHOD: &str = "_OTHER";
/// Maximum number of stages of a request that become spans.
const STAGES_MAX: usize = 32;

/// Extension of a request: gets the team whose credential it has.
#[derive(Debug, Clone, Default)]
pub(crate) struct TeamSlot(Arc<OnceLock<Arc<str>>>);

impl TeamSlot {
    /// Notes the team.
    pub(crate) fn set(&self, team: &TeamId) {
        let _ = self.0.set(Arc::from(team.as_str()));
    }
}

/// Extension of a request: its id, by which the log and the client know it.
#[derive(Debug, Clone)]
pub(crate) struct RequestId(pub(crate) Arc<str>);

/// Extension of a response: how long the stages of its request took, in order.
#[derive(Debug, Clone)]
pub(crate) struct Stages(pub(crate) Arc<[Stage]>);

/// What sends spans and metrics to the receiver.
#[derive(Debug)]
pub(crate) struct Exporters {
    spans: Exporter,
    metrics: Pusher,
}

impl Exporters {
    /// Exports spans, and the metrics that `read` has, until `stop` is cancelled, and then what is left.
    pub(crate) async fn run(self, read: impl ReadMetrics, stop: CancellationToken) {
        let metrics = self.metrics.run(read, stop.clone());
        tokio::join!(self.spans.run(stop), metrics);
    }
}

/// Records requests.
#[derive(Debug)]
pub(crate) struct Telemetry {
    sampler: Sampler,
    queue: Arc<Queue>,
    clock: Clock,
}

impl Telemetry {
    /// What records requests, and what exports them and the metrics.
    pub(crate) fn new(
        settings: TelemetrySettings,
        node: &NodeId,
        metrics: &Arc<Metrics>,
        clock: Clock,
    ) -> (Arc<Self>, Exporters) {
        let queue = Arc::new(Queue::new(Arc::clone(metrics)));
        let sampler = Sampler::new(settings.sampling_ratio);
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let resource = [
            Attribute("service.name", Value::Word("ringfence")),
            Attribute("service.version", Value::Word(env!("CARGO_PKG_VERSION"))),
            Attribute("service.instance.id", Value::Shared(node.as_str().into())),
            Attribute("host.name", Value::Shared(host.into())),
        ];
        let resource = Resource {
            attributes: resource.into_iter().map(Attribute::into_message).collect(),
        };
        let client = Arc::new(ExportClient::new(settings));
        let exporters = Exporters {
            metrics: Pusher::new(Arc::clone(&client), resource.clone(), clock.clone()),
            spans: Exporter::new(Arc::clone(&queue), client, Arc::clone(metrics), resource),
        };
        let telemetry = Self { sampler, queue, clock };
        (Arc::new(telemetry), exporters)
    }

    /// Begins the span of a request; none if its trace is not recorded. The client decides that for its own trace.
    pub(crate) fn begin(self: &Arc<Self>, request: &Request<Body>, method: &'static str) -> Option<RequestSpan> {
        let parent = Parent::of(request.headers());
        let trace = match parent {
            Some(Parent { is_sampled: false, .. }) => return None,
            Some(Parent { trace, .. }) => trace,
            None => {
                let trace = TraceId(random()?);
                if !self.sampler.takes(trace) {
                    return None;
                }
                trace
            }
        };
        let start = Duration::from_micros(u64::try_from(self.clock.now_us()).ok()?);
        let extensions = request.extensions();
        Some(RequestSpan {
            telemetry: Arc::clone(self),
            trace,
            parent: parent.map(|parent| parent.span),
            method,
            version: request.version(),
            route: extensions.get::<MatchedPath>().cloned(),
            id: extensions.get::<RequestId>().cloned(),
            team: TeamSlot::default(),
            start,
            begun: Instant::now(),
            answer: None,
        })
    }

    /// Begins the span of a change of a sandbox, for this reason; none if its trace is not recorded.
    pub(crate) fn begin_change(
        &self,
        name: &'static str,
        team: &TeamId,
        sandbox: &SandboxId,
        reason: &'static str,
    ) -> Option<WorkSpan> {
        let span = WorkSpan::begin(self.sampler, &self.queue, &self.clock, name, team)?;
        span.note("ringfence.sandbox.id", Value::Shared(sandbox.as_str().into()));
        span.note("ringfence.reason", Value::Word(reason));
        Some(span)
    }

    /// Begins the span of a build; none if its trace is not recorded.
    pub(crate) fn begin_build(&self, team: &TeamId, build: &BuildId) -> Option<WorkSpan> {
        let span = WorkSpan::begin(self.sampler, &self.queue, &self.clock, "build", team)?;
        span.note("ringfence.build.id", Value::Shared(build.as_str().into()));
        Some(span)
    }
}

/// How a request was answered.
struct Answer {
    status: u16,
    operation: Option<Arc<str>>,
    stages: Option<Stages>,
}

/// The span of a request. One that is dropped was not answered, because its client has gone.
pub(crate) struct RequestSpan {
    telemetry: Arc<Telemetry>,
    trace: TraceId,
    parent: Option<SpanId>,
    method: &'static str,
    version: Version,
    route: Option<MatchedPath>,
    id: Option<RequestId>,
    team: TeamSlot,
    start: Duration,
    begun: Instant,
    answer: Option<Answer>,
}

impl RequestSpan {
    /// Where the team of the request is noted.
    pub(crate) fn team(&self) -> TeamSlot {
        self.team.clone()
    }

    /// Ends the span of a request that was answered. `operation` is its id, if the request has one.
    pub(crate) fn finish(mut self, response: &Response<Body>, operation: Option<Arc<str>>) {
        self.answer = Some(Answer {
            status: response.status().as_u16(),
            operation,
            stages: response.extensions().get::<Stages>().cloned(),
        });
    }

    fn attributes(&self) -> Vec<Attribute> {
        let mut attributes = vec![Attribute("http.request.method", Value::Word(self.method))];
        if let Some(version) = version(self.version) {
            attributes.push(Attribute("network.protocol.version", Value::Word(version)));
        }
        if let Some(route) = &self.route {
            attributes.push(Attribute("http.route", Value::Shared(route.as_str().into())));
        }
        if let Some(RequestId(id)) = &self.id {
            attributes.push(Attribute("ringfence.request.id", Value::Shared(Arc::clone(id))));
        }
        if let Some(team) = self.team.0.get() {
            attributes.push(Attribute("ringfence.team.id", Value::Shared(Arc::clone(team))));
        }
        match &self.answer {
            None => attributes.push(Attribute("error.type", Value::Word("disconnected"))),
            Some(answer) => {
                attributes.push(Attribute(
                    "http.response.status_code",
                    Value::Number(answer.status.into()),
                ));
                if let Some(operation) = &answer.operation {
                    attributes.push(Attribute("ringfence.operation", Value::Shared(Arc::clone(operation))));
                }
                if is_failure(answer.status) {
                    attributes.push(Attribute("error.type", Value::Shared(answer.status.to_string().into())));
                }
            }
        }
        attributes
    }

    /// The spans of a request: its own, and one for each stage.
    fn records(&self) -> Option<Vec<Record>> {
        let took = self.begun.elapsed();
        let span = SpanId(random()?);
        let verb = if self.method == OTHER_METHOD {
            "HTTP"
        } else {
            self.method
        };
        let own = Record {
            trace: self.trace,
            span,
            parent: self.parent,
            is_remote: self.parent.is_some(),
            name: match &self.route {
                Some(route) => format!("{verb} {}", route.as_str()).into(),
                None => verb.into(),
            },
            kind: Kind::Server,
            start: self.start,
            took,
            attributes: self.attributes(),
            has_failed: self.answer.as_ref().is_none_or(|answer| is_failure(answer.status)),
        };
        let stages = self.answer.as_ref().and_then(|answer| answer.stages.as_ref());
        let mut records = vec![own];
        for placed in stages.map(|Stages(stages)| placed(stages, took)).unwrap_or_default() {
            records.push(Record {
                trace: self.trace,
                span: SpanId(random()?),
                parent: Some(span),
                is_remote: false,
                name: placed.name,
                kind: Kind::Internal,
                start: self.start + placed.offset,
                took: placed.took,
                attributes: Vec::new(),
                has_failed: false,
            });
        }
        Some(records)
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        // Without randomness there are no ids, and no span.
        if let Some(records) = self.records() {
            self.telemetry.queue.push(records, self.team.0.get().is_some());
        }
    }
}

/// A stage, and when it began after its request.
struct Placed {
    name: Cow<'static, str>,
    offset: Duration,
    took: Duration,
}

/// Places stages one after the other, so that they and what is between them and the answer fill the request up to its end:
/// what is measured is how long they took. Those that would end after the request are cut there.
fn placed(stages: &[Stage], request: Duration) -> Vec<Placed> {
    let (total, stages): (Vec<&Stage>, Vec<&Stage>) = stages.iter().partition(|stage| stage.name == TOTAL);
    let sum = stages.iter().map(|stage| stage.took).sum();
    let total = total.first().map_or(sum, |total| total.took);
    let mut offset = request.saturating_sub(total);
    let stages = stages.into_iter().take(STAGES_MAX).map(|stage| {
        let took = stage.took.min(request.saturating_sub(offset));
        let placed = Placed {
            name: stage.name.clone(),
            offset,
            took,
        };
        offset += took;
        placed
    });
    stages.collect()
}

/// Whether a status says that the platform failed.
fn is_failure(status: u16) -> bool {
    status >= 500
}

fn version(version: Version) -> Option<&'static str> {
    match version {
        Version::HTTP_10 => Some("1.0"),
        Version::HTTP_11 => Some("1.1"),
        Version::HTTP_2 => Some("2"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0b0e1d52-58ff-4c8e-8f0d-0a1b2c3d4e5f";

    fn stages(stages: &[(&'static str, u64)]) -> Vec<Stage> {
        let stages = stages.iter();
        stages
            .map(|(name, ms)| Stage::new(name, Duration::from_millis(*ms)))
            .collect()
    }

    fn places(all: &[(&'static str, u64)], request_ms: u64) -> Vec<(String, u128, u128)> {
        let placed = placed(&stages(all), Duration::from_millis(request_ms));
        let placed = placed.into_iter();
        placed
            .map(|placed| {
                (
                    placed.name.into_owned(),
                    placed.offset.as_millis(),
                    placed.took.as_millis(),
                )
            })
            .collect()
    }

    #[test]
    fn stages_follow_each_other_within_their_request() {
        let want = |places: &[(&str, u128, u128)]| -> Vec<(String, u128, u128)> {
            let places = places.iter();
            places
                .map(|(name, at, took)| ((*name).to_owned(), *at, *took))
                .collect()
        };
        assert_eq!(
            places(&[("auth", 1), ("store", 2), ("init", 3), ("total", 8)], 10),
            want(&[("auth", 2, 1), ("store", 3, 2), ("init", 5, 3)])
        );
        assert_eq!(places(&[("restore", 4)], 10), want(&[("restore", 6, 4)]));
        // Clocks that disagree make no span that ends after its parent.
        assert_eq!(
            places(&[("a", 8), ("b", 8), ("total", 16)], 10),
            want(&[("a", 0, 8), ("b", 8, 2)])
        );
        assert_eq!(places(&[], 10), []);
    }

    #[test]
    fn there_are_not_more_spans_of_stages_than_a_create_has() {
        let many = vec![Stage::new("x", Duration::from_millis(1)); 1000];
        assert_eq!(placed(&many, Duration::from_secs(5)).len(), STAGES_MAX);
    }

    fn telemetry(sampling_ratio: f64) -> Arc<Telemetry> {
        let settings = TelemetrySettings {
            endpoint: settings::Endpoint::parse("http://127.0.0.1:1").expect("an endpoint"),
            headers: http::HeaderMap::new(),
            authorities: Vec::new(),
            sampling_ratio,
        };
        let metrics = Arc::new(Metrics::new(&crate::settings::CapacitySettings::default()));
        let node = ID.parse::<NodeId>().expect("an id");
        Telemetry::new(settings, &node, &metrics, Clock::system()).0
    }

    #[test]
    fn a_request_whose_client_has_gone_has_a_span() {
        let telemetry = telemetry(1.0);
        let request = Request::new(Body::empty());
        let span = telemetry.begin(&request, "GET").expect("a span");
        span.team().set(&ID.parse().expect("an id"));
        drop(span);
        let spans = telemetry.queue.take();
        let [span] = spans.as_slice() else {
            panic!("one span: {spans:?}");
        };
        assert!(span.has_failed);
        assert!(
            span.attributes
                .contains(&Attribute("error.type", Value::Word("disconnected")))
        );
        assert!(
            span.attributes
                .contains(&Attribute("ringfence.team.id", Value::Shared(ID.into())))
        );
    }

    #[test]
    fn a_failure_of_the_platform_is_one_of_its_span() {
        let telemetry = telemetry(1.0);
        for (status, has_failed) in [(200, false), (404, false), (429, false), (500, true), (503, true)] {
            let request = Request::new(Body::empty());
            let span = telemetry.begin(&request, "GET").expect("a span");
            let response = Response::builder()
                .status(status)
                .body(Body::empty())
                .expect("a response");
            span.finish(&response, None);
            let spans = telemetry.queue.take();
            assert_eq!(
                spans.iter().map(|span| span.has_failed).collect::<Vec<_>>(),
                [has_failed],
                "{status}"
            );
        }
    }

    #[test]
    fn nothing_is_kept_of_a_request_that_is_not_sampled() {
        assert!(telemetry(0.0).begin(&Request::new(Body::empty()), "GET").is_none());
        let unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
        let request = Request::builder().header("traceparent", unsampled).body(Body::empty());
        assert!(telemetry(1.0).begin(&request.expect("a request"), "GET").is_none());
    }

    #[tokio::test]
    async fn a_change_is_a_span_that_says_how_it_went() {
        let telemetry = telemetry(1.0);
        let (team, sandbox) = (
            ID.parse().expect("an id"),
            "i00000000000000000001".parse().expect("an id"),
        );
        for has_failed in [false, true] {
            let span = telemetry.begin_change("pause", &team, &sandbox, "timeout");
            let work = async { if has_failed { Err(()) } else { Ok(()) } };
            assert_eq!(traced(span, work).await.is_err(), has_failed);
            let spans = telemetry.queue.take();
            let [span] = spans.as_slice() else {
                panic!("one span: {spans:?}");
            };
            assert_eq!(
                (span.name.as_ref(), span.has_failed, span.parent),
                ("pause", has_failed, None)
            );
            assert_eq!(
                span.attributes,
                [
                    Attribute("ringfence.team.id", Value::Shared(ID.into())),
                    Attribute("ringfence.sandbox.id", Value::Shared("i00000000000000000001".into())),
                    Attribute("ringfence.reason", Value::Word("timeout")),
                ]
            );
        }
    }

    #[test]
    fn steps_are_children_of_their_build_and_no_more_than_some() {
        let telemetry = telemetry(1.0);
        let (team, build) = (ID.parse().expect("an id"), ID.parse().expect("an id"));
        let span = telemetry.begin_build(&team, &build).expect("a span");
        let own = span.ids();
        for _ in 0..work::CHILDREN_MAX {
            span.child("build.step").expect("a span").end(true);
        }
        assert!(span.child("build.step").is_none());
        // A build that is dropped was cancelled, or has failed.
        drop(span);
        let mut spans = telemetry.queue.take();
        let last = spans.pop().expect("the build");
        assert!(last.has_failed && (last.trace, last.span) == own);
        assert_eq!(spans.len(), work::CHILDREN_MAX);
        assert!(
            spans
                .iter()
                .all(|step| !step.has_failed && step.trace == own.0 && step.parent == Some(own.1))
        );
    }

    #[test]
    fn the_same_part_is_recorded_as_of_requests() {
        let id = ID.parse().expect("an id");
        assert!(telemetry(0.0).begin_build(&id, &ID.parse().expect("an id")).is_none());
    }
}

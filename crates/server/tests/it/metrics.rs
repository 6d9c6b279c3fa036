//! The metrics: what is counted, and that the format is valid for scrapers.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use protocol::node::{DiskStops, DnsCounters, EgressConnections, EgressCounters, NodeEvent, Throttles};

use super::platform::{Behaviour, KEY, OTHER_KEY, Reply, TestPlatform, send, within};

async fn get(platform: &TestPlatform, method: &str, path: &str) -> Reply {
    send(platform.metrics, method, path, &[("host", "localhost")], Bytes::new()).await
}

/// Scrapes the metrics of a platform with a strict parser.
pub(crate) async fn scrape(platform: &TestPlatform) -> Scrape {
    let reply = get(platform, "GET", "/metrics").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    assert_eq!(
        reply.header("content-type"),
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
    Scrape::parse(&reply.text)
}

/// Values by series, as `name{label="value",...}`.
pub(crate) struct Scrape {
    values: BTreeMap<String, f64>,
    types: BTreeMap<String, String>,
}

impl Scrape {
    /// Parses text according to the `OpenMetrics` specification: a type and a help for every family, samples of a
    /// family together and with the suffix of its type, no series twice, buckets that only grow, and the end marked.
    fn parse(text: &str) -> Self {
        let body = text.strip_suffix("# EOF\n").expect("an end");
        let mut scrape = Self {
            values: BTreeMap::new(),
            types: BTreeMap::new(),
        };
        let mut helped = BTreeSet::new();
        let mut family = String::new();
        let mut bucket: Option<(String, f64)> = None;
        for line in body.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                let (word, rest) = comment.split_once(' ').expect("a word");
                let (name, text) = rest.split_once(' ').expect("a name");
                match word {
                    "HELP" => assert!(helped.insert(name.to_owned()), "{line}"),
                    "TYPE" => {
                        let before = scrape.types.insert(name.to_owned(), text.to_owned());
                        assert_eq!(before, None, "{line}");
                    }
                    "UNIT" => assert!(name.ends_with(&format!("_{text}")), "{line}"),
                    _ => panic!("{line}"),
                }
                name.clone_into(&mut family);
                continue;
            }
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
            let (name, labels) = match series.split_once('{') {
                Some((name, labels)) => (name, labels.strip_suffix('}').expect("a closed set of labels")),
                None => (series, ""),
            };
            let suffix = name
                .strip_prefix(family.as_str())
                .unwrap_or_else(|| panic!("{line} in {family}"));
            let allowed: &[&str] = match scrape.types.get(&family).map(String::as_str) {
                Some("counter") => &["_total"],
                Some("gauge") => &[""],
                Some("info") => &["_info"],
                Some("histogram") => &["_bucket", "_sum", "_count"],
                other => panic!("{line}: {other:?}"),
            };
            assert!(allowed.contains(&suffix), "{line}");
            check_labels(labels);
            if suffix == "_bucket" {
                // The series without its bound.
                let others = labels.split(',').filter(|label| !label.starts_with("le="));
                let rest = format!("{name}{:?}", others.collect::<Vec<_>>());
                if let Some((last, count)) = &bucket
                    && *last == rest
                {
                    assert!(*count <= value, "{line}");
                }
                bucket = Some((rest, value));
            }
            assert!(scrape.values.insert(series.to_owned(), value).is_none(), "{line} twice");
        }
        assert!(scrape.types.keys().all(|name| helped.contains(name)));
        scrape
    }

    fn value(&self, series: &str) -> f64 {
        *self
            .values
            .get(series)
            .unwrap_or_else(|| panic!("no {series} in {:#?}", self.values))
    }

    #[track_caller]
    pub(crate) fn is(&self, series: &str, value: f64) {
        let found = self.value(series);
        assert!((found - value).abs() < 1e-9, "{series} is {found} and not {value}");
    }
}

/// Asserts that every label is known and has a value defined by the program.
fn check_labels(labels: &str) {
    for label in labels.split(',').filter(|label| !label.is_empty()) {
        let (name, value) = label.split_once('=').expect("a value");
        let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
        let value = value.unwrap_or_else(|| panic!("{label} is not quoted"));
        let word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        let fits = match name {
            "operation" | "outcome" | "protocol" | "stage" | "state" | "reason" | "status" => value.bytes().all(word),
            "method" => ["GET", "POST", "DELETE", "OPTIONS", "other"].contains(&value),
            "version" => value == env!("CARGO_PKG_VERSION"),
            "le" => value == "+Inf" || value.parse::<f64>().is_ok(),
            _ => false,
        };
        assert!(fits, "{label}");
    }
}

const REQUESTS: &str = "ringfence_api_request_duration_seconds_count";

#[tokio::test]
async fn an_idle_platform_exports_every_series_for_alerts() {
    let platform = TestPlatform::start_adjusted(|settings| settings.capacity.max_sandboxes = Some(7)).await;
    let scrape = scrape(&platform).await;
    for outcome in ["created", "repeated", "refused", "limited", "no_room", "failed"] {
        scrape.is(&format!("ringfence_creates_total{{outcome=\"{outcome}\"}}"), 0.0);
    }
    for reason in ["killed", "operator", "expired", "exited", "lost"] {
        scrape.is(&format!("ringfence_sandbox_ends_total{{reason=\"{reason}\"}}"), 0.0);
    }
    for state in ["creating", "running", "stopping"] {
        scrape.is(&format!("ringfence_sandboxes{{state=\"{state}\"}}"), 0.0);
    }
    scrape.is("ringfence_store_errors_total", 0.0);
    scrape.is("ringfence_log_entries_lost_total", 0.0);
    scrape.is("ringfence_expiry_lateness_seconds_count", 0.0);
    scrape.is("ringfence_host_memory_available_bytes", 64.0 * f64::from(1 << 30));
    scrape.is("ringfence_capacity_memory_floor_bytes", 256.0 * 1024.0 * 1024.0);
    scrape.is("ringfence_capacity_max_sandboxes", 7.0);
    scrape.is(
        &format!("ringfence_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")),
        1.0,
    );
}

#[tokio::test]
async fn requests_are_counted_by_operation_without_client_text() {
    let platform = TestPlatform::start().await;
    let id = platform
        .create(r#","timeout":600,"metadata":{"secret":"hunter2"}"#)
        .await;
    for path in ["/sandboxes/inone", "/sandboxes/ianother"] {
        platform.call("GET", path, "").await.error(404);
    }
    platform.call("GET", &format!("/sandboxes/{id}"), "").await;
    platform.call_as(None, "GET", "/sandboxes", "").await.error(401);
    platform.call("GET", "/hunter2", "").await.error(404);
    platform.call("HUNTER2", "/sandboxes", "").await.error(405);
    let read = scrape(&platform).await;
    for (operation, method, status, count) in [
        ("create_sandbox_v1", "POST", "2xx", 1.0),
        ("get_sandbox", "GET", "4xx", 2.0),
        ("get_sandbox", "GET", "2xx", 1.0),
        ("list_sandboxes_v1", "GET", "4xx", 1.0),
        ("none", "GET", "4xx", 1.0),
        ("none", "other", "4xx", 1.0),
    ] {
        read.is(
            &format!("{REQUESTS}{{operation=\"{operation}\",method=\"{method}\",status=\"{status}\"}}"),
            count,
        );
    }
    let text = get(&platform, "GET", "/metrics").await.text;
    let token = KEY.trim_start_matches("e2b_");
    for secret in [id.as_str(), "inone", "hunter2", "HUNTER2", token] {
        assert!(!text.contains(secret), "{secret}");
    }
}

#[tokio::test]
async fn creates_and_terminations_are_counted_by_outcome() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.limits.default.sandboxes = Some(3);
        settings.capacity.max_sandboxes = Some(4);
    })
    .await;
    let keyed = [
        ("host", "localhost"),
        ("x-api-key", KEY),
        ("content-type", "application/json"),
        ("idempotency-key", "k"),
    ];
    let body = r#"{"templateID":"base","timeout":600}"#;
    let first = platform.send("POST", "/sandboxes", &keyed, body).await;
    let again = platform.send("POST", "/sandboxes", &keyed, body).await;
    assert_eq!((first.status.as_u16(), again.status.as_u16()), (201, 201));
    let expired = platform.create(r#","timeout":10"#).await;
    let exited = platform.create(r#","timeout":600"#).await;
    platform.call("POST", "/sandboxes", body).await.error(429);
    platform.call("POST", "/sandboxes", "{}").await.error(400);
    for status in [201, 503] {
        let reply = platform.call_as(Some(OTHER_KEY), "POST", "/sandboxes", body).await;
        assert_eq!(reply.status, status);
    }
    let read = scrape(&platform).await;
    for (outcome, count) in [
        ("created", 4.0),
        ("repeated", 1.0),
        ("limited", 1.0),
        ("refused", 1.0),
        ("no_room", 1.0),
        ("failed", 0.0),
    ] {
        read.is(&format!("ringfence_creates_total{{outcome=\"{outcome}\"}}"), count);
    }
    for stage in ["auth", "template", "store", "spawn", "init", "total"] {
        let series = format!("ringfence_create_stage_duration_seconds_count{{stage=\"{stage}\"}}");
        read.is(&series, 4.0);
    }
    read.is("ringfence_sandboxes{state=\"running\"}", 4.0);
    read.is("ringfence_api_requests_limited_total", 1.0);

    platform.clock.advance(12);
    platform.until_gone(&expired).await;
    let id: model::id::SandboxId = exited.parse().expect("an id");
    platform.node.exit(&id).await;
    platform.until_gone(&exited).await;
    let path = format!("/sandboxes/{}", first.json["sandboxID"].as_str().expect("an id"));
    assert_eq!(platform.call("DELETE", &path, "").await.status, 204);
    *platform.node.start.lock() = Behaviour::Fails;
    platform.call("POST", "/sandboxes", body).await.error(500);
    let read = within(async {
        loop {
            let read = scrape(&platform).await;
            if read.value("ringfence_expiry_lateness_seconds_count") > 0.5 {
                return read;
            }
        }
    })
    .await;
    for (reason, count) in [("killed", 1.0), ("expired", 1.0), ("exited", 1.0), ("lost", 0.0)] {
        read.is(&format!("ringfence_sandbox_ends_total{{reason=\"{reason}\"}}"), count);
    }
    // The clock was advanced by 12 s, for a deadline after 10 s.
    read.is("ringfence_expiry_lateness_seconds_sum", 2.0);
    read.is("ringfence_creates_total{outcome=\"failed\"}", 1.0);

    let left: Vec<_> = platform.node.running.lock().iter().cloned().collect();
    assert_eq!(left.len(), 1);
    platform.node.running.lock().clear();
    let platform = platform.restart().await;
    scrape(&platform)
        .await
        .is("ringfence_sandbox_ends_total{reason=\"lost\"}", 1.0);
}

#[tokio::test]
async fn database_errors_are_counted() {
    let platform = TestPlatform::start().await;
    platform.store.close().await;
    let reply = platform.call("GET", "/sandboxes", "").await;
    assert!(reply.status.is_server_error(), "{reply:?}");
    scrape(&platform).await.is("ringfence_store_errors_total", 1.0);
}

#[tokio::test]
async fn the_metrics_address_serves_only_metrics() {
    let platform = TestPlatform::start().await;
    platform.call("GET", "/metrics", "").await.error(404);
    for (method, path, status) in [
        ("GET", "/", 404),
        ("GET", "/sandboxes", 404),
        ("POST", "/metrics", 405),
        ("GET", "/metrics?x=1", 200),
    ] {
        assert_eq!(get(&platform, method, path).await.status, status, "{method} {path}");
    }
    let disk_stops = DiskStops {
        stopped: 3,
        stops: 5,
        ends: 7,
    };
    *platform.node.disk_stops.lock() = disk_stops;
    platform.node.report(NodeEvent::DiskStops(disk_stops)).await;
    let read = scrape(&platform).await;
    read.is("ringfence_sandboxes_disk_stopped", 3.0);
    read.is("ringfence_sandbox_disk_stops_total", 5.0);
    read.is("ringfence_sandbox_disk_ends_total", 7.0);
    let throttles = Throttles {
        throttled: 2,
        throttles: 9,
    };
    platform.node.report(NodeEvent::Throttles(throttles)).await;
    let read = scrape(&platform).await;
    read.is("ringfence_sandboxes_throttled", 2.0);
    read.is("ringfence_sandbox_throttles_total", 9.0);
    *platform.node.room.lock() = None;
    platform.clock.advance(1);
    let read = scrape(&platform).await;
    assert!(read.value("ringfence_host_memory_available_bytes").is_nan());
    assert!(read.value("ringfence_capacity_max_sandboxes").is_infinite());
}

#[tokio::test]
async fn counters_of_the_egress_gateway_are_exported() {
    let platform = TestPlatform::start().await;
    let connections = |first| EgressConnections {
        open: first,
        ended: first + 1,
        denied: first + 2,
        failed: first + 3,
    };
    *platform.node.egress_counters.lock() = Some(EgressCounters {
        tcp: connections(10),
        udp: connections(20),
        bytes_sent: 31,
        bytes_received: 32,
        streams_sent: 38,
        streams_received: 39,
        unlogged: 33,
        intercepted: 34,
        injected: 35,
        requests_refused: 36,
        requests_limited: 37,
        dns: DnsCounters {
            queries: 41,
            cache_hits: 42,
            refused: 43,
            limited: 44,
            unanswered: 47,
            forwarded: 45,
            failed: 46,
        },
    });
    let expected = |read: &Scrape| {
        for (protocol, first) in [("tcp", 10.0), ("udp", 20.0)] {
            read.is(
                &format!("ringfence_egress_open_connections{{protocol=\"{protocol}\"}}"),
                first,
            );
            for (outcome, more) in [("ended", 1.0), ("denied", 2.0), ("failed", 3.0)] {
                let labels = format!("protocol=\"{protocol}\",outcome=\"{outcome}\"");
                read.is(&format!("ringfence_egress_connections_total{{{labels}}}"), first + more);
            }
        }
        for (name, value) in [
            ("egress_sent_bytes", 31.0),
            ("egress_received_bytes", 32.0),
            ("ingress_sent_bytes", 38.0),
            ("ingress_received_bytes", 39.0),
            ("egress_connections_unlogged", 33.0),
            ("egress_intercepted_connections", 34.0),
            ("egress_injected_requests", 35.0),
            ("egress_refused_requests", 36.0),
            ("egress_limited_requests", 37.0),
            ("dns_queries", 41.0),
            ("dns_cache_hits", 42.0),
            ("dns_refused", 43.0),
            ("dns_limited", 44.0),
            ("dns_unanswered", 47.0),
            ("dns_forwarded", 45.0),
            ("dns_failed", 46.0),
        ] {
            read.is(&format!("ringfence_{name}_total"), value);
        }
    };
    expected(&scrape(&platform).await);
    // Counters do not fall when the node does not respond.
    *platform.node.egress_counters.lock() = None;
    expected(&scrape(&platform).await);
}

//! `GET /sandboxes/{sandboxID}/metrics` and `GET /sandboxes/metrics`.

use std::time::Duration;

use protocol::node::{NetworkBytes, SandboxSample};
use serde_json::{Value, json};
use server::settings::ServerSettings;

use super::platform::{KEY, OTHER_KEY, Reply, TestPlatform, within};

const MIB: u64 = 1 << 20;

/// Short sampling rounds; the times of samples come from the tests.
fn quick(settings: &mut ServerSettings) {
    settings.records.metric_first = Duration::from_millis(1);
    settings.records.metric_interval = Duration::from_millis(1);
}

/// A reading `at_s` seconds after the start of the test, with a total CPU time of `cpu_ms`.
fn sample(platform: &TestPlatform, id: &str, at_s: i64, cpu_ms: u64, memory_mib: u64) -> SandboxSample {
    SandboxSample {
        id: id.parse().expect("an id"),
        at_us: platform.clock.now_us() + at_s * 1_000_000,
        cpu_time_us: cpu_ms * 1000,
        memory_used_bytes: memory_mib * MIB,
        memory_cache_bytes: 3 * MIB + 1,
        memory_total_bytes: 1024 * MIB,
        disk_used_bytes: 7 * MIB,
        disk_total_bytes: 10_240 * MIB,
        network: NetworkBytes {
            since_us: 1,
            received: cpu_ms * 7,
            sent: 11,
        },
    }
}

async fn get(platform: &TestPlatform, id: &str, query: &str) -> Reply {
    platform
        .call("GET", &format!("/sandboxes/{id}/metrics?{query}"), "")
        .await
}

async fn found(platform: &TestPlatform, id: &str, query: &str) -> Vec<Value> {
    let reply = get(platform, id, query).await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json.as_array().expect("samples").clone()
}

/// Lets the node report a reading, and waits until it is the newest sample.
async fn tell(platform: &TestPlatform, sample: SandboxSample) {
    let (id, at_s) = (sample.id.as_str().to_owned(), sample.at_us.div_euclid(1_000_000));
    *platform.node.samples.lock() = vec![sample];
    within(async {
        loop {
            let reply = platform
                .call("GET", &format!("/sandboxes/metrics?sandbox_ids={id}"), "")
                .await;
            if reply.json["sandboxes"][&id]["timestampUnix"] == at_s {
                return;
            }
        }
    })
    .await;
}

/// A platform with a sandbox and samples of it at 1 s, 6 s, … 36 s.
async fn with_samples() -> (TestPlatform, String) {
    let platform = TestPlatform::start_adjusted(quick).await;
    let id = platform.create(",\"timeout\":7000").await;
    for n in 0..8 {
        let used = sample(
            &platform,
            &id,
            1 + 5 * n,
            500 * n.unsigned_abs(),
            10 + n.unsigned_abs() % 3,
        );
        tell(&platform, used).await;
    }
    (platform, id)
}

#[tokio::test]
async fn all_fields_are_present() {
    let platform = TestPlatform::start_adjusted(quick).await;
    let id = platform.create("").await;
    assert_eq!(found(&platform, &id, "").await, [] as [Value; 0]);
    tell(&platform, sample(&platform, &id, 1, 1000, 10)).await;
    tell(&platform, sample(&platform, &id, 6, 2234, 20)).await;
    let samples = found(&platform, &id, "").await;
    let time = |at_s: i64| {
        let at_us = platform.clock.now_us() / 1000 * 1000 + at_s * 1_000_000;
        jiff::Timestamp::from_microsecond(at_us).expect("a time").as_second()
    };
    let text = |sample: &Value| -> i64 {
        let at: jiff::Timestamp = sample["timestamp"].as_str().expect("a time").parse().expect("a time");
        at.as_second()
    };
    assert_eq!([text(&samples[0]), text(&samples[1])], [time(1), time(6)]);
    let want = |at_s, cpu: f64, memory, received| {
        json!({
            "timestampUnix": time(at_s), "cpuCount": 2, "cpuUsedPct": cpu, "memUsed": memory * MIB,
            "memTotal": 1024 * MIB, "memCache": 3 * MIB + 1, "diskUsed": 7 * MIB, "diskTotal": 10_240 * MIB,
            "networkReceived": received, "networkSent": 11,
        })
    };
    let without_text = |sample: &Value| {
        let mut sample = sample.clone();
        sample.as_object_mut().expect("an object").remove("timestamp");
        sample
    };
    // Half of two cores for a second since the start; then 1.234 s out of twice five.
    assert_eq!(without_text(&samples[0]), want(1, 50.0, 10, 7_000));
    assert_eq!(without_text(&samples[1]), want(6, 12.34, 20, 15_638));
    assert_eq!(samples.len(), 2);
}

#[tokio::test]
async fn ranges_are_in_seconds_and_inclusive() {
    let (platform, id) = with_samples().await;
    let now_s = platform.clock.now_us().div_euclid(1_000_000);
    let times = async |query: String| -> Vec<i64> {
        let samples = found(&platform, &id, &query).await;
        let at = |sample: &Value| sample["timestampUnix"].as_i64().expect("a time") - now_s;
        samples.iter().map(at).collect()
    };
    let all: Vec<i64> = (0..8).map(|n| 1 + 5 * n).collect();
    assert_eq!(times(String::new()).await, all);
    // Steps of 15 minutes, of which 36 seconds touch one or two.
    assert!((1..=2).contains(&times("start=0".to_owned()).await.len()));
    for (start, end, want) in [
        (1, 36, &all[..]),
        (2, 35, &all[1..7]),
        (6, 6, &all[1..2]),
        (7, 10, &all[..0]),
        (100, 200, &all[..0]),
    ] {
        let query = format!("start={}&end={}", now_s + start, now_s + end);
        assert_eq!(times(query.clone()).await, want, "{query}");
    }
    assert_eq!(times(format!("start={}", now_s + 31)).await, all[6..]);
    assert_eq!(times(format!("end={}", now_s + 6)).await.len(), 2);
    // A range in the future without an end is valid.
    assert_eq!(times(format!("start={}", now_s + 1_000_000)).await, [0; 0]);
    assert_eq!(times(format!("start={}", i64::MAX)).await, [0; 0]);
    let reply = get(&platform, &id, &format!("start={}&end={}", now_s + 2, now_s + 1)).await;
    assert!(reply.error(400).contains("later"), "{reply:?}");
    for (query, why) in [
        ("start=-1", "at least 0"),
        ("end=-1", "at least 0"),
        ("start=x", "invalid integer"),
        ("end=1.5", "invalid integer"),
        ("end=9223372036854775808", "invalid integer"),
    ] {
        let reply = get(&platform, &id, query).await;
        assert!(reply.error(400).contains(why), "{query}: {reply:?}");
    }
}

#[tokio::test]
async fn long_ranges_are_downsampled_to_maxima() {
    let (platform, id) = with_samples().await;
    let now_s = platform.clock.now_us().div_euclid(1_000_000);
    let fine = found(&platform, &id, &format!("start={}&end={}", now_s - 3500, now_s + 99)).await;
    assert_eq!(fine.len(), 8);
    let coarse = found(&platform, &id, &format!("start={}&end={}", now_s - 3500, now_s + 100)).await;
    // 36 seconds lie in two or three steps of half a minute.
    assert!((2..=3).contains(&coarse.len()), "{coarse:?}");
    let greatest = |samples: &[Value]| samples.iter().filter_map(|sample| sample["memUsed"].as_u64()).max();
    assert_eq!(greatest(&coarse), greatest(&fine));
    assert_eq!(coarse.last().expect("samples")["timestampUnix"], now_s + 36);
}

#[tokio::test]
async fn metrics_outlive_the_sandbox_and_the_platform() {
    let (platform, id) = with_samples().await;
    let running = platform.create(",\"timeout\":7000").await;
    tell(&platform, sample(&platform, &running, 5, 0, 5)).await;
    let before = found(&platform, &running, "").await;
    let samples = found(&platform, &id, "").await;
    platform.call("DELETE", &format!("/sandboxes/{id}"), "").await;
    assert_eq!(found(&platform, &id, "").await, samples);
    let platform = platform.restart().await;
    assert_eq!(found(&platform, &id, "").await, samples);
    assert_eq!(found(&platform, &running, "").await, before);
    let path = format!("/sandboxes/metrics?sandbox_ids={id},{running}");
    let reply = platform.call("GET", &path, "").await;
    assert_eq!(reply.json["sandboxes"][&id], samples[7]);
    // The first reading of an adopted sandbox only starts the measurement of its CPU time.
    let mut at_s: u32 = 50;
    within(async {
        while found(&platform, &running, "").await.len() < 2 {
            let used = sample(&platform, &running, i64::from(at_s), u64::from(at_s) * 2000, 5);
            *platform.node.samples.lock() = vec![used];
            at_s += 1;
        }
    })
    .await;
    assert_eq!(found(&platform, &running, "").await[1]["cpuUsedPct"], 100.0);
}

#[tokio::test]
async fn metrics_of_other_teams_are_empty() {
    let (platform, id) = with_samples().await;
    for (key, id) in [(OTHER_KEY, id.as_str()), (OTHER_KEY, "inone"), (KEY, "inone")] {
        let reply = platform
            .call_as(Some(key), "GET", &format!("/sandboxes/{id}/metrics"), "")
            .await;
        assert_eq!((reply.status.as_u16(), reply.json), (200, json!([])));
        let path = format!("/sandboxes/metrics?sandbox_ids={id}");
        let reply = platform.call_as(Some(key), "GET", &path, "").await;
        assert_eq!((reply.status.as_u16(), reply.json), (200, json!({"sandboxes": {}})));
    }
    platform.call_as(None, "GET", "/sandboxes/metrics", "").await.error(401);
    platform
        .call_as(None, "GET", &format!("/sandboxes/{id}/metrics"), "")
        .await
        .error(401);
    platform.call("GET", "/sandboxes/NO!/metrics", "").await.error(400);
}

#[tokio::test]
async fn batch_ids_are_validated() {
    let (platform, id) = with_samples().await;
    let silent = platform.create("").await;
    let batch = async |query: &str| platform.call("GET", &format!("/sandboxes/metrics?{query}"), "").await;
    let last = found(&platform, &id, "").await.remove(7);
    let want = json!({"sandboxes": {id.clone(): last}});
    // Sandboxes without samples are left out, whether they run or never existed.
    for query in [
        format!("sandbox_ids={id}"),
        format!("sandbox_ids={id},{silent},inone"),
        format!("sandbox_ids=inone%2C{id}"),
        format!("sandbox_ids={id}-6532622b"),
        // Two forms of one id are two items, but one sandbox.
        format!("sandbox_ids={id},{id}-6532622b"),
    ] {
        let reply = batch(&query).await;
        assert_eq!((reply.status.as_u16(), reply.json), (200, want.clone()), "{query}");
    }
    let ids = |count: usize| (0..count).map(|n| format!("i{n}")).collect::<Vec<_>>().join(",");
    let reply = batch(&format!("sandbox_ids={}", ids(100))).await;
    assert_eq!((reply.status.as_u16(), reply.json), (200, json!({"sandboxes": {}})));
    for (query, why) in [
        (String::new(), "required but missing"),
        ("sandbox_ids".to_owned(), "invalid sandbox ID"),
        ("sandbox_ids=".to_owned(), "invalid sandbox ID"),
        (format!("sandbox_ids={id},"), "invalid sandbox ID"),
        ("sandbox_ids=NO!".to_owned(), "invalid sandbox ID"),
        (format!("sandbox_ids={id},{id}"), "duplicate"),
        (format!("sandbox_ids={id}&sandbox_ids={silent}"), "given once"),
        (format!("sandbox_ids={}", ids(101)), "maximum number of items is 100"),
    ] {
        let reply = batch(&query).await;
        assert!(reply.error(400).contains(why), "{query}: {reply:?}");
    }
}

#[tokio::test]
async fn old_samples_are_removed() {
    fn adjust(settings: &mut ServerSettings) {
        quick(settings);
        settings.records.metric_retention_s = 100;
        settings.records.purge_interval = Duration::from_millis(10);
    }
    let platform = TestPlatform::start_adjusted(adjust).await;
    let id = platform.create(",\"timeout\":7000").await;
    tell(&platform, sample(&platform, &id, 1, 0, 1)).await;
    tell(&platform, sample(&platform, &id, 50, 0, 2)).await;
    platform.call("DELETE", &format!("/sandboxes/{id}"), "").await;
    assert_eq!(found(&platform, &id, "").await.len(), 2);
    platform.clock.advance(100);
    assert_eq!(found(&platform, &id, "").await.len(), 2, "100 s are not over");
    platform.clock.advance(2);
    assert_eq!(found(&platform, &id, "").await.len(), 1);
    platform.clock.advance(50);
    assert_eq!(found(&platform, &id, "").await.len(), 0);
    let path = format!("/sandboxes/metrics?sandbox_ids={id}");
    assert_eq!(platform.call("GET", &path, "").await.json, json!({"sandboxes": {}}));
    // Removed from the database, not only hidden.
    let (team, sandbox) = (super::platform::team(1), id.parse().expect("an id"));
    within(async {
        let row = async || platform.store.metric_latest(&team, &sandbox).await.expect("a database");
        while row().await.is_some() {}
    })
    .await;
}

#[tokio::test]
async fn total_samples_are_bounded_and_the_oldest_removed_first() {
    fn adjust(settings: &mut ServerSettings) {
        // Ten rows of five minutes.
        settings.records.metric_total_bytes = 10 * 1536;
        settings.records.purge_interval = Duration::from_millis(10);
    }
    let platform = TestPlatform::start_adjusted(adjust).await;
    let now_us = platform.clock.now_us();
    let batch = store::records::RecordBatch {
        chunks: (0..30)
            .map(|n| store::records::MetricChunk {
                team_id: super::platform::team(1),
                sandbox_id: "ibounded".parse().expect("an id"),
                from_us: now_us + n,
                to_us: now_us + n,
                samples: String::new(),
            })
            .collect(),
        ..store::records::RecordBatch::default()
    };
    platform.store.records_write(&batch).await.expect("a database");
    within(async { while platform.store.metric_count().await.expect("a database") > 9 {} }).await;
    let left = platform
        .store
        .metric_list(
            &super::platform::team(1),
            &"ibounded".parse().expect("an id"),
            0,
            i64::MAX,
        )
        .await
        .expect("a database");
    assert!(left.last().is_some_and(|chunk| chunk.to_us == now_us + 29), "{left:?}");
}

//! `GET /sandboxes/{sandboxID}/logs`, in both versions.

use std::collections::BTreeMap;
use std::time::Duration;

use model::log::Level;
use protocol::node::{Logger, SandboxLog};
use serde_json::{Value, json};
use server::settings::ServerSettings;
use store::records::{LogRow, NewLogEntry, RecordBatch};

use super::platform::{OTHER_KEY, TestPlatform, team, within};

/// Adds a log entry of a sandbox as the node does, `at_ms` milliseconds after the start of the test.
async fn say(platform: &TestPlatform, id: &str, at_ms: i64, level: Level, message: &str) {
    let entry = SandboxLog {
        id: id.parse().expect("an id"),
        at_us: platform.clock.now_us() + at_ms * 1000,
        level,
        logger: Logger::Process,
        message: message.to_owned(),
        fields: BTreeMap::from([("event_type".to_owned(), "said".to_owned())]),
    };
    platform.node.log(entry).await;
}

/// The parsed lines of version 1, once there are at least `count`.
async fn lines(platform: &TestPlatform, id: &str, count: usize) -> Vec<Value> {
    within(async {
        loop {
            let reply = platform.call("GET", &format!("/sandboxes/{id}/logs"), "").await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let logs = reply.json["logs"].as_array().expect("logs");
            if logs.len() >= count {
                let parse = |log: &Value| serde_json::from_str(log["line"].as_str().expect("a line")).expect("JSON");
                return logs.iter().map(parse).collect();
            }
        }
    })
    .await
}

fn messages(entries: &[Value]) -> Vec<&str> {
    entries
        .iter()
        .map(|entry| entry["message"].as_str().expect("a message"))
        .collect()
}

/// The entries of version 2.
async fn entries(platform: &TestPlatform, id: &str, query: &str) -> Vec<Value> {
    let reply = platform
        .call("GET", &format!("/v2/sandboxes/{id}/logs?{query}"), "")
        .await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json["logs"].as_array().expect("logs").clone()
}

/// Stores `count` numbered entries of a sandbox, a millisecond apart, beginning at the Unix epoch.
async fn store_entries(platform: &TestPlatform, id: &str, count: u16) {
    let entries = (0..count).map(|n| NewLogEntry {
        team_id: team(1),
        sandbox_id: id.parse().expect("an id"),
        row: LogRow {
            at_us: i64::from(n) * 1000,
            seq: i64::from(n),
            level: Level::ALL[usize::from(n % 4)],
            logger: "process".to_owned(),
            message: format!("entry {n}"),
            fields: BTreeMap::new(),
        },
    });
    let batch = RecordBatch {
        entries: entries.collect(),
        ..RecordBatch::default()
    };
    platform.store.records_write(&batch).await.expect("a database");
}

#[tokio::test]
async fn lifecycle_events_are_logged_and_outlive_the_sandbox() {
    let platform = TestPlatform::start().await;
    let id = platform.create(",\"timeout\":60").await;
    platform
        .call("POST", &format!("/sandboxes/{id}/timeout"), r#"{"timeout":90}"#)
        .await;
    // Its deadline is later already, so nothing changes.
    platform
        .call("POST", &format!("/sandboxes/{id}/refreshes"), r#"{"duration":20}"#)
        .await;
    platform.call("DELETE", &format!("/sandboxes/{id}"), "").await;

    let path = format!("/sandboxes/{id}/logs");
    let reply = platform.call("GET", &path, "").await;
    let time = reply.json["logs"][0]["timestamp"].clone();
    let seconds = |us: i64| us.div_euclid(1_000_000);
    let told: jiff::Timestamp = time.as_str().expect("a time").parse().expect("a time");
    assert_eq!(told.as_second(), seconds(platform.clock.now_us()));
    let lines = lines(&platform, &id, 3).await;
    assert_eq!(
        messages(&lines),
        [
            "the sandbox was created",
            "the timeout was changed",
            "a client asked to kill the sandbox"
        ]
    );
    let end_at = lines[0]["end_at"].clone();
    assert_eq!(
        lines[0],
        json!({
            "timestamp": time, "level": "info", "logger": "platform", "message": "the sandbox was created",
            "event_type": "sandbox_created", "template": super::platform::BASE, "end_at": end_at,
            "sandboxID": id, "teamID": team(1).as_str(), "service": "ringfence",
        })
    );
    assert_eq!(
        reply.json["logEntries"][0],
        json!({
            "timestamp": time, "level": "info", "message": "the sandbox was created",
            "fields": {
                "logger": "platform", "event_type": "sandbox_created", "template": super::platform::BASE,
                "end_at": end_at,
            },
        })
    );
    assert_eq!(lines[2]["reason"], "killed");
    let newest_first = entries(&platform, &id, "").await;
    let oldest_first: Vec<Value> = newest_first.into_iter().rev().collect();
    assert_eq!(Value::from(oldest_first), reply.json["logEntries"]);
}

#[tokio::test]
async fn an_expiry_is_logged() {
    let platform = TestPlatform::start().await;
    let id = platform.create(",\"timeout\":60").await;
    platform.clock.advance(61);
    platform.until_gone(&id).await;
    let lines = lines(&platform, &id, 2).await;
    assert_eq!(messages(&lines)[1], "the timeout was reached");
    assert_eq!(lines[1]["reason"], "expired");
}

#[tokio::test]
async fn an_exit_is_logged() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    platform.node.exit(&id.parse().expect("an id")).await;
    let lines = lines(&platform, &id, 2).await;
    assert_eq!(messages(&lines)[1], "the sandbox ended by itself");
    assert_eq!(
        (&lines[1]["reason"], &lines[1]["level"]),
        (&json!("exited"), &json!("warn"))
    );
}

#[tokio::test]
async fn logs_of_other_teams_are_empty() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    assert_eq!(lines(&platform, &id, 1).await.len(), 1);
    for (key, id) in [
        (OTHER_KEY, id.as_str()),
        (OTHER_KEY, "inone"),
        (super::platform::KEY, "inone"),
    ] {
        let path = format!("/sandboxes/{id}/logs");
        let reply = platform.call_as(Some(key), "GET", &path, "").await;
        assert_eq!(
            (reply.status.as_u16(), reply.json),
            (200, json!({"logs": [], "logEntries": []}))
        );
        let reply = platform.call_as(Some(key), "GET", &format!("/v2{path}"), "").await;
        assert_eq!((reply.status.as_u16(), reply.json), (200, json!({"logs": []})));
    }
    for path in ["/sandboxes/NO!/logs", "/v2/sandboxes/NO!/logs"] {
        assert!(platform.call("GET", path, "").await.error(400).contains("sandbox ID"));
    }
    for path in [format!("/sandboxes/{id}/logs"), format!("/v2/sandboxes/{id}/logs")] {
        platform.call_as(None, "GET", &path, "").await.error(401);
        platform.call("POST", &path, "").await.error(405);
    }
}

#[tokio::test]
async fn node_entries_are_ordered_by_time() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    for (at_ms, level, message) in [
        (30, Level::Error, "third"),
        (10, Level::Debug, "first"),
        (20, Level::Warn, "a NUL \0 inside"),
    ] {
        say(&platform, &id, at_ms, level, message).await;
    }
    say(&platform, "iunknown", 0, Level::Info, "of nobody").await;
    let lines = lines(&platform, &id, 4).await;
    assert_eq!(
        messages(&lines),
        ["the sandbox was created", "first", "a NUL \u{fffd} inside", "third"]
    );
    let levels: Vec<&Value> = lines.iter().map(|line| &line["level"]).collect();
    assert_eq!(levels, ["info", "debug", "warn", "error"]);
    assert_eq!(
        (&lines[1]["logger"], &lines[1]["event_type"]),
        (&json!("process"), &json!("said"))
    );
}

#[tokio::test]
async fn entry_fields_cannot_override_line_keys() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let entry = SandboxLog {
        id: id.parse().expect("an id"),
        at_us: platform.clock.now_us() + 1000,
        level: Level::Warn,
        logger: Logger::Process,
        message: "true".to_owned(),
        fields: ["level", "message", "logger", "timestamp", "sandboxID", "teamID"]
            .map(|key| (key.to_owned(), "forged".to_owned()))
            .into(),
    };
    platform.node.log(entry).await;
    let line = lines(&platform, &id, 2).await.remove(1);
    assert_eq!(
        (&line["level"], &line["message"], &line["logger"]),
        (&json!("warn"), &json!("true"), &json!("process"))
    );
    assert!(!line.to_string().contains("forged"), "{line}");
}

#[tokio::test]
async fn v1_parameters_are_bounded() {
    let platform = TestPlatform::start_adjusted(|settings| settings.records.log_entries = 20_000).await;
    store_entries(&platform, "imany", 10_005).await;
    let found = async |query: &str| {
        let reply = platform
            .call("GET", &format!("/sandboxes/imany/logs?{query}"), "")
            .await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let logs = reply.json["logs"].as_array().expect("logs").len();
        assert_eq!(logs, reply.json["logEntries"].as_array().expect("entries").len());
        let first = reply.json["logEntries"][0]["message"]
            .as_str()
            .unwrap_or("none")
            .to_owned();
        (logs, first)
    };
    for (query, count, first) in [
        ("", 1000, "entry 0"),
        ("limit=0", 0, "none"),
        ("limit=1", 1, "entry 0"),
        ("limit=9999", 9999, "entry 0"),
        ("limit=10000", 10_000, "entry 0"),
        // Cut, not refused.
        ("limit=10001", 10_000, "entry 0"),
        ("limit=9223372036854775807", 10_000, "entry 0"),
        ("start=0&limit=2", 2, "entry 0"),
        ("start=10003", 2, "entry 10003"),
        ("start=10005", 0, "none"),
        ("start=9223372036854775807", 0, "none"),
    ] {
        assert_eq!(found(query).await, (count, first.to_owned()), "{query}");
    }
    for (query, why) in [
        ("limit=-1", "at least 0"),
        ("limit=x", "invalid integer"),
        ("limit=", "invalid integer"),
        ("limit=9223372036854775808", "invalid integer"),
        ("start=-1", "at least 0"),
        ("start=1.5", "invalid integer"),
    ] {
        let reply = platform
            .call("GET", &format!("/sandboxes/imany/logs?{query}"), "")
            .await;
        assert!(reply.error(400).contains(why), "{query}: {reply:?}");
    }
}

#[tokio::test]
async fn v2_parameters_are_bounded() {
    let platform = TestPlatform::start().await;
    store_entries(&platform, "imany", 1005).await;
    let found = async |query: &str| -> Vec<u16> {
        let entries = entries(&platform, "imany", query).await;
        let number = |message: &str| message.strip_prefix("entry ").and_then(|n| n.parse().ok());
        messages(&entries)
            .into_iter()
            .map(|message| number(message).expect("a number"))
            .collect()
    };
    assert_eq!(found("").await, (5..1005).rev().collect::<Vec<_>>());
    assert_eq!(found("limit=1000").await.len(), 1000);
    assert_eq!(found("direction=forward").await, (0..1000).collect::<Vec<_>>());
    let longest = "e".repeat(256);
    for (query, want) in [
        ("limit=0", vec![]),
        ("limit=2", vec![1004, 1003]),
        ("limit=2&direction=backward", vec![1004, 1003]),
        ("limit=2&direction=forward", vec![0, 1]),
        // The cursor's own millisecond belongs to both directions.
        ("limit=2&cursor=500", vec![500, 499]),
        ("limit=2&cursor=500&direction=forward", vec![500, 501]),
        ("cursor=1", vec![1, 0]),
        ("cursor=1003&direction=forward", vec![1003, 1004]),
        ("cursor=9223372036854775807&direction=forward", vec![]),
        ("cursor=9223372036854775807&limit=1", vec![1004]),
        ("level=error&limit=2", vec![1003, 999]),
        ("level=warn&limit=3", vec![1003, 1002, 999]),
        ("level=info&limit=2&direction=forward", vec![1, 2]),
        ("level=debug&limit=2&direction=forward", vec![0, 1]),
        ("search=entry%20100&limit=2", vec![1004, 1003]),
        ("search=100&direction=forward&limit=2", vec![100, 1000]),
        ("search=Entry", vec![]),
        ("search=%25", vec![]),
        ("search=", (5..1005).rev().collect()),
        (&format!("search={longest}"), vec![]),
    ] {
        assert_eq!(found(query).await, want, "{query}");
    }
    for (query, why) in [
        ("limit=-1".to_owned(), "at least 0 and at most 1000"),
        ("limit=1001".to_owned(), "at least 0 and at most 1000"),
        ("limit=x".to_owned(), "invalid integer"),
        ("cursor=-1".to_owned(), "at least 0"),
        ("cursor=x".to_owned(), "invalid integer"),
        ("direction=up".to_owned(), "allowed values"),
        ("direction=".to_owned(), "allowed values"),
        ("level=fatal".to_owned(), "allowed values"),
        ("level=INFO".to_owned(), "allowed values"),
        (format!("search={}", "ü".repeat(257)), "maximum string length is 256"),
    ] {
        let reply = platform
            .call("GET", &format!("/v2/sandboxes/imany/logs?{query}"), "")
            .await;
        assert!(reply.error(400).contains(why), "{query}: {reply:?}");
    }
    // 256 characters of more than a byte each are 256 characters.
    assert!(found(&format!("search={}", "ü".repeat(256))).await.is_empty());
}

#[tokio::test]
async fn logs_survive_a_restart_completely() {
    let platform = TestPlatform::start().await;
    let (kept, lost) = (platform.create("").await, platform.create("").await);
    for n in 0..600 {
        say(&platform, &kept, 1 + n, Level::Info, "said").await;
    }
    platform.node.running.lock().remove(&lost.parse().expect("an id"));
    let platform = platform.restart().await;
    // Available immediately: the previous server wrote everything before it stopped.
    let all = entries(&platform, &kept, "").await;
    assert_eq!(all.len(), 601);
    say(&platform, &kept, 1000, Level::Info, "said after").await;
    assert_eq!(messages(&lines(&platform, &kept, 602).await)[601], "said after");
    let of_lost = lines(&platform, &lost, 2).await;
    assert_eq!(
        messages(&of_lost)[1],
        "the sandbox ended while the platform did not run"
    );
}

#[tokio::test]
async fn a_log_is_bounded_and_its_oldest_entries_are_removed_first() {
    fn adjust(settings: &mut ServerSettings) {
        settings.records.log_entries = 20;
    }
    let platform = TestPlatform::start_adjusted(adjust).await;
    let (loud, quiet) = (platform.create("").await, platform.create("").await);
    for n in 0..500 {
        say(&platform, &loud, n + 1, Level::Info, &n.to_string()).await;
    }
    within(async {
        loop {
            let found = entries(&platform, &loud, "").await;
            let newest = found.first().map(|entry| entry["message"].clone());
            if newest == Some(json!("499")) && found.len() <= 20 {
                let numbers: Vec<String> = (500 - found.len()..500).rev().map(|n| n.to_string()).collect();
                assert_eq!(messages(&found), numbers);
                assert!(found.len() >= 18, "no more is cut than has to be: {}", found.len());
                break;
            }
        }
    })
    .await;
    assert_eq!(lines(&platform, &quiet, 1).await.len(), 1);
}

#[tokio::test]
async fn a_log_is_bounded_in_bytes() {
    fn adjust(settings: &mut ServerSettings) {
        settings.records.log_bytes = 100_000;
    }
    let platform = TestPlatform::start_adjusted(adjust).await;
    let id = platform.create("").await;
    let long = "x".repeat(4000);
    for n in 0..100 {
        say(&platform, &id, n + 1, Level::Info, &format!("{n} {long}")).await;
    }
    within(async {
        loop {
            let found = entries(&platform, &id, "").await;
            let newest = found[0]["message"].as_str().is_some_and(|text| text.starts_with("99 "));
            if newest && found.len() <= 24 {
                assert!(found.len() >= 20, "no more is cut than has to be: {}", found.len());
                break;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn logs_are_removed_after_their_retention() {
    fn adjust(settings: &mut ServerSettings) {
        settings.records.log_retention_s = 100;
        settings.records.purge_interval = Duration::from_millis(10);
    }
    let platform = TestPlatform::start_adjusted(adjust).await;
    let (first, second, third) = (
        platform.create(",\"timeout\":7000").await,
        platform.create(",\"timeout\":7000").await,
        platform.create(",\"timeout\":7000").await,
    );
    platform.call("DELETE", &format!("/sandboxes/{first}"), "").await;
    platform.clock.advance(60);
    platform.call("DELETE", &format!("/sandboxes/{second}"), "").await;
    assert_eq!(lines(&platform, &second, 2).await.len(), 2);
    platform.clock.advance(60);
    within(async { while !entries(&platform, &first, "").await.is_empty() {} }).await;
    // The second is within the retention, the third has not ended.
    assert_eq!(lines(&platform, &second, 2).await.len(), 2);
    assert_eq!(lines(&platform, &third, 1).await.len(), 1);
    platform.clock.advance(60);
    within(async { while !entries(&platform, &second, "").await.is_empty() {} }).await;
    assert_eq!(lines(&platform, &third, 1).await.len(), 1);
}

/// With a long purge interval: the growth itself triggers the removal.
#[tokio::test]
async fn total_logs_are_bounded_and_ended_sandboxes_removed_first() {
    fn adjust(settings: &mut ServerSettings) {
        settings.records.log_total_bytes = 200_000;
        settings.records.purge_interval = Duration::from_secs(3600);
    }
    let platform = TestPlatform::start_adjusted(adjust).await;
    let (ended, quiet, loud) = (
        platform.create("").await,
        platform.create("").await,
        platform.create("").await,
    );
    let long = "x".repeat(1000);
    for n in 0..50 {
        say(&platform, &ended, n + 1, Level::Info, &format!("{n} {long}")).await;
    }
    platform.call("DELETE", &format!("/sandboxes/{ended}"), "").await;
    assert!(lines(&platform, &ended, 51).await.len() > 50);
    for n in 0..400 {
        say(&platform, &loud, n + 1, Level::Info, &format!("{n} {long}")).await;
    }
    within(async {
        loop {
            let gone = entries(&platform, &ended, "").await.is_empty();
            let left = entries(&platform, &loud, "limit=1000").await;
            let newest = left.first().and_then(|entry| entry["message"].as_str());
            let total = platform.store.log_total().await.expect("a database");
            if gone && newest.is_some_and(|text| text.starts_with("399 ")) && total <= 200_000 {
                assert!(left.len() > 50, "no more is cut than has to be: {}", left.len());
                break;
            }
        }
    })
    .await;
    assert_eq!(lines(&platform, &quiet, 1).await.len(), 1);
}

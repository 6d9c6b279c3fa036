//! `GET /teams/{teamID}/metrics` and `/max`.

use std::time::Duration;

use serde_json::{Value, json};
use server::settings::ServerSettings;

use super::platform::{TestPlatform, pause, team, within};

/// Looks often whether a minute is over.
fn quick(settings: &mut ServerSettings) {
    settings.records.metric_first = Duration::from_millis(1);
}

async fn metrics(platform: &TestPlatform, query: &str) -> Value {
    let path = format!("/teams/{}/metrics{query}", team(1));
    let reply = platform.call("GET", &path, "").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json
}

#[tokio::test]
async fn metrics_follow_the_sandboxes_of_a_team() {
    let platform = TestPlatform::start_adjusted(quick).await;
    assert_eq!(metrics(&platform, "").await, json!([]));
    let none = metrics(&platform, "/max?metric=concurrent_sandboxes").await;
    assert_eq!(none["value"].as_f64(), Some(0.0));
    // To the beginning of a minute.
    let into = platform.clock.now_us().div_euclid(1_000_000).rem_euclid(60);
    platform.clock.advance(60 - into);
    let begun_s = platform.clock.now_us().div_euclid(1_000_000);
    let one = platform.create(r#","timeout":7000"#).await;
    let two = platform.create(r#","timeout":7000"#).await;
    platform.clock.advance(9);
    // Of a long range, with steps of a quarter of an hour.
    let now = metrics(&platform, "").await;
    assert_eq!(now[0]["concurrentSandboxes"], 2, "{now}");
    assert_eq!(now[0]["sandboxStartRate"].as_f64(), Some(0.2), "{now}");
    assert_eq!(now[0]["timestampUnix"], begun_s + 9);
    platform.call("DELETE", &format!("/sandboxes/{one}"), "").await;
    let reply = platform.call("POST", &format!("/sandboxes/{two}/pause"), "").await;
    assert_eq!(reply.status, 204, "{reply:?}");
    // The next minutes have none: one with zeros follows the last in which there were some.
    platform.clock.advance(60);
    let all = within(async {
        loop {
            let all = metrics(&platform, &format!("?start={begun_s}")).await;
            if all
                .as_array()
                .is_some_and(|all| all.len() == 2 && all[1]["concurrentSandboxes"] == 0)
            {
                return all;
            }
            pause().await;
        }
    })
    .await;
    assert_eq!(all[0]["timestampUnix"], begun_s + 59);
    assert_eq!(all[0]["concurrentSandboxes"], 2);
    let peak = metrics(&platform, "/max?metric=concurrent_sandboxes").await;
    assert_eq!(
        (peak["value"].as_f64(), &peak["timestampUnix"]),
        (Some(2.0), &json!(begun_s + 59))
    );
    let rate = metrics(&platform, "/max?metric=sandbox_start_rate").await;
    let rate = rate["value"].as_f64().expect("a number");
    assert!((rate - 2.0 / 60.0).abs() < 1e-9, "{rate}");
    let range = format!("?start={}&end={}", begun_s + 60, begun_s + 200);
    assert_eq!(metrics(&platform, &range).await.as_array().map(Vec::len), Some(1));
    let path = format!("/teams/{}/metrics?start=2&end=1", team(1));
    platform.call("GET", &path, "").await.error(400);
    let path = format!("/teams/{}/metrics/max", team(1));
    platform.call("GET", &path, "").await.error(400);
}

#[tokio::test]
async fn sandboxes_of_an_earlier_start_count_and_are_no_starts() {
    let platform = TestPlatform::start_adjusted(quick).await;
    platform.create(r#","timeout":7000"#).await;
    platform.create(r#","timeout":7000"#).await;
    let platform = platform.restart().await;
    let begun_s = platform.clock.now_us().div_euclid(1_000_000) - 60;
    platform.clock.advance(60);
    let all = within(async {
        loop {
            let all = metrics(&platform, &format!("?start={begun_s}")).await;
            if all.as_array().is_some_and(|all| all.len() == 2) {
                return all;
            }
            pause().await;
        }
    })
    .await;
    assert_eq!(
        (&all[0]["concurrentSandboxes"], &all[1]["concurrentSandboxes"]),
        (&json!(2), &json!(2))
    );
    assert_eq!(all[1]["sandboxStartRate"].as_f64(), Some(0.0), "{all}");
    let rate = all[0]["sandboxStartRate"].as_f64().expect("a number");
    assert!((rate - 2.0 / 60.0).abs() < 1e-9, "{all}");
}

//! `GET /events/sandboxes` and `GET /events/sandboxes/{sandboxID}`.

use std::time::Duration;

use serde_json::{Value, json};
use server::settings::ServerSettings;

use super::platform::{BASE, OTHER_KEY, TestPlatform, pause, team, within};

async fn events(platform: &TestPlatform, path: &str) -> Vec<Value> {
    let reply = platform.call("GET", &format!("/events/sandboxes{path}"), "").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json.as_array().expect("a list").clone()
}

fn types(events: &[Value]) -> Vec<&str> {
    let kinds = events.iter().map(|event| event["type"].as_str().expect("a type"));
    kinds
        .map(|kind| kind.trim_start_matches("sandbox.lifecycle."))
        .collect()
}

/// A sandbox that has lived through every type of event, with the seconds that it ran at first.
async fn life(platform: &TestPlatform) -> String {
    let id = platform.create(r#","timeout":600,"metadata":{"user":"ä\"1"}"#).await;
    let call = async |path: &str, body: &str| {
        let reply = platform.call("POST", &format!("/sandboxes/{id}/{path}"), body).await;
        assert!(reply.status.is_success(), "{path}: {reply:?}");
    };
    platform.clock.advance(7);
    call("timeout", r#"{"timeout":300}"#).await;
    call("snapshots", "{}").await;
    call("pause", "").await;
    platform.clock.advance(100);
    call("connect", r#"{"timeout":300}"#).await;
    platform.clock.advance(2);
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
    id
}

#[tokio::test]
async fn events_tell_the_life_of_a_sandbox() {
    let platform = TestPlatform::start().await;
    let id = life(&platform).await;
    let all = events(&platform, &format!("/{id}?orderAsc=true&limit=100")).await;
    let order = ["created", "updated", "checkpointed", "paused", "resumed", "killed"];
    assert_eq!(types(&all), order);
    for event in &all {
        assert_eq!(event["version"], "v2");
        assert_eq!(event["sandboxId"], id.as_str());
        assert_eq!(event["sandboxTeamId"], team(1).as_str());
        assert_eq!(event["sandboxTemplateId"], BASE);
        assert_eq!(event["eventCategory"], "lifecycle");
        assert_eq!(event["eventData"]["sandbox_metadata"], json!({"user": "ä\"1"}));
        for key in ["id", "sandboxBuildId", "sandboxExecutionId"] {
            let text = event[key].as_str().expect("an id");
            assert!(uuid::Uuid::try_parse(text).is_ok(), "{key}: {text}");
        }
    }
    let labels: Vec<&Value> = all.iter().map(|event| &event["eventLabel"]).collect();
    assert_eq!(labels, ["create", "update", "checkpoint", "pause", "resume", "kill"]);
    let mut ids: Vec<&str> = all.iter().map(|event| event["id"].as_str().expect("an id")).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), all.len());
    // The end that was set, and the runs that are over.
    let end = all[1]["eventData"]["set_timeout"].as_str().expect("a time");
    assert!(
        end.ends_with('Z') && end > all[1]["timestamp"].as_str().expect("a time"),
        "{end}"
    );
    let paused = &all[3]["eventData"]["execution"];
    assert_eq!(paused["execution_time"], 7000);
    assert_eq!((&paused["vcpu_count"], &paused["memory_mb"]), (&json!(2), &json!(1024)));
    assert_eq!(paused["started_at"], all[0]["timestamp"]);
    assert_eq!(all[5]["eventData"]["execution"]["execution_time"], 2000);
    assert_eq!(all[0]["eventData"].get("execution"), None);
    // A resume begins another run.
    assert_eq!(all[0]["sandboxExecutionId"], all[3]["sandboxExecutionId"]);
    assert_ne!(all[3]["sandboxExecutionId"], all[4]["sandboxExecutionId"]);
}

#[tokio::test]
async fn lists_are_of_the_team_and_have_filters() {
    let platform = TestPlatform::start().await;
    let id = life(&platform).await;
    let newest = events(&platform, "").await;
    assert_eq!(
        types(&newest),
        ["killed", "resumed", "paused", "checkpointed", "updated", "created"]
    );
    assert_eq!(events(&platform, "?limit=2&offset=1").await, newest[1..3]);
    assert_eq!(events(&platform, "?offset=6").await, Vec::<Value>::new());
    for types_of in [
        "?types=sandbox.lifecycle.created&types=sandbox.lifecycle.killed&orderAsc=true",
        "?types=sandbox.lifecycle.created,sandbox.lifecycle.killed&orderAsc=true",
    ] {
        assert_eq!(
            types(&events(&platform, types_of).await),
            ["created", "killed"],
            "{types_of}"
        );
    }
    for bad in [
        "types=created",
        "types=",
        "limit=0",
        "limit=101",
        "offset=-1",
        "orderAsc=1",
    ] {
        platform
            .call("GET", &format!("/events/sandboxes?{bad}"), "")
            .await
            .error(400);
    }
    for path in ["/events/sandboxes".to_owned(), format!("/events/sandboxes/{id}")] {
        let foreign = platform.call_as(Some(OTHER_KEY), "GET", &path, "").await;
        assert_eq!((foreign.status.as_u16(), &foreign.json), (200, &json!([])), "{path}");
    }
}

#[tokio::test]
async fn a_sandbox_without_metadata_that_expires_or_is_a_fork_has_events() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":60"#).await;
    let created = events(&platform, &format!("/{id}")).await;
    assert_eq!(created[0]["eventData"], Value::Null);
    let reply = platform.call("POST", &format!("/sandboxes/{id}/fork"), "{}").await;
    assert_eq!(reply.status, 201, "{reply:?}");
    platform.clock.advance(61);
    platform.until_gone(&id).await;
    let ends = events(&platform, &format!("/{id}?types=sandbox.lifecycle.killed")).await;
    assert_eq!(ends.len(), 1);
    let created = events(&platform, "?types=sandbox.lifecycle.created").await;
    assert_eq!(created.len(), 2, "{created:?}");
    assert_ne!(created[0]["sandboxId"], created[1]["sandboxId"]);
}

#[tokio::test]
async fn metadata_that_is_too_large_is_left_out_of_events() {
    let platform = TestPlatform::start().await;
    for (length, is_there) in [(16 * 1024 - 7, true), (16 * 1024 - 6, false)] {
        let text = "x".repeat(length);
        let id = platform.create(&format!(r#","metadata":{{"k":"{text}"}}"#)).await;
        let created = events(&platform, &format!("/{id}")).await;
        assert_eq!(
            created[0]["eventData"]["sandbox_metadata"]["k"].is_string(),
            is_there,
            "{length}"
        );
    }
}

/// Purges often.
fn tidy(settings: &mut ServerSettings) {
    settings.records.purge_interval = Duration::from_millis(10);
    settings.records.event_retention_s = 3600;
}

#[tokio::test]
async fn events_are_kept_for_a_time() {
    let platform = TestPlatform::start_adjusted(tidy).await;
    let id = platform.create(r#","timeout":7000"#).await;
    assert_eq!(events(&platform, "").await.len(), 1);
    platform.clock.advance(3000);
    platform
        .call("POST", &format!("/sandboxes/{id}/timeout"), r#"{"timeout":3000}"#)
        .await;
    platform.clock.advance(601);
    within(async {
        while events(&platform, "").await.len() > 1 {
            pause().await;
        }
    })
    .await;
    assert_eq!(types(&events(&platform, "").await), ["updated"]);
}

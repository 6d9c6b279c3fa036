//! Cancelling builds.

use std::time::Duration;

use protocol::node::HostCapacity;
use serde_json::{Value, json};

use super::builds::{BASE_SPEC, finish, request};
use super::platform::{OTHER_KEY, TestPlatform, within};

async fn status(platform: &TestPlatform, path: &str) -> Value {
    platform.call("GET", &format!("{path}/status"), "").await.json
}

#[tokio::test]
async fn a_build_is_cancelled_while_it_waits_and_while_it_runs() {
    let platform = TestPlatform::start().await;
    // A step waits for the host, so that the build does not end by itself.
    *platform.node.room.lock() = Some(HostCapacity {
        memory_available_bytes: 0,
        disk_available_bytes: u64::MAX,
    });
    for is_started in [false, true] {
        let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
        let path = format!("/templates/{template}/builds/{build}");
        if is_started {
            let body = r#"{"fromTemplate":"base","steps":[{"type":"RUN","args":["true"]}]}"#;
            let reply = platform.call("POST", &format!("/v2{path}"), body).await;
            assert_eq!(reply.status, 202, "{reply:?}");
            let waits = async {
                while !status(&platform, &path)
                    .await
                    .to_string()
                    .contains("waits for the host")
                {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            within(waits).await;
        }
        let cancel = format!("{path}/cancel");
        platform.call_as(Some(OTHER_KEY), "POST", &cancel, "").await.error(404);
        platform.call_as(None, "POST", &cancel, "").await.error(401);
        let reply = platform.call("POST", &cancel, "").await;
        assert_eq!((reply.status.as_u16(), reply.text.as_str()), (204, ""));
        let ended = status(&platform, &path).await;
        assert_eq!(ended["status"], "error");
        assert_eq!(ended["reason"]["message"], json!("the build was cancelled"));
        platform.call("POST", &cancel, "").await.error(409);
        let body = r#"{"fromTemplate":"base"}"#;
        platform.call("POST", &format!("/v2{path}"), body).await.error(400);
    }
    // Its turn is free, and the step does not begin when the host has capacity.
    *platform.node.room.lock() = None;
    platform.clock.advance(1);
    let (template, build) = request(&platform, r#"{"name":"b"}"#).await;
    let path = format!("/templates/{template}/builds/{build}");
    let body = r#"{"fromTemplate":"base"}"#;
    assert_eq!(platform.call("POST", &format!("/v2{path}"), body).await.status, 202);
    let ready = async {
        while status(&platform, &path).await["status"] != "ready" {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(ready).await;
    assert!(platform.node.started.lock().is_empty());
}

#[tokio::test]
async fn only_builds_that_have_not_ended_can_be_cancelled() {
    let platform = TestPlatform::start().await;
    let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
    finish(&platform, &build, BASE_SPEC).await;
    let cancel = |template: &str, build: &str| format!("/templates/{template}/builds/{build}/cancel");
    let reply = platform.call("POST", &cancel(&template, &build), "").await;
    reply.error(409);
    assert_eq!(
        status(&platform, &format!("/templates/{template}/builds/{build}")).await["status"],
        "ready"
    );
    // A build belongs to one template.
    let (other, waiting) = request(&platform, r#"{"name":"b"}"#).await;
    platform.call("POST", &cancel(&template, &waiting), "").await.error(404);
    platform.call("POST", &cancel("base", &waiting), "").await.error(403);
    platform.call("POST", &cancel(&other, "x"), "").await.error(400);
    let nothing = "ffffffff-ffff-4fff-bfff-ffffffffffff";
    platform.call("POST", &cancel(&other, nothing), "").await.error(404);
    assert_eq!(
        platform.call("POST", &cancel("b", &waiting), "").await.status.as_u16(),
        204
    );
}

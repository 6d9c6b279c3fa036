//! Templates that come with the program: their list, and builds of them. What such a build does is not tested here: the node is a fake.

use serde_json::json;

use super::builds::request;
use super::platform::{OTHER_KEY, TestPlatform};

#[tokio::test]
async fn what_comes_with_the_program_is_built_without_an_upload() {
    let platform = TestPlatform::start().await;
    let listed = platform.call("GET", "/ready-made-templates", "").await.json;
    let listed = listed.as_array().expect("a list");
    let names: Vec<_> = listed.iter().map(|one| one["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["agents", "code-interpreter", "desktop", "mcp-gateway"]);
    let arguments = listed[0]["buildArgs"].as_array().expect("arguments");
    assert!(arguments.contains(&json!({"name": "AGENTS", "default": "claude codex gemini"})));
    for name in names {
        let (template, build) = request(&platform, &json!({"name": name}).to_string()).await;
        // What becomes of it does not matter here.
        let body = json!({"fromReadyMade": {"name": name, "buildArgs": {"BASE": "registry.invalid/none"}}}).to_string();
        let path = format!("/v2/templates/{template}/builds/{build}");
        platform.call_as(Some(OTHER_KEY), "POST", &path, &body).await.error(404);
        assert_eq!(platform.call("POST", &path, &body).await.status, 202);
        // What it copies is there, as if it had been uploaded.
        for archive in recipes::named(name)
            .expect("a recipe")
            .archives()
            .expect("archives")
            .values()
        {
            let path = format!("/templates/{template}/files/{}", archive.hash);
            assert_eq!(platform.call("GET", &path, "").await.json["present"], true);
        }
        platform.call("POST", &path, &body).await.error(400);
    }
}

#[tokio::test]
async fn what_does_not_come_with_it_is_refused() {
    let platform = TestPlatform::start().await;
    let (template, build) = request(&platform, r#"{"name":"refused"}"#).await;
    let path = format!("/v2/templates/{template}/builds/{build}");
    for (body, why) in [
        (json!({"fromReadyMade": {}}), "name"),
        (json!({"fromReadyMade": {"name": "nothing"}}), "there is agents"),
        (
            json!({"fromReadyMade": {"name": "agents", "buildArgs": {"AGENT": "codex"}}}),
            "takes no argument",
        ),
        (
            json!({"fromReadyMade": {"name": "agents"}, "fromTemplate": "base"}),
            "send one of them",
        ),
    ] {
        let reply = platform.call("POST", &path, &body.to_string()).await;
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(
            reply.json["message"].as_str().is_some_and(|text| text.contains(why)),
            "{reply:?}"
        );
    }
}

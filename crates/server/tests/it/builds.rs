//! Building templates: requests, uploads, statuses, logs and tags. What steps do is not tested here: the node is a fake.

use std::time::Duration;

use model::id::TemplateId;
use protocol::node::HostCapacity;
use serde_json::{Value, json};
use store::templates::TemplateRow;

use super::platform::{BASE, OTHER_KEY, Reply, TestPlatform, team, within};

pub(crate) fn text(reply: &Reply, key: &str) -> String {
    let value = reply.json[key].as_str();
    value.unwrap_or_else(|| panic!("no {key}: {reply:?}")).to_owned()
}

pub(crate) async fn request(platform: &TestPlatform, body: &str) -> (String, String) {
    let reply = platform.call("POST", "/v3/templates", body).await;
    assert_eq!(reply.status, 202, "{reply:?}");
    (text(&reply, "templateID"), text(&reply, "buildID"))
}

/// Makes a build ready as if it had been run. It is not started for that, because the platform would run it.
pub(crate) async fn finish(platform: &TestPlatform, build: &str, spec: &str) {
    let (rows, build) = (platform.rows(), build.parse().expect("an id"));
    let imported = rows.build_import(&build, spec, "0.6.13", platform.clock.now_us());
    assert!(imported.await.expect("a database"));
}

pub(crate) const BASE_SPEC: &str = r#"{"image":"base"}"#;

#[tokio::test]
async fn a_requested_build_waits() {
    let platform = TestPlatform::start().await;
    let reply = platform
        .call(
            "POST",
            "/v3/templates",
            r#"{"name":"Team1/New:V1","tags":["b","v1","a"],"cpuCount":4,"memoryMB":512,"x":1}"#,
        )
        .await;
    assert_eq!(reply.status, 202, "{reply:?}");
    let (template, build) = (text(&reply, "templateID"), text(&reply, "buildID"));
    let item = &reply.json;
    for (key, want) in [
        ("public", json!(false)),
        ("aliases", json!(["new"])),
        ("names", json!(["team1/new"])),
        ("tags", json!(["v1", "b", "a"])),
        ("cpuCount", json!(4)),
        ("memoryMB", json!(512)),
        ("buildStatus", json!("waiting")),
        ("buildCount", json!(1)),
    ] {
        assert_eq!(item[key], want, "{key}: {reply:?}");
    }
    let status = platform
        .call("GET", &format!("/templates/{template}/builds/{build}/status"), "")
        .await;
    assert_eq!(
        status.json,
        json!({"templateID": template, "buildID": build, "status": "waiting", "logs": [], "logEntries": []})
    );
    let detail = platform.call("GET", &format!("/templates/{template}"), "").await.json;
    assert_eq!(detail["builds"][0]["status"], "waiting");
    assert!(detail["builds"][0].get("diskSizeMB").is_none(), "{detail}");
    // It has no finished build yet, and was not built with the tag `default`.
    assert_eq!(detail["buildStatus"], "waiting");
    platform
        .call("POST", "/sandboxes", r#"{"templateID":"new"}"#)
        .await
        .error(404);
    // The same name is the same template.
    assert_eq!(request(&platform, r#"{"alias":"new"}"#).await.0, template);
    let reply = platform.call("POST", "/v2/templates", r#"{"alias":"new"}"#).await;
    assert_eq!(
        (reply.status.as_u16(), text(&reply, "templateID")),
        (202, template.clone())
    );
    let reply = platform
        .call("POST", "/templates", r#"{"alias":"new","dockerfile":"FROM x"}"#)
        .await;
    assert_eq!(
        (reply.status.as_u16(), text(&reply, "templateID")),
        (202, template.clone())
    );
    assert_eq!(reply.json["buildCount"], 4);
    // A build without a name.
    let reply = platform.call("POST", "/v3/templates", "{}").await;
    assert_eq!(
        (reply.json["names"].clone(), reply.json["tags"].clone()),
        (json!([]), json!(["default"]))
    );
    // Version 1 can rename.
    let path = format!("/templates/{template}");
    let reply = platform
        .call("POST", &path, r#"{"alias":"newer","dockerfile":""}"#)
        .await;
    assert_eq!(
        (reply.status.as_u16(), reply.json["aliases"].clone()),
        (202, json!(["newer"]))
    );
    platform
        .call("POST", &path, r#"{"alias":"own","dockerfile":""}"#)
        .await
        .error(409);
    platform.call("POST", &path, "{}").await.error(400);
    platform
        .call("POST", "/templates/base", r#"{"dockerfile":""}"#)
        .await
        .error(403);
    platform
        .call("POST", "/templates/nothing", r#"{"dockerfile":""}"#)
        .await
        .error(404);
    // The name of a global template can be taken by a team for itself.
    let (own_base, _) = request(&platform, r#"{"name":"base"}"#).await;
    assert_ne!(own_base, BASE);
    let alias = platform.call("GET", "/templates/aliases/base", "").await.json;
    assert_eq!(alias["templateID"], json!(own_base));
}

#[tokio::test]
async fn invalid_requests_are_refused() {
    let platform = TestPlatform::start().await;
    for body in [
        r#"{"name":"a b"}"#,
        r#"{"name":""}"#,
        r#"{"name":"a:"}"#,
        r#"{"name":"team2/a"}"#,
        r#"{"name":"a","tags":["a b"]}"#,
        r#"{"name":"a","tags":["0b0e1d52-58ff-4c8e-8f0d-0a1b2c3d4e5f"]}"#,
        r#"{"name":"a","cpuCount":0}"#,
        r#"{"name":"a","memoryMB":127}"#,
        r#"{"name":1}"#,
        "[]",
    ] {
        platform.call("POST", "/v3/templates", body).await.error(400);
    }
    // Clients compare these texts, in every version of the route.
    for (size, want) in [
        (r#""cpuCount":34"#, "CPU count must be at most 32"),
        (
            r#""cpuCount":10"#,
            "CPU count must be at most 8, the limit of your team",
        ),
        (r#""cpuCount":3"#, "CPU count must be 1 or an even number"),
        (r#""memoryMB":129"#, "Memory must be divisible by 2"),
        (
            r#""memoryMB":8194"#,
            "Memory can't be higher than 8192 MiB, the limit of your team",
        ),
    ] {
        for (path, name) in [
            ("/v3/templates", r#""name":"a""#),
            ("/v2/templates", r#""alias":"a""#),
            ("/templates", r#""alias":"a","dockerfile":"FROM a""#),
        ] {
            let reply = platform.call("POST", path, &format!("{{{name},{size}}}")).await;
            assert_eq!(reply.error(400), want, "{path}");
        }
    }
    let long = format!(r#"{{"name":"{}"}}"#, "a".repeat(129));
    assert!(
        platform
            .call("POST", "/v3/templates", &long)
            .await
            .error(400)
            .starts_with("validation error")
    );
    platform.call("POST", "/v2/templates", "{}").await.error(400);
    // A name that is an id.
    platform
        .call("POST", "/v3/templates", &format!(r#"{{"name":"{BASE}"}}"#))
        .await
        .error(409);
    platform.call_as(None, "POST", "/v3/templates", "{}").await.error(401);
    assert_eq!(platform.call("GET", "/templates/aliases/a", "").await.status, 404);
}

#[tokio::test]
async fn builds_of_a_team_are_limited() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.builds = 2).await;
    request(&platform, r#"{"name":"a"}"#).await;
    request(&platform, r#"{"name":"b"}"#).await;
    let refused = platform.call("POST", "/v3/templates", r#"{"name":"c"}"#).await;
    assert!(refused.error(429).contains("2 builds"), "{refused:?}");
    // It takes the place of the one that it supersedes.
    let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
    let other = platform
        .call_as(Some(OTHER_KEY), "POST", "/v3/templates", r#"{"name":"c"}"#)
        .await;
    assert_eq!(other.status, 202, "{other:?}");
    let detail = platform.call("GET", &format!("/templates/{template}"), "").await.json;
    let statuses: Vec<_> = detail["builds"]
        .as_array()
        .expect("builds")
        .iter()
        .map(|build| &build["status"])
        .collect();
    assert!(
        statuses.contains(&&json!("error")) && statuses.contains(&&json!("waiting")),
        "{detail}"
    );
    let old = detail["builds"]
        .as_array()
        .expect("builds")
        .iter()
        .find(|item| item["buildID"] != json!(build));
    let old = old.expect("the other")["buildID"].as_str().expect("an id").to_owned();
    let status = platform
        .call("GET", &format!("/templates/{template}/builds/{old}/status"), "")
        .await
        .json;
    assert!(
        status["reason"]["message"]
            .as_str()
            .is_some_and(|why| why.contains("superseded")),
        "{status}"
    );
}

#[tokio::test]
async fn invalid_starts_leave_the_build_waiting() {
    let platform = TestPlatform::start().await;
    let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
    let path = format!("/v2/templates/{template}/builds/{build}");
    for body in [
        "{}",
        r#"{"fromImage":"a","fromTemplate":"base"}"#,
        r#"{"fromImage":""}"#,
        r#"{"fromImage":"a","fromImageRegistry":{"type":"other"}}"#,
        r#"{"fromImage":"a","fromImageRegistry":{"type":"registry","username":"a"}}"#,
        r#"{"fromImage":"a","steps":[{}]}"#,
        r#"{"fromImage":"a","steps":{}}"#,
    ] {
        platform.call("POST", &path, body).await.error(400);
    }
    let headers = [
        ("host", "localhost"),
        ("x-api-key", super::platform::KEY),
        ("content-type", "application/json"),
        ("user-agent", "e2b-python-sdk/new"),
    ];
    platform
        .send("POST", &path, &headers, r#"{"fromTemplate":"base"}"#)
        .await
        .error(400);
    let valid = r#"{"fromTemplate":"base"}"#;
    platform
        .call("POST", &format!("/v2/templates/{template}/builds/x"), valid)
        .await
        .error(400);
    let unknown = uuid::Uuid::new_v4();
    platform
        .call("POST", &format!("/v2/templates/{template}/builds/{unknown}"), valid)
        .await
        .error(404);
    platform
        .call("POST", &format!("/v2/templates/{BASE}/builds/{build}"), valid)
        .await
        .error(403);
    platform.call_as(Some(OTHER_KEY), "POST", &path, valid).await.error(404);
    let status = platform
        .call("GET", &format!("/templates/{template}/builds/{build}/status"), "")
        .await
        .json;
    assert_eq!(status["status"], "waiting");
    // It was requested without a Dockerfile.
    platform
        .call("POST", &format!("/templates/{template}/builds/{build}"), "")
        .await
        .error(400);
    for body in [
        r#"{"fromDockerfile":{}}"#,
        r#"{"fromDockerfile":{"dockerfile":"FROM a","files":{"x":"y"}}}"#,
        r#"{"fromDockerfile":{"dockerfile":"FROM a"},"fromImage":"a"}"#,
        r#"{"fromArchive":"a"}"#,
        r#"{"fromDockerfile":{"dockerfile":"FROM a"},"fromImageRegistry":{"type":"registry","username":"a","password":"b"}}"#,
    ] {
        platform.call("POST", &path, body).await.error(400);
    }
}

#[tokio::test]
async fn a_dockerfile_is_refused_with_its_line() {
    let platform = TestPlatform::start().await;
    for (text, want) in [
        ("FROM a\nRUN --mount=type=secret,id=a b", "line 2: RUN --mount"),
        ("FROM a\n\nADD https://a/b /c", "line 3: ADD of an address"),
        ("", "line 1: the Dockerfile has no FROM"),
    ] {
        let body = json!({"alias": "v1", "dockerfile": text}).to_string();
        let reply = platform.call("POST", "/templates", &body).await;
        let (template, build) = (self::text(&reply, "templateID"), self::text(&reply, "buildID"));
        let path = format!("/templates/{template}/builds/{build}");
        platform.call_as(Some(OTHER_KEY), "POST", &path, "").await.error(404);
        let started = platform.call("POST", &path, "").await;
        assert_eq!(
            (started.status.as_u16(), started.text.as_str()),
            (202, ""),
            "{started:?}"
        );
        let status = until_final(&platform, &template, &build).await;
        let message = status["reason"]["message"].as_str().expect("a reason");
        assert!(message.starts_with(want), "{message}");
        platform.call("POST", &path, "").await.error(400);
        let (template, build) = request(&platform, r#"{"name":"v2"}"#).await;
        let body = json!({"fromDockerfile": {"dockerfile": text}}).to_string();
        let path = format!("/v2/templates/{template}/builds/{build}");
        assert_eq!(platform.call("POST", &path, &body).await.status, 202);
        let status = until_final(&platform, &template, &build).await;
        assert_eq!(status["reason"]["message"], message);
    }
}

async fn until_final(platform: &TestPlatform, template: &str, build: &str) -> Value {
    let path = format!("/templates/{template}/builds/{build}/status");
    within(async {
        loop {
            let status = platform.call("GET", &path, "").await.json;
            if status["status"] == "error" || status["status"] == "ready" {
                return status;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await
}

#[tokio::test]
async fn a_build_that_fails_says_why() {
    let platform = TestPlatform::start().await;
    *platform.node.start.lock() = super::platform::Behaviour::Fails;
    let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
    let path = format!("/v2/templates/{template}/builds/{build}");
    let body = r#"{"fromTemplate":"base","steps":[{"type":"RUN","args":["true"]}],"startCmd":""}"#;
    let reply = platform.call("POST", &path, body).await;
    assert_eq!(
        (
            reply.status.as_u16(),
            reply.header("content-length"),
            reply.text.as_str()
        ),
        (202, "0", "")
    );
    platform.call("POST", &path, body).await.error(400);
    let status = until_final(&platform, &template, &build).await;
    assert_eq!(status["status"], "error");
    let why = status["reason"]["message"].as_str().expect("a reason").to_owned();
    assert!(!why.is_empty());
    // The log is complete by then, and its last line says the same.
    let entries = status["logEntries"].as_array().expect("entries");
    let last = entries.last().expect("an entry");
    assert_eq!((&last["level"], &last["message"]), (&json!("error"), &json!(why)));
    assert_eq!(status["logs"].as_array().map(Vec::len), Some(entries.len()));
    let logs = format!("/templates/{template}/builds/{build}/logs");
    let backward = platform
        .call("GET", &format!("{logs}?direction=backward&limit=1&level=error"), "")
        .await
        .json;
    assert_eq!(backward["logs"], json!([last]));
    let all = platform
        .call("GET", &format!("{logs}?source=persistent"), "")
        .await
        .json;
    assert_eq!(all["logs"], status["logEntries"]);
    let offset = format!("/templates/{template}/builds/{build}/status?level=error&logsOffset=1");
    assert_eq!(platform.call("GET", &offset, "").await.json["logEntries"], json!([]));
    for bad in [
        "limit=101",
        "limit=-1",
        "level=fatal",
        "direction=up",
        "source=x",
        "cursor=x",
    ] {
        platform.call("GET", &format!("{logs}?{bad}"), "").await.error(400);
    }
    platform.call_as(Some(OTHER_KEY), "GET", &logs, "").await.error(404);
    // An id that is none comes first, whatever the template.
    for route in ["status", "logs"] {
        for (of, id, want) in [
            ("none", "x", 400),
            (template.as_str(), "x", 400),
            ("none", build.as_str(), 404),
        ] {
            let path = format!("/templates/{of}/builds/{id}/{route}");
            platform.call("GET", &path, "").await.error(want);
        }
    }
    assert!(platform.node.ids().is_empty());

    // A template that does not exist fails the build, and not the request.
    let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
    for (from, expected) in [("nothing", "nothing"), ("own:v9", "v9"), ("private", "private")] {
        let (_, build) = match from {
            "nothing" => (template.clone(), build.clone()),
            _ => request(&platform, r#"{"name":"a"}"#).await,
        };
        let path = format!("/v2/templates/{template}/builds/{build}");
        let reply = platform
            .call("POST", &path, &format!(r#"{{"fromTemplate":"{from}"}}"#))
            .await;
        assert_eq!(reply.status, 202, "{reply:?}");
        let status = until_final(&platform, &template, &build).await;
        assert_eq!(status["reason"]["step"], "base");
        assert!(
            status["reason"]["message"]
                .as_str()
                .is_some_and(|why| why.contains(expected)),
            "{status}"
        );
    }
}

#[tokio::test]
async fn a_step_waits_until_the_host_has_capacity() {
    let platform = TestPlatform::start().await;
    let memory = |bytes: u64| {
        *platform.node.room.lock() = Some(HostCapacity {
            memory_available_bytes: bytes,
            disk_available_bytes: u64::MAX,
        });
    };
    memory(0);
    let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
    let body = r#"{"fromTemplate":"base","steps":[{"type":"RUN","args":["true"]}]}"#;
    let path = format!("/v2/templates/{template}/builds/{build}");
    assert_eq!(platform.call("POST", &path, body).await.status, 202);
    let logs = format!("/templates/{template}/builds/{build}/logs");
    let waits = async {
        while !platform
            .call("GET", &logs, "")
            .await
            .text
            .contains("the step waits for the host")
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(waits).await;
    assert!(platform.node.started.lock().is_empty(), "a sandbox without capacity");
    memory(u64::MAX);
    // The reading of the host is not taken for each attempt.
    platform.clock.advance(1);
    let started = async {
        while platform.node.started.lock().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(started).await;
}

#[tokio::test]
async fn waiting_builds_expire_with_time() {
    let platform = TestPlatform::start().await;
    let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
    platform.clock.advance(40 * 60 + 1);
    let now_us = platform.clock.now_us();
    let since_us = now_us - 40 * 60 * 1_000_000;
    platform
        .store
        .build_expire_waiting(since_us, now_us, "too late")
        .await
        .expect("a database");
    let status = platform
        .call("GET", &format!("/templates/{template}/builds/{build}/status"), "")
        .await
        .json;
    assert_eq!(
        (&status["status"], &status["reason"]["message"]),
        (&json!("error"), &json!("too late"))
    );
}

#[tokio::test]
async fn sandboxes_are_started_with_what_was_built() {
    let platform = TestPlatform::start().await;
    let (template, build) = request(&platform, r#"{"name":"a","cpuCount":1,"memoryMB":256}"#).await;
    let layer = "1".repeat(64);
    platform.node.layers.lock().insert(layer.parse().expect("an id"), 1);
    let spec =
        format!(r#"{{"image":{{"layers":{{"base":true,"layers":["{layer}"]}}}},"user":"someone","workdir":"/srv"}}"#);
    finish(&platform, &build, &spec).await;
    let item = platform.call("GET", "/v2/templates", "").await.json;
    let item = item
        .as_array()
        .expect("a list")
        .iter()
        .find(|item| item["templateID"] == json!(template));
    let item = item.expect("listed").clone();
    assert_eq!(
        (
            &item["buildID"],
            &item["buildStatus"],
            &item["diskSizeMB"],
            &item["memoryMB"]
        ),
        (&json!(build), &json!("ready"), &json!(10240), &json!(256))
    );
    for name in ["a", "team1/a", "a:default", &template, &format!("a:{build}")] {
        let reply = platform
            .call("POST", "/sandboxes", &format!(r#"{{"templateID":"{name}"}}"#))
            .await;
        assert_eq!(reply.status, 201, "{name}: {reply:?}");
        let id = text(&reply, "sandboxID");
        let detail = platform.call("GET", &format!("/sandboxes/{id}"), "").await.json;
        assert_eq!(
            (&detail["templateID"], &detail["memoryMB"]),
            (&json!(template), &json!(256))
        );
        let row = platform
            .store
            .sandbox_by_id(&id.parse().expect("an id"))
            .await
            .expect("a database");
        assert_eq!(row.expect("a row").build_id.as_str(), build);
    }
    for name in ["a:v1", "team2/a", "team1/nothing", &format!("team1/{template}")] {
        platform
            .call("POST", "/sandboxes", &format!(r#"{{"templateID":"{name}"}}"#))
            .await
            .error(404);
    }
    // Another team only sees it once it is public, and by its full name.
    let create = |name: String| {
        let platform = &platform;
        async move {
            let body = format!(r#"{{"templateID":"{name}"}}"#);
            platform
                .call_as(Some(OTHER_KEY), "POST", "/sandboxes", &body)
                .await
                .status
                .as_u16()
        }
    };
    assert_eq!(create("team1/a".to_owned()).await, 404);
    let updated = platform.call("PATCH", "/v2/templates/a", r#"{"public":true}"#).await;
    assert_eq!(
        (updated.status.as_u16(), &updated.json["public"]),
        (200, &json!(true)),
        "{updated:?}"
    );
    assert_eq!(updated.json["names"], json!(["team1/a"]));
    assert_eq!(create("team1/a".to_owned()).await, 201);
    assert_eq!(create(template.clone()).await, 201);
    assert_eq!(create("a".to_owned()).await, 404);
    // It stays that of its team.
    for (method, path) in [
        ("PATCH", "/v2/templates/"),
        ("PATCH", "/templates/"),
        ("DELETE", "/templates/"),
    ] {
        let reply = platform
            .call_as(Some(OTHER_KEY), method, &format!("{path}{template}"), "")
            .await;
        reply.error(403);
    }
    let listed = platform.call_as(Some(OTHER_KEY), "GET", "/templates", "").await.json;
    assert!(!listed.to_string().contains(&template));
    platform.call("DELETE", "/templates/a", "").await.error(400);
    // A template whose build is on another node.
    let beside = platform.start_beside(2).await;
    let reply = beside.call("POST", "/sandboxes", r#"{"templateID":"a"}"#).await;
    assert!(reply.error(404).contains("another node"), "{reply:?}");
}

#[tokio::test]
async fn tags_move_between_builds() {
    let platform = TestPlatform::start().await;
    let (_, one) = request(&platform, r#"{"name":"a"}"#).await;
    let assign = async |body: String| platform.call("POST", "/templates/tags", &body).await;
    // Nothing is ready yet.
    assign(r#"{"target":"a","tags":["v1"]}"#.to_owned()).await.error(404);
    finish(&platform, &one, BASE_SPEC).await;
    let (_, two) = request(&platform, r#"{"name":"a:v2"}"#).await;
    platform.clock.advance(1);
    finish(&platform, &two, BASE_SPEC).await;
    let reply = assign(r#"{"target":"team1/a:v2","tags":["default","V3","v3"]}"#.to_owned()).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    assert_eq!(reply.json, json!({"tags": ["default", "v3"], "buildID": two}));
    let tags = async || {
        let list = platform.call("GET", "/templates/a/tags", "").await.json;
        let list = list.as_array().expect("a list").clone();
        list.iter()
            .map(|tag| (tag["tag"].clone(), tag["buildID"].clone()))
            .collect::<Vec<_>>()
    };
    let tag = |name: &str, build: &str| (json!(name), json!(build));
    assert_eq!(tags().await, [tag("default", &two), tag("v2", &two), tag("v3", &two)]);
    platform.clock.advance(1);
    assert_eq!(
        assign(format!(r#"{{"target":"a:{one}","tags":["default"]}}"#))
            .await
            .status,
        201
    );
    assert_eq!(tags().await[0], tag("default", &one));
    let remove = async |body: &str| platform.call("DELETE", "/templates/tags", body).await;
    assert_eq!(remove(r#"{"name":"a","tags":["v3","nothing"]}"#).await.status, 204);
    assert_eq!(tags().await.len(), 2);
    for body in [
        r#"{"name":"a:v2","tags":["v2"]}"#,
        r#"{"name":"a","tags":[]}"#,
        r#"{"name":"a","tags":["default"]}"#,
        r#"{"name":"team2/a","tags":["v2"]}"#,
    ] {
        remove(body).await.error(400);
    }
    remove(r#"{"name":"base","tags":["v2"]}"#).await.error(403);
    remove(r#"{"name":"nothing","tags":["v2"]}"#).await.error(404);
    for body in [
        r#"{"target":"a","tags":[]}"#.to_owned(),
        format!(r#"{{"target":"a","tags":["{one}"]}}"#),
        r#"{"target":"team2/a","tags":["x"]}"#.to_owned(),
    ] {
        assign(body).await.error(400);
    }
    assign(r#"{"target":"base","tags":["x"]}"#.to_owned()).await.error(403);
    for (name, status) in [
        ("a:v2", 200),
        ("a:default", 200),
        ("a:v3", 404),
        ("a", 200),
        ("team2%2Fa", 400),
    ] {
        let reply = platform.call("GET", &format!("/templates/aliases/{name}"), "").await;
        assert_eq!(reply.status, status, "{name}: {reply:?}");
    }
}

#[tokio::test]
async fn names_like_options_are_not_given_but_those_that_exist_are_found() {
    let platform = TestPlatform::start().await;
    request(&platform, r#"{"name":"a"}"#).await;
    for (path, body) in [
        ("/v3/templates", r#"{"name":"-rf"}"#),
        ("/v3/templates", r#"{"name":"a:-x"}"#),
        ("/v3/templates", r#"{"name":"a","tags":[".."]}"#),
        ("/v2/templates", r#"{"alias":"team1/--help"}"#),
        ("/templates", r#"{"dockerfile":"FROM base","alias":"-rf"}"#),
        ("/templates/tags", r#"{"target":"a","tags":["-x"]}"#),
    ] {
        let refused = platform.call("POST", path, body).await;
        assert!(
            refused.text.contains("begin with a letter"),
            "{path} {body}: {refused:?}"
        );
        refused.error(400);
    }
    // As an earlier version made it.
    let id: TemplateId = "old00000000000000000".parse().expect("an id");
    let row = platform
        .store
        .template_by_alias(&team(1), "own")
        .await
        .expect("a database");
    let row = TemplateRow {
        id: id.clone(),
        aliases: vec!["-rf".to_owned()],
        ..row.expect("the template of the team")
    };
    platform.store.template_insert(&row).await.expect("a template");
    let found = platform.call("GET", "/templates/aliases/-rf", "").await;
    assert_eq!(
        (found.status.as_u16(), found.json["templateID"].as_str()),
        (200, Some(id.as_str()))
    );
    let removed = platform
        .call("DELETE", "/templates/tags", r#"{"name":"-rf","tags":["-x"]}"#)
        .await;
    assert_eq!(removed.status, 204);
    assert_eq!(platform.call("DELETE", "/templates/-rf", "").await.status, 204);
    platform.call("GET", "/templates/aliases/-rf", "").await.error(404);
}

#[tokio::test]
async fn deleted_templates_free_their_name_only() {
    let platform = TestPlatform::start().await;
    let (template, build) = request(&platform, r#"{"name":"a"}"#).await;
    assert_eq!(platform.call("PATCH", "/templates/a", "").await.status, 200);
    assert_eq!(platform.call("DELETE", "/templates/a:v1", "").await.status, 204);
    platform.call("DELETE", "/templates/a", "").await.error(404);
    platform
        .call("DELETE", &format!("/templates/{template}"), "")
        .await
        .error(404);
    platform
        .call("GET", &format!("/templates/{template}/builds/{build}/status"), "")
        .await
        .error(404);
    platform
        .call("POST", "/v3/templates", &format!(r#"{{"name":"{template}"}}"#))
        .await
        .error(409);
    let (again, _) = request(&platform, r#"{"name":"a"}"#).await;
    assert_ne!(again, template);
    platform.call("DELETE", "/templates/base", "").await.error(403);
}

//! Reading templates.

use serde_json::{Value, json};

use super::platform::{BASE, OTHER_KEY, Reply, TestPlatform};

fn ids(reply: &Reply) -> Vec<&str> {
    let list = reply.json.as_array().unwrap_or_else(|| panic!("no list: {reply:?}"));
    list.iter()
        .map(|item| item["templateID"].as_str().expect("an id"))
        .collect()
}

#[tokio::test]
async fn base_template_has_all_fields() {
    let platform = TestPlatform::start().await;
    let list = platform.call("GET", "/templates", "").await;
    assert_eq!(list.status, 200);
    let base = list
        .json
        .as_array()
        .expect("a list")
        .iter()
        .find(|item| item["templateID"] == BASE);
    let base = base.expect("base is there");
    let build = base["buildID"].as_str().expect("a build").to_owned();
    assert_eq!(
        *base,
        json!({
            "templateID": BASE, "buildID": build, "cpuCount": 2, "memoryMB": 1024, "diskSizeMB": 10240,
            "public": true, "aliases": ["base"], "names": ["base"], "createdAt": "1970-01-01T00:00:00Z",
            "updatedAt": "1970-01-01T00:00:00Z", "createdBy": null, "lastSpawnedAt": null, "spawnCount": 0,
            "buildCount": 1, "envdVersion": protocol::agent::VERSION, "buildStatus": "ready", "isDefault": true,
        })
    );
    assert_eq!(platform.call("GET", "/default-templates", "").await.json, json!([base]));
    for name in [BASE, "base", "BASE"] {
        let mut detail = platform.call("GET", &format!("/templates/{name}"), "").await.json;
        let fields = detail.as_object_mut().expect("an object");
        let builds = fields.remove("builds").expect("builds");
        assert_eq!(fields.remove("keptReady"), Some(json!(0)), "{name}");
        assert_eq!(detail, *base, "{name}");
        assert_eq!(
            builds,
            json!([{
                "buildID": build, "status": "ready", "createdAt": "1970-01-01T00:00:00Z",
                "updatedAt": "1970-01-01T00:00:00Z", "cpuCount": 2, "memoryMB": 1024, "diskSizeMB": 10240,
                "envdVersion": protocol::agent::VERSION,
            }])
        );
    }
}

#[tokio::test]
async fn spawn_count_includes_ended_sandboxes() {
    let platform = TestPlatform::start().await;
    let spawns = async || {
        let detail = platform.call("GET", "/templates/base", "").await.json;
        (
            detail["spawnCount"].as_i64().expect("a count"),
            detail["lastSpawnedAt"].clone(),
        )
    };
    assert_eq!(spawns().await, (0, Value::Null));
    let first = platform.create("").await;
    let (count, at) = spawns().await;
    let started = platform.call("GET", &format!("/sandboxes/{first}"), "").await.json["startedAt"].clone();
    assert_eq!((count, &at), (1, &started));
    platform.call("DELETE", &format!("/sandboxes/{first}"), "").await;
    assert_eq!(spawns().await, (1, at));
    platform.clock.advance(10);
    let second = platform.create("").await;
    let (count, at) = spawns().await;
    assert_eq!(count, 2);
    assert_ne!(at, started);
    // A failed create is not counted.
    *platform.node.start.lock() = super::platform::Behaviour::Fails;
    platform
        .call("POST", "/sandboxes", r#"{"templateID":"base"}"#)
        .await
        .error(500);
    assert_eq!(spawns().await.0, 2);
    platform.call("DELETE", &format!("/sandboxes/{second}"), "").await;
    assert_eq!(spawns().await, (2, at));
}

#[tokio::test]
async fn a_team_sees_its_own_templates_and_the_global_ones() {
    let platform = TestPlatform::start().await;
    let own = platform.call("GET", "/templates", "").await;
    assert_eq!(ids(&own), [BASE, "own00000000000000000", "unbuilt0000000000000"]);
    assert_eq!(own.json[1]["names"], json!(["team1/mine", "team1/own"]));
    assert_eq!(
        (&own.json[1]["public"], &own.json[1]["isDefault"]),
        (&json!(false), &json!(false))
    );
    assert_eq!(own.json[2]["buildStatus"], "building");
    assert_eq!(own.json[2]["buildID"], "00000000-0000-0000-0000-000000000000");
    let other = platform.call_as(Some(OTHER_KEY), "GET", "/templates", "").await;
    assert_eq!(ids(&other), [BASE, "private0000000000000", "unbuilt0000000000000"]);
    // A template without a finished build is not listed.
    assert_eq!(ids(&platform.call("GET", "/default-templates", "").await), [BASE]);

    for (name, found) in [
        ("base", true),
        ("base:default", true),
        ("base:v2", false),
        ("own", true),
        ("mine", true),
        ("team1%2Fown", true),
        ("team2%2Fprivate", false),
        ("private", false),
        ("private0000000000000", false),
        ("nothing", false),
    ] {
        for path in [format!("/templates/aliases/{name}"), format!("/templates/{name}")] {
            let reply = platform.call("GET", &path, "").await;
            // A name can be looked up in the own namespace only.
            let missing = if path.starts_with("/templates/aliases/team2") {
                400
            } else {
                404
            };
            assert_eq!(reply.status, if found { 200 } else { missing }, "{path}: {reply:?}");
        }
    }
    let found = platform.call("GET", "/templates/aliases/base", "").await.json;
    assert_eq!(found, json!({"templateID": BASE, "public": true}));
    let found = platform.call("GET", "/templates/aliases/mine", "").await.json;
    assert_eq!(found, json!({"templateID": "own00000000000000000", "public": false}));
    for bad in ["a%20b", "a%2Fb%2Fc", "%ff", "base:"] {
        platform
            .call("GET", &format!("/templates/aliases/{bad}"), "")
            .await
            .error(400);
    }
    let team = super::platform::team(1);
    assert_eq!(
        platform
            .call("GET", &format!("/templates?teamID={team}"), "")
            .await
            .status,
        200
    );
    for path in ["/templates?teamID=x", "/v2/templates?teamID=x"] {
        platform.call("GET", path, "").await.error(400);
    }
}

#[tokio::test]
async fn lists_are_paged() {
    let platform = TestPlatform::start().await;
    let all = platform.call("GET", "/v2/templates", "").await;
    assert_eq!(ids(&all), ["unbuilt0000000000000", BASE, "own00000000000000000"]);
    assert!(all.headers.get("x-next-token").is_none());
    for limit in 1..=3 {
        let (mut seen, mut next) = (Vec::new(), String::new());
        loop {
            let page = platform
                .call("GET", &format!("/v2/templates?limit={limit}&nextToken={next}"), "")
                .await;
            seen.extend(ids(&page).into_iter().map(str::to_owned));
            let Some(token) = page.headers.get("x-next-token") else {
                break;
            };
            next = token.to_str().expect("text").to_owned();
        }
        assert_eq!(seen, ids(&all), "{limit}");
    }
    let detail = platform.call("GET", "/templates/base?limit=1", "").await;
    assert_eq!(detail.json["builds"].as_array().map(Vec::len), Some(1));
    assert!(detail.headers.get("x-next-token").is_none());
    for path in ["/v2/templates", "/templates/base"] {
        for bad in [
            "nextToken=x",
            "nextToken=eA==",
            "limit=0",
            "limit=101",
            "limit=1&limit=2",
        ] {
            platform.call("GET", &format!("{path}?{bad}"), "").await.error(400);
        }
    }
}

//! What was assigned to the tags of a template.

use serde_json::{Value, json};

use super::builds::{BASE_SPEC, finish, request};
use super::platform::{OTHER_KEY, TestPlatform};

/// A template `a` with two finished builds, and their ids.
async fn with_builds(platform: &TestPlatform) -> (String, String) {
    let (_, one) = request(platform, r#"{"name":"a"}"#).await;
    finish(platform, &one, BASE_SPEC).await;
    platform.clock.advance(1);
    let (_, two) = request(platform, r#"{"name":"a:v2"}"#).await;
    finish(platform, &two, BASE_SPEC).await;
    (one, two)
}

async fn assign(platform: &TestPlatform, target: &str, tag: &str) {
    platform.clock.advance(1);
    let body = json!({"target": target, "tags": [tag]}).to_string();
    let reply = platform.call("POST", "/templates/tags", &body).await;
    assert_eq!(reply.status, 201, "{reply:?}");
}

/// The answer to a request about the tags of `a`.
async fn read(platform: &TestPlatform, path: &str) -> Value {
    let reply = platform.call("GET", &format!("/templates/a/tags/{path}"), "").await;
    assert_eq!(reply.status, 200, "{path}: {reply:?}");
    reply.json
}

/// The builds of a list of assignments.
fn builds(list: &Value) -> Vec<&str> {
    let list = list.as_array().expect("a list").iter();
    list.map(|assignment| assignment["buildId"].as_str().expect("an id"))
        .collect()
}

#[tokio::test]
async fn tags_are_counted_and_found_when_a_build_is_finished() {
    let platform = TestPlatform::start().await;
    let (template, one) = request(&platform, r#"{"name":"a","tags":["default","v1"]}"#).await;
    assert_eq!(read(&platform, "count").await, json!({"total": 0}));
    let exists = |tag: &str| format!("exists?tag={tag}");
    let answer = |is: bool, tag: &str| json!({"exists": is, "normalizedTag": tag});
    assert_eq!(read(&platform, &exists("v1")).await, answer(false, "v1"));
    finish(&platform, &one, BASE_SPEC).await;
    assert_eq!(read(&platform, "count").await, json!({"total": 2}));
    assert_eq!(read(&platform, &exists("%20V1%20")).await, answer(true, "v1"));
    assert_eq!(read(&platform, &exists("v")).await, answer(false, "v"));
    // The id of a build is no tag.
    for bad in ["exists", "exists?tag=", "exists?tag=a%20b", &exists(&one)] {
        let reply = platform.call("GET", &format!("/templates/a/tags/{bad}"), "").await;
        reply.error(400);
    }
    for longest in [128, 129] {
        let path = format!("/templates/a/tags/exists?tag={}", "t".repeat(longest));
        let reply = platform.call("GET", &path, "").await;
        assert_eq!(reply.status, if longest == 128 { 200 } else { 400 }, "{reply:?}");
    }
    // By id too; templates of other teams are not found, and those of the platform are.
    let count = async |key, name: &str| {
        let path = format!("/templates/{name}/tags/count");
        platform.call_as(Some(key), "GET", &path, "").await
    };
    assert_eq!(count(super::platform::KEY, &template).await.json, json!({"total": 2}));
    assert_eq!(count(OTHER_KEY, "base").await.json, json!({"total": 1}));
    for path in ["count", "exists?tag=v1", "groups", "v1/assignments"] {
        for name in [template.as_str(), "nothing"] {
            let path = format!("/templates/{name}/tags/{path}");
            platform.call_as(Some(OTHER_KEY), "GET", &path, "").await.error(404);
        }
    }
}

#[tokio::test]
async fn the_history_of_a_tag_is_read_in_pages() {
    let platform = TestPlatform::start().await;
    let (one, two) = with_builds(&platform).await;
    let target = |build: &str| format!("a:{build}");
    for build in [&one, &two, &one] {
        assign(&platform, &target(build), "live").await;
    }
    let all = read(&platform, "live/assignments").await;
    assert_eq!(builds(&all["data"]), [&one, &two, &one]);
    assert_eq!(all["nextCursor"], Value::Null);
    let first = &all["data"][0];
    let mut ids: Vec<&str> = all["data"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|assignment| {
            let id = assignment["assignmentId"].as_str().expect("an id");
            uuid::Uuid::try_parse(id).expect("a UUID");
            id
        })
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3, "{all}");
    for time in ["assignedAt", "buildCreatedAt", "buildFinishedAt"] {
        let text = first[time].as_str().expect("a time");
        assert!(text.parse::<jiff::Timestamp>().is_ok(), "{text}");
    }
    // Page by page it is the same, also when there is a newer one meanwhile.
    let mut cursor = String::new();
    let mut paged = Vec::new();
    loop {
        let page = read(&platform, &format!("LIVE/assignments?limit=1&cursor={cursor}")).await;
        paged.extend(page["data"].as_array().expect("a list").clone());
        let Some(next) = page["nextCursor"].as_str() else { break };
        cursor = next.to_owned();
        assign(&platform, &target(&two), "live").await;
    }
    assert_eq!(Value::from(paged), all["data"]);
    assert_eq!(
        read(&platform, "nothing/assignments").await,
        json!({"data": [], "nextCursor": null})
    );
    for bad in [
        "live/assignments?cursor=x",
        "live/assignments?cursor=YTpi",
        "live/assignments?limit=0",
        "live/assignments?limit=101",
        "a%20b/assignments",
    ] {
        let reply = platform.call("GET", &format!("/templates/a/tags/{bad}"), "").await;
        reply.error(400);
    }
    // A removed tag has no history.
    let removal = platform
        .call("DELETE", "/templates/tags", r#"{"name":"a","tags":["live"]}"#)
        .await;
    assert_eq!(removal.status, 204);
    assert_eq!(builds(&read(&platform, "live/assignments").await["data"]), [""; 0]);
}

#[tokio::test]
async fn tags_are_listed_with_their_newest_assignments() {
    let platform = TestPlatform::start().await;
    let (one, two) = with_builds(&platform).await;
    let target = format!("a:{one}");
    for tag in ["v2", "v1", "v2"] {
        assign(&platform, &target, tag).await;
    }
    assign(&platform, &format!("a:{two}"), "rc_1").await;
    let groups = async |query: &str| read(&platform, &format!("groups?{query}")).await;
    let names = |page: &Value| -> Vec<String> {
        let tags = page["tags"].as_array().expect("a list").iter();
        tags.map(|tag| tag["tag"].as_str().expect("a tag").to_owned()).collect()
    };
    let page = groups("").await;
    assert_eq!(page["nextCursor"], Value::Null);
    assert_eq!(names(&page), ["rc_1", "v2", "v1", "default"]);
    let v2 = &page["tags"][1];
    assert_eq!(builds(&v2["assignments"]), [&one, &one, &two]);
    assert_eq!(v2["hasMore"], false);
    let history = read(&platform, "v2/assignments").await;
    assert_eq!(v2["assignments"], history["data"]);
    let short = groups("assignmentLimit=2&search=V2").await;
    assert_eq!(
        (names(&short), &short["tags"][0]["hasMore"]),
        (vec!["v2".to_owned()], &json!(true))
    );
    assert_eq!(builds(&short["tags"][0]["assignments"]), [&one, &one]);
    assert_eq!(groups("assignmentLimit=3&search=v2").await["tags"][0]["hasMore"], false);
    // A search is for text, not for a pattern.
    assert_eq!(names(&groups("search=_").await), ["rc_1"]);
    assert_eq!(names(&groups("search=%25").await), [""; 0]);

    for (sort, want) in [
        ("latest_desc", ["rc_1", "v2", "v1", "default"]),
        ("latest_asc", ["default", "v1", "v2", "rc_1"]),
        ("name_asc", ["default", "rc_1", "v1", "v2"]),
        ("name_desc", ["v2", "v1", "rc_1", "default"]),
    ] {
        for size in [1, 2, 3, 4] {
            let mut cursor = String::new();
            let mut paged = Vec::new();
            loop {
                let page = groups(&format!("sort={sort}&tagsLimit={size}&tagsCursor={cursor}")).await;
                paged.extend(names(&page));
                let Some(next) = page["nextCursor"].as_str() else { break };
                cursor = next.to_owned();
            }
            assert_eq!(paged, want, "{sort} {size}");
            if size == 1 {
                let other = if sort == "name_asc" { "name_desc" } else { "name_asc" };
                let path = format!("/templates/a/tags/groups?sort={other}&tagsCursor={cursor}");
                let reply = platform.call("GET", &path, "").await;
                assert!(reply.error(400).contains(sort), "{reply:?}");
            }
        }
    }
    let long = "s".repeat(129);
    for bad in [
        "sort=x",
        "tagsLimit=0",
        "tagsLimit=101",
        "assignmentLimit=0",
        "assignmentLimit=51",
        "tagsCursor=YQ==",
        &format!("search={long}"),
    ] {
        let reply = platform
            .call("GET", &format!("/templates/a/tags/groups?{bad}"), "")
            .await;
        reply.error(400);
    }
    assert_eq!(names(&groups(&format!("search={}", &long[1..])).await), [""; 0]);
}

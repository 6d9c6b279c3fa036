//! `GET /v2/sandboxes` and `GET /sandboxes`.

use serde_json::Value;

use super::platform::{BASE, Reply, TestPlatform, user};

fn ids(reply: &Reply) -> Vec<String> {
    assert_eq!(reply.status, 200, "{reply:?}");
    let list = reply.json.as_array().expect("a list");
    list.iter()
        .map(|item| item["sandboxID"].as_str().expect("an id").to_owned())
        .collect()
}

/// Creates sandboxes a second apart, oldest first.
async fn some(platform: &TestPlatform, keys: &[&str]) -> Vec<String> {
    let mut made = Vec::new();
    for keys in keys {
        platform.clock.advance(1);
        made.push(platform.create(&format!(",\"timeout\":3600{keys}")).await);
    }
    made
}

async fn get(platform: &TestPlatform, path: &str) -> Reply {
    platform.call("GET", path, "").await
}

#[tokio::test]
async fn items_have_all_fields_and_no_tokens() {
    let platform = TestPlatform::start().await;
    let made = some(&platform, &[r#","metadata":{"a":"b"}"#]).await;
    let reply = get(&platform, "/v2/sandboxes").await;
    assert_eq!(reply.header("x-total-running"), "1");
    assert!(!reply.headers.contains_key("x-next-token"));
    let item = &reply.json[0];
    let mut keys: Vec<&str> = item
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    assert_eq!(
        keys,
        [
            "alias",
            "clientID",
            "cpuCount",
            "diskSizeMB",
            "endAt",
            "envdVersion",
            "executionId",
            "memoryMB",
            "metadata",
            "sandboxID",
            "startedAt",
            "state",
            "templateID",
            "uid",
            "volumeMounts",
        ]
    );
    assert_eq!(item["sandboxID"], made[0]);
    assert_eq!(item["templateID"], BASE);
    assert_eq!(item["state"], "running");
    assert_eq!(item["uid"], user(1).as_str());
    assert_eq!(item["executionId"].as_str().map(str::len), Some(36));
}

#[tokio::test]
async fn paging_works_in_both_orders() {
    let platform = TestPlatform::start().await;
    let mut made = some(&platform, &[""; 5]).await;
    for order in ["asc", "desc"] {
        if order == "desc" {
            made.reverse();
        }
        let mut got = Vec::new();
        let mut next = String::new();
        loop {
            let reply = get(&platform, &format!("/v2/sandboxes?order={order}&limit=2{next}")).await;
            assert_eq!(reply.header("x-total-running"), "5");
            let page = ids(&reply);
            assert!(page.len() <= 2);
            got.extend(page);
            match reply.header("x-next-token") {
                "" => break,
                token => next = format!("&nextToken={}", token.replace('=', "%3D")),
            }
        }
        assert_eq!(got, made, "{order}");
    }
    // A page that is exactly full can be the last one.
    let reply = get(&platform, "/v2/sandboxes?limit=5").await;
    assert_eq!(ids(&reply), made);
    assert!(!reply.headers.contains_key("x-next-token"));
    // Page tokens stay valid while sandboxes end.
    let reply = get(&platform, "/v2/sandboxes?limit=2").await;
    let token = reply.header("x-next-token").replace('=', "%3D");
    platform.call("DELETE", &format!("/sandboxes/{}", made[1]), "").await;
    let reply = get(&platform, &format!("/v2/sandboxes?limit=2&nextToken={token}")).await;
    assert_eq!(ids(&reply), made[2..4]);
    for bad in [
        "x".to_owned(),
        String::new(),
        format!("{token}&order=asc"),
        "MjAyNg%3D%3D".to_owned(),
    ] {
        get(&platform, &format!("/v2/sandboxes?nextToken={bad}"))
            .await
            .error(400);
    }
}

#[tokio::test]
async fn state_filters_accept_every_encoding() {
    let platform = TestPlatform::start().await;
    some(&platform, &[""]).await;
    for (query, count, total) in [
        ("", 1, "1"),
        ("?state=running", 1, "1"),
        ("?state=running,paused", 1, "1"),
        ("?state=running%2Cpaused", 1, "1"),
        ("?state=paused&state=running", 1, "1"),
        ("?state[]=running", 1, "1"),
        ("?state=paused", 0, ""),
        ("?unknown=%20&state=running", 1, "1"),
    ] {
        for path in ["/v2/sandboxes", "/sandboxes"] {
            let reply = get(&platform, &format!("{path}{query}")).await;
            assert_eq!(ids(&reply).len(), count, "{query}");
            assert_eq!(reply.header("x-total-running"), total, "{query}");
        }
    }
    for query in [
        "state=",
        "state=dead",
        "state=running,",
        "state=Running",
        "order=up",
        "startedAfter=now",
    ] {
        get(&platform, &format!("/v2/sandboxes?{query}")).await.error(400);
    }
}

#[tokio::test]
async fn page_limits_are_validated() {
    let platform = TestPlatform::start().await;
    for limit in ["1", "100"] {
        assert_eq!(
            get(&platform, &format!("/v2/sandboxes?limit={limit}")).await.status,
            200
        );
    }
    for limit in ["0", "101", "-1", "x", "", "1.5", "99999999999999999999"] {
        let reply = get(&platform, &format!("/v2/sandboxes?limit={limit}")).await;
        assert!(reply.error(400).starts_with("validation error: "), "{limit}");
    }
}

#[tokio::test]
async fn v1_lists_everything_unless_paged() {
    let platform = TestPlatform::start().await;
    let made = some(&platform, &[""; 101]).await;
    assert_eq!(ids(&get(&platform, "/sandboxes").await).len(), made.len());
    let reply = get(&platform, "/v2/sandboxes").await;
    assert_eq!(ids(&reply).len(), 100);
    assert_eq!(reply.header("x-total-running"), "101");
    assert!(reply.headers.contains_key("x-next-token"));
    assert_eq!(ids(&get(&platform, "/sandboxes?state=running").await).len(), 100);
    assert_eq!(ids(&get(&platform, "/sandboxes?limit=3").await).len(), 3);
}

#[tokio::test]
async fn metadata_filters_accept_both_encodings() {
    let platform = TestPlatform::start().await;
    let made = some(
        &platform,
        &[
            r#","metadata":{"us er":"a&b","app":"x"}"#,
            r#","metadata":{"app":"x"}"#,
            r#","metadata":{"app":"y=1"}"#,
            "",
        ],
    )
    .await;
    for (filter, want) in [
        ("us%252520er%3Da%252526b", &made[..1]),
        ("us%2520er%3Da%2526b", &made[..1]),
        ("app%3Dx%26us%252520er%3Da%252526b", &made[..1]),
        ("app=y%253D1", &made[2..3]),
        ("app=nothing", &[]),
    ] {
        let reply = get(&platform, &format!("/v2/sandboxes?metadata={filter}")).await;
        assert_eq!(ids(&reply), want, "{filter}");
        assert_eq!(reply.header("x-total-running"), want.len().to_string(), "{filter}");
    }
    let both = get(&platform, "/v2/sandboxes?metadata=app%3Dx&limit=1").await;
    assert_eq!(ids(&both), made[1..2]);
    assert_eq!(both.header("x-total-running"), "2");
    for bad in ["", "app", "app%3Dx%3Dy", "app%3D%25zz", "%zz"] {
        get(&platform, &format!("/v2/sandboxes?metadata={bad}"))
            .await
            .error(400);
    }
}

#[tokio::test]
async fn lists_filter_by_template_and_start_time() {
    let platform = TestPlatform::start().await;
    let made = some(&platform, &["", ""]).await;
    let started = get(&platform, "/v2/sandboxes").await.json[0]["startedAt"].clone();
    let started = started.as_str().expect("text").replace(':', "%3A");
    for (query, want) in [
        ("template=base".to_owned(), 2),
        (format!("template={BASE}"), 2),
        ("template=own".to_owned(), 0),
        ("template=unknown".to_owned(), 0),
        (format!("startedAfter={started}"), 1),
        ("startedAfter=2020-01-01T00:00:00Z".to_owned(), made.len()),
    ] {
        let reply = get(&platform, &format!("/v2/sandboxes?{query}")).await;
        assert_eq!(ids(&reply).len(), want, "{query}");
        assert_eq!(reply.header("x-total-running"), want.to_string(), "{query}");
    }
    get(&platform, "/v2/sandboxes?template=base:v1").await.error(400);
    let empty = get(&platform, "/v2/sandboxes?template=unknown&state=paused").await;
    assert_eq!(
        (empty.json.clone(), empty.header("x-total-running")),
        (Value::Array(vec![]), "")
    );
}

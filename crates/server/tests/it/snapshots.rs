//! Snapshots of sandboxes: made, named, listed, used and deleted. What is in them is not tested here: the node is a fake.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use protocol::node::{Image, StartSandbox};
use serde_json::{Value, json};
use testkit::node::FakeNode;

use super::builds::request;
use super::pause::{parsed, pause, post};
use super::platform::{Behaviour, OTHER_KEY, Reply, TestPlatform, within};

async fn snapshot(platform: &TestPlatform, id: &str, body: &str) -> Value {
    let reply = post(platform, id, "snapshots", body).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    reply.json
}

fn id_of(snapshot: &Value) -> &str {
    snapshot["snapshotID"].as_str().expect("an id")
}

async fn create(platform: &TestPlatform, template: &str) -> Reply {
    let body = json!({"templateID": template}).to_string();
    platform.call("POST", "/v2/sandboxes", &body).await
}

async fn delete(platform: &TestPlatform, snapshot: &str) -> Reply {
    let path = snapshot.replace('/', "%2F").replace(':', "%3A");
    platform.call("DELETE", &format!("/templates/{path}"), "").await
}

/// Deletes a snapshot by its own path, as some clients do.
async fn delete_by_its_own_path(platform: &TestPlatform, snapshot: &str) -> Reply {
    let path = snapshot.replace('/', "%2F").replace(':', "%3A");
    platform.call("DELETE", &format!("/snapshots/{path}"), "").await
}

async fn list(platform: &TestPlatform, query: &str) -> Vec<String> {
    let reply = platform.call("GET", &format!("/snapshots{query}"), "").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let items = reply.json.as_array().expect("a list").clone();
    items.iter().map(|item| id_of(item).to_owned()).collect()
}

fn last_start(node: &FakeNode) -> StartSandbox {
    node.started.lock().last().expect("a start").clone()
}

/// The layers of the sandbox that was started last.
fn last_image(node: &FakeNode) -> Image {
    node.started.lock().last().expect("a start").image.clone()
}

#[tokio::test]
async fn sandboxes_are_created_from_a_snapshot() {
    let platform = TestPlatform::start().await;
    let id = platform
        .create(r#","metadata":{"a":"b"},"envVars":{"SECRET":"value"}"#)
        .await;
    let made = snapshot(&platform, &id, "{}").await;
    assert_eq!(made["names"], json!([]));
    let (template, tag) = id_of(&made).split_once(':').expect("a tag");
    assert_eq!((template.len(), tag), (20, "default"));
    assert_eq!(*platform.node.commits.lock(), [(parsed(&id), false)]);
    assert!(platform.node.copies.lock().is_empty());
    // The sandbox runs on.
    assert_eq!(platform.node.kills.load(Ordering::SeqCst), 0);
    let detail = platform.call("GET", &format!("/sandboxes/{id}"), "").await.json;
    assert_eq!(detail["state"], "running");

    for reference in [id_of(&made), template] {
        let child = create(&platform, reference).await;
        assert_eq!(child.status, 201, "{child:?}");
        assert_eq!(child.json["templateID"], template);
        let layers = vec![FakeNode::layer(1)];
        assert_eq!(last_image(&platform.node), Image::Layers { base: true, layers });
        // Nothing of the identity of the sandbox.
        let init = platform.node.started.lock().last().expect("a start").init.clone();
        assert_eq!(
            init.env_vars,
            Some(std::collections::BTreeMap::new().into_iter().collect())
        );
        let child = platform
            .call(
                "GET",
                &format!("/sandboxes/{}", child.json["sandboxID"].as_str().expect("an id")),
                "",
            )
            .await
            .json;
        for key in ["cpuCount", "memoryMB", "diskSizeMB"] {
            assert_eq!(child[key], detail[key], "{key}");
        }
        assert!(
            child.get("metadata").is_none_or(|metadata| *metadata == json!({})),
            "{child}"
        );
    }
    // A snapshot of a child has a layer more; it is also what a build begins with.
    let child = create(&platform, template).await.json["sandboxID"].clone();
    let again = snapshot(&platform, child.as_str().expect("an id"), "{}").await;
    create(&platform, id_of(&again)).await;
    let layers = vec![FakeNode::layer(1), FakeNode::layer(2)];
    assert_eq!(last_image(&platform.node), Image::Layers { base: true, layers });
}

#[tokio::test]
async fn too_many_layers_are_merged() {
    let platform = TestPlatform::start().await;
    let mut id = platform.create("").await;
    for _ in 0..=Image::LAYERS_MAX {
        let made = snapshot(&platform, &id, "{}").await;
        let child = create(&platform, id_of(&made)).await.json["sandboxID"].clone();
        id = child.as_str().expect("an id").to_owned();
    }
    let merged: Vec<bool> = platform.node.commits.lock().iter().map(|(_, merge)| *merge).collect();
    assert_eq!(merged.iter().filter(|merge| **merge).count(), 1, "{merged:?}");
    let layers = vec![FakeNode::layer(merged.len())];
    assert_eq!(last_image(&platform.node), Image::Layers { base: true, layers });
}

#[tokio::test]
async fn a_name_is_that_of_one_snapshot() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let first = snapshot(&platform, &id, r#"{"name":"Mine-1"}"#).await;
    assert_eq!(
        first,
        json!({"snapshotID": "team1/mine-1:default", "names": ["team1/mine-1"]})
    );
    let template = create(&platform, id_of(&first)).await.json["templateID"].clone();
    assert_eq!(
        last_image(&platform.node),
        Image::Layers {
            base: true,
            layers: vec![FakeNode::layer(1)]
        }
    );
    // The same name is another build of the same template.
    let second = snapshot(&platform, &id, r#"{"name":"team1/mine-1","memory":false}"#).await;
    assert_eq!(second, first);
    assert_eq!(create(&platform, "mine-1").await.json["templateID"], template);
    assert_eq!(
        last_image(&platform.node),
        Image::Layers {
            base: true,
            layers: vec![FakeNode::layer(2)]
        }
    );
    let tagged = snapshot(&platform, &id, r#"{"name":"mine-1:v2","memory":null}"#).await;
    assert_eq!(
        tagged,
        json!({"snapshotID": "team1/mine-1:v2", "names": ["team1/mine-1"]})
    );
    assert_eq!(create(&platform, "mine-1:v2").await.json["templateID"], template);
    assert_eq!(list(&platform, "").await, ["team1/mine-1:v2"]);
    assert_eq!(list(&platform, "?name=mine-1:default").await, ["team1/mine-1:default"]);

    for (body, status) in [
        (r#"{"name":"team2/x"}"#, 400),
        (r#"{"name":""}"#, 400),
        (r#"{"name":"a b"}"#, 400),
        (r#"{"name":"a:0b0e1d52-58ff-4c8e-8f0d-0a1b2c3d4e5f"}"#, 400),
        (r#"{"name":1}"#, 400),
        (r#"{"memory":1}"#, 400),
        // Templates that are no snapshots, and ids.
        (r#"{"name":"own"}"#, 409),
        (r#"{"name":"own00000000000000000"}"#, 409),
        ("", 400),
    ] {
        post(&platform, &id, "snapshots", body).await.error(status);
    }
    // What cannot be kept is no reason to refuse it.
    snapshot(&platform, &id, r#"{"memory":true}"#).await;
    // Nor does a build take the name of a snapshot.
    platform
        .call("POST", "/v3/templates", r#"{"name":"mine-1"}"#)
        .await
        .error(409);
    assert_eq!(platform.node.commits.lock().len(), 4);
    // The names of other teams are others.
    platform
        .call_as(
            Some(OTHER_KEY),
            "POST",
            "/v2/sandboxes",
            r#"{"templateID":"team1/mine-1"}"#,
        )
        .await
        .error(404);
}

#[tokio::test]
async fn snapshots_are_listed_and_deleted() {
    let platform = TestPlatform::start().await;
    let templates = platform.call("GET", "/templates", "").await.json;
    let (one, two) = (platform.create("").await, platform.create("").await);
    let mut made = Vec::new();
    for (sandbox, body) in [(&one, "{}"), (&two, r#"{"name":"b"}"#), (&one, r#"{"name":"c"}"#)] {
        platform.clock.advance(1);
        made.insert(0, id_of(&snapshot(&platform, sandbox, body).await).to_owned());
    }
    assert_eq!(list(&platform, "").await, made);
    assert_eq!(
        list(&platform, &format!("?sandboxID={one}")).await,
        [made[0].clone(), made[2].clone()]
    );
    assert_eq!(
        list(&platform, &format!("?sandboxID={two}-client")).await,
        [made[1].clone()]
    );
    assert_eq!(list(&platform, &format!("?sandboxID={one}&name=b")).await, [""; 0]);
    for (query, found) in [
        ("?name=b", 1),
        ("?name=team1/b:default", 1),
        ("?name=team2/b", 0),
        ("?name=B%3Av9", 0),
        ("?name=%00", 0),
        ("?name=own", 0),
        ("?sandboxID=inobody", 0),
        ("?sandboxID=I_", 0),
        ("?name=&sandboxID=", 3),
    ] {
        assert_eq!(list(&platform, query).await.len(), found, "{query}");
    }
    // Page by page.
    let (mut pages, mut next) = (Vec::new(), String::new());
    loop {
        let reply = platform
            .call("GET", &format!("/snapshots?limit=1&nextToken={next}"), "")
            .await;
        pages.push(id_of(&reply.json[0]).to_owned());
        assert_eq!(reply.json.as_array().map(Vec::len), Some(1));
        next = reply.header("x-next-token").replace('=', "%3D");
        if next.is_empty() {
            break;
        }
    }
    assert_eq!(pages, made);
    for query in ["?limit=0", "?limit=101", "?nextToken=x"] {
        platform.call("GET", &format!("/snapshots{query}"), "").await.error(400);
    }
    // They are not in the lists of templates, and nobody else sees them.
    assert_eq!(
        platform
            .call("GET", "/templates", "")
            .await
            .json
            .as_array()
            .map(Vec::len),
        templates.as_array().map(Vec::len)
    );
    assert!(!platform.call("GET", "/v2/templates", "").await.text.contains("\"c\""));
    assert_eq!(
        platform.call("GET", "/templates/c", "").await.json["aliases"],
        json!(["c"])
    );
    let others = platform.call_as(Some(OTHER_KEY), "GET", "/snapshots", "").await;
    assert_eq!(others.json, json!([]));

    // The sandbox may end.
    platform.call("DELETE", &format!("/sandboxes/{one}"), "").await;
    assert_eq!(list(&platform, &format!("?sandboxID={one}")).await.len(), 2);
    let child = create(&platform, &made[0]).await.json["sandboxID"].clone();
    delete(&platform, &made[0]).await.error(400);
    delete_by_its_own_path(&platform, &made[0]).await.error(400);
    platform
        .call("DELETE", &format!("/sandboxes/{}", child.as_str().expect("an id")), "")
        .await;
    let of_another_team = format!("/snapshots/{}", made[0].replace('/', "%2F"));
    platform
        .call_as(Some(OTHER_KEY), "DELETE", &of_another_team, "")
        .await
        .error(404);
    for (number, snapshot) in made.iter().enumerate() {
        let deleted = match number % 2 {
            0 => delete_by_its_own_path(&platform, snapshot).await,
            _ => delete(&platform, snapshot).await,
        };
        assert_eq!(deleted.status, 204);
        delete(&platform, snapshot).await.error(404);
        delete_by_its_own_path(&platform, snapshot).await.error(404);
        create(&platform, snapshot).await.error(404);
    }
    assert_eq!(list(&platform, "").await, [""; 0]);
    // The name is free again, also for a template, which is no snapshot.
    request(&platform, r#"{"name":"c"}"#).await;
    delete_by_its_own_path(&platform, "c").await.error(404);
    assert_eq!(platform.call("GET", "/templates/c", "").await.status, 200);
}

#[tokio::test]
async fn only_running_sandboxes_have_snapshots() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    post(&platform, "inobody", "snapshots", "{}").await.error(404);
    platform
        .call_as(Some(OTHER_KEY), "POST", &format!("/sandboxes/{id}/snapshots"), "{}")
        .await
        .error(404);
    pause(&platform, &id).await;
    post(&platform, &id, "snapshots", "{}").await.error(404);
    post(&platform, &id, "resume", "").await;
    snapshot(&platform, &id, "{}").await;
    platform.call("DELETE", &format!("/sandboxes/{id}"), "").await;
    post(&platform, &id, "snapshots", "{}").await.error(404);
}

/// Starts a snapshot that waits in the node.
async fn waiting(platform: &Arc<TestPlatform>, id: &str, body: &'static str) -> tokio::task::JoinHandle<Reply> {
    let (of_task, id) = (Arc::clone(platform), id.to_owned());
    let task = tokio::spawn(async move { post(&of_task, &id, "snapshots", body).await });
    within(platform.node.waiting.notified()).await;
    task
}

/// Sends a request about a sandbox, and returns its status.
fn call(
    platform: &Arc<TestPlatform>,
    method: &'static str,
    id: &str,
    what: &str,
    body: &'static str,
) -> tokio::task::JoinHandle<u16> {
    let (platform, path) = (Arc::clone(platform), format!("/sandboxes/{id}{what}"));
    tokio::spawn(async move { platform.call(method, &path, body).await.status.as_u16() })
}

#[tokio::test]
async fn a_second_snapshot_waits_for_the_first_one_and_is_refused() {
    let platform = Arc::new(TestPlatform::start().await);
    *platform.node.copy.lock() = Behaviour::Waits;
    let id = platform.create("").await;
    for attempt in 1..=20 {
        let begun = waiting(&platform, &id, "{}").await;
        let mut second = call(&platform, "POST", &id, "/snapshots", "{}");
        // Nothing shows that it was received.
        tokio::time::sleep(Duration::from_millis(attempt * 20)).await;
        assert!(!second.is_finished());
        platform.node.go.notify_one();
        assert_eq!(within(begun).await.expect("no panic").status, 201);
        tokio::select! {
            status = &mut second => {
                assert_eq!(status.expect("no panic"), 409);
                return;
            }
            // It came after the first one had been made.
            () = platform.node.waiting.notified() => platform.node.go.notify_one(),
        }
        assert_eq!(within(second).await.expect("no panic"), 201);
    }
    panic!("no second one arrived while the first one was being made");
}

#[tokio::test]
async fn while_the_disk_is_copied_others_wait() {
    let platform = Arc::new(TestPlatform::start().await);
    *platform.node.copy.lock() = Behaviour::Waits;
    let changes: [&[_]; 3] = [
        &[
            ("POST", "/timeout", r#"{"timeout":100}"#, 204),
            ("POST", "/connect", r#"{"timeout":10}"#, 200),
        ],
        &[("POST", "/pause", "", 204)],
        &[("DELETE", "", "", 204)],
    ];
    for changes in changes {
        let id = platform.create("").await;
        let begun = waiting(&platform, &id, "{}").await;
        // It runs for everyone.
        let listed = platform.call("GET", "/v2/sandboxes?state=running", "").await.json;
        assert!(listed.to_string().contains(&id), "{listed}");
        post(&platform, &id, "resume", "").await.error(409);
        let others: Vec<_> = changes
            .iter()
            .map(|(method, what, body, status)| (call(&platform, method, &id, what, body), *status))
            .collect();
        // All of them have been received: what they wait for is the copy.
        tokio::task::yield_now().await;
        assert!(others.iter().all(|(task, _)| !task.is_finished()));
        platform.node.go.notify_one();
        let reply = within(begun).await.expect("no panic");
        // The one that was killed has its copy already.
        assert_eq!(reply.status, 201, "{reply:?}");
        for (task, status) in others {
            assert_eq!(within(task).await.expect("no panic"), status);
        }
    }
    assert_eq!(list(&platform, "").await.len(), 3);
}

#[tokio::test]
async fn nothing_waits_for_the_copy_of_another_sandbox() {
    let platform = Arc::new(TestPlatform::start().await);
    *platform.node.copy.lock() = Behaviour::Waits;
    let [first, second, third] = [
        platform.create("").await,
        platform.create("").await,
        platform.create("").await,
    ];
    let begun = waiting(&platform, &first, "{}").await;
    let mut of_second = call(&platform, "POST", &second, "/snapshots", "{}");
    let mut of_third = call(&platform, "POST", &third, "/snapshots", "{}");
    // A team has two places, so one of the two waits and the other is refused.
    let refused = async {
        tokio::select! {
            status = &mut of_second => (status, false),
            status = &mut of_third => (status, true),
        }
    };
    let (status, second_waits) = within(refused).await;
    assert_eq!(status.expect("no panic"), 503);
    let (next, second, third) = if second_waits {
        (of_second, second, third)
    } else {
        (of_third, third, second)
    };
    assert!(!next.is_finished());
    // It is not held while it waits for its turn.
    let paused = call(&platform, "POST", &second, "/pause", "");
    assert_eq!(within(paused).await.expect("no panic"), 204);
    assert!(!begun.is_finished());
    *platform.node.copy.lock() = Behaviour::Works;
    platform.node.go.notify_one();
    assert_eq!(within(begun).await.expect("no panic").status, 201);
    assert_eq!(within(next).await.expect("no panic"), 404);
    // Afterwards others can be made.
    snapshot(&platform, &third, "{}").await;
}

#[tokio::test]
async fn while_the_layer_is_made_the_sandbox_is_free() {
    let platform = Arc::new(TestPlatform::start().await);
    let id = platform.create("").await;
    *platform.node.commit.lock() = Behaviour::Waits;
    let begun = waiting(&platform, &id, r#"{"name":"kept"}"#).await;
    // Nothing is to be seen of it yet.
    assert_eq!(list(&platform, "").await, [""; 0]);
    create(&platform, "kept").await.error(404);
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
    platform.node.go.notify_one();
    let reply = within(begun).await.expect("no panic");
    assert_eq!(reply.status, 201, "{reply:?}");
    assert_eq!(
        list(&platform, &format!("?sandboxID={id}")).await,
        ["team1/kept:default"]
    );
    assert_eq!(create(&platform, "kept").await.status, 201);
}

#[tokio::test]
async fn a_failure_leaves_the_sandbox_as_it_was() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    for (behaviour, status, code) in [
        (Behaviour::Fails, 503, Value::Null),
        (Behaviour::Full, 503, json!("snapshot_capacity_unavailable")),
        (Behaviour::Unsupported, 501, json!("not_supported")),
        (Behaviour::Panics, 503, Value::Null),
    ] {
        for is_copy in [true, false] {
            let place = if is_copy {
                &platform.node.copy
            } else {
                &platform.node.commit
            };
            *place.lock() = behaviour;
            let reply = post(&platform, &id, "snapshots", r#"{"name":"a"}"#).await;
            reply.error(status);
            assert_eq!(reply.json["error_code"], code, "{reply:?}");
            assert!(!reply.text.contains(testkit::node::SECRET), "{reply:?}");
            *place.lock() = Behaviour::Works;
            // A node removes copies that did not become layers.
            platform.node.copies.lock().clear();
        }
    }
    assert_eq!(list(&platform, "").await, [""; 0]);
    assert_eq!(
        platform.call("GET", &format!("/sandboxes/{id}"), "").await.json["state"],
        "running"
    );
    snapshot(&platform, &id, r#"{"name":"a"}"#).await;
    // The node has lost the sandbox.
    platform.node.running.lock().clear();
    post(&platform, &id, "snapshots", "{}").await.error(404);
}

#[tokio::test]
async fn layers_of_snapshots_are_kept_until_they_are_deleted() {
    let platform = TestPlatform::start_adjusted(|settings| settings.builds.collect_interval_s = 1).await;
    let id = platform.create("").await;
    let kept = snapshot(&platform, &id, r#"{"name":"kept"}"#).await;
    let gone = snapshot(&platform, &id, r#"{"name":"gone"}"#).await;
    assert_eq!(delete(&platform, id_of(&gone)).await.status, 204);
    // For create requests that have found it before.
    platform.clock.advance(601);
    let removed = async {
        while platform.node.layers.lock().contains_key(&FakeNode::layer(2)) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    within(removed).await;
    assert!(platform.node.layers.lock().contains_key(&FakeNode::layer(1)));
    assert_eq!(create(&platform, id_of(&kept)).await.status, 201);
    // A restart changes nothing.
    let layers = platform.node.layers.lock().clone();
    let platform = platform.restart().await;
    *platform.node.layers.lock() = layers;
    assert_eq!(list(&platform, "").await, ["team1/kept:default"]);
    assert_eq!(create(&platform, "kept").await.status, 201);
}

#[tokio::test]
async fn the_templates_of_a_team_take_limited_space() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.template_disk_mb = Some(3)).await;
    let id = platform.create("").await;
    platform.node.layer_bytes.store((3 << 20) - 1, Ordering::SeqCst);
    let made = snapshot(&platform, &id, "{}").await;
    // The last one may be beyond it.
    platform.node.layer_bytes.store(1, Ordering::SeqCst);
    let other = snapshot(&platform, &id, "{}").await;
    let are_refused = async || {
        let refused = [
            post(&platform, &id, "snapshots", "{}").await,
            platform.call("POST", "/v3/templates", r#"{"name":"a"}"#).await,
        ];
        for reply in refused {
            let why = reply.error(429);
            assert!(
                why.contains("3 MiB of templates and snapshots, 3 are in use"),
                "{reply:?}"
            );
        }
    };
    are_refused().await;
    // What the node lacks is in the blob store, for example.
    let layers = std::mem::take(&mut *platform.node.layers.lock());
    are_refused().await;
    *platform.node.layers.lock() = layers;
    let of_other = platform.call_as(Some(OTHER_KEY), "POST", "/v3/templates", r#"{"name":"a"}"#);
    assert_eq!(of_other.await.status, 202);
    // What it has works on, and what it deletes is free at once.
    let child = create(&platform, id_of(&made)).await;
    assert_eq!(child.status, 201, "{child:?}");
    let child = child.json["sandboxID"].as_str().expect("an id").to_owned();
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{child}"), "").await.status,
        204
    );
    assert_eq!(delete(&platform, id_of(&other)).await.status, 204);
    assert_eq!(post(&platform, &id, "snapshots", "{}").await.status, 201);
    are_refused().await;
    assert_eq!(delete(&platform, id_of(&made)).await.status, 204);
    assert_eq!(post(&platform, &id, "snapshots", "{}").await.status, 201);
}

/// The memory of a snapshot counts as well, on whichever node it is.
#[tokio::test]
async fn the_memory_of_the_snapshots_of_a_team_takes_limited_space() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.template_disk_mb = Some(3)).await;
    platform.node.copies_memory.store(true, Ordering::SeqCst);
    let id = platform.create("").await;
    let made = snapshot(&platform, &id, "{}").await;
    for _ in 0..2 {
        post(&platform, &id, "snapshots", "{}").await.error(429);
        platform.node.memories.lock().clear();
    }
    assert_eq!(delete(&platform, id_of(&made)).await.status, 204);
    assert_eq!(post(&platform, &id, "snapshots", "{}").await.status, 201);
}

/// Waits until the node has the memory of so many snapshots.
async fn memories(platform: &TestPlatform, count: usize) {
    within(async {
        while platform.node.memories.lock().len() != count {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn memory_is_that_of_one_snapshot() {
    let platform = TestPlatform::start().await;
    let node = &platform.node;
    node.copies_memory.store(true, Ordering::SeqCst);
    let id = platform.create("").await;
    let files = snapshot(&platform, &id, r#"{"memory":false}"#).await;
    memories(&platform, 0).await;
    let made = snapshot(&platform, &id, r#"{"name":"kept"}"#).await;
    memories(&platform, 1).await;
    let build = node.memories.lock().keys().next().cloned();

    create(&platform, id_of(&files)).await;
    assert_eq!(last_start(node).memory, None);
    let child = create(&platform, id_of(&made)).await;
    assert_eq!(child.status, 201, "{child:?}");
    let started = last_start(node);
    assert_eq!(started.memory, build);
    // Its identity is its own, and what its processes trust is what they trusted.
    let child = child.json["sandboxID"].as_str().expect("an id").to_owned();
    assert_eq!(started.init.sandbox_id.as_deref(), Some(&*child));
    let seed = |start: &StartSandbox| start.egress.interception.as_ref().map(|of| of.ca_seed.clone());
    let first = node.started.lock().first().cloned().expect("a start");
    assert_eq!(seed(&started), seed(&first));

    // Its files lie above what those of the first lie above.
    let again = snapshot(&platform, &child, "{}").await;
    memories(&platform, 2).await;
    let grandchild = create(&platform, id_of(&again)).await;
    let started = last_start(node);
    let layers = vec![FakeNode::layer(3)];
    assert_eq!(started.image, Image::Layers { base: true, layers });
    assert_eq!(seed(&started), seed(&first));
    // It goes with its template, and only then.
    for id in [child.as_str(), grandchild.json["sandboxID"].as_str().expect("an id")] {
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await;
    }
    snapshot(&platform, &id, r#"{"name":"kept"}"#).await;
    memories(&platform, 3).await;
    assert_eq!(delete(&platform, id_of(&made)).await.status, 204);
    memories(&platform, 1).await;
    assert_eq!(delete(&platform, id_of(&again)).await.status, 204);
    memories(&platform, 0).await;
}

#[tokio::test]
async fn a_lost_memory_is_a_start_from_files() {
    let platform = TestPlatform::start().await;
    let node = &platform.node;
    node.copies_memory.store(true, Ordering::SeqCst);
    let id = platform.create("").await;
    let made = snapshot(&platform, &id, "{}").await;
    node.memories.lock().clear();
    assert_eq!(create(&platform, id_of(&made)).await.status, 201);
    let layers = vec![FakeNode::layer(1)];
    assert_eq!(last_image(node), Image::Layers { base: true, layers });
    // What no snapshot has, as a crash leaves it, is removed by the next collection.
    let stray = "11111111-2222-4333-8444-555555555555".parse().expect("an id");
    node.memories.lock().insert(stray, Image::Base);
    let other = snapshot(&platform, &id, r#"{"memory":false}"#).await;
    assert_eq!(delete(&platform, id_of(&other)).await.status, 204);
    memories(&platform, 0).await;
}

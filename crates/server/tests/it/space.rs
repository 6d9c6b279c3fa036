//! Space that templates and snapshots of teams take: over two servers, and of memory on a node that has fetched it. The nodes are fakes,
//! and the bucket is on loopback.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;
use server::clock::Clock;
use server::settings::ServerSettings;
use tempfile::TempDir;
use testkit::node::{Behaviour, FakeNode};

use crate::copies::Bucket;
use crate::platform::{open, pause, seed, within};
use crate::servers::two_with;
use crate::servers_apart::copies_at;
use crate::several::{Several, authority, has, room};

fn memories(node: &FakeNode) -> usize {
    node.memories.lock().len()
}

/// A sandbox from this template, on this node.
async fn create_on(server: &Several, template: &str, node: &FakeNode) {
    let body = json!({"templateID": template}).to_string();
    let reply = server.call("POST", "/sandboxes", &body).await;
    assert_eq!(reply.status, 201, "{reply:?}");
    let id = reply.json["sandboxID"].as_str().expect("an id").parse().expect("an id");
    assert!(has(node, &id));
}

async fn collect(server: &Several) {
    let (status, said) = server.operator("POST", "/collections", "").await;
    assert_eq!(status, 200, "{said}");
}

/// Memory goes if nothing was started from it for ten minutes and everything takes more than it may; that of the node that has made
/// it stays, and the next start fetches it again.
#[tokio::test]
async fn memory_that_was_fetched_goes_when_it_was_not_used_for_long() {
    let directory = TempDir::new().expect("a directory");
    let store = open(directory.path()).await;
    seed(&store).await;
    let (bucket, address) = Bucket::serve().await;
    let ahead_s = Arc::new(AtomicI64::new(0));
    let ahead = Arc::clone(&ahead_s);
    let with_bucket = move |settings: &mut ServerSettings| {
        copies_at(settings, address);
        settings.blobs.as_mut().expect("a bucket").cache_bytes = Some(0);
        settings.clock = Clock::new(move || {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970");
            i64::try_from(now.as_micros()).expect("a time before 294,000") + ahead.load(Ordering::SeqCst) * 1_000_000
        });
    };
    let server = Several::one_of(directory, store, 1, authority(), Some(with_bucket)).await;
    let server = server.expect("a server");
    let (home, other) = (FakeNode::new(), FakeNode::new());
    for node in [&home, &other] {
        *node.room.lock() = Some(room(1 << 36));
        node.makes_parcels.store(true, Ordering::SeqCst);
        node.copies_memory.store(true, Ordering::SeqCst);
    }
    let _home = server.join(&home).await;
    let id = server.created().await;
    let made = server.call("POST", &format!("/sandboxes/{id}/snapshots"), "{}").await;
    assert_eq!(made.status, 201, "{made:?}");
    let snapshot = made.json["snapshotID"].as_str().expect("an id");
    let is_copied = || {
        let objects = bucket.objects.lock();
        objects
            .keys()
            .any(|name| name.starts_with("memories/") && name.ends_with(".manifest"))
    };
    within(async {
        while !is_copied() {
            pause().await;
        }
    })
    .await;
    let _other = server.join(&other).await;
    within(async {
        // Until it is served.
        while !has(&other, &server.created().await) {
            pause().await;
        }
    })
    .await;
    *home.start.lock() = Behaviour::Full;
    create_on(&server, snapshot, &other).await;
    assert_eq!(memories(&other), 1);
    // The last one is the moment at which it goes.
    for (after_s, left) in [(0, 1), (590, 1), (11, 0)] {
        ahead_s.fetch_add(after_s, Ordering::SeqCst);
        collect(&server).await;
        assert_eq!((memories(&home), memories(&other)), (1, left), "after {after_s} s");
    }
    create_on(&server, snapshot, &other).await;
    assert_eq!(memories(&other), 1);
    // Each sandbox that is started from it counts.
    ahead_s.fetch_add(590, Ordering::SeqCst);
    create_on(&server, snapshot, &other).await;
    ahead_s.fetch_add(590, Ordering::SeqCst);
    collect(&server).await;
    assert_eq!(memories(&other), 1);
    // What is not in the bucket stays, whatever its size.
    ahead_s.fetch_add(11, Ordering::SeqCst);
    let manifests = {
        let mut objects = bucket.objects.lock();
        let (gone, rest) = std::mem::take(&mut *objects)
            .into_iter()
            .partition(|(name, _)| name.ends_with(".manifest"));
        *objects = rest;
        gone
    };
    collect(&server).await;
    assert_eq!((memories(&home), memories(&other)), (1, 1));
    bucket
        .objects
        .lock()
        .extend(manifests as std::collections::BTreeMap<_, _>);
    collect(&server).await;
    assert_eq!((memories(&home), memories(&other)), (1, 0));
    server.close().await;
}

/// A server knows what a team has made at the other one, on nodes with which it is not connected.
#[tokio::test]
async fn the_space_of_templates_is_that_of_both() {
    let two = two_with(|settings| settings.limits.default.template_disk_mb = Some(3)).await;
    let ids = two.one_of_each().await;
    two.nodes[0].layer_bytes.store(3 << 20, Ordering::SeqCst);
    let [at_its_own, at_the_other] = [0, 1].map(|at| (&two.servers[at], format!("/sandboxes/{}/snapshots", ids[at])));
    let made = at_its_own.0.call("POST", &at_its_own.1, "{}").await;
    assert_eq!(made.status, 201, "{made:?}");
    for (server, path) in [&at_its_own, &at_the_other] {
        let refused = server.call("POST", path, "{}").await;
        assert!(refused.error(429).contains("3 are in use"), "{refused:?}");
        let refused = server.call("POST", "/v3/templates", r#"{"name":"a"}"#).await;
        assert!(refused.error(429).contains("3 are in use"), "{refused:?}");
    }
    two.close().await;
}

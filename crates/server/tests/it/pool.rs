//! The warm pool: sandboxes that are started before a request asks for them.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use model::id::SandboxId;
use model::network::Cidr;
use protocol::connect::{Codec, FLAG_END};
use protocol::process::StreamResponse;
use server::settings::{PoolSettings, ServerSettings};
use store::builds::{BuildRow, BuildStatus};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::builds::request;
use super::metrics::scrape;
use super::platform::{BASE, Behaviour, KEY, Reply, TestPlatform, pause, send, within};

/// Checks as often as a test can wait for.
fn quick() -> PoolSettings {
    PoolSettings {
        base: 0,
        per_template: 1,
        total: 16,
        memory_mb: 2048,
        check_interval: Duration::from_millis(5),
    }
}

fn base(count: u32) -> PoolSettings {
    PoolSettings { base: count, ..quick() }
}

/// Waits until this many sandboxes are frozen, and returns them.
async fn until_frozen(platform: &TestPlatform, count: usize) -> HashSet<SandboxId> {
    within(async {
        while platform.node.frozen.lock().len() != count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    // Until the server knows it, too.
    let ready = format!("ringfence_pool_sandboxes{{state=\"ready\"}} {count}");
    within(async { while !metrics(platform).await.contains(&ready) {} }).await;
    platform.node.frozen.lock().clone()
}

async fn metrics(platform: &TestPlatform) -> String {
    let headers = [("host", "localhost")];
    send(platform.metrics, "GET", "/metrics", &headers, bytes::Bytes::new())
        .await
        .text
}

/// Waits until a counter has this value.
async fn until_counted(platform: &TestPlatform, series: &str, count: u32) {
    let line = format!("{series} {count}\n");
    within(async {
        while !metrics(platform).await.contains(&line) {
            pause().await;
        }
    })
    .await;
}

fn id_of(reply: &Reply) -> SandboxId {
    assert_eq!(reply.status, 201, "{reply:?}");
    reply.json["sandboxID"].as_str().expect("an id").parse().expect("an id")
}

async fn create(platform: &TestPlatform, template: &str) -> Reply {
    let body = format!("{{\"templateID\":\"{template}\"}}");
    platform.call("POST", "/sandboxes", &body).await
}

/// A build of a template that runs a start command, without a ready command if there is none.
async fn start_command(platform: &TestPlatform, template: &str) {
    let start = r#"{"command":"serve","ready":"test","user":"user","workdir":null,"env":{}}"#;
    build(
        platform,
        template,
        Some(&format!("{{\"image\":\"base\",\"start\":{start}}}")),
    )
    .await;
}

async fn build(platform: &TestPlatform, template: &str, spec: Option<&str>) {
    let row = BuildRow {
        id: uuid::Uuid::new_v4().to_string().parse().expect("an id"),
        template_id: template.parse().expect("an id"),
        status: BuildStatus::Ready,
        cpu_count: 1,
        memory_mb: 512,
        disk_mb: 1024,
        agent_version: None,
        spec_json: spec.map(str::to_owned),
        created_us: 1,
        started_us: None,
        finished_us: None,
        node_id: None,
        reason: None,
    };
    platform.store.build_insert(&row).await.expect("a build");
}

/// An agent in which every command ends immediately with this exit code.
async fn agent(code: i32) -> SocketAddr {
    agent_with(Arc::new(AtomicI32::new(code))).await
}

/// An agent in which every command ends immediately with the exit code that is set then.
async fn agent_with(code: Arc<AtomicI32>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            let response = answer_of(code.load(Ordering::SeqCst));
            tokio::spawn(async move {
                let mut request = vec![0; 64 << 10];
                let _ = connection.read(&mut request).await;
                let _ = connection.write_all(&response).await;
            });
        }
    });
    addr
}

/// The answer of an agent about a command that has ended.
fn answer_of(code: i32) -> Vec<u8> {
    let mut event = StreamResponse::default();
    event
        .event
        .get_or_insert_default()
        .end
        .get_or_insert_default()
        .exit_code = code;
    let mut body = Codec::Proto.envelope(&event).to_vec();
    body.extend([FLAG_END, 0, 0, 0, 2]);
    body.extend(b"{}");
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/connect+proto\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.into_bytes(), body].concat()
}

#[tokio::test]
async fn a_pooled_sandbox_belongs_to_nobody_and_is_claimed() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(2)).await;
    let pooled = until_frozen(&platform, 2).await;
    let id = pooled.iter().next().expect("one").as_str();
    let kept_ready = async || platform.call("GET", "/templates/base", "").await.json["keptReady"].clone();
    assert_eq!(kept_ready().await, 2);
    // Nothing of a client, and nothing that it reaches.
    for request in platform.node.started.lock().iter() {
        assert_eq!(request.init.env_vars, None);
        assert!(!request.init.open_to_anonymous);
        assert_eq!(request.init.timestamp, None);
        assert_eq!(request.egress.deny, [Cidr::ALL]);
        assert!(request.egress.allow.is_empty() && request.egress.allow_domains.is_empty());
    }
    // Nobody reaches it.
    platform.call("GET", &format!("/sandboxes/{id}"), "").await.error(404);
    platform
        .call("DELETE", &format!("/sandboxes/{id}"), "")
        .await
        .error(404);
    assert_eq!(platform.call("GET", "/sandboxes", "").await.json, serde_json::json!([]));
    let host = format!("49983-{id}.sandbox.test:3000");
    let reply = platform.send("GET", "/health", &[("host", &host)], "").await;
    assert_eq!(
        (
            reply.status.as_u16(),
            platform.node.dials.load(std::sync::atomic::Ordering::SeqCst)
        ),
        (502, 0)
    );

    let body = r#"{"templateID":"base","envVars":{"A":"1"},"metadata":{"m":"2"},"timeout":60,
                   "network":{"denyOut":["1.1.1.1"]}}"#;
    let reply = platform.call("POST", "/sandboxes", body).await;
    let id = id_of(&reply);
    assert!(pooled.contains(&id), "{id}");
    let timing = reply.header("server-timing");
    assert!(
        timing.contains("claim;dur=") && timing.contains("store;dur=") && !timing.contains("spawn"),
        "{timing}"
    );
    {
        let claimed = platform.node.claimed.lock();
        let [claim] = &claimed[..] else { panic!("{claimed:?}") };
        assert_eq!(claim.id, id);
        let env = claim.init.env_vars.as_ref().expect("an environment");
        assert_eq!(env.get("A").map(String::as_str), Some("1"));
        assert_eq!(claim.init.sandbox_id.as_deref(), Some(id.as_str()));
        let metadata = claim.init.metadata.as_ref().expect("metadata");
        assert_eq!(metadata.get("m").map(String::as_str), Some("2"));
        assert!(claim.init.access_token.is_some() && claim.init.timestamp.is_some() && claim.init.open_to_anonymous);
        assert_eq!(claim.egress.deny.len(), 1);
        assert_ne!(claim.egress.deny, [Cidr::ALL]);
        // The same authority as at the start, which its trust store has.
        let started = platform.node.started.lock();
        let start = started.iter().find(|start| start.id == id).expect("started");
        // Without an owner, it has nothing of one.
        assert!(start.init.env_vars.is_none() && start.init.metadata.is_none());
        let seed = |policy: &model::network::EgressPolicy| policy.interception.as_ref().map(|it| it.ca_seed.clone());
        assert_eq!(seed(&start.egress), seed(&claim.egress));
    }
    let detail = platform.call("GET", &format!("/sandboxes/{id}"), "").await.json;
    assert_eq!(
        (&detail["metadata"]["m"], &detail["state"]),
        (&"2".into(), &"running".into()),
        "{detail}"
    );
    assert_eq!(platform.seconds_left(id.as_str()).await, 60);
    // Another one takes its place.
    assert!(!until_frozen(&platform, 2).await.contains(&id));
    assert_eq!(platform.node.started.lock().len(), 3);
    scrape(&platform).await;
    until_counted(&platform, "ringfence_pool_requests_total{outcome=\"hit\"}", 1).await;
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
}

#[tokio::test]
async fn no_sandbox_is_given_twice() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(10)).await;
    let pooled = until_frozen(&platform, 10).await;
    let replies = futures_of(50, || create(&platform, "base")).await;
    let ids: HashSet<SandboxId> = replies.iter().map(id_of).collect();
    assert_eq!(ids.len(), 50);
    assert!(pooled.is_subset(&ids), "all of them were used");
    let claimed: Vec<SandboxId> = platform
        .node
        .claimed
        .lock()
        .iter()
        .map(|claim| claim.id.clone())
        .collect();
    assert_eq!(claimed.len(), claimed.iter().collect::<HashSet<_>>().len());
}

/// Runs futures at the same time.
async fn futures_of<F: Future>(count: usize, make: impl Fn() -> F) -> Vec<F::Output> {
    let mut pending: Vec<_> = (0..count).map(|_| Box::pin(make())).collect();
    let mut done: Vec<Option<F::Output>> = (0..count).map(|_| None).collect();
    std::future::poll_fn(|cx| {
        for (future, done) in pending.iter_mut().zip(&mut done) {
            if done.is_none()
                && let std::task::Poll::Ready(output) = future.as_mut().poll(cx)
            {
                *done = Some(output);
            }
        }
        if done.iter().all(Option::is_some) {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
    done.into_iter().flatten().collect()
}

#[tokio::test]
async fn a_sandbox_that_cannot_be_claimed_is_replaced_for_the_client() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(1)).await;
    let pooled = until_frozen(&platform, 1).await;
    *platform.node.claim.lock() = Behaviour::Fails;
    let headers = [
        ("host", "localhost"),
        ("x-api-key", KEY),
        ("content-type", "application/json"),
        ("idempotency-key", "k"),
    ];
    let body = r#"{"templateID":"base"}"#;
    let reply = platform.send("POST", "/sandboxes", &headers, body).await;
    let id = id_of(&reply);
    assert!(!pooled.contains(&id));
    assert!(reply.header("server-timing").contains("spawn"), "{reply:?}");
    // Nothing is left of the other one, and the key has the one that runs.
    assert_eq!(platform.node.ids(), HashSet::from([id.to_string()]));
    let again = platform.send("POST", "/sandboxes", &headers, body).await;
    assert_eq!(id_of(&again), id);
    assert_eq!(
        platform
            .call("GET", "/sandboxes", "")
            .await
            .json
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    until_counted(&platform, "ringfence_pool_requests_total{outcome=\"failed\"}", 1).await;
    // The next one is started only after some time.
    *platform.node.claim.lock() = Behaviour::Works;
    assert_eq!(platform.node.started.lock().len(), 2);
    platform.clock.advance(6);
    until_frozen(&platform, 1).await;
}

#[tokio::test]
async fn a_repeated_request_gets_the_pooled_sandbox_of_the_first() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(2)).await;
    let pooled = until_frozen(&platform, 2).await;
    let headers = [
        ("host", "localhost"),
        ("x-api-key", KEY),
        ("content-type", "application/json"),
        ("idempotency-key", "k"),
    ];
    let body = r#"{"templateID":"base"}"#;
    let first = id_of(&platform.send("POST", "/v2/sandboxes", &headers, body).await);
    let second = id_of(&platform.send("POST", "/v2/sandboxes", &headers, body).await);
    assert_eq!(first, second);
    assert!(pooled.contains(&first));
}

#[tokio::test]
async fn a_sandbox_that_ends_is_replaced() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(1)).await;
    let pooled = until_frozen(&platform, 1).await;
    let dead = pooled.into_iter().next().expect("one");
    platform.node.exit(&dead).await;
    until_counted(&platform, "ringfence_pool_ends_total{reason=\"died\"}", 1).await;
    // Not in a loop: after some time.
    let id = id_of(&create(&platform, "base").await);
    assert_ne!(id, dead);
    assert_eq!(platform.node.started.lock().len(), 2);
    platform.clock.advance(6);
    until_frozen(&platform, 1).await;
}

#[tokio::test]
async fn a_claimed_sandbox_that_ends_early_is_not_announced() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(1)).await;
    until_frozen(&platform, 1).await;
    *platform.node.claim.lock() = Behaviour::ExitsEarly;
    create(&platform, "base").await.error(500);
    assert_eq!(platform.call("GET", "/sandboxes", "").await.json, serde_json::json!([]));
}

#[tokio::test]
async fn a_claim_that_panics_leaves_nothing() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(1)).await;
    let pooled = until_frozen(&platform, 1).await;
    *platform.node.claim.lock() = Behaviour::PanicsAfterwards;
    let status = create(&platform, "base").await.status.as_u16();
    // In the same process the task of the request panics; at the end of a stream the node is not reached.
    assert!(matches!(status, 500 | 201), "{status}");
    within(async {
        while pooled.iter().any(|id| platform.node.running.lock().contains(id)) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn pooled_sandboxes_make_way_for_requests() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.pool = base(2);
        settings.capacity.max_sandboxes = Some(2);
    })
    .await;
    until_frozen(&platform, 2).await;
    // Of another template.
    let replies = futures_of(2, || create(&platform, "own")).await;
    let ids: HashSet<SandboxId> = replies.iter().map(id_of).collect();
    assert_eq!(ids.len(), 2);
    assert!(platform.node.frozen.lock().is_empty());
    until_counted(&platform, "ringfence_pool_ends_total{reason=\"evicted\"}", 2).await;
    create(&platform, "own").await.error(503);
    // What is free again is not taken by the pool immediately.
    let id = ids.into_iter().next().expect("one");
    assert_eq!(
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await.status,
        204
    );
    id_of(&create(&platform, "own").await);
    assert_eq!(platform.node.started.lock().len(), 5);
}

#[tokio::test]
async fn the_last_place_is_claimed() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.pool = base(2);
        settings.capacity.max_sandboxes = Some(1);
    })
    .await;
    let pooled = until_frozen(&platform, 1).await;
    assert!(pooled.contains(&id_of(&create(&platform, "base").await)));
    create(&platform, "base").await.error(503);
}

#[tokio::test]
async fn a_host_without_memory_has_no_pool() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(2)).await;
    until_frozen(&platform, 2).await;
    if let Some(room) = &mut *platform.node.room.lock() {
        room.memory_available_bytes = 300 << 20;
    }
    // A reading is valid for a quarter of a second, and both may end by the same one.
    let both = "ringfence_pool_ends_total{reason=\"evicted\"} 2\n";
    within(async {
        while !metrics(&platform).await.contains(both) {
            platform.clock.advance(1);
            pause().await;
        }
    })
    .await;
    // More than the floor is free, so requests are served.
    id_of(&create(&platform, "base").await);
    if let Some(room) = &mut *platform.node.room.lock() {
        room.memory_available_bytes = 600 << 20;
    }
    platform.clock.advance(60);
    until_frozen(&platform, 2).await;
}

#[tokio::test]
async fn the_pool_is_bounded_in_number_and_in_memory() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.pool = PoolSettings { total: 2, ..base(5) };
    })
    .await;
    until_frozen(&platform, 2).await;
    id_of(&create(&platform, "base").await);
    until_frozen(&platform, 2).await;
    assert_eq!(platform.node.started.lock().len(), 3);

    let platform = TestPlatform::start_adjusted(|settings| {
        settings.pool = PoolSettings {
            memory_mb: 5,
            ..base(5)
        };
    })
    .await;
    // Each takes 1 MiB and the 2 MiB that any does, so two are too much.
    until_frozen(&platform, 1).await;
    id_of(&create(&platform, "base").await);
    until_frozen(&platform, 1).await;
    assert_eq!(platform.node.started.lock().len(), 2);
}

#[tokio::test]
async fn a_pooled_sandbox_is_in_no_quota() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.pool = base(2);
        settings.limits.default.sandboxes = Some(1);
    })
    .await;
    until_frozen(&platform, 2).await;
    id_of(&create(&platform, "base").await);
    let pooled = until_frozen(&platform, 2).await;
    // What a refused request had is in the pool again.
    create(&platform, "base").await.error(429);
    assert_eq!(until_frozen(&platform, 2).await, pooled);
    assert_eq!(platform.node.claimed.lock().len(), 1);
}

#[tokio::test]
async fn a_new_build_replaces_what_is_pooled() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(1)).await;
    let old = until_frozen(&platform, 1).await;
    build(&platform, BASE, None).await;
    until_counted(&platform, "ringfence_pool_ends_total{reason=\"stale\"}", 1).await;
    let new = until_frozen(&platform, 1).await;
    assert_ne!(old, new);
    let reply = create(&platform, "base").await;
    assert!(new.contains(&id_of(&reply)));
    let started = platform.node.started.lock();
    let request = started.iter().find(|start| new.contains(&start.id)).expect("started");
    assert_eq!((request.resources.cpu_count, request.resources.memory_mb), (1, 512));
}

#[tokio::test]
async fn a_template_with_a_start_command_is_pooled_while_it_is_used() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = quick()).await;
    *platform.node.origin.lock() = Some(agent(0).await);
    start_command(&platform, "own00000000000000000").await;
    // Not before it is used.
    let first = create(&platform, "own").await;
    assert!(first.header("server-timing").contains("start-command"), "{first:?}");
    let pooled = until_frozen(&platform, 1).await;
    let second = create(&platform, "own").await;
    assert!(pooled.contains(&id_of(&second)));
    assert!(!second.header("server-timing").contains("start-command"), "{second:?}");
    until_frozen(&platform, 1).await;
    // `base` has no start command.
    id_of(&create(&platform, "base").await);
    platform.clock.advance(601);
    until_frozen(&platform, 0).await;
    until_counted(&platform, "ringfence_pool_ends_total{reason=\"unused\"}", 1).await;
    id_of(&create(&platform, "own").await);
    until_frozen(&platform, 1).await;
    // One is replaced when it is old, and those of a deleted template are ended.
    for id in platform.node.ids() {
        platform.call("DELETE", &format!("/sandboxes/{id}"), "").await;
    }
    let reply = platform.call("DELETE", "/templates/own", "").await;
    assert!(reply.status.is_success(), "{reply:?}");
    until_counted(&platform, "ringfence_pool_ends_total{reason=\"stale\"}", 1).await;
    until_frozen(&platform, 0).await;
}

#[tokio::test]
async fn a_request_gets_the_one_that_is_being_started() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = quick()).await;
    let code = Arc::new(AtomicI32::new(0));
    let ready = |is_ready: bool| code.store(i32::from(!is_ready), Ordering::SeqCst);
    *platform.node.origin.lock() = Some(agent_with(Arc::clone(&code)).await);
    start_command(&platform, "own00000000000000000").await;
    id_of(&create(&platform, "own").await);
    until_frozen(&platform, 1).await;
    let claim = async || {
        let reply = create(&platform, "own").await;
        assert!(reply.header("server-timing").contains("claim;"), "{reply:?}");
        id_of(&reply)
    };
    let starts = || platform.node.started.lock().len();
    let until_started = async |count: usize| {
        within(async {
            while starts() < count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
        .await;
    };
    // The next one takes 10 seconds to become ready. One is asked for now and then, so that is enough.
    platform.clock.advance(100);
    ready(false);
    claim().await;
    until_started(3).await;
    platform.clock.advance(10);
    ready(true);
    until_frozen(&platform, 1).await;
    platform.clock.advance(100);
    ready(false);
    claim().await;
    until_started(4).await;
    // There is none, but one that has begun earlier than another could.
    let waiting = create(&platform, "own");
    let begins = async {
        // Gives the request the time to be received: nothing shows that it waits.
        tokio::time::sleep(Duration::from_millis(30)).await;
        platform.clock.advance(10);
        ready(true);
    };
    let (reply, ()) = tokio::join!(waiting, begins);
    assert!(reply.header("server-timing").contains("claim;"), "{reply:?}");
    assert_eq!(id_of(&reply), platform.node.started.lock()[3].id);
    // It took as long, so more are kept, until those show that it takes no time.
    until_frozen(&platform, 1).await;
    until_counted(&platform, "ringfence_pool_requests_total{outcome=\"miss\"}", 1).await;
}

#[tokio::test]
async fn the_templates_of_a_team_have_half_of_the_pool() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = PoolSettings { total: 4, ..quick() }).await;
    *platform.node.origin.lock() = Some(agent(0).await);
    for name in ["first", "second", "third"] {
        let (template, _) = request(&platform, &format!(r#"{{"name":"{name}"}}"#)).await;
        start_command(&platform, &template).await;
        id_of(&create(&platform, name).await);
    }
    until_frozen(&platform, 2).await;
    // Gives what must not happen the time of some checks: there is no other, and none is being started.
    tokio::time::sleep(Duration::from_millis(60)).await;
    let held = metrics(&platform).await;
    assert!(held.contains("ringfence_pool_sandboxes{state=\"ready\"} 2\n"), "{held}");
    assert!(
        held.contains("ringfence_pool_sandboxes{state=\"starting\"} 0\n"),
        "{held}"
    );
}

#[tokio::test]
async fn an_old_sandbox_is_replaced() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(2)).await;
    let old = until_frozen(&platform, 2).await;
    platform.clock.advance(3601);
    until_counted(&platform, "ringfence_pool_ends_total{reason=\"age\"}", 2).await;
    let new = until_frozen(&platform, 2).await;
    assert!(old.is_disjoint(&new));
}

#[tokio::test]
async fn a_start_command_that_fails_is_tried_at_growing_intervals() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = quick()).await;
    start_command(&platform, "own00000000000000000").await;
    // No agent responds.
    let reply = create(&platform, "own").await;
    assert_eq!(reply.status, 500, "{reply:?}");
    let failed = "ringfence_pool_starts_total{outcome=\"failed\"}";
    until_counted(&platform, failed, 1).await;
    let mut failures = 1;
    for (seconds, more) in [(4, 0), (2, 1), (8, 0), (3, 1), (18, 0), (3, 1)] {
        platform.clock.advance(seconds);
        failures += more;
        if more > 0 {
            until_counted(&platform, failed, failures).await;
        } else {
            // Gives what must not happen the time of some checks: there is no other failure.
            tokio::time::sleep(Duration::from_millis(60)).await;
            assert!(metrics(&platform).await.contains(&format!("{failed} {failures}\n")));
        }
    }
    assert!(platform.node.frozen.lock().is_empty());
    within(async {
        while !platform.node.running.lock().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_restart_ends_what_is_pooled() {
    let platform = TestPlatform::start_adjusted(|settings| settings.pool = base(2)).await;
    let pooled = until_frozen(&platform, 2).await;
    let id = id_of(&create(&platform, "base").await);
    let platform = platform.restart().await;
    let wanted: Vec<SandboxId> = platform
        .node
        .wanted
        .lock()
        .iter()
        .map(|wanted| wanted.id.clone())
        .collect();
    assert_eq!(wanted, [id]);
    assert!(until_frozen(&platform, 2).await.is_disjoint(&pooled));
}

#[tokio::test]
async fn without_a_size_nothing_is_pooled() {
    fn off(settings: &mut ServerSettings) {
        settings.pool = PoolSettings {
            per_template: 0,
            ..quick()
        };
    }
    let platform = TestPlatform::start_adjusted(off).await;
    *platform.node.origin.lock() = Some(agent(0).await);
    start_command(&platform, "own00000000000000000").await;
    for template in ["base", "own", "own"] {
        id_of(&create(&platform, template).await);
    }
    assert_eq!(platform.node.started.lock().len(), 3);
    let text = metrics(&platform).await;
    assert!(
        text.contains("ringfence_pool_requests_total{outcome=\"miss\"} 0\n"),
        "{text}"
    );
}

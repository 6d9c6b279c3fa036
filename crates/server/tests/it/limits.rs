//! Quotas and rate limits of teams, and the capacity of the host.

use std::sync::Arc;

use protocol::node::HostCapacity;
use server::settings::{ServerSettings, TeamLimits};

use super::platform::{Behaviour, KEY, MAX_LIFETIME_S, OTHER_KEY, Reply, TestPlatform, pause, team, within};

const MIB: u64 = 1024 * 1024;

async fn create_as(platform: &TestPlatform, key: &str, keys: &str) -> Reply {
    let body = format!("{{\"templateID\":\"base\"{keys}}}");
    platform.call_as(Some(key), "POST", "/sandboxes", &body).await
}

async fn create(platform: &TestPlatform) -> Reply {
    create_as(platform, KEY, r#","timeout":600"#).await
}

/// Asserts that the response is that of a limit that waiting does not resolve.
fn over_quota(reply: &Reply, fragment: &str) {
    assert!(reply.error(429).contains(fragment), "{reply:?}");
    assert_eq!(reply.header("should-retry"), "false");
    assert_eq!(
        reply.header("retry-after"),
        "",
        "SDKs try again when they are told a time"
    );
}

/// Waits until another create succeeds, which means that an earlier termination is complete.
async fn until_created(platform: &TestPlatform) -> String {
    within(async {
        loop {
            let reply = create(platform).await;
            if reply.status == 201 {
                return reply.json["sandboxID"].as_str().expect("an id").to_owned();
            }
        }
    })
    .await
}

#[tokio::test]
async fn the_sandbox_limit_of_a_team_is_enforced() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.sandboxes = Some(2)).await;
    let first = platform.create("").await;
    let second = platform.create(r#","timeout":60"#).await;
    over_quota(&create(&platform).await, "2 concurrent sandboxes");
    assert_eq!(platform.node.ids().len(), 2, "nothing was started");
    assert_eq!(create_as(&platform, OTHER_KEY, "").await.status, 201, "another team");

    // Every kind of end releases the quota: killed, expired, exited, failed to start.
    let killed = platform.call("DELETE", &format!("/sandboxes/{first}"), "").await;
    assert_eq!(killed.status, 204);
    let third = until_created(&platform).await;
    over_quota(&create(&platform).await, "sandboxes");
    platform.clock.advance(61);
    platform.until_gone(&second).await;
    until_created(&platform).await;
    over_quota(&create(&platform).await, "sandboxes");
    let id: model::id::SandboxId = third.parse().expect("an id");
    platform.node.exit(&id).await;
    platform.until_gone(&third).await;
    for behaviour in [
        Behaviour::Fails,
        Behaviour::Full,
        Behaviour::Panics,
        Behaviour::ExitsEarly,
    ] {
        *platform.node.start.lock() = behaviour;
        assert!(create(&platform).await.status.is_server_error(), "{behaviour:?}");
        // The remains of a failed start may be removed after the response.
        within(async {
            while platform.rows().sandbox_list_live().await.expect("a database").len() > 2 {
                pause().await;
            }
        })
        .await;
    }
    *platform.node.start.lock() = Behaviour::Works;
    until_created(&platform).await;
    over_quota(&create(&platform).await, "sandboxes");
}

#[tokio::test]
async fn a_team_reads_its_limits_and_what_it_uses() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.limits.default.sandboxes = Some(3);
        settings.limits.default.template_disk_mb = Some(100);
    })
    .await;
    let path = format!("/teams/{}/limits", team(1));
    let read = async || {
        let reply = platform.call("GET", &path, "").await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let all = reply.json.as_array().expect("limits").clone();
        move |name: &str| {
            let one = all.iter().find(|one| one["name"] == name);
            let one = one.unwrap_or_else(|| panic!("no {name} in {all:?}"));
            (one["limit"].as_u64(), one["used"].as_u64())
        }
    };
    let before = read().await;
    assert_eq!(before("sandboxes"), (Some(3), Some(0)));
    assert_eq!(before("templateDiskMB"), (Some(100), Some(0)));
    assert_eq!(before("requestsPerSecond"), (None, None));
    assert_eq!(before("maxLifetimeSeconds"), (Some(u64::from(MAX_LIFETIME_S)), None));
    let paused = platform.create("").await;
    platform.create("").await;
    let reply = platform.call("POST", &format!("/sandboxes/{paused}/pause"), "").await;
    assert_eq!(reply.status, 204, "{reply:?}");
    // What another team has is not counted.
    assert_eq!(create_as(&platform, OTHER_KEY, "").await.status, 201);
    let after = read().await;
    assert_eq!(after("sandboxes"), (Some(3), Some(1)));
    assert_eq!(after("pausedSandboxes").1, Some(1));
    assert_eq!(after("cpuCount").0, None);
    assert!(after("cpuCount").1 > Some(0) && after("memoryMB").1 > Some(0));
    platform.call_as(Some(OTHER_KEY), "GET", &path, "").await.error(404);
}

#[tokio::test]
async fn a_burst_does_not_exceed_the_limit_and_failures_are_released() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.sandboxes = Some(10)).await;
    let platform = Arc::new(platform);
    let mut creates = tokio::task::JoinSet::new();
    for _ in 0..60 {
        let platform = Arc::clone(&platform);
        creates.spawn(async move { create(&platform).await.status.as_u16() });
    }
    let mut statuses = creates.join_all().await;
    statuses.sort_unstable();
    assert_eq!(statuses, [[201; 10].as_slice(), [429; 50].as_slice()].concat());
    assert_eq!(platform.node.ids().len(), 10);
}

#[tokio::test]
async fn adopted_sandboxes_count_against_the_quota() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.sandboxes = Some(2)).await;
    let kept = platform.create(r#","timeout":600"#).await;
    let lost = platform.create(r#","timeout":600"#).await;
    platform.node.running.lock().remove(&lost.parse().expect("an id"));
    let platform = platform.restart().await;
    assert_eq!(create(&platform).await.status, 201, "the one that was lost made room");
    over_quota(&create(&platform).await, "sandboxes");
    let killed = platform.call("DELETE", &format!("/sandboxes/{kept}"), "").await;
    assert_eq!(killed.status, 204);
    assert_eq!(create(&platform).await.status, 201);
}

#[tokio::test]
async fn core_and_memory_limits_are_enforced() {
    // A sandbox from `base` has 2 cores and 1024 MiB.
    for (adjust, fit, fragment) in [
        (
            (|settings: &mut ServerSettings| settings.limits.default.cpu_count = Some(6)) as fn(&mut ServerSettings),
            3,
            "6 cores, 6 are in use and this sandbox needs 2",
        ),
        (|settings| settings.limits.default.cpu_count = Some(5), 2, "cores"),
        (
            |settings| settings.limits.default.memory_mb = Some(2048),
            2,
            "2048 MiB of memory, 2048 are in use and this sandbox needs 1024",
        ),
        (|settings| settings.limits.default.memory_mb = Some(2047), 1, "memory"),
    ] {
        let platform = TestPlatform::start_adjusted(adjust).await;
        for _ in 0..fit {
            assert_eq!(create(&platform).await.status, 201, "{fragment}");
        }
        over_quota(&create(&platform).await, fragment);
    }
}

#[tokio::test]
async fn team_limits_are_configured_by_name() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.limits.default.sandboxes = Some(1);
        let own = TeamLimits {
            max_lifetime_s: 100,
            sandboxes: Some(2),
            ..settings.limits.default
        };
        settings.limits.teams.insert("team2".to_owned(), own);
        settings.limits.teams.insert("nobody".to_owned(), own);
    })
    .await;
    for (key, longest_s, fit) in [(KEY, MAX_LIFETIME_S, 1), (OTHER_KEY, 100, 2)] {
        let timeout = |seconds: u32| format!(",\"timeout\":{seconds}");
        let too_long = create_as(&platform, key, &timeout(longest_s + 1)).await;
        assert!(too_long.error(400).contains("timeout"), "{too_long:?}");
        let mut id = String::new();
        for _ in 0..fit {
            let reply = create_as(&platform, key, &timeout(longest_s)).await;
            assert_eq!(reply.status, 201, "{reply:?}");
            reply.json["sandboxID"].as_str().expect("an id").clone_into(&mut id);
        }
        over_quota(&create_as(&platform, key, "").await, "sandboxes");
        // Set exactly, and cut at the team's maximum lifetime; a connect beyond it is refused.
        let path = format!("/sandboxes/{id}/timeout");
        platform
            .call_as(Some(key), "POST", &path, r#"{"timeout":2147483647}"#)
            .await;
        assert_eq!(platform.seconds_left(&id).await, i64::from(longest_s));
        for (seconds, status) in [(longest_s, 200), (longest_s + 1, 400)] {
            let path = format!("/sandboxes/{id}/connect");
            let body = format!("{{\"timeout\":{seconds}}}");
            let reply = platform.call_as(Some(key), "POST", &path, &body).await;
            assert_eq!(reply.status, status, "{reply:?}");
        }
    }
}

/// The limit, the remaining permits, seconds until the bucket is full, and seconds to wait.
fn rate(reply: &Reply) -> [&str; 4] {
    [
        "ratelimit-limit",
        "ratelimit-remaining",
        "ratelimit-reset",
        "retry-after",
    ]
    .map(|name| reply.header(name))
}

#[tokio::test]
async fn the_request_rate_is_limited_and_reported() {
    let platform = TestPlatform::start_adjusted(|settings| settings.limits.default.requests_per_second = Some(3)).await;
    let list = async |key| platform.call_as(Some(key), "GET", "/sandboxes", "").await;
    assert_eq!(rate(&list(KEY).await), ["3", "2", "1", ""]);
    let missing = platform.call("GET", "/sandboxes/inone", "").await;
    missing.error(404);
    assert_eq!(rate(&missing), ["3", "1", "1", ""], "errors count and tell too");
    assert_eq!(rate(&list(KEY).await), ["3", "0", "1", ""]);
    let refused = list(KEY).await;
    assert!(refused.error(429).contains("3 requests per second"), "{refused:?}");
    assert_eq!(rate(&refused), ["3", "0", "1", "1"]);
    assert_eq!(refused.header("should-retry"), "", "another try works");
    assert_eq!(rate(&list(OTHER_KEY).await), ["3", "2", "1", ""], "another team");
    let unknown = platform.call_as(None, "GET", "/sandboxes", "").await;
    unknown.error(401);
    assert_eq!(rate(&unknown), ["", "", "", ""]);
    platform.clock.advance(1);
    assert_eq!(rate(&list(KEY).await), ["3", "2", "1", ""]);
}

#[tokio::test]
async fn the_create_rate_is_limited_separately() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.limits.default.creates_per_minute = Some(2);
        settings.limits.default.requests_per_second = Some(100);
    })
    .await;
    // A refused body does not count as a create.
    platform.call("POST", "/sandboxes", "{}").await.error(400);
    assert_eq!(rate(&create(&platform).await), ["2", "1", "30", ""]);
    assert_eq!(rate(&create(&platform).await), ["2", "0", "60", ""]);
    let refused = create(&platform).await;
    assert!(
        refused.error(429).contains("2 create requests per minute"),
        "{refused:?}"
    );
    assert_eq!(rate(&refused), ["2", "0", "60", "30"]);
    assert_eq!(refused.header("should-retry"), "");
    assert_eq!(rate(&platform.call("GET", "/sandboxes", "").await)[0], "100");
    platform.clock.advance(29);
    create(&platform).await.error(429);
    platform.clock.advance(1);
    assert_eq!(create(&platform).await.status, 201);
}

#[tokio::test]
async fn no_rate_headers_without_limits() {
    let platform = TestPlatform::start().await;
    for _ in 0..20 {
        let reply = create(&platform).await;
        assert_eq!(reply.status, 201);
        assert_eq!(rate(&reply), ["", "", "", ""]);
    }
}

/// Asserts that the response is that of a host without capacity, and returns the seconds until a retry.
fn no_room(reply: &Reply) -> u32 {
    reply.error(503);
    assert_eq!(reply.json["error_code"], "sandbox_capacity_unavailable");
    assert_eq!(reply.header("should-retry"), "", "another try may work");
    reply.header("retry-after").parse().expect("whole seconds")
}

#[tokio::test]
async fn the_host_sandbox_limit_holds_in_a_burst() {
    let platform = TestPlatform::start_adjusted(|settings| settings.capacity.max_sandboxes = Some(5)).await;
    let platform = Arc::new(platform);
    let mut creates = tokio::task::JoinSet::new();
    for n in 0..40 {
        let platform = Arc::clone(&platform);
        let key = if n % 2 == 0 { KEY } else { OTHER_KEY };
        creates.spawn(async move { create_as(&platform, key, r#","timeout":10"#).await.status.as_u16() });
    }
    let mut statuses = creates.join_all().await;
    statuses.sort_unstable();
    assert_eq!(statuses, [[201; 5].as_slice(), [503; 35].as_slice()].concat());
    assert_eq!(platform.node.ids().len(), 5);
    // The first deadline is 10 s away.
    assert_eq!(no_room(&create(&platform).await), 11);
    platform.clock.advance(7);
    assert_eq!(no_room(&create(&platform).await), 4);
    platform.clock.advance(4);
    until_created(&platform).await;
}

#[tokio::test]
async fn adopted_sandboxes_count_against_the_capacity() {
    let platform = TestPlatform::start_adjusted(|settings| settings.capacity.max_sandboxes = Some(2)).await;
    let first = platform.create(r#","timeout":600"#).await;
    let platform = platform.restart().await;
    assert_eq!(create(&platform).await.status, 201);
    assert_eq!(
        no_room(&create(&platform).await),
        30,
        "no longer than this, however far the next deadline is"
    );
    let killed = platform.call("DELETE", &format!("/sandboxes/{first}"), "").await;
    assert_eq!(killed.status, 204);
    assert_eq!(create(&platform).await.status, 201);
}

#[tokio::test]
async fn creates_are_refused_below_the_memory_and_disk_floor() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.capacity.memory_floor_mb = 100;
        settings.capacity.disk_floor_mb = 200;
    })
    .await;
    for (memory_bytes, disk_bytes, fits) in [
        (100 * MIB, 200 * MIB, true),
        (100 * MIB - 1, 200 * MIB, false),
        (100 * MIB, 200 * MIB - 1, false),
        (100 * MIB, 200 * MIB, true),
    ] {
        *platform.node.room.lock() = Some(HostCapacity {
            memory_available_bytes: memory_bytes,
            disk_available_bytes: disk_bytes,
        });
        // Longer than a reading is valid.
        platform.clock.advance(1);
        let reply = create(&platform).await;
        if fits {
            assert_eq!(reply.status, 201, "{memory_bytes} {disk_bytes}");
        } else {
            no_room(&reply);
        }
    }
    assert_eq!(platform.node.ids().len(), 2, "nothing was started without capacity");
    *platform.node.room.lock() = None;
    platform.clock.advance(1);
    assert_eq!(create(&platform).await.status, 201, "a host that cannot tell is tried");
}

#[tokio::test]
async fn a_refused_create_releases_its_quota() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.limits.default.sandboxes = Some(1);
        settings.capacity.max_sandboxes = Some(1);
    })
    .await;
    let other = create_as(&platform, OTHER_KEY, r#","timeout":600"#).await;
    // The team has quota, the host has no capacity: the quota must be released after each attempt.
    for _ in 0..3 {
        no_room(&create(&platform).await);
    }
    let path = format!("/sandboxes/{}", other.json["sandboxID"].as_str().expect("an id"));
    platform.call_as(Some(OTHER_KEY), "DELETE", &path, "").await;
    assert_eq!(create(&platform).await.status, 201);
}

/// Until the next reading, admitted sandboxes count with their whole preallocated disk.
#[tokio::test]
async fn preallocated_disks_are_counted_before_the_next_reading() {
    let platform = TestPlatform::start_adjusted(|settings| {
        settings.capacity.disk_floor_mb = 200;
        settings.capacity.disk_per_sandbox_mb = 100;
    })
    .await;
    *platform.node.room.lock() = Some(HostCapacity {
        memory_available_bytes: 64 << 30,
        disk_available_bytes: 500 * MIB,
    });
    for _ in 0..3 {
        assert_eq!(create(&platform).await.status, 201);
    }
    no_room(&create(&platform).await);
    // The next reading includes them.
    platform.clock.advance(1);
    assert_eq!(create(&platform).await.status, 201);
}

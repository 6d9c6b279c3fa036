//! Timeouts and deadlines of sandboxes.

#[path = "../../../store/tests/it/left.rs"]
mod left;

use model::id::SandboxId;
use model::lifecycle::{Kept, State};
use protocol::node::WantedState;
use serde_json::{Value, json};
use sqlx::{AnyConnection, Connection as _};

use super::platform::{Behaviour, MAX_LIFETIME_S, OTHER_KEY, TestPlatform, pause, within};

async fn post(platform: &TestPlatform, path: &str, body: &str) -> u16 {
    platform.call("POST", path, body).await.status.as_u16()
}

#[tokio::test]
async fn a_timeout_is_set_exactly() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":60"#).await;
    let path = format!("/sandboxes/{id}/timeout");
    for (timeout, left) in [
        ("600", 600),
        ("30", 30),
        ("1", 1),
        ("30.0", 30),
        // Cut, not refused.
        ("7200", 7200),
        ("2147483647", 7200),
    ] {
        assert_eq!(post(&platform, &path, &format!("{{\"timeout\":{timeout}}}")).await, 204);
        assert_eq!(platform.seconds_left(&id).await, left, "{timeout}");
    }
    platform.clock.advance(100);
    assert_eq!(post(&platform, &path, r#"{"timeout":7200}"#).await, 204);
    assert_eq!(
        platform.seconds_left(&id).await,
        i64::from(MAX_LIFETIME_S) - 100,
        "from the start"
    );
    for body in [
        "",
        "{}",
        r#"{"timeout":null}"#,
        r#"{"timeout":-1}"#,
        r#"{"timeout":"1"}"#,
        "[]",
        "1",
    ] {
        platform.call("POST", &path, body).await.error(400);
    }
    assert_eq!(platform.seconds_left(&id).await, i64::from(MAX_LIFETIME_S) - 100);
}

#[tokio::test]
async fn a_zero_timeout_ends_the_sandbox() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    assert_eq!(
        post(&platform, &format!("/sandboxes/{id}/timeout"), r#"{"timeout":0}"#).await,
        204
    );
    platform.call("GET", &format!("/sandboxes/{id}"), "").await.error(404);
    within(async {
        while !platform.node.ids().is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_refresh_only_extends() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":10"#).await;
    let path = format!("/sandboxes/{id}/refreshes");
    for (body, left) in [
        ("", 15),
        ("{}", 15),
        (r#"{"duration":0}"#, 15),
        (r#"{"duration":14}"#, 15),
        (r#"{"duration":16}"#, 16),
        (r#"{"duration":100}"#, 100),
        (r#"{"duration":20}"#, 100),
        (r#"{"duration":3600}"#, 3600),
    ] {
        assert_eq!(post(&platform, &path, body).await, 204, "{body}");
        assert_eq!(platform.seconds_left(&id).await, left, "{body}");
    }
    for body in [
        r#"{"duration":3601}"#,
        r#"{"duration":-1}"#,
        r#"{"duration":null}"#,
        r#"{"duration":1.5}"#,
    ] {
        platform.call("POST", &path, body).await.error(400);
    }
    // Cut at the maximum lifetime. The last refresh was sent just before the end of the hour.
    platform.clock.advance(3599);
    assert_eq!(post(&platform, &path, r#"{"duration":3600}"#).await, 204);
    platform.clock.advance(3599);
    assert_eq!(post(&platform, &path, r#"{"duration":3600}"#).await, 204);
    assert_eq!(platform.seconds_left(&id).await, 2);
}

#[tokio::test]
async fn connect_only_extends_and_returns_connection_info() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":100"#).await;
    let (v1, v2) = (
        format!("/sandboxes/{id}/connect"),
        format!("/v2/sandboxes/{id}/connect"),
    );
    for (path, body, left) in [
        (&v1, r#"{"timeout":0}"#, 100),
        (&v1, r#"{"timeout":50}"#, 100),
        (&v1, r#"{"timeout":150,"memory":true}"#, 150),
        (&v2, "", 300),
        (&v2, "{}", 300),
        (&v2, r#"{"timeout":null}"#, 300),
        (&v2, r#"{"timeout":301}"#, 301),
        (&v2, r#"{"timeout":7200}"#, 7200),
    ] {
        let reply = platform.call("POST", path, body).await;
        assert_eq!(reply.status, 200, "{path} {body}: {reply:?}");
        assert_eq!(platform.seconds_left(&id).await, left, "{path} {body}");
        assert_eq!(reply.json["sandboxID"], id);
        assert_eq!(reply.json["domain"], "sandbox.test:3000");
        assert_eq!(reply.json["clientID"], "6532622b");
        assert_eq!(reply.json["envdAccessToken"].as_str().map(str::len), Some(64));
    }
    for (path, body) in [
        (&v1, ""),
        (&v1, "{}"),
        (&v1, r#"{"timeout":null}"#),
        (&v1, r#"{"timeout":-1}"#),
        (&v1, r#"{"timeout":7201}"#),
        (&v2, r#"{"timeout":7201}"#),
        (&v2, r#"{"timeout":"x"}"#),
        (&v2, r#"{"memory":1}"#),
    ] {
        platform.call("POST", path, body).await.error(400);
    }
}

#[tokio::test]
async fn sandboxes_end_at_their_deadline_and_not_before() {
    let platform = TestPlatform::start().await;
    let short = platform.create(r#","timeout":10"#).await;
    let long = platform.create(r#","timeout":1000"#).await;
    platform.clock.advance(9);
    assert_eq!(
        platform.call("GET", &format!("/sandboxes/{short}"), "").await.status,
        200
    );
    platform.clock.advance(1);
    platform.until_gone(&short).await;
    within(async {
        while platform.rows().sandbox_list_live().await.expect("a database").len() > 1 {
            pause().await;
        }
    })
    .await;
    assert_eq!(platform.node.ids(), [long.clone()].into());
    assert_eq!(
        platform.call("GET", &format!("/sandboxes/{long}"), "").await.status,
        200
    );
}

#[tokio::test]
async fn a_thousand_sandboxes_expire_at_their_deadlines() {
    let platform = TestPlatform::start().await;
    for n in 1..=1000 {
        // 7919 is prime: every deadline from 1 to 1000, unordered.
        platform.create(&format!(",\"timeout\":{}", n * 7919 % 1000 + 1)).await;
    }
    // The clock has not been advanced until now.
    let mut passed = 0;
    for ended in [1, 400, 999, 1000] {
        platform.clock.advance(ended - passed);
        passed = ended;
        let rest = 1000 - usize::try_from(ended).expect("small");
        let left = within(async {
            loop {
                // Reading all rows takes the processor from what ends sandboxes, so they are looked at when the node has
                // ended its own.
                if platform.node.ids().len() <= rest {
                    let left = platform.rows().sandbox_list_live().await.expect("a database");
                    if left.len() <= rest {
                        return left;
                    }
                }
                pause().await;
            }
        })
        .await;
        assert_eq!((left.len(), platform.node.ids().len()), (rest, rest));
        let now_us = platform.clock.now_us();
        assert!(left.iter().all(|row| row.end_us > now_us), "no sandbox ends early");
    }
}

#[tokio::test]
async fn an_extension_is_effective_once_answered() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":10"#).await;
    platform.clock.advance(9);
    assert_eq!(
        post(&platform, &format!("/sandboxes/{id}/refreshes"), r#"{"duration":30}"#).await,
        204
    );
    platform.clock.advance(2);
    // Past the first deadline; the end of another sandbox proves that deadlines were checked since.
    let probe = platform.create(r#","timeout":1"#).await;
    platform.clock.advance(1);
    platform.until_gone(&probe).await;
    assert_eq!(platform.call("GET", &format!("/sandboxes/{id}"), "").await.status, 200);
}

#[tokio::test]
async fn deadlines_survive_a_restart_and_orphans_are_removed() {
    let platform = TestPlatform::start().await;
    let kept = platform.create(r#","timeout":1000"#).await;
    let expired = platform.create(r#","timeout":10"#).await;
    let lost = platform.create(r#","timeout":1000"#).await;
    platform.node.running.lock().remove(&lost.parse().expect("an id"));
    // One that was being created and one that was being ended at the crash.
    *platform.node.start.lock() = Behaviour::Waits;
    let row = platform
        .store
        .sandbox_by_id(&kept.parse().expect("an id"))
        .await
        .expect("a database")
        .expect("a row");
    for (id, state) in [("icreating", None), ("istopping", Some(State::Stopping))] {
        let mut new = new_row(&row);
        new.id = id.parse().expect("an id");
        let inserted = platform.rows().sandbox_insert(new).await.expect("a row");
        if let Some(state) = state {
            leave_in(&platform, &inserted.id, state, None).await;
        }
    }
    let token = platform.call("GET", &format!("/sandboxes/{kept}"), "").await.json["envdAccessToken"].clone();
    platform.clock.advance(11);

    let platform = platform.restart().await;
    let mut wanted: Vec<String> = platform
        .node
        .wanted
        .lock()
        .iter()
        .map(|wanted| wanted.id.to_string())
        .collect();
    let mut all = vec![kept.clone(), expired.clone(), lost.clone()];
    wanted.sort_unstable();
    all.sort_unstable();
    // The first platform may have enforced the deadline just before it stopped.
    all.retain(|id| *id != expired || wanted.contains(id));
    assert_eq!(wanted, all);
    platform.until_gone(&expired).await;
    within(async {
        while platform.rows().sandbox_list_live().await.expect("a database").len() > 1 {
            pause().await;
        }
    })
    .await;
    assert_eq!(platform.node.ids(), [kept.clone()].into());
    let detail = platform.call("GET", &format!("/sandboxes/{kept}"), "").await;
    assert_eq!(detail.json["envdAccessToken"], token);
    platform.call("GET", &format!("/sandboxes/{lost}"), "").await.error(404);
    platform.clock.advance(1000);
    platform.until_gone(&kept).await;
}

/// Recovery of sandboxes that were being paused or resumed at a crash.
#[tokio::test]
async fn every_state_is_recovered_after_a_crash() {
    use WantedState::{Paused, Running, RunningOrPaused};
    let platform = TestPlatform::start().await;
    let made = platform.create(r#","timeout":1000"#).await;
    let id = made.parse().expect("an id");
    let row = platform
        .store
        .sandbox_by_id(&id)
        .await
        .expect("a database")
        .expect("a row");
    // State of the row, what is kept, whether it has processes and they are stopped, the state that the node is asked for,
    // and the state of the row afterwards.
    let (memory, disk) = (Some(Kept::Memory), Some(Kept::Filesystem));
    let (between, between_disk) = (RunningOrPaused(Kept::Memory), RunningOrPaused(Kept::Filesystem));
    let (stopped, running, none) = (Some(true), Some(false), None);
    #[rustfmt::skip]
    let table = [
        ("icreating", State::Creating, None, running, None, None),
        ("irunning", State::Running, None, running, Some(Running), Some(State::Running)),
        ("ithawed", State::Running, None, stopped, Some(Running), Some(State::Running)),
        ("ilost", State::Running, None, none, Some(Running), None),
        ("ipausing1", State::Pausing, memory, running, Some(between), Some(State::Running)),
        ("ipausing2", State::Pausing, memory, stopped, Some(between), Some(State::Paused)),
        ("ipausing3", State::Pausing, memory, none, Some(between), None),
        ("ipausing4", State::Pausing, disk, none, Some(between_disk), Some(State::Paused)),
        ("ipausing5", State::Pausing, disk, stopped, Some(between_disk), Some(State::Running)),
        ("ipausing6", State::Pausing, disk, none, Some(between_disk), None),
        ("ipaused1", State::Paused, memory, stopped, Some(Paused(Kept::Memory)), Some(State::Paused)),
        ("ipaused2", State::Paused, memory, running, Some(Paused(Kept::Memory)), Some(State::Paused)),
        ("ipaused3", State::Paused, memory, none, Some(Paused(Kept::Memory)), None),
        ("ipaused4", State::Paused, disk, none, Some(Paused(Kept::Filesystem)), Some(State::Paused)),
        ("ipaused5", State::Paused, None, none, Some(Paused(Kept::Filesystem)), Some(State::Paused)),
        ("iresuming1", State::Resuming, memory, running, Some(between), Some(State::Running)),
        ("iresuming2", State::Resuming, memory, stopped, Some(between), Some(State::Paused)),
        ("iresuming3", State::Resuming, memory, none, Some(between), None),
        ("iresuming4", State::Resuming, disk, none, Some(Paused(Kept::Filesystem)), Some(State::Paused)),
        ("iresuming5", State::Resuming, disk, running, Some(Paused(Kept::Filesystem)), Some(State::Paused)),
        ("istopping", State::Stopping, None, running, None, None),
        ("igone", State::Gone, None, none, None, Some(State::Gone)),
    ];
    for (id, state, kept, processes, ..) in table {
        let mut new = new_row(&row);
        new.id = id.parse().expect("an id");
        let row = platform.rows().sandbox_insert(new).await.expect("a row");
        leave_in(&platform, &row.id, state, kept).await;
        if let Some(is_stopped) = processes {
            platform.node.running.lock().insert(row.id.clone());
            if is_stopped {
                platform.node.paused.lock().insert(row.id);
            }
        }
    }
    platform.node.lost.lock().insert("ipausing6".parse().expect("an id"));
    let platform = platform.restart().await;
    for (id, before, kept, processes, want_asked, want_row) in table {
        let id: SandboxId = id.parse().expect("an id");
        let asked = platform
            .node
            .wanted
            .lock()
            .iter()
            .find(|wanted| wanted.id == id)
            .map(|wanted| wanted.state);
        let at = format!("{before:?} {kept:?} {processes:?}");
        assert_eq!(asked, want_asked, "{at}");
        let after = platform.store.sandbox_by_id(&id).await.expect("a database");
        assert_eq!(after.map(|row| row.state), want_row, "{at}");
        let (status, state) = match want_row {
            Some(State::Running) => (200, json!("running")),
            Some(State::Paused) => (200, json!("paused")),
            _ => (404, Value::Null),
        };
        let detail = platform.call("GET", &format!("/sandboxes/{id}"), "").await;
        assert_eq!(detail.status, status, "{at}");
        assert_eq!(detail.json["state"], state, "{at}");
        // Its processes are stopped or run as the row says.
        let is_stopped = platform.node.paused.lock().contains(&id);
        let is_paused = want_row == Some(State::Paused) && kept == memory && processes.is_some();
        assert_eq!(is_stopped, is_paused, "{at}");
    }
}

/// Gives a row the state in which a crash has left it, of this version of the platform or of an earlier one.
async fn leave_in(platform: &TestPlatform, id: &SandboxId, state: State, kept: Option<Kept>) {
    let url = format!("sqlite:{}", platform.directory.path().join("test.db").display());
    let mut raw = AnyConnection::connect(&url).await.expect("a database");
    left::leave_in(&mut raw, id, state, kept).await;
    raw.close().await.expect("a database");
}

fn new_row(row: &store::sandboxes::SandboxRow) -> store::sandboxes::NewSandbox {
    store::sandboxes::NewSandbox {
        id: row.id.clone(),
        team_id: row.team_id.clone(),
        user_id: row.user_id.clone(),
        template_id: row.template_id.clone(),
        build_id: row.build_id.clone(),
        alias: None,
        execution_id: row.execution_id.clone(),
        end_us: row.end_us,
        max_end_us: row.max_end_us,
        cpu_count: 1,
        memory_mb: 1,
        disk_mb: 1,
        agent_version: String::new(),
        metadata: Default::default(),
        secure: true,
        allow_public_traffic: true,
        allow_internet_access: None,
        network_json: None,
        lifecycle_json: None,
        injections_sealed: None,
        environment_sealed: None,
        authority_of: None,
        created_us: row.created_us,
    }
}

#[tokio::test]
async fn a_running_sandbox_is_not_resumed() {
    let platform = TestPlatform::start().await;
    let id = platform.create("").await;
    let path = format!("/sandboxes/{id}/resume");
    let before = platform.seconds_left(&id).await;
    for body in [
        "",
        "{}",
        r#"{"timeout":null}"#,
        r#"{"timeout":1,"autoPause":true,"memory":false}"#,
    ] {
        let reply = platform.call("POST", &path, body).await;
        assert!(reply.error(409).contains("already running"), "{body}: {reply:?}");
    }
    assert_eq!(platform.seconds_left(&id).await, before);
    for (timeout, status) in [(0, 400), (1, 409), (MAX_LIFETIME_S, 409), (MAX_LIFETIME_S + 1, 400)] {
        let body = format!("{{\"timeout\":{timeout}}}");
        platform.call("POST", &path, &body).await.error(status);
    }
    for body in [
        "{",
        r#"{"timeout":-1}"#,
        r#"{"timeout":1.5}"#,
        r#"{"memory":null}"#,
        r#"{"autoPause":1}"#,
    ] {
        platform.call("POST", &path, body).await.error(400);
    }
    let foreign = platform.call_as(Some(OTHER_KEY), "POST", &path, "").await;
    let missing = platform.call("POST", "/sandboxes/inobody/resume", "").await;
    assert_eq!(foreign.error(404).replace(&id, "inobody"), missing.error(404));
    // Clients compare this text.
    let known = "doesn't exist or you don't have access to it";
    assert!(missing.error(404).contains(known), "{missing:?}");
}

//! Changes of rows whose answer is lost: the database has made them, and says that it failed.

use std::time::Duration;

use model::lifecycle::State;
use sqlx::{AnyConnection, AssertSqlSafe, Connection as _, Executor as _};

use super::pause::{metrics, pause, post, state};
use super::platform::{Reply, TestPlatform, within};

/// The database of a platform, in which changes of rows fail.
struct Failing(AnyConnection);

impl Failing {
    async fn of(platform: &TestPlatform) -> Self {
        let url = format!("sqlite:{}", platform.directory.path().join("test.db").display());
        Self(AnyConnection::connect(&url).await.expect("a database"))
    }

    /// Has every change to a state, or in it, be made and fail nevertheless, as when a connection is lost before the answer.
    async fn lose(&mut self, state: &str) {
        self.fail("lost", "FAIL", state).await;
    }

    /// Has every change to a state, or in it, fail.
    async fn refuse(&mut self, state: &str) {
        self.fail("refused", "ABORT", state).await;
    }

    async fn fail(&mut self, what: &str, raise: &str, state: &str) {
        self.execute(format!(
            "BEGIN; CREATE TRIGGER {what}_{state} AFTER UPDATE ON sandboxes WHEN NEW.state = '{state}' \
             BEGIN SELECT RAISE({raise}, 'the answer is {what}'); END; COMMIT"
        ))
        .await;
    }

    /// Makes a change to a state.
    async fn make(&mut self, state: &str) {
        let set = format!("state = '{state}', version = version + 1");
        self.execute(format!("BEGIN; UPDATE sandboxes SET {set}; COMMIT")).await;
    }

    async fn lose_no_more(&mut self, state: &str) {
        self.execute(format!("BEGIN; DROP TRIGGER lost_{state}; COMMIT")).await;
    }

    async fn refuse_no_more(&mut self, state: &str) {
        self.execute(format!("BEGIN; DROP TRIGGER refused_{state}; COMMIT"))
            .await;
    }

    async fn execute(&mut self, sql: String) {
        self.0.execute(AssertSqlSafe(sql)).await.expect("a database");
    }
}

/// Without a look at the row, it would be taken for one that another server has changed, for as long as this one runs.
#[tokio::test]
async fn a_change_whose_answer_is_lost_can_be_made_again() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":600"#).await;
    let mut failing = Failing::of(&platform).await;
    for (call, before, back, after) in [
        ("pause", State::Pausing, State::Running, State::Paused),
        ("resume", State::Resuming, State::Paused, State::Running),
    ] {
        // The row would be brought back after a second.
        failing.refuse(back.as_str()).await;
        failing.lose(before.as_str()).await;
        assert!(post(&platform, &id, call, "").await.status.is_server_error(), "{call}");
        assert_eq!(state(&platform, &id).await, before, "it was committed");
        failing.lose_no_more(before.as_str()).await;
        failing.refuse_no_more(back.as_str()).await;
        let again = post(&platform, &id, call, "").await;
        assert!(again.status.is_success(), "{call}: {again:?}");
        assert_eq!(state(&platform, &id).await, after);
    }
}

/// Also where nothing more is asked for, and where the database fails again while the row is brought back.
#[tokio::test]
async fn a_row_whose_change_had_no_answer_becomes_right_by_itself() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":600"#).await;
    let mut failing = Failing::of(&platform).await;
    failing.refuse("running").await;
    failing.lose("pausing").await;
    for attempt in ["its answer is lost", "the row cannot be brought back"] {
        let reply = post(&platform, &id, "pause", "").await;
        assert!(reply.status.is_server_error(), "{attempt}");
        assert_eq!(state(&platform, &id).await, State::Pausing, "{attempt}");
    }
    failing.lose_no_more("pausing").await;
    failing.refuse_no_more("running").await;
    until_stored(&platform, &id, State::Running).await;
    assert_eq!(post(&platform, &id, "pause", "").await.status, 204);
}

/// Changes of a sandbox that runs.
const CHANGES: [(&str, &str, &str); 4] = [
    ("POST", "timeout", r#"{"timeout":700}"#),
    ("POST", "connect", r#"{"timeout":800}"#),
    ("PUT", "network", r#"{"denyOut":["192.0.2.1"]}"#),
    ("PUT", "injections", r#"{"injections":[]}"#),
];

async fn change(platform: &TestPlatform, id: &str, (method, what, body): (&str, &str, &str)) -> Reply {
    platform.call(method, &format!("/sandboxes/{id}/{what}"), body).await
}

#[tokio::test]
async fn a_sandbox_is_changed_after_a_pause_whose_answer_is_lost() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":600"#).await;
    let mut failing = Failing::of(&platform).await;
    for wanted in CHANGES {
        failing.refuse("running").await;
        failing.lose("pausing").await;
        assert!(post(&platform, &id, "pause", "").await.status.is_server_error());
        failing.lose_no_more("pausing").await;
        failing.refuse_no_more("running").await;
        let reply = change(&platform, &id, wanted).await;
        assert!(reply.status.is_success(), "{wanted:?}: {reply:?}");
        assert_eq!(state(&platform, &id).await, State::Running, "{wanted:?}");
    }
}

/// A sandbox that runs, and whose row cannot say so yet, is there, and nobody ends it.
#[tokio::test]
async fn a_sandbox_that_cannot_be_recorded_is_to_be_asked_again() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":600"#).await;
    pause(&platform, &id).await;
    let mut failing = Failing::of(&platform).await;
    failing.refuse("running").await;
    assert!(post(&platform, &id, "resume", "").await.status.is_success());
    assert_eq!(state(&platform, &id).await, State::Resuming);
    for wanted in CHANGES {
        let reply = change(&platform, &id, wanted).await;
        let answer = (reply.status.as_u16(), reply.header("retry-after"));
        assert_eq!(answer, (503, "1"), "{wanted:?}: {reply:?}");
    }
    failing.refuse_no_more("running").await;
    until_stored(&platform, &id, State::Running).await;
    for wanted in CHANGES {
        let reply = change(&platform, &id, wanted).await;
        assert!(reply.status.is_success(), "{wanted:?}: {reply:?}");
    }
}

/// As a statement that was on its way when its connection was lost, and is carried out after the row was read.
#[tokio::test]
async fn a_change_that_is_made_after_the_row_was_read_is_found() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":600"#).await;
    let mut failing = Failing::of(&platform).await;
    failing.make("pausing").await;
    let connected = post(&platform, &id, "connect", r#"{"timeout":800}"#).await;
    assert_eq!(connected.status, 200, "{connected:?}");
    for (call, made, after) in [
        ("pause", "pausing", State::Paused),
        ("resume", "resuming", State::Running),
    ] {
        failing.make(made).await;
        let first = post(&platform, &id, call, "").await;
        assert_eq!(
            (first.status.as_u16(), first.header("retry-after")),
            (503, "1"),
            "{first:?}"
        );
        let again = post(&platform, &id, call, "").await;
        assert!(again.status.is_success(), "{call}: {again:?}");
        assert_eq!(state(&platform, &id).await, after);
    }
}

#[tokio::test]
async fn a_deadline_whose_answer_is_lost_is_the_one_that_counts_once_it_is_read() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":600"#).await;
    let other = platform.create(r#","timeout":601"#).await;
    let mut failing = Failing::of(&platform).await;
    failing.lose("running").await;
    let longer = change(&platform, &id, ("POST", "timeout", r#"{"timeout":1000}"#)).await;
    assert!(longer.status.is_server_error(), "{longer:?}");
    failing.lose_no_more("running").await;
    let read = change(&platform, &id, ("PUT", "network", "{}")).await;
    assert!(read.status.is_success(), "{read:?}");
    platform.clock.advance(700);
    // By then its first deadline was looked at, too.
    platform.until_gone(&other).await;
    assert_eq!(state(&platform, &id).await, State::Running);
    platform.clock.advance(300);
    platform.until_gone(&id).await;
}

/// The sandbox is paused, and that is recorded by the second attempt, whose answer is lost.
#[tokio::test]
async fn a_state_that_is_recorded_later_and_whose_answer_is_lost_is_read_again() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":600"#).await;
    let mut failing = Failing::of(&platform).await;
    failing.refuse("paused").await;
    assert_eq!(post(&platform, &id, "pause", "").await.status, 204);
    assert_eq!(state(&platform, &id).await, State::Pausing);
    failing.lose("paused").await;
    failing.refuse_no_more("paused").await;
    until_stored(&platform, &id, State::Paused).await;
    failing.lose_no_more("paused").await;
    let resumed = post(&platform, &id, "resume", "").await;
    assert!(resumed.status.is_success(), "{resumed:?}");
    assert_eq!(state(&platform, &id).await, State::Running);
}

/// The first attempt fails to store that it is being paused, and those after it fail to read what is stored.
#[tokio::test]
async fn a_deadline_comes_again_when_the_database_is_back() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":10,"autoPause":true"#).await;
    let mut failing = Failing::of(&platform).await;
    let errors = async || {
        let scraped = metrics(&platform).await;
        let line = scraped
            .lines()
            .find(|line| line.starts_with("ringfence_store_errors_total "));
        let count = line.and_then(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        count.unwrap_or_else(|| panic!("no count of errors in {scraped}"))
    };
    failing
        .execute("BEGIN; ALTER TABLE sandboxes RENAME TO away; COMMIT".to_owned())
        .await;
    platform.clock.advance(11);
    within(async {
        while errors().await < 4 {
            platform.clock.advance(1);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    failing
        .execute("BEGIN; ALTER TABLE away RENAME TO sandboxes; COMMIT".to_owned())
        .await;
    within(async {
        while state(&platform, &id).await != State::Paused {
            platform.clock.advance(1);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Waits until the row of a sandbox has a state.
async fn until_stored(platform: &TestPlatform, id: &str, wanted: State) {
    let is_stored = async {
        while state(platform, id).await != wanted {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(is_stored).await;
}

//! Changes of rows whose answer is lost: the database has made them, and says that it failed.

use std::time::Duration;

use model::lifecycle::State;
use sqlx::{AnyConnection, AssertSqlSafe, Connection as _, Executor as _};

use super::pause::{post, state};
use super::platform::{TestPlatform, within};

/// The database of a platform, in which changes of rows fail.
struct Failing(AnyConnection);

impl Failing {
    async fn of(platform: &TestPlatform) -> Self {
        let url = format!("sqlite:{}", platform.directory.path().join("test.db").display());
        Self(AnyConnection::connect(&url).await.expect("a database"))
    }

    /// Has every change to a state be made and fail nevertheless, as when a connection is lost before the answer.
    async fn lose(&mut self, state: &str) {
        self.fail("lost", "FAIL", state).await;
    }

    /// Has every change to a state fail.
    async fn refuse(&mut self, state: &str) {
        self.fail("refused", "ABORT", state).await;
    }

    async fn fail(&mut self, what: &str, raise: &str, state: &str) {
        self.execute(format!(
            "BEGIN; CREATE TRIGGER {what}_{state} AFTER UPDATE OF state ON sandboxes WHEN NEW.state = '{state}' \
             BEGIN SELECT RAISE({raise}, 'the answer is {what}'); END; COMMIT"
        ))
        .await;
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

/// The server looks at the row again although nobody asks for anything more.
#[tokio::test]
async fn a_row_whose_change_had_no_answer_becomes_right_by_itself() {
    let platform = TestPlatform::start().await;
    let id = platform.create(r#","timeout":600"#).await;
    let mut failing = Failing::of(&platform).await;
    failing.lose("pausing").await;
    assert!(post(&platform, &id, "pause", "").await.status.is_server_error());
    failing.lose_no_more("pausing").await;
    until_stored(&platform, &id, State::Running).await;
    assert_eq!(post(&platform, &id, "pause", "").await.status, 204);
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

/// Waits until the row of a sandbox has a state.
async fn until_stored(platform: &TestPlatform, id: &str, wanted: State) {
    let is_stored = async {
        while state(platform, id).await != wanted {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(is_stored).await;
}

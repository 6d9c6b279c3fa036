//! A clock that stands still, and goes on only as fast as the tasks of a test.

use std::sync::mpsc;
use std::time::Duration;

use tokio::time::advance;

const STEP: Duration = Duration::from_millis(1);
/// After this, the clock is let go. The bounds of a test that hangs end it then.
const BOUND: Duration = Duration::from_secs(60);

/// Holds the paused clock of a test. By itself it would go on whenever all tasks wait, also for a socket.
pub(crate) struct Clock {
    _held: mpsc::Sender<()>,
}

impl Clock {
    pub(crate) fn hold() -> Self {
        let (held, end) = mpsc::channel();
        // A paused clock does not go on while there is blocking work.
        tokio::task::spawn_blocking(move || end.recv_timeout(BOUND));
        Self { _held: held }
    }

    /// Lets time pass. In each step all tasks go on, so that a machine that stands still costs one step.
    pub(crate) async fn pass(&self, time: Duration) {
        for _ in 0..time.as_millis() {
            let step = tokio::task::spawn_blocking(|| std::thread::sleep(STEP));
            step.await.expect("a sleep");
            advance(STEP).await;
        }
    }

    /// Lets time pass until this is done.
    pub(crate) async fn until<F: Future>(&self, work: F) -> F::Output {
        tokio::select! {
            biased;
            done = work => done,
            () = self.pass(BOUND) => panic!("not within {BOUND:?}"),
        }
    }
}

//! Reaping: the agent is pid 1, so every process of the sandbox ends up as its child.

use tokio::signal::unix::Signal;

use super::table::Table;
use crate::spawner_client::SpawnerClient;
use crate::sys;

/// Reaps dead children, ours and those that lost their parent, whenever the signal announces some. Runs for ever.
pub(crate) async fn run(mut signal: Signal, spawner: &SpawnerClient, table: &Table) -> ! {
    loop {
        while reap(spawner, table) {
            tokio::task::yield_now().await;
        }
        signal.recv().await;
    }
}

/// Reaps a batch of processes, and returns whether there may be more. Whether there may be more.
fn reap(spawner: &SpawnerClient, table: &Table) -> bool {
    // Code that makes processes faster than we reap them must not keep us from everything else.
    const AT_ONCE: usize = 256;
    let pending = spawner.in_flight();
    if !pending {
        table.forget_orphans();
    }
    for _ in 0..AT_ONCE {
        let Some((pid, status)) = sys::reap_one() else {
            return false;
        };
        table.reaped(pid, status, pending);
    }
    true
}

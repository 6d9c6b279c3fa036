//! Ends sandboxes whose sockets hold memory of the host that no limit counts.
//!
//! The kernel charges a sandbox for nearly all memory that it holds, and stops it at its limit. What it does not charge
//! is held in sockets (see `runtime::sockets`), and can only be bounded by measuring it. Measuring every socket of
//! every sandbox all the time would cost too much, so the host as a whole is measured first: only when it has lost
//! memory that no sandbox is charged for are the sandboxes measured, one by one. A sandbox that holds more than any
//! legitimate program does is ended. Measuring the host takes about 100 µs.
//!
//! A loss is invisible if a program of the host frees as much at the same time. So a few sandboxes are measured each
//! time in any case, and each of them once per [`ROUND`].

use std::sync::Arc;
use std::time::Duration;

use model::log::Level;

use crate::Shared;
use crate::supervisor::SandboxHandle;

/// Interval between two measurements of the host. Two cores fill sockets at about 400 MB/s.
const PAUSE: Duration = Duration::from_millis(200);
/// Loss of memory on the host from which on the sandboxes are measured.
const LOSS: u64 = 64 << 20;
/// What a sandbox may hold in its sockets beyond what it is charged for. Legitimate programs stay far below: a netlink
/// socket or an error queue has a few kilobytes for microseconds.
const BOUND: u64 = 64 << 20;
/// How long a sandbox must stay above the bound: the counters behind the sum are not read at the same time.
const CONFIRM: Duration = Duration::from_millis(20);
/// Number of measurements of the host in which each sandbox is measured once: 10 s.
const ROUND: usize = 50;
const MIB: u64 = 1 << 20;

/// Measures until the platform stops, on a thread of its own, so that queued work in this process cannot delay it.
///
/// # Errors
/// When no thread can be created.
pub(crate) fn watch(shared: &Arc<Shared>) -> std::io::Result<()> {
    // Not held between two measurements: this thread must not keep a node alive that is dropped without being released.
    let shared = Arc::downgrade(shared);
    let look = move || {
        let mut suspicion = Suspicion::default();
        let mut round = Round::new();
        while let Some(shared) = shared.upgrade().filter(|shared| !shared.stop.is_cancelled()) {
            let handles: Vec<Arc<SandboxHandle>> = shared.sandboxes.lock().values().cloned().collect();
            if !handles.is_empty() {
                match shared.driver.uncharged_bytes() {
                    Ok(bytes) if suspicion.is_raised_by(bytes) => handles.iter().for_each(|handle| check(handle)),
                    Ok(_) => {
                        let due = round.next(handles.iter().map(|handle| handle.id().clone()));
                        handles
                            .iter()
                            .filter(|handle| due.contains(handle.id()))
                            .for_each(|handle| check(handle));
                    }
                    Err(error) => tracing::warn!("measure the host's uncharged memory: {error}"),
                }
            }
            drop(handles);
            drop(shared);
            std::thread::sleep(PAUSE);
        }
    };
    std::thread::Builder::new()
        .name("memory-watch".to_owned())
        .spawn(look)?;
    Ok(())
}

/// Decides when the sandboxes have to be measured.
#[derive(Debug, Default)]
struct Suspicion {
    /// The lowest uncharged memory of the host since the sandboxes were last measured, in bytes. Zero at first, so that
    /// what sandboxes took while no platform ran is noticed.
    lowest: u64,
}

impl Suspicion {
    fn is_raised_by(&mut self, uncharged: u64) -> bool {
        let is_raised = uncharged > self.lowest.saturating_add(LOSS);
        self.lowest = if is_raised {
            uncharged
        } else {
            self.lowest.min(uncharged)
        };
        is_raised
    }
}

/// Chooses the sandboxes to measure whatever the host has lost.
#[derive(Debug)]
struct Round<T> {
    /// What is left of this round.
    left: Vec<T>,
    /// Number to measure each time.
    share: usize,
    /// Number of times so far in this round.
    turn: usize,
}

impl<T> Round<T> {
    fn new() -> Self {
        Self {
            left: Vec::new(),
            share: 0,
            turn: 0,
        }
    }

    /// The next ones. `all` are those that a new round begins with; what has ended since is still in the round.
    fn next(&mut self, all: impl Iterator<Item = T>) -> Vec<T> {
        if self.turn == 0 {
            self.left = all.collect();
            self.share = self.left.len().div_ceil(ROUND);
        }
        self.turn = (self.turn + 1) % ROUND;
        self.left.split_off(self.left.len().saturating_sub(self.share))
    }
}

/// Ends the sandbox if its sockets hold more than [`BOUND`].
fn check(handle: &SandboxHandle) {
    if handle.is_ending() {
        return;
    }
    let held = || match handle.sandbox().uncharged_bytes(BOUND) {
        Ok(bytes) => bytes,
        Err(error) => {
            tracing::debug!(sandbox.id = %handle.id(), "measure the sockets of a sandbox: {error}");
            0
        }
    };
    if held() <= BOUND {
        return;
    }
    std::thread::sleep(CONFIRM);
    let bytes = held();
    if bytes <= BOUND {
        return;
    }
    let mib = bytes / MIB;
    tracing::warn!(
        sandbox.id = %handle.id(),
        "terminating a sandbox: its sockets hold {mib} MiB of the host's memory that no limit counts"
    );
    let message = format!(
        "the sandbox is terminated: its sockets hold {mib} MiB of the host's memory beyond its limit; {} MiB are allowed",
        BOUND / MIB
    );
    let fields = [
        ("event_type", "socket_memory".to_owned()),
        ("held_bytes", bytes.to_string()),
    ];
    handle.log().host(Level::Error, &message, fields);
    // Its supervisor sees the end of the agent and cleans up.
    handle.sandbox().kill();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sandbox_is_measured_once_per_round() {
        for number in [1_usize, 2, 49, 50, 51, 120, 1000] {
            let mut round = Round::new();
            for _ in 0..2 {
                let mut seen = Vec::new();
                for _ in 0..ROUND {
                    let due = round.next(0..number);
                    assert!(due.len() <= number.div_ceil(ROUND), "{number}");
                    seen.extend(due);
                }
                seen.sort_unstable();
                assert_eq!(seen, Vec::from_iter(0..number));
            }
        }
        assert!(Round::<u8>::new().next(std::iter::empty()).is_empty());
    }

    #[test]
    fn suspicion_is_raised_by_losses_since_the_lowest_value() {
        let mut suspicion = Suspicion::default();
        let mut assert_raised = |mib: u64, want| assert_eq!(suspicion.is_raised_by(mib * MIB), want, "{mib}");
        assert_raised(1000, true);
        assert_raised(1060, false);
        assert_raised(1065, true);
        assert_raised(1100, false);
        assert_raised(500, false);
        assert_raised(560, false);
        assert_raised(565, true);
        assert_raised(565, false);
    }
}

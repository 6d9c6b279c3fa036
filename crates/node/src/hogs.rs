//! Ends sandboxes that take memory of the host which no limit counts.
//!
//! The kernel charges a sandbox with nearly all that it holds, and stops it at its limit. What it does not charge is in
//! sockets (`runtime::sockets` says which), and nothing but looking bounds that. Looking at every socket of every
//! sandbox would cost more than it is worth, so the first look is at the host alone: only when it has lost memory that
//! no sandbox is charged with are the sandboxes looked at, one by one. Who then holds more than any honest program does
//! is ended. One look takes some 100 µs, so idle sandboxes cost nothing.

use std::sync::Arc;
use std::time::Duration;

use model::log::Level;

use crate::Shared;
use crate::owner::Owned;

/// How often the host is looked at. Two cores fill sockets with some 400 MB/s.
const PAUSE: Duration = Duration::from_millis(200);
/// Loss of the host that makes the sandboxes suspect.
const LOSS: u64 = 64 << 20;
/// What a sandbox may hold in its sockets beyond what it is charged with. Honest programs keep far below: a netlink
/// socket or an error queue has a few kilobytes for microseconds.
const BOUND: u64 = 64 << 20;
/// How long a sandbox has to hold it: the counters behind the sum are not read at one moment.
const CONFIRM: Duration = Duration::from_millis(20);
const MIB: u64 = 1 << 20;

/// Looks until the platform stops, on a thread of its own, so that nothing that waits in a queue of this process keeps it from
/// looking.
///
/// # Errors
/// When no thread can be made.
pub(crate) fn watch(shared: &Arc<Shared>) -> std::io::Result<()> {
    // Not held between two looks: a node that goes without being released must not go on because of this thread.
    let shared = Arc::downgrade(shared);
    let look = move || {
        let mut suspicion = Suspicion::default();
        while let Some(shared) = shared.upgrade().filter(|shared| !shared.stop.is_cancelled()) {
            let owned: Vec<Arc<Owned>> = shared.sandboxes.lock().values().cloned().collect();
            if !owned.is_empty() {
                match shared.driver.uncharged_bytes() {
                    Ok(bytes) if suspicion.is_raised_by(bytes) => owned.iter().for_each(|owned| judge(owned)),
                    Ok(_) => {}
                    Err(error) => tracing::warn!("read what the host's memory is used for: {error}"),
                }
            }
            drop(owned);
            drop(shared);
            std::thread::sleep(PAUSE);
        }
    };
    std::thread::Builder::new()
        .name("memory-watch".to_owned())
        .spawn(look)?;
    Ok(())
}

/// When the sandboxes are worth a look.
#[derive(Debug, Default)]
struct Suspicion {
    /// The least that was uncharged since the sandboxes were looked at, or what was then. Nothing before the first look,
    /// so that what sandboxes took while no platform ran is seen.
    calm: u64,
}

impl Suspicion {
    fn is_raised_by(&mut self, uncharged: u64) -> bool {
        let is_raised = uncharged > self.calm.saturating_add(LOSS);
        self.calm = if is_raised { uncharged } else { self.calm.min(uncharged) };
        is_raised
    }
}

/// Ends a sandbox that holds too much.
fn judge(owned: &Owned) {
    if owned.is_ending() {
        return;
    }
    let held = || match owned.sandbox().uncharged_bytes(BOUND) {
        Ok(bytes) => bytes,
        Err(error) => {
            tracing::debug!(sandbox.id = %owned.id(), "look at the sockets of a sandbox: {error}");
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
        sandbox.id = %owned.id(),
        "ending a sandbox: its sockets hold {mib} MiB of the host's memory that no limit counts"
    );
    let message = format!(
        "the sandbox is ended: its sockets hold {mib} MiB of the host's memory beyond its limit, and {} MiB are allowed",
        BOUND / MIB
    );
    let fields = [
        ("event_type", "socket_memory".to_owned()),
        ("held_bytes", bytes.to_string()),
    ];
    owned.journal().host(Level::Error, &message, fields);
    // Its owner sees the end of the agent and does the rest.
    owned.sandbox().kill();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suspicion_follows_losses_from_the_calmest_moment() {
        let mut suspicion = Suspicion::default();
        let mut check = |mib: u64, want| assert_eq!(suspicion.is_raised_by(mib * MIB), want, "{mib}");
        check(1000, true);
        check(1060, false);
        check(1065, true);
        check(1100, false);
        check(500, false);
        check(560, false);
        check(565, true);
        check(565, false);
    }
}

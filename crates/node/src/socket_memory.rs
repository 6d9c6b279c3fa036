//! Ends sandboxes that hold memory of the host that no limit counts.
//!
//! The kernel charges a sandbox for nearly all memory that it holds, and stops it at its limit. What it does not charge
//! is held in sockets (see `runtime::sockets`), and can only be bounded by measuring it. Measuring every socket of
//! every sandbox all the time would cost too much, so the host as a whole is measured first: only when its kernel has taken
//! memory that no sandbox is charged for are the sandboxes measured, one by one. A sandbox that holds more than any
//! legitimate program does is ended. Measuring the host takes about 100 µs, and is done five times a second, or at once
//! when free memory shrinks or many files are opened: reading that takes some microseconds.
//!
//! A loss is invisible if the host frees as much at the same time. So a few sandboxes are measured each time in any case,
//! and each of them once per [`ROUND`]; and at those times, all that have many sockets.
//!
//! Some open files take a few hundred bytes that nobody is charged for (timers: 460, epoll instances: 260), and kernels may
//! have objects that nobody has thought of. When the host loses memory to objects and the sockets of no sandbox explain it,
//! the one that has made most of the new sockets and open files is ended, if it made very many, and the log names how many.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::log::Level;
use runtime::driver::Objects;
use runtime::sockets::{NETLINK_SOCKETS_MAX, OPEN_FILES_MAX, Uncharged};
use runtime::usage::HostPulse;

use crate::handle::SandboxHandle;
use crate::shared::Shared;
use crate::work::guarded;

/// Interval between two looks at the pulse of the host, while there are sandboxes. Two cores take 1 GB in a second by making
/// netlink sockets, and fill sockets at about 400 MB/s.
const TICK: Duration = Duration::from_millis(10);
/// Longest interval between two measurements of the host.
const PAUSE: Duration = Duration::from_millis(200);
/// By how much free memory must have shrunk since the last measurement for the next one to be due at once, in bytes, or by
/// how much the number of open files of the host must have grown.
const SHRUNK: u64 = 8 << 20;
const OPENED: u64 = 2048;
/// Files opened since then that show that a program opens them as fast as it can.
const FLOOD: u64 = 4096;
/// Loss of memory on the host from which on the sandboxes are measured, in bytes.
const LOSS: u64 = 16 << 20;
/// Uncharged memory of the kernel that comes with each sandbox, in bytes: its namespaces and mounts.
const OF_EACH: u64 = 1 << 20;
/// Pauses after measuring all sandboxes, and after counting their objects, as multiples of the time that it took. The first
/// is for a host that goes on losing memory, or on which files are opened faster than ordinary programs do.
const REST: u32 = 3;
const REST_FROM_COUNTING: u32 = 20;
/// The longest pause after a measurement: what is not seen meanwhile is a loss.
const REST_MAX: Duration = Duration::from_millis(250);
/// Sockets and open files of a sandbox from which on it is measured when the host must be measured at once.
const MANY: u64 = 4096;
/// What a sandbox may hold in its sockets beyond what it is charged for. Legitimate programs stay far below: a netlink
/// socket or an error queue has a few kilobytes for microseconds.
const BOUND: u64 = 48 << 20;
/// The bound behind timers and epoll instances: 131,072 of them.
const FILES_BOUND: u64 = 32 << 20;
/// How long a sandbox must stay above the bound: the counters behind the sum are not read at the same time.
const CONFIRM: Duration = Duration::from_millis(5);
/// Number of measurements of the host in which each sandbox is measured once: 10 s.
const ROUND: usize = 50;
/// Losses of memory to objects that no sandbox explains, for which a sandbox is held responsible: within this time, or
/// since it was lowest; so many bytes; and so many objects that a sandbox must have made meanwhile. The last rule is for
/// what is done slowly.
const LOSSES: [Loss; 2] = [
    Loss {
        within: Some(MINUTE),
        bytes: 256 << 20,
        made: 4096,
    },
    Loss {
        within: None,
        bytes: 512 << 20,
        made: 131_072,
    },
];
const MINUTE: Duration = Duration::from_secs(60);
const MIB: u64 = 1 << 20;

/// Measures until the platform stops, on a thread of its own, so that queued work in this process cannot delay it.
///
/// # Errors
/// When no thread can be created.
pub(crate) fn watch(shared: &Arc<Shared>) -> std::io::Result<()> {
    // Not held between two measurements: this thread must not keep a node alive that is dropped without being released.
    let shared = Arc::downgrade(shared);
    let look = move || {
        let mut watch = Watch::new();
        while let Some(shared) = shared.upgrade().filter(|shared| !shared.stop.is_cancelled()) {
            let pause = guarded("memory-watch", || watch.look(&shared)).unwrap_or_else(|| {
                // It knows no lowest loss, so the next look measures all sandboxes.
                watch = Watch::new();
                TICK
            });
            drop(shared);
            std::thread::sleep(pause);
        }
    };
    std::thread::Builder::new()
        .name("memory-watch".to_owned())
        .spawn(look)?;
    Ok(())
}

/// What is kept between two measurements.
#[derive(Debug)]
struct Watch {
    suspicion: Suspicion,
    round: Round<SandboxId>,
    ledger: Ledger,
    /// When the host was last measured.
    measured: Option<Instant>,
    /// Most free memory and fewest open files since then: what one sandbox gives back as it ends must not hide what the next
    /// one takes.
    calmest: HostPulse,
    /// Not before then are all sandboxes measured again.
    rested: Instant,
    /// When their objects were last counted, and how long that took.
    counted: Option<(Instant, Duration)>,
}

impl Watch {
    fn new() -> Self {
        Self {
            suspicion: Suspicion::default(),
            round: Round::new(),
            ledger: Ledger::default(),
            measured: None,
            calmest: HostPulse::default(),
            rested: Instant::now(),
            counted: None,
        }
    }

    /// Measures what is due, and returns the time until the next look.
    fn look(&mut self, shared: &Shared) -> Duration {
        if shared.sandboxes.lock().is_empty() {
            // The first one can be there, and take memory, long before a measurement would be due.
            return TICK;
        }
        let now = Instant::now();
        let pulse = shared.driver.pulse();
        let opened = pulse.open_files.saturating_sub(self.calmest.open_files);
        let is_urgent = pulse.free_bytes.saturating_add(SHRUNK) < self.calmest.free_bytes || opened > OPENED;
        let is_regular = self.measured.is_none_or(|at| now.duration_since(at) >= PAUSE);
        if !is_urgent && !is_regular {
            self.calmest = HostPulse {
                free_bytes: self.calmest.free_bytes.max(pulse.free_bytes),
                open_files: self.calmest.open_files.min(pulse.open_files),
            };
            return TICK;
        }
        self.measured = Some(now);
        self.calmest = pulse;
        let handles: Vec<Arc<SandboxHandle>> = shared.sandboxes.lock().values().cloned().collect();
        let host = match shared.driver.uncharged() {
            Ok(host) => host,
            Err(error) => {
                tracing::warn!(
                    "cannot measure the memory in sockets of sandboxes, so none that takes too much is ended: {error}"
                );
                return PAUSE;
            }
        };
        let of_all = OF_EACH.saturating_mul(handles.len() as u64);
        if now >= self.rested && self.suspicion.is_raised_by(host.kernel_bytes.saturating_sub(of_all)) {
            let mut is_explained = false;
            for (handle, _) in by_objects(&handles) {
                is_explained |= check(handle);
            }
            let objects = host.object_bytes.saturating_sub(of_all);
            let entry = Entry {
                at: Instant::now(),
                bytes: objects,
                counts: counts(&handles),
            };
            if let Some((id, made, lost)) = self.ledger.enter(&entry, is_explained)
                && let Some(handle) = handles.iter().find(|handle| *handle.id() == id)
            {
                let why = format!(
                    "the host has lost {} MiB to objects of its kernel that no limit counts, while the sandbox made {} \
                     sockets and {} open files, most of all",
                    lost / MIB,
                    made.sockets,
                    made.files
                );
                end(handle, &why, lost);
            }
            self.rested = Instant::now() + (now.elapsed() * REST).min(REST_MAX);
        } else if is_urgent && self.may_count(opened) {
            for (handle, objects) in by_objects(&handles) {
                if objects < MANY {
                    break;
                }
                check(handle);
            }
            self.counted = Some((Instant::now(), now.elapsed()));
        }
        if is_regular {
            let due = self.round.next(handles.iter().map(|handle| handle.id().clone()));
            for handle in handles.iter().filter(|handle| due.contains(handle.id())) {
                check(handle);
            }
        }
        TICK
    }

    /// Whether the sandboxes' objects may be counted again, after so many files were opened.
    fn may_count(&self, opened: u64) -> bool {
        let rest = if opened > FLOOD { REST } else { REST_FROM_COUNTING };
        self.counted
            .is_none_or(|(at, took)| at.elapsed() >= (took * rest).min(REST_MAX))
    }
}

/// The sandboxes with the numbers of their objects, those with the most first: what takes memory fast has many.
fn by_objects(handles: &[Arc<SandboxHandle>]) -> Vec<(&SandboxHandle, u64)> {
    let count = |handle: &Arc<SandboxHandle>| handle.sandbox().objects().map_or(0, |objects| objects.sum());
    let mut counted: Vec<_> = handles.iter().map(|handle| (&**handle, count(handle))).collect();
    counted.sort_by_key(|(_, objects)| std::cmp::Reverse(*objects));
    counted
}

/// The objects of each sandbox.
fn counts(handles: &[Arc<SandboxHandle>]) -> HashMap<SandboxId, Objects> {
    let count = |handle: &Arc<SandboxHandle>| Some((handle.id().clone(), handle.sandbox().objects().ok()?));
    handles.iter().filter_map(count).collect()
}

/// A rule about losses.
#[derive(Debug, Clone, Copy)]
struct Loss {
    within: Option<Duration>,
    bytes: u64,
    made: u64,
}

/// What the host has lost to objects, and who has made some since: for each of [`LOSSES`] since another time.
#[derive(Debug, Default)]
struct Ledger([Option<Entry>; LOSSES.len()]);

/// Uncharged objects of the host at one time, and the objects of the sandboxes.
#[derive(Debug, Clone)]
struct Entry {
    at: Instant,
    bytes: u64,
    counts: HashMap<SandboxId, Objects>,
}

impl Ledger {
    /// Notes what there is now, and finds whoever must be responsible for a loss, with the objects that it has made and the
    /// bytes that are lost. A loss that is explained is forgotten.
    fn enter(&mut self, now: &Entry, is_explained: bool) -> Option<(SandboxId, Objects, u64)> {
        let mut found = None;
        for (loss, entry) in LOSSES.iter().zip(&mut self.0) {
            let is_over = |entry: &Entry| {
                let is_old = loss
                    .within
                    .is_some_and(|within| now.at.duration_since(entry.at) > within);
                is_explained || is_old || now.bytes < entry.bytes
            };
            let Some(before) = entry.as_ref().filter(|entry| !is_over(entry)) else {
                *entry = Some(now.clone());
                continue;
            };
            let lost = now.bytes - before.bytes;
            if lost >= loss.bytes && found.is_none() {
                found = maker(&before.counts, &now.counts, loss.made).map(|(id, made)| (id, made, lost));
            }
        }
        if found.is_some() {
            self.0 = [const { None }; LOSSES.len()];
        }
        found
    }
}

/// The sandbox that has made more objects than all others together, and at least `least`, with their numbers.
fn maker(
    before: &HashMap<SandboxId, Objects>,
    now: &HashMap<SandboxId, Objects>,
    least: u64,
) -> Option<(SandboxId, Objects)> {
    let made: Vec<(&SandboxId, Objects)> = now
        .iter()
        .map(|(id, now)| {
            let before = before.get(id).copied().unwrap_or_default();
            let made = Objects {
                sockets: now.sockets.saturating_sub(before.sockets),
                files: now.files.saturating_sub(before.files),
            };
            (id, made)
        })
        .collect();
    let all: u64 = made.iter().map(|(_, made)| made.sum()).sum();
    let (id, most) = made.into_iter().max_by_key(|(_, made)| made.sum())?;
    (most.sum() >= least && most.sum() > all / 2).then(|| (id.clone(), most))
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

/// Ends the sandbox if its sockets hold more than [`BOUND`], or there are too many of them. Returns whether it did.
fn check(handle: &SandboxHandle) -> bool {
    if handle.is_ending() {
        return false;
    }
    let held = || match handle.sandbox().uncharged(BOUND) {
        Ok(held) => held,
        Err(error) => {
            tracing::debug!(sandbox.id = %handle.id(), "measure the sockets of a sandbox: {error}");
            Uncharged::default()
        }
    };
    let Some(mut excess) = Excess::of(&held()) else {
        return false;
    };
    if !excess.is_certain {
        std::thread::sleep(CONFIRM);
        match Excess::of(&held()) {
            Some(again) => excess = again,
            None => return false,
        }
    }
    end(handle, &excess.why, excess.bytes);
    true
}

/// What a sandbox has too much of.
#[derive(Debug, PartialEq, Eq)]
struct Excess {
    why: String,
    bytes: u64,
    /// Whether it need not be measured again: it is a single number.
    is_certain: bool,
}

impl Excess {
    fn of(held: &Uncharged) -> Option<Self> {
        let Uncharged {
            bytes,
            files_bytes,
            netlink_sockets,
            open_files,
        } = *held;
        if netlink_sockets > NETLINK_SOCKETS_MAX {
            let why = format!(
                "its {netlink_sockets} netlink sockets hold {} MiB of the host's memory beyond its limit; \
                 {NETLINK_SOCKETS_MAX} are allowed",
                bytes / MIB
            );
            return Some(Self {
                why,
                bytes,
                is_certain: true,
            });
        }
        if open_files > OPEN_FILES_MAX {
            let why = format!(
                "its processes have {open_files} files open, each with some of the host's memory beyond its limit; \
                 {OPEN_FILES_MAX} are allowed"
            );
            return Some(Self {
                why,
                bytes,
                is_certain: false,
            });
        }
        let (what, bytes, bound) = if files_bytes > FILES_BOUND {
            ("timers and epoll instances", files_bytes, FILES_BOUND)
        } else {
            ("sockets", bytes, BOUND)
        };
        let why = format!(
            "its {what} hold {} MiB of the host's memory beyond its limit; {} MiB are allowed",
            bytes / MIB,
            bound / MIB
        );
        (bytes > bound).then_some(Self {
            why,
            bytes,
            is_certain: false,
        })
    }
}

/// Ends a sandbox, and says why in its log and in that of the platform.
fn end(handle: &SandboxHandle, why: &str, held_bytes: u64) {
    let fields = [
        ("event_type", "socket_memory".to_owned()),
        ("held_bytes", held_bytes.to_string()),
    ];
    let message = format!("the sandbox is terminated: {why}");
    handle.log().host(Level::Error, &message, fields);
    // Its supervisor sees the end of the agent and cleans up.
    handle.sandbox().kill();
    tracing::warn!(sandbox.id = %handle.id(), "terminating a sandbox: {why}");
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
    fn each_kind_has_its_bound() {
        let excess = |bytes, files_bytes, netlink_sockets, open_files| {
            Excess::of(&Uncharged {
                bytes,
                files_bytes,
                netlink_sockets,
                open_files,
            })
            .map(|excess| (excess.bytes, excess.is_certain))
        };
        assert_eq!(excess(BOUND, FILES_BOUND, NETLINK_SOCKETS_MAX, OPEN_FILES_MAX), None);
        assert_eq!(excess(BOUND + 1, 0, 0, 0), Some((BOUND + 1, false)));
        assert_eq!(excess(0, FILES_BOUND + 1, 0, 0), Some((FILES_BOUND + 1, false)));
        assert_eq!(excess(7, 0, NETLINK_SOCKETS_MAX + 1, 0), Some((7, true)));
        assert_eq!(excess(7, 0, 0, OPEN_FILES_MAX + 1), Some((7, false)));
    }

    #[test]
    fn the_maker_of_most_objects_is_responsible() {
        let id = |name: &str| -> SandboxId { format!("i0123456789abcdefgh{name}").parse().unwrap() };
        let counts = |all: &[(&str, u64, u64)]| -> HashMap<SandboxId, Objects> {
            let count = |(name, sockets, files): &(&str, u64, u64)| {
                let (sockets, files) = (*sockets, *files);
                (id(name), Objects { sockets, files })
            };
            all.iter().map(count).collect()
        };
        let before = counts(&[("a", 50_000, 9), ("b", 10, 10), ("c", 7, 7)]);
        let now = counts(&[("a", 50_100, 9), ("b", 2_010, 10), ("c", 7, 7)]);
        let made = Objects {
            sockets: 2000,
            files: 0,
        };
        assert_eq!(maker(&before, &now, 1000), Some((id("b"), made)));
        // One that is new counts from nothing on.
        let mut new = now;
        new.extend(counts(&[("d", 0, 5_000)]));
        assert_eq!(maker(&before, &new, 1000).unwrap().0, id("d"));
        // Too few, or two that made as many.
        assert_eq!(maker(&before, &before, 1000), None);
        assert_eq!(maker(&before, &counts(&[("b", 1_000, 10)]), 1000), None);
        assert_eq!(
            maker(&before, &counts(&[("b", 3_010, 10), ("c", 3_007, 7)]), 1000),
            None
        );
    }

    #[test]
    fn losses_are_charged_to_their_makers() {
        let id: SandboxId = "i0123456789abcdefgha".parse().unwrap();
        let begun = Instant::now();
        let entry = |seconds: u64, mib: u64, files: u64| Entry {
            at: begun + Duration::from_secs(seconds),
            bytes: mib * MIB,
            counts: HashMap::from([(id.clone(), Objects { sockets: 0, files })]),
        };
        let ledger = || {
            let mut ledger = Ledger::default();
            assert_eq!(ledger.enter(&entry(0, 1000, 10), false), None);
            ledger
        };
        let enter = |entries: &[(u64, u64, u64)], is_explained: bool| {
            let mut ledger = ledger();
            let found = entries
                .iter()
                .map(|&(at, mib, files)| ledger.enter(&entry(at, mib, files), is_explained));
            found.last().unwrap().map(|(_, _, lost)| lost / MIB)
        };
        assert_eq!(enter(&[(1, 1256, 4_106)], false), Some(256));
        assert_eq!(enter(&[(1, 1255, 4_106)], false), None);
        assert_eq!(enter(&[(1, 1256, 4_105)], false), None);
        assert_eq!(enter(&[(1, 1256, 4_106)], true), None);
        // Too slowly for the first rule.
        assert_eq!(enter(&[(61, 1511, 131_082)], false), None);
        assert_eq!(enter(&[(61, 1512, 131_081)], false), None);
        assert_eq!(enter(&[(61, 1512, 131_082)], false), Some(512));
        // What was given back before does not count, and what has come since does.
        assert_eq!(enter(&[(1, 700, 10), (2, 956, 4_106)], false), Some(256));
        assert_eq!(enter(&[(1, 700, 4_106), (2, 1_000, 4_106)], false), None);
    }

    #[test]
    fn suspicion_is_raised_by_losses_since_the_lowest_value() {
        let mut suspicion = Suspicion::default();
        let mut assert_raised = |mib: u64, want| assert_eq!(suspicion.is_raised_by(mib * MIB), want, "{mib}");
        assert_raised(1000, true);
        assert_raised(1016, false);
        assert_raised(1017, true);
        assert_raised(1030, false);
        assert_raised(500, false);
        assert_raised(516, false);
        assert_raised(517, true);
        assert_raised(517, false);
    }
}

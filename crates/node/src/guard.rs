//! Keeps sandboxes from filling the host's disk.
//!
//! Their disks are sparse and together larger than that of the host, so sandboxes must get "no space left" before the host runs
//! out: data that a sandbox's file system has accepted must always find its blocks, or other sandboxes lose data that
//! they have synced. The guard checks the disk repeatedly, more often as space runs low, and sets for the file system
//! of each sandbox an allowance: how much it may promise until the next check. The kernel enforces that bound on a
//! sandbox that writes faster than the guard checks.
//!
//! Headroom is the free space of the host, minus the floor that create requests leave free as well, minus what file
//! systems have promised and not written yet. A sandbox that has grown by more than the remaining headroom is stopped
//! from writing: the fastest growers first, the others only when hardly anything is left. Growth decays with a
//! half-life of one minute, so a stopped sandbox resumes after some time, or once there is headroom.
//!
//! A stopped sandbox can still take blocks that ext4 does not count (new inode tables). One that does so while the
//! floor itself shrinks is ended, and so is one whose disk cannot be limited on this host.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::log::Level;
use parking_lot::{Condvar, Mutex};
use runtime::growth::Disk;

use crate::handle::SandboxHandle;
use crate::shared::Shared;
use crate::work::guarded;

/// Longest pause between two checks.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Shortest pause between two checks, and its minimum as a multiple of the duration of a check: a twentieth of a core
/// at most.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_PER_CHECK: u32 = 20;
/// Upper estimate of what one core can write into page caches, in bytes per second.
const RATE: u64 = 2 << 30;
/// Minimum number of checks before writers at full rate have used up the headroom.
const CHECKS: u64 = 4;
/// Half-life of growth.
const HALF_LIFE: Duration = Duration::from_secs(60);
/// Growth above which a sandbox counts as growing, in bytes.
const GROWING: u64 = 4 << 20;
/// Smallest allowance, in bytes. Below it the sandbox is stopped.
const STEP: u64 = 256 << 10;
/// Minimum headroom for a stopped sandbox to resume, in bytes.
const RESUME: u64 = 64 << 20;
/// Minimum floor, in bytes: for blocks that ext4 does not count and for the database.
pub(crate) const FLOOR_MIN: u64 = 64 << 20;
/// How much the disk of a stopped sandbox may still grow, in bytes, before the sandbox is ended.
const UNCOUNTED: u64 = 32 << 20;
const MIB: u64 = 1 << 20;

/// The guard's thread. It has a thread of its own so that queued work in this process cannot delay it.
#[derive(Debug)]
pub(crate) struct Guard {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    /// Starts checking the sandboxes of `shared` and keeps `floor_bytes` free.
    pub(crate) fn start(shared: Arc<Shared>, floor_bytes: u64) -> std::io::Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("disk-guard".to_owned())
            .spawn(move || {
                let mut watch = Watch {
                    shared,
                    floor_bytes: floor_bytes.max(FLOOR_MIN),
                    cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64),
                    checked: Instant::now(),
                    growth: HashMap::new(),
                    shortest_pause: PAUSE_MIN,
                    has_logged_error: false,
                };
                let (stopped, wake) = &*stopping;
                let mut stopped = stopped.lock();
                while !*stopped {
                    let pause = parking_lot::MutexGuard::unlocked(&mut stopped, || {
                        // What it knows of the sandboxes stays: it says which of them are stopped.
                        guarded("disk-guard", || watch.check()).unwrap_or(PAUSE_MIN)
                    });
                    if !*stopped {
                        wake.wait_for(&mut stopped, pause);
                    }
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let (stopped, wake) = &*self.stop;
        *stopped.lock() = true;
        wake.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// State of a sandbox that is kept between checks.
#[derive(Debug)]
struct Growth {
    used: u64,
    /// Growth in bytes, with older growth counting less.
    grown: f64,
    /// While it is stopped: size of its disk when it was stopped, in bytes.
    stopped_at: Option<u64>,
    /// Whether its log already says that it reached its allowance between two checks.
    is_logged: bool,
    /// Whether limiting its disk failed.
    is_unlimited: bool,
    is_ended: bool,
}

/// The headroom of the host at one check.
#[derive(Debug, Clone, Copy)]
struct Headroom {
    /// In bytes; negative when the floor is touched.
    left: i64,
    /// Headroom below which all allowances together must fit into what is left.
    strict_below: u64,
    /// What may be promised beyond the headroom in the worst case, in bytes.
    slack: u64,
    /// Number of running sandboxes.
    sandboxes: u64,
    /// Number of them that are growing.
    growing: u64,
}

impl Headroom {
    /// What a sandbox that has grown by `grown` may promise until the next check.
    fn allowance(&self, grown: u64, is_stopped: bool) -> u64 {
        let Ok(left) = u64::try_from(self.left) else {
            return 0;
        };
        // Hysteresis: no switching back and forth at the border.
        if is_stopped && left < grown.saturating_mul(2).max(RESUME) {
            return 0;
        }
        // Each byte of growth takes one from the headroom: a single grower and the headroom are even at half the
        // difference, and several growers at this fraction of it.
        let mut own = left.saturating_sub(grown) / (1 + self.growing.max(1));
        if left < self.strict_below {
            own = own.min((left + self.slack) / self.sandboxes.max(1));
        }
        if own < STEP { 0 } else { own }
    }
}

struct Watch {
    shared: Arc<Shared>,
    floor_bytes: u64,
    cores: u64,
    checked: Instant,
    growth: HashMap<SandboxId, Growth>,
    /// Shortest pause, given how long the last check took.
    shortest_pause: Duration,
    /// Whether the failure to read the free space has been logged.
    has_logged_error: bool,
}

impl Watch {
    /// Checks once and returns the pause before the next check.
    fn check(&mut self) -> Duration {
        let began = Instant::now();
        let available = match self.shared.driver.storage().disk_available() {
            Ok(available) => available,
            Err(error) => {
                if !std::mem::replace(&mut self.has_logged_error, true) {
                    tracing::error!("cannot read the free space of the host's disk: {error}");
                }
                return PAUSE_MAX;
            }
        };
        self.has_logged_error = false;
        let disks = self.disks(began.duration_since(self.checked));
        self.checked = began;
        let owed: u64 = disks.iter().map(|(_, disk)| disk.owed_bytes()).sum();
        self.shared.disk.owed.store(owed, Ordering::Relaxed);
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let headroom = Headroom {
            left: signed(available) - signed(self.floor_bytes) - signed(owed),
            strict_below: rate_for(self.shortest_pause, self.cores).saturating_mul(CHECKS * CHECKS),
            slack: self.floor_bytes / 2,
            sandboxes: disks.len() as u64,
            growing: self
                .growth
                .values()
                .filter(|growth| growth.grown_bytes() > GROWING)
                .count() as u64,
        };
        let mut least = u64::MAX;
        for (handle, disk) in &disks {
            if let Some(allowance) = self.set_allowance(handle, disk, &headroom) {
                least = least.min(allowance);
            }
        }
        if available < self.floor_bytes / 2 || headroom.left <= 0 {
            self.end_one(&disks, available);
        }
        let stopped = self
            .growth
            .values()
            .filter(|growth| growth.stopped_at.is_some())
            .count();
        let stopped = u32::try_from(stopped).unwrap_or(u32::MAX);
        self.shared.disk.stopped.store(stopped, Ordering::Relaxed);
        self.shared.journal.disk_stops(self.shared.disk.stops());
        self.shortest_pause = PAUSE_MIN.max(began.elapsed() * PAUSE_PER_CHECK);
        // The next check must come before a sandbox can have used up its allowance.
        let until_used = Duration::from_millis(least / (RATE / 1000) / self.cores);
        pause(headroom.left, self.cores)
            .min(until_used)
            .max(self.shortest_pause)
    }

    /// Reads the disks of all running sandboxes and updates their growth.
    fn disks(&mut self, since: Duration) -> Vec<(Arc<SandboxHandle>, Disk)> {
        let handles: Vec<Arc<SandboxHandle>> = self.shared.sandboxes.lock().values().cloned().collect();
        let fade = 0.5_f64.powf(since.as_secs_f64() / HALF_LIFE.as_secs_f64());
        let mut growth = HashMap::with_capacity(handles.len());
        let mut disks = Vec::with_capacity(handles.len());
        for handle in handles {
            let Ok(disk) = handle.sandbox().disk() else { continue };
            if handle.is_ending() {
                continue;
            }
            let mut one = self.growth.remove(handle.id()).unwrap_or_else(|| Growth {
                // How much an adopted sandbox grew, and when, is unknown.
                used: if handle.is_adopted() { disk.used_bytes } else { 0 },
                grown: 0.0,
                stopped_at: None,
                is_logged: false,
                is_unlimited: false,
                is_ended: false,
            });
            // Freed space counts, too: a build that creates and removes files does not grow.
            #[expect(clippy::cast_precision_loss, reason = "bytes to within a thousand will do")]
            let grown = disk.used_bytes as f64 - one.used as f64;
            one.grown = (one.grown * fade + grown).max(0.0);
            one.used = disk.used_bytes;
            growth.insert(handle.id().clone(), one);
            disks.push((handle, disk));
        }
        self.growth = growth;
        disks
    }

    /// Sets the allowance of a sandbox until the next check, and returns it if it is less than the free space and more
    /// than zero.
    fn set_allowance(&mut self, handle: &Arc<SandboxHandle>, disk: &Disk, headroom: &Headroom) -> Option<u64> {
        let growth = self.growth.get_mut(handle.id())?;
        let allowance = if disk.is_held() {
            disk.free_bytes
        } else {
            headroom.allowance(growth.grown_bytes(), growth.stopped_at.is_some())
        };
        let bound = (1..disk.free_bytes).contains(&allowance).then_some(allowance);
        if !is_significant(disk, allowance) {
            return bound;
        }
        let outcome = handle
            .sandbox()
            .allow_disk(disk, (allowance < disk.free_bytes).then_some(allowance));
        match outcome {
            Ok(()) => {}
            // Its loop device was searched for just now; the next check is soon.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Some(0),
            Err(error) => {
                if !handle.is_ending() && !std::mem::replace(&mut growth.is_unlimited, true) {
                    tracing::error!(sandbox.id = %handle.id(), "cannot limit the disk of a sandbox: {error}");
                }
                return bound;
            }
        }
        growth.is_unlimited = false;
        // What it wrote since the check counts: it may have reached its allowance although there was headroom. Logged
        // once, to explain the failed write.
        if disk.is_limited()
            && allowance > 0
            && growth.stopped_at.is_none()
            && !growth.is_logged
            && handle
                .sandbox()
                .disk()
                .is_ok_and(|now| now.used_bytes + STEP >= disk.used_bytes + disk.allowed_bytes)
        {
            growth.is_logged = true;
            self.shared.disk.stops.fetch_add(1, Ordering::Relaxed);
            let grown_mb = growth.grown_bytes() / MIB;
            tracing::warn!(
                sandbox.id = %handle.id(), grown_mb, left_mb = headroom.left / (1 << 20),
                "host disk nearly full: the sandbox was briefly stopped from writing new data"
            );
            let message = "host disk nearly full: new data was briefly refused (no space left on device)";
            let fields = [
                ("event_type", "disk_stopped".to_owned()),
                ("grown_mb", grown_mb.to_string()),
            ];
            handle.log().host(Level::Warn, message, fields);
        }
        match (growth.stopped_at, allowance) {
            (None, 0) => {
                growth.stopped_at = Some(disk.held_bytes + disk.owed_bytes());
                self.shared.disk.stops.fetch_add(1, Ordering::Relaxed);
                let (grown_mb, left_mb) = (growth.grown_bytes() / MIB, headroom.left / (1 << 20));
                tracing::warn!(
                    sandbox.id = %handle.id(), grown_mb, left_mb,
                    "host disk nearly full: the sandbox may not write new data"
                );
                let message = "host disk nearly full: new data is refused (no space left on device) until space \
                               is free again; reading, overwriting and deleting still work";
                let fields = [
                    ("event_type", "disk_stopped".to_owned()),
                    ("grown_mb", grown_mb.to_string()),
                ];
                handle.log().host(Level::Warn, message, fields);
            }
            (Some(_), 1..) => {
                growth.stopped_at = None;
                tracing::info!(sandbox.id = %handle.id(), "host disk has free space: the sandbox may write again");
                let fields = [("event_type", "disk_resumed".to_owned())];
                let message = "host disk has free space again: new data is accepted";
                handle.log().host(Level::Info, message, fields);
            }
            _ => {}
        }
        bound
    }

    /// Ends the sandbox that has taken the most space among those that cannot be stopped.
    fn end_one(&mut self, disks: &[(Arc<SandboxHandle>, Disk)], available: u64) {
        let is_floor_used = available < self.floor_bytes / 2;
        let taken = |growth: &Growth, disk: &Disk| -> u64 {
            if growth.is_ended {
                return 0;
            }
            if growth.is_unlimited {
                return growth.grown_bytes();
            }
            let beyond = growth.stopped_at.map_or(0, |at| disk.held_bytes.saturating_sub(at));
            if is_floor_used { beyond } else { 0 }
        };
        let worst = disks
            .iter()
            .filter_map(|(handle, disk)| Some((handle, taken(self.growth.get(handle.id())?, disk))))
            .max_by_key(|(_, taken)| *taken)
            .filter(|(_, taken)| *taken > UNCOUNTED);
        let Some((handle, taken)) = worst else { return };
        if let Some(growth) = self.growth.get_mut(handle.id()) {
            growth.is_ended = true;
        }
        self.shared.disk.ends.fetch_add(1, Ordering::Relaxed);
        let taken_mb = taken / MIB;
        tracing::error!(
            sandbox.id = %handle.id(), taken_mb, available_mb = available / MIB,
            "host disk nearly full: terminating a sandbox that kept consuming space"
        );
        let message = "host disk nearly full: the sandbox is terminated because it kept consuming space";
        let fields = [
            ("event_type", "disk_ended".to_owned()),
            ("taken_mb", taken_mb.to_string()),
        ];
        handle.log().host(Level::Error, message, fields);
        handle.sandbox().kill();
    }
}

impl Growth {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is never below zero, and bytes of a disk fit"
    )]
    fn grown_bytes(&self) -> u64 {
        self.grown as u64
    }
}

/// Whether an allowance differs enough from the current one: setting it is a system call.
fn is_significant(disk: &Disk, allowance: u64) -> bool {
    if allowance >= disk.free_bytes {
        return disk.is_limited();
    }
    let now = disk.allowed_bytes;
    (allowance == 0 && now > 0) || now.abs_diff(allowance) > allowance / 8
}

/// What all cores can write in this time, in bytes.
fn rate_for(time: Duration, cores: u64) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    (RATE / 1000).saturating_mul(cores).saturating_mul(millis)
}

/// How long the headroom lasts in the worst case, divided by the checks that must happen in that time.
fn pause(left: i64, cores: u64) -> Duration {
    let left = u64::try_from(left).unwrap_or(0);
    let millis = left / (RATE / 1000).saturating_mul(cores).saturating_mul(CHECKS).max(1);
    Duration::from_millis(millis).clamp(PAUSE_MIN, PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn headroom(left: i64, sandboxes: u64) -> Headroom {
        Headroom {
            left,
            strict_below: GIB / 2,
            slack: GIB / 2,
            sandboxes,
            growing: 1,
        }
    }

    #[test]
    fn a_growing_sandbox_is_stopped_when_it_has_taken_half() {
        let mut left = 8 * GIB.cast_signed();
        let mut grown = 0;
        loop {
            let allowance = headroom(left, 2).allowance(grown, false);
            if allowance == 0 {
                break;
            }
            grown += allowance;
            left -= allowance.cast_signed();
        }
        let half = 4 * GIB;
        assert!(grown.abs_diff(half) < 2 * MIB, "{grown}");
        // Another sandbox that has not grown may go on.
        assert!(headroom(left, 2).allowance(0, false) > GIB);
    }

    #[test]
    fn many_growing_sandboxes_leave_a_share_to_the_others() {
        let growers = 16;
        let mut left = 8 * GIB.cast_signed();
        let mut grown = vec![0; growers];
        for _ in 0..1000 {
            let now = Headroom {
                growing: grown.iter().filter(|grown| **grown > GROWING).count() as u64,
                ..headroom(left, 20)
            };
            for one in &mut grown {
                // As fast as two cores write between two checks at this headroom, in the first of which none has grown
                // yet.
                let allowance = now.allowance(*one, false).min(GIB / 8);
                *one += allowance;
                left -= allowance.cast_signed();
            }
        }
        // As with one grower: each has about as much as is left.
        assert!(left > (8 * GIB / 18).cast_signed(), "{left}");
        assert!(headroom(left, 20).allowance(0, false) > 0);
    }

    #[test]
    fn allowances_together_never_exceed_a_small_headroom_and_its_slack() {
        for sandboxes in [1, 3, 50, 1000] {
            for left in [0, MIB, 100 * MIB, GIB / 2 - 1] {
                let each = headroom(left.cast_signed(), sandboxes).allowance(0, false);
                assert!(each * sandboxes <= left + GIB / 2, "{sandboxes} {left} {each}");
            }
        }
    }

    #[test]
    fn the_floor_is_never_given_out() {
        for left in [-1, 0, i64::MIN] {
            assert_eq!(headroom(left, 1).allowance(0, false), 0);
        }
    }

    #[test]
    fn a_stopped_sandbox_resumes_with_headroom_of_twice_its_growth() {
        let grown = GIB;
        assert_eq!(headroom(GIB.cast_signed(), 1).allowance(grown, true), 0);
        assert_eq!(headroom(2 * GIB.cast_signed() - 1, 1).allowance(grown, true), 0);
        assert!(headroom(2 * GIB.cast_signed(), 1).allowance(grown, true) > 0);
        assert_eq!(headroom(RESUME.cast_signed() - 1, 1).allowance(0, true), 0);
    }

    #[test]
    fn checks_are_more_frequent_as_the_headroom_shrinks() {
        assert_eq!(pause(1 << 40, 2), PAUSE_MAX);
        assert_eq!(pause(0, 2), PAUSE_MIN);
        assert_eq!(pause(-1, 64), PAUSE_MIN);
        let near = pause(2 << 30, 2);
        assert!(near < PAUSE_MAX && near > PAUSE_MIN, "{near:?}");
    }
}

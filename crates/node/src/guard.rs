//! Keeps sandboxes from filling the host's disk.
//!
//! Their images are sparse and together larger than the disk, so somebody has to be told "no space left" before the
//! host has none: data that a sandbox's file system has accepted must always find its blocks, or neighbours lose what
//! they have synced. The guard looks at the disk again and again, the more often the less is left, and tells the file
//! system of each sandbox how much it may promise until the next look. A sandbox that writes faster than anybody looks
//! meets that bound in the kernel.
//!
//! Room is what the host has left, without the floor that creates leave free as well, and without what file systems
//! have promised and not yet written. Whoever grew by more than the room that is left is stopped: the fastest growers
//! first, and the others only when hardly anything is left. Growth is forgotten with a half-life of a minute, so that
//! a stopped sandbox goes on once it has waited, or once there is room.
//!
//! A stopped sandbox can still take blocks that ext4 does not count (new inode tables). One that does so while the
//! floor itself melts is ended, and so is one that cannot be stopped on this host.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::log::Level;
use parking_lot::{Condvar, Mutex};
use protocol::node::DiskStops;
use runtime::growth::Disk;

use crate::Shared;
use crate::owner::Owned;

/// Most time between two looks.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Least time between two looks, and least multiple of what a look takes: a twentieth of a core at most.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_PER_LOOK: u32 = 20;
/// What one core can write into page caches, in bytes per second, generously.
const RATE: u64 = 2 << 30;
/// How many looks there are at least before writers at full rate have used up all room.
const LOOKS: u64 = 4;
/// Time in which growth counts half.
const HALF_LIFE: Duration = Duration::from_secs(60);
/// Who has grown by more counts among those that grow.
const GROWING: u64 = 4 << 20;
/// Less is not worth an allowance: the sandbox is stopped.
const STEP: u64 = 256 << 10;
/// Room that there must be before a stopped sandbox goes on.
const RESUME: u64 = 64 << 20;
/// What is kept free in any case, for the blocks that ext4 does not count and for the database.
const FLOOR_MIN: u64 = 64 << 20;
/// How much the image of a stopped sandbox may still grow before the sandbox is ended.
const UNCOUNTED: u64 = 32 << 20;
const MIB: u64 = 1 << 20;

/// What the guard tells others.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    stopped: AtomicU32,
    stops: AtomicU64,
    ends: AtomicU64,
    /// What file systems have promised and not yet written, in bytes.
    owed: AtomicU64,
}

impl Counts {
    pub(crate) fn stops(&self) -> DiskStops {
        DiskStops {
            stopped: self.stopped.load(Ordering::Relaxed),
            stops: self.stops.load(Ordering::Relaxed),
            ends: self.ends.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn owed(&self) -> u64 {
        self.owed.load(Ordering::Relaxed)
    }
}

/// The guard's thread. It is a thread of its own, so that nothing that waits in a queue of this process keeps it from
/// looking.
#[derive(Debug)]
pub(crate) struct Guard {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    /// Begins to look at the sandboxes of `shared`, and leaves `floor_bytes` free.
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
                    looked: Instant::now(),
                    known: HashMap::new(),
                    tightest: PAUSE_MIN,
                    is_blind: false,
                };
                let (stopped, wake) = &*stopping;
                let mut stopped = stopped.lock();
                while !*stopped {
                    let pause = parking_lot::MutexGuard::unlocked(&mut stopped, || watch.look());
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

/// What is known of a sandbox from look to look.
#[derive(Debug)]
struct Known {
    used: u64,
    /// What it has grown by, in bytes; the older the growth, the less it counts.
    grown: f64,
    /// While it is stopped: what its image may take at most.
    stopped_at: Option<u64>,
    /// Its log says that it met its bound between two looks.
    is_told: bool,
    /// The host cannot hold its disk.
    is_loose: bool,
    is_ended: bool,
}

/// The room of the host at one look.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// Room in bytes; below zero when the floor is touched.
    left: i64,
    /// Room below which all allowances together must fit into what is left.
    strict_below: u64,
    /// What may be promised beyond the room in the worst case.
    slack: u64,
    /// Sandboxes that may grow.
    sandboxes: u64,
    /// Those of them that do.
    growing: u64,
}

impl Room {
    /// What a sandbox that has grown by `grown` may promise until the next look.
    fn allowance(&self, grown: u64, is_stopped: bool) -> u64 {
        let Ok(left) = u64::try_from(self.left) else {
            return 0;
        };
        // Not back and forth at the border.
        if is_stopped && left < grown.saturating_mul(2).max(RESUME) {
            return 0;
        }
        // Each byte of growth takes one from the room: alone, both are even at half the difference, and all that grow
        // together at this part of it.
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
    looked: Instant,
    known: HashMap<SandboxId, Known>,
    /// The shortest pause that looks as dear as the last one allow.
    tightest: Duration,
    /// The host does not say what it has left, which was logged.
    is_blind: bool,
}

impl Watch {
    /// Looks once, and says when to look again.
    fn look(&mut self) -> Duration {
        let began = Instant::now();
        let available = match self.shared.driver.disk_available() {
            Ok(available) => available,
            Err(error) => {
                if !std::mem::replace(&mut self.is_blind, true) {
                    tracing::error!("cannot read the free space of the host disk: {error}");
                }
                return PAUSE_MAX;
            }
        };
        self.is_blind = false;
        let disks = self.disks(began.duration_since(self.looked));
        self.looked = began;
        let owed: u64 = disks.iter().map(|(_, disk)| disk.owed_bytes()).sum();
        self.shared.disk.owed.store(owed, Ordering::Relaxed);
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let room = Room {
            left: signed(available) - signed(self.floor_bytes) - signed(owed),
            strict_below: rate_for(self.tightest, self.cores).saturating_mul(LOOKS * LOOKS),
            slack: self.floor_bytes / 2,
            sandboxes: disks.len() as u64,
            growing: self
                .known
                .values()
                .filter(|known| known.grown_bytes() > GROWING)
                .count() as u64,
        };
        let mut least = u64::MAX;
        for (owned, disk) in &disks {
            if let Some(allowance) = self.hold(owned, disk, &room) {
                least = least.min(allowance);
            }
        }
        if available < self.floor_bytes / 2 || room.left <= 0 {
            self.end_one(&disks, available);
        }
        let stopped = self.known.values().filter(|known| known.stopped_at.is_some()).count();
        let stopped = u32::try_from(stopped).unwrap_or(u32::MAX);
        self.shared.disk.stopped.store(stopped, Ordering::Relaxed);
        self.shared.reports.disk_stops(self.shared.disk.stops());
        self.tightest = PAUSE_MIN.max(began.elapsed() * PAUSE_PER_LOOK);
        // A sandbox that may grow is to be looked at again before it has used up what it may.
        let until_used = Duration::from_millis(least / (RATE / 1000) / self.cores);
        pause(room.left, self.cores).min(until_used).max(self.tightest)
    }

    /// The disks of all sandboxes that run, with what they have grown by.
    fn disks(&mut self, since: Duration) -> Vec<(Arc<Owned>, Disk)> {
        let owned: Vec<Arc<Owned>> = self.shared.sandboxes.lock().values().cloned().collect();
        let fade = 0.5_f64.powf(since.as_secs_f64() / HALF_LIFE.as_secs_f64());
        let mut known = HashMap::with_capacity(owned.len());
        let mut disks = Vec::with_capacity(owned.len());
        for owned in owned {
            let Ok(disk) = owned.sandbox().disk() else { continue };
            if owned.is_ending() {
                continue;
            }
            let mut one = self.known.remove(owned.id()).unwrap_or_else(|| Known {
                // What an adopted sandbox has grown by, and when, nobody knows any more.
                used: if owned.is_adopted() { disk.used_bytes } else { 0 },
                grown: 0.0,
                stopped_at: None,
                is_told: false,
                is_loose: false,
                is_ended: false,
            });
            // What it gave back counts, too: a build that makes and removes files does not grow.
            #[expect(clippy::cast_precision_loss, reason = "bytes to within a thousand will do")]
            let grown = disk.used_bytes as f64 - one.used as f64;
            one.grown = (one.grown * fade + grown).max(0.0);
            one.used = disk.used_bytes;
            known.insert(owned.id().clone(), one);
            disks.push((owned, disk));
        }
        self.known = known;
        disks
    }

    /// Tells the file system of a sandbox how much it may promise until the next look, and returns that if it is less
    /// than there is and more than nothing.
    fn hold(&mut self, owned: &Arc<Owned>, disk: &Disk, room: &Room) -> Option<u64> {
        let known = self.known.get_mut(owned.id())?;
        let allowance = if disk.is_held() {
            disk.free_bytes
        } else {
            room.allowance(known.grown_bytes(), known.stopped_at.is_some())
        };
        let bound = (1..disk.free_bytes).contains(&allowance).then_some(allowance);
        if !is_worth_telling(disk, allowance) {
            return bound;
        }
        let told = owned
            .sandbox()
            .allow_disk(disk, (allowance < disk.free_bytes).then_some(allowance));
        match told {
            Ok(()) => {}
            // It was looked for a moment ago; the next look is soon.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Some(0),
            Err(error) => {
                if !owned.is_ending() && !std::mem::replace(&mut known.is_loose, true) {
                    tracing::error!(sandbox.id = %owned.id(), "cannot limit the disk of a sandbox: {error}");
                }
                return bound;
            }
        }
        known.is_loose = false;
        // What it wrote in between counts: between the look and now it may have come to its bound, although there was
        // room. Told once, for whoever wonders why.
        if disk.is_limited()
            && allowance > 0
            && known.stopped_at.is_none()
            && !known.is_told
            && owned
                .sandbox()
                .disk()
                .is_ok_and(|now| now.used_bytes + STEP >= disk.used_bytes + disk.allowed_bytes)
        {
            known.is_told = true;
            self.shared.disk.stops.fetch_add(1, Ordering::Relaxed);
            let grown_mb = known.grown_bytes() / MIB;
            tracing::warn!(
                sandbox.id = %owned.id(), grown_mb, left_mb = room.left / (1 << 20),
                "host disk nearly full: the sandbox was briefly stopped from writing new data"
            );
            let message = "host disk nearly full: new data was briefly refused (no space left on device)";
            let fields = [
                ("event_type", "disk_stopped".to_owned()),
                ("grown_mb", grown_mb.to_string()),
            ];
            owned.journal().host(Level::Warn, message, fields);
        }
        match (known.stopped_at, allowance) {
            (None, 0) => {
                known.stopped_at = Some(disk.held_bytes + disk.owed_bytes());
                self.shared.disk.stops.fetch_add(1, Ordering::Relaxed);
                let (grown_mb, left_mb) = (known.grown_bytes() / MIB, room.left / (1 << 20));
                tracing::warn!(
                    sandbox.id = %owned.id(), grown_mb, left_mb,
                    "host disk nearly full: the sandbox may not write new data"
                );
                let message = "host disk nearly full: new data is refused (no space left on device) until there \
                               is room; reading, overwriting and deleting go on";
                let fields = [
                    ("event_type", "disk_stopped".to_owned()),
                    ("grown_mb", grown_mb.to_string()),
                ];
                owned.journal().host(Level::Warn, message, fields);
            }
            (Some(_), 1..) => {
                known.stopped_at = None;
                tracing::info!(sandbox.id = %owned.id(), "host disk has free space: the sandbox may write again");
                let fields = [("event_type", "disk_resumed".to_owned())];
                let message = "host disk has free space again: new data is accepted";
                owned.journal().host(Level::Info, message, fields);
            }
            _ => {}
        }
        bound
    }

    /// Ends the sandbox that does most harm among those that are beyond being stopped.
    fn end_one(&mut self, disks: &[(Arc<Owned>, Disk)], available: u64) {
        let floor_melts = available < self.floor_bytes / 2;
        let harm = |known: &Known, disk: &Disk| -> u64 {
            if known.is_ended {
                return 0;
            }
            if known.is_loose {
                return known.grown_bytes();
            }
            let beyond = known.stopped_at.map_or(0, |at| disk.held_bytes.saturating_sub(at));
            if floor_melts { beyond } else { 0 }
        };
        let worst = disks
            .iter()
            .filter_map(|(owned, disk)| Some((owned, harm(self.known.get(owned.id())?, disk))))
            .max_by_key(|(_, harm)| *harm)
            .filter(|(_, harm)| *harm > UNCOUNTED);
        let Some((owned, harm)) = worst else { return };
        if let Some(known) = self.known.get_mut(owned.id()) {
            known.is_ended = true;
        }
        self.shared.disk.ends.fetch_add(1, Ordering::Relaxed);
        let taken_mb = harm / MIB;
        tracing::error!(
            sandbox.id = %owned.id(), taken_mb, available_mb = available / MIB,
            "host disk nearly full: terminating a sandbox that kept consuming space"
        );
        let message = "host disk nearly full: the sandbox is terminated because it kept consuming space";
        let fields = [
            ("event_type", "disk_ended".to_owned()),
            ("taken_mb", taken_mb.to_string()),
        ];
        owned.journal().host(Level::Error, message, fields);
        owned.sandbox().kill();
    }
}

impl Known {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is never below zero, and bytes of a disk fit"
    )]
    fn grown_bytes(&self) -> u64 {
        self.grown as u64
    }
}

/// Whether an allowance differs from the one in force by as much as matters: each telling is a system call.
fn is_worth_telling(disk: &Disk, allowance: u64) -> bool {
    if allowance >= disk.free_bytes {
        return disk.is_limited();
    }
    let now = disk.allowed_bytes;
    (allowance == 0 && now > 0) || now.abs_diff(allowance) > allowance / 8
}

/// What all cores can write in that time, in bytes.
fn rate_for(time: Duration, cores: u64) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    (RATE / 1000).saturating_mul(cores).saturating_mul(millis)
}

/// How long the room lasts at worst, over the looks that there should be in that time.
fn pause(left: i64, cores: u64) -> Duration {
    let left = u64::try_from(left).unwrap_or(0);
    let millis = left / (RATE / 1000).saturating_mul(cores).saturating_mul(LOOKS).max(1);
    Duration::from_millis(millis).clamp(PAUSE_MIN, PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn room(left: i64, sandboxes: u64) -> Room {
        Room {
            left,
            strict_below: GIB / 2,
            slack: GIB / 2,
            sandboxes,
            growing: 1,
        }
    }

    #[test]
    fn a_grower_is_stopped_when_it_has_taken_as_much_as_it_leaves() {
        let mut left = 8 * GIB.cast_signed();
        let mut grown = 0;
        loop {
            let allowance = room(left, 2).allowance(grown, false);
            if allowance == 0 {
                break;
            }
            grown += allowance;
            left -= allowance.cast_signed();
        }
        let half = 4 * GIB;
        assert!(grown.abs_diff(half) < 2 * MIB, "{grown}");
        // Its neighbour has not grown, and goes on.
        assert!(room(left, 2).allowance(0, false) > GIB);
    }

    #[test]
    fn many_growers_at_once_leave_a_share_to_the_others() {
        let hogs = 16;
        let mut left = 8 * GIB.cast_signed();
        let mut grown = vec![0; hogs];
        for _ in 0..1000 {
            let now = Room {
                growing: grown.iter().filter(|grown| **grown > GROWING).count() as u64,
                ..room(left, 20)
            };
            for one in &mut grown {
                // As fast as two cores write between two looks at this room, in the first of which nobody grew yet.
                let allowance = now.allowance(*one, false).min(GIB / 8);
                *one += allowance;
                left -= allowance.cast_signed();
            }
        }
        // As between one grower and the room: each has about as much as is left.
        assert!(left > (8 * GIB / 18).cast_signed(), "{left}");
        assert!(room(left, 20).allowance(0, false) > 0);
    }

    #[test]
    fn allowances_together_never_exceed_a_small_room_and_its_slack() {
        for sandboxes in [1, 3, 50, 1000] {
            for left in [0, MIB, 100 * MIB, GIB / 2 - 1] {
                let each = room(left.cast_signed(), sandboxes).allowance(0, false);
                assert!(each * sandboxes <= left + GIB / 2, "{sandboxes} {left} {each}");
            }
        }
    }

    #[test]
    fn nobody_grows_into_the_floor() {
        for left in [-1, 0, i64::MIN] {
            assert_eq!(room(left, 1).allowance(0, false), 0);
        }
    }

    #[test]
    fn a_stopped_sandbox_goes_on_once_there_is_twice_what_it_grew_by() {
        let grown = GIB;
        assert_eq!(room(GIB.cast_signed(), 1).allowance(grown, true), 0);
        assert_eq!(room(2 * GIB.cast_signed() - 1, 1).allowance(grown, true), 0);
        assert!(room(2 * GIB.cast_signed(), 1).allowance(grown, true) > 0);
        assert_eq!(room(RESUME.cast_signed() - 1, 1).allowance(0, true), 0);
    }

    #[test]
    fn looks_come_closer_as_the_room_shrinks() {
        assert_eq!(pause(1 << 40, 2), PAUSE_MAX);
        assert_eq!(pause(0, 2), PAUSE_MIN);
        assert_eq!(pause(-1, 64), PAUSE_MIN);
        let near = pause(2 << 30, 2);
        assert!(near < PAUSE_MAX && near > PAUSE_MIN, "{near:?}");
    }
}

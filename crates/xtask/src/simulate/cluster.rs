//! The fake nodes of a simulation: what they may have, what they have, and the permits of the product in between.

use std::collections::{HashMap, HashSet};

use model::capacity::{Bounds, HostCapacity, NoCapacity, PermitRequest, Permits};
use model::id::{LayerId, NodeId, SandboxId};
use model::placement::Report;

/// Bytes of a MiB.
const MIB: u64 = 1 << 20;
/// Memory that stays free on each host, in MiB.
const MEMORY_FLOOR_MB: u32 = 1024;
/// Disk space that stays free on each host, in MiB.
const DISK_FLOOR_MB: u32 = 1024;
/// What a sandbox preallocates on hosts that do so, in MiB.
const DISK_MB: u32 = 1024;
/// Layers of which each node has some.
const LAYERS: u8 = 40;

/// Numbers that look random: splitmix64, which is short and the same everywhere.
#[derive(Debug, Clone)]
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`, or 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    /// An index below `end`, or 0.
    pub(super) fn index(&mut self, end: usize) -> usize {
        let end = u64::try_from(end).unwrap_or(u64::MAX);
        usize::try_from(self.below(end)).unwrap_or(0)
    }

    /// A time between two, in microseconds.
    pub(super) fn between(&mut self, from_us: i64, to_us: i64) -> i64 {
        let width = u64::try_from(to_us - from_us).unwrap_or(0);
        from_us + i64::try_from(self.below(width)).unwrap_or(0)
    }

    /// Whether something happens that happens as often.
    pub(super) fn happens(&mut self, percent: u32) -> bool {
        self.below(100) < percent.into()
    }
}

/// How often a node reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Habit {
    /// About once per second.
    Often,
    /// Every half minute.
    Rarely,
    /// When it has started, and never again.
    Once,
}

/// A fake node.
#[derive(Debug)]
pub(super) struct FakeHost {
    pub(super) id: NodeId,
    pub(super) habit: Habit,
    bounds: Bounds,
    memory_bytes: u64,
    disk_bytes: u64,
    cores: u32,
    layers: HashSet<LayerId>,
    permits: Permits,
    /// The sandboxes with processes, and the memory that each takes.
    present: HashMap<SandboxId, u64>,
    memory_used: u64,
    /// Whether it has ever had more than it may.
    pub(super) is_over: bool,
}

impl FakeHost {
    /// A host that has `places`. In one of four, its disk is what limits them.
    pub(super) fn new(n: usize, places: u32, habit: Habit, chance: &mut Chance) -> Self {
        let by_disk = chance.happens(25);
        let disk_mb = u64::from(DISK_FLOOR_MB) + u64::from(places) * u64::from(DISK_MB);
        Self {
            id: format!("00000000-0000-4000-8000-{n:012x}").parse().expect("a UUID"),
            habit,
            bounds: Bounds {
                memory_floor_mb: MEMORY_FLOOR_MB,
                disk_floor_mb: DISK_FLOOR_MB,
                disk_per_sandbox_mb: if by_disk { DISK_MB } else { 0 },
                max_sandboxes: (!by_disk).then_some(places),
            },
            // A quarter more than sandboxes take on average, and what stays free.
            memory_bytes: (u64::from(MEMORY_FLOOR_MB) + 1024 + u64::from(places) * 320) * MIB,
            disk_bytes: disk_mb * MIB,
            cores: (places / 16).max(2),
            layers: (0..LAYERS).filter(|_| chance.happens(60)).map(layer).collect(),
            permits: Permits::default(),
            present: HashMap::new(),
            memory_used: 0,
            is_over: false,
        }
    }

    pub(super) fn places(&self) -> u64 {
        match self.bounds.max_sandboxes {
            Some(max) => max.into(),
            None => (self.disk_bytes / MIB).saturating_sub(DISK_FLOOR_MB.into()) / u64::from(DISK_MB),
        }
    }

    /// What the host has left. A sandbox takes its memory and its disk with its first process.
    fn left(&self) -> HostCapacity {
        let disks = u64::try_from(self.present.len()).unwrap_or(u64::MAX);
        let each = u64::from(self.bounds.disk_per_sandbox_mb) * MIB;
        HostCapacity {
            memory_available_bytes: self.memory_bytes.saturating_sub(self.memory_used),
            disk_available_bytes: self.disk_bytes.saturating_sub(disks * each),
        }
    }

    /// What a node does with a request for a permit.
    pub(super) fn permit(&mut self, request: &PermitRequest, now_us: i64) -> Result<(), NoCapacity> {
        self.permits.take(request, self.bounds, now_us, &self.present)?;
        if !self.permits.is_fresh(now_us) {
            self.permits.begin_reading();
            self.permits.end_reading(now_us, Some(self.left()));
        }
        self.permits.judge(request, self.bounds)
    }

    /// Begins a start.
    pub(super) fn begin(&mut self, id: &SandboxId, now_us: i64) -> Result<(), NoCapacity> {
        self.permits.begin(id, self.bounds, now_us, &self.present)
    }

    /// Ends a start, with a sandbox that takes as much memory or without one.
    pub(super) fn settle(&mut self, id: &SandboxId, memory_bytes: Option<u64>, now_us: i64) {
        if let Some(bytes) = memory_bytes {
            self.present.insert(id.clone(), bytes);
            self.memory_used += bytes;
            let count = u64::try_from(self.present.len()).unwrap_or(u64::MAX);
            self.is_over |= count > self.places() || self.memory_used > self.memory_bytes;
        }
        self.permits.settle(id, now_us, &self.present);
    }

    pub(super) fn give_back(&mut self, id: &SandboxId, number: u64) {
        self.permits.give_back(id, number);
    }

    /// Ends a sandbox.
    pub(super) fn end(&mut self, id: &SandboxId) {
        self.memory_used -= self.present.remove(id).unwrap_or(0);
    }

    /// Sandboxes and permits.
    pub(super) fn count(&mut self, now_us: i64) -> u64 {
        u64::try_from(self.permits.count(now_us, &self.present)).unwrap_or(u64::MAX)
    }

    pub(super) fn report(&mut self, now_us: i64) -> Report {
        let all = u32::try_from(self.permits.count(now_us, &self.present)).unwrap_or(u32::MAX);
        let running = u32::try_from(self.present.len()).unwrap_or(u32::MAX);
        Report {
            memory_bytes: self.memory_bytes,
            left: Some(self.left()),
            cores: self.cores,
            running,
            starting: all.saturating_sub(running),
            pressure: 0,
            bounds: self.bounds,
            layers: self.layers.clone(),
            ..Report::default()
        }
    }
}

/// A layer that some nodes have.
pub(super) fn layer(n: u8) -> LayerId {
    LayerId::from_hash(&[n % LAYERS; 32])
}

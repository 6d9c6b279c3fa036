//! Limits of teams, as the database compares them.

use crate::error::StoreError;
use crate::row::{Columns, FromColumns};

/// What the sandboxes of a team may be together; none where there is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TeamMost {
    /// How many may run.
    pub sandboxes: Option<u32>,
    /// Their cores.
    pub cpu_count: Option<u32>,
    /// Their memory, in MiB.
    pub memory_mb: Option<u32>,
}

/// What the sandboxes of a team on all nodes are together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TeamUse {
    /// How many run.
    pub sandboxes: u64,
    /// Their cores.
    pub cpu_count: u64,
    /// Their memory, in MiB, with that of those that are paused in memory.
    pub memory_mb: u64,
}

/// What the paused sandboxes of a team may be together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PausedMost {
    /// How many there may be.
    pub sandboxes: u32,
    /// The space that they may take on disks, in MiB; none where there is no limit.
    pub disk_mb: Option<u32>,
}

/// What the paused sandboxes of a team on all nodes are together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PausedUse {
    /// How many there are.
    pub sandboxes: u64,
    /// The space that they take on disks, in MiB.
    pub disk_mb: u64,
}

impl PausedMost {
    /// Whether there may be another one, which takes some space.
    pub(super) fn has_room(self, used: PausedUse) -> bool {
        used.sandboxes < u64::from(self.sandboxes) && self.disk_mb.is_none_or(|most| used.disk_mb < u64::from(most))
    }
}

impl TeamMost {
    /// Whether another sandbox fits beside what is used. What it does not need is not compared: a limit may have been lowered.
    pub(super) fn has_room(self, used: TeamUse, share: TeamShare) -> bool {
        let fits = |most: Option<u32>, used: u64, needed: u32| {
            needed == 0 || most.is_none_or(|most| used.saturating_add(needed.into()) <= u64::from(most))
        };
        fits(self.sandboxes, used.sandboxes, 1)
            && fits(self.cpu_count, used.cpu_count, share.cpu_count)
            && fits(self.memory_mb, used.memory_mb, share.memory_mb)
    }
}

impl FromColumns for TeamUse {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let number = |column| u64::try_from(columns.int(column)?).map_err(|_| columns.corrupt(column));
        Ok(Self {
            sandboxes: number("sandboxes")?,
            cpu_count: number("cpu_count")?,
            memory_mb: number("memory_mb")?,
        })
    }
}

impl FromColumns for PausedUse {
    const TABLE: &'static str = "sandboxes";

    fn from_columns(columns: &Columns<'_>) -> Result<Self, StoreError> {
        let number = |column| u64::try_from(columns.int(column)?).map_err(|_| columns.corrupt(column));
        Ok(Self {
            sandboxes: number("sandboxes")?,
            disk_mb: number("disk_mb")?,
        })
    }
}

/// What a sandbox that runs takes of the limits of its team, besides being one.
#[derive(Debug, Clone, Copy)]
pub struct TeamShare {
    /// Its cores.
    pub cpu_count: u32,
    /// Its memory, in MiB; none where it is paused in memory, which counts already.
    pub memory_mb: u32,
}

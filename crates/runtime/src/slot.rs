//! Slots: the numbers that keep sandboxes of one host apart.
//!
//! A slot represents a range of 65,536 user and group ids and a CPU window. A sandbox keeps it while anything of it
//! runs; its disk has its own id, so that it can outlive the processes.
//!
//! Nothing that another sandbox could see (a mount's path, a loop device's file) contains a sandbox id.

use std::fmt;

use model::id::{DiskId, SandboxId};

/// Number of ids in the range of one sandbox.
pub(crate) const IDS_PER_SLOT: u32 = 65_536;
/// First id of slot 0 of region 0. Far above the ranges that distributions give to users (`/etc/subuid` starts at
/// 100,000 and seldom passes a few million) and to services.
const FIRST_ID: u32 = 0x2000_0000;
/// Slots in a region. Each data directory of a host has one region, assigned by the registry.
pub(crate) const SLOTS_PER_REGION: u32 = 4096;
/// Regions that fit between [`FIRST_ID`] and the end of 32-bit ids.
const REGIONS: u32 = (u32::MAX - FIRST_ID) / (IDS_PER_SLOT * SLOTS_PER_REGION);

/// Number of a slot on its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(pub(crate) u32);

/// The id ranges of one data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Region(u32);

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Region {
    /// The preferred region of a data directory, from a hash of its path.
    #[must_use]
    pub(crate) fn of_hash(hash: u64) -> Self {
        Self(u32::try_from(hash % u64::from(REGIONS)).unwrap_or(0))
    }

    /// Every region of a host.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        (0..REGIONS).map(Self)
    }

    /// Every region, starting with this one.
    pub(crate) fn iter_from(self) -> impl Iterator<Item = Self> {
        (0..REGIONS).map(move |offset| Self((self.0 + offset) % REGIONS))
    }

    /// All ids of the region.
    pub(crate) fn ids(self) -> std::ops::Range<u64> {
        let first = u64::from(self.base_id(Slot(0)));
        first..first + u64::from(SLOTS_PER_REGION) * u64::from(IDS_PER_SLOT)
    }

    /// First id on the host of the sandbox in `slot`.
    #[must_use]
    pub(crate) fn base_id(self, slot: Slot) -> u32 {
        FIRST_ID + (self.0 * SLOTS_PER_REGION + slot.0 % SLOTS_PER_REGION) * IDS_PER_SLOT
    }
}

/// Name of the cgroup of a sandbox: `<id>.<slot>.<disk>`. It records which of them belong together. Earlier versions
/// named disks by their slots, and groups `<id>.<slot>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    /// The sandbox.
    pub(crate) id: SandboxId,
    /// Its slot.
    pub(crate) slot: Slot,
    /// Its disk.
    pub(crate) disk: DiskId,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.id, self.slot.0)?;
        match self.is_of_earlier_version() {
            true => Ok(()),
            false => write!(f, ".{}", self.disk),
        }
    }
}

impl Name {
    /// Reads what [`fmt::Display`] writes.
    #[must_use]
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(3, '.');
        let (id, slot, disk) = (parts.next()?, parts.next()?, parts.next());
        let number: u32 = slot.parse().ok()?;
        let disk: DiskId = disk.unwrap_or(slot).parse().ok()?;
        let name = Self {
            id: id.parse().ok()?,
            slot: Slot(number),
            disk,
        };
        // Reject non-canonical forms (a number with leading zeros, a slot twice).
        (number < SLOTS_PER_REGION && name.to_string() == text).then_some(name)
    }

    /// Whether an earlier version named its disk by its slot.
    pub(crate) fn is_of_earlier_version(&self) -> bool {
        self.disk.as_str().parse() == Ok(self.slot.0)
    }
}

/// FNV-1a of a path: names the cgroup tree and selects the preferred region of a data directory. Not
/// collision-resistant.
#[must_use]
pub(crate) fn path_hash(path: &std::path::Path) -> u64 {
    fnv1a(path.as_os_str().as_encoded_bytes())
}

/// FNV-1a.
pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_ranges_neither_overlap_nor_exceed_the_id_space() {
        let last = Region(REGIONS - 1).base_id(Slot(SLOTS_PER_REGION - 1));
        assert!(last.checked_add(IDS_PER_SLOT - 1).is_some_and(|end| end < u32::MAX));
        let region = Region::of_hash(path_hash(std::path::Path::new("/var/lib/ringfence")));
        assert_eq!(region.base_id(Slot(1)) - region.base_id(Slot(0)), IDS_PER_SLOT);
        assert_eq!(
            Region(1).base_id(Slot(0)) - Region(0).base_id(Slot(SLOTS_PER_REGION - 1)),
            IDS_PER_SLOT
        );
    }

    #[test]
    fn names_round_trip() {
        // The last one is a disk of an earlier version in another slot.
        for disk in ["d0123456789abcdefghij", "17", "18"] {
            let name = Name {
                id: "iabc".parse().unwrap(),
                slot: Slot(17),
                disk: disk.parse().unwrap(),
            };
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        let disk = "d0123456789abcdefghij";
        for bad in [
            "iabc",
            "iabc.",
            "iabc.x",
            ".1",
            "iabc.4096",
            "../x.1",
            "iabc.01",
            "iabc.1.1",
            "iabc.1.agent",
            &format!("iabc.{disk}"),
            &format!("iabc.1.{disk}.agent"),
            &format!("iabc.4096.{disk}"),
        ] {
            assert_eq!(Name::parse(bad), None, "{bad}");
        }
    }
}

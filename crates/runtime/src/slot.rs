//! Slots: the numbers that keep sandboxes of one host apart.
//!
//! A slot stands for a range of 65,536 user and group ids, a disk image and a place in the cgroup tree. Nothing that
//! a neighbour could see (a mount's path, a loop device's file) names a sandbox id: it names the slot.

use std::fmt;

use model::id::SandboxId;

/// Ids in the range of one sandbox.
pub const IDS_PER_SLOT: u32 = 65_536;
/// First id of slot 0 of region 0. Far above the ranges that distributions give to users (`/etc/subuid` starts at
/// 100,000 and seldom passes a few million) and to services.
const FIRST_ID: u32 = 0x2000_0000;
/// Slots in a region; each data directory has one region, so that two platforms on one host do not share ids.
pub const SLOTS_PER_REGION: u32 = 4096;
/// Regions that fit between [`FIRST_ID`] and the end of 32-bit ids.
const REGIONS: u32 = (u32::MAX - FIRST_ID) / (IDS_PER_SLOT * SLOTS_PER_REGION);

/// The number of a sandbox on its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// The block of ids of one data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region(u32);

impl Region {
    /// The region of a data directory, from a hash of its path.
    #[must_use]
    pub fn of_hash(hash: u64) -> Self {
        Self(u32::try_from(hash % u64::from(REGIONS)).unwrap_or(0))
    }

    /// First id on the host of the sandbox in `slot`.
    #[must_use]
    pub fn base_id(self, slot: Slot) -> u32 {
        FIRST_ID + (self.0 * SLOTS_PER_REGION + slot.0 % SLOTS_PER_REGION) * IDS_PER_SLOT
    }
}

/// What a cgroup of a sandbox is called: `<id>.<slot>`, to which the tree adds the role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// The sandbox.
    pub id: SandboxId,
    /// Its slot.
    pub slot: Slot,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.id, self.slot.0)
    }
}

impl Name {
    /// Reads what [`fmt::Display`] writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (id, slot) = text.split_once('.')?;
        let slot: u32 = slot.parse().ok()?;
        (slot < SLOTS_PER_REGION).then_some(Self {
            id: id.parse().ok()?,
            slot: Slot(slot),
        })
    }
}

/// FNV-1a of a path: names the tree and picks the region of a data directory. Not a defence against anybody.
#[must_use]
pub fn path_hash(path: &std::path::Path) -> u64 {
    path.as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_neither_meet_nor_leave_the_id_space() {
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
    fn names_are_read_back() {
        let name = Name {
            id: "iabc".parse().unwrap(),
            slot: Slot(17),
        };
        assert_eq!(Name::parse(&name.to_string()), Some(name));
        for bad in ["iabc", "iabc.", "iabc.x", ".1", "iabc.4096", "../x.1"] {
            assert_eq!(Name::parse(bad), None, "{bad}");
        }
    }
}

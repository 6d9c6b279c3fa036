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
pub(crate) const FIRST_ID: u32 = 0x2000_0000;
/// Slots in a block. A data directory has a block for as many of its sandboxes, and gets another one when it needs more.
pub(crate) const SLOTS_PER_BLOCK: u32 = 256;
/// Slots of a data directory. Earlier versions gave each of them a region, which has this many, at once.
pub(crate) const SLOTS_PER_REGION: u32 = 4096;
/// Blocks in a region.
pub(crate) const BLOCKS_PER_REGION: u32 = SLOTS_PER_REGION / SLOTS_PER_BLOCK;
/// Regions that fit between [`FIRST_ID`] and the end of 32-bit ids.
const REGIONS: u32 = (u32::MAX - FIRST_ID) / (IDS_PER_SLOT * SLOTS_PER_REGION);

/// Number of a slot in its data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot(pub(crate) u32);

/// As many blocks as earlier versions gave to one data directory, which recorded nothing smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Region(u32);

/// The id ranges of [`SLOTS_PER_BLOCK`] sandboxes of one data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Block(u32);

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

    /// Its blocks, in the order of the slots that earlier versions numbered from the region's beginning.
    pub(crate) fn blocks(self) -> impl Iterator<Item = Block> {
        (self.0 * BLOCKS_PER_REGION..(self.0 + 1) * BLOCKS_PER_REGION).map(Block)
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Block {
    /// Every block of a host.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Region::all().flat_map(Region::blocks)
    }

    /// The region that the block is in.
    pub(crate) fn region(self) -> Region {
        Region(self.0 / BLOCKS_PER_REGION)
    }

    /// All ids of the block.
    pub(crate) fn ids(self) -> std::ops::Range<u64> {
        let first = u64::from(self.base_id(Slot(0)));
        first..first + u64::from(SLOTS_PER_BLOCK) * u64::from(IDS_PER_SLOT)
    }

    /// First id on the host of the sandbox in `slot`, for which the data directory has this block.
    #[must_use]
    pub(crate) fn base_id(self, slot: Slot) -> u32 {
        FIRST_ID + (self.0 * SLOTS_PER_BLOCK + slot.0 % SLOTS_PER_BLOCK) * IDS_PER_SLOT
    }
}

/// Name of the cgroup of a sandbox: `<id>.<slot>.<disk>`. It records which of them belong together. Earlier versions
/// named disks by their slots, and groups `<id>.<slot>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    /// The sandbox.
    pub(crate) id: SandboxId,
    /// Slot of the sandbox.
    pub(crate) slot: Slot,
    /// Disk of the sandbox.
    pub(crate) disk: DiskId,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.id, self.slot.0)?;
        if self.is_of_earlier_version() {
            Ok(())
        } else {
            write!(f, ".{}", self.disk)
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
        let blocks: Vec<Block> = Block::all().collect();
        assert_eq!(blocks.len(), 208);
        let last = blocks[blocks.len() - 1].base_id(Slot(SLOTS_PER_REGION - 1));
        assert!(last.checked_add(IDS_PER_SLOT - 1).is_some_and(|end| end < u32::MAX));
        for pair in blocks.windows(2) {
            assert_eq!(pair[0].ids().end, pair[1].ids().start);
            let last = pair[0].base_id(Slot(SLOTS_PER_BLOCK - 1));
            assert_eq!(u64::from(last + IDS_PER_SLOT), pair[0].ids().end);
        }
    }

    #[test]
    fn a_slot_of_an_earlier_version_has_the_ids_that_it_gave_it() {
        for region in Region::all() {
            let blocks: Vec<Block> = region.blocks().collect();
            for slot in [0, 1, 255, 256, 300, 4095] {
                let block = blocks[(slot / SLOTS_PER_BLOCK) as usize];
                assert_eq!(block.region(), region);
                let earlier = 0x2000_0000 + (region.0 * 4096 + slot) * 65_536;
                assert_eq!(block.base_id(Slot(slot)), earlier);
            }
        }
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

//! Assignment of slots to sandboxes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

use model::id::{DiskId, SandboxId};

use crate::driver::StartError;
use crate::registry::{Blocks, Held};
use crate::slot::{Name, SLOTS_PER_BLOCK, SLOTS_PER_REGION, Slot};

/// The slots of a data directory, lowest first, so that the used id ranges stay together. A sandbox has its entry from
/// before its cgroup is created until the cgroup is removed.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// Slots below this have been allocated before.
    next: u32,
    /// Released slots below `next`.
    free: BTreeSet<u32>,
    names: HashMap<SandboxId, Name>,
    /// The blocks that there are, by the number of a slot divided by those of a block.
    blocks: BTreeMap<u32, Arc<Held>>,
}

/// Slots that are free in the remaining blocks when one is given back. With fewer, a sandbox that comes and goes could make
/// the block come and go as well, and each time the processes of the host are looked through.
const SPARE: u32 = SLOTS_PER_BLOCK / 2;

impl Slots {
    /// The slots of a data directory that has these blocks.
    pub(crate) fn new(blocks: Blocks) -> Self {
        let blocks = blocks.into_iter().map(|(index, held)| (index, Arc::new(held)));
        Self {
            blocks: blocks.collect(),
            ..Self::default()
        }
    }

    /// Allocates a free slot for a sandbox, of a block that `another` returns if there is none in those that there are.
    ///
    /// # Errors
    /// When no slot is free, or the sandbox already has one, and with the error of `another`.
    pub(crate) fn allocate(
        &mut self,
        id: &SandboxId,
        disk: &DiskId,
        another: impl FnOnce(u32) -> io::Result<Held>,
    ) -> Result<(Name, Arc<Held>), StartError> {
        if self.names.contains_key(id) {
            return Err(StartError::Exists(id.clone()));
        }
        let next = Some(self.next).filter(|next| *next < SLOTS_PER_REGION);
        let has_block = |slot: &u32| self.blocks.contains_key(&(slot / SLOTS_PER_BLOCK));
        let slot = self.free.iter().copied().find(has_block);
        let slot = slot.or(next.filter(has_block));
        let slot = slot.or_else(|| self.free.first().copied()).or(next);
        let slot = slot.ok_or(StartError::Full)?;
        let index = slot / SLOTS_PER_BLOCK;
        let held = match self.blocks.get(&index) {
            Some(held) => Arc::clone(held),
            None => Arc::new(another(index)?),
        };
        self.blocks.insert(index, Arc::clone(&held));
        if !self.free.remove(&slot) {
            self.next = slot + 1;
        }
        let name = Name {
            id: id.clone(),
            slot: Slot(slot),
            disk: disk.clone(),
        };
        self.names.insert(id.clone(), name.clone());
        Ok((name, held))
    }

    /// Records the slot of a sandbox that was found on the host.
    pub(crate) fn mark_used(&mut self, name: &Name) {
        let slot = name.slot.0;
        self.free.extend(self.next..slot);
        self.free.remove(&slot);
        self.next = self.next.max(slot + 1);
        self.names.insert(name.id.clone(), name.clone());
    }

    /// The name of a sandbox that has a slot.
    pub(crate) fn name(&self, id: &SandboxId) -> Option<&Name> {
        self.names.get(id)
    }

    /// Releases the slot of a sandbox of which nothing is left. Returns a block that is no longer needed, if there is one.
    #[must_use]
    pub(crate) fn release(&mut self, id: &SandboxId) -> Option<Arc<Held>> {
        let name = self.names.remove(id)?;
        self.free.insert(name.slot.0);
        let remaining = u32::try_from(self.blocks.len()).ok()?.checked_sub(1)? * SLOTS_PER_BLOCK;
        if u32::try_from(self.names.len()).ok()? + SPARE > remaining {
            return None;
        }
        let needed: BTreeSet<u32> = self.names.values().map(|name| name.slot.0 / SLOTS_PER_BLOCK).collect();
        // The first one stays as long as the data directory is in use: its launchers have it locked.
        let is_idle =
            |(index, held): &(&u32, &Arc<Held>)| **index > 0 && !needed.contains(index) && !held.is_of_whole_region;
        let index = *self.blocks.iter().rev().find(is_idle)?.0;
        self.blocks.remove(&index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::Block;

    fn id(number: u32) -> SandboxId {
        format!("i{number}").parse().unwrap()
    }

    fn held(index: u32) -> io::Result<Held> {
        Ok(Held {
            block: Block::all().nth(index as usize).unwrap(),
            locks: Vec::new(),
            is_of_whole_region: false,
        })
    }

    fn slots() -> Slots {
        Slots::new([(0, held(0).unwrap())].into())
    }

    fn take(slots: &mut Slots, number: u32) -> Result<u32, StartError> {
        let disk = DiskId::from_random(&[0; 20]);
        let (name, held) = slots.allocate(&id(number), &disk, held)?;
        assert_eq!(
            Block::all().nth((name.slot.0 / SLOTS_PER_BLOCK) as usize),
            Some(held.block)
        );
        Ok(name.slot.0)
    }

    #[test]
    fn a_slot_belongs_to_one_sandbox_at_a_time() {
        let mut slots = slots();
        let found = Name::parse("ifound.2").unwrap();
        slots.mark_used(&found);
        // Found twice.
        slots.mark_used(&found);
        let taken: Vec<_> = (0..3).map(|number| take(&mut slots, number).unwrap()).collect();
        assert_eq!(taken, [0, 1, 3]);
        assert!(matches!(take(&mut slots, 1), Err(StartError::Exists(_))));
        assert!(slots.release(&id(1)).is_none());
        assert!(slots.release(&id(900)).is_none());
        assert_eq!(take(&mut slots, 1).unwrap(), 1);
        assert_eq!(take(&mut slots, 3).unwrap(), 4);
        assert!(slots.release(&found.id).is_none());
        assert_eq!(slots.name(&found.id), None);
        assert_eq!(take(&mut slots, 4).unwrap(), 2);
    }

    #[test]
    fn no_slot_beyond_the_last_is_allocated() {
        let mut slots = slots();
        for number in 0..SLOTS_PER_REGION {
            assert_eq!(take(&mut slots, number).unwrap(), number);
        }
        assert!(matches!(take(&mut slots, SLOTS_PER_REGION), Err(StartError::Full)));
        assert!(slots.release(&id(7)).is_none());
        assert_eq!(take(&mut slots, SLOTS_PER_REGION).unwrap(), 7);
    }

    #[test]
    fn another_block_is_taken_when_the_others_are_full_and_given_back_with_some_spare() {
        let mut slots = slots();
        let disk = DiskId::from_random(&[0; 20]);
        let none = |_| Err(io::ErrorKind::StorageFull.into());
        for number in 0..SLOTS_PER_BLOCK {
            slots.allocate(&id(number), &disk, none).unwrap();
        }
        // A refusal changes nothing.
        assert!(slots.allocate(&id(256), &disk, none).is_err());
        assert!(slots.name(&id(256)).is_none());
        assert_eq!(take(&mut slots, 256).unwrap(), 256);
        slots.allocate(&id(257), &disk, none).unwrap();
        assert!(slots.release(&id(257)).is_none());
        assert!(slots.release(&id(256)).is_none(), "too few would be left");
        for number in 0..SPARE - 1 {
            assert!(slots.release(&id(number)).is_none());
        }
        let given_back = slots.release(&id(SPARE)).unwrap().block;
        assert_eq!(Some(given_back), Block::all().nth(1));
        assert!(slots.release(&id(SPARE + 1)).is_none(), "the first one stays");
    }

    #[test]
    fn slots_of_blocks_that_there_are_come_first() {
        let mut slots = slots();
        // Started before with ids of a block that is not this data directory's any more.
        slots.mark_used(&Name::parse("ifound.600").unwrap());
        for number in 0..SLOTS_PER_BLOCK {
            assert_eq!(take(&mut slots, number).unwrap(), number);
        }
        assert!(slots.release(&id(9)).is_none());
        assert_eq!(take(&mut slots, 1000).unwrap(), 9);
        assert_eq!(take(&mut slots, 1001).unwrap(), 256);
    }
}

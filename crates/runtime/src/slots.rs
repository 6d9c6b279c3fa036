//! Assignment of slots to sandboxes.

use std::collections::{BTreeSet, HashMap};

use model::id::{DiskId, SandboxId};

use crate::driver::StartError;
use crate::slot::{Name, SLOTS_PER_REGION, Slot};

/// The slots of a host, lowest first, so that the used id ranges stay together. A sandbox has its entry from before its
/// cgroup is created until the cgroup is removed.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// Slots below this have been allocated before.
    next: u32,
    /// Released slots below `next`.
    free: BTreeSet<u32>,
    names: HashMap<SandboxId, Name>,
}

impl Slots {
    /// Allocates a free slot for a sandbox.
    ///
    /// # Errors
    /// When no slot is free, or the sandbox already has one.
    pub(crate) fn allocate(&mut self, id: &SandboxId, disk: &DiskId) -> Result<Name, StartError> {
        if self.names.contains_key(id) {
            return Err(StartError::Exists(id.clone()));
        }
        let slot = match self.free.pop_first() {
            Some(slot) => slot,
            None if self.next < SLOTS_PER_REGION => {
                self.next += 1;
                self.next - 1
            }
            None => return Err(StartError::Full),
        };
        let name = Name {
            id: id.clone(),
            slot: Slot(slot),
            disk: disk.clone(),
        };
        self.names.insert(id.clone(), name.clone());
        Ok(name)
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

    /// Releases the slot of a sandbox of which nothing is left.
    pub(crate) fn release(&mut self, id: &SandboxId) {
        if let Some(name) = self.names.remove(id) {
            self.free.insert(name.slot.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> SandboxId {
        format!("i{number}").parse().unwrap()
    }

    fn take(slots: &mut Slots, number: u32) -> Result<u32, StartError> {
        let disk = DiskId::from_random(&[0; 20]);
        slots.allocate(&id(number), &disk).map(|name| name.slot.0)
    }

    #[test]
    fn a_slot_belongs_to_one_sandbox_at_a_time() {
        let mut slots = Slots::default();
        let found = Name::parse("ifound.2").unwrap();
        slots.mark_used(&found);
        // Found twice.
        slots.mark_used(&found);
        let taken: Vec<_> = (0..3).map(|number| take(&mut slots, number).unwrap()).collect();
        assert_eq!(taken, [0, 1, 3]);
        assert!(matches!(take(&mut slots, 1), Err(StartError::Exists(_))));
        slots.release(&id(1));
        slots.release(&id(900));
        assert_eq!(take(&mut slots, 1).unwrap(), 1);
        assert_eq!(take(&mut slots, 3).unwrap(), 4);
        slots.release(&found.id);
        assert_eq!(slots.name(&found.id), None);
        assert_eq!(take(&mut slots, 4).unwrap(), 2);
    }

    #[test]
    fn no_slot_beyond_the_last_is_allocated() {
        let mut slots = Slots::default();
        for number in 0..SLOTS_PER_REGION {
            assert_eq!(take(&mut slots, number).unwrap(), number);
        }
        assert!(matches!(take(&mut slots, SLOTS_PER_REGION), Err(StartError::Full)));
        slots.release(&id(7));
        assert_eq!(take(&mut slots, SLOTS_PER_REGION).unwrap(), 7);
    }
}

//! Which sandboxes have which slots.

use std::collections::{BTreeSet, HashMap};

use model::id::{DiskId, SandboxId};

use crate::driver::StartError;
use crate::slot::{Name, SLOTS_PER_REGION, Slot};

/// The slots of a host, lowest first, so that ranges of ids stay small. A sandbox is in here from before its cgroup is
/// made until the cgroup is gone.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// Slots below this were given out at some time.
    next: u32,
    /// Slots below `next` that are free again.
    free: BTreeSet<u32>,
    names: HashMap<SandboxId, Name>,
}

impl Slots {
    /// Gives a free slot to a sandbox.
    ///
    /// # Errors
    /// When there is none, or the sandbox has one.
    pub(crate) fn take(&mut self, id: &SandboxId, disk: &DiskId) -> Result<Name, StartError> {
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

    /// Notes a sandbox that was found.
    pub(crate) fn occupy(&mut self, name: &Name) {
        let slot = name.slot.0;
        self.free.extend(self.next..slot);
        self.free.remove(&slot);
        self.next = self.next.max(slot + 1);
        self.names.insert(name.id.clone(), name.clone());
    }

    /// The name of a sandbox of which something is there.
    pub(crate) fn name(&self, id: &SandboxId) -> Option<&Name> {
        self.names.get(id)
    }

    /// Frees the slot of a sandbox of which nothing is left.
    pub(crate) fn give_back(&mut self, id: &SandboxId) {
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
        slots.take(&id(number), &disk).map(|name| name.slot.0)
    }

    #[test]
    fn a_slot_is_given_to_one_at_a_time() {
        let mut slots = Slots::default();
        let found = Name::parse("ifound.2").unwrap();
        slots.occupy(&found);
        // Found twice.
        slots.occupy(&found);
        let taken: Vec<_> = (0..3).map(|number| take(&mut slots, number).unwrap()).collect();
        assert_eq!(taken, [0, 1, 3]);
        assert!(matches!(take(&mut slots, 1), Err(StartError::Exists(_))));
        slots.give_back(&id(1));
        slots.give_back(&id(900));
        assert_eq!(take(&mut slots, 1).unwrap(), 1);
        assert_eq!(take(&mut slots, 3).unwrap(), 4);
        slots.give_back(&found.id);
        assert_eq!(slots.name(&found.id), None);
        assert_eq!(take(&mut slots, 4).unwrap(), 2);
    }

    #[test]
    fn the_last_slot_is_the_last() {
        let mut slots = Slots::default();
        for number in 0..SLOTS_PER_REGION {
            assert_eq!(take(&mut slots, number).unwrap(), number);
        }
        assert!(matches!(take(&mut slots, SLOTS_PER_REGION), Err(StartError::Full)));
        slots.give_back(&id(7));
        assert_eq!(take(&mut slots, SLOTS_PER_REGION).unwrap(), 7);
    }
}

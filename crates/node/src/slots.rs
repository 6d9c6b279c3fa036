//! Which slots of the host are taken.

use std::collections::BTreeSet;

use runtime::slot::{SLOTS_PER_REGION, Slot};

/// The slots of a host, lowest first, so that id ranges and image names stay small.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// Slots below this were given out at some time.
    next: u32,
    /// Slots below `next` that are free again.
    free: BTreeSet<u32>,
}

impl Slots {
    /// A free slot, now taken.
    pub(crate) fn take(&mut self) -> Option<Slot> {
        if let Some(slot) = self.free.pop_first() {
            return Some(Slot(slot));
        }
        (self.next < SLOTS_PER_REGION).then(|| {
            self.next += 1;
            Slot(self.next - 1)
        })
    }

    /// Takes a slot that is in use already.
    pub(crate) fn occupy(&mut self, slot: Slot) {
        self.free.extend(self.next..slot.0);
        self.free.remove(&slot.0);
        self.next = self.next.max(slot.0 + 1);
    }

    /// Frees a slot of which nothing is left.
    pub(crate) fn give_back(&mut self, slot: Slot) {
        if slot.0 < self.next {
            self.free.insert(slot.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_given_to_one_at_a_time() {
        let mut slots = Slots::default();
        slots.occupy(Slot(2));
        let taken: Vec<_> = (0..3).map(|_| slots.take().unwrap().0).collect();
        assert_eq!(taken, [0, 1, 3]);
        slots.give_back(Slot(1));
        slots.give_back(Slot(900));
        assert_eq!(slots.take(), Some(Slot(1)));
        assert_eq!(slots.take(), Some(Slot(4)));
        slots.occupy(Slot(4));
        assert_eq!(slots.take(), Some(Slot(5)));
    }

    #[test]
    fn the_last_slot_is_the_last() {
        let mut slots = Slots::default();
        assert_eq!(
            (0..).take_while(|_| slots.take().is_some()).count(),
            SLOTS_PER_REGION as usize
        );
        slots.give_back(Slot(7));
        assert_eq!(slots.take(), Some(Slot(7)));
        assert_eq!(slots.take(), None);
    }
}

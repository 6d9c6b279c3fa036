//! A map that knows which entry has not been used for the longest time.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

/// Unbounded by itself: its owner inserts and removes.
#[derive(Debug)]
pub(super) struct Lru<K, V> {
    entries: HashMap<K, (u64, V)>,
    /// Keys by time of their last use, counted in uses.
    order: BTreeMap<u64, K>,
    uses: u64,
}

impl<K: Hash + Eq + Clone, V> Lru<K, V> {
    pub(super) fn new() -> Self {
        Self {
            entries: HashMap::new(),
            order: BTreeMap::new(),
            uses: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The value of a key, whose last use is now.
    pub(super) fn get<Q>(&mut self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let (used, value) = self.entries.get_mut(key)?;
        let key = self.order.remove(used)?;
        self.uses += 1;
        *used = self.uses;
        self.order.insert(self.uses, key);
        Some(value)
    }

    /// Inserts a value, and returns the one that the key had.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let replaced = self.remove(&key);
        self.uses += 1;
        self.order.insert(self.uses, key.clone());
        self.entries.insert(key, (self.uses, value));
        replaced
    }

    pub(super) fn remove<Q>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        let (used, value) = self.entries.remove(key)?;
        self.order.remove(&used);
        Some(value)
    }

    /// Removes the entry that has not been used for the longest time.
    pub(super) fn pop(&mut self) -> Option<(K, V)> {
        let (_, key) = self.order.pop_first()?;
        let (_, value) = self.entries.remove(&key)?;
        Some((key, value))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_equals_a_list_in_order_of_use(steps in prop::collection::vec((0..4, 0u8..6, any::<u8>()), 0..60)) {
            let mut lru = Lru::new();
            let mut list: Vec<(u8, u8)> = Vec::new();
            for (step, key, value) in steps {
                let at = list.iter().position(|(other, _)| *other == key);
                match step {
                    0 => {
                        let old = at.map(|at| list.remove(at).1);
                        prop_assert_eq!(lru.insert(key, value), old);
                        list.push((key, value));
                    }
                    1 => {
                        let found = at.map(|at| list.remove(at));
                        list.extend(found);
                        prop_assert_eq!(lru.get(&key).copied(), found.map(|(_, value)| value));
                    }
                    2 => prop_assert_eq!(lru.remove(&key), at.map(|at| list.remove(at).1)),
                    _ => prop_assert_eq!(lru.pop(), (!list.is_empty()).then(|| list.remove(0))),
                }
                prop_assert_eq!(lru.len(), list.len());
                prop_assert_eq!(lru.order.len(), list.len());
            }
        }
    }
}

//! Chance, where a decision is left to it. Code that decides takes a [`Chance`], so that tests can set it.
//!
//! The numbers are those of the kernel, fetched in batches: a decision among many nodes takes dozens.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

/// How many bytes are fetched at once.
const BATCH: usize = 512;

/// A source of random numbers.
#[derive(Clone)]
pub struct Chance(Arc<dyn Fn(usize) -> usize + Send + Sync>);

impl fmt::Debug for Chance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Chance")
    }
}

impl Chance {
    /// The source of the host.
    #[must_use]
    pub fn system() -> Self {
        let unused: Mutex<Vec<u8>> = Mutex::default();
        Self::new(move |below| {
            let number = next(&mut unused.lock());
            // A remainder is not quite even, by less than anything that is decided here could show.
            let below = u64::try_from(below.max(1)).unwrap_or(u64::MAX);
            usize::try_from(number % below).unwrap_or(0)
        })
    }

    /// A source that calls `below`, which returns a number below its argument.
    pub fn new(below: impl Fn(usize) -> usize + Send + Sync + 'static) -> Self {
        Self(Arc::new(below))
    }

    /// A number below this one; 0 if there is none.
    pub(crate) fn below(&self, below: usize) -> usize {
        (self.0)(below)
    }
}

/// The next number of a batch. Without randomness the order is that of ids, which is an order as well.
fn next(unused: &mut Vec<u8>) -> u64 {
    if unused.is_empty() {
        let mut bytes = [0; BATCH];
        if getrandom::fill(&mut bytes).is_err() {
            return 0;
        }
        unused.extend(bytes);
    }
    let at = unused.len().saturating_sub(size_of::<u64>());
    let number = unused.split_off(at);
    number.try_into().map_or(0, u64::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_number_comes_and_none_that_is_too_large() {
        let chance = Chance::system();
        let drawn: HashSet<usize> = (0..2000).map(|_| chance.below(5)).collect();
        assert_eq!(drawn, HashSet::from([0, 1, 2, 3, 4]));
        assert_eq!((chance.below(0), chance.below(1)), (0, 0));
        let large: HashSet<usize> = (0..200).map(|_| chance.below(usize::MAX)).collect();
        assert_eq!(large.len(), 200);
    }
}

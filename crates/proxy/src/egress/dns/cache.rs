//! Answers of DNS servers: those that are still valid, and those that are on their way.
//!
//! One cache for all sandboxes, by the servers that answered: a sandbox with servers of its own only affects those that
//! chose the same ones. What can be seen from outside is how fast an answer comes, so a sandbox can find out whether a name
//! was resolved lately on this node.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use hickory_proto::op::Query;
use parking_lot::Mutex;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::lru::Lru;
use super::response::Response;

/// Entries of the cache.
const MAX_ENTRIES: usize = 16 << 10;

/// Memory of the cache, in bytes.
const MAX_TOTAL: usize = 16 << 20;

/// Largest message in the cache, in bytes: usual answers have fewer than 512. Without this bound, a sandbox could replace
/// the entries of others with few queries.
const MAX_MESSAGE: usize = 4 << 10;

/// What an entry needs besides its message and its name.
const ENTRY_OVERHEAD: usize = 256;

/// What answers depend on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) servers: Arc<[SocketAddr]>,
    /// The question in lower case.
    pub(super) question: Arc<Query>,
}

/// Answers that are still valid. The least recently used ones are removed when there are too many.
#[derive(Debug)]
pub(super) struct Cache {
    entries: Lru<Key, Arc<Response>>,
    size: usize,
}

impl Cache {
    pub(super) fn new() -> Self {
        Self {
            entries: Lru::new(),
            size: 0,
        }
    }

    pub(super) fn get(&mut self, key: &Key, now: Instant) -> Option<Arc<Response>> {
        let response = self.entries.get(key)?.clone();
        if response.is_valid(now) {
            return Some(response);
        }
        self.remove(key);
        None
    }

    pub(super) fn insert(&mut self, key: Key, response: Arc<Response>, now: Instant) {
        if !response.is_valid(now) || response.size() > MAX_MESSAGE {
            return;
        }
        self.remove(&key);
        self.size += size(&key, &response);
        self.entries.insert(key, response);
        while self.size > MAX_TOTAL || self.entries.len() > MAX_ENTRIES {
            let Some((key, response)) = self.entries.pop() else {
                break;
            };
            self.size -= size(&key, &response);
        }
    }

    fn remove(&mut self, key: &Key) {
        if let Some(response) = self.entries.remove(key) {
            self.size -= size(key, &response);
        }
    }
}

fn size(key: &Key, response: &Response) -> usize {
    response.size() + key.question.name.len() + ENTRY_OVERHEAD
}

/// Questions that are being answered, so that each is asked once.
#[derive(Debug)]
pub(super) struct Flights<T> {
    cells: Mutex<HashMap<Key, Arc<OnceCell<T>>>>,
}

impl<T> Default for Flights<T> {
    fn default() -> Self {
        Self {
            cells: Mutex::default(),
        }
    }
}

#[cfg(test)]
impl<T> Flights<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.cells.lock().is_empty()
    }
}

impl<T: Clone> Flights<T> {
    /// Returns the result that one of the callers with this key gets. If that one is cancelled, the next one tries.
    pub(super) async fn join(&self, key: &Key, ask: impl Future<Output = T>) -> T {
        let cell = self.cells.lock().entry(key.clone()).or_default().clone();
        let flight = Flight {
            flights: self,
            key,
            cell: Some(cell),
        };
        match &flight.cell {
            Some(cell) => cell.get_or_init(|| ask).await.clone(),
            None => ask.await,
        }
    }
}

/// One caller with a key. The last one removes it.
struct Flight<'a, T> {
    flights: &'a Flights<T>,
    key: &'a Key,
    /// The cell of the flight, until this is dropped.
    cell: Option<Arc<OnceCell<T>>>,
}

impl<T> Drop for Flight<'_, T> {
    fn drop(&mut self) {
        let mut cells = self.flights.cells.lock();
        // While the map is locked, so that of two last callers one finds that it is the last.
        drop(self.cell.take());
        if cells.get(self.key).is_some_and(|cell| Arc::strong_count(cell) == 1) {
            cells.remove(self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hickory_proto::rr::{Name, RecordType};

    use super::*;

    fn key(name: &str) -> Key {
        Key {
            servers: Arc::new([]),
            question: Arc::new(Query::query(Name::from_ascii(name).unwrap(), RecordType::A)),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn entries_expire() {
        let mut cache = Cache::new();
        let now = Instant::now();
        cache.insert(key("a."), Response::of_size(100, 10, now), now);
        assert!(cache.get(&key("A."), now + Duration::from_millis(9999)).is_some());
        assert!(cache.get(&key("b."), now).is_none());
        assert!(cache.get(&key("a."), now + Duration::from_secs(10)).is_none());
        assert_eq!((cache.size, cache.entries.len()), (0, 0));
        cache.insert(key("a."), Response::of_size(100, 0, now), now);
        assert_eq!(cache.entries.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn entries_and_bytes_are_bounded() {
        let mut cache = Cache::new();
        let now = Instant::now();
        cache.insert(key("large."), Response::of_size(MAX_MESSAGE + 1, 10, now), now);
        assert!(cache.get(&key("large."), now).is_none());
        cache.insert(key("used."), Response::of_size(100, 10, now), now);
        for number in 0..MAX_ENTRIES {
            cache.insert(key(&format!("{number}.")), Response::of_size(10, 10, now), now);
            assert!(cache.get(&key("used."), now).is_some());
        }
        assert_eq!(cache.entries.len(), MAX_ENTRIES);
        assert!(cache.get(&key("0."), now).is_none());
        assert!(cache.get(&key("1."), now).is_some());
        for number in 0..MAX_ENTRIES {
            cache.insert(key(&format!("{number}.")), Response::of_size(MAX_MESSAGE, 10, now), now);
            assert!(cache.size <= MAX_TOTAL);
        }
        let sum: usize = std::iter::from_fn(|| cache.entries.pop())
            .map(|(key, response)| size(&key, &response))
            .sum();
        assert_eq!(cache.size, sum);
        assert!(sum > MAX_TOTAL - 2 * MAX_MESSAGE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_flight_survives_the_one_who_began_it() {
        let flights = Flights::default();
        let key = key("a.");
        let now = Instant::now();
        let mut first = Box::pin(flights.join(&key, std::future::pending()));
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut first).await.is_err());
        let mut second = Box::pin(flights.join(&key, async { Response::of_size(7, 1, now) }));
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut second).await.is_err());
        assert_eq!(flights.cells.lock().len(), 1);
        drop(first);
        assert_eq!(second.await.size(), 7);
        assert_eq!(flights.cells.lock().len(), 0);
    }
}

//! The capacity permits of this host: `model::capacity` under a lock, beside the sandboxes that have processes.
//!
//! This is the only place where sandboxes are counted against the limit of the host, and it is asked for each of them,
//! whatever server it comes from and whether that is in this process. The lock is held for microseconds and never while
//! something is awaited. Order of locks: that of the permits, then that of the sandboxes.

use std::collections::HashMap;
use std::future::Future;
use std::time::Instant;

use model::capacity::{Bounds, HostCapacity, Permits};
use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::node::{Failure, NoCapacity, NodeError, PermitRequest};

/// The sandboxes of a node that have processes.
type Sandboxes<V> = Mutex<HashMap<SandboxId, V>>;

/// The permits of a host.
#[derive(Debug)]
pub(crate) struct HostPermits {
    bounds: Bounds,
    permits: Mutex<Permits>,
    /// Held during a reading, so that a burst reads only once.
    reading: tokio::sync::Mutex<()>,
    /// Times count from here: a clock that is set has no effect.
    since: Instant,
}

impl HostPermits {
    pub(crate) fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            permits: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            since: Instant::now(),
        }
    }

    /// Gives out a permit, if the host has capacity. `read` reads what it has left, if the last reading is too old.
    pub(crate) async fn give<V, F>(
        &self,
        sandboxes: &Sandboxes<V>,
        request: &PermitRequest,
        read: impl Fn() -> F,
    ) -> Result<(), NoCapacity>
    where
        F: Future<Output = Result<HostCapacity, NodeError>>,
    {
        {
            let mut permits = self.permits.lock();
            if request.reads_again {
                permits.forget_reading();
            }
            permits.take(request, self.bounds, self.now_us(), &*sandboxes.lock())?;
        }
        if !self.is_fresh() {
            let _turn = self.reading.lock().await;
            if !self.is_fresh() {
                self.permits.lock().begin_reading();
                let capacity = match read().await {
                    Ok(capacity) => Some(capacity),
                    Err(error) => {
                        let why = Failure::of(&error);
                        tracing::warn!(error = %why, "cannot read the capacity of the host");
                        None
                    }
                };
                self.permits.lock().end_reading(self.now_us(), capacity);
            }
        }
        self.permits.lock().judge(request, self.bounds)
    }

    pub(crate) fn give_back(&self, id: &SandboxId, number: u64) {
        self.permits.lock().give_back(id, number);
    }

    /// Notes that a start begins, which takes a permit if it has none.
    pub(crate) fn begin<V>(&self, sandboxes: &Sandboxes<V>, id: &SandboxId) -> Result<(), NoCapacity> {
        let mut permits = self.permits.lock();
        permits.begin(id, self.bounds, self.now_us(), &*sandboxes.lock())
    }

    /// Gives out the permit that comes with a start, as [`Self::give`] does, and notes that the start begins.
    pub(crate) async fn give_and_begin<V, F>(
        &self,
        sandboxes: &Sandboxes<V>,
        request: &PermitRequest,
        read: impl Fn() -> F,
    ) -> Result<(), NoCapacity>
    where
        F: Future<Output = Result<HostCapacity, NodeError>>,
    {
        self.give(sandboxes, request, read).await?;
        self.begin(sandboxes, &request.id)
    }

    /// Notes that a start is over.
    pub(crate) fn settle<V>(&self, sandboxes: &Sandboxes<V>, id: &SandboxId) {
        let mut permits = self.permits.lock();
        permits.settle(id, self.now_us(), &*sandboxes.lock());
    }

    /// How many sandboxes have processes, and how many permits others have.
    pub(crate) fn count<V>(&self, sandboxes: &Sandboxes<V>) -> (u32, u32) {
        let mut permits = self.permits.lock();
        let sandboxes = sandboxes.lock();
        let running = sandboxes.len();
        let starting = permits.count(self.now_us(), &*sandboxes).saturating_sub(running);
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        (number(running), number(starting))
    }

    /// The host's own bounds.
    pub(crate) fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn is_fresh(&self) -> bool {
        self.permits.lock().is_fresh(self.now_us())
    }

    fn now_us(&self) -> i64 {
        i64::try_from(self.since.elapsed().as_micros()).unwrap_or(i64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use model::capacity::Purpose;

    use super::*;

    const MAX: usize = 20;

    fn request(id: SandboxId, number: u64) -> PermitRequest {
        PermitRequest {
            id,
            number,
            purpose: Purpose::Wanted,
            bounds: Bounds::default(),
            reads_again: false,
        }
    }

    /// Another id for each number: servers never ask for the same sandbox by chance.
    fn id(n: usize) -> SandboxId {
        format!("i{n:020}").parse().unwrap()
    }

    fn at_most(max: usize) -> HostPermits {
        HostPermits::new(Bounds {
            max_sandboxes: u32::try_from(max).ok(),
            ..Bounds::default()
        })
    }

    async fn much() -> Result<HostCapacity, NodeError> {
        Ok(HostCapacity {
            memory_available_bytes: 1 << 40,
            disk_available_bytes: 1 << 40,
        })
    }

    /// Servers that know nothing of each other ask at the same time, start, fail, end and give back in any order.
    #[test]
    fn servers_together_never_get_more_than_the_host_may_have() {
        let permits = at_most(MAX);
        let sandboxes: Sandboxes<()> = Mutex::default();
        let (given, refused, most) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
        let ask = |server: usize| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            for n in 0..2000 {
                let id = id(server * 10_000 + n);
                let number = n as u64 + 1;
                // Every other one comes with its start.
                let is_begun = n % 2 == 1;
                let request = request(id.clone(), number);
                let asked = runtime.block_on(async {
                    if is_begun {
                        permits.give_and_begin(&sandboxes, &request, much).await
                    } else {
                        permits.give(&sandboxes, &request, much).await
                    }
                });
                if asked.is_err() {
                    refused.fetch_add(1, Ordering::Relaxed);
                    // Room for others, now and then.
                    let one = sandboxes.lock().keys().next().cloned();
                    if let Some(one) = one.filter(|_| n % 3 == 0) {
                        sandboxes.lock().remove(&one);
                    }
                    continue;
                }
                given.fetch_add(1, Ordering::Relaxed);
                if n % 5 == 0 && !is_begun {
                    permits.give_back(&id, number);
                    continue;
                }
                if !is_begun {
                    assert_eq!(permits.begin(&sandboxes, &id), Ok(()));
                }
                if n % 7 != 0 {
                    let mut sandboxes = sandboxes.lock();
                    sandboxes.insert(id.clone(), ());
                    most.fetch_max(sandboxes.len(), Ordering::Relaxed);
                }
                permits.settle(&sandboxes, &id);
                permits.give_back(&id, number);
            }
        };
        thread::scope(|scope| {
            for server in 0..8 {
                let ask = &ask;
                scope.spawn(move || ask(server));
            }
        });
        assert!(most.load(Ordering::Relaxed) <= MAX, "{most:?}");
        assert!(given.load(Ordering::Relaxed) > MAX && refused.load(Ordering::Relaxed) > 0);
        // What is not a sandbox was given back: as many fit as are missing.
        let left = MAX - sandboxes.lock().len();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let more = (0..=MAX).take_while(|n| {
            let request = request(id(1_000_000 + n), 1);
            runtime.block_on(permits.give(&sandboxes, &request, much)).is_ok()
        });
        assert_eq!(more.count(), left);
    }

    #[tokio::test]
    async fn a_burst_reads_once_what_the_host_has_left() {
        let permits = HostPermits::new(Bounds {
            memory_floor_mb: 1,
            ..Bounds::default()
        });
        let sandboxes: Sandboxes<()> = Mutex::default();
        let reads = AtomicUsize::new(0);
        let read = || async {
            reads.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            much().await
        };
        let asked = (0..50).map(|n| {
            let (permits, sandboxes) = (&permits, &sandboxes);
            async move { permits.give(sandboxes, &request(id(n), 1), read).await }
        });
        let given = futures_util::future::join_all(asked).await;
        assert!(given.iter().all(Result::is_ok));
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        let again = PermitRequest {
            reads_again: true,
            ..request(id(50), 1)
        };
        permits.give(&sandboxes, &again, read).await.unwrap();
        assert_eq!(reads.load(Ordering::Relaxed), 2);
    }
}

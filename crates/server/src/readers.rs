//! Processor time for readers of the documentation, who need no credentials.
//!
//! Searches and commands run on threads with the lowest priority, which get what nothing else needs: whoever asks, and
//! however much, sandboxes and the rest of the API are served first. A peer has a budget of processor time, too, so that
//! one of them leaves some for the others.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::setpriority_process;
use rustix::thread::gettid;
use rustix::time::{ClockId, clock_gettime};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::peers::{ClientPeer, PeerRates};

/// Threads: one may run a command while the other answers searches.
const THREADS: usize = 2;
/// The lowest priority (setpriority(2)).
const NICE: i32 = 19;
/// Requests that wait or run.
const REQUESTS: usize = 256;
/// Processor time of a peer: what it may use at once, and the share of a core in the long run.
const BURST: Duration = Duration::from_secs(2);
const SHARE: u32 = 10;
/// The unit in which processor time is counted.
const UNIT: Duration = Duration::from_millis(1);
/// When a client may try again if too many requests wait.
const BUSY: Duration = Duration::from_secs(1);

/// Runs the work of readers.
pub(crate) struct Readers {
    /// Always there, until it is dropped.
    runtime: Option<Runtime>,
    tasks: TaskTracker,
    places: Arc<Semaphore>,
    budgets: PeerRates,
}

impl fmt::Debug for Readers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readers").finish_non_exhaustive()
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        // Waiting for the threads is not allowed on those of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The processor time of the calling thread.
pub(crate) fn processor_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

impl Readers {
    /// Starts the threads.
    ///
    /// # Panics
    /// When the system has no resources for threads.
    pub(crate) fn new() -> Self {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("documentation")
            .on_thread_start(|| {
                if let Err(error) = setpriority_process(Some(gettid()), NICE) {
                    tracing::warn!(%error, "cannot lower the priority of a thread that serves the documentation: its readers may slow down other requests");
                }
            })
            .build()
            .expect("threads for the documentation");
        Self {
            runtime: Some(runtime),
            tasks: TaskTracker::new(),
            places: Arc::new(Semaphore::new(REQUESTS)),
            budgets: PeerRates::new(
                u32::try_from(BURST.as_millis() / UNIT.as_millis()).expect("a few thousand"),
                UNIT * SHARE,
            ),
        }
    }

    /// Runs `work` for a client, and charges the processor time that it took.
    ///
    /// # Errors
    /// When the client has used up its processor time, or too many requests wait, with the time until the next try.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        client: ClientPeer,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Duration> {
        if let Some(peer) = client.peer {
            self.budgets.check(peer)?;
        }
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| BUSY)?;
        let runtime = self.runtime.as_ref().expect("it is there until the drop");
        let worked = self.tasks.spawn_on(
            async move {
                let begun = processor_time();
                let result = work();
                drop(place);
                (result, processor_time().saturating_sub(begun))
            },
            runtime.handle(),
        );
        let (result, took) = worked.await.map_err(|error| {
            tracing::error!(%error, "work for a reader of the documentation failed");
            BUSY
        })?;
        if let Some(peer) = client.peer {
            let units = took.as_micros().div_ceil(UNIT.as_micros());
            self.budgets.charge(peer, u32::try_from(units).unwrap_or(u32::MAX));
        }
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::Peer;

    fn burn(time: Duration) -> impl FnOnce() + Send + 'static {
        move || {
            let begun = processor_time();
            while processor_time() - begun < time {}
        }
    }

    #[tokio::test]
    async fn a_peer_that_used_up_its_time_waits_and_others_do_not() {
        let readers = Readers::new();
        let client = |peer| ClientPeer {
            peer,
            is_loopback: false,
            is_tls: false,
        };
        let (one, other) = (client(Some(Peer::V6(1))), client(Some(Peer::V6(2))));
        // What is beyond the budget is a debt.
        assert!(readers.run(one, burn(BURST + Duration::from_millis(200))).await.is_ok());
        let wait = readers.run(one, || ()).await.expect_err("no time left");
        assert!(
            wait > Duration::from_secs(1) && wait < Duration::from_secs(4),
            "{wait:?}"
        );
        assert!(readers.run(other, || ()).await.is_ok());
        assert!(readers.run(client(None), burn(Duration::from_millis(5))).await.is_ok());
    }

    #[tokio::test]
    async fn the_threads_have_the_lowest_priority() {
        let readers = Readers::new();
        let client = ClientPeer {
            peer: None,
            is_loopback: false,
            is_tls: false,
        };
        let priority = || rustix::process::getpriority_process(Some(gettid())).expect("a priority");
        let own = priority();
        assert_eq!(readers.run(client, priority).await, Ok(NICE));
        assert_eq!(priority(), own);
    }

    #[tokio::test]
    async fn requests_beyond_the_maximum_are_refused() {
        let readers = Readers::new();
        let client = ClientPeer {
            peer: None,
            is_loopback: false,
            is_tls: false,
        };
        let taken = readers
            .places
            .try_acquire_many(u32::try_from(REQUESTS).expect("few"))
            .expect("all");
        assert_eq!(readers.run(client, || ()).await, Err(BUSY));
        drop(taken);
        assert_eq!(readers.run(client, || ()).await, Ok(()));
    }

    #[tokio::test]
    async fn a_panic_is_an_answer() {
        let readers = Readers::new();
        let client = ClientPeer {
            peer: None,
            is_loopback: false,
            is_tls: false,
        };
        assert_eq!(readers.run(client, || panic!("on purpose")).await, Err::<(), _>(BUSY));
        assert_eq!(readers.places.available_permits(), REQUESTS);
    }
}

//! File access off the one thread, and knowing when its result is no longer wanted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use protocol::connect::{Code, Error};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Waits for this many permits.
pub(super) async fn permits(semaphore: &Arc<Semaphore>, count: usize) -> Result<OwnedSemaphorePermit, Error> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    // None of them is ever closed.
    let closed = |_| Error::new(Code::Internal, "no more file access");
    semaphore.clone().acquire_many_owned(count).await.map_err(closed)
}

/// Runs file access on a blocking thread, and signals it when its caller stops waiting.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&Abandoned) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let abandoned = Abandoned::default();
    let _guard = abandoned.when_dropped();
    let crashed = |_| Error::new(Code::Internal, "file access failed");
    tokio::task::spawn_blocking(move || work(&abandoned))
        .await
        .map_err(crashed)?
}

/// Whether the caller of some work stopped waiting.
#[derive(Debug, Clone, Default)]
pub(super) struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    pub(super) fn is_true(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// # Errors
    /// `canceled` when no caller waits; so none sees it.
    pub(super) fn check(&self) -> Result<(), Error> {
        if self.is_true() {
            Err(Error::new(Code::Canceled, "context canceled"))
        } else {
            Ok(())
        }
    }

    /// Becomes true when the result is dropped.
    pub(super) fn when_dropped(&self) -> impl Drop + use<> {
        struct Guard(Abandoned);
        impl Drop for Guard {
            fn drop(&mut self) {
                self.0.0.store(true, Ordering::Relaxed);
            }
        }
        Guard(self.clone())
    }
}

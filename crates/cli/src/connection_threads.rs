//! Threads that serve connections, each with an event loop of its own, see `server::settings::ServerSettings::traffic`.

use std::io;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

/// Threads that serve connections. They run until [`Self::stop`].
#[derive(Debug)]
pub(crate) struct ConnectionThreads {
    handles: Vec<Handle>,
    threads: Vec<JoinHandle<()>>,
    stop: CancellationToken,
}

impl ConnectionThreads {
    /// Starts a thread per core. Blocking work that is still running at the end is waited for at most `bound`.
    ///
    /// # Errors
    /// When the system refuses a thread or an event loop.
    pub(crate) fn start(bound: Duration) -> io::Result<Self> {
        let count = std::thread::available_parallelism()?.get();
        let mut all = Self {
            handles: Vec::with_capacity(count),
            threads: Vec::with_capacity(count),
            stop: CancellationToken::new(),
        };
        for number in 0..count {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let handle = runtime.handle().clone();
            let stop = all.stop.clone();
            let thread = std::thread::Builder::new()
                .name(format!("connections-{number}"))
                .spawn(move || {
                    runtime.block_on(stop.cancelled());
                    runtime.shutdown_timeout(bound);
                })?;
            all.handles.push(handle);
            all.threads.push(thread);
        }
        Ok(all)
    }

    /// The event loops.
    pub(crate) fn handles(&self) -> Vec<Handle> {
        self.handles.clone()
    }

    /// Ends the threads and the tasks that still run on them.
    pub(crate) fn stop(self) {
        self.stop.cancel();
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!(
                    "a thread that serves connections panicked, which is a defect of the platform: see the lines above"
                );
            }
        }
    }
}

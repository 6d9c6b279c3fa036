//! The runtimes on which connections are served.
//!
//! A connection stays on one runtime, with everything that is done for it. If each runtime has one thread, as in
//! `ringfence up`, a request wakes no other thread: on a runtime with several, waking one of them to share the work took
//! more time than the work.

use std::sync::Arc;

use tokio::runtime::Handle;

/// The runtimes, one of which is chosen for each connection.
#[derive(Debug)]
pub(crate) struct Lanes(Vec<(Handle, Arc<()>)>);

/// Counts a connection on its runtime until it is dropped.
#[derive(Debug)]
pub(crate) struct CountedRuntime {
    pub(crate) runtime: Handle,
    _counted: Arc<()>,
}

impl Lanes {
    /// The given runtimes, or that of the caller if there are none.
    pub(crate) fn new(mut runtimes: Vec<Handle>) -> Self {
        if runtimes.is_empty() {
            runtimes.push(Handle::current());
        }
        Self(runtimes.into_iter().map(|runtime| (runtime, Arc::default())).collect())
    }

    /// The runtime that accepts connections.
    pub(crate) fn accepting(&self) -> Handle {
        self.0
            .first()
            .map_or_else(Handle::current, |(runtime, _)| runtime.clone())
    }

    /// A place on the runtime with the fewest connections.
    pub(crate) fn place(&self) -> CountedRuntime {
        let fewest = self.0.iter().min_by_key(|(_, count)| Arc::strong_count(count));
        let (runtime, count) = fewest.map_or_else(
            || (Handle::current(), Arc::default()),
            |(runtime, count)| (runtime.clone(), Arc::clone(count)),
        );
        CountedRuntime {
            runtime,
            _counted: count,
        }
    }
}

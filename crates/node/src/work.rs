//! Work on the host: it is done outside the event loop, and where it fails, the failure becomes an error of the node.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use protocol::node::{Failure, NodeError};
use runtime::stored::LayerError;

/// Runs work that blocks for milliseconds on a thread outside the event loop.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)
}

/// Takes one look of a thread that guards the host against sandboxes; none if it panics. The thread must not end with that:
/// nothing would bound what it guards, and nobody would notice. What the look was about may be half changed.
pub(crate) fn guarded<T>(guard: &str, look: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(look)) {
        Ok(looked) => Some(looked),
        Err(panic) => {
            let text = panic.downcast_ref::<&str>().copied();
            let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            tracing::error!(
                guard,
                "a guard of the host panicked, and begins anew: {}",
                text.unwrap_or("not a text")
            );
            None
        }
    }
}

pub(crate) fn failed(error: impl std::error::Error) -> NodeError {
    NodeError::Failed(Failure::of(&error))
}

pub(crate) fn layer_error(error: LayerError) -> NodeError {
    match error {
        LayerError::NoLayer(layer) => NodeError::NoLayer(layer),
        LayerError::Refused(why) => NodeError::Refused(why),
        LayerError::Full(why) => NodeError::Capacity(why),
        LayerError::Failed(error) => failed(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guard_survives_a_panic() {
        assert_eq!(guarded("test", || 1), Some(1));
        assert_eq!(guarded("test", || -> i32 { panic!("a text") }), None);
        assert_eq!(guarded("test", || -> i32 { panic!("a number: {}", 7) }), None);
        assert_eq!(guarded("test", || 2), Some(2));
    }
}

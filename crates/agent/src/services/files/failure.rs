//! Why a request for a file failed.

use std::io;

use http::StatusCode;

/// Why a request for a file failed: the status and the message of the answer.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) status: StatusCode,
    pub(super) message: String,
}

impl Failure {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    pub(super) fn internal(what: &str, error: &io::Error) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{what}: {error}"))
    }
}

/// Runs file access on a blocking thread.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let crashed = |_| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "file access failed");
    tokio::task::spawn_blocking(work).await.map_err(crashed)?
}

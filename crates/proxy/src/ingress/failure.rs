//! Why there is no response from a sandbox, and what its client is told.

use http::Request;
use protocol::agent;
use protocol::node::DialError;
use tokio_util::sync::CancellationToken;

use super::answer::Answer;
use super::request_body::RequestBody;
use super::route::Target;
use super::unanswered::Unanswered;

/// Why there is no response.
pub(super) struct Failure {
    pub(super) error: DialError,
    /// What the server did instead of answering.
    pub(super) unanswered: Unanswered,
    /// The request, if no part of it was sent.
    pub(super) unsent: Option<Request<RequestBody>>,
    /// Whether the server has sent nothing.
    pub(super) is_untouched: bool,
}

impl Failure {
    pub(super) fn unsent(request: Request<RequestBody>) -> Self {
        Self {
            error: DialError::PortClosed,
            unanswered: Unanswered::Closed,
            unsent: Some(request),
            is_untouched: true,
        }
    }

    pub(super) fn answer(&self, target: &Target) -> Answer {
        match self.error {
            DialError::PortClosed => unanswered(self.unanswered, target),
            error => instead(error, target),
        }
    }
}

/// The meaning of a failed connection.
pub(super) fn closed(error: &hyper::Error, ending: &CancellationToken) -> DialError {
    tracing::debug!(%error, "no response from the sandbox");
    if ending.is_cancelled() {
        DialError::Gone
    } else {
        DialError::PortClosed
    }
}

/// The answer for a sandbox that could not be reached.
pub(super) fn instead(error: DialError, target: &Target) -> Answer {
    match error {
        DialError::Gone => Answer::NotFound(target.id.clone()),
        DialError::PortClosed => Answer::PortClosed(target.id.clone(), target.port),
        DialError::Unreachable => Answer::Unavailable,
    }
}

/// The answer for a server that gave none. Clients know the agent's port as closed or open.
pub(super) fn unanswered(why: Unanswered, target: &Target) -> Answer {
    let id = target.id.clone();
    match target.port {
        agent::PORT => Answer::PortClosed(id, target.port),
        port => Answer::Unanswered(id, port, why),
    }
}

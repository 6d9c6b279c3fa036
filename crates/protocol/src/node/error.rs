//! Errors of a node: a stable kind for programs, and texts for the operator's log.

use std::error::Error;
use std::fmt;

use model::id::{LayerId, SandboxId};
use serde::{Deserialize, Serialize};

/// Why a request to the node failed. Callers act on the variant; the texts are for the operator's log, and but for
/// [`NodeError::Refused`] never for a client.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(tag = "kind", content = "detail", rename_all = "snake_case")]
pub enum NodeError {
    /// The node has no sandbox with this id.
    #[error("sandbox {0} is not on this node")]
    NotFound(SandboxId),
    /// The host has no capacity left; a later attempt may succeed.
    #[error("the host has no capacity: {0}")]
    Capacity(String),
    /// Other sandboxes are being restored with their processes, and the turn of this one did not come in time; a later
    /// attempt may succeed. Everything is as before.
    #[error("too many sandboxes are being restored: the turn of this one did not come in time")]
    Busy {
        /// How many sandboxes of its owner can be restored at the same time, if the request waited for others of this
        /// owner; none if it waited for those of other owners.
        owner_limit: Option<usize>,
    },
    /// A layer that the request names is not on this node.
    #[error("layer {0} is not on this node")]
    NoLayer(LayerId),
    /// The files of a sandbox cannot be stored as a layer. The text says which one and why, in words for the user who
    /// wrote them; names of files are escaped.
    #[error("the files cannot be stored: {0}")]
    Refused(String),
    /// What the request needs from elsewhere, such as a layer of the blob store, cannot be had now; a later attempt may
    /// succeed.
    #[error("what is needed cannot be fetched: {0}")]
    Unavailable(String),
    /// The node cannot do what was requested, whatever the sandbox. The text says why.
    #[error("{0}")]
    Unsupported(String),
    /// The request was given up, because another one asked for the opposite. Everything is as before.
    #[error("the request was cancelled")]
    Cancelled,
    /// The request failed on the host.
    #[error(transparent)]
    Failed(Failure),
    /// The node is not connected: nothing was begun, and a later attempt may succeed.
    #[error("the node is not connected")]
    Away,
    /// The node did not answer: whether the request was carried out is unknown.
    #[error("the node did not answer")]
    Unreachable(#[source] Failure),
}

impl NodeError {
    /// A failure without a cause.
    #[must_use]
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Failed(Failure::new(message))
    }
}

/// An error as text: its message, and those of its causes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cause: Option<Box<Self>>,
}

impl Failure {
    /// A failure without a cause.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            cause: None,
        }
    }

    /// The messages of an error and of its causes.
    #[must_use]
    pub fn of(error: &dyn Error) -> Self {
        Self {
            message: error.to_string(),
            cause: error.source().map(|cause| Box::new(Self::of(cause))),
        }
    }

    /// The step that failed because of `cause`.
    #[must_use]
    pub fn during(step: impl Into<String>, cause: &dyn Error) -> Self {
        Self {
            message: step.into(),
            cause: Some(Box::new(Self::of(cause))),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        let cause = self.cause.as_deref()?;
        Some(cause)
    }
}

/// Why a stream into a sandbox could not be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DialError {
    /// The sandbox is unknown, ended or ending.
    #[error("the sandbox was not found")]
    Gone,
    /// The sandbox runs, and nothing accepts connections on the port.
    #[error("the port is not open")]
    PortClosed,
    /// The node did not answer.
    #[error("the node did not answer")]
    Unreachable,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("attach the disk")]
    struct Attach(#[source] std::io::Error);

    #[test]
    fn an_encoded_error_keeps_its_kind_and_its_causes() {
        let cause = Attach(std::io::Error::other("no loop device is free"));
        for (error, kind, chain) in [
            (
                NodeError::Failed(Failure::during("start a sandbox", &cause)),
                "failed",
                &["start a sandbox", "attach the disk", "no loop device is free"][..],
            ),
            (
                NodeError::Failed(Failure::of(&cause)),
                "failed",
                &["attach the disk", "no loop device is free"],
            ),
            (
                NodeError::Unreachable(Failure::of(&cause)),
                "unreachable",
                &["the node did not answer", "attach the disk", "no loop device is free"],
            ),
            (
                NodeError::Capacity("no slot".to_owned()),
                "capacity",
                &["the host has no capacity: no slot"],
            ),
            (
                NodeError::Busy { owner_limit: Some(2) },
                "busy",
                &["too many sandboxes are being restored: the turn of this one did not come in time"],
            ),
            (
                NodeError::Refused("/a: a block device".to_owned()),
                "refused",
                &["the files cannot be stored: /a: a block device"],
            ),
            (
                NodeError::Unavailable("no answer".to_owned()),
                "unavailable",
                &["what is needed cannot be fetched: no answer"],
            ),
            (NodeError::Cancelled, "cancelled", &["the request was cancelled"]),
            (NodeError::Away, "away", &["the node is not connected"]),
            (
                NodeError::Unsupported("no freezer".to_owned()),
                "unsupported",
                &["no freezer"],
            ),
            (
                NodeError::NotFound("iabc".parse().unwrap()),
                "not_found",
                &["sandbox iabc is not on this node"],
            ),
        ] {
            let encoded = serde_json::to_value(&error).unwrap();
            assert_eq!(encoded["kind"], kind);
            let decoded: NodeError = serde_json::from_value(encoded).unwrap();
            assert_eq!(decoded, error);
            let mut texts = Vec::new();
            let mut next: Option<&dyn Error> = Some(&decoded);
            while let Some(error) = next {
                texts.push(error.to_string());
                next = error.source();
            }
            assert_eq!(texts, chain);
        }
    }
}

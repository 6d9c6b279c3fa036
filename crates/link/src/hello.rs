//! The first exchange on a connection, before the roles of HTTP/2 are taken: one frame of the node, one of the server.
//!
//! A peer of another version ignores fields that it does not know. The node says which levels of the protocol it speaks, and
//! the server chooses one.

use protocol::node::Failure;
use serde::{Deserialize, Serialize};

/// The levels of the protocol that this program speaks, best first.
pub(crate) const LEVELS: &[u32] = &[1];

/// The first frame of a node.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Request {
    /// A node with a token wants a certificate.
    Join {
        /// The secret of the token.
        secret: String,
        /// PKCS #10, in hexadecimal.
        request: String,
        /// The name of its host.
        name: String,
    },
    /// A node with a certificate wants one that ends later.
    Renew {
        /// PKCS #10, in hexadecimal.
        request: String,
    },
    /// A node with a certificate wants to be called.
    Hello(Hello),
}

/// What a node says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The levels of the protocol that it speaks.
    pub levels: Vec<u32>,
    /// The name of its host.
    pub name: String,
    /// The version of its program.
    pub version: String,
    /// The session of the server that it was taken over by, if it was since it has started.
    #[serde(default)]
    pub session: Option<String>,
    /// What it can do.
    #[serde(default)]
    pub capabilities: Capabilities,
}

/// What a node can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Whether it can write the processes of sandboxes to disk.
    #[serde(default)]
    pub writes_processes: bool,
    /// Whether the limits of sandboxes are enforced.
    #[serde(default)]
    pub is_limited: bool,
    /// Whether it keeps deadlines: it is told them, and asked what it has ended or paused by itself.
    #[serde(default)]
    pub keeps_deadlines: bool,
    /// Whether it makes parcels of paused sandboxes, and sandboxes of parcels.
    #[serde(default)]
    pub makes_parcels: bool,
    /// Whether it makes parcels of the memory of snapshots, and memory of parcels.
    #[serde(default)]
    pub copies_memories: bool,
    /// Whether it takes permits that come with starts.
    #[serde(default)]
    pub admits_with_start: bool,
}

/// The answer of a server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The certificate of the node, in PEM, and that of the authority.
    Issued { certificate: String, authority: String },
    /// The node is called from now on.
    Welcome(Welcome),
    /// Nothing is done.
    Refused(Refusal),
}

/// What a server says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The level of the protocol that it has chosen.
    pub level: u32,
    /// Its session: a server that has another one takes the sandboxes of the node over, as after a restart.
    pub session: String,
    /// The version of its program.
    pub version: String,
}

/// Why a server refuses a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{reason}")]
pub struct Refusal {
    /// For the operator of the node.
    pub reason: String,
    /// Whether another attempt will fail as well, until an operator does something.
    pub is_lasting: bool,
}

impl Refusal {
    /// A refusal that lasts.
    pub fn lasting(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            is_lasting: true,
        }
    }

    /// A refusal of this attempt.
    pub fn passing(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            is_lasting: false,
        }
    }

    /// A refusal because the server failed. The causes are for its own log.
    #[must_use]
    pub fn failed(error: &dyn std::error::Error) -> Self {
        tracing::error!("a node was refused: {}", chain(error));
        Self::passing("the server failed, see its log")
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = Failure::of(error).to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text.push_str(": ");
        text.push_str(&error.to_string());
        next = error.source();
    }
    text
}

/// The best level that both sides speak.
pub(crate) fn level(theirs: &[u32]) -> Result<u32, Refusal> {
    LEVELS
        .iter()
        .copied()
        .find(|level| theirs.contains(level))
        .ok_or_else(|| {
            Refusal::lasting(format!(
                "the node speaks the levels {theirs:?} of the protocol, and this server {LEVELS:?}: install versions that are \
                 closer to each other, the server first"
            ))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_node_is_understood_and_one_that_is_too_new_is_refused() {
        let newer =
            r#"{"kind":"hello","levels":[3,2,1],"name":"a","version":"9","capabilities":{"flies":true},"more":{}}"#;
        let Request::Hello(hello) = serde_json::from_str(newer).unwrap() else {
            panic!("another kind");
        };
        assert_eq!(hello.session, None);
        // One that does not say so is not asked for parcels.
        assert!(!hello.capabilities.makes_parcels);
        assert!(!hello.capabilities.copies_memories);
        assert!(!hello.capabilities.admits_with_start);
        assert_eq!(level(&hello.levels), Ok(1));
        let refusal = level(&[3, 2]).unwrap_err();
        assert!(refusal.is_lasting && refusal.reason.contains("[3, 2]"), "{refusal}");
    }
}

//! What a server inside did in place of an answer, so that its owner is told more than that there was none.
//!
//! The first bytes that it sent show it, or that it sent none.

use super::guest::Head;

/// What a server did instead of answering.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unanswered {
    /// The server closed the connection.
    Closed,
    /// The server speaks TLS.
    Tls,
    /// The server speaks SSH.
    Ssh,
    /// The server speaks another protocol.
    Other,
    /// The server sent an answer that is not valid, or only a part of its head.
    Invalid,
    /// The server did not answer a gRPC call over HTTP/2.
    NoHttp2,
}

impl Unanswered {
    /// What the bytes of a failed exchange show.
    pub(super) fn after(head: &Head) -> Self {
        match head.first().as_slice() {
            [] => Self::Closed,
            // Types of TLS records, and the version that all of them have.
            [20..=23, 3, ..] => Self::Tls,
            b"SSH-" => Self::Ssh,
            b"HTTP" => Self::Invalid,
            _ => Self::Other,
        }
    }

    /// What a client is told.
    pub(super) fn message(self) -> &'static str {
        match self {
            Self::Closed => {
                "The sandbox is running but the server on this port closed the connection without an answer"
            }
            Self::Tls => "The sandbox is running but the server on this port speaks TLS",
            Self::Ssh => "The sandbox is running but the server on this port speaks SSH",
            Self::Other => "The sandbox is running but the server on this port does not speak HTTP",
            Self::Invalid => "The sandbox is running but the server on this port sent an invalid answer",
            Self::NoHttp2 => "The sandbox is running but the server on this port did not answer over HTTP/2",
        }
    }

    /// Advice for the user about this case.
    pub(super) fn detail(self) -> &'static str {
        match self {
            Self::Closed => "The server may have failed: look at its output. Requests reach it as HTTP/1.1.",
            Self::Tls => {
                "Requests reach servers inside without TLS. Create the sandbox with this port in httpsPorts of its network, \
                 or start the server without TLS."
            }
            Self::Ssh | Self::Other => {
                "Only HTTP reaches servers inside. For other protocols, start a server on another port that carries them \
                 over WebSocket."
            }
            Self::Invalid => {
                "Its head is not HTTP/1.1, is too long, or did not end: look at the output of the server, and at what \
                 curl -v shows inside the sandbox."
            }
            Self::NoHttp2 => "Calls of gRPC reach servers inside over HTTP/2 without TLS.",
        }
    }
}

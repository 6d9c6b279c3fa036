//! How much the kernel buffers for a connection of a sandbox. That memory is the host's, so it is bounded for each
//! sandbox: the more connections are open, the less a further one gets.

use std::io;

use rustix::io::Errno;
use rustix::net::sockopt;
use tokio::net::TcpStream;

/// Sizes of the buffers of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Buffers {
    /// For what comes.
    received: usize,
    /// For what is sent.
    sent: usize,
}

/// Limits of what is buffered for one connection, in bytes as the kernel counts them. Left to itself, the kernel lets
/// the buffers of each socket grow to what the host allows for one, often tens of megabytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizes {
    /// Sizes of the buffers of the socket to the outside, for what comes and for what is sent. The first bounds the
    /// speed over a long way.
    outside: Buffers,
    /// Sizes of the buffers of the socket in the sandbox, where nothing is far away. Segments there have up to 64 KiB,
    /// and programs send slowly to a buffer for which they have to be cut.
    inside: Buffers,
    /// What is on its way between the sockets, in each direction.
    pub(super) chunk: usize,
}

/// The number of connections with which a sandbox has such buffers, and the buffers. Further connections have
/// [`FURTHER`].
const FIRST: [(usize, Sizes); 3] = [
    (
        4,
        Sizes {
            outside: Buffers {
                received: 3 << 20,
                sent: 1 << 20,
            },
            inside: Buffers {
                received: 512 << 10,
                sent: 512 << 10,
            },
            chunk: 256 << 10,
        },
    ),
    (
        16,
        Sizes {
            outside: Buffers {
                received: 512 << 10,
                sent: 256 << 10,
            },
            inside: Buffers {
                received: 128 << 10,
                sent: 128 << 10,
            },
            chunk: 64 << 10,
        },
    ),
    (
        64,
        Sizes {
            outside: Buffers {
                received: 64 << 10,
                sent: 64 << 10,
            },
            inside: Buffers {
                received: 64 << 10,
                sent: 64 << 10,
            },
            chunk: 32 << 10,
        },
    ),
];
const FURTHER: Sizes = Sizes {
    outside: Buffers {
        received: 16 << 10,
        sent: 16 << 10,
    },
    inside: Buffers {
        received: 64 << 10,
        sent: 16 << 10,
    },
    chunk: 8 << 10,
};

impl Sizes {
    /// Sizes for a connection that is opened while the sandbox has this many others.
    pub(super) fn beside(others: usize) -> Self {
        let found = FIRST.iter().find(|(count, _)| others < *count);
        found.map_or(FURTHER, |(_, sizes)| *sizes)
    }

    /// Whether these are the sizes for one of many connections.
    pub(super) fn is_of_many(self) -> bool {
        self.chunk < 64 << 10
    }

    /// Bounds the socket to the outside.
    ///
    /// # Errors
    /// When the socket is not usable.
    pub(super) fn bound_outside(self, stream: &TcpStream) -> io::Result<()> {
        bound(stream, self.outside)
    }

    /// Bounds the socket in the sandbox.
    ///
    /// # Errors
    /// When the socket is not usable.
    pub(super) fn bound_inside(self, stream: &TcpStream) -> io::Result<()> {
        bound(stream, self.inside)
    }
}

/// Sets the sizes of both buffers of a socket. Where it must not be told more than the host allows every program, it
/// uses that.
fn bound(stream: &TcpStream, buffers: Buffers) -> io::Result<()> {
    match sockopt::set_socket_recv_buffer_size_force(stream, buffers.received / 2) {
        Err(Errno::PERM) => sockopt::set_socket_recv_buffer_size(stream, buffers.received / 2)?,
        outcome => outcome?,
    }
    Ok(sockopt::set_socket_send_buffer_size(stream, buffers.sent / 2)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_with_all_its_connections_takes_a_bounded_amount() {
        let total = |others: usize| {
            let Sizes { outside, inside, chunk } = Sizes::beside(others);
            outside.received + outside.sent + inside.received + inside.sent + 2 * chunk
        };
        let all: usize = (0..1000).map(total).sum();
        assert!(all <= 168 << 20, "{} KiB", all >> 10);
        // Further ones take less, and never more.
        assert!((0..1000).is_sorted_by(|one, other| total(*one) >= total(*other)));
        assert!(total(999) <= 128 << 10);
    }
}

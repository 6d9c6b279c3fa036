//! The link between a server and a node that are processes of their own, on one machine or on two.
//!
//! The node opens the connection, so its host needs no open port: TCP, mutual TLS 1.3, one frame of each side, and then HTTP/2
//! with the roles turned round. The server sends requests on the connection, and the node answers them. Each call of
//! [`protocol::node::NodeApi`] is one stream, whose flow control holds up what is not read; so is each byte stream into
//! a sandbox. Pings notice a peer that is gone without a word. Servers that work as one service connect to each other on the
//! same port, with certificates of their own.
//!
//! Invariants: a call that fails without having been sent has begun nothing; one that was sent goes on, whatever becomes of
//! the connection. A stream that was cut never looks as if it had ended. Everything is bounded: frames, calls, streams and
//! what waits in them, peers that have not shown yet who they are, and time.

mod call;
mod connection;
mod dialer;
mod frame;
mod held;
mod hello;
mod hub;
mod listener;
mod relay;
mod remote;
mod serve;
mod servers;
mod stream;
mod trust;

pub use self::connection::Socket;
pub use self::dialer::{Address, LinkError, connect, hello, join, renew};
pub use self::hello::{Capabilities, Hello, Refusal, Welcome};
pub use self::hub::{Connected, Hub, Session};
pub use self::listener::{Members, MembersFuture, Port};
pub use self::remote::RemoteNode;
pub use self::serve::{Calls, serve};
pub use self::servers::{Answers, Carried, OpenError, ServedFuture, ServerLink, Taken};
pub use self::trust::{Authority, Credentials, Token, TrustError};

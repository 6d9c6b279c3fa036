//! Opens connections into sandboxes, within the limits, and with TLS to servers that speak it. Those of gRPC calls are begun
//! in [`super::grpc`].
//!
//! Most servers with TLS close a connection on which something else arrives without a word, so they are asked in their own
//! protocol, once the request has failed.

use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use protocol::node::DialError;
use tokio::time::timeout;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::answer::Answer;
use super::connection_limit::{ConnectionLimiter, ConnectionPermit, LimitReached};
use super::dial::{self, Dial};
use super::failure::{closed, instead};
use super::flow::{self, Link};
use super::guest::{GuestStream, Head};
use super::pool::{Lease, Pool, Upstream};
use super::route::Target;
use super::tls::GuestTls;

/// Buffer limit of a connection into a sandbox, and with it of the head of a response, in bytes.
pub(super) const GUEST_BUFFER_BYTES: usize = 128 * 1024;

/// How long a server may take to accept a connection and to complete a handshake, to find out whether it speaks TLS.
const TLS_TIMEOUT: Duration = Duration::from_secs(1);

/// What is known about the target of a request.
pub(super) struct Inside {
    /// Cancelled when the sandbox begins to end.
    pub(super) ending: CancellationToken,
    /// Whether the server speaks TLS.
    pub(super) is_https: bool,
}

/// Opens connections into sandboxes.
#[derive(Clone)]
pub(super) struct Connector {
    pub(super) node: Arc<dyn Dial>,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
    connections: ConnectionLimiter,
    pub(super) pool: Pool,
    tls: GuestTls,
}

impl Connector {
    pub(super) fn new(node: Arc<dyn Dial>, tasks: TaskTracker, stop: CancellationToken) -> Self {
        let pool = Pool::new(tasks.clone(), stop.clone());
        Self {
            node,
            tasks,
            stop,
            connections: ConnectionLimiter::new(usize::MAX, usize::MAX),
            pool,
            tls: GuestTls::new(),
        }
    }

    /// Sets limits on connections, in total and per sandbox.
    pub(super) fn limit(&mut self, total: usize, per_sandbox: usize) {
        self.connections = ConnectionLimiter::new(total, per_sandbox);
    }

    /// Takes a place for a new connection to the target.
    pub(super) fn permit(&self, target: &Target) -> Result<ConnectionPermit, Answer> {
        self.pool
            .permit(&self.connections, &target.id)
            .map_err(|reached| match reached {
                LimitReached::Total => Answer::Unavailable,
                LimitReached::Sandbox(limit) => {
                    let id = target.id.clone();
                    Answer::TooManyConnections { id, limit }
                }
            })
    }

    /// Opens a connection to the target.
    pub(super) async fn connect(&self, target: &Target, inside: &Inside) -> Result<Lease, Answer> {
        let ending = &inside.ending;
        let permit = self.permit(target)?;
        let stream = dial::dial(self.node.as_ref(), target, ending)
            .await
            .map_err(|error| instead(error, target))?;
        let stream = if inside.is_https {
            let stream = self.tls.connect(stream, ending).await;
            stream.map_err(|error| match error {
                DialError::PortClosed => Answer::NoTls(target.id.clone(), target.port),
                other => instead(other, target),
            })?
        } else {
            Either::Left(stream)
        };
        let head = Head::default();
        let stream = GuestStream::new(stream, head.clone(), permit.clone());
        let (sender, connection) = hyper::client::conn::http1::Builder::new()
            .max_buf_size(GUEST_BUFFER_BYTES)
            .preserve_header_case(true)
            // Those that the client has not written, or that have no case over HTTP/2.
            .title_case_headers(true)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| instead(closed(&error, ending), target))?;
        let link = Arc::new(Link::default());
        self.tasks.spawn(flow::drive(
            connection.with_upgrades(),
            Arc::clone(&link),
            ending.clone(),
            self.stop.clone(),
        ));
        let upstream = Upstream {
            sender,
            link,
            head,
            permit,
            is_https: inside.is_https,
            thread: std::thread::current().id(),
        };
        Ok(self.pool.add(target, upstream))
    }

    /// Whether a server that closed a connection without an answer speaks TLS.
    pub(super) async fn speaks_tls(&self, target: &Target, ending: &CancellationToken) -> bool {
        let Ok(_permit) = self.permit(target) else { return false };
        let shake = async {
            let stream = self.node.dial(&target.id, target.port).await.ok()?;
            self.tls.connect(stream, ending).await.ok()
        };
        matches!(timeout(TLS_TIMEOUT, Box::pin(shake)).await, Ok(Some(_)))
    }
}

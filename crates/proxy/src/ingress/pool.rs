//! Connections into sandboxes that are kept for the next request to the same port.
//!
//! A server inside may handle one connection at a time, and would then wait for the next request of a kept connection
//! while other clients wait for the server. So a connection is kept only
//!
//! - if the server announced it: HTTP/1.1, without `Connection: close`, with a body whose end is explicit;
//! - if the exchange had a certain end: the request was sent before the response began, and both were read to their end;
//! - while no new connection to the port has waited longer than [`PATIENCE`] for a response. One that does has all idle
//!   connections to this port closed, so a server with one thread delays other clients by no more than that;
//! - for [`IDLE`], and never more than were recently in use at the same time.
//!
//! Kept connections count as connections. If a limit is reached, one of them is closed for a new one.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Duration;

use hyper::client::conn::http1::SendRequest;
use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::agent;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::connection_limit::{ConnectionLimiter, ConnectionPermit, LimitReached};
use super::flow::{Flow, Link};
use super::guest::Head;
use super::request_body::RequestBody;
use super::route::Target;

/// How long a connection is kept without a request: shorter than servers keep theirs (uvicorn and Node 5 s, gunicorn
/// 2 s), so that they rarely close one that is about to be used.
const IDLE: Duration = Duration::from_secs(1);
/// Interval at which expired connections are closed.
const SWEEP: Duration = Duration::from_millis(250);
/// How long a new connection may wait for its response before no more connections to its port are kept: longer than
/// servers that accept connections concurrently take to answer.
pub(super) const PATIENCE: Duration = Duration::from_millis(20);
/// How long a connection must have been idle before it may serve a request that must not be sent twice, if no kept
/// connection to its port has served a second request yet: some servers close their connections without announcing it.
const TRUSTED_AFTER: Duration = Duration::from_millis(10);

/// An open connection into a sandbox.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) sender: SendRequest<RequestBody>,
    pub(super) link: Arc<Link>,
    pub(super) head: Head,
    pub(super) permit: ConnectionPermit,
    /// Whether the connection speaks TLS. That of a port can change while connections to it are kept.
    pub(super) is_https: bool,
    /// The thread that opened the connection. Where each runtime has one thread, the connection is polled by this one.
    pub(super) thread: ThreadId,
}

impl Upstream {
    fn close(self) {
        self.permit.release();
        self.link.abort();
    }
}

/// The kept connections of all sandboxes.
#[derive(Debug, Clone)]
pub(super) struct Pool(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

#[derive(Debug, Default)]
struct Table {
    sandboxes: HashMap<SandboxId, HashMap<u16, Port>>,
    last_id: u64,
    is_swept: bool,
}

/// A port of a sandbox with connections.
#[derive(Debug, Default)]
struct Port {
    /// The connection that was used last is at the end.
    idle: Vec<(Instant, Upstream)>,
    in_use: usize,
    /// Maximum number in use at the same time, since the last sweep and between the two before.
    peak: (usize, usize),
    /// New connections without a response, by number and thus by age, unless a newer one has got its response.
    waiting: BTreeMap<u64, Instant>,
    /// Whether a kept connection has served another request.
    was_reused: bool,
}

impl Port {
    fn count(&mut self) {
        self.in_use += 1;
        self.peak.0 = self.peak.0.max(self.in_use);
    }

    fn is_blocked(&self, now: Instant) -> bool {
        let oldest = self.waiting.values().next();
        oldest.is_some_and(|since| now.saturating_duration_since(*since) >= PATIENCE)
    }

    fn is_unused(&self) -> bool {
        self.in_use == 0 && self.idle.is_empty()
    }
}

impl Table {
    fn port(&mut self, target: &Target) -> &mut Port {
        let ports = self.sandboxes.entry(target.id.clone()).or_default();
        ports.entry(target.port).or_default()
    }

    fn port_mut(&mut self, target: &Target) -> Option<&mut Port> {
        self.sandboxes.get_mut(&target.id)?.get_mut(&target.port)
    }

    fn remove_unused(&mut self, target: &Target) {
        let Some(ports) = self.sandboxes.get_mut(&target.id) else {
            return;
        };
        if ports.get(&target.port).is_some_and(Port::is_unused) {
            ports.remove(&target.port);
        }
        if ports.is_empty() {
            self.sandboxes.remove(&target.id);
        }
    }
}

impl Pool {
    /// An empty pool. A task on `tasks` closes expired connections, and all of them when `stop` is cancelled.
    pub(super) fn new(tasks: TaskTracker, stop: CancellationToken) -> Self {
        Self(Arc::new(Shared {
            table: Mutex::default(),
            tasks,
            stop,
        }))
    }

    /// A kept connection to the target, with TLS or without. `is_repeatable` is whether the request can be sent again if the server has closed
    /// the connection.
    pub(super) fn take(&self, target: &Target, is_https: bool, is_repeatable: bool) -> Option<Lease> {
        let now = Instant::now();
        let here = std::thread::current().id();
        let mut useless = Vec::new();
        let mut table = self.0.table.lock();
        let port = table.port_mut(target)?;
        let is_trusted = is_repeatable || port.was_reused || target.port == agent::PORT;
        let found = loop {
            let usable = |since: Instant| is_trusted || now.saturating_duration_since(since) >= TRUSTED_AFTER;
            let is_near = |(since, upstream): &(Instant, Upstream)| upstream.thread == here && usable(*since);
            let near = port.idle.iter().rposition(is_near);
            let any = || port.idle.iter().rposition(|(since, _)| usable(*since));
            let Some(at) = near.or_else(any) else { break None };
            let (since, upstream) = port.idle.remove(at);
            let is_fresh = now.saturating_duration_since(since) < IDLE;
            if is_fresh && upstream.is_https == is_https && !upstream.sender.is_closed() {
                break Some(upstream);
            }
            useless.push(upstream);
        };
        if found.is_some() {
            port.count();
        } else {
            table.remove_unused(target);
        }
        drop(table);
        useless.into_iter().for_each(Upstream::close);
        found.map(|upstream| self.lease(target, upstream, None))
    }

    /// Registers a new connection.
    pub(super) fn add(&self, target: &Target, upstream: Upstream) -> Lease {
        let mut table = self.0.table.lock();
        table.last_id += 1;
        let number = table.last_id;
        let port = table.port(target);
        port.count();
        port.waiting.insert(number, Instant::now());
        if !table.is_swept {
            table.is_swept = true;
            self.0.tasks.spawn(sweep(self.clone()));
        }
        drop(table);
        self.lease(target, upstream, Some(number))
    }

    fn lease(&self, target: &Target, upstream: Upstream, waiting: Option<u64>) -> Lease {
        Lease {
            upstream: Some(upstream),
            pool: self.clone(),
            target: target.clone(),
            is_new: waiting.is_some(),
            waiting,
            _apart: None,
        }
    }

    /// A lease of a connection that is never kept, which `guard` closes.
    pub(super) fn apart(&self, target: &Target, guard: DropGuard) -> Lease {
        Lease {
            upstream: None,
            pool: self.clone(),
            target: target.clone(),
            is_new: true,
            waiting: None,
            _apart: Some(guard),
        }
    }

    /// Takes a place for a new connection, if necessary by closing a kept one.
    ///
    /// # Errors
    /// When a limit is reached by connections in use.
    pub(super) fn permit(&self, limiter: &ConnectionLimiter, id: &SandboxId) -> Result<ConnectionPermit, LimitReached> {
        loop {
            let reached = match limiter.take(id) {
                Ok(permit) => return Ok(permit),
                Err(reached) => reached,
            };
            let of = match reached {
                LimitReached::Sandbox(_) => Some(id),
                LimitReached::Total => None,
            };
            self.evict(of).ok_or(reached)?.close();
        }
    }

    /// Removes a kept connection, of one sandbox or of any.
    fn evict(&self, of: Option<&SandboxId>) -> Option<Upstream> {
        let mut table = self.0.table.lock();
        let of_port = |port: &mut Port| (!port.idle.is_empty()).then(|| port.idle.remove(0).1);
        match of {
            Some(id) => table.sandboxes.get_mut(id)?.values_mut().find_map(of_port),
            None => table
                .sandboxes
                .values_mut()
                .flat_map(HashMap::values_mut)
                .find_map(of_port),
        }
    }

    /// Closes the kept connections to a port.
    pub(super) fn close_idle(&self, target: &Target) {
        let mut table = self.0.table.lock();
        let idle = table.port_mut(target).map(|port| std::mem::take(&mut port.idle));
        drop(table);
        idle.into_iter().flatten().for_each(|(_, upstream)| upstream.close());
    }

    /// Ends the use of a connection, and keeps it if it is given.
    fn end_use(&self, target: &Target, waiting: Option<u64>, kept: Option<(Upstream, bool)>) {
        let now = Instant::now();
        let mut table = self.0.table.lock();
        let mut closed = None;
        if let Some(port) = table.port_mut(target) {
            port.in_use -= 1;
            if let Some(number) = waiting {
                port.waiting.remove(&number);
            }
            if let Some((upstream, is_new)) = kept {
                port.was_reused |= !is_new;
                let most = port.peak.0.max(port.peak.1);
                if port.idle.len() < most && !port.is_blocked(now) && !self.0.stop.is_cancelled() {
                    port.idle.push((now, upstream));
                } else {
                    closed = Some(upstream);
                }
            }
        }
        table.remove_unused(target);
        drop(table);
        if let Some(upstream) = closed {
            upstream.close();
        }
    }
}

/// Closes expired connections while there are any.
async fn sweep(pool: Pool) {
    let stop = pool.0.stop.clone();
    loop {
        let stopped = tokio::time::timeout(SWEEP, stop.cancelled()).await.is_ok();
        let now = Instant::now();
        let mut expired = Vec::new();
        let mut table = pool.0.table.lock();
        table.sandboxes.retain(|_, ports| {
            ports.retain(|_, port| {
                port.peak = (port.in_use, port.peak.0);
                let is_expired = |since: Instant| stopped || now.saturating_duration_since(since) >= IDLE;
                let old = port.idle.extract_if(.., |(since, upstream)| {
                    is_expired(*since) || upstream.sender.is_closed()
                });
                expired.extend(old);
                !port.is_unused()
            });
            !ports.is_empty()
        });
        table.is_swept = stopped || !table.sandboxes.is_empty();
        let is_done = stopped || !table.is_swept;
        drop(table);
        expired.into_iter().for_each(|(_, upstream)| upstream.close());
        if is_done {
            return;
        }
    }
}

/// A connection in use. Dropped without [`Self::finish`], it closes the connection.
#[derive(Debug)]
pub(super) struct Lease {
    /// The connection; none when it was given back.
    upstream: Option<Upstream>,
    pool: Pool,
    target: Target,
    is_new: bool,
    /// The number of a new connection without a response.
    waiting: Option<u64>,
    /// Closes a connection that does not belong to the pool.
    _apart: Option<DropGuard>,
}

impl Lease {
    /// Whether the connection has served no request before.
    pub(super) fn is_new(&self) -> bool {
        self.is_new
    }

    /// The connection that was leased.
    pub(super) fn upstream(&mut self) -> Option<&mut Upstream> {
        self.upstream.as_mut()
    }

    /// The pool and the target, if the connection is new.
    pub(super) fn waiting(&self) -> Option<(Pool, Target)> {
        self.is_new.then(|| (self.pool.clone(), self.target.clone()))
    }

    /// Called when the head of the response is complete. A server gets its connections in the order in which they were
    /// made, so it has also begun to serve those that are older than this one and still wait: they are not blocked.
    pub(super) fn answered(&mut self) {
        if let Some(number) = self.waiting.take()
            && let Some(port) = self.pool.0.table.lock().port_mut(&self.target)
        {
            port.waiting = port.waiting.split_off(&(number + 1));
        }
    }

    /// Ends the use after a complete response. With `keeps` the connection may serve another request; otherwise it is
    /// closed after the rest of the request was sent.
    pub(super) fn finish(mut self, flow: &Flow, keeps: bool) {
        let wants_body = flow.finish();
        let Some(upstream) = self.upstream.take() else { return };
        let kept = if !wants_body {
            upstream.link.abort();
            None
        } else if keeps {
            upstream.link.set_flow(None);
            Some((upstream, self.is_new))
        } else {
            None
        };
        self.pool.end_use(&self.target, self.waiting.take(), kept);
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(upstream) = self.upstream.take() {
            upstream.link.abort();
            self.pool.end_use(&self.target, self.waiting.take(), None);
        }
    }
}

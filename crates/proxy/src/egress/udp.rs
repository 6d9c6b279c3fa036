//! UDP datagrams of a sandbox.
//!
//! A flow is a pair of the sandbox's address and port and those of the destination. It has a socket on the host, which is
//! connected to the destination, so only answers from there are accepted, and which is closed when it is idle.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{SendFlags, send};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UdpSocket;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::counters::Open;
use super::dns::{MAX_QUERY, Transport};
use super::rate::{Direction, Rate};
use super::record::{EgressRecord, Outcome, Protocol};
use super::relay::Counts;
use super::verdict::{Reason, Verdict, judge_datagram};
use super::{DNS_PORT, Sandbox};

/// Largest datagram.
const DATAGRAM_MAX: usize = 65_535;
/// How long a flow may be idle, once there was an answer and before (RFC 4787 section 4.3 recommends at least two
/// minutes for the first; resolvers and QUIC are done in less, and repeat what they sent).
const IDLE: Duration = Duration::from_secs(120);
const IDLE_UNANSWERED: Duration = Duration::from_secs(30);
/// Datagrams that are received before others get a turn.
const TURN: u32 = 32;
/// Datagrams of a sandbox that are received, in the long run and at once. Beyond, they wait in the buffer of the socket
/// and are lost when it is full, at the cost of the sandbox: the work of the gateway is not charged to it.
const DATAGRAMS_PER_S: u32 = 100_000;
const DATAGRAMS_BURST: u32 = 10_000;
/// Datagrams that begin a flow or are refused, in the same way. Beyond, they are lost.
const FLOWS_PER_S: u32 = 200;
const FLOWS_BURST: u32 = 1000;
/// The same for flows to DNS servers: programs have a socket for each query, and repeat those without an answer after five
/// seconds.
const DNS_IDLE: Duration = Duration::from_secs(2);
const DNS_IDLE_UNANSWERED: Duration = Duration::from_secs(10);

/// The addresses and ports of a flow: the sandbox's, then the destination's.
type Key = (SocketAddr, SocketAddr);

/// Flows that are open.
type Flows = Arc<Mutex<HashMap<Key, Arc<Flow>>>>;

#[derive(Debug)]
struct Flow {
    socket: UdpSocket,
    counts: Counts,
    /// Milliseconds from `begun` to the last datagram.
    last_ms: AtomicU64,
    is_answered: AtomicBool,
    is_dns: bool,
    begun: Instant,
    _open: Open,
}

impl Flow {
    fn touch(&self) {
        let since = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(since, Ordering::Relaxed);
    }

    /// When it is idle for too long, unless more datagrams come.
    fn expires(&self) -> Instant {
        let idle = match (self.is_answered.load(Ordering::Relaxed), self.is_dns) {
            (true, false) => IDLE,
            (false, false) => IDLE_UNANSWERED,
            (true, true) => DNS_IDLE,
            (false, true) => DNS_IDLE_UNANSWERED,
        };
        self.begun + Duration::from_millis(self.last_ms.load(Ordering::Relaxed)) + idle
    }
}

/// The descriptor of the socket, borrowed from a sandbox that is kept.
struct Received(Arc<Sandbox>);

impl AsFd for Received {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.network.udp()
    }
}

impl AsRawFd for Received {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// Forwards datagrams until the sandbox is detached. To be called on the runtime of connections.
pub(super) async fn serve(sandbox: Arc<Sandbox>, stop: CancellationToken) -> io::Result<()> {
    #[expect(
        deprecated,
        reason = "its successor is unsafe to call, and the descriptor is owned by what is passed"
    )]
    let socket = AsyncFd::with_interest(Received(Arc::clone(&sandbox)), Interest::READABLE)?;
    let flows = Flows::default();
    let datagrams = Rate::new(DATAGRAMS_PER_S, DATAGRAMS_BURST);
    let new = Rate::new(FLOWS_PER_S, FLOWS_BURST);
    let mut buffer = vec![0; DATAGRAM_MAX];
    let mut policy = sandbox.policy.subscribe();
    loop {
        let mut ready = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            changed = policy.changed() => {
                if changed.is_err() {
                    return Ok(());
                }
                let policy = Arc::clone(&policy.borrow_and_update());
                let open = |key: &Key| judge_datagram(&sandbox.shared.settings, &policy, key.1.ip()) == Verdict::Open;
                // Each flow's task notices that it is no longer the one in the map.
                flows.lock().retain(|key, _| open(key));
                continue;
            }
            ready = socket.readable() => ready?,
        };
        let (mut received, mut queries) = (0, 0);
        while received < TURN {
            match ready.try_io(|_| sandbox.network.receive(&mut buffer)) {
                Ok(Ok((length, source, destination))) => {
                    let key = (source, destination);
                    if sandbox.is_for_resolver(destination, judge_datagram) {
                        answer(&sandbox, key, &buffer[..length]);
                        queries += 1;
                    } else {
                        forward(&sandbox, &flows, &new, key, &buffer[..length], &stop);
                    }
                }
                Ok(Err(error)) => tracing::debug!("receive a datagram of a sandbox: {error}"),
                Err(_would_block) => break,
            }
            received += 1;
        }
        datagrams.pay(received).await;
        if queries > 0 {
            sandbox.client.pay(queries).await;
        }
        tokio::task::yield_now().await;
    }
}

/// Answers a DNS query, now or when there is an answer.
fn answer(sandbox: &Arc<Sandbox>, (source, destination): Key, datagram: &[u8]) {
    let tasks = &sandbox.shared.tasks;
    // The resolver refuses what is longer by its first bytes.
    let query = datagram[..datagram.len().min(MAX_QUERY + 1)].to_vec();
    let sandbox = Arc::clone(sandbox);
    let mut answered = Box::pin(async move {
        let resolver = &sandbox.shared.resolver;
        let answer = resolver.answer(query, Transport::Udp, &sandbox.client).await;
        if let Some(answer) = answer {
            let _ = sandbox.network.send(destination, source, &answer);
        }
    });
    // An answer from the cache is there at once, without a task.
    let mut now = Context::from_waker(Waker::noop());
    if answered.as_mut().poll(&mut now).is_pending() {
        tasks.spawn(answered);
    }
}

fn forward(sandbox: &Arc<Sandbox>, flows: &Flows, new: &Rate, key: Key, datagram: &[u8], stop: &CancellationToken) {
    let (source, destination) = key;
    let known = flows.lock().get(&key).cloned();
    if known.is_none() && !new.admit() {
        return;
    }
    let flow = match known.map_or_else(|| open(sandbox, flows, key, stop), Ok) {
        Ok(flow) => flow,
        Err(outcome) => {
            let _ = sandbox.network.refuse(source, destination);
            return sandbox.report(record(sandbox, destination, outcome));
        }
    };
    if sandbox.bandwidth.admit(Direction::Out, datagram.len()) {
        // What the host cannot send at once is lost, as it may be on any network.
        // Not by `try_send`, which fails until the runtime has polled a new socket.
        match send(&flow.socket, datagram, SendFlags::DONTWAIT) {
            Ok(sent) => {
                flow.counts.add(Direction::Out, sent);
                flow.touch();
            }
            Err(error) => tracing::trace!("forward a datagram: {error}"),
        }
    }
}

fn record(sandbox: &Sandbox, destination: SocketAddr, outcome: Outcome) -> EgressRecord {
    EgressRecord {
        protocol: Protocol::Udp,
        destination,
        name: sandbox.client.name_of(destination.ip()),
        outcome,
    }
}

/// Opens a flow, if it is allowed.
fn open(sandbox: &Arc<Sandbox>, flows: &Flows, key: Key, stop: &CancellationToken) -> Result<Arc<Flow>, Outcome> {
    let destination = key.1;
    let settings = &sandbox.shared.settings;
    match judge_datagram(settings, &sandbox.policy(), destination.ip()) {
        Verdict::Open => {}
        Verdict::ByDomain => return Err(Outcome::Denied(Reason::Domain)),
        Verdict::Closed(reason) => return Err(Outcome::Denied(reason)),
    }
    if flows.lock().len() >= usize::try_from(settings.limits.udp_flows).unwrap_or(usize::MAX) {
        return Err(Outcome::Denied(Reason::Limit));
    }
    let failed = |error: io::Error| Outcome::Failed(error.to_string());
    let flow = Arc::new(Flow {
        socket: connected(destination).map_err(failed)?,
        counts: Counts::new(&sandbox.shared.counters),
        last_ms: AtomicU64::new(0),
        is_answered: AtomicBool::new(false),
        is_dns: destination.port() == DNS_PORT,
        begun: Instant::now(),
        _open: Open::new(&sandbox.shared.counters, Protocol::Udp),
    });
    flows.lock().insert(key, Arc::clone(&flow));
    sandbox.shared.tasks.spawn(answers(
        Arc::clone(sandbox),
        Arc::clone(flows),
        key,
        Arc::clone(&flow),
        stop.clone(),
    ));
    Ok(flow)
}

fn connected(destination: SocketAddr) -> io::Result<UdpSocket> {
    let any: SocketAddr = match destination {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = std::net::UdpSocket::bind(any)?;
    socket.connect(destination)?;
    socket.set_nonblocking(true)?;
    UdpSocket::from_std(socket)
}

/// Forwards what comes back, until the flow is idle or closed.
async fn answers(sandbox: Arc<Sandbox>, flows: Flows, key: Key, flow: Arc<Flow>, stop: CancellationToken) {
    let (source, destination) = key;
    let is_open = || flows.lock().get(&key).is_some_and(|open| Arc::ptr_eq(open, &flow));
    let mut policy = sandbox.policy.subscribe();
    let mut cut = None;
    loop {
        let received = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            changed = policy.changed() => {
                if changed.is_err() {
                    return;
                }
                let allowed = judge_datagram(&sandbox.shared.settings, &sandbox.policy(), destination.ip()) == Verdict::Open;
                if allowed && is_open() {
                    continue;
                }
                cut = Some(Reason::PolicyChange);
                break;
            }
            readable = flow.socket.readable() => readable,
            () = tokio::time::sleep_until(flow.expires()) => {
                if flow.expires() <= Instant::now() {
                    break;
                }
                continue;
            }
        };
        let mut buffer = sandbox.shared.buffers.take();
        match received.and_then(|()| flow.socket.try_recv(&mut buffer)) {
            Ok(length) => {
                if sandbox.bandwidth.admit(Direction::In, length) {
                    flow.is_answered.store(true, Ordering::Relaxed);
                    flow.touch();
                    flow.counts.add(Direction::In, length);
                    if let Err(error) = sandbox.network.send(destination, source, &buffer[..length]) {
                        tracing::trace!("forward a datagram: {error}");
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The destination refuses datagrams, as a port without a server does.
            Err(_) => {
                let _ = sandbox.network.refuse(source, destination);
            }
        }
        sandbox.shared.buffers.put(buffer);
        tokio::task::consume_budget().await;
    }
    if is_open() {
        flows.lock().remove(&key);
    }
    let (sent, received) = flow.counts.get();
    let took = flow.begun.elapsed();
    sandbox.report(record(
        &sandbox,
        destination,
        Outcome::Ended {
            sent,
            received,
            took,
            cut,
        },
    ));
}

/// Buffers for datagrams, so that an idle flow has none.
#[derive(Debug, Default)]
pub(super) struct Buffers(Mutex<Vec<Vec<u8>>>);

/// Buffers that are kept.
const BUFFERS_KEPT: usize = 16;

impl Buffers {
    fn take(&self) -> Vec<u8> {
        let buffer = self.0.lock().pop();
        buffer.unwrap_or_else(|| vec![0; DATAGRAM_MAX])
    }

    fn put(&self, buffer: Vec<u8>) {
        let mut buffers = self.0.lock();
        if buffers.len() < BUFFERS_KEPT {
            buffers.push(buffer);
        }
    }
}

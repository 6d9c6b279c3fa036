//! UDP datagrams of a sandbox.
//!
//! A flow is a pair of the sandbox's address and port and those of the destination. It has a socket on the host, which is
//! connected to the destination, so only answers from there are accepted, and which is closed when it is idle.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{SendFlags, send};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UdpSocket;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::buffers::DATAGRAM_MAX;
use super::counters::Open;
use super::dns::{MAX_QUERY, Transport};
use super::rate::{Direction, Rate};
use super::record::{EgressRecord, Outcome, Protocol};
use super::relay::Counts;
use super::sandbox::{DNS_PORT, Sandbox};
use super::verdict::{Reason, Verdict, judge_datagram};

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
/// Datagrams that begin a flow, are refused, or are for a DNS server in whose place the resolver answers, in the same way:
/// each is judged, for which the kernel is asked. Beyond, they are lost.
const FLOWS_PER_S: u32 = 200;
const FLOWS_BURST: u32 = 1000;
/// How long flows to DNS servers are kept, once every query was answered and before: programs have a socket for each
/// query, or for those about one name, and repeat those without an answer after five seconds.
const DNS_IDLE: Duration = Duration::from_secs(2);
const DNS_IDLE_UNANSWERED: Duration = Duration::from_secs(10);

/// The addresses and ports of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    /// The address and port of the sandbox.
    source: SocketAddr,
    destination: SocketAddr,
}

/// Flows that are open.
type Flows = Arc<Mutex<HashMap<Key, Arc<Flow>>>>;

#[derive(Debug)]
struct Flow {
    socket: UdpSocket,
    counts: Counts,
    /// Milliseconds from `begun` to the last datagram.
    last_ms: AtomicU64,
    /// Number of datagrams from the sandbox; `received` has that of datagrams to it.
    sent: AtomicU64,
    received: AtomicU64,
    is_dns: bool,
    begun: Instant,
    _open: Open,
}

impl Flow {
    fn new(sandbox: &Sandbox, socket: UdpSocket, is_dns: bool) -> Self {
        Self {
            socket,
            counts: Counts::new(&sandbox.shared.counters, &sandbox.traffic),
            last_ms: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            is_dns,
            begun: Instant::now(),
            _open: Open::new(&sandbox.shared.counters, Protocol::Udp),
        }
    }

    /// Counts a datagram that was forwarded.
    fn count(&self, direction: Direction, bytes: usize) {
        let datagrams = match direction {
            Direction::Out => &self.sent,
            Direction::In => &self.received,
        };
        datagrams.fetch_add(1, Ordering::Relaxed);
        self.counts.add(direction, bytes);
        let since = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(since, Ordering::Relaxed);
    }

    /// When it is idle for too long, unless more datagrams come.
    fn expires(&self) -> Instant {
        let received = self.received.load(Ordering::Relaxed);
        let is_answered = received > 0;
        let is_all_answered = is_answered && received >= self.sent.load(Ordering::Relaxed);
        let idle = match (self.is_dns, is_answered) {
            (false, true) => IDLE,
            (false, false) => IDLE_UNANSWERED,
            (true, _) if is_all_answered => DNS_IDLE,
            (true, _) => DNS_IDLE_UNANSWERED,
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
                let open = |key: &Key| judge_datagram(&sandbox.shared.settings, &policy, key.destination.ip()) == Verdict::Open;
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
                    let key = Key { source, destination };
                    let is_query = take(&sandbox, &flows, &new, key, &buffer[..length], &stop);
                    queries += u32::from(is_query);
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

/// Answers a datagram of the sandbox, or forwards it. Returns whether it was a query for the resolver.
fn take(
    sandbox: &Arc<Sandbox>,
    flows: &Flows,
    new: &Rate,
    key: Key,
    datagram: &[u8],
    stop: &CancellationToken,
) -> bool {
    let Key { source, destination } = key;
    if sandbox.is_resolver(destination) {
        answer(sandbox, key, datagram, stop);
        return true;
    }
    let known = flows.lock().get(&key).cloned();
    if let Some(flow) = known {
        forward(sandbox, &flow, datagram);
        return false;
    }
    // Before it is judged: a sandbox can send many, and the decision asks the kernel.
    if !new.admit() {
        return false;
    }
    if sandbox.is_closed_server(destination, judge_datagram) {
        answer(sandbox, key, datagram, stop);
        return true;
    }
    match open(sandbox, flows, key, stop) {
        Ok(flow) => forward(sandbox, &flow, datagram),
        Err(outcome) => {
            let _ = sandbox.network.refuse(source, destination);
            sandbox.report(record(sandbox, destination, outcome));
        }
    }
    false
}

/// Answers a DNS query, now or when there is an answer.
fn answer(sandbox: &Arc<Sandbox>, key: Key, datagram: &[u8], stop: &CancellationToken) {
    let Key { source, destination } = key;
    let tasks = &sandbox.shared.tasks;
    // The resolver refuses what is longer by its first bytes.
    let query = datagram[..datagram.len().min(MAX_QUERY + 1)].to_vec();
    sandbox.traffic.send(datagram.len());
    let sandbox = Arc::clone(sandbox);
    let mut answered = Box::pin(async move {
        let resolver = &sandbox.shared.resolver;
        let answer = resolver.answer(query, Transport::Udp, &sandbox.client).await;
        if let Some(answer) = answer {
            sandbox.traffic.receive(answer.len());
            let _ = sandbox.network.send(destination, source, &answer);
        }
    });
    // An answer from the cache is there at once, without a task.
    let mut now = Context::from_waker(Waker::noop());
    if answered.as_mut().poll(&mut now).is_pending() {
        let stop = stop.clone();
        tasks.spawn(async move {
            // A question that waits must not leave for a sandbox that is detached.
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = answered => {}
            }
        });
    }
}

fn forward(sandbox: &Sandbox, flow: &Flow, datagram: &[u8]) {
    if sandbox.bandwidth.admit(Direction::Out, datagram.len()) {
        // What the host cannot send at once is lost, as it may be on any network.
        // Not by `try_send`, which fails until the runtime has polled a new socket.
        match send(&flow.socket, datagram, SendFlags::DONTWAIT) {
            Ok(sent) => flow.count(Direction::Out, sent),
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

/// Opens a flow, if the policy allows it.
fn open(sandbox: &Arc<Sandbox>, flows: &Flows, key: Key, stop: &CancellationToken) -> Result<Arc<Flow>, Outcome> {
    let destination = key.destination;
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
    let socket = connected(destination).map_err(failed)?;
    let flow = Arc::new(Flow::new(sandbox, socket, destination.port() == DNS_PORT));
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
    let Key { source, destination } = key;
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
                    flow.count(Direction::In, length);
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use model::network::{Cidr, EgressPolicy};
    use tokio::runtime::Handle;
    use tokio::time::timeout;

    use protocol::node::Traffic;

    use super::*;
    use crate::egress::{Attachment, EgressGateway, EgressLimits, EgressSettings, SandboxNetwork};

    /// A DNS server of the policy, which the sandbox cannot reach.
    const CLOSED_SERVER: &str = "9.9.9.9:53";
    const RESOLVER: &str = "10.0.0.1:53";

    /// The network of a sandbox whose datagrams come from the test alone.
    #[derive(Debug)]
    struct Network {
        tcp: TcpListener,
        udp: std::net::UdpSocket,
        answers: Mutex<Vec<SocketAddr>>,
    }

    impl SandboxNetwork for Network {
        fn tcp(&self) -> io::Result<TcpListener> {
            self.tcp.try_clone()
        }

        fn udp(&self) -> BorrowedFd<'_> {
            self.udp.as_fd()
        }

        fn receive(&self, _: &mut [u8]) -> io::Result<(usize, SocketAddr, SocketAddr)> {
            Err(io::ErrorKind::WouldBlock.into())
        }

        fn send(&self, from: SocketAddr, _: SocketAddr, _: &[u8]) -> io::Result<()> {
            self.answers.lock().push(from);
            Ok(())
        }

        fn resolver(&self) -> std::net::IpAddr {
            address(RESOLVER).ip()
        }

        fn refuse(&self, _: SocketAddr, _: SocketAddr) -> io::Result<()> {
            Ok(())
        }
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// A sandbox whose policy opens names alone and has a DNS server, with the arguments of `serve`.
    struct World {
        gateway: EgressGateway,
        attachment: Attachment,
        network: Arc<Network>,
        flows: Flows,
        new: Rate,
        stop: CancellationToken,
    }

    impl World {
        fn new(resolver: SocketAddr) -> Self {
            let settings = EgressSettings {
                resolvers: vec![resolver],
                hosts: [("table.example".to_owned(), vec![[192, 0, 2, 7].into()])].into(),
                limits: EgressLimits {
                    dns_queries_per_s: 1,
                    ..EgressLimits::default()
                },
                ..EgressSettings::default()
            };
            let policy = EgressPolicy {
                deny: vec![Cidr::ALL],
                allow_domains: vec!["*".parse().unwrap()],
                dns_servers: vec!["9.9.9.9".parse().unwrap()],
                ..EgressPolicy::default()
            };
            let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
            tcp.set_nonblocking(true).unwrap();
            let network = Arc::new(Network {
                tcp,
                udp: std::net::UdpSocket::bind("127.0.0.1:0").unwrap(),
                answers: Mutex::default(),
            });
            let gateway = EgressGateway::new(settings, Handle::current());
            let attachment = gateway
                .attach(
                    Arc::clone(&network) as _,
                    policy,
                    Box::new(|_| {}),
                    Arc::new(Traffic::new(0)),
                )
                .unwrap();
            Self {
                stop: gateway.stop.child_token(),
                gateway,
                attachment,
                network,
                flows: Flows::default(),
                new: Rate::new(FLOWS_PER_S, FLOWS_BURST),
            }
        }

        /// Takes a datagram for a destination, from one port of the sandbox.
        fn take(&self, destination: &str, datagram: &[u8]) -> bool {
            let sandbox = &self.attachment.sandbox;
            take(sandbox, &self.flows, &self.new, key(destination), datagram, &self.stop)
        }
    }

    fn key(destination: &str) -> Key {
        Key {
            source: address("10.0.0.2:4000"),
            destination: address(destination),
        }
    }

    /// A query for the address of a name.
    fn query(name: &str) -> Vec<u8> {
        let mut query = b"\x12\x34\x01\x00\x00\x01\0\0\0\0\0\0".to_vec();
        for label in name.split('.') {
            query.push(u8::try_from(label.len()).unwrap());
            query.extend(label.bytes());
        }
        query.extend(b"\0\0\x01\0\x01");
        query
    }

    #[tokio::test(start_paused = true)]
    async fn flows_to_dns_servers_wait_for_each_answer() {
        use Direction::{In, Out};

        let world = World::new(address(CLOSED_SERVER));
        let idle = |flow: &Flow| (flow.expires() - Instant::now()).as_secs();
        let flow = |is_dns| {
            let socket = connected(address("127.0.0.1:9")).unwrap();
            Flow::new(&world.attachment.sandbox, socket, is_dns)
        };
        let after_each = |flow: &Flow| {
            [Out, Out, In, In, Out].map(|direction| {
                flow.count(direction, 30);
                idle(flow)
            })
        };
        let (dns, other) = (flow(true), flow(false));
        assert_eq!([idle(&dns), idle(&other)], [10, 30]);
        assert_eq!(after_each(&dns), [10, 10, 10, 2, 10]);
        assert_eq!(after_each(&other), [30, 30, 120, 120, 120]);
    }

    #[tokio::test(start_paused = true)]
    async fn datagrams_are_judged_within_the_rate_of_new_flows_only() {
        let world = World::new(address(CLOSED_SERVER));
        let query = query("table.example");
        let count = |destination: &str| (0..1500).filter(|_| world.take(destination, &query)).count();
        assert_eq!(count(CLOSED_SERVER), 1000);
        assert_eq!(*world.network.answers.lock(), [address(CLOSED_SERVER); 1000]);
        // Those to the resolver need no decision.
        assert_eq!(count(RESOLVER), 1500);
        assert_eq!(world.network.answers.lock().len(), 2500);
    }

    #[tokio::test]
    async fn datagrams_of_a_known_flow_are_not_judged() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let world = World::new(address(CLOSED_SERVER));
        // The sandbox could not open it.
        let socket = connected(server.local_addr().unwrap()).unwrap();
        let flow = Arc::new(Flow::new(&world.attachment.sandbox, socket, true));
        world.flows.lock().insert(key(CLOSED_SERVER), flow);
        while world.new.admit() {}
        assert!(!world.take(CLOSED_SERVER, &query("table.example")));
        let mut buffer = [0; 100];
        let received = timeout(Duration::from_secs(10), server.recv(&mut buffer)).await;
        assert_eq!(buffer[..received.unwrap().unwrap()], query("table.example"));
        assert!(world.network.answers.lock().is_empty());
    }

    #[tokio::test]
    async fn queries_of_a_sandbox_that_is_detached_end() {
        let server = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let world = World::new(server.local_addr().unwrap());
        world.attachment.set_policy(EgressPolicy::default());
        // Of a rate of one per second and a burst of four, the last would be sent in four seconds.
        for name in [
            "a.test", "b.test", "c.test", "d.test", "e.test", "f.test", "g.test", "h.test",
        ] {
            assert!(world.take(RESOLVER, &query(name)));
        }
        let waited = Duration::from_secs(10);
        timeout(waited, server.recv(&mut [0; 100])).await.unwrap().unwrap();
        // No task is left that could send one.
        let ended = timeout(Duration::from_secs(2), world.gateway.stop()).await;
        assert!(ended.is_ok());
        assert!(world.network.answers.lock().is_empty());
    }
}

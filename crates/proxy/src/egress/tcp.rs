//! TCP connections of a sandbox.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use model::egress_proxy::EgressProxy;
use model::network::EgressPolicy;
use tokio::io::{AsyncWriteExt as _, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;

use super::counters::Open;
use super::dns::{MAX_QUERY, Transport};
use super::intercept::{self, Intercepted};
use super::outside::{Outside, socket_of};
use super::rate::{Direction, Rate};
use super::record::{EgressRecord, Outcome, Protocol};
use super::relay::{self, Counts, read_some, write_all};
use super::sandbox::Sandbox;
use super::settings::EgressLimits;
use super::sizes::Sizes;
use super::sniff::{self, Sniffed};
use super::socket::{self, ADDRESSES_MAX, close_cleanly, reset_on_close};
use super::socks::{self, Destination};
use super::verdict::{Reason, Verdict, closed_to_all, judge};

/// How long a client may take to send the bytes that name a domain.
const SNIFF_TIMEOUT: Duration = Duration::from_secs(10);
/// How long accepting pauses when the host has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Queries on one connection, and how long it may be idle (RFC 7766 section 6.2.3).
const DNS_QUERIES: usize = 1000;
const DNS_IDLE: Duration = Duration::from_secs(10);

/// Accepts connections until the sandbox is detached.
pub(super) async fn serve(sandbox: Arc<Sandbox>, listener: TcpListener, stop: CancellationToken) {
    let limits = sandbox.shared.settings.limits;
    let most = usize::try_from(limits.connections.max(1))
        .unwrap_or(usize::MAX)
        .min(Semaphore::MAX_PERMITS);
    let connections = Arc::new(Semaphore::new(most));
    let rate = Rate::new(
        limits.connections_per_s,
        limits.connections_per_s.saturating_mul(EgressLimits::BURST_FACTOR),
    );
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!("accept a connection of a sandbox: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        reset_on_close(&stream);
        let Ok(destination) = stream.local_addr() else { continue };
        let destination = SocketAddr::new(destination.ip().to_canonical(), destination.port());
        let permit = match Arc::clone(&connections).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                sandbox.denied(destination, None, Reason::Limit);
                rate.pay(1).await;
                continue;
            }
        };
        let sizes = Sizes::beside(most - connections.available_permits() - 1);
        if let Err(error) = sizes.bound_inside(&stream) {
            tracing::debug!("bound the buffers of a connection: {error}");
            continue;
        }
        let tasks = sandbox.shared.tasks.clone();
        let open = Open::new(&sandbox.shared.counters, Protocol::Tcp);
        let (sandbox, stop) = (Arc::clone(&sandbox), stop.clone());
        tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stop.cancelled() => {}
                () = connection(&sandbox, stream, destination, sizes) => {}
            }
            drop((permit, open));
        });
        // Beyond the rate, connections wait in the backlog, and then in the sandbox: they cost the host nothing.
        rate.pay(1).await;
    }
}

impl Sandbox {
    fn denied(&self, destination: SocketAddr, name: Option<String>, reason: Reason) {
        self.report(EgressRecord {
            protocol: Protocol::Tcp,
            destination,
            name: name.or_else(|| self.client.name_of(destination.ip())),
            outcome: Outcome::Denied(reason),
        });
    }
}

/// One connection of the sandbox. Its end there stays open as long as such ends are held.
async fn connection(sandbox: &Arc<Sandbox>, stream: TcpStream, destination: SocketAddr, sizes: Sizes) {
    let end = serve_connection(sandbox, stream, destination, sizes).await;
    sandbox.released().await;
    drop(end);
}

/// Serves a connection until it has ended, and returns the end of it in the sandbox.
async fn serve_connection(
    sandbox: &Arc<Sandbox>,
    stream: TcpStream,
    destination: SocketAddr,
    sizes: Sizes,
) -> Option<OwnedFd> {
    if sandbox.is_for_resolver(destination, judge) {
        close_cleanly(&stream);
        answer_queries(sandbox, &stream).await;
        if !matches!(timeout(DNS_IDLE, relay::taken(&stream)).await, Ok(Ok(()))) {
            reset_on_close(&stream);
        }
        return descriptor(stream);
    }
    let mut policy = sandbox.policy.subscribe();
    let current = Arc::clone(&policy.borrow_and_update());
    let mut target = match Target::of(sandbox, &current, &stream, destination).await {
        Ok(target) => target,
        Err(Refusal { name, reason }) => {
            sandbox.denied(destination, name, reason);
            return descriptor(stream);
        }
    };
    // Held as long as the connection is intercepted.
    let _permit = match &target.intercepted {
        None => None,
        Some(host) => match sandbox.interceptor.admit() {
            None => {
                sandbox.denied(destination, Some(host.clone()), Reason::Limit);
                return descriptor(stream);
            }
            permit => permit,
        },
    };
    let begun = Instant::now();
    let counts = Arc::new(Counts::new(&sandbox.shared.counters, &sandbox.traffic));
    let first = std::mem::take(&mut target.first);
    let interception = current.interception.as_deref();
    let intercepted = target.intercepted.clone().zip(interception);
    // What intercepts a connection gets it for itself.
    let (relayed, given, duplicate) = match intercepted {
        None => (Some(stream), None, None),
        Some(intercepted) => {
            let duplicate = stream.as_fd().try_clone_to_owned().ok();
            (None, Some((stream, intercepted)), duplicate)
        }
    };
    let work = async {
        if let Some(stream) = &relayed {
            return relay(sandbox, stream, &target, &first, destination, sizes, &counts).await;
        }
        let Some((stream, (host, interception))) = given else {
            return Ok(None);
        };
        stream.set_nodelay(true)?;
        let connection = Intercepted {
            host,
            destination,
            first,
            is_of_many: sizes.is_of_many(),
        };
        let connect = target.connect(sandbox, destination, sizes);
        let served = intercept::serve(sandbox, interception, stream, connection, connect, &counts);
        Box::pin(served).await.map(|()| None)
    };
    let closed_by_policy = async {
        while policy.changed().await.is_ok() {
            let policy = Arc::clone(&policy.borrow_and_update());
            if !target.is_allowed(sandbox, &policy, destination) {
                return;
            }
        }
        std::future::pending().await
    };
    let ended = |cut| {
        let (sent, received) = counts.get();
        let took = begun.elapsed();
        Outcome::Ended {
            sent,
            received,
            took,
            cut,
        }
    };
    let outcome = tokio::select! {
        biased;
        () = closed_by_policy => ended(Some(Reason::PolicyChange)),
        outcome = work => match outcome {
            Err(error) => Outcome::Failed(error.to_string()),
            Ok(cut) => ended(cut),
        },
    };
    sandbox.report(EgressRecord {
        protocol: Protocol::Tcp,
        destination,
        name: target
            .name
            .or(target.intercepted)
            .or_else(|| sandbox.client.name_of(destination.ip())),
        outcome,
    });
    relayed.map_or(duplicate, descriptor)
}

fn descriptor(stream: TcpStream) -> Option<OwnedFd> {
    stream.into_std().ok().map(OwnedFd::from)
}

/// Connects, and relays bytes until both directions have ended. Returns why the gateway ended it, if it did.
///
/// # Errors
/// When there is no connection.
async fn relay(
    sandbox: &Arc<Sandbox>,
    stream: &TcpStream,
    target: &Target,
    first: &[u8],
    destination: SocketAddr,
    sizes: Sizes,
    counts: &Counts,
) -> io::Result<Option<Reason>> {
    let mut outside = tokio::select! {
        biased;
        outside = target.connect(sandbox, destination, sizes) => outside?,
        () = reset(stream) => return Err(io::Error::other("the program gave up")),
    };
    let relayed = async {
        stream.set_nodelay(true)?;
        counts.add(Direction::Out, first.len());
        outside.write_all(first).await?;
        outside.flush().await?;
        let pipes = &sandbox.shared.pipes;
        match &mut outside {
            Either::Left(outside) => {
                relay::relay(pipes, stream, outside, sizes.chunk, &sandbox.bandwidth, counts).await
            }
            Either::Right(outside) => relay::relay_tls(stream, outside, &sandbox.bandwidth, counts).await,
        }
    };
    let relayed = relayed.await;
    let Ok(directions) = relayed else { return Ok(None) };
    // A side that has got everything is told so, and the other one that something is missing.
    if directions.back {
        close_cleanly(stream);
    }
    if directions.out {
        close_cleanly(socket_of(&outside));
    }
    let is_whole = directions.out && directions.back;
    Ok((!is_whole).then_some(Reason::HalfClosed))
}

/// Returns when the program has reset its connection. That it has sent everything is no such sign: it may wait for an
/// answer.
async fn reset(stream: &TcpStream) {
    // An error of waiting is noticed by the relay.
    if stream.ready(Interest::ERROR).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Where a connection goes.
#[derive(Debug)]
struct Target {
    /// The proxy that makes the connection, if there is one.
    proxy: Option<Box<EgressProxy>>,
    /// Addresses, to be tried in this order; none if the proxy resolves the name.
    addresses: Vec<SocketAddr>,
    /// The domain by which the connection was allowed.
    name: Option<String>,
    /// Bytes that were read to find the name.
    first: Vec<u8>,
    /// The host to which the connection is intercepted.
    intercepted: Option<String>,
}

/// A connection that is refused.
#[derive(Debug)]
struct Refusal {
    name: Option<String>,
    reason: Reason,
}

impl Target {
    async fn of(
        sandbox: &Sandbox,
        policy: &EgressPolicy,
        stream: &TcpStream,
        destination: SocketAddr,
    ) -> Result<Self, Refusal> {
        let settings = &sandbox.shared.settings;
        match judge(settings, policy, destination.ip()) {
            Verdict::Open => Self::of_open(sandbox, policy, stream, destination).await,
            Verdict::Closed(reason) => Err(Refusal { name: None, reason }),
            Verdict::ByDomain => {
                let (name, first) = first_bytes(stream).await;
                let refusal = |reason| Refusal {
                    name: name.clone(),
                    reason,
                };
                let known = name.as_deref().filter(|name| policy.allows_domain(name));
                let known = known.ok_or_else(|| refusal(Reason::Domain))?;
                let intercepted = is_intercepted(policy, known, &first, destination).then(|| known.to_owned());
                if let Some(proxy) = policy.proxy.clone() {
                    return Ok(Self {
                        proxy: Some(proxy),
                        addresses: Vec::new(),
                        name,
                        first,
                        intercepted,
                    });
                }
                let is_open = |address| closed_to_all(settings, address).is_none();
                let addresses = resolve(sandbox, known, destination, intercepted.is_some(), is_open).await;
                let addresses = addresses.map_err(refusal)?;
                Ok(Self {
                    proxy: None,
                    addresses,
                    name,
                    first,
                    intercepted,
                })
            }
        }
    }

    /// Chooses the target for an open destination, whatever the connection names. It is asked for a name only if it may
    /// have to be intercepted, and then leads to addresses of that name, of which the policy must allow each.
    async fn of_open(
        sandbox: &Sandbox,
        policy: &EgressPolicy,
        stream: &TcpStream,
        destination: SocketAddr,
    ) -> Result<Self, Refusal> {
        let mut target = Self {
            proxy: policy.proxy.clone(),
            addresses: vec![destination],
            name: None,
            first: Vec::new(),
            intercepted: None,
        };
        let mut rules = policy.interception.iter().flat_map(|interception| &interception.rules);
        if !rules.any(|rule| rule.port == destination.port()) {
            return Ok(target);
        }
        let (name, first) = first_bytes(stream).await;
        target.first = first;
        let Some(host) = name.filter(|name| is_intercepted(policy, name, &target.first, destination)) else {
            return Ok(target);
        };
        if target.proxy.is_none() {
            let is_open = |address| is_open(sandbox, policy, address, &host);
            let addresses = resolve(sandbox, &host, destination, true, is_open).await;
            target.addresses = addresses.map_err(|reason| Refusal {
                name: Some(host.clone()),
                reason,
            })?;
        }
        target.intercepted = Some(host);
        Ok(target)
    }

    /// Makes the connection: through the proxy, if there is one, and never without it.
    async fn connect(&self, sandbox: &Sandbox, destination: SocketAddr, sizes: Sizes) -> io::Result<Outside> {
        let Some(proxy) = &self.proxy else {
            let outside = socket::connect(&self.addresses, sizes).await?;
            reset_on_close(&outside);
            return Ok(Either::Left(outside));
        };
        let to = match &self.name {
            Some(name) => Destination::Name(name.clone(), destination.port()),
            None => Destination::Address(destination),
        };
        Box::pin(socks::connect(sandbox, proxy, &to, sizes)).await
    }

    /// The host that its first bytes name, where that made a difference.
    fn host(&self) -> Option<&str> {
        self.name.as_deref().or(self.intercepted.as_deref())
    }

    /// Whether a policy that was set later allows this connection, by the same way.
    fn is_allowed(&self, sandbox: &Sandbox, policy: &EgressPolicy, destination: SocketAddr) -> bool {
        if self.proxy != policy.proxy {
            return false;
        }
        match judge(&sandbox.shared.settings, policy, destination.ip()) {
            // The addresses of a name may be others than the one that is open.
            Verdict::Open => {
                let host = self.host().unwrap_or_default();
                let is_open = |address: &SocketAddr| is_open(sandbox, policy, address.ip(), host);
                policy.allows_domain(host)
                    || (self.name.is_none() || self.proxy.is_none()) && self.addresses.iter().all(is_open)
            }
            Verdict::ByDomain => self.host().is_some_and(|name| policy.allows_domain(name)),
            Verdict::Closed(_) => false,
        }
    }
}

/// Whether a connection with these first bytes is intercepted.
fn is_intercepted(policy: &EgressPolicy, name: &str, first: &[u8], destination: SocketAddr) -> bool {
    let interception = policy.interception.as_deref();
    sniff::is_tls(first)
        && interception.is_some_and(|interception| intercept::is_intercepted(interception, name, destination.port()))
}

/// Whether an address of a host is open, be it only because the host is.
fn is_open(sandbox: &Sandbox, policy: &EgressPolicy, address: IpAddr, host: &str) -> bool {
    match judge(&sandbox.shared.settings, policy, address) {
        Verdict::Open => true,
        Verdict::ByDomain => policy.allows_domain(host),
        Verdict::Closed(_) => false,
    }
}

/// The addresses of a name that are open, with the port of the destination, or why there are none. Names of rules do not
/// count as queries of the sandbox: there are few, and its connections have a rate.
async fn resolve(
    sandbox: &Sandbox,
    name: &str,
    destination: SocketAddr,
    is_of_rule: bool,
    is_open: impl Fn(IpAddr) -> bool,
) -> Result<Vec<SocketAddr>, Reason> {
    let resolver = &sandbox.shared.resolver;
    let addresses = if is_of_rule {
        resolver.addresses_unlimited(name, &sandbox.client).await
    } else {
        resolver.addresses(name, &sandbox.client).await
    };
    let mut addresses = match addresses {
        Err(error) if error.kind() == io::ErrorKind::QuotaExceeded => return Err(Reason::Queries),
        addresses => addresses.unwrap_or_default(),
    };
    addresses.retain(|address| is_open(*address));
    // The one that the sandbox chose, then those of its family.
    let chosen = destination.ip();
    addresses.sort_by_key(|address| (*address != chosen, address.is_ipv4() != chosen.is_ipv4()));
    addresses.truncate(ADDRESSES_MAX);
    let with_port = addresses
        .into_iter()
        .map(|address| SocketAddr::new(address, destination.port()));
    let addresses: Vec<_> = with_port.collect();
    if addresses.is_empty() {
        Err(Reason::DomainAddresses)
    } else {
        Ok(addresses)
    }
}

/// Reads until the bytes name a domain, or certainly none. Returns the name and the bytes.
async fn first_bytes(stream: &TcpStream) -> (Option<String>, Vec<u8>) {
    let mut bytes = Vec::new();
    let read = async {
        loop {
            match sniff::sniff(&bytes) {
                Sniffed::Name(name) => return Some(name),
                Sniffed::NoName => return None,
                Sniffed::Incomplete => {}
            }
            let mut part = [0; 4096];
            match read_some(stream, &mut part).await {
                Ok(0) | Err(_) => return None,
                Ok(length) => bytes.extend_from_slice(&part[..length]),
            }
        }
    };
    let name = timeout(SNIFF_TIMEOUT, read).await.unwrap_or_default();
    (name, bytes)
}

async fn read_exact(stream: &TcpStream, mut part: &mut [u8]) -> io::Result<()> {
    while !part.is_empty() {
        let length = read_some(stream, part).await?;
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        part = &mut part[length..];
    }
    Ok(())
}

/// Answers DNS queries on a connection, one after the other (RFC 7766).
async fn answer_queries(sandbox: &Sandbox, stream: &TcpStream) {
    for _ in 0..DNS_QUERIES {
        let exchange = async {
            let mut length = [0; 2];
            read_exact(stream, &mut length).await?;
            let length = usize::from(u16::from_be_bytes(length));
            // The resolver refuses what is longer by its first bytes. The rest is not read, so the connection ends.
            let mut query = vec![0; length.min(MAX_QUERY + 1)];
            read_exact(stream, &mut query).await?;
            sandbox.traffic.send(2 + query.len());
            let is_whole = query.len() <= MAX_QUERY;
            let resolver = &sandbox.shared.resolver;
            let answer = resolver.answer(query, Transport::Tcp, &sandbox.client).await;
            let answer = answer.ok_or(io::ErrorKind::InvalidData)?;
            let answer_length = u16::try_from(answer.len()).map_err(io::Error::other)?;
            let message = [&answer_length.to_be_bytes()[..], &answer].concat();
            sandbox.traffic.receive(message.len());
            write_all(stream, &message).await?;
            io::Result::Ok(is_whole)
        };
        if !matches!(timeout(DNS_IDLE, exchange).await, Ok(Ok(true))) {
            return;
        }
        sandbox.client.pay(1).await;
    }
}

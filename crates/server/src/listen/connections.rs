//! Client connections: limits on their number, in total and per peer, and time limits for each.
//!
//! When a limit is reached, a new connection replaces one without a request in progress: first one that never got a
//! successful response, then the one that has been idle for longest. So connections that are only held open block no
//! other clients, and pools of idle connections are kept as long as there is capacity.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::lanes::{CountedRuntime, Lanes};
use crate::metrics::ConnectionCounts;
use crate::peers::Peer;
use crate::settings::ConnectionLimits;

/// How long a new connection may take until its first request.
const FIRST_REQUEST: Duration = Duration::from_secs(10);
/// How long the head of a later request may take from its first byte, over HTTP/1.
const HEAD: Duration = Duration::from_secs(10);
/// How long a connection may be idle between requests: longer than clients keep connections, so that the client closes
/// first and never sends a request on a closing connection.
const IDLE: Duration = Duration::from_secs(620);
/// How far the limit may be exceeded while evicted connections are closing.
const CLOSING: usize = 64;
/// Shortest interval between log entries about refused connections.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// All connections of a server.
#[derive(Debug)]
pub(crate) struct Connections {
    limits: ConnectionLimits,
    lanes: Lanes,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    last_id: u64,
    open: usize,
    refused: u64,
    evicted: u64,
    peers: HashMap<Peer, PeerConnections>,
    idle: Idle,
    logged_at: Option<Instant>,
}

#[derive(Debug, Default)]
struct PeerConnections {
    open: usize,
    idle: Idle,
}

/// Connections without a request in progress, in the order of eviction.
type Idle = BTreeMap<EvictionOrder, (Option<Peer>, CancellationToken)>;

/// The sort key for eviction: whether the connection ever got a successful response, since when it is idle, and its
/// number.
type EvictionOrder = (bool, Instant, u64);

impl Table {
    fn add_idle(&mut self, peer: Option<Peer>, order: EvictionOrder, evicted: &CancellationToken) {
        self.idle.insert(order, (peer, evicted.clone()));
        if let Some(of_peer) = peer.and_then(|peer| self.peers.get_mut(&peer)) {
            of_peer.idle.insert(order, (peer, evicted.clone()));
        }
    }

    fn remove_idle(&mut self, peer: Option<Peer>, order: &EvictionOrder) {
        self.idle.remove(order);
        if let Some(of_peer) = peer.and_then(|peer| self.peers.get_mut(&peer)) {
            of_peer.idle.remove(order);
        }
    }

    /// Evicts the first idle connection in the order of eviction, of one peer or of all; `false` when all are busy.
    fn evict(&mut self, of: Option<Peer>) -> bool {
        let idle = match of {
            Some(peer) => self.peers.get(&peer).map(|of_peer| &of_peer.idle),
            None => Some(&self.idle),
        };
        let Some((order, (peer, evicted))) = idle.and_then(BTreeMap::first_key_value) else {
            return false;
        };
        let (order, peer) = (*order, *peer);
        evicted.cancel();
        self.remove_idle(peer, &order);
        self.evicted += 1;
        true
    }
}

impl Connections {
    pub(crate) fn new(limits: ConnectionLimits, lanes: Lanes) -> Arc<Self> {
        Arc::new(Self {
            limits,
            lanes,
            table: Mutex::default(),
        })
    }

    /// Numbers of connections.
    pub(crate) fn counts(&self) -> ConnectionCounts {
        let table = self.table.lock();
        ConnectionCounts {
            open: table.open,
            refused: table.refused,
            evicted: table.evicted,
        }
    }

    /// The peer of an address; `None` if many clients share it.
    pub(super) fn peer(&self, address: std::net::IpAddr) -> Option<Peer> {
        Peer::of(address, &self.limits.shared_peers)
    }

    /// Admits a new connection; `None` when a limit is reached and no connection can be evicted.
    pub(super) fn admit(self: &Arc<Self>, peer: Option<Peer>) -> Option<Arc<Connection>> {
        let mut table = self.table.lock();
        let now = Instant::now();
        let of_peer = peer
            .and_then(|peer| table.peers.get(&peer))
            .map_or(0, |of_peer| of_peer.open);
        let is_full = |open: usize, most: usize| open >= most;
        let over = |open: usize, most: usize| open >= most + CLOSING.min(most);
        let refused = if is_full(of_peer, self.limits.per_peer) {
            over(of_peer, self.limits.per_peer) || !table.evict(peer)
        } else if is_full(table.open, self.limits.total) {
            over(table.open, self.limits.total) || !table.evict(None)
        } else {
            false
        };
        if refused {
            table.refused += 1;
            if table.logged_at.is_none_or(|at| now - at >= LOG_INTERVAL) {
                table.logged_at = Some(now);
                tracing::warn!(
                    peer = %peer.map_or_else(|| "a shared address".to_owned(), |peer| peer.to_string()),
                    peer.connections = of_peer,
                    connections = table.open,
                    refused = table.refused,
                    "a connection was refused: connection limit reached"
                );
            }
            return None;
        }
        table.open += 1;
        table.last_id += 1;
        let connection = Arc::new(Connection {
            connections: Arc::clone(self),
            peer,
            place: self.lanes.place(),
            id: table.last_id,
            evicted: CancellationToken::new(),
            state: Mutex::new(ConnectionState {
                in_progress: 0,
                is_http1: true,
                was_good: false,
                had_request: false,
                head_began: None,
                idle_since: now,
            }),
        });
        if let Some(peer) = peer {
            table.peers.entry(peer).or_default().open += 1;
        }
        table.add_idle(peer, (false, now, connection.id), &connection.evicted);
        Some(connection)
    }
}

/// One connection, from its acceptance until its socket is closed.
#[derive(Debug)]
pub(super) struct Connection {
    connections: Arc<Connections>,
    peer: Option<Peer>,
    place: CountedRuntime,
    id: u64,
    evicted: CancellationToken,
    state: Mutex<ConnectionState>,
}

#[derive(Debug)]
struct ConnectionState {
    /// Requests without a complete response.
    in_progress: usize,
    is_http1: bool,
    /// Whether a request got a successful response.
    was_good: bool,
    had_request: bool,
    /// When the first byte of an incomplete request head arrived.
    head_began: Option<Instant>,
    idle_since: Instant,
}

impl ConnectionState {
    fn order(&self, id: u64) -> EvictionOrder {
        (self.was_good, self.idle_since, id)
    }

    fn deadline(&self, now: Instant) -> Instant {
        if self.in_progress > 0 {
            now + IDLE
        } else if !self.had_request {
            self.idle_since + FIRST_REQUEST
        } else if let Some(began) = self.head_began {
            began + HEAD
        } else {
            self.idle_since + IDLE
        }
    }
}

impl Connection {
    /// The runtime that serves the connection.
    pub(super) fn runtime(&self) -> &Handle {
        &self.place.runtime
    }

    /// The peer of the connection.
    pub(super) fn peer(&self) -> Option<Peer> {
        self.peer
    }

    /// The time at which the connection times out, in its current state.
    pub(super) fn deadline(&self) -> Instant {
        self.state.lock().deadline(Instant::now())
    }

    /// Whether a request is in progress.
    pub(super) fn is_busy(&self) -> bool {
        self.state.lock().in_progress > 0
    }

    /// Returns once the connection is evicted for another one.
    pub(super) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Called when bytes were received.
    pub(super) fn on_read(&self) {
        let mut state = self.state.lock();
        // On HTTP/2, received bytes need not belong to a request head.
        if state.is_http1 && state.had_request && state.in_progress == 0 && state.head_began.is_none() {
            state.head_began = Some(Instant::now());
        }
    }

    /// Begins a request. It is in progress until the returned guard is dropped.
    pub(super) fn begin_request(self: &Arc<Self>, is_http1: bool) -> RequestInProgress {
        let mut state = self.state.lock();
        state.had_request = true;
        state.head_began = None;
        state.is_http1 = is_http1;
        state.in_progress += 1;
        if state.in_progress == 1 {
            self.connections
                .table
                .lock()
                .remove_idle(self.peer, &state.order(self.id));
        }
        drop(state);
        RequestInProgress(Arc::clone(self))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let order = self.state.get_mut().order(self.id);
        let mut table = self.connections.table.lock();
        table.remove_idle(self.peer, &order);
        table.open -= 1;
        if let Some(peer) = self.peer
            && let Some(of_peer) = table.peers.get_mut(&peer)
        {
            of_peer.open -= 1;
            if of_peer.open == 0 {
                table.peers.remove(&peer);
            }
        }
    }
}

/// A request in progress.
#[derive(Debug)]
pub(super) struct RequestInProgress(Arc<Connection>);

impl RequestInProgress {
    /// Records that the response is successful.
    pub(super) fn mark_good(&self) {
        self.0.state.lock().was_good = true;
    }

    /// Keeps the request in progress until the connection is closed.
    pub(super) fn hold_until_close(self) {
        let connection = Arc::clone(&self.0);
        connection.state.lock().in_progress += 1;
    }
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.in_progress -= 1;
        if state.in_progress == 0 {
            state.idle_since = Instant::now();
            let mut table = self.0.connections.table.lock();
            table.add_idle(self.0.peer, state.order(self.0.id), &self.0.evicted);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections(total: usize, per_peer: usize) -> Arc<Connections> {
        let limits = ConnectionLimits {
            total,
            per_peer,
            ..ConnectionLimits::default()
        };
        Connections::new(limits, Lanes::new(Vec::new()))
    }

    fn is_evicted(connection: &Arc<Connection>) -> bool {
        connection.evicted.is_cancelled()
    }

    #[tokio::test(start_paused = true)]
    async fn the_least_useful_idle_connection_is_evicted_first() {
        let connections = connections(4, 4);
        let mut all = Vec::new();
        for _ in 0..4 {
            all.push(connections.admit(None).expect("room"));
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        // The first got a response, the second is in progress, the third got an error, the fourth had no request.
        all[0].begin_request(true).mark_good();
        let in_progress = all[1].begin_request(true);
        drop(all[2].begin_request(true));
        for next in [3, 2, 0] {
            let newcomer = connections.admit(None).expect("the place of another");
            assert!(is_evicted(&all[next]), "{next}");
            drop(std::mem::replace(&mut all[next], newcomer));
            // A busy new connection is not evicted.
            all[next].begin_request(true).hold_until_close();
        }
        assert!(connections.admit(None).is_none(), "all are in use");
        assert_eq!(
            connections.counts(),
            ConnectionCounts {
                open: 4,
                refused: 1,
                evicted: 3
            }
        );
        drop(in_progress);
        assert!(connections.admit(None).is_some());
        assert!(is_evicted(&all[1]));
    }

    #[tokio::test(start_paused = true)]
    async fn peers_have_their_own_limit_and_shared_addresses_none() {
        let connections = connections(1000, 2);
        let (one, other) = (Some(Peer::V6(1)), Some(Peer::V6(2)));
        let held: Vec<_> = (0..2).map(|_| connections.admit(one).expect("room")).collect();
        let busy: Vec<_> = held.iter().map(|connection| connection.begin_request(true)).collect();
        assert!(connections.admit(one).is_none());
        let _other = connections.admit(other).expect("room for another peer");
        let _shared: Vec<_> = (0..10).map(|_| connections.admit(None).expect("no limit")).collect();
        drop(busy);
        assert!(connections.admit(one).is_some(), "its own oldest goes");
        assert!(is_evicted(&held[0]) && !is_evicted(&held[1]));
        drop((held, _other, _shared));
        let table = connections.table.lock();
        assert!(
            table.peers.is_empty() && table.idle.is_empty() && table.open == 0,
            "{table:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn closing_connections_are_bounded_in_a_flood() {
        let connections = connections(10, 10);
        let admitted: Vec<_> = std::iter::from_fn(|| connections.admit(None)).take(1000).collect();
        assert_eq!(admitted.len(), 20, "the evicted have not closed yet");
        drop(admitted);
        assert!(connections.admit(None).is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn deadlines_follow_the_state_of_the_connection() {
        let connections = connections(10, 10);
        let connection = connections.admit(None).expect("room");
        let left = |connection: &Connection| connection.deadline() - Instant::now();
        connection.on_read();
        assert_eq!(left(&connection), FIRST_REQUEST);
        let in_progress = connection.begin_request(true);
        connection.on_read();
        assert_eq!(left(&connection), IDLE);
        tokio::time::advance(2 * IDLE).await;
        assert_eq!(left(&connection), IDLE, "a response has no time limit");
        drop(in_progress);
        tokio::time::advance(Duration::from_secs(300)).await;
        assert_eq!(left(&connection), IDLE - Duration::from_secs(300));
        connection.on_read();
        assert_eq!(left(&connection), HEAD);
        tokio::time::advance(Duration::from_secs(4)).await;
        connection.on_read();
        assert_eq!(
            left(&connection),
            HEAD - Duration::from_secs(4),
            "the time starts with the first byte"
        );
        drop(connection.begin_request(false));
        connection.on_read();
        assert_eq!(left(&connection), IDLE, "HTTP/2 bytes may be other frames");
    }
}

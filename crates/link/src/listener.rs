//! The port of a server to which nodes connect, and other servers of the same service.
//!
//! Nothing is read of a peer before TLS, and one frame of bounded size before it has shown a certificate or a token. Both
//! have little time, and one address has few connections in that state. Where there are too many, the oldest makes room for
//! the newest, so that keeping the node away takes connections faster than it can show who it is. The certificate of the
//! server is made anew each day.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use model::id::NodeId;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::connection::{self, Socket};
use crate::frame::{HELLO_MAX, read_frame, write_frame};
use crate::hello::{Answer, Hello, Refusal, Request, Welcome, level};
use crate::hub::Hub;
use crate::serve::Calls;
use crate::servers;
use crate::trust::{Authority, SERVERS_ALPN, TrustError, check_request, hash_of, node_of, server_of};

/// How long a peer may take to show who it is.
const HELLO_BOUND: Duration = Duration::from_secs(10);
/// How long a refused peer may take to read why.
const CLOSE_BOUND: Duration = Duration::from_secs(2);
/// Connections of peers that have not shown yet who they are: of one address (of IPv6, one network of 64 bits), and of all.
const PENDING_PER_PEER: usize = 8;
const PENDING: usize = 256;
/// How often the log says at most that there are more.
const CROWD_TOLD: Duration = Duration::from_secs(10);
/// Pause after the system could not accept a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a certificate of the server is used.
const CERTIFICATE_AGE: Duration = Duration::from_secs(24 * 60 * 60);
/// Longest name of a host, in bytes.
const NAME_MAX: usize = 255;

/// A boxed future of [`Members`].
pub type MembersFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, Refusal>> + Send + 'a>>;

/// Who may be a node of this server.
pub trait Members: fmt::Debug + Send + Sync + 'static {
    /// Uses up the token with this hash, and returns the id of the node that it makes.
    fn redeem<'a>(&'a self, hash: &'a str, name: &'a str) -> MembersFuture<'a, NodeId>;

    /// Checks that a node, which has shown its certificate, has not been forgotten.
    fn check<'a>(&'a self, node: &'a NodeId) -> MembersFuture<'a, ()>;

    /// Notes that a node has connected, or has a new certificate.
    fn seen<'a>(&'a self, node: &'a NodeId, name: &'a str) -> MembersFuture<'a, ()>;
}

/// What the port of nodes needs.
#[derive(Debug, Clone)]
pub struct Port {
    /// Id of the server.
    pub id: NodeId,
    /// Issues certificates.
    pub authority: Arc<Authority>,
    /// Who may be a node.
    pub members: Arc<dyn Members>,
    /// Where nodes that connect are announced.
    pub hub: Arc<Hub>,
    /// The clock.
    pub now: fn() -> SystemTime,
    /// The version of this program.
    pub version: String,
    /// Where connections are carried, each on the next one in turn; where the port is served, if there are none.
    pub lanes: Vec<Handle>,
}

impl Port {
    /// Accepts nodes until `stop` is cancelled.
    ///
    /// # Errors
    /// When the certificate of the server cannot be made.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) -> Result<(), TrustError> {
        let connections = TaskTracker::new();
        let calls = Calls::on(Handle::current());
        let mut lanes = self.lanes.iter().cycle();
        let pending = Pending::default();
        let mut crowd_told: Option<Instant> = None;
        let mut config = self.authority.server_config(&self.id, (self.now)())?;
        let mut made = Instant::now();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = stop.cancelled() => break,
            };
            let (socket, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!("cannot accept a node: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            if made.elapsed() > CERTIFICATE_AGE {
                config = self.authority.server_config(&self.id, (self.now)())?;
                made = Instant::now();
            }
            let peer = peer.ip().to_canonical();
            let (place, has_crowd) = PendingPermit::take(&pending, peer);
            if has_crowd && crowd_told.is_none_or(|told| told.elapsed() > CROWD_TOLD) {
                crowd_told = Some(Instant::now());
                tracing::warn!(%peer, "too many connections to the port of nodes have not shown who they are: the oldest are closed");
            }
            let (port, config, stop, calls) = (self.clone(), Arc::clone(&config), stop.clone(), calls.clone());
            let lane = lanes.next().cloned().unwrap_or_else(Handle::current);
            let answering = async move {
                let answered = async {
                    // The runtime that has accepted it would be woken otherwise by all that arrives.
                    let socket = TcpStream::from_std(socket.into_std()?)?;
                    port.answer(socket, config, peer, place, (stop, calls)).await
                };
                if let Err(error) = answered.await {
                    tracing::debug!(%peer, "a connection to the port of nodes failed: {error}");
                }
            };
            connections.spawn_on(answering, &lane);
        }
        connections.close();
        connections.wait().await;
        calls.ended().await;
        Ok(())
    }

    async fn answer(
        &self,
        socket: TcpStream,
        config: Arc<ServerConfig>,
        peer: IpAddr,
        place: PendingPermit,
        (stop, calls): (CancellationToken, Calls),
    ) -> io::Result<()> {
        let asked = tokio::time::timeout(HELLO_BOUND, async {
            let mut tls = TlsAcceptor::from(config).accept(connection::socket(socket)?).await?;
            if tls.get_ref().1.alpn_protocol() == Some(SERVERS_ALPN) {
                return Ok((tls, None));
            }
            let request: Request = read_frame(&mut tls, HELLO_MAX).await?;
            io::Result::Ok((tls, Some(request)))
        });
        let (mut tls, request) = tokio::select! {
            asked = asked => asked??,
            () = place.replaced.cancelled() => return Ok(()),
            () = stop.cancelled() => return Ok(()),
        };
        let Some(request) = request else {
            return self.carry_of_server(tls, place, peer, (stop, calls)).await;
        };
        let certificate = tls.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let node = certificate.and_then(node_of);
        let answered = match request {
            Request::Join { secret, request, name } => self.join(&secret, &request, &name).await,
            Request::Renew { request } => self.renew(node.as_ref(), &request).await,
            Request::Hello(hello) => {
                let hello = Hello {
                    name: shortened(&hello.name).to_owned(),
                    version: shortened(&hello.version).to_owned(),
                    ..hello
                };
                match self.greet(node, &hello).await {
                    Ok((node, level)) => {
                        drop(place);
                        return self.carry(tls, node, peer, &hello, level, &stop).await;
                    }
                    Err(refusal) => Err(refusal),
                }
            }
        };
        if let Err(refusal) = &answered {
            tracing::warn!(%peer, "a node was refused: {refusal}");
        }
        close(&mut tls, &answered.unwrap_or_else(Answer::Refused)).await
    }

    /// Serves what another server forwards, for as long as its connection is there. A node has no such certificate.
    async fn carry_of_server(
        &self,
        tls: TlsStream<Socket>,
        place: PendingPermit,
        peer: IpAddr,
        (stop, calls): (CancellationToken, Calls),
    ) -> io::Result<()> {
        let certificate = tls.get_ref().1.peer_certificates().and_then(|chain| chain.first());
        let Some(server) = certificate.and_then(server_of) else {
            tracing::warn!(%peer, "a connection of a server was refused: it has shown no certificate of one");
            return Err(io::ErrorKind::PermissionDenied.into());
        };
        let Some(answers) = self.hub.answers() else {
            // It tries again.
            return Err(io::Error::new(io::ErrorKind::NotConnected, "this server is starting"));
        };
        drop(place);
        tracing::info!(server.id = %server, %peer, "another server is connected");
        tokio::select! {
            error = servers::serve(answers, &server, tls, &calls) => {
                tracing::info!(server.id = %server, "the connection of another server has ended: {error}");
            }
            () = stop.cancelled() => {}
        }
        Ok(())
    }

    async fn join(&self, secret: &str, request: &str, name: &str) -> Result<Answer, Refusal> {
        let request = decoded(request)?;
        // A request that nothing can be issued for must not use up a token.
        check_request(&request).map_err(|error| Refusal::lasting(error.to_string()))?;
        let node = self.members.redeem(&hash_of(secret), shortened(name)).await?;
        let answer = self.issue(&request, &node)?;
        tracing::info!(node.id = %node, name, "a node has joined");
        Ok(answer)
    }

    async fn renew(&self, node: Option<&NodeId>, request: &str) -> Result<Answer, Refusal> {
        let node = node.ok_or_else(no_certificate)?;
        self.members.check(node).await?;
        let answer = self.issue(&decoded(request)?, node)?;
        tracing::info!(node.id = %node, "a node has renewed its certificate");
        Ok(answer)
    }

    fn issue(&self, request: &[u8], node: &NodeId) -> Result<Answer, Refusal> {
        let certificate = self.authority.issue(request, node, (self.now)());
        Ok(Answer::Issued {
            certificate: certificate.map_err(|error| Refusal::lasting(error.to_string()))?,
            authority: self.authority.certificate_pem(),
        })
    }

    async fn greet(&self, node: Option<NodeId>, hello: &Hello) -> Result<(NodeId, u32), Refusal> {
        let node = node.ok_or_else(no_certificate)?;
        let level = level(&hello.levels)?;
        self.members.check(&node).await?;
        self.members.seen(&node, &hello.name).await?;
        Ok((node, level))
    }

    /// Makes the calls of the server on a connection, for as long as that is there.
    async fn carry(
        &self,
        mut tls: TlsStream<Socket>,
        node: NodeId,
        peer: IpAddr,
        hello: &Hello,
        level: u32,
        stop: &CancellationToken,
    ) -> io::Result<()> {
        let (session, end) = match self.hub.admit(node.clone(), peer, hello) {
            Ok(admitted) => admitted,
            Err(refusal) => {
                tracing::info!(node.id = %node, %peer, "{refusal}");
                return close(&mut tls, &Answer::Refused(refusal)).await;
            }
        };
        // It may have been forgotten since it was looked up. Whoever forgets it from here on finds it connected, and ends that.
        if let Err(refusal) = self.members.check(&node).await {
            if refusal.is_lasting {
                self.hub.expel(&node);
            }
            self.hub.ended(&node, &end);
            tracing::warn!(%peer, "a node was refused: {refusal}");
            return close(&mut tls, &Answer::Refused(refusal)).await;
        }
        let welcome = Answer::Welcome(Welcome {
            level,
            session: session.id.clone(),
            version: self.version.clone(),
        });
        let welcomed = tokio::time::timeout(HELLO_BOUND, write_frame(&mut tls, &welcome)).await;
        let carried = match welcomed {
            Ok(Ok(())) => {
                tracing::info!(node.id = %node, %peer, name = hello.name, version = hello.version, "the node is connected");
                tokio::select! {
                    error = session.node.carry(tls, &end) => {
                        tracing::warn!(node.id = %node, "the connection of the node has ended: {error}");
                        Ok(())
                    }
                    () = stop.cancelled() => Ok(()),
                }
            }
            Ok(Err(error)) => Err(error),
            Err(elapsed) => Err(elapsed.into()),
        };
        self.hub.ended(&node, &end);
        carried
    }
}

fn no_certificate() -> Refusal {
    Refusal::lasting("the node has shown no certificate of this server: make it join with `ringfence node join`")
}

fn decoded(request: &str) -> Result<Vec<u8>, Refusal> {
    hex::decode(request).map_err(|_| Refusal::lasting("the request for a certificate is not in hexadecimal"))
}

/// A name of a host that can be stored and shown.
fn shortened(name: &str) -> &str {
    let name = name.split(|c: char| c.is_control()).next().unwrap_or_default();
    match name.char_indices().find(|(at, c)| at + c.len_utf8() > NAME_MAX) {
        Some((at, _)) => &name[..at],
        None if name.is_empty() => "unnamed",
        None => name,
    }
}

/// Sends the last frame of a connection.
async fn close(tls: &mut TlsStream<Socket>, answer: &Answer) -> io::Result<()> {
    let closing = async {
        write_frame(tls, answer).await?;
        tls.shutdown().await
    };
    tokio::time::timeout(CLOSE_BOUND, closing).await?
}

/// A connection whose peer has not shown yet who it is.
#[derive(Debug)]
struct PendingPeer {
    network: IpAddr,
    replaced: CancellationToken,
}

/// The connections whose peers have not shown yet who they are, in the order of their numbers.
#[derive(Debug, Default)]
struct PendingPeers {
    next: u64,
    peers: BTreeMap<u64, PendingPeer>,
}

type Pending = Arc<Mutex<PendingPeers>>;

/// The place of a connection whose peer has not shown yet who it is.
#[derive(Debug)]
struct PendingPermit {
    pending: Pending,
    number: u64,
    /// Cancelled when a newer connection has the place.
    replaced: CancellationToken,
}

impl PendingPermit {
    /// Takes a place, and returns whether others had to give up theirs.
    fn take(pending: &Pending, peer: IpAddr) -> (Self, bool) {
        let network = network_of(peer);
        let replaced = CancellationToken::new();
        let mut state = pending.lock();
        let of_network = || state.peers.iter().filter(|(_, peer)| peer.network == network);
        let oldest = if of_network().count() >= PENDING_PER_PEER {
            of_network().next()
        } else if state.peers.len() >= PENDING {
            state.peers.first_key_value()
        } else {
            None
        };
        let oldest = oldest.map(|(number, _)| *number);
        if let Some(peer) = oldest.and_then(|number| state.peers.remove(&number)) {
            peer.replaced.cancel();
        }
        let number = state.next;
        state.next += 1;
        let place = PendingPeer {
            network,
            replaced: replaced.clone(),
        };
        state.peers.insert(number, place);
        drop(state);
        let permit = Self {
            pending: Arc::clone(pending),
            number,
            replaced,
        };
        (permit, oldest.is_some())
    }
}

impl Drop for PendingPermit {
    fn drop(&mut self) {
        self.pending.lock().peers.remove(&self.number);
    }
}

/// What one peer can have at will: an address, or of IPv6 a network of 64 bits.
fn network_of(peer: IpAddr) -> IpAddr {
    match peer {
        IpAddr::V4(_) => peer,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_peer_makes_room() {
        let pending = Pending::default();
        let address = |network: usize, host: u128| IpAddr::from(Ipv6Addr::from_bits(((network as u128) << 64) | host));
        let mut held: Vec<_> = (0..PENDING)
            .map(|number| PendingPermit::take(&pending, address(number / PENDING_PER_PEER, number as u128)))
            .collect();
        assert!(
            held.iter()
                .all(|(permit, has_crowd)| !has_crowd && !permit.replaced.is_cancelled())
        );
        let gone = |held: &[(PendingPermit, bool)]| -> Vec<usize> {
            let replaced = |number: &usize| held[*number].0.replaced.is_cancelled();
            (0..held.len()).filter(replaced).collect()
        };
        // One of a network that has all of its places, then one of another network.
        held.push(PendingPermit::take(&pending, address(1, 1_000)));
        assert_eq!(gone(&held), [PENDING_PER_PEER]);
        held.push(PendingPermit::take(&pending, address(1_000, 0)));
        assert_eq!(gone(&held), [0, PENDING_PER_PEER]);
        // Who has shown who it is leaves a place.
        held.remove(1);
        held.push(PendingPermit::take(&pending, address(1_001, 0)));
        assert_eq!(gone(&held), [0, PENDING_PER_PEER - 1]);
        assert_eq!(pending.lock().peers.len(), PENDING);
        drop(held);
        assert!(pending.lock().peers.is_empty());
    }
}

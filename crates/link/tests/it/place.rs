//! A server's port for nodes, with members in memory, and a node that connects to it.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use link::{Address, Authority, Calls, Credentials, Hello, Hub, Members, MembersFuture, Port, Refusal, Session, Token};
use model::id::NodeId;
use parking_lot::Mutex;
use testkit::node::FakeNode;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Receiver;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// How long anything may take.
pub(crate) const BOUND: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Tokens by their hashes, and the nodes that they will make.
    pub(crate) tokens: Mutex<HashMap<String, NodeId>>,
    pub(crate) members: Mutex<HashSet<NodeId>>,
    /// Whether nodes are forgotten as soon as they have been looked up.
    pub(crate) forgets: AtomicBool,
}

impl Members for Known {
    fn redeem<'a>(&'a self, hash: &'a str, _name: &'a str) -> MembersFuture<'a, NodeId> {
        Box::pin(async move {
            let node = self.tokens.lock().remove(hash);
            let node = node.ok_or_else(|| Refusal::lasting("the token was used already"))?;
            self.members.lock().insert(node.clone());
            Ok(node)
        })
    }

    fn check<'a>(&'a self, node: &'a NodeId) -> MembersFuture<'a, ()> {
        Box::pin(async move {
            if self.members.lock().contains(node) {
                return Ok(());
            }
            Err(Refusal::lasting("the node was forgotten"))
        })
    }

    fn seen<'a>(&'a self, _node: &'a NodeId, _name: &'a str) -> MembersFuture<'a, ()> {
        Box::pin(async {
            if self.forgets.load(Ordering::SeqCst) {
                self.members.lock().clear();
            }
            Ok(())
        })
    }
}

pub(crate) struct TestServer {
    pub(crate) authority: Arc<Authority>,
    pub(crate) known: Arc<Known>,
    pub(crate) hub: Arc<Hub>,
    begun: Mutex<Receiver<Session>>,
    session: Mutex<Option<Session>>,
    pub(crate) socket: SocketAddr,
    pub(crate) address: Address,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

pub(crate) fn authority() -> Authority {
    let key = Authority::make_key().unwrap();
    let certificate = Authority::make_certificate(&key).unwrap();
    Authority::load(&key, &certificate).unwrap()
}

pub(crate) fn node_id(number: u8) -> NodeId {
    format!("0199d0a6-0000-7000-8000-0000000000{number:02x}")
        .parse()
        .unwrap()
}

pub(crate) fn hello() -> Hello {
    link::hello("a host".to_owned(), "1".to_owned())
}

impl TestServer {
    pub(crate) async fn new() -> Self {
        Self::of(Arc::new(authority()), 100).await
    }

    /// A server with this number, of an authority.
    pub(crate) async fn of(authority: Arc<Authority>, number: u8) -> Self {
        Self::on(authority, number, Vec::new()).await
    }

    /// A server whose connections are carried on these runtimes.
    pub(crate) async fn on(authority: Arc<Authority>, number: u8, lanes: Vec<Handle>) -> Self {
        let (known, hub) = (Arc::<Known>::default(), Arc::new(Hub::default()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = listener.local_addr().unwrap();
        let begun = hub.open();
        let stop = CancellationToken::new();
        let port = Port {
            id: node_id(number),
            authority: Arc::clone(&authority),
            members: known.clone(),
            hub: Arc::clone(&hub),
            now: SystemTime::now,
            version: "1".to_owned(),
            lanes,
        };
        let serving = port.serve(listener, stop.clone());
        Self {
            authority,
            known,
            hub,
            begun: Mutex::new(begun),
            session: Mutex::default(),
            socket,
            address: format!("https://{socket}").parse().unwrap(),
            stop,
            serving: tokio::spawn(async move { serving.await.unwrap() }),
        }
    }

    /// The session of the node that has connected last.
    pub(crate) fn session(&self) -> Session {
        let mut session = self.session.lock();
        while let Ok(begun) = self.begun.lock().try_recv() {
            *session = Some(begun);
        }
        session.clone().expect("a node has connected")
    }

    /// A token that makes the node with this number.
    pub(crate) fn token(&self, number: u8) -> Token {
        let token = self.authority.make_token().unwrap();
        self.known.tokens.lock().insert(token.hash(), node_id(number));
        Token::parse(&token.expose()).unwrap()
    }

    pub(crate) async fn joined(&self) -> Credentials {
        link::join(&self.address, &self.token(1), "a host").await.unwrap()
    }

    /// Serves `node` on one connection, in the background, and returns once the server calls it.
    pub(crate) async fn connected(
        &self,
        node: &Arc<FakeNode>,
        credentials: &Credentials,
    ) -> JoinHandle<std::io::Error> {
        let (welcome, connection) = link::connect(&self.address, credentials, &hello()).await.unwrap();
        let session = self.session();
        assert_eq!((welcome.level, &welcome.session), (1, &session.id));
        let node = Arc::clone(node);
        let serving = tokio::spawn(async move { link::serve(node, connection, &Calls::on(Handle::current())).await });
        until(|| session.node.is_connected()).await;
        serving
    }

    pub(crate) async fn close(self) {
        self.stop.cancel();
        tokio::time::timeout(BOUND, self.serving).await.unwrap().unwrap();
    }
}

/// Waits for a condition.
pub(crate) async fn until(mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(BOUND, wait).await.expect("it comes to hold");
}

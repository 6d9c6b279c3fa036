//! The nodes of a server, whichever connections they have.
//!
//! A session is the time in which a node is served: its sandboxes are taken over once, at its beginning. The node remembers the
//! session that has taken it over. If it connects without that, or with another, it was restarted: then the session is over, and
//! the next one, which begins when the node connects again, takes over what is left. Each node has its own.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use model::id::NodeId;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio_util::sync::CancellationToken;

use crate::hello::{Capabilities, Hello, Refusal};
use crate::remote::RemoteNode;
use crate::servers::Answers;

/// Sessions that have begun and that nobody has taken yet; a node beyond these tries again.
const BEGUN: usize = 64;

/// A session of a node.
#[derive(Debug, Clone)]
pub struct Session {
    /// Its name.
    pub id: String,
    /// Id of the node, as in its certificate.
    pub member: NodeId,
    /// The name of its host.
    pub name: String,
    /// What it can do.
    pub capabilities: Capabilities,
    /// The node.
    pub node: Arc<RemoteNode>,
    /// Cancelled when the session is over: the node was restarted or forgotten, or what became of a sandbox is unknown.
    pub over: CancellationToken,
}

/// A node that is connected.
#[derive(Debug, Clone)]
pub struct Connected {
    /// The node.
    pub id: NodeId,
    /// The address that it has connected from.
    pub address: IpAddr,
    /// The version of its program.
    pub version: String,
    /// What it can do.
    pub capabilities: Capabilities,
    end: CancellationToken,
}

/// A node with a session.
#[derive(Debug)]
struct NodeSession {
    session: Session,
    connected: Option<Connected>,
}

#[derive(Debug, Default)]
struct State {
    /// Where sessions that begin are announced; none before [`Hub::open`].
    announced: Option<mpsc::Sender<Session>>,
    places: HashMap<NodeId, NodeSession>,
    /// What serves other servers; none before [`Hub::answer_servers`].
    answers: Option<Arc<dyn Answers>>,
}

/// The nodes of a server, and the sessions in which they are used.
#[derive(Debug, Default)]
pub struct Hub {
    state: Mutex<State>,
}

impl Hub {
    /// Admits nodes from now on. The result has each session that begins; whoever takes one calls [`Hub::end`].
    pub fn open(&self) -> mpsc::Receiver<Session> {
        let (announced, sessions) = mpsc::channel(BEGUN);
        self.state.lock().announced = Some(announced);
        sessions
    }

    /// Serves what other servers forward from now on.
    pub fn answer_servers(&self, answers: Arc<dyn Answers>) {
        self.state.lock().answers = Some(answers);
    }

    /// What serves other servers, if that is there.
    pub(crate) fn answers(&self) -> Option<Arc<dyn Answers>> {
        self.state.lock().answers.clone()
    }

    /// The connection of a node, if it is connected.
    #[must_use]
    pub fn connected(&self, id: &NodeId) -> Option<Connected> {
        self.state.lock().places.get(id)?.connected.clone()
    }

    /// Whether a node has a session.
    #[must_use]
    pub fn has_session(&self, id: &NodeId) -> bool {
        self.state.lock().places.contains_key(id)
    }

    /// The nodes that have a session.
    #[must_use]
    pub fn sessions(&self) -> Vec<NodeId> {
        self.state.lock().places.keys().cloned().collect()
    }

    /// Ends the connection and the session of a node, if it has them.
    pub fn expel(&self, id: &NodeId) {
        let state = self.state.lock();
        if let Some(place) = state.places.get(id) {
            place.session.over.cancel();
            if let Some(connected) = &place.connected {
                connected.end.cancel();
            }
        }
    }

    /// Ends a session of which nothing goes on any more. The node has to connect again, which begins the next one.
    pub fn end(&self, session: &Session) {
        session.over.cancel();
        let mut state = self.state.lock();
        let is_current = |place: &NodeSession| place.session.id == session.id;
        if state.places.get(&session.member).is_some_and(is_current)
            && let Some(place) = state.places.remove(&session.member)
            && let Some(connected) = place.connected
        {
            connected.end.cancel();
        }
    }

    /// Admits a node to its session, and returns the session with what ends the connection.
    pub(crate) fn admit(
        &self,
        id: NodeId,
        address: IpAddr,
        hello: &Hello,
    ) -> Result<(Session, CancellationToken), Refusal> {
        let mut state = self.state.lock();
        let end = CancellationToken::new();
        let connected = Connected {
            id: id.clone(),
            address,
            version: hello.version.clone(),
            capabilities: hello.capabilities,
            end: end.clone(),
        };
        if let Some(place) = state.places.get_mut(&id) {
            if hello.session.as_ref() != Some(&place.session.id) || place.session.over.is_cancelled() {
                place.session.over.cancel();
                return Err(Refusal::passing("the server takes over the sandboxes of the node"));
            }
            // A connection before is one that the node has given up.
            if let Some(before) = place.connected.replace(connected) {
                before.end.cancel();
            }
            return Ok((place.session.clone(), end));
        }
        let Some(announced) = &state.announced else {
            return Err(Refusal::passing("the server is starting"));
        };
        let over = CancellationToken::new();
        let session = Session {
            id: uuid::Uuid::new_v4().to_string(),
            member: id.clone(),
            name: hello.name.clone(),
            capabilities: hello.capabilities,
            node: Arc::new(RemoteNode::new(over.clone())),
            over,
        };
        match announced.try_send(session.clone()) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                return Err(Refusal::passing("the server begins the sessions of other nodes"));
            }
            Err(TrySendError::Closed(_)) => return Err(Refusal::passing("the server is being stopped")),
        }
        let place = NodeSession {
            session: session.clone(),
            connected: Some(connected),
        };
        state.places.insert(id, place);
        Ok((session, end))
    }

    /// Notes that a connection of a node has ended.
    pub(crate) fn ended(&self, id: &NodeId, end: &CancellationToken) {
        end.cancel();
        let mut state = self.state.lock();
        if let Some(place) = state.places.get_mut(id)
            && place
                .connected
                .as_ref()
                .is_some_and(|connected| connected.end.is_cancelled())
        {
            place.connected = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn hello(session: Option<&str>) -> Hello {
        Hello {
            session: session.map(str::to_owned),
            ..Hello::default()
        }
    }

    fn id(n: u8) -> NodeId {
        format!("0199d0a6-0000-7000-8000-00000000000{n}").parse().unwrap()
    }

    #[test]
    fn a_node_that_was_restarted_ends_its_session() {
        let hub = Hub::default();
        assert!(!hub.admit(id(1), ADDRESS, &hello(None)).unwrap_err().is_lasting);
        let mut begun = hub.open();
        let (session, first) = hub.admit(id(1), ADDRESS, &hello(Some("another"))).unwrap();
        assert_eq!(begun.try_recv().unwrap().id, session.id);
        // The same node again, which has lost its connection.
        let (again, second) = hub.admit(id(1), ADDRESS, &hello(Some(&session.id))).unwrap();
        assert_eq!(again.id, session.id);
        assert!(first.is_cancelled() && !second.is_cancelled() && begun.try_recv().is_err());
        hub.ended(&id(1), &first);
        assert!(hub.connected(&id(1)).is_some());
        assert!(!session.over.is_cancelled());

        assert!(hub.admit(id(1), ADDRESS, &hello(None)).is_err());
        assert!(session.over.is_cancelled() && hub.has_session(&id(1)));
        // Not before what the session has begun has ended.
        assert!(hub.admit(id(1), ADDRESS, &hello(Some(&session.id))).is_err());
        hub.end(&session);
        assert!(second.is_cancelled() && hub.connected(&id(1)).is_none() && !hub.has_session(&id(1)));
        let (next, _) = hub.admit(id(1), ADDRESS, &hello(None)).unwrap();
        assert_eq!(begun.try_recv().unwrap().id, next.id);
        // An end that comes late ends nothing of it.
        hub.end(&session);
        assert!(!next.over.is_cancelled() && hub.has_session(&id(1)));
    }

    #[test]
    fn nodes_do_not_disturb_each_other() {
        let hub = Hub::default();
        let _begun = hub.open();
        let (one, end_of_one) = hub.admit(id(1), ADDRESS, &hello(None)).unwrap();
        let (other, end_of_other) = hub.admit(id(2), ADDRESS, &hello(None)).unwrap();
        // Not even with the name of the other's session.
        assert!(hub.admit(id(1), ADDRESS, &hello(Some(&other.id))).is_err());
        assert!(one.over.is_cancelled() && !other.over.is_cancelled());
        hub.end(&one);
        assert!(end_of_one.is_cancelled() && !end_of_other.is_cancelled());
        hub.expel(&id(1));
        assert!(!other.over.is_cancelled() && hub.connected(&id(2)).is_some());
        hub.expel(&id(2));
        assert!(other.over.is_cancelled() && end_of_other.is_cancelled());
    }
}

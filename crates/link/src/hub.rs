//! The node of a server, whichever connection it has.
//!
//! A session is the time of one server object, which takes the node's sandboxes over once, at its beginning. The node
//! remembers the session that has taken it over. If it connects without that, or with another, it was restarted: then the
//! session is over, and the next one takes over what is left.

use std::net::IpAddr;
use std::sync::Arc;

use model::id::NodeId;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::hello::{Capabilities, Hello, Refusal};
use crate::remote::RemoteNode;

/// A session of a server.
#[derive(Debug, Clone)]
pub struct Session {
    /// Its name.
    pub id: String,
    /// The node.
    pub node: Arc<RemoteNode>,
    /// Cancelled when the session is over: the node was restarted, or what became of a sandbox is unknown.
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

#[derive(Debug, Default)]
struct State {
    session: Option<Session>,
    /// Whether the node has been told about the session.
    is_begun: bool,
    connected: Option<Connected>,
}

/// The node of a server, and the sessions in which it is used.
#[derive(Debug, Default)]
pub struct Hub {
    state: Mutex<State>,
}

impl Hub {
    /// Begins a session, which ends the one before. The node has to connect again.
    pub fn begin(&self) -> Session {
        let over = CancellationToken::new();
        let session = Session {
            id: uuid::Uuid::new_v4().to_string(),
            node: Arc::new(RemoteNode::new(over.clone())),
            over,
        };
        let mut state = self.state.lock();
        if let Some(connected) = state.connected.take() {
            connected.end.cancel();
        }
        if let Some(before) = state.session.replace(session.clone()) {
            before.over.cancel();
        }
        state.is_begun = false;
        session
    }

    /// The node that is connected, if it is.
    #[must_use]
    pub fn connected(&self) -> Option<Connected> {
        self.state.lock().connected.clone()
    }

    /// Ends the connection of a node, if it has one.
    pub fn disconnect(&self, id: &NodeId) {
        let state = self.state.lock();
        if let Some(connected) = state.connected.as_ref().filter(|connected| connected.id == *id) {
            connected.end.cancel();
        }
    }

    /// Admits a node to the session, and returns the session with what ends the connection.
    pub(crate) fn admit(
        &self,
        id: NodeId,
        address: IpAddr,
        hello: &Hello,
    ) -> Result<(Session, CancellationToken), Refusal> {
        let mut state = self.state.lock();
        let Some(session) = state.session.clone() else {
            return Err(Refusal::passing("the server is starting"));
        };
        let knows = hello.session.as_ref() == Some(&session.id);
        if state.is_begun && !knows {
            session.over.cancel();
            return Err(Refusal::passing("the server takes over the sandboxes of the node"));
        }
        state.is_begun = true;
        let end = CancellationToken::new();
        let connected = Connected {
            id,
            address,
            version: hello.version.clone(),
            capabilities: hello.capabilities,
            end: end.clone(),
        };
        // A connection before is one that the node has given up.
        if let Some(before) = state.connected.replace(connected) {
            before.end.cancel();
        }
        Ok((session, end))
    }

    /// Notes that a connection has ended.
    pub(crate) fn ended(&self, end: &CancellationToken) {
        end.cancel();
        let mut state = self.state.lock();
        if state
            .connected
            .as_ref()
            .is_some_and(|connected| connected.end.is_cancelled())
        {
            state.connected = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(session: Option<&str>) -> Hello {
        Hello {
            session: session.map(str::to_owned),
            ..Hello::default()
        }
    }

    #[test]
    fn a_node_that_was_restarted_ends_the_session() {
        let id: NodeId = "0199d0a6-0000-7000-8000-000000000001".parse().unwrap();
        let address = IpAddr::from([127, 0, 0, 1]);
        let hub = Hub::default();
        assert!(!hub.admit(id.clone(), address, &hello(None)).unwrap_err().is_lasting);
        let session = hub.begin();
        let (_, first) = hub.admit(id.clone(), address, &hello(Some("another"))).unwrap();
        // The same node again, which has lost its connection.
        let (_, second) = hub.admit(id.clone(), address, &hello(Some(&session.id))).unwrap();
        assert!(first.is_cancelled() && !second.is_cancelled());
        hub.ended(&first);
        assert!(hub.connected().is_some());
        assert!(!session.over.is_cancelled());

        assert!(hub.admit(id.clone(), address, &hello(None)).is_err());
        assert!(session.over.is_cancelled());
        let next = hub.begin();
        assert!(second.is_cancelled() && hub.connected().is_none());
        assert!(hub.admit(id, address, &hello(None)).is_ok());
        assert!(!next.over.is_cancelled());
    }
}

//! What a forwarded request is, and how it reaches another server.

pub(super) mod to_others;

use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use model::id::{SandboxId, TeamId, UserId};
use proxy::ingress::route::Target;
use proxy::ingress::{Access, ClientBody, Dial, Ingress};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::to_others::{AllChosen, Api, ToOthers, Traffic};
use crate::others::{Location, OtherServers};
use crate::peers::{ClientPeer, Peer};
use crate::settings::ConnectionLimits;

/// Header of a forwarded request that says what it is about.
pub(super) const HEAD: HeaderName = HeaderName::from_static("x-ringfence-forward");
/// Header of the answer to one, by which it is told from that of a server that was not reached.
pub(super) const ANSWERED: HeaderName = HeaderName::from_static("x-ringfence-answered");
/// The answer of a server that has the sandbox, or has created one.
pub(super) const HERE: HeaderValue = HeaderValue::from_static("here");
/// The answer of a server that does not have it any more.
pub(super) const NOT_HERE: HeaderValue = HeaderValue::from_static("not-here");

/// What a request is about, and for whom.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Head {
    /// The sandbox; none for a request that is about none.
    pub(super) sandbox: Option<SandboxId>,
    /// The port of it that the request is for; none for the API.
    pub(super) port: Option<u16>,
    /// The client.
    pub(super) peer: Option<Peer>,
    pub(super) is_loopback: bool,
    pub(super) is_tls: bool,
    /// Whom a session of the dashboard acts for, which the server that has the session has checked.
    pub(super) owner: Option<HeadOwner>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct HeadOwner {
    pub(super) credential: String,
    pub(super) team: TeamId,
    pub(super) user: UserId,
}

/// Forwards requests to other servers.
pub(crate) struct Forwarding {
    pub(super) others: Arc<OtherServers>,
    pub(super) traffic: Ingress,
    /// Apart, so that the limits of traffic are not those of the API.
    pub(super) api: Ingress,
    pub(super) chosen: AllChosen,
}

impl fmt::Debug for Forwarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Forwarding")
    }
}

/// What became of a forwarded request.
pub(super) enum Forwarded {
    /// The other server has answered.
    Answered(Response<Body>),
    /// The other server has answered that it does not have the sandbox.
    NotThere(Response<Body>),
    /// The other server was not reached: nothing was begun there. The answer says why.
    Unsent(Response<Body>),
    /// The other server has not answered: what became of the request is not known.
    Lost,
}

impl Forwarding {
    pub(crate) fn new(
        others: &Arc<OtherServers>,
        limits: &ConnectionLimits,
        streams: &TaskTracker,
        abort: &CancellationToken,
    ) -> Self {
        let chosen = AllChosen::default();
        let to_others = || ToOthers {
            others: Arc::clone(others),
            chosen: Arc::clone(&chosen),
        };
        let through = |dial: Arc<dyn Dial>| {
            Ingress::through(dial, streams.clone(), abort.clone()).limited(limits.into_sandboxes, limits.per_sandbox)
        };
        Self {
            traffic: through(Arc::new(Traffic(to_others()))),
            api: through(Arc::new(Api(to_others()))),
            others: Arc::clone(others),
            chosen,
        }
    }

    /// The servers that requests are forwarded to.
    pub(super) fn others(&self) -> &OtherServers {
        &self.others
    }

    /// Whether a sandbox that is not in the registry is on a node of another server, on behalf of a client.
    pub(super) async fn is_at_another(&self, id: &SandboxId, client: ClientPeer) -> Location {
        self.others.find(id, client.peer).await
    }

    /// Forwards a request.
    pub(super) async fn send(
        &self,
        mut request: Request<ClientBody>,
        head: &Head,
        target: &Target,
        ingress: &Ingress,
    ) -> Forwarded {
        request.headers_mut().insert(HEAD, head.to_value());
        let open = Arc::new(Access::default());
        let mut response = ingress.serve(request, target, |_| Some(open)).await.map(Body::new);
        match response.headers_mut().remove(ANSWERED) {
            Some(answered) if answered == NOT_HERE => Forwarded::NotThere(response),
            Some(_) => Forwarded::Answered(response),
            // What could not be sent is answered here with another status.
            None if response.status() != StatusCode::BAD_GATEWAY => Forwarded::Unsent(response),
            None => Forwarded::Lost,
        }
    }
}

impl Head {
    /// What a request is about, for a client.
    pub(super) fn of(sandbox: Option<SandboxId>, port: Option<u16>, client: ClientPeer) -> Self {
        Self {
            sandbox,
            port,
            peer: client.peer,
            is_loopback: client.is_loopback,
            is_tls: client.is_tls,
            owner: None,
        }
    }

    pub(super) fn to_value(&self) -> HeaderValue {
        let text = serde_json::to_string(self).expect("ids and numbers are JSON");
        HeaderValue::try_from(text).expect("ids are ASCII, as numbers are")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_the_same_after_its_way() {
        let client = ClientPeer {
            peer: Some(Peer::V6(7)),
            is_loopback: false,
            is_tls: true,
        };
        let head = Head::of(None, Some(80), client);
        let read: Head = serde_json::from_slice(head.to_value().as_bytes()).expect("a head");
        assert_eq!((read.peer, read.port, read.is_tls), (Some(Peer::V6(7)), Some(80), true));
    }
}

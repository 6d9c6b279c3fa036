//! What a forwarded request is, and how it reaches another server.

mod forks;
pub(super) mod to_others;

use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use axum::response::IntoResponse as _;
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use link::ServerLink;
use model::id::{SandboxId, TeamId, UserId};
use proxy::ingress::route::Target;
use proxy::ingress::{Access, ClientBody, Dial, Ingress};
use serde::{Deserialize, Serialize};
use store::sandboxes::SandboxRow;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::to_others::{API, API_CHOSEN, AllChosen, Api, Chosen, ToOthers, Traffic};
use crate::api::ApiError;
use crate::ids::new_sandbox_id;
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

/// What stands in place of the id of a credential where the operator acts for a team.
const OPERATOR: &str = "operator";

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
    /// Whether the operator asks, through the socket or a session of the operator at the other server, to kill the sandbox, or,
    /// without one, to read templates as files. That is all that it allows. A server that does not know this field yet kills the
    /// sandbox as `owner` asks.
    #[serde(default)]
    pub(super) is_operator: bool,
    /// Whether a server asks for children of a fork on the nodes of the other one. A server that does not know this field yet finds
    /// no such path in its API.
    #[serde(default)]
    pub(super) is_fork: bool,
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
    /// Apart, so that no client can use up the connections with which the operator ends a sandbox.
    operator: Ingress,
    pub(super) chosen: AllChosen,
}

impl fmt::Debug for Forwarding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Forwarding")
    }
}

/// What became of a forwarded request.
pub(crate) enum Forwarded {
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
            operator: through(Arc::new(Api(to_others()))),
            others: Arc::clone(others),
            chosen,
        }
    }

    /// The servers that requests are forwarded to.
    pub(crate) fn others(&self) -> &OtherServers {
        &self.others
    }

    /// Has the server that has the node of a sandbox kill it, for the operator. None if no other server has that.
    pub(crate) async fn kill_for_operator(&self, row: &SandboxRow) -> Option<Forwarded> {
        // What was noted a moment ago is not enough for the operator, who asks seldom.
        self.others.forget(&row.id);
        let Location::At(_) = self.others.find(&row.id, None).await else {
            return None;
        };
        let client = ClientPeer {
            peer: None,
            is_loopback: true,
            is_tls: false,
        };
        let head = Head {
            // For a server that does not know the operator's requests.
            owner: Some(HeadOwner {
                credential: OPERATOR.to_owned(),
                team: row.team_id.clone(),
                user: row.user_id.clone(),
            }),
            is_operator: true,
            ..Head::of(Some(row.id.clone()), None, client)
        };
        let mut request = Request::new(self.operator.body_of(Bytes::new()));
        *request.method_mut() = Method::DELETE;
        *request.uri_mut() = Uri::try_from(path_of(&row.id)).expect("ids are letters and digits");
        let target = Target {
            id: row.id.clone(),
            port: API,
        };
        let forwarded = self.send(request, &head, &target, &self.operator).await;
        if let Forwarded::NotThere(_) = forwarded {
            self.others.forget(&row.id);
        }
        Some(forwarded)
    }

    /// Has another server answer what the operator wants to read of templates, whose layers are on its nodes.
    pub(crate) async fn read_for_operator(&self, of: &Uri, link: &Arc<ServerLink>) -> Forwarded {
        let mut request = Request::new(self.operator.body_of(Bytes::new()));
        *request.uri_mut() = of.clone();
        let client = ClientPeer {
            peer: None,
            is_loopback: true,
            is_tls: false,
        };
        let head = Head {
            is_operator: true,
            ..Head::of(None, None, client)
        };
        self.send_to(link, request, &head, &self.operator).await
    }

    /// Forwards a request that is about no sandbox to a server.
    pub(super) async fn send_to(
        &self,
        link: &Arc<ServerLink>,
        request: Request<ClientBody>,
        head: &Head,
        ingress: &Ingress,
    ) -> Forwarded {
        // It names the request on its way to the stream, and is that of no sandbox.
        let id = match new_sandbox_id() {
            Ok(id) => id,
            Err(error) => return Forwarded::Unsent(ApiError::internal().caused_by(error).into_response()),
        };
        let _chosen = Chosen::new(&self.chosen, &id, link);
        let target = Target { id, port: API_CHOSEN };
        self.send(request, head, &target, ingress).await
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

/// Whether a path of the operator API is what a template consists of, or one of its layers.
pub(super) fn is_of_template_file(path: &str) -> bool {
    path == "/template" || path.starts_with("/layers/")
}

/// The path of a request that kills a sandbox.
pub(super) fn path_of(id: &SandboxId) -> String {
    format!("/sandboxes/{id}")
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
            is_operator: false,
            is_fork: false,
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
    fn a_head_of_an_earlier_server_is_not_the_operators() {
        let of_earlier = r#"{"sandbox":null,"port":null,"peer":null,"is_loopback":true,"is_tls":false,"owner":null}"#;
        let read: Head = serde_json::from_str(of_earlier).expect("a head");
        assert!(!read.is_operator);
    }

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

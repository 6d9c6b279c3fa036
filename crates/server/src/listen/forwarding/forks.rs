//! Asking other servers for children of forks.

use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Limited};
use link::ServerLink;
use protocol::node::NodeFuture;

use super::{Forwarded, Forwarding, Head};
use crate::peers::ClientPeer;
use crate::sandboxes::fork::peers::{Asked, ChildrenWanted, ForkPeers, NotStarted};

/// The path of such a request, which no client can send: it is not one of the API.
const PATH: &str = "/forks";
/// Longest answer, in bytes: one line for each child.
const ANSWER_MAX: usize = 1 << 20;

impl ForkPeers for Forwarding {
    fn with_room(&self) -> Vec<Arc<ServerLink>> {
        self.others.with_room_for_forks()
    }

    fn start<'a>(&'a self, server: &'a Arc<ServerLink>, wanted: ChildrenWanted) -> NodeFuture<'a, Asked> {
        Box::pin(async move {
            let text = serde_json::to_vec(&wanted).expect("ids and numbers are JSON");
            let mut request = Request::new(self.api.body_of(Bytes::from(text)));
            *request.method_mut() = Method::POST;
            *request.uri_mut() = Uri::from_static(PATH);
            let client = ClientPeer {
                peer: None,
                is_loopback: true,
                is_tls: false,
            };
            let head = Head {
                is_fork: true,
                ..Head::of(None, None, client)
            };
            match self.send_to(server, request, &head, &self.api).await {
                Forwarded::Answered(response) if response.status() == StatusCode::OK => answer_of(response).await,
                // A server of the version before, or one that has only begun to start.
                Forwarded::Answered(_) | Forwarded::NotThere(_) | Forwarded::Unsent(_) => Asked::Unbegun,
                Forwarded::Lost => Asked::Unknown,
            }
        })
    }
}

async fn answer_of(response: Response<Body>) -> Asked {
    let read = Limited::new(response.into_body(), ANSWER_MAX).collect().await;
    let answers: Option<Vec<Result<(), NotStarted>>> =
        read.ok().and_then(|read| serde_json::from_slice(&read.to_bytes()).ok());
    answers.map_or(Asked::Unknown, Asked::Answered)
}

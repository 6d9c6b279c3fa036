//! Streams to other servers, as the ingress opens them: to the one that has a sandbox, or to one that was chosen.

use std::collections::HashMap;
use std::sync::Arc;

use link::{Carried, OpenError, ServerLink};
use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::node::{DialError, NodeFuture, SandboxStream};
use proxy::ingress::Dial;

use crate::chain::Chain;
use crate::others::{Location, OtherServers};

/// What the path of a stream about a sandbox begins with, before its id.
pub(in crate::listen) const SANDBOXES: &str = "/1/sandboxes/";
/// The path of a stream with a request that is about no sandbox: any server can answer it.
pub(in crate::listen) const ANY: &str = "/1/any";
/// Port that stands for the API, to the server that has a sandbox.
pub(in crate::listen) const API: u16 = 0;
/// Port that stands for the API, to a server that was chosen.
pub(in crate::listen) const API_CHOSEN: u16 = 1;

/// The servers that were chosen for requests, by the ids that these have here.
pub(in crate::listen) type AllChosen = Arc<Mutex<HashMap<SandboxId, Arc<ServerLink>>>>;

/// Connects to the servers that have sandboxes.
pub(in crate::listen) struct ToOthers {
    pub(in crate::listen) others: Arc<OtherServers>,
    pub(in crate::listen) chosen: AllChosen,
}

impl ToOthers {
    async fn open(&self, id: &SandboxId, port: u16, carried: Carried) -> Result<SandboxStream, DialError> {
        if carried == Carried::Api && port == API_CHOSEN {
            let link = self.chosen.lock().get(id).cloned().ok_or(DialError::Unreachable)?;
            return link
                .open(ANY, carried)
                .await
                .map_err(|error| unreachable(&link, &error));
        }
        let path = format!("{SANDBOXES}{id}");
        let mut is_again = false;
        loop {
            let link = match self.others.find(id, None).await {
                Location::At(link) => link,
                Location::Away => return Err(DialError::Unreachable),
                // It has ended, or has come to this server meanwhile.
                Location::Here => return Err(DialError::Gone),
            };
            match link.open(&path, carried).await {
                Ok(stream) => return Ok(stream),
                Err(OpenError::NotThere) if !is_again => self.others.forget(id),
                Err(error) => {
                    // Where there is no place for traffic, there may be one for a request to the API.
                    if !matches!(error, OpenError::Busy) {
                        self.others.note_away(id);
                    }
                    return Err(unreachable(&link, &error));
                }
            }
            is_again = true;
        }
    }
}

fn unreachable(link: &ServerLink, error: &OpenError) -> DialError {
    tracing::warn!(server.id = %link.other(), "a request was not forwarded: {}", Chain(error));
    DialError::Unreachable
}

/// As [`ToOthers`], for traffic.
pub(in crate::listen) struct Traffic(pub(in crate::listen) ToOthers);

impl Dial for Traffic {
    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(self.0.open(id, port, Carried::Traffic))
    }

    /// The other server has looked after that.
    fn has_certain_ends(&self) -> bool {
        true
    }
}

/// As [`ToOthers`], for requests to the API.
pub(in crate::listen) struct Api(pub(in crate::listen) ToOthers);

impl Dial for Api {
    fn dial<'a>(&'a self, id: &'a SandboxId, port: u16) -> NodeFuture<'a, Result<SandboxStream, DialError>> {
        Box::pin(self.0.open(id, port, Carried::Api))
    }

    /// The other server has looked after that.
    fn has_certain_ends(&self) -> bool {
        true
    }
}

/// The server that was chosen for a request, for as long as this exists.
pub(in crate::listen) struct Chosen<'a> {
    all: &'a AllChosen,
    id: SandboxId,
}

impl<'a> Chosen<'a> {
    pub(in crate::listen) fn new(all: &'a AllChosen, id: &SandboxId, link: &Arc<ServerLink>) -> Self {
        all.lock().insert(id.clone(), Arc::clone(link));
        Self { all, id: id.clone() }
    }
}

impl Drop for Chosen<'_> {
    fn drop(&mut self) {
        self.all.lock().remove(&self.id);
    }
}

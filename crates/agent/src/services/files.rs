//! `/files`: whole files out of and into the sandbox.
//!
//! Links to files are signed in one of two forms ([`protocol::signature`]). The expiration of the hexadecimal one is
//! relative to a time that is not in the link, so it has no effect: such a link works for as long as the
//! sandbox has its token. Uploads of many files that are neither signed nor carry the token are refused like any other.
//!
//! Memory per transfer is constant. File access runs on a few blocking threads, so that a slow disk delays transfers
//! and nothing else; sockets stay on the one thread of everything.

mod access;
mod buffers;
mod coding;
mod compose;
mod compressed;
mod download;
mod failure;
mod media_type;
mod metadata;
mod multipart;
mod reading;
mod source;
mod transfers;
mod upload;

use std::cell::RefCell;
use std::rc::Rc;

use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use protocol::signature::Claim;

use self::failure::Failure;
use self::transfers::Transfers;
use crate::caller::Accounts;
use crate::settings::AgentSettings;
use crate::transport::http::{self as answers, Body, Query};
use crate::transport::messages::MessageMemory;
use crate::transport::server::Peer;

/// The service behind `/files`.
pub(crate) struct Files {
    accounts: Rc<Accounts>,
    settings: Rc<RefCell<AgentSettings>>,
    memory: MessageMemory,
    transfers: Transfers,
}

impl Files {
    pub(crate) fn new(accounts: Rc<Accounts>, settings: Rc<RefCell<AgentSettings>>, memory: MessageMemory) -> Self {
        Self {
            accounts,
            settings,
            memory,
            transfers: Transfers::default(),
        }
    }

    /// Serves a GET, a HEAD or a POST of `/files`.
    pub(crate) async fn serve(&self, peer: &Peer, query: &Query, request: Request<Incoming>) -> Response<Body> {
        let expiration = match query.get("signature_expiration").map(str::parse::<i64>) {
            None => None,
            Some(Ok(expiration)) => Some(expiration),
            Some(Err(_)) => {
                let message = "Invalid format for parameter signature_expiration: not an integer";
                return answers::text(StatusCode::BAD_REQUEST, message);
            }
        };
        let reading = request.method() != Method::POST;
        let claim = Claim {
            path: query.get("path").unwrap_or_default(),
            operation: if reading { "read" } else { "write" },
            username: query.get("username").unwrap_or_default(),
            expiration,
        };
        let work = async {
            if matches!(peer, Peer::Client) {
                let token = request.headers().get("x-access-token").map(http::HeaderValue::as_bytes);
                access::authorize(&self.settings.borrow(), token, query.get("signature"), &claim)?;
            }
            let user = access::find_user(&self.accounts, query.get("username"))?;
            if reading {
                let path = self.accounts.resolve(&user, claim.path).map_err(|error| {
                    let message = format!("error expanding and resolving path '{}': {error}", claim.path);
                    Failure::new(StatusCode::BAD_REQUEST, message)
                })?;
                download::send(path, request.headers(), &self.transfers).await
            } else {
                upload::receive(&self.accounts, &self.transfers, user, query.get("path"), request).await
            }
        };
        work.await
            .unwrap_or_else(|failure| answers::error(failure.status, &failure.message))
    }

    /// Serves a POST of `/files/compose`.
    pub(crate) async fn compose(&self, request: Request<Incoming>) -> Response<Body> {
        match compose::compose(&self.accounts, &self.memory, request).await {
            Ok(written) => answers::json(StatusCode::OK, &written),
            Err(failure) => answers::error(failure.status, &failure.message),
        }
    }
}

//! `/files`: whole files out of and into the sandbox.
//!
//! Memory per transfer is constant. File access runs on a few blocking threads, so that a slow disk delays transfers
//! and nothing else; sockets stay on the one thread of everything.

mod download;
mod ensure;
mod media_type;
mod metadata;
mod multipart;
mod upload;

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;

use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use jiff::Timestamp;
use protocol::signature::Claim;

use crate::agent::Agent;
use crate::http::{self as answers, Body, Query};
use crate::paths;
use crate::server::Peer;
use crate::users::User;

/// Bytes that are read or written at once, at most. Each time costs a switch between two threads.
const CHUNK: usize = 256 * 1024;
/// Bytes that one chunk of every transfer may come to together. A transfer holds two or three of them.
const CHUNKS: usize = 8 * 1024 * 1024;

/// How many transfers there are, by which their memory is shared out: transfers that stand still must not add up.
#[derive(Debug, Clone, Default)]
pub(crate) struct Transfers(Rc<Cell<usize>>);

/// One of them.
#[derive(Debug)]
struct Transfer(Rc<Cell<usize>>);

impl Transfers {
    fn begin(&self) -> Transfer {
        self.0.set(self.0.get() + 1);
        Transfer(self.0.clone())
    }
}

impl Transfer {
    /// Bytes of its next chunk.
    fn chunk(&self) -> usize {
        (CHUNKS / self.0.get()).clamp(8 * 1024, CHUNK)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// Why a request for a file failed: the status and the message of the answer.
#[derive(Debug)]
struct Failure {
    status: StatusCode,
    message: String,
}

impl Failure {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
        }
    }

    fn internal(what: &str, error: &io::Error) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, format!("{what}: {error}"))
    }
}

/// Serves a GET or a POST of `/files`.
pub(crate) async fn serve(agent: &Rc<Agent>, peer: Peer, query: &Query, request: Request<Incoming>) -> Response<Body> {
    let expiration = match query.get("signature_expiration").map(str::parse::<i64>) {
        None => None,
        Some(Ok(expiration)) => Some(expiration),
        Some(Err(_)) => {
            let message = "Invalid format for parameter signature_expiration: not an integer";
            return answers::text(StatusCode::BAD_REQUEST, message);
        }
    };
    let reading = request.method() == Method::GET;
    let claim = Claim {
        path: query.get("path").unwrap_or_default(),
        operation: if reading { "read" } else { "write" },
        username: query.get("username").unwrap_or_default(),
        expiration,
    };
    let work = async {
        if peer == Peer::Client {
            let token = request.headers().get("x-access-token").map(http::HeaderValue::as_bytes);
            authorize(agent, token, query.get("signature"), &claim)?;
        }
        let user = user(agent, query)?;
        if reading {
            let path = resolve(agent, &user, claim.path).map_err(|error| {
                let message = format!("error expanding and resolving path '{}': {error}", claim.path);
                Failure::new(StatusCode::BAD_REQUEST, message)
            })?;
            download::send(path, request.headers(), agent.transfers.begin()).await
        } else {
            upload::receive(agent, user, query.get("path"), request).await
        }
    };
    work.await
        .unwrap_or_else(|failure| answers::error(failure.status, &failure.message))
}

/// Token or signature; neither when no token is set.
fn authorize(agent: &Agent, token: Option<&[u8]>, signature: Option<&str>, claim: &Claim<'_>) -> Result<(), Failure> {
    let refuse = |message| Err(Failure::new(StatusCode::UNAUTHORIZED, message));
    let settings = agent.settings.borrow();
    let Some(expected) = settings.token() else {
        return Ok(());
    };
    if token.is_some() {
        return match settings.admits(token) {
            true => Ok(()),
            false => refuse("access token present in header but does not match"),
        };
    }
    let Some(signature) = signature else {
        return refuse("missing signature query parameter");
    };
    if !claim.verify(expected, signature) {
        return refuse("invalid signature");
    }
    match claim.expiration {
        Some(expiration) if expiration < Timestamp::now().as_second() => refuse("signature is already expired"),
        _ => Ok(()),
    }
}

/// The user of the `username` parameter, even an empty one, or else the default user.
fn user(agent: &Agent, query: &Query) -> Result<User, Failure> {
    let name = match query.get("username") {
        Some(name) => name.to_owned(),
        None => agent.settings.borrow().default_user.clone(),
    };
    agent.users.find(&name).ok_or_else(|| {
        let message = format!("error looking up user '{name}': user: unknown user {name}");
        Failure::new(StatusCode::UNAUTHORIZED, message)
    })
}

fn resolve(agent: &Agent, user: &User, path: &str) -> Result<PathBuf, paths::ForeignHome> {
    paths::resolve(path, user, agent.settings.borrow().default_workdir.as_deref())
}

/// Runs file access on a blocking thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, Failure> {
    let crashed = |_| Failure::new(StatusCode::INTERNAL_SERVER_ERROR, "file access failed");
    tokio::task::spawn_blocking(work).await.map_err(crashed)?
}

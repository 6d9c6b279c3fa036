//! `/files`: whole files out of and into the sandbox.
//!
//! Links to files are signed in one of two forms ([`protocol::signature`]). The expiration of the hexadecimal one is
//! relative to a moment that nothing in the link tells, so it has no effect: such a link works for as long as the
//! sandbox has its token. Uploads of many files that are neither signed nor carry the token are refused like any other.
//!
//! Memory per transfer is constant. File access runs on a few blocking threads, so that a slow disk delays transfers
//! and nothing else; sockets stay on the one thread of everything.

mod buffers;
mod coding;
pub(crate) mod compose;
mod download;
mod media_type;
mod metadata;
mod multipart;
mod pack;
mod source;
mod upload;

pub(crate) use coding::accepts_gzip;

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use jiff::Timestamp;
use protocol::signature::{Claim, Form};
use tokio::sync::Semaphore;

use crate::agent::Agent;
use crate::http::{self as answers, Body, Query};
use crate::paths;
use crate::server::Peer;
use crate::users::User;

/// Bytes that are read or written at once, at most. Each time costs a switch between two threads.
const CHUNK: usize = 256 * 1024;
/// Bytes that one chunk of every transfer may come to together. A transfer holds two or three of them.
const CHUNKS: usize = 8 * 1024 * 1024;

/// What bounds the memory of all transfers: transfers that stand still must not add up.
#[derive(Debug, Clone)]
pub(crate) struct Transfers {
    /// How many there are, by which their memory is shared out.
    count: Rc<Cell<usize>>,
    /// Permits to pack a download.
    packers: Arc<Semaphore>,
    /// Permits to unpack an upload.
    unpackers: Arc<Semaphore>,
}

impl Default for Transfers {
    fn default() -> Self {
        Self {
            count: Rc::default(),
            packers: Arc::new(Semaphore::new(pack::AT_ONCE)),
            unpackers: Arc::new(Semaphore::new(source::AT_ONCE)),
        }
    }
}

/// One of them.
#[derive(Debug)]
struct Transfer(Rc<Cell<usize>>);

impl Transfers {
    fn begin(&self) -> Transfer {
        self.count.set(self.count.get() + 1);
        Transfer(self.count.clone())
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
        let user = find_user(agent, query.get("username"))?;
        if reading {
            let path = resolve(agent, &user, claim.path).map_err(|error| {
                let message = format!("error expanding and resolving path '{}': {error}", claim.path);
                Failure::new(StatusCode::BAD_REQUEST, message)
            })?;
            download::send(path, request.headers(), &agent.transfers).await
        } else {
            upload::receive(agent, user, query.get("path"), request).await
        }
    };
    work.await
        .unwrap_or_else(|failure| answers::error(failure.status, &failure.message))
}

/// Token or signature; neither when no token is set, or when those who show nothing are admitted.
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
        return match settings.admits(None) {
            true => Ok(()),
            false => refuse("missing signature query parameter"),
        };
    };
    match (claim.form(expected, signature), claim.expiration) {
        (None, _) => refuse("invalid signature"),
        (Some(Form::Absolute), Some(expiration)) if expiration < Timestamp::now().as_second() => {
            refuse("signature is already expired")
        }
        // A relative expiration counts from a time that the link does not tell, so it cannot be enforced.
        (Some(Form::Absolute | Form::Relative), _) => Ok(()),
    }
}

/// The user of that name, even of an empty one, or else the default user.
fn find_user(agent: &Agent, name: Option<&str>) -> Result<User, Failure> {
    let name = match name {
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

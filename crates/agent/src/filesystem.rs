//! The service `filesystem.Filesystem`: entries of the sandbox's file system, and watching them change.
//!
//! Everything acts as root; the user only says what a path means and who owns a new directory. File access runs on
//! the blocking threads. Trees belong to the code of the sandbox, so walks through them are few at a time, end when
//! nobody waits for them, and hold no more than fits one answer.

mod changes;
mod entry;
mod list;
mod removal;
mod watch;

use std::cell::Cell;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Request, Response};
use hyper::body::Incoming;
use protocol::connect::{Code, Error};
use protocol::filesystem::{EntryInfo, EntryResponse, ListDirRequest, ListDirResponse, MoveRequest, PathRequest};
use protocol::process::Empty;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::agent::{Agent, Caller, MESSAGE_LIMIT};
use crate::http::{Body, header_text};
use crate::paths;
use crate::rpc::{self, Call};
use crate::users::User;

/// Walks through trees at a time. One fewer than there are blocking threads, so that the rest of file access goes on.
const WALKS: usize = 3;
/// Bytes that answers may hold which are being made or sent.
const ANSWERS: usize = WALKS * MESSAGE_LIMIT;
/// Answers below this length, in bytes, are not counted while they are sent; a connection's buffer is as large.
const SMALL_ANSWER: usize = 64 * 1024;
/// The one user agent of clients that fail on fields they do not know.
const LEGACY_AGENT: &str = "connect-python";
const LEGACY_MARK: HeaderName = HeaderName::from_static("x-e2b-legacy-sdk");

/// What the service keeps between requests.
pub(crate) struct Filesystem {
    walks: Arc<Semaphore>,
    answers: Arc<Semaphore>,
    watchers: watch::Watchers,
}

impl Default for Filesystem {
    fn default() -> Self {
        Self {
            walks: Arc::new(Semaphore::new(WALKS)),
            answers: Arc::new(Semaphore::new(ANSWERS)),
            watchers: watch::Watchers::default(),
        }
    }
}

/// Serves the method of that name; `None` when there is none.
pub(crate) async fn serve(
    agent: &Rc<Agent>,
    caller: Caller,
    method: &str,
    request: Request<Incoming>,
) -> Option<Response<Body>> {
    let legacy = header_text(request.headers(), header::USER_AGENT) == Some(LEGACY_AGENT);
    let form = |entry| if legacy { entry::legacy(entry) } else { entry };
    let respond = |entry| EntryResponse {
        entry: Some(form(entry)),
    };
    let mut response = match method {
        "Stat" => {
            rpc::unary(agent, caller, request, async |call, message| {
                stat(call, message).await.map(respond)
            })
            .await
        }
        "MakeDir" => {
            rpc::unary(agent, caller, request, async |call, message| {
                make_dir(call, message).await.map(respond)
            })
            .await
        }
        "Move" => {
            rpc::unary(agent, caller, request, async |call, message| {
                rename(call, message).await.map(respond)
            })
            .await
        }
        "Remove" => rpc::unary(agent, caller, request, remove).await,
        "ListDir" => {
            let held = Cell::new(None);
            let response = rpc::unary(agent, caller, request, async |call, message| {
                let (entries, share) = list_dir(call, message).await?;
                held.set(Some(share));
                Ok(ListDirResponse {
                    entries: entries.into_iter().map(form).collect(),
                })
            })
            .await;
            hold(response, held.take())
        }
        "WatchDir" => {
            rpc::stream(agent, caller, request, async |call, writer, message| {
                watch::watch(call, writer, message, legacy).await
            })
            .await
        }
        "CreateWatcher" => rpc::unary(agent, caller, request, watch::create).await,
        "GetWatcherEvents" => {
            rpc::unary(agent, caller, request, async |call, message| {
                watch::take(call, &message, legacy)
            })
            .await
        }
        "RemoveWatcher" => {
            rpc::unary(agent, caller, request, async |call, message| {
                watch::remove(call, &message)
            })
            .await
        }
        _ => return None,
    };
    if legacy {
        response
            .headers_mut()
            .insert(LEGACY_MARK, HeaderValue::from_static("true"));
    }
    Some(response)
}

async fn stat(call: &Call, message: PathRequest) -> Result<EntryInfo, Error> {
    let path = resolve(call, &call.caller.user(&call.agent)?, &message.path)?;
    let users = call.agent.users.clone();
    blocking(move |_| read_entry(&path, &users.names())).await
}

async fn make_dir(call: &Call, message: PathRequest) -> Result<EntryInfo, Error> {
    let user = call.caller.user(&call.agent)?;
    let path = resolve(call, &user, &message.path)?;
    let users = call.agent.users.clone();
    blocking(move |_| {
        changes::make(&path, &user)?;
        read_entry(&path, &users.names())
    })
    .await
}

async fn rename(call: &Call, message: MoveRequest) -> Result<EntryInfo, Error> {
    let user = call.caller.user(&call.agent)?;
    let source = resolve(call, &user, &message.source)?;
    let destination = resolve(call, &user, &message.destination)?;
    let users = call.agent.users.clone();
    blocking(move |_| {
        changes::rename(&source, &destination, &user)?;
        read_entry(&destination, &users.names())
    })
    .await
}

async fn remove(call: &Call, message: PathRequest) -> Result<Empty, Error> {
    let path = resolve(call, &call.caller.user(&call.agent)?, &message.path)?;
    let walk = permits(&call.agent.filesystem.walks, 1).await?;
    blocking(move |abandoned| {
        let _walk = walk;
        removal::remove(&path, abandoned).map_err(|error| {
            let message = format!("error removing file or directory: {}: {error}", path.display());
            Error::new(Code::Internal, message)
        })
    })
    .await?;
    Ok(Empty {})
}

/// The entries, and the share of the memory for answers that they may fill.
async fn list_dir(call: &Call, message: ListDirRequest) -> Result<(Vec<EntryInfo>, OwnedSemaphorePermit), Error> {
    let path = resolve(call, &call.caller.user(&call.agent)?, &message.path)?;
    let filesystem = &call.agent.filesystem;
    let share = permits(&filesystem.answers, MESSAGE_LIMIT).await?;
    let walk = permits(&filesystem.walks, 1).await?;
    let users = call.agent.users.clone();
    blocking(move |abandoned| {
        let _walk = walk;
        let entries = list::walk(&paths::clean(&path), message.depth, &users.names(), abandoned)?;
        Ok((entries, share))
    })
    .await
}

fn read_entry(path: &Path, names: &crate::users::Names) -> Result<EntryInfo, Error> {
    entry::read(path, path, names).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::new(Code::NotFound, format!("file not found: {}: {error}", path.display())),
        _ => Error::new(
            Code::Internal,
            format!("error getting file info: {}: {error}", path.display()),
        ),
    })
}

fn resolve(call: &Call, user: &User, path: &str) -> Result<PathBuf, Error> {
    let settings = call.agent.settings.borrow();
    paths::resolve(path, user, settings.default_workdir.as_deref())
        .map_err(|error| Error::new(Code::InvalidArgument, error.to_string()))
}

async fn permits(semaphore: &Arc<Semaphore>, count: usize) -> Result<OwnedSemaphorePermit, Error> {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    // None of them is ever closed.
    let closed = |_| Error::new(Code::Internal, "no more file access");
    semaphore.clone().acquire_many_owned(count).await.map_err(closed)
}

/// Has a long answer keep its share of the memory for as long as it is being sent.
fn hold(mut response: Response<Body>, share: Option<OwnedSemaphorePermit>) -> Response<Body> {
    struct Held {
        bytes: Bytes,
        _share: OwnedSemaphorePermit,
    }
    impl AsRef<[u8]> for Held {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }
    if let Body::Full(bytes) = response.body_mut()
        && bytes.len() > SMALL_ANSWER
        && let Some(kept) = share.and_then(|mut share| share.split(bytes.len().min(MESSAGE_LIMIT)))
    {
        let bytes_of_it = std::mem::take(bytes);
        *bytes = Bytes::from_owner(Held {
            bytes: bytes_of_it,
            _share: kept,
        });
    }
    response
}

/// Runs file access on a blocking thread, and tells it when nobody waits for it any more.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce(&Abandoned) -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let abandoned = Abandoned::default();
    let _guard = abandoned.when_dropped();
    let crashed = |_| Error::new(Code::Internal, "file access failed");
    tokio::task::spawn_blocking(move || work(&abandoned))
        .await
        .map_err(crashed)?
}

/// Whether nobody waits for some work any more.
#[derive(Debug, Clone, Default)]
struct Abandoned(Arc<AtomicBool>);

impl Abandoned {
    fn is_true(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// # Errors
    /// `canceled` when nobody waits, who therefore never sees it.
    fn check(&self) -> Result<(), Error> {
        match self.is_true() {
            false => Ok(()),
            true => Err(Error::new(Code::Canceled, "context canceled")),
        }
    }

    /// Becomes true when the result is dropped.
    fn when_dropped(&self) -> impl Drop + use<> {
        struct Guard(Abandoned);
        impl Drop for Guard {
            fn drop(&mut self) {
                self.0.0.store(true, Ordering::Relaxed);
            }
        }
        Guard(self.clone())
    }
}

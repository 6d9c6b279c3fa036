//! The service `filesystem.Filesystem`: entries of the sandbox's file system, and watching them change.
//!
//! Everything acts as root; the user only says what a path means and who owns a new directory. File access runs on
//! the blocking threads. Trees belong to the code of the sandbox, so walks through them are few at a time, end when
//! their caller stops waiting, and hold no more than fits one answer.

mod changes;
mod entry;
mod list;
mod removal;
mod watch;
mod work;

use std::cell::Cell;
use std::io::ErrorKind;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Request, Response};
use hyper::body::Incoming;
use protocol::connect::{Code, Error};
use protocol::filesystem::{EntryInfo, EntryResponse, ListDirRequest, ListDirResponse, MoveRequest, PathRequest};
use protocol::process::Empty;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;

use self::watch::Watchers;
use self::work::{blocking, permits};
use crate::caller::{Accounts, Caller};
use crate::paths;
use crate::transport::http::{Body, header_text};
use crate::transport::messages::MESSAGE_LIMIT;
use crate::transport::rpc::{Call, Rpc};
use crate::users::Names;

/// Walks through trees at a time. One fewer than there are blocking threads, so that the rest of file access goes on.
const WALKS: usize = 3;
/// Bytes that answers may hold which are being made or sent.
const ANSWERS: usize = WALKS * MESSAGE_LIMIT;
/// Answers below this length, in bytes, are not counted while they are sent; a connection's buffer is as large.
const SMALL_ANSWER: usize = 64 * 1024;
/// The one user agent of clients that fail on fields they do not know.
const LEGACY_AGENT: &str = "connect-python";
const LEGACY_MARK: HeaderName = HeaderName::from_static("x-e2b-legacy-sdk");

/// The filesystem service, and what it keeps between requests.
pub(crate) struct Filesystem {
    rpc: Rpc,
    accounts: Rc<Accounts>,
    walks: Arc<Semaphore>,
    answers: Arc<Semaphore>,
    watchers: Watchers,
}

impl Filesystem {
    pub(crate) fn new(rpc: Rpc, accounts: Rc<Accounts>, tasks: TaskTracker) -> Self {
        let walks = Arc::new(Semaphore::new(WALKS));
        Self {
            rpc,
            watchers: Watchers::new(accounts.clone(), walks.clone(), tasks),
            accounts,
            walks,
            answers: Arc::new(Semaphore::new(ANSWERS)),
        }
    }

    /// Serves the method with this name; `None` when there is none.
    pub(crate) async fn serve(
        &self,
        caller: Caller,
        method: &str,
        request: Request<Incoming>,
    ) -> Option<Response<Body>> {
        let rpc = &self.rpc;
        let legacy = header_text(request.headers(), header::USER_AGENT) == Some(LEGACY_AGENT);
        let form = |entry| if legacy { entry::legacy(entry) } else { entry };
        let respond = |entry| EntryResponse {
            entry: Some(form(entry)),
        };
        let mut response = match method {
            "Stat" => {
                rpc.unary(caller, request, async |call, message| {
                    self.stat(call, message).await.map(respond)
                })
                .await
            }
            "MakeDir" => {
                rpc.unary(caller, request, async |call, message| {
                    self.make_dir(call, message).await.map(respond)
                })
                .await
            }
            "Move" => {
                rpc.unary(caller, request, async |call, message| {
                    self.rename(call, message).await.map(respond)
                })
                .await
            }
            "Remove" => {
                rpc.unary(caller, request, async |call, message| self.remove(call, message).await)
                    .await
            }
            "ListDir" => {
                let held = Cell::new(None);
                let response = rpc
                    .unary(caller, request, async |call, message| {
                        let (entries, share) = self.list_dir(call, message).await?;
                        held.set(Some(share));
                        Ok(ListDirResponse {
                            entries: entries.into_iter().map(form).collect(),
                        })
                    })
                    .await;
                hold(response, held.take())
            }
            "WatchDir" => {
                rpc.stream(caller, request, async |call, writer, message| {
                    self.watchers.watch(call, writer, message, legacy).await
                })
                .await
            }
            "CreateWatcher" => {
                rpc.unary(caller, request, async |call, message| {
                    self.watchers.create(call, message).await
                })
                .await
            }
            "GetWatcherEvents" => {
                rpc.unary(caller, request, async |_, message| self.watchers.take(&message, legacy))
                    .await
            }
            "RemoveWatcher" => {
                rpc.unary(caller, request, async |_, message| self.watchers.remove(&message))
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

    async fn stat(&self, call: &Call, message: PathRequest) -> Result<EntryInfo, Error> {
        let path = self.accounts.path_of(&call.caller, &message.path)?;
        let users = self.accounts.users.clone();
        blocking(move |_| read_entry(&path, &users.names())).await
    }

    async fn make_dir(&self, call: &Call, message: PathRequest) -> Result<EntryInfo, Error> {
        let user = self.accounts.user_of(&call.caller)?;
        let path = self.accounts.resolve(&user, &message.path)?;
        let users = self.accounts.users.clone();
        blocking(move |_| {
            changes::make(&path, &user)?;
            read_entry(&path, &users.names())
        })
        .await
    }

    async fn rename(&self, call: &Call, message: MoveRequest) -> Result<EntryInfo, Error> {
        let user = self.accounts.user_of(&call.caller)?;
        let source = self.accounts.resolve(&user, &message.source)?;
        let destination = self.accounts.resolve(&user, &message.destination)?;
        let users = self.accounts.users.clone();
        blocking(move |_| {
            changes::rename(&source, &destination, &user)?;
            read_entry(&destination, &users.names())
        })
        .await
    }

    async fn remove(&self, call: &Call, message: PathRequest) -> Result<Empty, Error> {
        let path = self.accounts.path_of(&call.caller, &message.path)?;
        let walk = permits(&self.walks, 1).await?;
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
    async fn list_dir(
        &self,
        call: &Call,
        message: ListDirRequest,
    ) -> Result<(Vec<EntryInfo>, OwnedSemaphorePermit), Error> {
        let path = self.accounts.path_of(&call.caller, &message.path)?;
        let share = permits(&self.answers, MESSAGE_LIMIT).await?;
        let walk = permits(&self.walks, 1).await?;
        let users = self.accounts.users.clone();
        blocking(move |abandoned| {
            let _walk = walk;
            let entries = list::walk(&paths::clean(&path), message.depth, &users.names(), abandoned)?;
            Ok((entries, share))
        })
        .await
    }
}

fn read_entry(path: &Path, names: &Names) -> Result<EntryInfo, Error> {
    entry::read(path, path, names).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::new(Code::NotFound, format!("file not found: {}: {error}", path.display())),
        _ => Error::new(
            Code::Internal,
            format!("error getting file info: {}: {error}", path.display()),
        ),
    })
}

/// Keeps the share of the memory that a long answer takes for as long as it is being sent.
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

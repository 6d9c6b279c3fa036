//! Watching directories: `WatchDir`, and the watchers that clients ask for news.
//!
//! Each watch has its own kernel queue, which one task empties into a queue of ours; the listener takes from there.
//! All queues are bounded, the kernel's included, and so is the number of watches. When something had to be dropped,
//! the watch ends with an error that says so: events are never missing without a word.

mod kernel;
mod queue;
mod stream;
mod tree;
mod watcher;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use bytes::Bytes;
use futures_util::Stream;
use protocol::connect::{Code, Error};
use protocol::filesystem::{WatchRequest, WatcherEvents, WatcherName};
use protocol::process::Empty;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::queue::{Outbox, Queue};
use self::tree::Tree;
use self::watcher::{WatchPermit, Watcher, without_entry};
use super::work::{blocking, permits};
use crate::caller::Accounts;
use crate::sys;
use crate::transport::rpc::{Call, Writer};

/// Characters of a watcher's name after the `w`.
const NAME: usize = 20;

/// All watches of the agent.
pub(super) struct Watchers {
    accounts: Rc<Accounts>,
    tasks: TaskTracker,
    walks: Arc<Semaphore>,
    count: Rc<Cell<usize>>,
    /// Watchers that clients poll for events, by name. They stay until they are removed.
    polled: RefCell<HashMap<String, Watcher>>,
    /// Bytes in all queues.
    queued: Rc<Cell<usize>>,
    /// Directories in all watches.
    directories: Arc<AtomicUsize>,
}

impl Watchers {
    pub(super) fn new(accounts: Rc<Accounts>, walks: Arc<Semaphore>, tasks: TaskTracker) -> Self {
        Self {
            accounts,
            tasks,
            walks,
            count: Rc::default(),
            polled: RefCell::default(),
            queued: Rc::default(),
            directories: Arc::default(),
        }
    }

    /// Serves `WatchDir`. The directory is being watched when this returns.
    pub(super) async fn watch(
        &self,
        call: &Call,
        writer: Writer,
        message: WatchRequest,
        legacy: bool,
    ) -> Result<impl Stream<Item = io::Result<Bytes>> + use<>, Error> {
        let watcher = self.open(call, message).await?;
        Ok(stream::events(watcher, call, writer, legacy))
    }

    /// Serves `CreateWatcher`.
    pub(super) async fn create(&self, call: &Call, message: WatchRequest) -> Result<WatcherName, Error> {
        let watcher = self.open(call, message).await?;
        let watcher_id = random_name().map_err(|error| failed(&error))?;
        self.polled.borrow_mut().insert(watcher_id.clone(), watcher);
        Ok(WatcherName { watcher_id })
    }

    /// Serves `GetWatcherEvents`.
    pub(super) fn take(&self, message: &WatcherName, legacy: bool) -> Result<WatcherEvents, Error> {
        let polled = self.polled.borrow();
        let watcher = polled.get(&message.watcher_id).ok_or_else(|| unknown(message))?;
        let events = watcher.queue.take_all()?;
        let form = |event| if legacy { without_entry(event) } else { event };
        Ok(WatcherEvents {
            events: events.into_iter().map(form).collect(),
        })
    }

    /// Serves `RemoveWatcher`.
    pub(super) fn remove(&self, message: &WatcherName) -> Result<Empty, Error> {
        let mut polled = self.polled.borrow_mut();
        polled.remove(&message.watcher_id).ok_or_else(|| unknown(message))?;
        Ok(Empty {})
    }

    async fn open(&self, call: &Call, message: WatchRequest) -> Result<Watcher, Error> {
        let path = self.accounts.path_of(&call.caller, &message.path)?;
        let permit = WatchPermit::take(&self.count)?;
        let walk = permits(&self.walks, 1).await?;
        let users = self.accounts.users.clone();
        let directories = self.directories.clone();
        let (tree, inotify) = blocking(move |abandoned| {
            let _walk = walk;
            Tree::open(path, &message, users, directories, abandoned)
        })
        .await?;
        let inotify = sys::watch(inotify, Interest::READABLE).map_err(|error| failed(&error))?;
        let queue = Rc::new(Queue::new(self.queued.clone()));
        let stop = CancellationToken::new();
        let (queue_of_task, stop_of_task) = (queue.clone(), stop.clone());
        self.tasks.spawn_local(async move {
            let work = async {
                let Err(error) = fill(tree, inotify, &queue_of_task).await;
                queue_of_task.fail(error);
            };
            tokio::select! {
                () = stop_of_task.cancelled() => {}
                () = work => {}
            }
        });
        Ok(Watcher::new(queue, stop.drop_guard(), permit))
    }
}

fn unknown(message: &WatcherName) -> Error {
    let message = format!("watcher with id {} not found", message.watcher_id);
    Error::new(Code::NotFound, message)
}

fn random_name() -> io::Result<String> {
    const LETTERS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let mut name = String::from("w");
    while name.len() <= NAME {
        let mut bytes = [0; 32];
        let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
        // From 252 on some letters would come more often than others.
        let fair = bytes[..count].iter().filter(|byte| **byte < 252);
        let letters = fair.map(|byte| char::from(LETTERS[usize::from(*byte) % LETTERS.len()]));
        name.extend(letters.take(NAME + 1 - name.len()));
    }
    Ok(name)
}

/// Carries events from the kernel's queue to ours, until that fails.
async fn fill(
    mut tree: Box<Tree>,
    inotify: AsyncFd<OwnedFd>,
    queue: &Queue,
) -> Result<std::convert::Infallible, Error> {
    loop {
        let mut ready = inotify.readable().await.map_err(|error| failed(&error))?;
        let batch = match ready.try_io(|inotify| kernel::read_batch(inotify.get_ref())) {
            Ok(batch) => batch.map_err(|error| failed(&error))?,
            Err(_) => {
                tree.settle();
                continue;
            }
        };
        let needs_files = tree.needs_files(&batch);
        let apply = move || {
            let mut outbox = Outbox::default();
            let result = tree.apply_all(&batch, &mut outbox);
            (tree, outbox, result)
        };
        let (tree_again, outbox, result) = if needs_files {
            let crashed = |_| Error::new(Code::Internal, "watcher error: file access failed");
            tokio::task::spawn_blocking(apply).await.map_err(crashed)?
        } else {
            apply()
        };
        tree = tree_again;
        queue.push(outbox)?;
        result?;
        // Code that makes events faster than we read them must not keep us from everything else.
        tokio::task::yield_now().await;
    }
}

fn failed(error: &io::Error) -> Error {
    Error::new(Code::Internal, format!("watcher error: {error}"))
}

//! The agent's end of the spawner: one request at a time, and a notice when the spawner is gone.
//!
//! The kernel may kill the spawner when the workload has no memory left, and the host then makes another. A request
//! that comes in between waits for that one; a request that a spawner may have carried out already is never repeated.
//! Which of the two it is, the kernel tells: the end of a socket whose queue is not empty is ECONNRESET at the other end.
//!
//! One task reads the socket for as long as the agent lives ([`SpawnerClient::run`]); a request waits for what that
//! task hands it. Nothing the spawner sends is trusted: a packet that no request waits for, or that is not an answer,
//! ends it.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use protocol::agent::SPAWNER_SOCKET;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::spawner;
use crate::spawner::request::{Failure, Outcome, Request};
use crate::sys;

/// A spawner that takes longer than this was stopped by another process; it is given up, so that the host makes a new
/// one.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a spawner that the host has started may take to connect.
const CONNECTS: Duration = Duration::from_millis(50);
/// How long a request waits for a spawner when there is none. The host makes a new one in 20 to 600 ms, and takes longer
/// when all its cores are busy.
const REPLACEMENT: Duration = Duration::from_secs(5);
/// `oom_score_adj` of what is started: half of the memory limit. The program of the agent and of the spawner counts as memory of
/// each, some thirty megabytes where it is mapped by huge pages, and in the smallest sandboxes what clients start should still
/// be killed before.
const KILLED_FIRST: &str = "500";

/// Why a process was not started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpawnError {
    /// There is no spawner: the kernel or the sandbox's root killed it.
    #[error("the sandbox cannot start processes at the moment: its spawner is gone")]
    NoSpawner,
    /// The system refused.
    #[error("{}", describe(*failure, *errno))]
    Refused { failure: Failure, errno: i32 },
}

/// The system's text for an error number, without Rust's "(os error N)". That of a lack of processes says nothing.
pub(crate) fn describe(failure: Failure, errno: i32) -> String {
    if (failure, errno) == (Failure::Process, libc::EAGAIN) {
        return "process limit of the sandbox reached".to_owned();
    }
    let text = io::Error::from_raw_os_error(errno).to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    text.to_lowercase()
}

/// What became of one request.
#[derive(Debug)]
enum Reply {
    Outcome(Outcome),
    /// The spawner never read the request.
    NotSent,
    /// The spawner read it, and whether it did it is not known.
    Lost,
}

/// Starts processes through whichever spawner is connected.
#[derive(Debug)]
pub(crate) struct SpawnerClient {
    socket: RefCell<Option<Rc<AsyncFd<OwnedFd>>>>,
    /// Held by the request that waits for an answer.
    turn: tokio::sync::Mutex<()>,
    waiting: RefCell<Option<oneshot::Sender<Reply>>>,
    in_flight: Cell<bool>,
    alive: watch::Sender<bool>,
    /// Wakes [`SpawnerClient::run`] when a request gave the spawner up.
    given_up: tokio::sync::Notify,
    /// Whether no spawner is taken.
    closed: watch::Sender<bool>,
}

impl SpawnerClient {
    /// A client of the spawner that this socket leads to.
    ///
    /// # Errors
    /// Those of registering the socket with the event loop.
    pub(crate) fn new(socket: Option<OwnedFd>) -> io::Result<Self> {
        let client = Self {
            socket: RefCell::new(None),
            turn: tokio::sync::Mutex::new(()),
            waiting: RefCell::new(None),
            in_flight: Cell::new(false),
            alive: watch::Sender::new(false),
            given_up: tokio::sync::Notify::new(),
            closed: watch::Sender::new(false),
        };
        if let Some(socket) = socket {
            client.connect(socket)?;
        }
        Ok(client)
    }

    fn connect(&self, socket: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        let socket = sys::watch(socket, Interest::READABLE)?;
        *self.socket.borrow_mut() = Some(Rc::new(socket));
        self.alive.send_replace(true);
        Ok(())
    }

    fn disconnect(&self) {
        *self.socket.borrow_mut() = None;
        // The request that waits, if any, sees its sender dropped.
        *self.waiting.borrow_mut() = None;
        self.alive.send_replace(false);
    }

    /// Lets go of the spawner, and takes none until [`SpawnerClient::open`]. Requests wait meanwhile.
    pub(crate) fn close(&self) {
        self.closed.send_replace(true);
        self.disconnect();
        self.given_up.notify_one();
    }

    /// Takes the next spawner that the host connects.
    pub(crate) fn open(&self) {
        self.closed.send_replace(false);
    }

    fn current(&self) -> Option<Rc<AsyncFd<OwnedFd>>> {
        self.socket.borrow().clone()
    }

    /// Whether a request is on its way, so that a dead child may be one whose pid is not known yet.
    pub(crate) fn in_flight(&self) -> bool {
        self.in_flight.get()
    }

    /// Waits until there is no spawner.
    pub(crate) async fn gone(&self) {
        // One may be about to connect: the host asks right after it has started it.
        let mut alive = self.alive.subscribe();
        let _ = tokio::time::timeout(CONNECTS, alive.wait_for(|alive| *alive)).await;
        // The sender lives in `self`, so the channel cannot close while this waits.
        let _ = self.alive.subscribe().wait_for(|alive| !alive).await;
    }

    /// Starts a process and returns its pid. Must run to its end: an abandoned call would leave an answer that no
    /// request waits for, which costs the spawner its life.
    ///
    /// # Errors
    /// [`SpawnError`].
    pub(crate) async fn spawn(&self, request: &Request, stdio: [&OwnedFd; 3]) -> Result<u32, SpawnError> {
        let patience = Instant::now() + REPLACEMENT;
        loop {
            // Before the turn, so that those who wait do so side by side.
            let mut alive = self.alive.subscribe();
            // What `wait_for` returns holds a lock on the value. Kept over the request, it would stop the one thread
            // for good as soon as the spawner's death is to be written there; `is_ok_and` lets go of it at once.
            let present = tokio::time::timeout_at(patience, alive.wait_for(|alive| *alive))
                .await
                .is_ok_and(|alive| alive.is_ok());
            if !present {
                return Err(SpawnError::NoSpawner);
            }
            let _turn = self.turn.lock().await;
            let Some(socket) = self.current() else { continue };
            match self.ask(&socket, request, stdio).await {
                Reply::Outcome(Outcome::Started(pid)) => {
                    // Of two processes the kernel should kill the user's, not the spawner. Nothing of ours is reaped
                    // before this task yields, so the pid is still that process's. It may be forbidden; then it is not.
                    let _ = std::fs::write(format!("/proc/{pid}/oom_score_adj"), KILLED_FIRST);
                    return Ok(pid);
                }
                Reply::Outcome(Outcome::Failed(failure, errno)) => return Err(SpawnError::Refused { failure, errno }),
                Reply::NotSent => {
                    self.give_up(&socket);
                    if Instant::now() >= patience {
                        return Err(SpawnError::NoSpawner);
                    }
                }
                Reply::Lost => {
                    self.give_up(&socket);
                    return Err(SpawnError::NoSpawner);
                }
            }
        }
    }

    /// Sends a request and waits for the answer.
    async fn ask(&self, socket: &AsyncFd<OwnedFd>, request: &Request, stdio: [&OwnedFd; 3]) -> Reply {
        let (answer, answered) = oneshot::channel();
        *self.waiting.borrow_mut() = Some(answer);
        self.in_flight.set(true);
        let reply = match spawner::send(socket.get_ref(), request, stdio) {
            Ok(()) => match tokio::time::timeout(PATIENCE, answered).await {
                Ok(Ok(reply)) => reply,
                _ => Reply::Lost,
            },
            // Our own lack of descriptors or memory says nothing about the spawner.
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => {
                Reply::Outcome(Outcome::failed(Failure::Process, &error.into()))
            }
            Err(_) => Reply::NotSent,
        };
        self.in_flight.set(false);
        *self.waiting.borrow_mut() = None;
        reply
    }

    /// Lets go of a spawner, unless it is gone already and the present one is its successor.
    fn give_up(&self, socket: &Rc<AsyncFd<OwnedFd>>) {
        if self.current().is_some_and(|current| Rc::ptr_eq(&current, socket)) {
            self.disconnect();
            self.given_up.notify_one();
        }
    }

    /// Reads answers, notices the spawner's death, and takes the replacement that the host connects. Runs forever.
    ///
    /// # Errors
    /// Those of the listening socket.
    pub(crate) async fn run(&self) -> io::Result<()> {
        let listener = listen()?;
        loop {
            if let Some(socket) = self.current() {
                tokio::select! {
                    () = self.deliver(&socket) => self.disconnect(),
                    () = self.given_up.notified() => {}
                }
                continue;
            }
            let _ = self.closed.subscribe().wait_for(|closed| !closed).await;
            let mut ready = listener.readable().await?;
            let accepted = ready.try_io(|listener| {
                Ok(rustix::net::accept_with(
                    listener,
                    SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
                )?)
            });
            let Ok(Ok(socket)) = accepted else { continue };
            // Pid 0 is a process that has no pid in here: the host, which connects before it puts the spawner into the
            // sandbox. The address is open to everyone in this network namespace, and the process behind it is handed
            // every process's streams and makes us hold what it does not read.
            if matches!(sys::peer_credentials(socket.as_fd()), Ok((0, _))) {
                self.connect(socket)?;
            }
        }
    }

    /// Hands answers to the requests that wait for them, until the spawner is gone or misbehaves.
    async fn deliver(&self, socket: &AsyncFd<OwnedFd>) {
        let mut answer = [0; 16];
        loop {
            let Ok(mut ready) = socket.readable().await else { return };
            let Ok(received) = ready.try_io(|socket| Ok(rustix::net::recv(socket, &mut answer, RecvFlags::DONTWAIT)?))
            else {
                continue;
            };
            let waiting = self.waiting.borrow_mut().take();
            let length = match received {
                Ok((length, _)) => length,
                Err(error) => {
                    // It ended before it read the request: there is one at a time, so what was left is that one.
                    if let Some(waiting) = waiting.filter(|_| Errno::from_io_error(&error) == Some(Errno::CONNRESET)) {
                        let _ = waiting.send(Reply::NotSent);
                    }
                    return;
                }
            };
            match (waiting, Outcome::from_bytes(&answer[..length])) {
                (Some(waiting), Some(outcome)) => drop(waiting.send(Reply::Outcome(outcome))),
                _ => return,
            }
        }
    }
}

fn listen() -> io::Result<AsyncFd<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(SPAWNER_SOCKET.as_bytes())?)?;
    rustix::net::listen(&socket, 1)?;
    sys::watch(socket, Interest::READABLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What becomes of a request whose spawner ends, after it has read the request or before.
    async fn reply_of_an_end(is_read: bool) -> Reply {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let client = SpawnerClient::new(Some(ours)).unwrap();
        let socket = client.current().unwrap();
        let request = Request {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            terminal: false,
            cwd: b"/".to_vec(),
            argv: vec![b"true".to_vec()],
            env: Vec::new(),
        };
        let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let end = async {
            if is_read {
                rustix::net::recv(&theirs, &mut [0; 1], RecvFlags::empty()).unwrap();
            }
            drop(theirs);
        };
        let asked = client.ask(&socket, &request, [&null; 3]);
        tokio::join!(biased; asked, end, client.deliver(&socket)).0
    }

    #[tokio::test]
    async fn only_what_a_spawner_has_read_may_have_been_done() {
        assert!(matches!(reply_of_an_end(false).await, Reply::NotSent));
        assert!(matches!(reply_of_an_end(true).await, Reply::Lost));
    }
}

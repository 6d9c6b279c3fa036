//! Being quiet, so that the sandbox can be written to disk with its processes and continue from there, on this host's
//! kernel or after a restart of it.
//!
//! What leads out of the sandbox cannot be written: connections of clients and of the host, the spawner's socket and the
//! kernel's side of the `/proc` files. The agent gives all of them up, and the host brings new ones when the sandbox
//! continues. The host reads this process's memory then, which nothing else may, so it is also dumpable while it is quiet;
//! the rest of the sandbox is frozen for as long.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use protocol::agent::quiet;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::process::DumpableBehavior;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::services::figures::Figures;
use crate::spawner_client::SpawnerClient;
use crate::sys;

/// How long connections may take to be given up. Nothing waits in them: each ends where its task next waits.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often, and with which pause, a request is looked for that is not there yet.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(2);

/// Whether this agent is quiet, and who has to know.
#[derive(Debug)]
pub(crate) struct Quiet {
    state: watch::Sender<State>,
    /// Number of open connections, and of the kernel's side of the `/proc` files.
    open: watch::Sender<usize>,
    spawner: Rc<SpawnerClient>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct State {
    times: u64,
    is_quiet: bool,
}

/// Something that is given up when the agent becomes quiet.
#[derive(Debug)]
pub(crate) struct Held {
    quiet: Rc<Quiet>,
    state: watch::Receiver<State>,
    since: u64,
}

impl Held {
    /// Returns when it has to be given up.
    pub(crate) async fn until_quiet(&mut self) {
        let since = self.since;
        // The sender lives as long as `self`.
        let _ = self.state.wait_for(|state| state.times > since).await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.quiet.open.send_modify(|open| *open -= 1);
    }
}

impl Quiet {
    pub(crate) fn new(spawner: Rc<SpawnerClient>) -> Rc<Self> {
        Rc::new(Self {
            state: watch::Sender::default(),
            open: watch::Sender::default(),
            spawner,
        })
    }

    /// To be kept beside what leads out of the sandbox.
    pub(crate) fn hold(self: &Rc<Self>) -> Held {
        self.open.send_modify(|open| *open += 1);
        let state = self.state.subscribe();
        let since = state.borrow().times;
        Held {
            quiet: Rc::clone(self),
            state,
            since,
        }
    }

    /// Waits until the agent is not quiet.
    pub(crate) async fn until_loud(&self) {
        let _ = self.state.subscribe().wait_for(|state| !state.is_quiet).await;
    }

    /// Gives up all that leads out.
    ///
    /// # Errors
    /// When something is still open. The agent is not quiet then.
    async fn become_quiet(&self) -> io::Result<()> {
        self.state.send_modify(|state| {
            state.times += 1;
            state.is_quiet = true;
        });
        self.spawner.close();
        let mut open = self.open.subscribe();
        let closed = open.wait_for(|open| *open == 0);
        if tokio::time::timeout(PATIENCE, closed).await.is_err() {
            self.become_loud();
            return Err(io::ErrorKind::TimedOut.into());
        }
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        Ok(())
    }

    /// Accepts connections again.
    fn become_loud(&self) {
        // Root in the sandbox has our user id.
        let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
        self.spawner.open();
        self.state.send_modify(|state| state.is_quiet = false);
    }

    /// Serves the `/proc` files until the agent becomes quiet.
    pub(crate) async fn serve_figures(self: Rc<Self>, kernel: OwnedFd) {
        let Ok(figures) = Figures::new(kernel) else { return };
        let mut held = self.hold();
        tokio::select! {
            _ = figures.serve() => {}
            () = held.until_quiet() => {}
        }
    }

    /// Does what the host asks for on the socket for it, forever.
    ///
    /// # Errors
    /// Those of the listening socket.
    pub(crate) async fn serve(self: Rc<Self>, tasks: TaskTracker) -> io::Result<()> {
        let listener = listen()?;
        loop {
            let mut ready = listener.readable().await?;
            let accepted = ready.try_io(|listener| Ok(rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?));
            let Ok(Ok(socket)) = accepted else { continue };
            // Pid 0 is a process that has no pid in here. The address is open to everyone in this network namespace.
            if !matches!(sys::peer_credentials(socket.as_fd()), Ok((0, _))) {
                continue;
            }
            // The host has sent it right after it connected, and is not waited for.
            let done = match receive(&socket).await {
                Ok((Wanted::Quiet, _)) => self.become_quiet().await,
                Ok((Wanted::Continue, kernel)) => {
                    self.become_loud();
                    if let Some(kernel) = kernel {
                        tasks.spawn_local(Rc::clone(&self).serve_figures(kernel));
                    }
                    Ok(())
                }
                Err(error) => Err(error),
            };
            let answer = match done {
                Ok(()) => quiet::DONE.to_vec(),
                Err(error) => error.to_string().into_bytes(),
            };
            let _ = rustix::net::send(&socket, &answer, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        }
    }
}

/// What the host asks for.
enum Wanted {
    Quiet,
    Continue,
}

/// A request of the host, and the descriptor that it has sent with it.
async fn receive(socket: &OwnedFd) -> io::Result<(Wanted, Option<OwnedFd>)> {
    let mut bytes = [0; 16];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut attempts = ATTEMPTS;
    let received = loop {
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        match rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::AGAIN) if attempts > 0 => {
                attempts -= 1;
                tokio::time::sleep(PAUSE).await;
            }
            received => break received?,
        }
    };
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    match &bytes[..received.bytes] {
        quiet::QUIET => Ok((Wanted::Quiet, descriptor)),
        quiet::CONTINUE => Ok((Wanted::Continue, descriptor)),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

fn listen() -> io::Result<AsyncFd<OwnedFd>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(quiet::SOCKET.as_bytes())?)?;
    rustix::net::listen(&socket, 1)?;
    sys::watch(socket, Interest::READABLE)
}

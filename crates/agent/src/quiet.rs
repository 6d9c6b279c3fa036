//! Being quiet, so that the sandbox can be written to disk with its processes and continue from there, on this host's
//! kernel or after a restart of it.
//!
//! What leads out of the sandbox cannot be written: connections of clients and of the host, the spawner's socket and the
//! kernel's side of the `/proc` files. The agent gives all of them up, and the host brings new ones when the sandbox
//! continues. When the sandbox is only copied, connections of clients stay: they are not in the copy, whose agent closes
//! its ends of them before it does anything else. The host reads this process's memory then, which nothing else may, so it is
//! also dumpable while it is quiet; the rest of the sandbox is frozen for as long.

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
use crate::services::process::table::Table;
use crate::spawner_client::SpawnerClient;
use crate::sys;

/// How long connections may take to be given up. Nothing waits in them: each ends where its task next waits.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often, and with which pause, a request is looked for that is not there yet.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(2);

/// The quiet state of the agent, and the connections that have to follow it.
#[derive(Debug)]
pub(crate) struct Quiet {
    state: watch::Sender<State>,
    /// Number of open connections to the host, and of the kernel's side of the `/proc` files.
    open: watch::Sender<usize>,
    /// Number of open connections of clients.
    clients: watch::Sender<usize>,
    spawner: Rc<SpawnerClient>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct State {
    /// How often everything was given up that leads to the host.
    times: u64,
    /// How often the connections of clients were given up.
    cuts: u64,
    is_quiet: bool,
}

/// What leads out of the sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// To the host.
    Host,
    /// To a client, on a TCP connection.
    Client,
}

impl State {
    fn count(&self, way: Way) -> u64 {
        match way {
            Way::Host => self.times,
            Way::Client => self.cuts,
        }
    }
}

/// A connection, or another link out of the sandbox, that is given up when the agent becomes quiet.
#[derive(Debug)]
pub(crate) struct Held {
    quiet: Rc<Quiet>,
    state: watch::Receiver<State>,
    way: Way,
    since: u64,
}

impl Held {
    /// Returns when the connection has to be given up.
    pub(crate) async fn until_quiet(&mut self) {
        let (since, way) = (self.since, self.way);
        // The sender lives as long as `self`.
        let _ = self.state.wait_for(|state| state.count(way) > since).await;
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.quiet.open_to(self.way).send_modify(|open| *open -= 1);
    }
}

impl Quiet {
    pub(crate) fn new(spawner: Rc<SpawnerClient>) -> Rc<Self> {
        Rc::new(Self {
            state: watch::Sender::default(),
            open: watch::Sender::default(),
            clients: watch::Sender::default(),
            spawner,
        })
    }

    fn open_to(&self, way: Way) -> &watch::Sender<usize> {
        match way {
            Way::Host => &self.open,
            Way::Client => &self.clients,
        }
    }

    /// Counts a connection to the host until the result is dropped, which is kept beside it.
    pub(crate) fn hold(self: &Rc<Self>) -> Held {
        self.hold_way(Way::Host)
    }

    /// Counts the connection of a client until the result is dropped, which is kept beside it.
    pub(crate) fn hold_client(self: &Rc<Self>) -> Held {
        self.hold_way(Way::Client)
    }

    fn hold_way(self: &Rc<Self>, way: Way) -> Held {
        self.open_to(way).send_modify(|open| *open += 1);
        let state = self.state.subscribe();
        let since = state.borrow().count(way);
        Held {
            quiet: Rc::clone(self),
            state,
            way,
            since,
        }
    }

    /// Waits until the agent is not quiet.
    pub(crate) async fn until_loud(&self) {
        let _ = self.state.subscribe().wait_for(|state| !state.is_quiet).await;
    }

    /// Gives up all that leads out, or all but the connections of clients.
    ///
    /// # Errors
    /// When something is still open. The agent is not quiet then.
    async fn become_quiet(&self, keeps_clients: bool) -> io::Result<()> {
        self.state.send_modify(|state| {
            state.times += 1;
            state.cuts += u64::from(!keeps_clients);
            state.is_quiet = true;
        });
        self.spawner.close();
        let (mut open, mut clients) = (self.open.subscribe(), self.clients.subscribe());
        let closed = async {
            let _ = open.wait_for(|open| *open == 0).await;
            if !keeps_clients {
                let _ = clients.wait_for(|open| *open == 0).await;
            }
        };
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
    ///
    /// Their kernel's side is counted from now on and not when this is polled first: the agent may be stopped right after it
    /// has taken it back, and be asked to give it up the moment it runs again.
    pub(crate) fn serve_figures(self: &Rc<Self>, kernel: OwnedFd) -> impl Future<Output = ()> + use<> {
        let held = self.hold();
        async move {
            let mut held = held;
            let Ok(figures) = Figures::new(kernel) else { return };
            tokio::select! {
                _ = figures.serve() => {}
                () = held.until_quiet() => {}
            }
        }
    }

    /// Does what the host asks for on the socket for it, forever.
    ///
    /// # Errors
    /// Those of the listening socket.
    pub(crate) async fn serve(self: Rc<Self>, tasks: TaskTracker, table: Rc<Table>) -> io::Result<()> {
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
                Ok((Wanted::Quiet { keeps_clients }, _)) => self.become_quiet(keeps_clients).await,
                Ok((Wanted::Continue { is_copy }, kernel)) => {
                    if is_copy {
                        self.state.send_modify(|state| state.cuts += 1);
                    }
                    table.renew_ownership();
                    self.become_loud();
                    if let Some(kernel) = kernel {
                        tasks.spawn_local(self.serve_figures(kernel));
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
    Quiet { keeps_clients: bool },
    Continue { is_copy: bool },
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
        quiet::QUIET => Ok((Wanted::Quiet { keeps_clients: false }, descriptor)),
        quiet::STILL => Ok((Wanted::Quiet { keeps_clients: true }, descriptor)),
        quiet::CONTINUE => Ok((Wanted::Continue { is_copy: false }, descriptor)),
        quiet::CONTINUE_ALONE => Ok((Wanted::Continue { is_copy: true }, descriptor)),
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

#[cfg(test)]
mod tests {
    use tokio::task::LocalSet;

    use super::*;

    #[tokio::test(flavor = "current_thread")]
    async fn gives_up_what_it_was_given_a_moment_before() {
        let quiet = Quiet::new(Rc::new(SpawnerClient::new(None).unwrap()));
        let (kernel, other_end) = std::os::unix::net::UnixStream::pair().unwrap();
        other_end.set_nonblocking(true).unwrap();
        let tasks = LocalSet::new();
        let asked = tasks.run_until(async {
            // Not polled before the request is there.
            tokio::task::spawn_local(quiet.serve_figures(kernel.into()));
            quiet.become_quiet(false).await
        });
        asked.await.unwrap();
        // The end of the stream: nothing has the other one open.
        let mut bytes = [0; 1];
        assert_eq!(io::Read::read(&mut &other_end, &mut bytes).unwrap(), 0);
    }
}

//! The launcher pool: the platform's side of its launchers, and the lock that they hold.
//!
//! Launchers that start sandboxes never wait for anything that a sandbox can stop. The one that replaces spawners works
//! in namespaces where root of a sandbox has privileges, so it shares no process and no queue with them. Nor do those that
//! restore sandboxes: what CRIU makes again was chosen inside, and may be something that it waits for.
//!
//! Every launcher has the lock file of the data directory as its standard output. A platform that finds the lock held
//! knows that launchers of an earlier one still exist, and finds their processes by that descriptor.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::cancel::Cancel;
use crate::holders;
use crate::wire::{self, Hello, Message, Reply, Request, Work};

/// How long a launcher may take to start one sandbox. It takes milliseconds; the bound is for an overloaded host, so
/// that a create request fails instead of waiting forever.
const LAUNCH_TIMEOUT: Duration = Duration::from_secs(30);
/// How long replacing a spawner may take. Each of its three steps may take a second.
const RESPAWN_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a launcher may take to end once its socket is closed, and again after it was killed. It ends immediately or
/// after its current step; only one that is blocked in the kernel, for example on disk I/O, survives being killed.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a process may take to put back what it has changed for a checkpoint. It takes milliseconds; the bound is for a disk
/// that blocks it.
const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long launchers of an earlier platform may take to notice its end before they are killed.
const LOCK_GRACE: Duration = Duration::from_secs(1);
/// How long the lock may stay held after the launchers were killed.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts to take the lock, at platform start only.
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// The start of processes for one request, or for the pool. It knows what all of them are told first.
#[derive(Debug)]
pub(crate) struct Helpers {
    /// `None` once it has been shut down.
    locks: Mutex<Option<Locks>>,
    hello: Hello,
}

/// The launcher processes of a platform.
#[derive(Debug)]
pub(crate) struct LauncherPool {
    helpers: Arc<Helpers>,
    starts: Pool,
    restores: Pool,
    /// Locked while a message is sent, never for a whole attempt.
    spawners: Mutex<Option<LauncherProcess>>,
}

/// Files that stay locked as long as one of the launchers lives.
#[derive(Debug)]
struct Locks {
    /// The lock file of the data directory.
    launchers: OwnedFd,
    /// The entries of the registry for the first block of ids.
    entries: Vec<Arc<OwnedFd>>,
}

/// Launchers that do the same work.
#[derive(Debug)]
struct Pool {
    work: Work,
    free: Mutex<Free>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Free {
    /// Launchers that wait for a request; the one that has waited the longest is the first.
    ready: VecDeque<LauncherProcess>,
    /// How many more the pool may have: those that were not needed yet, and those that could not be replaced.
    missing: usize,
    /// Whether the pool has been shut down.
    is_ended: bool,
}

impl Pool {
    /// A pool of this many launchers, none of which exists yet.
    fn new(work: Work, count: usize) -> Self {
        let free = Free {
            missing: count.max(1),
            ..Free::default()
        };
        Self {
            work,
            free: Mutex::new(free),
            freed: Condvar::new(),
        }
    }

    /// A free launcher, or permission to start one. Waits for either.
    fn take(&self) -> Option<LauncherProcess> {
        let mut free = self.free.lock();
        loop {
            let launcher = match self.work {
                // It has opened what a checkpoint needs, such as the program of its agent.
                Work::Restores => free.ready.pop_back(),
                // It has a disk ready.
                _ => free.ready.pop_front(),
            };
            if launcher.is_some() {
                return launcher;
            }
            if free.missing > 0 {
                free.missing -= 1;
                return None;
            }
            self.freed.wait(&mut free);
        }
    }

    /// Permission to start a launcher, unless the pool has this many.
    fn begin_ahead(&self, count: usize) -> bool {
        let mut free = self.free.lock();
        let begins = free.missing > 0 && free.ready.len() < count;
        free.missing -= usize::from(begins);
        begins
    }

    /// Gives back what [`Self::take`] has given: a launcher, or none if there is none.
    fn put(&self, launcher: Option<LauncherProcess>) {
        let mut free = self.free.lock();
        match launcher {
            Some(launcher) if !free.is_ended => free.ready.push_back(launcher),
            Some(launcher) => drop(launcher),
            None => free.missing += 1,
        }
        self.freed.notify_one();
    }

    fn end(&self) {
        let mut free = self.free.lock();
        free.is_ended = true;
        free.ready.clear();
    }
}

impl Helpers {
    /// Helpers that hold a lock file of the data directory, and entries of the registry, for as long as they live.
    pub(crate) fn new(launchers: OwnedFd, entries: Vec<Arc<OwnedFd>>, hello: Hello) -> Self {
        Self {
            locks: Mutex::new(Some(Locks { launchers, entries })),
            hello,
        }
    }

    fn start_one(&self, work: Work) -> io::Result<LauncherProcess> {
        let hello = Hello {
            work,
            ..self.hello.clone()
        };
        match &*self.locks.lock() {
            Some(locks) => LauncherProcess::start(&hello, locks),
            None => Err(io::Error::other("the launchers have been shut down")),
        }
    }

    /// Starts a process for one request with descriptors, and returns its reply. The process is killed at the deadline, and when
    /// `is_cancelled`.
    ///
    /// # Errors
    /// When it does not reply.
    pub(crate) fn request_once(
        &self,
        work: Work,
        request: Message<'_>,
        deadline: Instant,
        is_cancelled: &dyn Fn() -> bool,
    ) -> io::Result<Reply> {
        let mut once = self.begin_once(work)?;
        once.ask(request, deadline, is_cancelled)
    }

    /// Starts a process for a few requests that belong together.
    ///
    /// # Errors
    /// With the error that it reports.
    pub(crate) fn begin_once(&self, work: Work) -> io::Result<Once> {
        Ok(Once {
            process: self.start_one(work)?,
            notices_end: work == Work::Dump,
            has_put_back: false,
        })
    }

    /// Starts no more of them.
    fn end(&self) {
        *self.locks.lock() = None;
    }
}

impl LauncherPool {
    /// Starts `count` launchers for sandboxes and one for spawners. There can be `restores` more that restore sandboxes,
    /// which are started when they are needed, or before ([`Self::prepare_restores`]).
    ///
    /// # Errors
    /// With the error that a launcher reports.
    pub(crate) fn start(helpers: Arc<Helpers>, count: usize, restores: usize) -> io::Result<Self> {
        let launchers = Self {
            helpers,
            starts: Pool::new(Work::Sandboxes, count),
            restores: Pool::new(Work::Restores, restores),
            spawners: Mutex::default(),
        };
        while launchers.starts.begin_ahead(count.max(1)) {
            launchers
                .starts
                .put(Some(launchers.helpers.start_one(Work::Sandboxes)?));
        }
        *launchers.spawners.lock() = Some(launchers.helpers.start_one(Work::Spawners)?);
        Ok(launchers)
    }

    /// The helpers that start launchers.
    pub(crate) fn helpers(&self) -> &Arc<Helpers> {
        &self.helpers
    }

    /// Starts launchers that restore sandboxes, until there are `count`: a restore that has to wait for one to start takes
    /// that much longer.
    ///
    /// # Errors
    /// With the error that a launcher reports. The restore that needs it tries again.
    pub(crate) fn prepare_restores(&self, count: usize) -> io::Result<()> {
        while self.restores.begin_ahead(count) {
            let started = self.helpers.start_one(Work::Restores);
            let failed = started
                .as_ref()
                .err()
                .map(|error| io::Error::new(error.kind(), error.to_string()));
            self.restores.put(started.ok());
            if let Some(error) = failed {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Sends a request with descriptors to a free launcher and returns its reply. Waits for a free one, so callers limit
    /// their number. One that restores waits for no other work, and none waits for it.
    ///
    /// # Errors
    /// When the launcher does not reply in time.
    pub(crate) fn request(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> io::Result<(Reply, Vec<OwnedFd>)> {
        let pool = if request.restores() {
            &self.restores
        } else {
            &self.starts
        };
        let mut launcher = match pool.take() {
            Some(launcher) => launcher,
            None => self.helpers.start_one(pool.work).inspect_err(|_| pool.put(None))?,
        };
        let timeout = LAUNCH_TIMEOUT + request.extra_time();
        let answer = set_socket_timeout(&launcher.socket, Timeout::Recv, Some(timeout))
            .map_err(io::Error::from)
            .and_then(|()| wire::send_message(&launcher.socket, request, fds))
            .and_then(|()| wire::receive_message(&launcher.socket))
            .and_then(|answer| answer.ok_or_else(|| io::Error::other("the launcher exited")));
        let launcher = match &answer {
            Ok(_) => Some(launcher),
            // One that failed to reply may be in any state; it is replaced.
            Err(_) => {
                launcher.stuck = true;
                drop(launcher);
                self.helpers.start_one(pool.work).ok()
            }
        };
        pool.put(launcher);
        answer
    }

    /// Gives a sandbox a new spawner.
    ///
    /// # Errors
    /// With the step that failed, after a few seconds at most.
    pub(crate) fn respawn(&self, name: String, agent: BorrowedFd<'_>) -> io::Result<()> {
        let (answer, theirs) = packet_pair()?;
        set_socket_timeout(&answer, Timeout::Recv, Some(RESPAWN_TIMEOUT))?;
        let request = Request::Respawn { name };
        let fds = [agent, theirs.as_fd()];
        {
            let mut spawners = self.spawners.lock();
            let sent = spawners
                .as_ref()
                .is_some_and(|launcher| wire::send_message(&launcher.socket, &request, &fds).is_ok());
            if !sent {
                // It was killed by another process.
                *spawners = None;
                let launcher = self.helpers.start_one(Work::Spawners)?;
                wire::send_message(&launcher.socket, &request, &fds)?;
                *spawners = Some(launcher);
            }
        }
        drop(theirs);
        match wire::receive_message(&answer) {
            Ok(Some((Reply::Done, _))) => Ok(()),
            Ok(Some((Reply::Failed(why), _))) => Err(io::Error::other(why)),
            Ok(Some(_)) => Err(io::Error::other("unexpected reply from the launcher")),
            Ok(None) => Err(io::Error::other("the spawner helper exited without a reply")),
            Err(error) => Err(error),
        }
    }

    /// Shuts down all launchers. Called last: no requests are possible afterwards.
    pub(crate) fn end(&self) {
        self.starts.end();
        self.restores.end();
        *self.spawners.lock() = None;
        self.helpers.end();
    }
}

/// A process for one thing. It is killed when it has not replied, unless it notices that it is given up.
#[derive(Debug)]
pub(crate) struct Once {
    process: LauncherProcess,
    /// Whether the process has something to put back when it is given up.
    notices_end: bool,
    has_put_back: bool,
}

impl Once {
    /// Sends a request with descriptors, and returns the reply. To be given up after the deadline, and when `is_cancelled`.
    ///
    /// # Errors
    /// When it does not reply.
    pub(crate) fn ask(
        &mut self,
        request: Message<'_>,
        deadline: Instant,
        is_cancelled: &dyn Fn() -> bool,
    ) -> io::Result<Reply> {
        self.ask_and_poll(request, deadline, is_cancelled, None)
    }

    /// Sends a request and waits for the reply, like [`Self::ask`]. When it is cancelled, the process is told, and this
    /// waits until it has put everything back.
    ///
    /// # Errors
    /// When it does not reply, and when it is cancelled.
    pub(crate) fn ask_unless(&mut self, request: Message<'_>, deadline: Instant, cancel: &Cancel) -> io::Result<Reply> {
        let is_cancelled = || cancel.is_requested();
        let reply = self.ask_and_poll(request, deadline, &is_cancelled, Some(cancel.as_fd()));
        if reply.is_err() && cancel.is_requested() {
            self.give_up();
            return Err(Cancel::error());
        }
        reply
    }

    /// Has a process that notices it put everything back, and waits until it has, or has ended.
    pub(crate) fn give_up(&mut self) {
        let deadline = Instant::now() + GIVE_UP_TIMEOUT;
        let mut reply = self.ask_and_poll(Request::GiveUp.alone(), deadline, &|| false, None);
        // Replies that were on their way.
        while matches!(reply, Ok(Reply::Stopped | Reply::Done)) {
            reply = self.reply(deadline, &|| false, None);
        }
        match reply {
            Ok(_) => self.has_put_back = true,
            Err(error) => tracing::warn!("give up writing a checkpoint: {error}"),
        }
    }

    /// Whether it was given up and has put everything back.
    pub(crate) fn has_put_back(&self) -> bool {
        self.has_put_back
    }

    fn ask_and_poll(
        &mut self,
        request: Message<'_>,
        deadline: Instant,
        is_cancelled: &dyn Fn() -> bool,
        cancelled: Option<BorrowedFd<'_>>,
    ) -> io::Result<Reply> {
        wire::send_message(&self.process.socket, request.request, request.fds)?;
        self.reply(deadline, is_cancelled, cancelled)
    }

    /// The next reply. `cancelled` becomes readable when `is_cancelled` becomes true.
    fn reply(
        &mut self,
        deadline: Instant,
        is_cancelled: &dyn Fn() -> bool,
        cancelled: Option<BorrowedFd<'_>>,
    ) -> io::Result<Reply> {
        let launcher = &mut self.process;
        // Until it replies, it does not notice that its socket closes, or only after a while.
        launcher.stuck = !self.notices_end;
        let pause = Timespec {
            tv_sec: 0,
            tv_nsec: 50_000_000,
        };
        let mut ready = vec![PollFd::from_borrowed_fd(launcher.socket.as_fd(), PollFlags::IN)];
        ready.extend(cancelled.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        loop {
            match rustix::event::poll(&mut ready, Some(&pause)) {
                Err(rustix::io::Errno::INTR) => {}
                polled => {
                    polled?;
                    if !ready[0].revents().is_empty() {
                        break;
                    }
                }
            }
            if is_cancelled() {
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the platform ended"));
            }
            if Instant::now() >= deadline {
                return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long"));
            }
        }
        let reply = wire::receive_message(&launcher.socket)?;
        launcher.stuck = false;
        let (reply, _) = reply.ok_or_else(|| io::Error::other("the process exited without a reply"))?;
        Ok(reply)
    }
}

#[derive(Debug)]
struct LauncherProcess {
    socket: OwnedFd,
    process: Child,
    /// Whether the process did not reply in time, so that it will not notice that its socket closes either.
    stuck: bool,
}

impl LauncherProcess {
    fn start(hello: &Hello, locks: &Locks) -> io::Result<Self> {
        let (socket, theirs) = packet_pair()?;
        // The launcher writes nothing to its standard output; the descriptor there holds the lock while it lives.
        #[expect(clippy::disallowed_methods, reason = "launchers are processes of this program")]
        let process = Command::new("/proc/self/exe")
            .arg("launcher")
            .args(hello.work.argument())
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::from(locks.launchers.try_clone()?))
            .spawn()?;
        let launcher = Self {
            socket,
            process,
            stuck: false,
        };
        set_socket_timeout(&launcher.socket, Timeout::Recv, Some(LAUNCH_TIMEOUT))?;
        set_socket_timeout(&launcher.socket, Timeout::Send, Some(RESPAWN_TIMEOUT))?;
        let entries: Vec<BorrowedFd<'_>> = locks.entries.iter().map(|entry| entry.as_fd()).collect();
        wire::send_message(&launcher.socket, hello, &entries)?;
        match wire::receive_message(&launcher.socket)? {
            Some((Reply::Ready, _)) => Ok(launcher),
            Some((Reply::Failed(why), _)) => Err(io::Error::other(why)),
            _ => Err(io::Error::other("the launcher exited at startup")),
        }
    }

    /// Waits until the process has ended. Returns whether it did in time.
    fn wait_ended(&mut self) -> bool {
        let deadline = Instant::now() + END_TIMEOUT;
        loop {
            match self.process.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
                Ok(None) => return false,
                // It was already reaped.
                Ok(Some(_)) | Err(_) => return true,
            }
        }
    }
}

impl Drop for LauncherProcess {
    fn drop(&mut self) {
        // Closing the socket ends the launcher; an unconnected socket takes its place here.
        if let Ok((unconnected, _)) = UnixStream::pair() {
            self.socket = unconnected.into();
        }
        if !self.stuck && self.wait_ended() {
            return;
        }
        let _ = self.process.kill();
        if !self.wait_ended() {
            tracing::error!(
                process.id = self.process.id(),
                "a launcher was killed but has not exited, most likely blocked on disk I/O"
            );
        }
    }
}

fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Takes the lock that launchers share. Launchers of an earlier platform end when the platform ends; one that was
/// stopped or is blocked is killed.
///
/// # Errors
/// When a process that does not end holds the lock.
pub(crate) fn lock(path: &Path) -> io::Result<OwnedFd> {
    let lock = rustix::fs::open(
        path,
        OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC,
        Mode::from_raw_mode(0o600),
    )?;
    if !try_until(&lock, Instant::now() + LOCK_GRACE)? {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        while !try_until(&lock, Instant::now() + LOCK_GRACE / 4)? {
            let ended = holders::kill(&lock)?;
            if !ended.is_empty() {
                tracing::warn!(processes = ?ended, "launchers of an earlier platform did not exit and were killed");
            }
            if Instant::now() > deadline {
                return Err(io::Error::other(format!(
                    "{} is still locked by launchers of an earlier platform (processes {ended:?}), which were killed but \
                     have not exited: check the kernel log for disk errors",
                    path.display()
                )));
            }
        }
    }
    rustix::fs::flock(&lock, FlockOperation::LockShared)?;
    Ok(lock)
}

fn try_until(lock: &OwnedFd, deadline: Instant) -> io::Result<bool> {
    loop {
        match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// A launcher that cannot be started is no place lost: the next request tries again, and nobody waits for good.
    #[test]
    fn a_place_without_a_launcher_is_used_again() {
        let pool = Arc::new(Pool::new(Work::Restores, 2));
        for _ in 0..2 {
            assert!(pool.take().is_none(), "permission to start one");
        }
        assert!(!pool.begin_ahead(2), "both have begun");
        let waiting = std::thread::spawn({
            let pool = Arc::clone(&pool);
            move || pool.take().is_none()
        });
        pool.put(None);
        assert!(waiting.join().unwrap());
        pool.put(None);
        assert!(pool.begin_ahead(1));
        assert_eq!(pool.free.lock().missing, 0);
    }

    #[test]
    fn a_pool_has_a_place_at_least() {
        let pool = Pool::new(Work::Sandboxes, 0);
        assert!(pool.take().is_none());
        pool.end();
        pool.put(None);
        assert!(pool.free.lock().ready.is_empty());
    }
}

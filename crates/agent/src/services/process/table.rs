//! The processes that the agent started, and for a while the ends of those that are over.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;
use protocol::connect::{Code, Error};
use protocol::process::{DataEvent, EndEvent, ProcessConfig, ProcessSelector};
use rustix::process::{Pid, Signal};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::input::Input;
use super::status;
use super::stdio::Ownership;

/// Output events that may wait for one listener.
const QUEUE: usize = 8;
/// Bytes that one event of every process may come to together, so that listeners who do not listen cost the agent
/// `QUEUE` times this at most.
const EVENTS: usize = 8 * 1024 * 1024;
/// How long the end of a process can still be asked for.
const RETENTION: Duration = Duration::from_secs(30);
/// How many ends are kept at most: 100 commands a second for the whole time, in about 1 MB.
const RETAINED: usize = 3000;
/// A longer tag is not worth keeping after the end.
const RETAINED_TAG: usize = 1024;

/// One process that a client has started.
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// The command as the client requested it.
    pub(crate) config: ProcessConfig,
    pub(crate) tag: Option<String>,
    pub(crate) input: Input,
    ownership: Ownership,
    listeners: RefCell<Vec<mpsc::Sender<DataEvent>>>,
    /// Raw wait status, once reaped.
    status: Cell<Option<i32>>,
    /// Whether the process ended because the sandbox had no memory left.
    out_of_memory: Cell<bool>,
    reaped: CancellationToken,
    /// A client ended the process on purpose, so its end need not wait for the end of its output.
    waived: Cell<bool>,
    /// Reaped and waived: its output is not read any more.
    cut: CancellationToken,
    end: OnceCell<EndEvent>,
    /// Bytes read of its standard output, its standard error and its terminal.
    written: [Cell<u64>; 3],
    over: CancellationToken,
    _share: Option<OwnedSemaphorePermit>,
}

impl Process {
    pub(crate) fn new(
        pid: u32,
        config: ProcessConfig,
        tag: Option<String>,
        input: Input,
        ownership: Ownership,
        listener: mpsc::Sender<DataEvent>,
        share: Option<OwnedSemaphorePermit>,
    ) -> Self {
        Self {
            pid,
            config,
            tag,
            input,
            ownership,
            listeners: RefCell::new(vec![listener]),
            status: Cell::new(None),
            out_of_memory: Cell::new(false),
            reaped: CancellationToken::new(),
            waived: Cell::new(false),
            cut: CancellationToken::new(),
            end: OnceCell::new(),
            written: Default::default(),
            over: CancellationToken::new(),
            _share: share,
        }
    }

    /// Creates a channel for a listener, before it subscribes.
    pub(crate) fn channel() -> (mpsc::Sender<DataEvent>, mpsc::Receiver<DataEvent>) {
        mpsc::channel(QUEUE)
    }

    /// Adds a listener, which gets all output from now on, and then the end of the channel.
    pub(crate) fn subscribe(&self) -> mpsc::Receiver<DataEvent> {
        let (sender, receiver) = Self::channel();
        if self.end.get().is_none() {
            self.listeners.borrow_mut().push(sender);
        }
        receiver
    }

    /// Counts output that was read.
    pub(crate) fn count(&self, event: &DataEvent) {
        for (count, bytes) in self.written.iter().zip([&event.stdout, &event.stderr, &event.pty]) {
            let length = bytes.as_ref().map_or(0, Bytes::len);
            count.set(count.get() + length as u64);
        }
    }

    /// Bytes of output read so far: standard output, standard error, terminal.
    pub(crate) fn written(&self) -> [u64; 3] {
        self.written.each_ref().map(Cell::get)
    }

    /// Gives output to every listener, waiting for each; those that left are forgotten.
    pub(crate) async fn publish(&self, event: DataEvent) {
        let listeners = self.listeners.borrow().clone();
        let mut someone_left = false;
        for listener in listeners {
            someone_left |= listener.send(event.clone()).await.is_err();
        }
        if someone_left {
            self.listeners.borrow_mut().retain(|listener| !listener.is_closed());
        }
    }

    /// Gives output to the listeners whose queue has space.
    pub(crate) fn publish_now(&self, event: &DataEvent) {
        for listener in self.listeners.borrow().iter() {
            let _ = listener.try_send(event.clone());
        }
    }

    pub(crate) fn is_reaped(&self) -> bool {
        self.status.get().is_some()
    }

    fn set_reaped(&self, status: i32) {
        self.status.set(Some(status));
        self.reaped.cancel();
        if self.waived.get() {
            self.cut.cancel();
        }
    }

    /// Lets the end no longer wait for the output pipes, which descendants may hold open.
    pub(crate) fn waive_output(&self) {
        self.waived.set(true);
        if self.is_reaped() {
            self.cut.cancel();
        }
    }

    /// Whether the process ended by a SIGKILL that no client asked for, its own or, as shells report it, that of the
    /// program which it ran.
    pub(crate) fn was_killed_by_another(&self) -> bool {
        !self.waived.get() && self.status.get().is_some_and(status::is_kill)
    }

    /// Notes that the process ended because the sandbox had no memory left.
    pub(crate) fn note_out_of_memory(&self) {
        self.out_of_memory.set(true);
    }

    /// Signals the process, and only this one. Does nothing once it was reaped, because its pid may be another's by
    /// then.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn signal(&self, signal: Signal) -> rustix::io::Result<()> {
        if self.is_reaped() {
            return Ok(());
        }
        match i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            Some(pid) => rustix::process::kill_process(pid, signal),
            None => Err(rustix::io::Errno::SRCH),
        }
    }

    /// Waits until the process was reaped.
    pub(crate) async fn reaped(&self) {
        self.reaped.cancelled().await;
    }

    /// Waits until its output is not read any more.
    pub(crate) async fn cut(&self) {
        self.cut.cancelled().await;
    }

    /// Waits until its end is known.
    pub(crate) async fn over(&self) {
        self.over.cancelled().await;
    }

    /// Its end, once all its output was delivered.
    pub(crate) fn end(&self) -> Option<&EndEvent> {
        self.end.get()
    }
}

struct Retained {
    pid: u32,
    tag: Option<String>,
    end: EndEvent,
    until: Instant,
}

/// What a selector led to.
pub(crate) enum Found {
    Live(Rc<Process>),
    Ended { pid: u32, end: EndEvent },
}

/// All processes that clients have started.
#[derive(Default)]
pub(crate) struct Table {
    /// By order of start, not by pid: a process whose output is still open keeps its place while its pid may be
    /// another's already.
    live: RefCell<BTreeMap<u64, Rc<Process>>>,
    next: Cell<u64>,
    retained: RefCell<VecDeque<Retained>>,
    /// Children that died before the spawner's answer with their pid.
    early: RefCell<BTreeMap<u32, i32>>,
}

impl Table {
    /// Adds a process that runs, or ran: it may be dead already.
    pub(crate) fn insert(&self, process: Rc<Process>) -> u64 {
        let id = self.next.get();
        self.next.set(id + 1);
        let replaced = |old: &Retained| old.pid == process.pid || (old.tag.is_some() && old.tag == process.tag);
        self.retained.borrow_mut().retain(|old| !replaced(old));
        if let Some(status) = self.early.borrow_mut().remove(&process.pid) {
            process.set_reaped(status);
        }
        self.live.borrow_mut().insert(id, process);
        id
    }

    /// Notes that a child was reaped. `pending`: a start is on its way, so the pid may become known later.
    pub(crate) fn reaped(&self, pid: u32, status: i32, pending: bool) {
        let live = self.live.borrow();
        let process = live.values().find(|process| process.pid == pid && !process.is_reaped());
        match process {
            Some(process) => process.set_reaped(status),
            None if pending => drop(self.early.borrow_mut().insert(pid, status)),
            // An orphan, which only had to be reaped.
            None => {}
        }
    }

    /// Forgets the dead that belong to no start. Called when no start is on its way.
    pub(crate) fn forget_orphans(&self) {
        self.early.borrow_mut().clear();
    }

    /// Ends a process: it leaves the list, its listeners get the end, and for a while it can be asked for.
    pub(crate) fn retire(&self, id: u64) {
        let Some(process) = self.live.borrow_mut().remove(&id) else {
            return;
        };
        let mut end = status::end_event(process.status.get().unwrap_or_default());
        if process.out_of_memory.get() {
            end.error = end.error.map(|error| format!("{error} (out of memory)"));
        }
        let mut retained = self.retained.borrow_mut();
        retained.push_back(Retained {
            pid: process.pid,
            tag: process.tag.clone().filter(|tag| tag.len() <= RETAINED_TAG),
            end: end.clone(),
            until: Instant::now() + RETENTION,
        });
        if retained.len() > RETAINED {
            retained.pop_front();
        }
        // The end is there before the channels close, which is what makes the listeners look for it.
        let _ = process.end.set(end);
        process.listeners.take();
        process.over.cancel();
    }

    /// Drops what was kept long enough, and the room it took.
    pub(crate) fn expire(&self) {
        let mut retained = self.retained.borrow_mut();
        let now = Instant::now();
        while retained.front().is_some_and(|oldest| oldest.until <= now) {
            retained.pop_front();
        }
        if retained.is_empty() {
            retained.shrink_to_fit();
        }
    }

    /// The most bytes that one event of a process may have: less, the more processes there are.
    pub(crate) fn event_limit(&self) -> usize {
        (EVENTS / self.live.borrow().len().max(1)).max(4096)
    }

    /// Gives the pipes of every process to its user again, after a restore from disk.
    pub(crate) fn renew_ownership(&self) {
        for process in self.live.borrow().values() {
            process.ownership.renew(&process.input);
        }
    }

    /// Processes that have not ended.
    pub(crate) fn live(&self) -> Vec<Rc<Process>> {
        self.live.borrow().values().cloned().collect()
    }

    /// The process that a selector names, live or ended less than 30 seconds ago.
    ///
    /// # Errors
    /// `not_found`, or `unimplemented` when the selector is empty.
    pub(crate) fn find(&self, selector: Option<&ProcessSelector>) -> Result<Found, Error> {
        self.expire();
        let (pid, tag) = key(selector)?;
        let matches = |of_pid: u32, of_tag: Option<&str>| match pid {
            Some(pid) => of_pid == pid,
            None => of_tag == Some(tag),
        };
        // The newest wins, because neither pids nor tags are unique over time.
        let live = self.live.borrow();
        if let Some(process) = live
            .values()
            .rev()
            .find(|process| matches(process.pid, process.tag.as_deref()))
        {
            return Ok(Found::Live(process.clone()));
        }
        let retained = self.retained.borrow();
        match retained.iter().rev().find(|old| matches(old.pid, old.tag.as_deref())) {
            Some(old) => Ok(Found::Ended {
                pid: old.pid,
                end: old.end.clone(),
            }),
            None => Err(not_found(pid, tag)),
        }
    }

    /// The live process that a selector names.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub(crate) fn find_live(&self, selector: Option<&ProcessSelector>) -> Result<Rc<Process>, Error> {
        match self.find(selector)? {
            Found::Live(process) => Ok(process),
            Found::Ended { .. } => {
                let (pid, tag) = key(selector)?;
                Err(not_found(pid, tag))
            }
        }
    }
}

fn key(selector: Option<&ProcessSelector>) -> Result<(Option<u32>, &str), Error> {
    match selector {
        Some(ProcessSelector { pid: Some(pid), .. }) => Ok((Some(*pid), "")),
        Some(ProcessSelector { tag: Some(tag), .. }) => Ok((None, tag)),
        _ => Err(Error::new(
            Code::Unimplemented,
            "invalid input type: neither pid nor tag is set",
        )),
    }
}

fn not_found(pid: Option<u32>, tag: &str) -> Error {
    let message = match pid {
        Some(pid) => format!("process with pid {pid} not found"),
        None => format!("process with tag {tag} not found"),
    };
    Error::new(Code::NotFound, message)
}

#[cfg(test)]
mod tests;

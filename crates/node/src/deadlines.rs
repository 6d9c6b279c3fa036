//! The deadlines that a node keeps itself, for when no server is there.
//!
//! The server acts at deadlines, and tells a node each of them besides. Only when no server is there, and a sandbox is overdue for
//! [`queue::GRACE`] nevertheless, the node ends or pauses it by itself (`overdue`), and says so to the server that takes it over
//! next.
//!
//! ```text
//!   served ──connection lost──▶ alone ──connected──▶ held ──taken over──▶ served
//!                                 ▲                   │
//!                                 └──connection lost──┘
//! ```
//!
//! Only a node that is alone begins something, and that is decided under the lock under which a connection changes it. So a server
//! that comes back either finds nothing begun, and acts itself from then on; or it finds that something was, and takes the node
//! over anew: what it knew of the sandboxes may not be so any more.
//!
//! The deadlines outlive the node's process, and the [`Node`](crate::Node) of one session, as the sandboxes do.

mod notes;
mod queue;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use model::id::SandboxId;
use parking_lot::Mutex;
use protocol::node::{NodeDeadline, Overdue};
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;

use self::notes::{Found, Notes};
pub(crate) use self::queue::Due;
use self::queue::{Begun, Next, Note, Now, Queue, Service, next};
use crate::log_writer::now_us;

/// The deadlines of a node, and whether a server acts at them.
#[derive(Debug)]
pub struct Deadlines {
    /// Held while notes are changed, so that they are written in the order in which they are changed. Taken before the state.
    notes: Mutex<Notes>,
    /// Locked for moments only.
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug)]
struct State {
    service: Service,
    /// Whether a server has taken the sandboxes over in this session.
    is_taken_over: bool,
    /// Whether something was begun that the server of this session does not know.
    has_acted: bool,
    /// What the server of this session was told of what was begun before.
    reported: HashSet<SandboxId>,
    queue: Queue,
}

/// A sandbox that was begun to be ended or paused, of which the host says what has become.
#[derive(Debug)]
pub(crate) struct Acted {
    pub(crate) id: SandboxId,
    pub(crate) then: Overdue,
    pub(crate) ago: Duration,
    pub(crate) disk_bytes: u64,
}

impl Deadlines {
    /// Opens the deadlines of a node, whose notes are in this directory. No server is there yet.
    ///
    /// # Errors
    /// When the directory cannot be used.
    pub fn open(dir: &Path) -> io::Result<Arc<Self>> {
        let mut notes = Notes::open(dir)?;
        let mut queue = Queue::default();
        for Found {
            id,
            note,
            is_of_this_boot,
        } in notes.read()?
        {
            if is_of_this_boot {
                queue.set(&id, note);
            } else if note.begun.is_some() {
                queue.tell(&id, note);
            } else {
                // The sandbox has ended with the boot before.
                notes.remove(&id)?;
            }
        }
        Ok(Arc::new(Self {
            notes: Mutex::new(notes),
            state: Mutex::new(State {
                service: Service::Alone(now().awake),
                is_taken_over: false,
                has_acted: false,
                reported: HashSet::new(),
                queue,
            }),
            changed: Notify::new(),
        }))
    }

    /// Notes that a server has connected, with which the session goes on, or another one begins: nothing is begun from here on.
    /// Returns whether something was in this session. Then it must not go on.
    pub fn hold(&self, goes_on: bool) -> bool {
        let mut state = self.state.lock();
        let has_acted = state.has_acted;
        state.service = if goes_on && state.is_taken_over && !has_acted {
            Service::Served
        } else {
            state.service.hold()
        };
        has_acted
    }

    /// Notes that the connection to the server is lost.
    pub fn lose(&self) {
        let mut state = self.state.lock();
        state.service = state.service.lose(now());
        drop(state);
        self.changed.notify_one();
    }

    /// Whether something was begun in this session.
    #[must_use]
    pub fn has_acted(&self) -> bool {
        self.state.lock().has_acted
    }

    /// Notes that the node has let go of its sandboxes, for the next session: nothing goes on of what was begun.
    pub fn let_go(&self) {
        let mut state = self.state.lock();
        state.is_taken_over = false;
        state.has_acted = false;
        state.reported.clear();
        state.queue.interrupt(now());
    }

    /// Sets the deadline of a sandbox from now on. Returns `false` if it is too late for that: the node ends or pauses it.
    pub(crate) fn set(&self, id: &SandboxId, deadline: NodeDeadline) -> bool {
        let mut notes = self.notes.lock();
        self.set_and_write(&mut notes, id, deadline)
    }

    fn set_and_write(&self, notes: &mut Notes, id: &SandboxId, deadline: NodeDeadline) -> bool {
        let note = Note {
            due: now().since_boot.saturating_add(deadline.left),
            then: deadline.then,
            begun: None,
        };
        let mut state = self.state.lock();
        if state.queue.is_acting(id) {
            return false;
        }
        state.queue.set(id, note.clone());
        let is_alone = matches!(state.service, Service::Alone(_));
        drop(state);
        if is_alone {
            self.changed.notify_one();
        }
        written(id, notes.write(id, &note));
        true
    }

    /// Forgets the deadline of a sandbox that does not run any more, or is none of this node's, unless the node has ended or paused
    /// it by itself.
    pub(crate) fn ended(&self, id: &SandboxId) {
        self.remove_if(id, |queue| queue.note(id).is_some_and(|note| note.begun.is_none()));
    }

    /// Forgets what is noted of a sandbox, for which a server has asked for something else.
    pub(crate) fn forget(&self, id: &SandboxId) {
        self.remove_if(id, |queue| !queue.is_acting(id));
    }

    fn remove_if(&self, id: &SandboxId, is_removed: impl FnOnce(&Queue) -> bool) {
        let mut notes = self.notes.lock();
        let mut state = self.state.lock();
        if is_removed(&state.queue) && state.queue.remove(id) {
            drop(state);
            written(id, notes.remove(id));
        }
    }

    /// Has the deadlines be those of the sandboxes that a server has taken over, and notes that it acts at them, unless its
    /// connection is lost by now. What the node has ended or paused is known until that is forgotten, if the server was told of it.
    /// Where it was not, and the sandbox is not `kept` either, nothing is left of the sandbox that a server could ask about.
    pub(crate) fn take_over(&self, deadlines: &HashMap<SandboxId, NodeDeadline>, kept: &HashSet<SandboxId>) {
        let mut notes = self.notes.lock();
        for (id, deadline) in deadlines {
            self.set_and_write(&mut notes, id, *deadline);
        }
        let mut state = self.state.lock();
        // What was begun in this session is told to the server of the next one.
        let tells_all = state.has_acted;
        let is_told = |id: &SandboxId| tells_all || state.reported.contains(id) || kept.contains(id);
        let mut gone = state.queue.ids();
        gone.retain(|id| {
            let is_begun = state.queue.note(id).is_some_and(|note| note.begun.is_some());
            !deadlines.contains_key(id) && !(is_begun && (is_told(id) || state.queue.is_acting(id)))
        });
        for id in &gone {
            state.queue.remove(id);
        }
        if !matches!(state.service, Service::Alone(_)) {
            state.service = Service::Served;
        }
        state.is_taken_over = true;
        drop(state);
        for id in gone {
            written(&id, notes.remove(&id));
        }
    }

    /// The sandboxes that were begun to be ended or paused.
    pub(crate) fn acted(&self) -> Vec<Acted> {
        let now_us = now_us();
        let begun = self.state.lock().queue.begun().into_iter();
        let acted = begun.map(|(id, then, Begun { at_us, disk_bytes })| Acted {
            id,
            then,
            ago: Duration::from_micros(u64::try_from(now_us - at_us).unwrap_or(0)),
            disk_bytes,
        });
        acted.collect()
    }

    /// Notes that the server of this session is told what has become of these.
    pub(crate) fn report(&self, ids: impl Iterator<Item = SandboxId>) {
        self.state.lock().reported = ids.collect();
    }

    /// Forgets that these were ended or paused. One that runs again since keeps its deadline.
    pub(crate) fn forget_acted(&self, ids: &[SandboxId]) {
        for id in ids {
            self.remove_if(id, |queue| {
                let is_begun = queue.note(id).is_some_and(|note| note.begun.is_some());
                is_begun && !queue.is_acting(id)
            });
        }
    }

    /// Takes what is overdue, `most` at a time; something is done about each from here on. Empty, with how long to wait, while there is
    /// nothing to do; without a time until something changes. A server that comes back waits until what was taken is noted.
    pub(crate) fn take_overdue(&self, most: usize) -> Result<Vec<Due>, Option<Duration>> {
        let mut notes = self.notes.lock();
        let mut state = self.state.lock();
        let now = now();
        match next(state.service, state.queue.first(), now) {
            Next::Nothing => return Err(None),
            Next::Wait(wait) => return Err(Some(wait)),
            Next::Act => {}
        }
        state.has_acted = true;
        let due = state.queue.take(now, now_us(), most);
        let begun: Vec<_> = due
            .iter()
            .filter_map(|due| state.queue.note(&due.id).cloned())
            .collect();
        drop(state);
        for (due, note) in due.iter().zip(begun) {
            written(&due.id, notes.write(&due.id, &note));
        }
        Ok(due)
    }

    /// Waits until a deadline or the connection has changed.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Notes that a sandbox was ended, or paused with this much on the disk of the host; nothing where that is not known.
    pub(crate) fn done(&self, id: &SandboxId, disk_bytes: Option<u64>) {
        let mut notes = self.notes.lock();
        let note = self.state.lock().queue.done(id, disk_bytes).cloned();
        if let Some(note) = note {
            written(id, notes.write(id, &note));
        }
    }

    /// Notes that nothing was to be done about a sandbox: it was paused before, or is gone.
    pub(crate) fn drop_due(&self, id: &SandboxId) {
        self.remove_if(id, |_| true);
    }

    /// Has a sandbox looked at again later that could not be paused.
    pub(crate) fn retry(&self, id: &SandboxId) {
        self.state.lock().queue.retry(id, now());
        self.changed.notify_one();
    }
}

/// The clocks of the host.
fn now() -> Now {
    let read = |clock| clock_gettime(clock).try_into().unwrap_or_default();
    Now {
        since_boot: read(ClockId::Boottime),
        awake: read(ClockId::Monotonic),
    }
}

/// Without its note, a deadline lasts as long as this process.
fn written(id: &SandboxId, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::error!(sandbox.id = %id, "cannot note the deadline of a sandbox on disk: {error}");
    }
}

#[cfg(test)]
mod tests {
    use model::lifecycle::Kept;

    use super::*;

    fn id(text: &str) -> SandboxId {
        text.parse().unwrap()
    }

    fn deadline(left: Duration, then: Overdue) -> NodeDeadline {
        NodeDeadline { left, then }
    }

    /// What is noted in a directory: the places that are not blank.
    fn noted(dir: &Path) -> String {
        assert_eq!(std::fs::read_dir(dir).unwrap().count(), 1);
        std::fs::read_to_string(dir.join("notes")).unwrap()
    }

    fn count(dir: &Path) -> usize {
        noted(dir).matches("\"boot\"").count()
    }

    /// Deadlines of a node that has been alone for long.
    fn alone(dir: &Path) -> Arc<Deadlines> {
        let deadlines = Deadlines::open(dir).unwrap();
        deadlines.state.lock().service = Service::Alone(Duration::ZERO);
        deadlines
    }

    /// Has all sandboxes be overdue for long.
    fn let_time_pass(deadlines: &Deadlines) {
        let mut state = deadlines.state.lock();
        for id in state.queue.ids() {
            let note = state.queue.note(&id).cloned().unwrap();
            if !state.queue.is_acting(&id) && note.begun.is_none() {
                let due = Duration::ZERO;
                state.queue.set(&id, Note { due, ..note });
            }
        }
    }

    #[test]
    fn a_server_that_returns_finds_nothing_begun_or_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let deadlines = alone(dir.path());
        let told = HashMap::from([(id("a"), deadline(Duration::ZERO, Overdue::End))]);
        assert!(deadlines.set(&id("a"), deadline(Duration::ZERO, Overdue::End)));
        let_time_pass(&deadlines);
        // It is there first, and nothing of the session that it goes on with was taken over.
        assert!(!deadlines.hold(true));
        assert_eq!(deadlines.take_overdue(100), Err(None));
        deadlines.lose();
        assert_eq!(deadlines.state.lock().service, Service::Alone(Duration::ZERO));
        assert!(!deadlines.hold(false));
        deadlines.take_over(&told, &HashSet::new());
        let_time_pass(&deadlines);
        assert_eq!(deadlines.take_overdue(100), Err(None));
        deadlines.lose();
        assert!(deadlines.take_overdue(100).is_err_and(|wait| wait.is_some()));
        // A takeover that comes to its end after the connection is none.
        deadlines.take_over(&told, &HashSet::new());
        let_time_pass(&deadlines);
        assert!(matches!(deadlines.state.lock().service, Service::Alone(_)));
        // Another connection of the same session.
        assert!(!deadlines.hold(true));
        assert_eq!(deadlines.state.lock().service, Service::Served);
        deadlines.lose();
        // The node is there first. The deadline is not changed any more.
        deadlines.state.lock().service = Service::Alone(Duration::ZERO);
        assert_eq!(deadlines.take_overdue(100).unwrap().len(), 1);
        assert!(deadlines.hold(true) && deadlines.has_acted());
        assert!(!deadlines.set(&id("a"), deadline(Duration::from_secs(60), Overdue::End)));
        deadlines.done(&id("a"), None);
        deadlines.let_go();
        assert!(!deadlines.has_acted());
        deadlines.report([id("a")].into_iter());
        deadlines.take_over(&HashMap::new(), &HashSet::new());
        assert_eq!(deadlines.acted().len(), 1);
        deadlines.forget_acted(&[id("a"), id("b")]);
        assert_eq!(deadlines.acted().len(), 0);
        assert_eq!(count(dir.path()), 0);
    }

    #[test]
    fn what_was_begun_and_left_nothing_is_forgotten_at_a_takeover() {
        let dir = tempfile::tempdir().unwrap();
        let deadlines = alone(dir.path());
        let names = ["reported", "kept", "lost", "runs"];
        for name in names {
            assert!(deadlines.set(&id(name), deadline(Duration::ZERO, Overdue::Pause(Kept::Memory))));
        }
        let_time_pass(&deadlines);
        assert_eq!(deadlines.take_overdue(usize::MAX).unwrap().len(), names.len());
        for name in names {
            deadlines.done(&id(name), None);
        }
        let told = HashMap::from([(id("runs"), deadline(Duration::from_secs(60), Overdue::End))]);
        let take_over = || deadlines.take_over(&told, &HashSet::from([id("kept")]));
        let left = || {
            let mut left: Vec<_> = deadlines.acted().into_iter().map(|acted| acted.id).collect();
            left.sort();
            left
        };
        // The server of the session in which it was begun was not told of it yet.
        take_over();
        assert_eq!(left(), [id("kept"), id("lost"), id("reported")]);
        deadlines.let_go();
        deadlines.report([id("reported")].into_iter());
        take_over();
        assert_eq!(left(), [id("kept"), id("reported")]);
        assert_eq!(count(dir.path()), 3);
        assert!(!noted(dir.path()).contains("lost"));
    }

    #[test]
    fn deadlines_outlive_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let deadlines = alone(dir.path());
        let hour = Duration::from_secs(3600);
        for name in ["ended", "paused", "runs", "gone"] {
            assert!(deadlines.set(&id(name), deadline(Duration::ZERO, Overdue::Pause(Kept::Memory))));
        }
        let_time_pass(&deadlines);
        assert!(deadlines.set(&id("runs"), deadline(hour, Overdue::End)));
        deadlines.ended(&id("gone"));
        assert_eq!(deadlines.take_overdue(100).unwrap().len(), 2);
        deadlines.done(&id("paused"), Some(4096));
        // Both would be another's, who has nothing to say about what the node has begun.
        deadlines.ended(&id("ended"));
        deadlines.ended(&id("paused"));
        let deadlines = Deadlines::open(dir.path()).unwrap();
        let mut acted = deadlines.acted();
        acted.sort_by(|a, b| a.id.cmp(&b.id));
        let acted: Vec<_> = acted
            .iter()
            .map(|acted| (acted.id.as_str(), acted.disk_bytes))
            .collect();
        assert_eq!(acted, [("ended", 0), ("paused", 4096)]);
        let state = deadlines.state.lock();
        assert!(state.queue.note(&id("runs")).is_some_and(|note| note.begun.is_none()));
        assert_eq!(state.queue.ids().len(), 3);
        drop(state);
        assert_eq!(count(dir.path()), 3);
    }

    #[test]
    fn after_a_boot_only_what_the_node_has_done_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let deadlines = alone(dir.path());
        assert!(deadlines.set(&id("a"), deadline(Duration::ZERO, Overdue::End)));
        let_time_pass(&deadlines);
        assert_eq!(deadlines.take_overdue(100).unwrap().len(), 1);
        assert!(deadlines.set(&id("b"), deadline(Duration::ZERO, Overdue::End)));
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        let before = noted(dir.path()).replace(boot.trim_end(), &"x".repeat(boot.trim_end().len()));
        std::fs::write(dir.path().join("notes"), before).unwrap();
        let deadlines = alone(dir.path());
        assert_eq!(deadlines.acted().len(), 1);
        assert_eq!(deadlines.take_overdue(100), Err(None));
        assert_eq!(count(dir.path()), 1);
    }
}

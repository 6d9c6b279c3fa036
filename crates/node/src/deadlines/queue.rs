//! Which sandboxes are overdue, and whether this node does something about it: pure, so that every sequence can be tested.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use model::id::SandboxId;
use protocol::node::Overdue;
use serde::{Deserialize, Serialize};

/// How long a sandbox is overdue, and how long no server is there, before the node does something by itself.
///
/// A server that is there acts within a second of a deadline, and one that is restarted is back within a few seconds. A connection
/// that is lost without a word is noticed after 15 s, from when this counts, and the next attempt to connect takes 4 s at most
/// where there are several servers. So a server which is there always acts first, and its clients find the same sandboxes as if the
/// node could do nothing; and a sandbox runs little longer than it may where none is.
pub(super) const GRACE: Duration = Duration::from_secs(10);
/// Longest wait without reading the clocks: a host that is suspended wakes late.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// First and longest pause before a sandbox is looked at again that could not be paused.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Two clocks of the host.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    /// Time since the host was booted, also while it was suspended: deadlines are by this one.
    pub(super) since_boot: Duration,
    /// Time for which the host was not suspended: for as long a server could have answered.
    pub(super) awake: Duration,
}

/// Whether a server acts at the deadlines of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Service {
    /// None does, since this time.
    Alone(Duration),
    /// One is connected and about to take the sandboxes over. None did since this time.
    Held(Duration),
    /// One does.
    Served,
}

impl Service {
    /// A server has connected: nothing is begun from here on.
    pub(super) fn hold(self) -> Self {
        match self {
            Self::Alone(since) | Self::Held(since) => Self::Held(since),
            Self::Served => Self::Served,
        }
    }

    /// The connection is lost. A server that has not taken the sandboxes over was none.
    pub(super) fn lose(self, now: Now) -> Self {
        match self {
            Self::Alone(since) | Self::Held(since) => Self::Alone(since),
            Self::Served => Self::Alone(now.awake),
        }
    }
}

/// What a node does next about its deadlines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing, until something changes.
    Nothing,
    /// Nothing, for this time.
    Wait(Duration),
    /// What is overdue is ended or paused.
    Act,
}

/// What a node does next, whose first sandbox is to be looked at at `first`.
pub(super) fn next(service: Service, first: Option<Duration>, now: Now) -> Next {
    let (Service::Alone(since), Some(first)) = (service, first) else {
        return Next::Nothing;
    };
    let alone = (since + GRACE).saturating_sub(now.awake);
    let due = first.saturating_sub(now.since_boot);
    match alone.max(due) {
        Duration::ZERO => Next::Act,
        wait => Next::Wait(wait.min(LONGEST_WAIT)),
    }
}

/// What is noted of the deadline of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    /// The deadline, by the clock since the boot.
    pub(super) due: Duration,
    /// What is done once it is overdue.
    pub(super) then: Overdue,
    /// What is known since the node has begun to do that.
    #[serde(default)]
    pub(super) begun: Option<Begun>,
}

/// What is known of a sandbox that the node ends or pauses by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Begun {
    /// When it began, in microseconds since 1970.
    pub(super) at_us: i64,
    /// Space that the sandbox takes on the disk of the host since, in bytes; 0 until that is known.
    pub(super) disk_bytes: u64,
}

/// A sandbox that is overdue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Due {
    pub(crate) id: SandboxId,
    pub(crate) then: Overdue,
    /// Whether that was begun before, and interrupted.
    pub(crate) was_begun: bool,
}

#[derive(Debug)]
struct Entry {
    note: Note,
    /// When it is looked at; none while something is done about it, and once that is done.
    look: Option<Duration>,
    is_acting: bool,
    failures: u32,
}

/// The deadlines of a node, in the order in which it looks at them.
#[derive(Debug, Default)]
pub(super) struct Queue {
    entries: HashMap<SandboxId, Entry>,
    looks: BTreeSet<(Duration, SandboxId)>,
}

impl Queue {
    /// When the first one is looked at.
    pub(super) fn first(&self) -> Option<Duration> {
        self.looks.first().map(|(look, _)| *look)
    }

    /// What is noted of a sandbox.
    pub(super) fn note(&self, id: &SandboxId) -> Option<&Note> {
        self.entries.get(id).map(|entry| &entry.note)
    }

    /// Whether the node ends or pauses a sandbox at the moment.
    pub(super) fn is_acting(&self, id: &SandboxId) -> bool {
        self.entries.get(id).is_some_and(|entry| entry.is_acting)
    }

    /// The sandboxes that were begun to be ended or paused.
    pub(super) fn begun(&self) -> Vec<(SandboxId, Overdue, Begun)> {
        let begun = |(id, entry): (&SandboxId, &Entry)| Some((id.clone(), entry.note.then, entry.note.begun?));
        self.entries.iter().filter_map(begun).collect()
    }

    /// All sandboxes with a note.
    pub(super) fn ids(&self) -> Vec<SandboxId> {
        self.entries.keys().cloned().collect()
    }

    /// Sets what is noted of a sandbox, and has it looked at when it is overdue for long enough.
    pub(super) fn set(&mut self, id: &SandboxId, note: Note) {
        let look = note.due + GRACE;
        self.remove(id);
        let entry = Entry {
            note,
            look: Some(look),
            is_acting: false,
            failures: 0,
        };
        self.entries.insert(id.clone(), entry);
        self.looks.insert((look, id.clone()));
    }

    /// Notes a sandbox of which something is to be told, and nothing to be done.
    pub(super) fn tell(&mut self, id: &SandboxId, note: Note) {
        self.set(id, note);
        self.unqueue(id);
    }

    /// Removes what is noted of a sandbox. Returns whether there was something.
    pub(super) fn remove(&mut self, id: &SandboxId) -> bool {
        self.unqueue(id);
        self.entries.remove(id).is_some()
    }

    fn unqueue(&mut self, id: &SandboxId) {
        if let Some(look) = self.entries.get_mut(id).and_then(|entry| entry.look.take()) {
            self.looks.remove(&(look, id.clone()));
        }
    }

    /// Takes the first `most` sandboxes that are to be looked at now. Something is done about each from here on.
    pub(super) fn take(&mut self, now: Now, at_us: i64, most: usize) -> Vec<Due> {
        let mut all = Vec::new();
        while all.len() < most
            && let Some((look, id)) = self.looks.first().cloned()
            && look <= now.since_boot
        {
            self.unqueue(&id);
            let Some(entry) = self.entries.get_mut(&id) else {
                continue;
            };
            entry.is_acting = true;
            let was_begun = entry.note.begun.is_some();
            entry.note.begun.get_or_insert(Begun { at_us, disk_bytes: 0 });
            let then = entry.note.then;
            all.push(Due { id, then, was_begun });
        }
        all
    }

    /// Notes that a sandbox was ended or paused, and returns the note.
    pub(super) fn done(&mut self, id: &SandboxId, disk_bytes: Option<u64>) -> Option<&Note> {
        let entry = self.entries.get_mut(id)?;
        entry.is_acting = false;
        if let (Some(begun), Some(bytes)) = (&mut entry.note.begun, disk_bytes) {
            begun.disk_bytes = bytes;
        }
        Some(&entry.note)
    }

    /// Has a sandbox looked at again that could not be paused.
    pub(super) fn retry(&mut self, id: &SandboxId, now: Now) {
        let Some(entry) = self.entries.get_mut(id) else {
            return;
        };
        let pause = RETRY.0 * 2_u32.pow(entry.failures.min(6));
        let look = now.since_boot + pause.min(RETRY.1);
        entry.failures = entry.failures.saturating_add(1);
        entry.is_acting = false;
        entry.look = Some(look);
        self.looks.insert((look, id.clone()));
    }

    /// Has everything looked at again about which something is done: nothing goes on of it any more.
    pub(super) fn interrupt(&mut self, now: Now) {
        let acting = self.entries.iter().filter(|(_, entry)| entry.is_acting);
        for id in acting.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            self.retry(&id, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use model::lifecycle::Kept;

    use super::*;

    const S: Duration = Duration::from_secs(1);
    const MANY: usize = 100;

    fn at(seconds: u32) -> Now {
        Now {
            since_boot: S * seconds,
            awake: S * seconds,
        }
    }

    fn id(text: &str) -> SandboxId {
        text.parse().unwrap()
    }

    fn note(due_s: u32, then: Overdue) -> Note {
        Note {
            due: S * due_s,
            then,
            begun: None,
        }
    }

    #[test]
    fn only_a_node_without_a_server_acts_and_only_on_what_is_overdue_for_long_enough() {
        use Next::{Act, Nothing, Wait};
        use Service::{Alone, Held, Served};
        let at_first = Some(S * 30);
        for (service, first, now, want) in [
            (Served, at_first, at(1000), Nothing),
            (Held(S), at_first, at(1000), Nothing),
            (Alone(S), None, at(1000), Nothing),
            // Alone for long enough, and nothing is overdue.
            (Alone(S), at_first, at(29), Wait(S)),
            (Alone(S), at_first, at(20), Wait(LONGEST_WAIT)),
            (Alone(S), at_first, at(30), Act),
            // Overdue for long, and the server has only just gone.
            (Alone(S * 100), at_first, at(100), Wait(LONGEST_WAIT)),
            (Alone(S * 100), at_first, at(110), Act),
        ] {
            assert_eq!(next(service, first, now), want, "{service:?} {first:?} {now:?}");
        }
        let soon = Now {
            since_boot: S * 29 + S / 4,
            ..at(200)
        };
        assert_eq!(next(Alone(S), at_first, soon), Wait(S * 3 / 4));
    }

    #[test]
    fn a_host_that_was_suspended_gives_the_server_time() {
        // For an hour, in which its server was not gone.
        let woken = Now {
            since_boot: S * 3700,
            awake: S * 100,
        };
        let lost = Service::Served.lose(woken);
        assert_eq!(next(lost, Some(S * 50), woken), Next::Wait(LONGEST_WAIT));
        let later = Now {
            since_boot: S * 3710,
            awake: S * 110,
        };
        assert_eq!(next(lost, Some(S * 50), later), Next::Act);
    }

    #[test]
    fn a_server_that_takes_nothing_over_is_none() {
        let alone = Service::Served.lose(at(5));
        assert_eq!(alone, Service::Alone(S * 5));
        assert_eq!(alone.hold(), Service::Held(S * 5));
        assert_eq!(alone.hold().hold().lose(at(50)), alone);
        assert_eq!(Service::Served.hold(), Service::Served);
    }

    #[test]
    fn sandboxes_come_in_order_and_once() {
        let mut queue = Queue::default();
        queue.set(&id("late"), note(50, Overdue::End));
        queue.set(&id("early"), note(5, Overdue::Pause(Kept::Memory)));
        queue.set(&id("moved"), note(6, Overdue::End));
        queue.set(&id("moved"), note(60, Overdue::End));
        queue.set(&id("gone"), note(1, Overdue::End));
        assert!(queue.remove(&id("gone")) && !queue.remove(&id("gone")));
        assert_eq!(queue.first(), Some(S * 5 + GRACE));
        assert_eq!(queue.take(at(14), 1, MANY), []);
        let due = queue.take(at(15), 1, MANY);
        let want = Due {
            id: id("early"),
            then: Overdue::Pause(Kept::Memory),
            was_begun: false,
        };
        assert_eq!(due, [want]);
        assert!(queue.is_acting(&id("early")) && !queue.is_acting(&id("late")));
        assert_eq!(queue.take(at(59), 2, MANY), []);
        assert_eq!(queue.done(&id("early"), Some(7)).unwrap().begun.unwrap().disk_bytes, 7);
        assert!(!queue.is_acting(&id("early")));
        assert_eq!(queue.take(at(60), 3, MANY).len(), 1);
        let mut begun = queue.begun();
        begun.sort_by_key(|(_, _, begun)| begun.at_us);
        let begun: Vec<_> = begun.iter().map(|(id, _, begun)| (id.as_str(), begun.at_us)).collect();
        assert_eq!(begun, [("early", 1), ("late", 3)]);
        // It runs again, with another deadline.
        queue.set(&id("early"), note(100, Overdue::End));
        assert_eq!(queue.begun().len(), 1);
    }

    #[test]
    fn no_more_is_taken_than_is_wanted() {
        let mut queue = Queue::default();
        for (number, name) in (0..).zip(["a", "b", "c"]) {
            queue.set(&id(name), note(number, Overdue::End));
        }
        let taken = |due: Vec<Due>| due.into_iter().map(|due| due.id.to_string()).collect::<Vec<_>>();
        assert_eq!(taken(queue.take(at(60), 1, 0)), [""; 0]);
        assert_eq!(taken(queue.take(at(60), 1, 2)), ["a", "b"]);
        assert!(!queue.is_acting(&id("c")) && queue.begun().len() == 2);
        assert_eq!(taken(queue.take(at(60), 2, 2)), ["c"]);
    }

    #[test]
    fn what_fails_is_tried_again_with_growing_pauses() {
        let mut queue = Queue::default();
        queue.set(&id("a"), note(0, Overdue::Pause(Kept::Memory)));
        let mut now = at(10);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            assert_eq!(queue.take(now, 1, MANY).len(), 1);
            queue.retry(&id("a"), now);
            let look = queue.first().unwrap();
            pauses.push((look - now.since_boot).as_secs());
            now.since_boot = look;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        // What was interrupted is looked at again, and known to have been begun.
        assert!(queue.take(now, 1, MANY)[0].was_begun);
        assert_eq!(queue.first(), None);
        queue.interrupt(now);
        assert!(!queue.is_acting(&id("a")) && queue.first().is_some());
        // One that is only told is not.
        queue.tell(&id("a"), note(0, Overdue::End));
        assert_eq!(queue.first(), None);
    }
}

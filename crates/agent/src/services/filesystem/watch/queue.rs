//! The events that wait for their listener.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use protocol::connect::{Code, Error};
use protocol::filesystem::{EntryInfo, FilesystemEvent, event_type};
use tokio::sync::Notify;

use crate::services::filesystem::entry;
use crate::transport::messages::MESSAGE_LIMIT;

/// Bytes of the events that may wait for one listener: at least 100,000 without entries.
const QUEUE: usize = 32 * 1024 * 1024;
/// Bytes of the events that may wait altogether.
const QUEUES: usize = 64 * 1024 * 1024;

/// Events on their way to the queue, of which there are never more than fit into it.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    events: Vec<FilesystemEvent>,
    bytes: usize,
}

impl Outbox {
    /// Adds an event.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn push(&mut self, name: String, kind: i32, entry: Option<EntryInfo>) -> Result<(), Error> {
        let event = FilesystemEvent { name, kind, entry };
        self.bytes += weight(&event);
        if self.bytes > QUEUE {
            self.events.clear();
            return Err(lost("too many happened at once"));
        }
        self.events.push(event);
        Ok(())
    }

    pub(super) fn into_events(self) -> Vec<FilesystemEvent> {
        self.events
    }
}

/// A queue for one listener.
pub(super) struct Queue {
    events: RefCell<VecDeque<FilesystemEvent>>,
    bytes: Cell<usize>,
    /// Bytes in all queues.
    all: Rc<Cell<usize>>,
    /// The error after which no event follows.
    failure: RefCell<Option<Error>>,
    changed: Notify,
}

impl Queue {
    pub(super) fn new(all: Rc<Cell<usize>>) -> Self {
        Self {
            events: RefCell::default(),
            bytes: Cell::new(0),
            all,
            failure: RefCell::default(),
            changed: Notify::new(),
        }
    }

    /// Appends events.
    ///
    /// # Errors
    /// When they do not fit. What waited is then dropped too: it would be memory that perhaps no client ever asks
    /// for, and one that does has to list the directory now anyhow.
    pub(super) fn push(&self, outbox: Outbox) -> Result<(), Error> {
        let mut events = self.events.borrow_mut();
        for event in outbox.into_events() {
            // The kernel merges equal events at the end of its queue, and so does this one.
            let repeats = matches!(event.kind, event_type::WRITE | event_type::CHMOD);
            if let Some(last) = events.back_mut()
                && repeats
                && last.kind == event.kind
                && last.name == event.name
            {
                self.count_off(weight(last));
                self.count_on(weight(&event));
                *last = event;
                continue;
            }
            self.count_on(weight(&event));
            events.push_back(event);
            if self.bytes.get() > QUEUE || self.all.get() > QUEUES {
                events.clear();
                events.shrink_to_fit();
                self.count_off(self.bytes.get());
                return Err(lost("too many of them wait for the client"));
            }
        }
        self.changed.notify_one();
        Ok(())
    }

    /// Ends the queue with the error after which no event follows.
    pub(super) fn fail(&self, error: Error) {
        *self.failure.borrow_mut() = Some(error);
        self.changed.notify_one();
    }

    /// Takes the next event, if there is one.
    ///
    /// # Errors
    /// Why there never will be.
    pub(super) fn take(&self) -> Result<Option<FilesystemEvent>, Error> {
        let event = self.events.borrow_mut().pop_front();
        if let Some(event) = event {
            self.count_off(weight(&event));
            return Ok(Some(event));
        }
        match &*self.failure.borrow() {
            None => Ok(None),
            Some(error) => Err(error.clone()),
        }
    }

    /// All events that are there, or as many as fit into one answer.
    ///
    /// # Errors
    /// Why there never will be any.
    pub(super) fn take_all(&self) -> Result<Vec<FilesystemEvent>, Error> {
        let mut taken = Vec::new();
        let mut room = MESSAGE_LIMIT - 1024;
        // A function, so that nothing stays borrowed.
        let next = || self.events.borrow().front().map(weight);
        while let Some(bytes) = next()
            && bytes <= room
        {
            room -= bytes;
            taken.extend(self.take()?);
        }
        if taken.is_empty() {
            taken.extend(self.take()?);
        }
        if next().is_none() {
            self.events.borrow_mut().shrink_to_fit();
        }
        Ok(taken)
    }

    /// Waits until something may have changed. For one listener only.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    fn count_on(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() + bytes);
        self.all.set(self.all.get() + bytes);
    }

    fn count_off(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() - bytes);
        self.all.set(self.all.get() - bytes);
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.count_off(self.bytes.get());
    }
}

/// Bytes that an event takes in memory, and more than it takes in a message.
fn weight(event: &FilesystemEvent) -> usize {
    size_of::<FilesystemEvent>() + entry::quoted(&event.name) + event.entry.as_ref().map_or(0, entry::weight)
}

/// The error of a watch that could not keep up.
pub(super) fn lost(why: &str) -> Error {
    Error::new(Code::Internal, format!("watcher error: events were lost: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(queue: &Queue, count: usize, name: &str, kind: i32) -> Result<(), Error> {
        for _ in 0..count {
            let mut outbox = Outbox::default();
            outbox.push(name.to_owned(), kind, None)?;
            queue.push(outbox)?;
        }
        Ok(())
    }

    #[test]
    fn bounded_and_counted() {
        let all = Rc::new(Cell::new(0));
        let queue = Queue::new(all.clone());
        // At least what was promised.
        push(&queue, 100_000, "a-name.txt", event_type::CREATE).unwrap();
        let mut taken = 0;
        while let batch = queue.take_all().unwrap()
            && !batch.is_empty()
        {
            taken += batch.len();
        }
        assert_eq!((taken, all.get()), (100_000, 0));
        let error = push(&queue, usize::MAX, "name", event_type::CREATE).unwrap_err();
        assert!(error.message.contains("events were lost"));
        assert_eq!((queue.bytes.get(), all.get()), (0, 0));
        queue.fail(error.clone());
        for _ in 0..2 {
            assert_eq!(queue.take_all(), Err(error.clone()));
            assert_eq!(queue.take(), Err(error.clone()));
        }
        let other = Queue::new(all.clone());
        push(&other, 3, "name", event_type::CREATE).unwrap();
        assert!(all.get() > 0);
        drop(other);
        assert_eq!(all.get(), 0);
    }

    #[test]
    fn equal_writes_are_one() {
        let queue = Queue::new(Rc::default());
        push(&queue, 5, "a", event_type::WRITE).unwrap();
        push(&queue, 5, "b", event_type::WRITE).unwrap();
        push(&queue, 1, "b", event_type::CHMOD).unwrap();
        push(&queue, 2, "b", event_type::WRITE).unwrap();
        push(&queue, 2, "b", event_type::REMOVE).unwrap();
        let kinds: Vec<_> = queue.take_all().unwrap().iter().map(|event| event.kind).collect();
        let expect = [
            event_type::WRITE,
            event_type::WRITE,
            event_type::CHMOD,
            event_type::WRITE,
        ];
        assert_eq!(kinds[..4], expect);
        assert_eq!(kinds[4..], [event_type::REMOVE; 2]);
    }
}

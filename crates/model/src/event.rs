//! Lifecycle events: what clients can read about the life of sandboxes, and have sent to them.

use std::fmt;

/// What happened to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventType {
    /// The sandbox runs for the first time, whether from a template, a snapshot or as a fork.
    Created,
    /// The end of the sandbox was set to another time.
    Updated,
    /// The sandbox was paused.
    Paused,
    /// The sandbox runs again after a pause.
    Resumed,
    /// A snapshot of the sandbox was made.
    Checkpointed,
    /// The sandbox ends or has ended, for whatever reason.
    Killed,
}

impl EventType {
    /// Every type.
    pub const ALL: [Self; 6] = [
        Self::Created,
        Self::Updated,
        Self::Paused,
        Self::Resumed,
        Self::Checkpointed,
        Self::Killed,
    ];

    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "sandbox.lifecycle.created",
            Self::Updated => "sandbox.lifecycle.updated",
            Self::Paused => "sandbox.lifecycle.paused",
            Self::Resumed => "sandbox.lifecycle.resumed",
            Self::Checkpointed => "sandbox.lifecycle.checkpointed",
            Self::Killed => "sandbox.lifecycle.killed",
        }
    }

    /// The name that earlier readers of events know.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Created => "create",
            Self::Updated => "update",
            Self::Paused => "pause",
            Self::Resumed => "resume",
            Self::Checkpointed => "checkpoint",
            Self::Killed => "kill",
        }
    }

    /// The type of a name in the API.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|one| one.as_str() == name)
    }

    /// Its bit in a set. The bits are stored, so they never change.
    #[must_use]
    pub const fn bit(self) -> i64 {
        match self {
            Self::Created => 1,
            Self::Updated => 2,
            Self::Paused => 4,
            Self::Resumed => 8,
            Self::Checkpointed => 16,
            Self::Killed => 32,
        }
    }
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A set of event types.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventTypes(i64);

impl EventTypes {
    /// All types.
    pub const ALL: Self = Self(63);

    /// Adds a type.
    pub fn insert(&mut self, one: EventType) {
        self.0 |= one.bit();
    }

    /// Whether the set has a type.
    #[must_use]
    pub const fn contains(self, one: EventType) -> bool {
        self.0 & one.bit() != 0
    }

    /// Whether the set has no type.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The set as a number, for a column.
    #[must_use]
    pub const fn bits(self) -> i64 {
        self.0
    }

    /// The set of a number; none if the number has a bit of no type.
    #[must_use]
    pub const fn from_bits(bits: i64) -> Option<Self> {
        if bits & !Self::ALL.0 == 0 {
            Some(Self(bits))
        } else {
            None
        }
    }

    /// The types of the set, in the order of [`EventType::ALL`].
    pub fn iter(self) -> impl Iterator<Item = EventType> {
        EventType::ALL.into_iter().filter(move |one| self.contains(*one))
    }
}

impl FromIterator<EventType> for EventTypes {
    fn from_iter<T: IntoIterator<Item = EventType>>(types: T) -> Self {
        let mut set = Self::default();
        for one in types {
            set.insert(one);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_stored_as_numbers() {
        let all: EventTypes = EventType::ALL.into_iter().collect();
        assert_eq!(all, EventTypes::ALL);
        assert_eq!(EventTypes::from_bits(all.bits()), Some(all));
        for bits in [64, -1, i64::MIN, 65] {
            assert_eq!(EventTypes::from_bits(bits), None, "{bits}");
        }
        let two: EventTypes = [EventType::Killed, EventType::Created].into_iter().collect();
        assert_eq!(two.iter().collect::<Vec<_>>(), [EventType::Created, EventType::Killed]);
        assert!(two.contains(EventType::Killed) && !two.contains(EventType::Paused));
        assert!(EventTypes::default().is_empty() && !two.is_empty());
    }

    #[test]
    fn names_lead_to_their_type() {
        for one in EventType::ALL {
            assert_eq!(EventType::from_name(one.as_str()), Some(one));
            assert_eq!(one.to_string(), one.as_str());
        }
        assert_eq!(EventType::from_name("create"), None);
    }
}

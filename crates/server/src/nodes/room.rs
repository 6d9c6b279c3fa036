//! What the nodes of a server have left, as it tells the others: enough to choose a server for a sandbox, not a node.
//!
//! It is old when it is read, as all that placement knows is: the truth is the permit of a node.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How much less loaded the nodes of another server must be, in thousandths, for a sandbox to be created there although a node
/// of this server has room: going there costs more than a little load does.
const CLEARLY: u64 = 300;

/// What the nodes of a server have left. The one with the least is the best.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Room {
    /// How loaded its best node would be with another sandbox, in thousandths.
    pub(crate) load: u64,
    /// How many nodes have room.
    pub(crate) nodes: u32,
}

impl Room {
    /// Whether a sandbox is better created with this room than with that of the server's own nodes.
    pub(crate) fn is_clearly_better(self, own: Self) -> bool {
        self.nodes > 0 && (own.nodes == 0 || self.load.saturating_add(CLEARLY) < own.load)
    }
}

/// Nodes that drain, by their ids, and since when, in microseconds since the Unix epoch.
pub(crate) type Draining = BTreeMap<String, i64>;

/// What a server tells the others of its nodes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Said {
    /// What its nodes have left.
    #[serde(flatten)]
    pub(crate) room: Room,
    /// The nodes that drain, as far as the server knows.
    #[serde(default, skip_serializing_if = "Draining::is_empty")]
    pub(crate) draining: Draining,
    /// Whether it has a node, with room or without.
    #[serde(default = "may_have_nodes")]
    pub(crate) has_nodes: bool,
    /// Whether one of them can go on with what is copied of a sandbox that runs on a node of another server.
    #[serde(default)]
    pub(crate) takes_forks: bool,
}

/// What is taken for true of a server of a version before, which does not say.
fn may_have_nodes() -> bool {
    true
}

impl Said {
    /// The text for other servers.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and ids are JSON")
    }

    /// What another server has written; none if it is of a version that writes something else.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_server_is_chosen_if_it_is_clearly_better() {
        let room = |load, nodes| Room { load, nodes };
        for (other, own, expected) in [
            (room(500, 1), room(0, 0), true),
            (room(500, 0), room(0, 0), false),
            (room(100, 1), room(400, 1), false),
            (room(100, 1), room(401, 1), true),
            (room(900, 3), room(100, 1), false),
        ] {
            assert_eq!(other.is_clearly_better(own), expected, "{other:?} {own:?}");
        }
        assert!(room(100, 1) < room(200, 9));
    }

    #[test]
    fn a_newer_server_may_say_more() {
        let said = Said {
            room: Room { load: 7, nodes: 2 },
            draining: Draining::new(),
            has_nodes: true,
            takes_forks: false,
        };
        assert_eq!(
            said.to_json(),
            r#"{"load":7,"nodes":2,"has_nodes":true,"takes_forks":false}"#
        );
        assert_eq!(Said::parse(r#"{"load":7,"nodes":2,"more":{}}"#), Some(said.clone()));
        assert_eq!(Said::parse("{}"), None);
        let without = Said {
            room: Room::default(),
            has_nodes: false,
            ..said.clone()
        };
        assert_eq!(
            without.to_json(),
            r#"{"load":0,"nodes":0,"has_nodes":false,"takes_forks":false}"#
        );
        assert_eq!(Said::parse(&without.to_json()), Some(without));
        let taking = Said {
            takes_forks: true,
            ..said.clone()
        };
        assert_eq!(Said::parse(&taking.to_json()), Some(taking));
        let draining = Said {
            draining: Draining::from([("a".to_owned(), 9)]),
            ..said
        };
        assert_eq!(Said::parse(&draining.to_json()), Some(draining));
    }
}

//! Which of its servers a node connects to next: pure, so that every sequence of failures can be tested.
//!
//! The order is left to chance once, so that the nodes of a server that is gone spread over the others. A server whose connection
//! was lost is tried once more before the next one: the nodes that it serves would have to be taken over elsewhere. One that was
//! not reached, or answers no more, is left at once. A server that says that it is not ready gets a few attempts, because it is there.

use std::io::ErrorKind;
use std::time::Duration;

use link::Address;

/// Shortest and longest pause after an attempt at all servers.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// Pause after a refusal that lasts until an operator does something.
const REFUSED: Duration = Duration::from_secs(15);
/// Attempts at a server that is there, and is not ready or does not keep the node, before the next one.
const NOT_READY: u32 = 10;

/// How long a connection lasts at least with a server that is ready. One that takes nodes and lets go of them at once, again and
/// again, must not keep them.
const LASTING: Duration = Duration::from_secs(5);

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The node was connected, and is not any more.
    Lost,
    /// The node was connected, and the server answers no more.
    Silent,
    /// The node was connected for a moment.
    Brief,
    /// The server was not reached.
    Unreached,
    /// The server is not ready.
    NotReady,
    /// The server refuses the node until an operator does something.
    Refused,
}

impl Ended {
    /// How a connection ended that has lasted for so long.
    pub(crate) fn of_connection(why: ErrorKind, lasted: Duration) -> Self {
        match why {
            ErrorKind::TimedOut => Self::Silent,
            _ if lasted < LASTING => Self::Brief,
            _ => Self::Lost,
        }
    }
}

/// The servers of a node, in the order in which they are tried.
#[derive(Debug)]
pub(crate) struct ServerOrder {
    servers: Vec<Address>,
    at: usize,
    /// Attempts at servers since the node was connected.
    attempts: u32,
    /// Attempts in a row at a server that is there, and is not ready or does not keep the node.
    not_ready: u32,
    pause: Duration,
}

impl ServerOrder {
    /// The order of some servers, of which there is at least one, by random bytes.
    pub(crate) fn new(mut servers: Vec<Address>, random: &[u8]) -> Self {
        for (at, byte) in (1..servers.len()).zip(random) {
            servers.swap(at, usize::from(*byte) % (at + 1));
        }
        Self {
            servers,
            at: 0,
            attempts: 0,
            not_ready: 0,
            pause: PAUSE.0,
        }
    }

    /// The server that is tried now.
    pub(crate) fn current(&self) -> &Address {
        &self.servers[self.at]
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.servers.len()
    }

    /// Notes how an attempt has ended, and returns how long to wait before the next one.
    pub(crate) fn ended(&mut self, how: Ended) -> Duration {
        match how {
            Ended::Lost | Ended::Silent | Ended::Brief => {
                self.attempts = 0;
                self.not_ready = if how == Ended::Brief { self.not_ready + 1 } else { 0 };
                self.pause = PAUSE.0;
                if how == Ended::Silent || self.not_ready > NOT_READY {
                    self.not_ready = 0;
                    self.at = (self.at + 1) % self.servers.len();
                }
                return PAUSE.0;
            }
            Ended::NotReady if self.not_ready < NOT_READY => {
                self.not_ready += 1;
                return self.longer();
            }
            Ended::Unreached | Ended::NotReady | Ended::Refused => {}
        }
        self.not_ready = 0;
        self.attempts = self.attempts.saturating_add(1);
        self.at = (self.at + 1) % self.servers.len();
        if how == Ended::Refused {
            // All servers know the same nodes.
            return REFUSED;
        }
        if self
            .attempts
            .is_multiple_of(u32::try_from(self.servers.len()).unwrap_or(1))
        {
            self.longer()
        } else {
            Duration::ZERO
        }
    }

    fn longer(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(PAUSE.1);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(count: usize) -> Vec<Address> {
        (1..=count)
            .map(|port| format!("https://a:{port}").parse().unwrap())
            .collect()
    }

    #[test]
    fn a_lost_server_is_tried_once_more_and_then_the_next() {
        let mut order = ServerOrder::new(servers(3), &[1, 2]);
        let first = order.current().clone();
        assert_eq!(order.ended(Ended::Lost), PAUSE.0);
        assert_eq!(*order.current(), first);
        assert_eq!(order.ended(Ended::Unreached), Duration::ZERO);
        let second = order.current().clone();
        assert_ne!(second, first);
        assert_eq!(order.ended(Ended::Unreached), Duration::ZERO);
        assert!(![&first, &second].contains(&order.current()));
        // Only once all were tried is there a pause, which grows.
        assert_eq!(order.ended(Ended::Unreached), PAUSE.0);
        assert_eq!(*order.current(), first);
        let pauses: Vec<Duration> = (0..30).map(|_| order.ended(Ended::Unreached)).collect();
        assert_eq!(pauses.iter().max(), Some(&PAUSE.1));
        order.ended(Ended::Lost);
        assert_eq!((0..3).map(|_| order.ended(Ended::Unreached)).max(), Some(PAUSE.0));
    }

    #[test]
    fn a_silent_server_is_left() {
        let mut order = ServerOrder::new(servers(2), &[1]);
        let first = order.current().clone();
        assert_eq!(order.ended(Ended::Silent), PAUSE.0);
        assert_ne!(*order.current(), first);
        order.ended(Ended::Unreached);
        assert_eq!(*order.current(), first);
    }

    #[test]
    fn a_server_that_is_not_ready_is_waited_for() {
        let mut order = ServerOrder::new(servers(2), &[0]);
        let first = order.current().clone();
        for _ in 0..NOT_READY {
            assert!(order.ended(Ended::NotReady) >= PAUSE.0);
            assert_eq!(*order.current(), first);
        }
        order.ended(Ended::NotReady);
        assert_ne!(*order.current(), first);
        assert_eq!(order.ended(Ended::Refused), REFUSED);
    }

    #[test]
    fn a_server_that_does_not_keep_its_nodes_is_left() {
        let (reset, short) = (ErrorKind::ConnectionReset, LASTING / 2);
        assert_eq!(Ended::of_connection(reset, LASTING), Ended::Lost);
        assert_eq!(Ended::of_connection(ErrorKind::TimedOut, short), Ended::Silent);
        let mut order = ServerOrder::new(servers(2), &[0]);
        let first = order.current().clone();
        for _ in 0..NOT_READY {
            assert_eq!(order.ended(Ended::of_connection(reset, short)), PAUSE.0);
            assert_eq!(*order.current(), first);
        }
        order.ended(Ended::of_connection(reset, short));
        assert_ne!(*order.current(), first);
    }

    #[test]
    fn one_server_is_tried_again_and_again() {
        let mut order = ServerOrder::new(servers(1), &[]);
        assert_eq!(order.count(), 1);
        assert_eq!(order.ended(Ended::Unreached), PAUSE.0);
        assert_eq!(order.ended(Ended::Unreached), PAUSE.0 * 2);
    }

    #[test]
    fn chance_decides_about_the_order() {
        let firsts: std::collections::BTreeSet<String> = (0..=255)
            .map(|byte| ServerOrder::new(servers(3), &[byte, byte / 3]).current().to_string())
            .collect();
        assert_eq!(firsts.len(), 3);
    }
}

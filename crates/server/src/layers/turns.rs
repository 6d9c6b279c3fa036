//! A limit of what goes on at the same time that one team cannot use up for long.
//!
//! Those who wait do so in a queue of their team, and the teams take turns. So a team with many requests delays others by
//! what is going on, and not by what it waits for. Within a team the first comes first.

use std::collections::VecDeque;
use std::sync::Arc;

use model::id::TeamId;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// The party that takes a turn: a team, or the platform itself.
pub(crate) type Payer = Option<TeamId>;

/// The queue of a team is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueFull;

/// Turns to fetch layers, shared fairly between payers.
#[derive(Debug)]
pub(crate) struct Turns {
    /// How many may wait in the queue of a team.
    waiting_max: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: usize,
    /// The queues that are not empty, next first.
    queues: VecDeque<(Payer, VecDeque<oneshot::Sender<Turn>>)>,
}

/// A turn, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<Arc<Turns>>);

/// A turn, or a place in a queue.
#[derive(Debug)]
pub(crate) enum Queued {
    Turn(Turn),
    Waiting(oneshot::Receiver<Turn>),
}

impl Queued {
    /// Waits for the turn. If this is dropped, the next one has it.
    pub(crate) async fn turn(self) -> Turn {
        match self {
            Self::Turn(turn) => turn,
            // The sender is in the queue, or it was sent.
            Self::Waiting(turn) => turn.await.unwrap_or(Turn(None)),
        }
    }
}

impl Turns {
    /// `most` at the same time, and as many as `waiting_max` in each queue.
    pub(crate) fn new(most: usize, waiting_max: usize) -> Arc<Self> {
        Arc::new(Self {
            waiting_max,
            state: Mutex::new(State {
                free: most,
                queues: VecDeque::new(),
            }),
        })
    }

    /// Takes a place in the queue of a team.
    pub(crate) fn queue(self: &Arc<Self>, payer: &Payer) -> Result<Queued, QueueFull> {
        let mut state = self.state.lock();
        if state.free > 0 {
            state.free -= 1;
            return Ok(Queued::Turn(Turn(Some(Arc::clone(self)))));
        }
        let index = state.queues.iter().position(|(owner, _)| owner == payer);
        let queue = match index {
            Some(index) => &mut state.queues[index].1,
            None => {
                state.queues.push_back((payer.clone(), VecDeque::new()));
                let last = state.queues.len() - 1;
                &mut state.queues[last].1
            }
        };
        // Those who do not wait any more hold no place.
        queue.retain(|turn| !turn.is_closed());
        if queue.len() >= self.waiting_max {
            return Err(QueueFull);
        }
        let (turn, place) = oneshot::channel();
        queue.push_back(turn);
        Ok(Queued::Waiting(place))
    }

    /// Passes a turn on.
    fn pass(self: &Arc<Self>) {
        loop {
            let next = {
                let mut state = self.state.lock();
                let Some((payer, mut queue)) = state.queues.pop_front() else {
                    state.free += 1;
                    return;
                };
                let next = queue.pop_front();
                if !queue.is_empty() {
                    state.queues.push_back((payer, queue));
                }
                next
            };
            let Some(next) = next else { continue };
            match next.send(Turn(Some(Arc::clone(self)))) {
                Ok(()) => return,
                // It does not wait any more. The turn must not be passed on twice.
                Err(mut turn) => turn.0 = None,
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = self.0.take() {
            turns.pass();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn team(n: u8) -> Payer {
        let id = format!("00000000-0000-4000-8000-0000000000{n:02}");
        Some(id.parse().unwrap())
    }

    fn waiting(turns: &Arc<Turns>, payer: &Payer) -> oneshot::Receiver<Turn> {
        match turns.queue(payer).unwrap() {
            Queued::Waiting(place) => place,
            Queued::Turn(_) => panic!("a turn at once"),
        }
    }

    #[tokio::test]
    async fn teams_take_turns_and_the_first_of_a_team_comes_first() {
        let turns = Turns::new(1, 10);
        let Ok(Queued::Turn(first)) = turns.queue(&team(1)) else {
            panic!("no turn")
        };
        let mut of_one: Vec<_> = (0..3).map(|_| waiting(&turns, &team(1))).collect();
        let mut of_two = waiting(&turns, &team(2));
        let mut platform = waiting(&turns, &None);
        drop(first);
        let one = of_one.remove(0).await.unwrap();
        assert!(of_two.try_recv().is_err());
        drop(one);
        let two = of_two.await.unwrap();
        assert!(platform.try_recv().is_err() && of_one[0].try_recv().is_err());
        drop(two);
        drop(platform.await.unwrap());
        let one = of_one.remove(0).await.unwrap();
        assert!(of_one[0].try_recv().is_err());
        drop(one);
        drop(of_one.remove(0).await.unwrap());
        assert!(matches!(turns.queue(&None), Ok(Queued::Turn(_))));
    }

    #[tokio::test]
    async fn who_leaves_the_queue_loses_no_turn() {
        let turns = Turns::new(1, 2);
        let Ok(Queued::Turn(first)) = turns.queue(&None) else {
            panic!("no turn")
        };
        let leaves = waiting(&turns, &team(1));
        let stays = waiting(&turns, &team(1));
        assert!(turns.queue(&team(1)).is_err());
        // Another team has a queue of its own.
        let other = waiting(&turns, &team(2));
        drop(leaves);
        let late = waiting(&turns, &team(1));
        drop(first);
        // Sent, and dropped before it was received.
        drop(stays);
        drop(other.await.unwrap());
        drop(late.await.unwrap());
        assert!(turns.state.lock().queues.is_empty());
        assert_eq!(turns.state.lock().free, 1);
    }
}

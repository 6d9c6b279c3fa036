//! A limit of what goes on at the same time that one team cannot use up for long.
//!
//! Those who wait do so in a queue of their team, and the teams take turns. So a team with many requests delays others by
//! what is going on, and not by what it waits for. Within a team the first comes first. Where what goes on can last long, a team has
//! no more than a part of the turns, so that others get one at once.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use model::id::TeamId;
use parking_lot::Mutex;
use tokio::sync::oneshot;

/// The party that takes a turn: a team, or the platform itself.
pub(crate) type Payer = Option<TeamId>;

/// The queue of a team is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct QueueFull;

/// Turns to fetch layers or to move copies of sandboxes, shared fairly between payers.
#[derive(Debug)]
pub(crate) struct Turns {
    /// How many a team has at the same time.
    each: usize,
    /// How many may wait in the queue of a team.
    waiting_max: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: usize,
    /// How many turns each payer has, of those that have any.
    held: HashMap<Payer, usize>,
    /// The queues that are not empty, next first.
    queues: VecDeque<(Payer, VecDeque<oneshot::Sender<Turn>>)>,
}

/// A turn of a payer, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn(Option<(Arc<Turns>, Payer)>);

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
    /// `most` at the same time, also of one payer, and as many as `waiting_max` in each queue.
    pub(crate) fn new(most: usize, waiting_max: usize) -> Arc<Self> {
        Self::with_share(most, most, waiting_max)
    }

    /// `most` at the same time, of which one payer has half at most, and as many as `waiting_max` in each queue.
    pub(crate) fn halved(most: usize, waiting_max: usize) -> Arc<Self> {
        Self::with_share(most, (most / 2).max(1), waiting_max)
    }

    fn with_share(most: usize, each: usize, waiting_max: usize) -> Arc<Self> {
        Arc::new(Self {
            each,
            waiting_max,
            state: Mutex::new(State {
                free: most,
                held: HashMap::new(),
                queues: VecDeque::new(),
            }),
        })
    }

    /// Takes a place in the queue of a team.
    pub(crate) fn queue(self: &Arc<Self>, payer: &Payer) -> Result<Queued, QueueFull> {
        let mut state = self.state.lock();
        // Whoever waits while a turn is free has all that it can have.
        if state.free > 0 && state.take(payer, self.each) {
            state.free -= 1;
            return Ok(Queued::Turn(Turn(Some((Arc::clone(self), payer.clone())))));
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
        if queue.len() >= self.waiting_max || queue.len() == queue.capacity() {
            queue.retain(|turn| !turn.is_closed());
        }
        if queue.len() >= self.waiting_max {
            return Err(QueueFull);
        }
        let (turn, place) = oneshot::channel();
        queue.push_back(turn);
        Ok(Queued::Waiting(place))
    }

    /// Passes a turn of a payer on.
    fn pass(self: &Arc<Self>, from: &Payer) {
        let mut state = self.state.lock();
        state.give_back(from);
        state.free += 1;
        while let Some((payer, next)) = state.next(self.each) {
            match next.send(Turn(Some((Arc::clone(self), payer)))) {
                Ok(()) => state.free -= 1,
                // It does not wait any more. The turn must not be passed on twice.
                Err(mut turn) => {
                    if let Some((_, payer)) = turn.0.take() {
                        state.give_back(&payer);
                    }
                }
            }
        }
    }
}

impl State {
    /// Counts another turn of a payer, unless it has as many as `each`.
    fn take(&mut self, payer: &Payer, each: usize) -> bool {
        let held = self.held.get(payer).copied().unwrap_or(0);
        if held < each {
            self.held.insert(payer.clone(), held + 1);
        }
        held < each
    }

    fn give_back(&mut self, payer: &Payer) {
        if let Some(held) = self.held.get_mut(payer) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(payer);
            }
        }
    }

    /// Takes the next one out of the queues if a turn is free for it, and counts the turn as that of its payer.
    fn next(&mut self, each: usize) -> Option<(Payer, oneshot::Sender<Turn>)> {
        if self.free == 0 {
            return None;
        }
        let held = &self.held;
        let may_have = |payer: &Payer| held.get(payer).copied().unwrap_or(0) < each;
        let index = self.queues.iter().position(|(payer, _)| may_have(payer))?;
        let (payer, mut queue) = self.queues.remove(index)?;
        let next = queue.pop_front();
        if !queue.is_empty() {
            self.queues.push_back((payer.clone(), queue));
        }
        let next = next?;
        self.take(&payer, each);
        Some((payer, next))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some((turns, payer)) = self.0.take() {
            turns.pass(&payer);
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
    async fn a_team_has_half_of_the_turns_and_no_more() {
        let turns = Turns::halved(4, 10);
        let at_once = |payer: &Payer| match turns.queue(payer).unwrap() {
            Queued::Turn(turn) => turn,
            Queued::Waiting(_) => panic!("no turn"),
        };
        let mut of_one = vec![at_once(&team(1)), at_once(&team(1))];
        let mut third = waiting(&turns, &team(1));
        let mut fourth = waiting(&turns, &team(1));
        // The other half is for others, although many of the first wait.
        let mut of_two = vec![at_once(&team(2)), at_once(&team(2))];
        let mut of_three = waiting(&turns, &team(3));
        // Those who have their share do not get one that others give back, and others do.
        of_two.pop();
        drop(of_three.try_recv().unwrap());
        assert!(third.try_recv().is_err());
        drop(of_two);
        assert_eq!(turns.state.lock().free, 2);
        assert!(third.try_recv().is_err());
        // One of its own ends.
        of_one.pop();
        of_one.push(third.try_recv().unwrap());
        assert!(fourth.try_recv().is_err());
        drop(of_one);
        drop(fourth.try_recv().unwrap());
        let state = turns.state.lock();
        assert_eq!((state.free, state.held.len(), state.queues.len()), (4, 0, 0));
    }

    #[tokio::test]
    async fn of_one_turn_a_team_has_it_all() {
        for turns in [Turns::halved(1, 10), Turns::halved(2, 10)] {
            let Ok(Queued::Turn(first)) = turns.queue(&team(1)) else {
                panic!("no turn")
            };
            let mut second = waiting(&turns, &team(1));
            assert!(second.try_recv().is_err());
            drop(first);
            drop(second.try_recv().unwrap());
        }
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

//! Turns to restore sandboxes with their processes.
//!
//! What CRIU makes again was chosen in the sandbox, and may be something that it waits for until it is ended. So restores have
//! processes of their own, and nobody can take all of them: of one owner, no more go on at the same time than half of what
//! the host can restore. That is as many as it has cores, and restores that work need no more; those that hang leave the
//! other half, and with it all cores, to others.
//!
//! Who has the most turns waits for its own. So a restore of another owner waits behind the turns that owners have, and never
//! behind the requests of one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use protocol::node::NodeError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::work::failed;

/// How long a restore waits for its turn. Most take a tenth of a second; one that hangs is ended after three.
pub(crate) const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// The turns.
#[derive(Debug)]
pub(crate) struct Restores {
    all: Arc<Semaphore>,
    /// How many one owner can have.
    each: usize,
    /// The shares of the owners that have a restore or wait for one.
    owners: Mutex<HashMap<Option<String>, Arc<Semaphore>>>,
}

/// A turn, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn(#[expect(dead_code, reason = "held, not read")] [OwnedSemaphorePermit; 2]);

impl Restores {
    /// `most` at the same time.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            all: Arc::new(Semaphore::new(most.max(1))),
            each: (most / 2).max(1),
            owners: Mutex::default(),
        }
    }

    /// Waits for a turn of an owner.
    ///
    /// # Errors
    /// [`NodeError::Busy`] when it does not come in time.
    pub(crate) async fn turn(&self, owner: Option<&str>, timeout: Duration) -> Result<Turn, NodeError> {
        let end = tokio::time::Instant::now() + timeout;
        let own = tokio::time::timeout_at(end, self.of(owner).acquire_owned()).await;
        let own = own.map_err(|_| NodeError::Busy {
            owner_limit: Some(self.each),
        })?;
        let all = tokio::time::timeout_at(end, Arc::clone(&self.all).acquire_owned()).await;
        let all = all.map_err(|_| NodeError::Busy { owner_limit: None })?;
        Ok(Turn([own.map_err(failed)?, all.map_err(failed)?]))
    }

    fn of(&self, owner: Option<&str>) -> Arc<Semaphore> {
        let mut owners = self.owners.lock();
        // Each turn, and each that waits for one, has a reference.
        owners.retain(|_, turns| Arc::strong_count(turns) > 1);
        let turns = owners.entry(owner.map(str::to_owned));
        Arc::clone(turns.or_insert_with(|| Arc::new(Semaphore::new(self.each))))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_owner_leaves_turns_to_others() {
        let restores = Restores::new(4);
        let turn = |owner| restores.turn(owner, TURN_TIMEOUT);
        let mut of_one = Vec::new();
        for _ in 0..2 {
            of_one.push(turn(Some("one")).now_or_never().unwrap().unwrap());
        }
        // Many more of the same wait, and then are told so.
        let waiting = futures_util::future::join_all((0..50).map(|_| turn(Some("one"))));
        let others = async {
            let second = turn(Some("two")).await.unwrap();
            // Those without an owner are as one.
            let third = turn(None).await.unwrap();
            drop((second, third));
        };
        let (waited, ()) = tokio::join!(waiting, others);
        for each in waited {
            assert_eq!(each.unwrap_err(), NodeError::Busy { owner_limit: Some(2) });
        }
        of_one.pop();
        turn(Some("one")).now_or_never().unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_comes_in_turn() {
        let restores = Restores::new(2);
        let turn = |owner| restores.turn(owner, TURN_TIMEOUT);
        let held = [turn(Some("one")).await.unwrap(), turn(Some("two")).await.unwrap()];
        let busy = turn(Some("three")).await.unwrap_err();
        assert_eq!(busy, NodeError::Busy { owner_limit: None });
        let mut third = Box::pin(turn(Some("three")));
        assert!((&mut third).now_or_never().is_none());
        // More of the first ones are behind it, although they come while it waits.
        let mut again = Box::pin(turn(Some("one")));
        assert!((&mut again).now_or_never().is_none());
        drop(held);
        let turns = [
            third.now_or_never().unwrap().unwrap(),
            again.now_or_never().unwrap().unwrap(),
        ];
        drop(turns);
        // Of owners that have none, nothing is kept.
        let _last = turn(None).await.unwrap();
        assert_eq!(restores.owners.lock().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn one_place_is_one_for_all() {
        let restores = Restores::new(1);
        let held = restores.turn(None, TURN_TIMEOUT).await.unwrap();
        restores.turn(Some("one"), TURN_TIMEOUT).await.unwrap_err();
        drop(held);
        restores.turn(Some("one"), TURN_TIMEOUT).await.unwrap();
    }
}

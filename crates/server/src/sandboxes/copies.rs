//! The order in which disks are copied for snapshots.
//!
//! A node copies one disk at a time. Who waits for that must not hold the sandbox, which others may want to pause or end,
//! and no team may have all the places that a node has for copies.

use std::collections::HashMap;

use model::id::TeamId;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

/// Snapshots that a team may have in the making, of the four copies that a node keeps.
pub(crate) const PER_TEAM: usize = 2;

/// The copies of disks that are asked for.
#[derive(Debug)]
pub(crate) struct Copies {
    turn: Semaphore,
    in_teams: Mutex<HashMap<TeamId, usize>>,
}

/// The place of one snapshot of a team, until it is complete or has failed.
#[derive(Debug)]
pub(crate) struct CopyPlace<'a> {
    copies: &'a Copies,
    team: TeamId,
}

impl Copies {
    pub(crate) fn new() -> Self {
        Self {
            turn: Semaphore::new(1),
            in_teams: Mutex::default(),
        }
    }

    /// A place for a snapshot of a team; `None` when it has as many as it may.
    pub(crate) fn place(&self, team: &TeamId) -> Option<CopyPlace<'_>> {
        let mut in_teams = self.in_teams.lock();
        let count = in_teams.entry(team.clone()).or_default();
        if *count >= PER_TEAM {
            return None;
        }
        *count += 1;
        Some(CopyPlace {
            copies: self,
            team: team.clone(),
        })
    }
}

impl CopyPlace<'_> {
    /// Waits until no other disk is copied.
    pub(crate) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.copies.turn.acquire().await.ok()
    }
}

impl Drop for CopyPlace<'_> {
    fn drop(&mut self) {
        let mut in_teams = self.copies.in_teams.lock();
        if let Some(count) = in_teams.get_mut(&self.team) {
            *count -= 1;
            if *count == 0 {
                in_teams.remove(&self.team);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_team_cannot_have_every_place() {
        let copies = Copies::new();
        let [one, other] = [1, 2].map(|number| TeamId::try_from(uuid::Uuid::from_u128(number).to_string()).unwrap());
        let first = copies.place(&one).unwrap();
        let second = copies.place(&one);
        assert!(second.is_some());
        assert!(copies.place(&one).is_none());
        let of_other = copies.place(&other).unwrap();
        let turn = first.turn().await.unwrap();
        let waits = tokio::time::timeout(std::time::Duration::from_millis(10), of_other.turn());
        assert!(waits.await.is_err());
        drop(turn);
        assert!(of_other.turn().await.is_some());
        drop(second);
        assert!(copies.place(&one).is_some());
        drop(first);
        drop(of_other);
        assert!(copies.in_teams.lock().is_empty());
    }
}

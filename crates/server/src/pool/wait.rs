//! Waiting for a pooled sandbox that is being started.
//!
//! A request that comes while another one takes the place of the last would otherwise start a sandbox by itself: the same
//! work once more, beside the first, and so both later than the first alone. It waits only where the time that one takes is
//! known, and gives up when this one takes longer; it starts one by itself then.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use model::id::SandboxId;

use super::{Asked, Member, Offer, Phase, Pool, PoolKey, State, Taken};
use crate::clock::SECOND_US;
use crate::outcome::{PoolEnd, PoolUse};
use crate::start_command::waits_as_long_for_a_client;

/// By how much one may take longer than the last, besides half as long again, in microseconds.
const LATE_US: i64 = SECOND_US;
/// How long a request waits at most, in microseconds: it may have to start one by itself afterwards.
const WAIT_MAX_US: i64 = 15 * SECOND_US;

impl Pool {
    /// Takes a sandbox for a request, if there is one that is ready or will be soon, and notes what was asked for. No other
    /// request gets it meanwhile.
    pub(crate) async fn take(self: &Arc<Self>, asked: Asked<'_>) -> Option<Taken> {
        let taken = match self.take_ready(asked) {
            Offer::Taken(taken) => return Some(taken),
            Offer::Nothing => return None,
            Offer::Missing => match self.promise(asked.key) {
                Some(promised) => {
                    // Another one takes its place at once.
                    self.changed.notify_one();
                    promised.wait().await
                }
                None => None,
            },
        };
        if taken.is_none() {
            self.services.metrics.pool_use(PoolUse::Miss);
            self.changed.notify_one();
        }
        taken
    }

    /// Finds the sandbox of a kind that will be ready next, if it is worth waiting for it.
    fn promise(self: &Arc<Self>, key: &PoolKey) -> Option<Promised> {
        let now_us = self.services.clock.now_us();
        let (id, bound) = self.state.lock().promise(key, now_us)?;
        // A request that waits does not keep another one from being started.
        self.creating.fetch_sub(1, Ordering::Relaxed);
        Some(Promised {
            pool: Arc::clone(self),
            id,
            bound,
        })
    }
}

/// A sandbox that is being started, for one request. Dropping it leaves the sandbox to others.
struct Promised {
    pool: Arc<Pool>,
    id: SandboxId,
    bound: Duration,
}

impl Promised {
    /// Waits for the sandbox until it is ready; none if it is not in time, or never.
    async fn wait(self) -> Option<Taken> {
        tokio::time::timeout(self.bound, self.settled()).await.ok().flatten()
    }

    async fn settled(&self) -> Option<Taken> {
        loop {
            let settled = self.pool.settled.notified();
            tokio::pin!(settled);
            settled.as_mut().enable();
            {
                let mut state = self.pool.state.lock();
                let member = state.members.get_mut(&self.id)?;
                match member.phase {
                    Phase::Starting if member.cancel.is_cancelled() || member.is_dead => return None,
                    Phase::Starting => {}
                    Phase::Taken | Phase::Ending => return None,
                    Phase::Ready => {
                        member.phase = Phase::Taken;
                        return Some(Taken {
                            pool: Arc::clone(&self.pool),
                            id: self.id.clone(),
                            key: member.key.clone(),
                            permit: Arc::clone(&member.permit),
                            is_used: false,
                        });
                    }
                }
            }
            settled.await;
        }
    }
}

impl Drop for Promised {
    fn drop(&mut self) {
        self.pool.creating.fetch_add(1, Ordering::Relaxed);
        let mut state = self.pool.state.lock();
        let Some(member) = state.members.get_mut(&self.id) else {
            return;
        };
        member.is_promised = false;
        let (is_ready, key) = (member.phase == Phase::Ready, member.key.clone());
        if is_ready && !state.demands.contains_key(&key) {
            // Forgotten while it was promised.
            self.pool.begin_end(&mut state, &self.id, PoolEnd::Stale);
        }
    }
}

impl State {
    /// Promises the sandbox of a kind to a request that will be ready next, if it is worth waiting for it, and says for how
    /// long.
    fn promise(&mut self, key: &PoolKey, now_us: i64) -> Option<(SandboxId, Duration)> {
        let demand = self.demands.get(key)?;
        let start = demand.spec.start.as_ref()?;
        if demand.ready_us == 0 || demand.failures > 0 || !waits_as_long_for_a_client(start) {
            return None;
        }
        let ready_us = demand.ready_us;
        let late_us = ready_us.saturating_add(ready_us / 2).saturating_add(LATE_US);
        // How long to wait for one; none if it is late, or not ready before the request would have to give up.
        let left_us = |member: &Member| {
            let age_us = now_us - member.since_us;
            let left_us = late_us.saturating_sub(age_us).min(WAIT_MAX_US);
            (left_us > 0 && ready_us - age_us <= WAIT_MAX_US).then_some(left_us)
        };
        let (left_us, id, member) = self
            .members
            .iter_mut()
            .filter(|(_, member)| matches!(member.phase, Phase::Starting | Phase::Ready) && member.key == *key)
            .filter(|(_, member)| !member.is_promised && !member.is_dead && !member.cancel.is_cancelled())
            .filter_map(|(id, member)| Some((left_us(member)?, id, member)))
            .min_by_key(|(_, _, member)| member.since_us)?;
        member.is_promised = true;
        Some((id.clone(), Duration::from_micros(left_us.unsigned_abs())))
    }
}

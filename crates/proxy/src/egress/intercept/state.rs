//! What the gateway keeps about interception: per sandbox, and per connection.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use model::network::EgressPolicy;
use model::secret::Secret;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::super::rate::Rate;
use super::super::settings::EgressLimits;
use super::authority::{Authority, AuthorityError};
use super::budget::Budget;
use super::rules::Rules;

/// Bodies of responses to one sandbox that are decoded at a time, each with some 100 KiB.
const DECODERS: usize = 64;

/// What is kept about a sandbox while it is attached. Almost nothing before its first intercepted connection.
pub(crate) struct Interceptor {
    connections: Arc<Semaphore>,
    decoders: Arc<Semaphore>,
    /// Memory for bodies of requests, and for those of responses: either goes on when the other cannot.
    held: [Budget; 2],
    requests: Rate,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    authority: Option<(Secret, Arc<Authority>)>,
    rules: Option<Arc<Rules>>,
}

impl fmt::Debug for Interceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interceptor").finish_non_exhaustive()
    }
}

impl Interceptor {
    /// Creates the state with the limits of connections at a time, and of requests.
    pub(crate) fn new(limits: &EgressLimits) -> Self {
        let most = usize::try_from(limits.intercepted).unwrap_or(usize::MAX);
        let burst = limits.requests_per_s.saturating_mul(EgressLimits::BURST_FACTOR);
        Self {
            requests: Rate::new(limits.requests_per_s, burst),
            connections: Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))),
            held: [Budget::new(), Budget::new()],
            decoders: Arc::new(Semaphore::new(DECODERS)),
            kept: Mutex::default(),
        }
    }

    /// The permission to intercept one more connection.
    pub(crate) fn admit(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.connections).try_acquire_owned().ok()
    }

    /// The permission to decode the body of one more response.
    pub(super) fn admit_decoder(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.decoders).try_acquire_owned().ok()
    }

    /// What may be held of bodies of requests.
    pub(super) fn requests_held(&self) -> &Budget {
        &self.held[0]
    }

    /// What may be held of bodies of responses.
    pub(super) fn responses_held(&self) -> &Budget {
        &self.held[1]
    }

    /// Whether one more request is within the limit. Counts it if so.
    pub(super) fn admit_request(&self) -> bool {
        self.requests.admit()
    }

    /// The authority of a seed, which is the same as long as the sandbox lives.
    pub(super) fn authority(&self, seed: &Secret) -> Result<Arc<Authority>, AuthorityError> {
        let mut kept = self.kept.lock();
        if let Some((of, authority)) = &kept.authority
            && of == seed
        {
            return Ok(Arc::clone(authority));
        }
        let authority = Arc::new(Authority::new(seed)?);
        kept.authority = Some((seed.clone(), Arc::clone(&authority)));
        Ok(authority)
    }

    /// The rules of a policy.
    pub(super) fn rules(&self, policy: &Arc<EgressPolicy>) -> Arc<Rules> {
        let mut kept = self.kept.lock();
        if let Some(rules) = kept.rules.as_ref().filter(|rules| rules.are_of(policy)) {
            return Arc::clone(rules);
        }
        let rules = Arc::new(Rules::new(Arc::clone(policy)));
        kept.rules = Some(Arc::clone(&rules));
        rules
    }
}

/// Number of unfinished requests of a connection, and since when there is none.
#[derive(Debug)]
pub(super) struct Activity {
    requests: AtomicUsize,
    idle_since: Mutex<Instant>,
}

impl Activity {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            requests: AtomicUsize::new(0),
            idle_since: Mutex::new(Instant::now()),
        })
    }

    /// How long no request has been unfinished.
    pub(super) fn idle(&self) -> Duration {
        match self.requests.load(Ordering::Relaxed) {
            0 => self.idle_since.lock().elapsed(),
            _ => Duration::ZERO,
        }
    }
}

/// Counts a request as unfinished until this is dropped.
#[derive(Debug)]
pub(super) struct InFlight(Arc<Activity>);

impl InFlight {
    pub(super) fn new(activity: &Arc<Activity>) -> Self {
        activity.requests.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        *self.0.idle_since.lock() = Instant::now();
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

//! The sandboxes that exist, in memory: routes, tokens, and where each is in its life.
//!
//! This is what a request is answered from without the database. It follows the rows: an entry appears with its row and
//! leaves with it, except that a sandbox which begins to stop takes no traffic from that very moment.

use std::collections::HashMap;
use std::sync::Arc;

use model::id::{SandboxId, TeamId};
use model::lifecycle::{Event, State};
use parking_lot::{Mutex, RwLock};
use protocol::signature::Claim;
use proxy::ingress::Access;
use proxy::ingress::route::SignedFile;
use secrecy::{ExposeSecret, SecretString};
use store::sandboxes::SandboxRow;
use tokio::sync::watch;

use crate::capacity::Seat;
use crate::quota::Reservation;

/// One sandbox.
#[derive(Debug)]
pub(crate) struct Live {
    /// Its id.
    pub(crate) id: SandboxId,
    /// The owning team.
    pub(crate) team: TeamId,
    /// The latest end that an extension may reach, in microseconds since the Unix epoch.
    pub(crate) max_end_us: i64,
    /// The token of its agent.
    pub(crate) access_token: SecretString,
    /// The token of its traffic, when it is not public.
    pub(crate) traffic_token: Option<SecretString>,
    /// Changes of the row are made one after another, by whoever holds this.
    pub(crate) turn: tokio::sync::Mutex<()>,
    life: Mutex<Life>,
    stopped: watch::Sender<Option<Stopped>>,
    place: Mutex<Option<Place>>,
}

/// What a sandbox takes of its team's limits and of its host, given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    /// Of the team's limits.
    #[expect(dead_code, reason = "held for what its end gives back")]
    pub(crate) reservation: Reservation,
    /// Of the host.
    #[expect(dead_code, reason = "held for what its end gives back")]
    pub(crate) seat: Seat,
}

#[derive(Debug)]
struct Life {
    state: State,
    version: i64,
    end_us: i64,
    stop_failed: bool,
}

/// How the end of a sandbox went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stopped {
    /// Nothing of it runs any more.
    Gone,
    /// The node or the database failed; it will be tried again.
    Failed,
}

/// Who ends a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// The caller does.
    Begin,
    /// The caller does, as an earlier try has failed.
    Again,
    /// Somebody does already; the caller may wait.
    Join,
    /// It is not there to be ended.
    Gone,
}

impl Live {
    /// A sandbox as its row says.
    pub(crate) fn new(
        row: &SandboxRow,
        place: Place,
        access_token: SecretString,
        traffic_token: Option<SecretString>,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: row.id.clone(),
            team: row.team_id.clone(),
            max_end_us: row.max_end_us,
            access_token,
            traffic_token,
            turn: tokio::sync::Mutex::new(()),
            life: Mutex::new(Life {
                state: row.state,
                version: row.version,
                end_us: row.end_us,
                stop_failed: false,
            }),
            stopped: watch::Sender::new(None),
            place: Mutex::new(Some(place)),
        })
    }

    /// Where it is in its life.
    pub(crate) fn state(&self) -> State {
        self.life.lock().state
    }

    /// When it is to end, in microseconds since the Unix epoch.
    pub(crate) fn end_us(&self) -> i64 {
        self.life.lock().end_us
    }

    /// The version of its row.
    pub(crate) fn version(&self) -> i64 {
        self.life.lock().version
    }

    /// Notes what the row became.
    pub(crate) fn follow(&self, version: i64, end_us: i64) {
        let mut life = self.life.lock();
        life.version = version;
        life.end_us = end_us;
    }

    /// Moves on by `event`; `false` when that makes no sense now.
    pub(crate) fn apply(&self, event: Event) -> bool {
        let mut life = self.life.lock();
        match life.state.next(event) {
            Ok(state) => {
                life.state = state;
                true
            }
            Err(_) => false,
        }
    }

    /// Takes it out of traffic and says who has to end it.
    pub(crate) fn stop(&self) -> Stop {
        let mut life = self.life.lock();
        match life.state {
            State::Running => {
                life.state = State::Stopping;
                Stop::Begin
            }
            State::Stopping if life.stop_failed => {
                life.stop_failed = false;
                self.stopped.send_replace(None);
                Stop::Again
            }
            State::Stopping => Stop::Join,
            // Nobody but its creator knows the id of one that is being created.
            State::Creating | State::Gone => Stop::Gone,
        }
    }

    /// Tells everyone who waits how the end went.
    pub(crate) fn set_stopped(&self, stopped: Stopped) {
        let mut life = self.life.lock();
        match stopped {
            Stopped::Gone => life.state = State::Gone,
            Stopped::Failed => life.stop_failed = true,
        }
        self.stopped.send_replace(Some(stopped));
    }

    /// Waits until the end that is under way has come.
    pub(crate) async fn stopped(&self) -> Stopped {
        let mut stopped = self.stopped.subscribe();
        match stopped.wait_for(Option::is_some).await {
            Ok(stopped) => stopped.unwrap_or(Stopped::Failed),
            Err(_) => Stopped::Failed,
        }
    }
}

/// All sandboxes of this server.
#[derive(Debug, Default)]
pub(crate) struct LiveTable(RwLock<HashMap<SandboxId, Arc<Live>>>);

impl LiveTable {
    pub(crate) fn insert(&self, live: Arc<Live>) {
        self.0.write().insert(live.id.clone(), live);
    }

    /// Forgets a sandbox of which nothing is left, and gives back its place, whoever still holds it.
    pub(crate) fn remove(&self, id: &SandboxId) {
        let live = self.0.write().remove(id);
        if let Some(live) = live {
            live.place.lock().take();
        }
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Option<Arc<Live>> {
        self.0.read().get(id).cloned()
    }

    /// How many there are, by their state.
    pub(crate) fn count_by_state(&self) -> Vec<(&'static str, usize)> {
        let mut counts: Vec<_> = [State::Creating, State::Running, State::Stopping]
            .map(|state| (state, 0))
            .to_vec();
        for live in self.0.read().values() {
            let state = live.state();
            if let Some((_, count)) = counts.iter_mut().find(|(counted, _)| *counted == state) {
                *count += 1;
            }
        }
        counts
            .into_iter()
            .map(|(state, count)| (state.as_str(), count))
            .collect()
    }

    /// The sandbox with that id, if it is that team's.
    pub(crate) fn of_team(&self, id: &SandboxId, team: &TeamId) -> Option<Arc<Live>> {
        self.get(id).filter(|live| live.team == *team)
    }

    /// What traffic to a sandbox must carry; `None` unless it runs.
    pub(crate) fn access(&self, id: &SandboxId) -> Option<Access> {
        let live = self.get(id).filter(|live| live.state() == State::Running)?;
        Some(Access {
            traffic_token: live.traffic_token.clone(),
        })
    }

    /// The running sandbox whose token made a signature. Every one is asked, each at the price of one SHA-256.
    pub(crate) fn signer(&self, signed: &SignedFile) -> Option<SandboxId> {
        let claim = Claim {
            path: &signed.path,
            operation: signed.operation,
            username: &signed.username,
            expiration: signed.expiration,
        };
        let table = self.0.read();
        table
            .values()
            .filter(|live| live.state() == State::Running)
            .find(|live| claim.verify(live.access_token.expose_secret(), &signed.signature))
            .map(|live| live.id.clone())
    }
}

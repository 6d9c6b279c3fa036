//! The life of sandboxes: making, extending, ending and adopting them. Row first, then the node, then memory.
//!
//! Whatever a crash interrupts is undone at the next start, because a row that is not `running` names something that
//! no client was told to live. Creating and ending run on tasks of their own: a client that hangs up changes nothing.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::lifecycle::{Event, State};
use protocol::agent::{self, Init};
use protocol::node::{Image, NodeApi, NodeError, SandboxExit, StartSandbox};
use secrecy::ExposeSecret;
use store::error::StoreError;
use store::sandboxes::{NewSandbox, SandboxRow};
use store::{Change, Store};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::auth::Uses;
use crate::capacity::Capacity;
use crate::clock::{SECOND_US, rfc3339};
use crate::expiry::Deadlines;
use crate::idempotency::{ClaimTable, KeyClaim};
use crate::keys;
use crate::live::{Live, LiveTable, Place, Stop, Stopped};
use crate::metrics::{CreateOutcome, EndReason, Metrics};
use crate::quota::{OverQuota, Quotas, TeamQuota, Used};
use crate::records::{Happened, Records};
use crate::settings::Settings;

/// User that runs commands and owns files when a request names none.
const DEFAULT_USER: &str = "user";
/// How long a sandbox may take to start. With the time that a body may take to arrive, it ends well before the bound on
/// answering a request.
const CREATE_BOUND: Duration = Duration::from_secs(30);
/// Pause before an end that failed is tried again, in microseconds.
const STOP_RETRY_US: i64 = SECOND_US;
/// Longest wait that a client is told when there is no room, in seconds. A sandbox may be killed long before its
/// deadline, so a later one says nothing.
const NO_ROOM_WAIT_MAX_S: i64 = 30;

/// Everything that requests and background tasks share.
#[derive(Debug)]
pub(crate) struct Platform {
    pub(crate) store: Store,
    pub(crate) node: NodeHandle,
    pub(crate) settings: Settings,
    pub(crate) live: LiveTable,
    pub(crate) deadlines: Deadlines,
    pub(crate) claims: ClaimTable,
    pub(crate) quotas: Quotas,
    pub(crate) capacity: Capacity,
    /// When credentials were last used.
    pub(crate) uses: Uses,
    pub(crate) metrics: Metrics,
    /// Logs and metrics. Nothing here ever waits for them.
    pub(crate) records: Arc<Records>,
    /// Work that a request began and that outlives it.
    pub(crate) work: TaskTracker,
}

/// The node, printable.
pub(crate) struct NodeHandle(pub(crate) Arc<dyn NodeApi>);

impl std::fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NodeHandle")
    }
}

/// A sandbox to create.
#[derive(Debug)]
pub(crate) struct Create {
    /// What it takes of its team's limits and of the host.
    pub(crate) place: Place,
    /// The idempotency key of the request, if it had one.
    pub(crate) claim: Option<Box<KeyClaim>>,
    /// Its row to be.
    pub(crate) row: NewSandbox,
    /// Seconds from the moment it runs until it ends.
    pub(crate) timeout_s: u32,
    /// Environment of its processes; not stored, because it holds secrets.
    pub(crate) env_vars: EnvVars,
}

/// Environment variables, whose values no log shows.
pub(crate) struct EnvVars(pub(crate) BTreeMap<String, String>);

impl std::fmt::Debug for EnvVars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EnvVars({})", self.0.len())
    }
}

/// A sandbox that runs.
#[derive(Debug)]
pub(crate) struct Created {
    /// Its row.
    pub(crate) row: SandboxRow,
    /// How long each stage took, in order.
    pub(crate) stages: Vec<(&'static str, Duration)>,
}

/// Why a sandbox could not be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Node(NodeError),
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    #[error("{why}")]
    NoRoom {
        why: String,
        /// Seconds until there may be.
        retry_after_s: u32,
    },
    #[error("it did not start in time")]
    TooLong,
    #[error("it ended while it was being started")]
    Died,
    #[error("the task that created it broke off")]
    BrokeOff,
}

/// Why the deadline of a sandbox was not changed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ExtendError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("it is being ended")]
    Stopping,
    #[error("it is gone")]
    Gone,
    #[error("the task that changed it broke off")]
    BrokeOff,
}

/// How a deadline changes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Deadline {
    /// To this time exactly, which may be earlier.
    Exactly(i64),
    /// To this time unless it is later already.
    AtLeast(i64),
}

impl Platform {
    /// Takes what a sandbox of this size needs of its team's limits and of the host, before anything of it is made.
    pub(crate) async fn reserve(&self, quota: &Arc<TeamQuota>, share: Used) -> Result<Place, CreateError> {
        let reservation = quota.reserve(share)?;
        let seat = self.capacity.admit(&*self.node.0, &self.settings.clock).await;
        Ok(Place {
            reservation,
            seat: seat.map_err(|why| self.no_room(why.to_string()))?,
        })
    }

    /// There may be room once the next sandbox reaches its deadline, or before.
    fn no_room(&self, why: String) -> CreateError {
        let wait_s = self.deadlines.first_us().map_or(NO_ROOM_WAIT_MAX_S, |first_us| {
            let wait_us = (first_us - self.settings.clock.now_us()).max(0);
            (wait_us / SECOND_US + 1).min(NO_ROOM_WAIT_MAX_S)
        });
        CreateError::NoRoom {
            why,
            retry_after_s: u32::try_from(wait_s).unwrap_or(1),
        }
    }

    /// Starts a sandbox and returns once its agent answered. One that takes too long is ended when it comes, because its
    /// client is told that there is none.
    pub(crate) async fn create(self: &Arc<Self>, create: Create) -> Result<Created, CreateError> {
        let id = create.row.id.clone();
        let platform = Arc::clone(self);
        // Set by whoever decides first: the task that there is a sandbox, or the time that there is none.
        let decided = Arc::new(AtomicBool::new(false));
        let mut task = self.work.spawn({
            let decided = Arc::clone(&decided);
            async move { Box::pin(platform.create_claimed(create, &decided)).await }
        });
        let result = match tokio::time::timeout(CREATE_BOUND, &mut task).await {
            Ok(result) => result,
            Err(_) if decided.swap(true, Ordering::AcqRel) => task.await,
            Err(_) => {
                let platform = Arc::clone(self);
                self.work.spawn(async move {
                    if task.await.is_err() {
                        platform.discard(&id).await;
                    }
                });
                return Err(CreateError::TooLong);
            }
        };
        match result {
            Ok(result) => result,
            Err(_) => {
                self.metrics.create(CreateOutcome::Failed);
                // It panicked somewhere in between; what it left is removed like any failed start.
                let platform = Arc::clone(self);
                self.work.spawn(async move { platform.discard(&id).await });
                Err(CreateError::BrokeOff)
            }
        }
    }

    /// Creates, and says so to the key of the request before anyone else is told.
    async fn create_claimed(
        self: &Arc<Self>,
        mut create: Create,
        decided: &AtomicBool,
    ) -> Result<Created, CreateError> {
        let claim = create.claim.take();
        let mut result = self.create_on_task(create).await;
        if let Ok(created) = &result
            && decided.swap(true, Ordering::AcqRel)
        {
            if let Some(live) = self.live.get(&created.row.id) {
                self.stop(&live).await;
            }
            result = Err(CreateError::TooLong);
        }
        self.metrics.create(match &result {
            Ok(_) => CreateOutcome::Created,
            Err(CreateError::NoRoom { .. }) => CreateOutcome::NoRoom,
            Err(_) => CreateOutcome::Failed,
        });
        match (claim, &result) {
            (Some(claim), Ok(created)) => claim.complete(created.row.clone()).await,
            (Some(claim), Err(_)) => claim.abandon().await,
            (None, _) => {}
        }
        result
    }

    async fn create_on_task(&self, create: Create) -> Result<Created, CreateError> {
        let clock = Instant::now();
        let row = self.store.sandbox_insert(create.row).await?;
        let mut store_time = clock.elapsed();
        let live = self.enlist(&row, create.place);

        let started = match self.node.0.start(self.start_request(&row, create.env_vars)).await {
            Ok(started) => started,
            Err(error) => {
                self.forget(&row.id).await;
                return Err(match error {
                    NodeError::Capacity(why) => self.no_room(why),
                    NodeError::NotFound(_) | NodeError::Failed(_) => CreateError::Node(error),
                });
            }
        };

        // Start-up does not eat lifetime, so the times are taken now.
        let now_us = self.settings.clock.now_us();
        let end_us = (now_us + i64::from(create.timeout_s) * SECOND_US).min(row.max_end_us);
        let version = known_version(&started.agent_version);
        let clock = Instant::now();
        let change = self
            .store
            .sandbox_started(&row.id, row.version, now_us, end_us, version)
            .await;
        store_time += clock.elapsed();
        let row = match change {
            Ok(Change::Applied(row)) => row,
            Ok(Change::Stale | Change::Missing) => {
                self.discard(&row.id).await;
                return Err(CreateError::Died);
            }
            Err(error) => {
                self.discard(&row.id).await;
                return Err(error.into());
            }
        };
        live.follow(row.version, row.end_us);
        if !live.apply(Event::Started) {
            self.discard(&row.id).await;
            return Err(CreateError::Died);
        }
        self.deadlines.set(&row.id, row.end_us);
        self.records.runs(&row);
        self.records.note(&row.id, &Happened::Created(&row));
        let mut stages = vec![("store", store_time)];
        stages.extend(started.stages);
        Ok(Created { row, stages })
    }

    fn start_request(&self, row: &SandboxRow, env_vars: EnvVars) -> StartSandbox {
        let token = keys::access_token(&self.settings.token_seed, &row.id);
        let mut resources = self.settings.resources;
        resources.cpu_count = row.cpu_count;
        resources.memory_mb = row.memory_mb;
        resources.disk_mb = row.disk_mb;
        StartSandbox {
            id: row.id.clone(),
            template: row.template_id.clone(),
            image: Image::Base,
            resources,
            init: Init {
                env_vars: Some(env_vars.0),
                access_token: Some(token.expose_secret().to_owned()),
                timestamp: Some(rfc3339(self.settings.clock.now_us())),
                default_user: Some(DEFAULT_USER.to_owned()),
                default_workdir: None,
                sandbox_id: Some(row.id.as_str().to_owned()),
                template_id: Some(row.template_id.as_str().to_owned()),
                ca_bundle: None,
                open_to_anonymous: !row.secure,
                cpu_count: Some(row.cpu_count),
                memory_mb: Some(row.memory_mb),
            },
        }
    }

    /// Puts a row into memory.
    fn enlist(&self, row: &SandboxRow, place: Place) -> Arc<Live> {
        let seed = &self.settings.token_seed;
        let traffic_token = (!row.allow_public_traffic).then(|| keys::traffic_token(seed, &row.id));
        let live = Live::new(row, place, keys::access_token(seed, &row.id), traffic_token);
        self.live.insert(Arc::clone(&live));
        self.records.enlist(row);
        live
    }

    /// Removes a sandbox that no client knows: from the node, then from the rows and memory.
    async fn discard(&self, id: &SandboxId) {
        match self.node.0.kill(id).await {
            Ok(()) | Err(NodeError::NotFound(_)) => {}
            Err(error) => tracing::error!(sandbox.id = %id, %error, "end a sandbox that failed to start"),
        }
        self.forget(id).await;
    }

    /// Removes what is known of a sandbox that does not run.
    async fn forget(&self, id: &SandboxId) {
        self.deadlines.remove(id);
        self.live.remove(id);
        self.records.ended(id);
        if let Err(error) = self.store.sandbox_delete(id).await {
            // The row is of no sandbox that runs, so the next start removes it.
            self.store_failed(&error, id, "remove the row of an ended sandbox");
        }
    }

    /// Counts and logs an error of the database that no client is told.
    fn store_failed(&self, error: &StoreError, id: &SandboxId, what: &str) {
        self.metrics.store_error();
        tracing::error!(sandbox.id = %id, error = %Chain(error), "{what}");
    }

    /// Changes when a sandbox ends, and returns its row.
    pub(crate) async fn set_deadline(
        self: &Arc<Self>,
        live: &Arc<Live>,
        deadline: Deadline,
    ) -> Result<SandboxRow, ExtendError> {
        let (platform, live) = (Arc::clone(self), Arc::clone(live));
        // A client that hangs up must not leave a row that memory does not follow.
        let task = self
            .work
            .spawn(async move { platform.set_deadline_on_task(&live, deadline).await });
        task.await.unwrap_or(Err(ExtendError::BrokeOff))
    }

    async fn set_deadline_on_task(
        self: &Arc<Self>,
        live: &Arc<Live>,
        deadline: Deadline,
    ) -> Result<SandboxRow, ExtendError> {
        // Before the turn, because an end holds it until nothing runs any more; and after, because one may have begun.
        check_runs(live)?;
        let _turn = live.turn.lock().await;
        check_runs(live)?;
        let change = match deadline {
            Deadline::Exactly(end_us) => self.store.sandbox_set_end(&live.id, None, end_us).await?,
            Deadline::AtLeast(end_us) => self.store.sandbox_extend_end(&live.id, end_us).await?,
        };
        let row = match change {
            Change::Applied(row) => row,
            Change::Stale => return Err(ExtendError::Stopping),
            Change::Missing => return Err(ExtendError::Gone),
        };
        if row.end_us != live.end_us() {
            self.records.note(&row.id, &Happened::TimeoutChanged(row.end_us));
        }
        live.follow(row.version, row.end_us);
        if row.end_us <= self.settings.clock.now_us() {
            // Gone for every request after this one, not only once the deadline is noticed.
            self.begin_stop(live, EndReason::Expired);
        } else if live.state() == State::Running {
            self.deadlines.set(&row.id, row.end_us);
        }
        Ok(row)
    }

    /// Ends a sandbox, or waits until whoever ends it already is done. `None` when it is not there to be ended.
    pub(crate) async fn stop(self: &Arc<Self>, live: &Arc<Live>) -> Option<Stopped> {
        match self.begin_stop(live, EndReason::Killed) {
            Stop::Begin | Stop::Again | Stop::Join => Some(live.stopped().await),
            Stop::Gone => None,
        }
    }

    /// Takes a sandbox out of traffic at once and ends it on a task of its own.
    fn begin_stop(self: &Arc<Self>, live: &Arc<Live>, reason: EndReason) -> Stop {
        let stop = live.stop();
        if stop == Stop::Begin {
            self.records.note(&live.id, &Happened::Ending(reason));
        }
        if matches!(stop, Stop::Begin | Stop::Again) {
            let (platform, live) = (Arc::clone(self), Arc::clone(live));
            self.work.spawn(async move {
                // Told even if the task breaks off, because others wait for it.
                let mut ended = Ended {
                    platform,
                    live,
                    how: Stopped::Failed,
                };
                ended.how = ended.platform.end(&ended.live).await;
                if ended.how == Stopped::Gone {
                    ended.platform.count_end(&ended.live, reason);
                }
            });
        }
        stop
    }

    fn count_end(&self, live: &Live, reason: EndReason) {
        self.metrics.end(reason);
        if reason == EndReason::Expired {
            self.metrics.expired(self.settings.clock.now_us() - live.end_us());
        }
    }

    async fn end(&self, live: &Live) -> Stopped {
        let id = &live.id;
        let _turn = live.turn.lock().await;
        self.deadlines.remove(id);
        match self.store.sandbox_set_state(id, live.version(), State::Stopping).await {
            Ok(Change::Applied(row)) => live.follow(row.version, row.end_us),
            // Another hand is at the row. The sandbox is ended all the same, and the row goes with it.
            Ok(Change::Stale | Change::Missing) => {}
            Err(error) => self.store_failed(&error, id, "record that a sandbox ends"),
        }
        match self.node.0.kill(id).await {
            Ok(()) | Err(NodeError::NotFound(_)) => {}
            Err(error) => {
                tracing::error!(sandbox.id = %id, %error, "end a sandbox");
                return Stopped::Failed;
            }
        }
        if let Err(error) = self.store.sandbox_delete(id).await {
            self.store_failed(&error, id, "remove the row of an ended sandbox");
            return Stopped::Failed;
        }
        self.live.remove(id);
        self.records.ended(id);
        Stopped::Gone
    }

    /// Makes rows, node and memory agree after a start: what still runs is adopted, the rest is removed.
    pub(crate) async fn adopt(&self) -> Result<usize, AdoptError> {
        for name in self.quotas.unknown_names(&self.store).await? {
            tracing::warn!(team = name, "the configuration limits a team that does not exist");
        }
        let rows = self.store.sandbox_list_live().await?;
        let wanted: Vec<SandboxId> = rows
            .iter()
            .filter(|row| row.state == State::Running)
            .map(|row| row.id.clone())
            .collect();
        let adopted: HashSet<SandboxId> = self.node.0.reconcile(wanted).await?.into_iter().collect();
        let mut count = 0;
        for row in rows {
            if row.state == State::Running && adopted.contains(&row.id) {
                let quota = self.quotas.of(&self.store, &row.team_id).await?;
                let place = Place {
                    reservation: quota.occupy(Used::by_one(row.cpu_count, row.memory_mb)),
                    seat: self.capacity.occupy(),
                };
                self.enlist(&row, place);
                self.records.runs(&row);
                self.deadlines.set(&row.id, row.end_us);
                count += 1;
            } else {
                self.store.sandbox_delete(&row.id).await?;
                self.records.enlist(&row);
                // Of any other, no client was told that it lives.
                if row.state == State::Running {
                    self.metrics.end(EndReason::Lost);
                    self.records.note(&row.id, &Happened::Ending(EndReason::Lost));
                }
                self.records.ended(&row.id);
            }
        }
        self.settle_claims().await?;
        self.store.records_end_orphans(self.settings.clock.now_us()).await?;
        Ok(count)
    }

    /// Ends sandboxes at their deadlines until `stop` is cancelled.
    pub(crate) async fn enforce_deadlines(self: Arc<Self>, stop: CancellationToken) {
        loop {
            let due = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                due = self.deadlines.due(&self.settings.clock) => due,
            };
            for id in due {
                let Some(live) = self.live.get(&id) else { continue };
                let platform = Arc::clone(&self);
                self.work.spawn(async move { platform.expire(&live).await });
            }
        }
    }

    async fn expire(self: &Arc<Self>, live: &Arc<Live>) {
        // An extension that is under way wins: it holds the turn, and its client is about to be told that it worked.
        let _turn = live.turn.lock().await;
        if live.state() == State::Running && live.end_us() > self.settings.clock.now_us() {
            return;
        }
        self.begin_stop(live, EndReason::Expired);
    }

    /// Removes sandboxes that ended by themselves, until the node or `stop` ends it.
    pub(crate) async fn follow_exits(self: Arc<Self>, mut exits: mpsc::Receiver<SandboxExit>, stop: CancellationToken) {
        loop {
            let exit = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                exit = exits.recv() => exit,
            };
            let Some(SandboxExit { id }) = exit else { return };
            let Some(live) = self.live.get(&id) else { continue };
            match live.state() {
                // Its creator finds out and removes it.
                State::Creating => {
                    live.apply(Event::Failed);
                }
                State::Running => {
                    if live.apply(Event::Died) && live.state() == State::Gone {
                        tracing::info!(sandbox.id = %id, "sandbox ended by itself");
                        self.metrics.end(EndReason::Exited);
                        self.records.note(&id, &Happened::Ending(EndReason::Exited));
                        let platform = Arc::clone(&self);
                        self.work.spawn(async move { platform.forget(&id).await });
                    }
                }
                // Whoever ends it removes it.
                State::Stopping | State::Gone => {}
            }
        }
    }
}

/// Why the server could not take over what it found.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// The database failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The node failed.
    #[error(transparent)]
    Node(#[from] NodeError),
}

/// Tells how the end of a sandbox went, when dropped.
struct Ended {
    platform: Arc<Platform>,
    live: Arc<Live>,
    how: Stopped,
}

impl Drop for Ended {
    fn drop(&mut self) {
        if self.how == Stopped::Failed {
            let again_us = self.platform.settings.clock.now_us() + STOP_RETRY_US;
            self.platform.deadlines.set(&self.live.id, again_us);
        }
        self.live.set_stopped(self.how);
    }
}

fn check_runs(live: &Live) -> Result<(), ExtendError> {
    match live.state() {
        State::Running => Ok(()),
        State::Stopping => Err(ExtendError::Stopping),
        State::Creating | State::Gone => Err(ExtendError::Gone),
    }
}

/// The version to report for an agent. What comes from inside a sandbox is not repeated unless it is a plain version,
/// because SDKs parse it and break on anything else.
fn known_version(reported: &str) -> &str {
    let parts: Vec<&str> = reported.split('.').collect();
    let plain = parts.len() == 3
        && parts
            .iter()
            .all(|part| (1..=6).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_digit()));
    if plain { reported } else { agent::VERSION }
}

/// An error with its causes, on one line.
pub(crate) struct Chain<'a>(pub(crate) &'a (dyn std::error::Error + 'static));

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_versions_of_an_agent_are_repeated() {
        for (reported, want) in [
            ("0.6.13", "0.6.13"),
            ("1.2.3", "1.2.3"),
            ("", agent::VERSION),
            ("0.6", agent::VERSION),
            ("0.6.x", agent::VERSION),
            ("0..1", agent::VERSION),
            ("0.6.13\0", agent::VERSION),
        ] {
            assert_eq!(known_version(reported), want);
        }
    }
}

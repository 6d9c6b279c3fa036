//! The task that owns a sandbox, and what others may ask of it.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use model::id::SandboxId;
use model::log::Level;
use parking_lot::Mutex;
use protocol::node::{NodeError, SandboxExit, StartSandbox, StartedSandbox};
use runtime::driver::Sandbox;
use runtime::slot::Name;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::control::Control;
use crate::journal::Journal;
use crate::{AGENT_TIMEOUT, Shared, blocking, events, failed};

/// Shortest time between two attempts to talk to an agent or to give a sandbox a new spawner: a sandbox whose root
/// keeps killing its spawner costs the host no more than this.
const RETRY: Duration = Duration::from_millis(500);
/// Longest wait for the kernel to empty a dead sandbox's cgroups, in attempts of [`CLEAN_PAUSE`].
const CLEAN_ATTEMPTS: u32 = 2000;
const CLEAN_PAUSE: Duration = Duration::from_millis(5);

/// A sandbox as the rest of the node sees it.
#[derive(Debug)]
pub(crate) struct Owned {
    name: Name,
    sandbox: Arc<dyn Sandbox>,
    /// Turns true when the sandbox begins to end.
    ending: watch::Sender<bool>,
    /// Turns true when none of its processes runs any more.
    ended: watch::Sender<bool>,
    journal: Journal,
    /// Processes that the kernel had killed for want of memory when it was looked last; unknown before the first look
    /// at a sandbox that ran already.
    memory_kills: Mutex<Option<u64>>,
}

impl Owned {
    /// A sandbox that has just been made.
    pub(crate) fn fresh(name: Name, sandbox: Arc<dyn Sandbox>, journal: Journal) -> Self {
        Self::new(name, sandbox, journal, Some(0))
    }

    /// A sandbox of an earlier platform.
    pub(crate) fn adopted(name: Name, sandbox: Arc<dyn Sandbox>, journal: Journal) -> Self {
        let kills = sandbox.memory_kills().ok();
        Self::new(name, sandbox, journal, kills)
    }

    fn new(name: Name, sandbox: Arc<dyn Sandbox>, journal: Journal, memory_kills: Option<u64>) -> Self {
        Self {
            name,
            sandbox,
            ending: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            journal,
            memory_kills: Mutex::new(memory_kills),
        }
    }

    /// Writes down if the kernel has killed processes for want of memory since the last look. Takes some 10 µs.
    pub(crate) fn note_memory_kills(&self) {
        let mut noted = self.memory_kills.lock();
        let Ok(kills) = self.sandbox.memory_kills() else { return };
        let before = noted.replace(kills).unwrap_or(kills);
        if kills > before {
            let message = "the sandbox had used up its memory, and the kernel killed processes of it";
            let fields = [
                ("event_type", "out_of_memory".to_owned()),
                ("killed", (kills - before).to_string()),
            ];
            self.journal.host(Level::Warn, message, fields);
        }
    }

    pub(crate) fn id(&self) -> &SandboxId {
        &self.name.id
    }

    pub(crate) fn sandbox(&self) -> &Arc<dyn Sandbox> {
        &self.sandbox
    }

    pub(crate) fn is_ending(&self) -> bool {
        *self.ending.borrow()
    }

    pub(crate) fn ending(&self) -> watch::Receiver<bool> {
        self.ending.subscribe()
    }

    /// Asks for the end and waits until nothing runs any more. Any number of callers may.
    pub(crate) async fn kill(&self) {
        let mut ended = self.ended.subscribe();
        self.ending.send_replace(true);
        let _ = ended.wait_for(|ended| *ended).await;
    }
}

/// Starts a sandbox and introduces its agent. On an error nothing of it runs, but [`clean`] has work to do.
pub(crate) async fn start(
    shared: &Arc<Shared>,
    name: &Name,
    request: &StartSandbox,
) -> Result<(Arc<Owned>, Control, StartedSandbox), NodeError> {
    let driver = Arc::clone(&shared.driver);
    let (name_of_start, resources) = (name.clone(), request.resources);
    let started = blocking(move || driver.start(&name_of_start, &resources))
        .await
        .map_err(failed)?
        .map_err(failed)?;
    let before_init = Instant::now();
    let introduce = async {
        let mut control = Control::open(started.boot).await?;
        let version = control.init(&request.init).await?;
        io::Result::Ok((control, version))
    };
    match introduce.await {
        Ok((control, agent_version)) => {
            let mut stages = started.stages;
            stages.push(("init", before_init.elapsed()));
            let journal = Journal::new(name.id.clone(), shared.logs.clone());
            let fields = [
                ("event_type", "sandbox_start".to_owned()),
                ("template_id", request.template.to_string()),
                ("cpu_count", resources.cpu_count.to_string()),
                ("memory_mb", resources.memory_mb.to_string()),
                ("disk_mb", resources.disk_mb.to_string()),
            ];
            journal.host(Level::Info, "the sandbox started", fields);
            let owned = Arc::new(Owned::fresh(name.clone(), started.sandbox, journal));
            Ok((owned, control, StartedSandbox { agent_version, stages }))
        }
        Err(error) => {
            let sandbox = started.sandbox;
            blocking(move || sandbox.kill()).await.map_err(failed)?;
            Err(NodeError::Failed(format!("the agent did not answer: {error}")))
        }
    }
}

/// Owns a sandbox until nothing of it is left, or until the platform stops.
pub(crate) async fn own(shared: Arc<Shared>, owned: Arc<Owned>, control: Option<Control>, stop: CancellationToken) {
    let mut asked = owned.ending();
    let died = tokio::select! {
        biased;
        _ = asked.wait_for(|ending| *ending) => false,
        () = until_dead(&owned.sandbox) => true,
        () = attend(&shared, &owned, control) => true,
        () = stop.cancelled() => return,
    };
    owned.ending.send_replace(true);
    let sandbox = Arc::clone(&owned.sandbox);
    if let Err(error) = blocking(move || sandbox.kill()).await {
        tracing::error!(sandbox.id = %owned.name.id, "end a sandbox: {error}");
    }
    shared.sandboxes.lock().remove(&owned.name.id);
    owned.ended.send_replace(true);
    let fields = [("event_type", "sandbox_end".to_owned())];
    if !died {
        owned.journal.host(Level::Info, "the sandbox was ended", fields);
    } else {
        tracing::info!(sandbox.id = %owned.name.id, "the sandbox ended by itself");
        owned.journal.host(
            Level::Error,
            "the sandbox ended by itself: its first process is gone",
            fields,
        );
        let _ = shared
            .exits
            .send(SandboxExit {
                id: owned.name.id.clone(),
            })
            .await;
    }
    let name = owned.name.clone();
    drop(owned);
    clean(&shared, &name).await;
}

/// Removes what a dead sandbox left and frees its slot. The kernel empties cgroups a moment after the last process.
pub(crate) async fn clean(shared: &Arc<Shared>, name: &Name) {
    for _ in 0..CLEAN_ATTEMPTS {
        let (driver, name_of_clean) = (Arc::clone(&shared.driver), name.clone());
        if blocking(move || driver.clean(&name_of_clean)).await.unwrap_or(false) {
            shared.slots.lock().give_back(name.slot);
            return;
        }
        tokio::time::sleep(CLEAN_PAUSE).await;
    }
    // The slot stays taken: something that cannot be killed may still use its ids.
    tracing::error!(sandbox.id = %name.id, "processes of an ended sandbox do not go away; its slot stays in use");
}

async fn until_dead(sandbox: &Arc<dyn Sandbox>) {
    #[expect(
        deprecated,
        reason = "its successor is unsafe to call, and an OwnedFd keeps every promise it asks for"
    )]
    let watched = |fd| AsyncFd::with_interest(fd, Interest::READABLE);
    let watched = sandbox.ended().try_clone_to_owned().and_then(watched);
    match watched {
        Ok(fd) => {
            let _ = fd.readable().await;
        }
        Err(error) => {
            tracing::error!("watch a sandbox: {error}");
            std::future::pending().await
        }
    }
}

/// Listens to the agent for the log's sake, and gives the sandbox a new spawner whenever its own has ended. Runs for
/// ever.
async fn attend(shared: &Arc<Shared>, owned: &Arc<Owned>, mut control: Option<Control>) {
    let mut budget = events::Budget::new(tokio::time::Instant::now());
    loop {
        let followed = async {
            let mut control = match control.take() {
                Some(control) => control,
                None => reach(shared, owned).await?,
            };
            let body = control.events().await?;
            events::follow(body, &owned.journal, &mut budget, || owned.note_memory_kills()).await
        };
        match followed.await {
            Ok(()) => replace_spawner(owned).await,
            Err(error) => tracing::debug!(sandbox.id = %owned.name.id, "listen to the agent: {error}"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn replace_spawner(owned: &Arc<Owned>) {
    tracing::warn!(sandbox.id = %owned.name.id, "the spawner ended, starting another");
    // First the reason, if it was this one.
    owned.note_memory_kills();
    let message = "the process that starts commands is gone and is replaced";
    let fields = [("event_type", "spawner_replaced".to_owned())];
    owned.journal.host(Level::Warn, message, fields);
    let sandbox = Arc::clone(&owned.sandbox);
    if let Ok(Err(error)) | Err(error) = blocking(move || sandbox.respawn()).await {
        tracing::warn!(sandbox.id = %owned.name.id, "start a spawner: {error}");
        let message = "the process that starts commands could not be replaced; the next attempt follows";
        let fields = [("event_type", "spawner_failed".to_owned())];
        owned.journal.host(Level::Error, message, fields);
    }
}

/// Opens a control connection to the agent of a sandbox that runs already.
async fn reach(shared: &Arc<Shared>, owned: &Arc<Owned>) -> io::Result<Control> {
    let socket = owned.sandbox.control(&shared.maker)?;
    tokio::time::timeout(AGENT_TIMEOUT, Control::open(socket)).await?
}

//! The agent inside a sandbox: its pid 1. It starts and feeds processes, moves files, and reaps.
//!
//! Clients reach it over TCP, the host over a unix socket that nothing in the sandbox can use (`control`). It runs
//! as root of the sandbox, outside the cgroup whose limits hold the workload, so that it answers whatever the workload
//! does; the group around both has little more, so its own memory must be bounded, and processes are started by the
//! [`spawner`] instead.
//!
//! Invariants: one thread runs everything but file access; nothing is trusted that a process of the sandbox can write,
//! `/etc/passwd` included; no TLS, no SQL, no name lookups.

mod attributes;
mod caller;
mod clock;
mod directories;
mod given;
mod gzip;
mod paths;
mod quiet;
mod router;
mod services;
mod settings;
mod space;
pub mod spawner;
mod spawner_client;
mod sys;
mod transport;
mod trust;
mod users;

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use protocol::agent::{BOOT_FD, SPAWNER_FD};
use protocol::figures::FIGURES_FD;
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;
use tokio_util::task::TaskTracker;

use crate::caller::Accounts;
use crate::quiet::Quiet;
use crate::router::Router;
use crate::services::control::Control;
use crate::services::events::{EventQueue, EventService};
use crate::services::files::Files;
use crate::services::filesystem::Filesystem;
use crate::services::metrics::Metrics;
use crate::services::process::memory_kills::MemoryKills;
use crate::services::process::start::Starter;
use crate::services::process::table::Table;
use crate::services::process::{ProcessService, reaper};
use crate::services::socket_memory;
use crate::settings::AgentSettings;
use crate::spawner_client::SpawnerClient;
use crate::transport::messages::MessageMemory;
use crate::transport::rpc::Rpc;
use crate::transport::server;

/// Runs the agent; returns only when it cannot start.
///
/// Expects the host's control connection as [`BOOT_FD`], the spawner's socket as [`SPAWNER_FD`] and the questions for
/// figures as [`FIGURES_FD`]. Each may be missing: the host then comes by the control socket and connects
/// a spawner by another, and there are no questions for figures.
pub fn run() -> ExitCode {
    match start() {
        Ok(never) => match never {},
        Err(_) => ExitCode::FAILURE,
    }
}

fn start() -> io::Result<std::convert::Infallible> {
    // First of all, so that no file of ours takes one of these numbers.
    let boot = sys::adopt_fd(BOOT_FD).ok();
    let spawner = sys::adopt_fd(SPAWNER_FD).ok();
    let figures = sys::adopt_fd(FIGURES_FD).ok();
    sys::keep_heap_small();
    sys::ignore_signals();
    // Root in the sandbox has our user id; without this it could trace us, and so do all that we can.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    sys::stand_apart();
    raise_descriptor_limit();
    rustix::process::umask(rustix::fs::Mode::from_bits_retain(0o022));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        // Only for file access. They go when idle, because a thread's stack is memory of an idle sandbox.
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_secs(1))
        .build()?;
    LocalSet::new().block_on(&runtime, serve(boot, spawner, figures))
}

/// Raises the limit on open descriptors, of which many clients and processes share ours; what processes get is the
/// spawner's limit.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}

/// Makes the services, gives each what it needs, and opens the ways in.
async fn serve(
    boot: Option<OwnedFd>,
    spawner: Option<OwnedFd>,
    figures: Option<OwnedFd>,
) -> io::Result<std::convert::Infallible> {
    let tasks = TaskTracker::new();
    let settings = Rc::new(RefCell::new(AgentSettings::default()));
    let accounts = Rc::new(Accounts::new(settings.clone()));
    let memory = MessageMemory::default();
    let rpc = Rpc::new(memory.clone(), tasks.clone());
    let spawner = Rc::new(SpawnerClient::new(spawner)?);
    let quiet = Quiet::new(spawner.clone());
    let event_queue = Rc::new(EventQueue::default());
    let table = Rc::new(Table::default());
    let starter = Starter {
        accounts: accounts.clone(),
        settings: settings.clone(),
        spawner: spawner.clone(),
        event_queue: event_queue.clone(),
        table: table.clone(),
        memory_kills: MemoryKills::open(),
        tasks: tasks.clone(),
    };
    let router = Rc::new(Router {
        control: Control::new(settings.clone(), memory.clone(), tasks.clone()),
        events: EventService {
            event_queue: event_queue.clone(),
            spawner: spawner.clone(),
        },
        files: Files::new(accounts.clone(), settings.clone(), memory),
        filesystem: Filesystem::new(rpc.clone(), accounts.clone(), tasks.clone()),
        metrics: Metrics::new(settings.clone())?,
        processes: ProcessService {
            rpc,
            starter: Rc::new(starter),
            table: table.clone(),
        },
        accounts,
        settings,
    });

    if let Some(figures) = figures {
        tasks.spawn_local(quiet.serve_figures(figures));
    }
    tasks.spawn_local(quiet.clone().serve(tasks.clone(), table.clone()));
    let children = signal(SignalKind::child())?;
    if let Some(boot) = boot {
        let boot = StdUnixStream::from(boot);
        boot.set_nonblocking(true)?;
        tasks.spawn_local(server::serve_host(
            router.clone(),
            quiet.hold(),
            UnixStream::from_std(boot)?,
        ));
    }
    let listener = server::listen_control()?;
    tasks.spawn_local(server::serve_control(
        router.clone(),
        tasks.clone(),
        quiet.clone(),
        listener,
    ));
    let listener = server::listen_tcp()?;
    tasks.spawn_local(server::serve_tcp(router, tasks.clone(), quiet, listener));
    let client = spawner.clone();
    tasks.spawn_local(async move { client.run().await });
    tasks.spawn_local(socket_memory::watch(event_queue));
    reaper::run(children, &spawner, &table).await
}

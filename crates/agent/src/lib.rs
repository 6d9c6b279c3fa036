//! The agent inside a sandbox: its pid 1. It starts and feeds processes, moves files, and reaps.
//!
//! Clients reach it over TCP, the host over a unix socket that nothing in the sandbox can use (`control`). It runs
//! as root of the sandbox, outside the cgroup whose limits hold the workload, so that it answers whatever the workload
//! does; therefore its own memory must be bounded, and processes are started by the [`spawner`] instead.
//!
//! Invariants: one thread runs everything but file access; nothing is trusted that a process of the sandbox can write,
//! `/etc/passwd` included; no TLS, no SQL, no name lookups.

mod agent;
mod attributes;
mod control;
mod directories;
mod events;
mod files;
mod filesystem;
mod gzip;
mod http;
mod launcher;
mod metrics;
mod paths;
mod process;
mod rpc;
mod server;
mod settings;
pub mod spawner;
mod sys;
mod trust;
mod users;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use protocol::agent::{BOOT_FD, SPAWNER_FD};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;

use crate::agent::Agent;
use crate::server::Peer;

/// Runs the agent; returns only when it cannot start.
///
/// Expects the host's control connection as [`BOOT_FD`] and the spawner's socket as [`SPAWNER_FD`]. Either may be
/// missing: the host then comes by the control socket, and a spawner by its own.
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
    sys::keep_heap_small();
    sys::ignore_signals();
    // Root in the sandbox has our user id; without this it could trace us, and so do all that we can.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    raise_descriptor_limit();
    rustix::process::umask(rustix::fs::Mode::from_bits_retain(0o022));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        // Only for file access. They go when idle, because a thread's stack is memory of an idle sandbox.
        .max_blocking_threads(4)
        .thread_keep_alive(Duration::from_secs(1))
        .build()?;
    LocalSet::new().block_on(&runtime, serve(boot, spawner))
}

/// Our descriptors are many clients' and processes'; what processes get is the spawner's limit.
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

async fn serve(boot: Option<OwnedFd>, spawner: Option<OwnedFd>) -> io::Result<std::convert::Infallible> {
    let agent = Rc::new(Agent::new(spawner)?);
    let mut children = signal(SignalKind::child())?;
    if let Some(boot) = boot {
        let boot = StdUnixStream::from(boot);
        boot.set_nonblocking(true)?;
        agent.tasks.spawn_local(server::serve_connection(
            agent.clone(),
            UnixStream::from_std(boot)?,
            Peer::Host,
        ));
    }
    agent
        .tasks
        .spawn_local(server::serve_control(agent.clone(), server::listen_control()?));
    agent
        .tasks
        .spawn_local(server::serve_tcp(agent.clone(), server::listen_tcp()?));
    let launcher = agent.clone();
    agent.tasks.spawn_local(async move { launcher.launcher.run().await });
    loop {
        while reap(&agent) {
            tokio::task::yield_now().await;
        }
        children.recv().await;
    }
}

/// Reaps dead children, ours and those that lost their parent. Whether there may be more.
fn reap(agent: &Agent) -> bool {
    // Whoever makes processes faster than we reap them must not keep us from everything else.
    const AT_ONCE: usize = 256;
    let pending = agent.launcher.in_flight();
    if !pending {
        agent.processes.forget_orphans();
    }
    for _ in 0..AT_ONCE {
        let Some((pid, status)) = sys::reap_one() else {
            return false;
        };
        agent.processes.reaped(pid, status, pending);
    }
    true
}

//! The launcher: the process that clones sandboxes.
//!
//! Code after `clone` is only sound in a process with one thread, and the platform has many, so the platform executes
//! itself again as this process and sends it requests over a packet socket. It has its own mount namespace with a
//! handful of mounts, because a child's namespace starts as a copy of its parent's, and it keeps every descriptor it
//! needs open, because the host's paths are not reachable there. It ends when the platform closes the socket, even in
//! the middle of a start: every wait polls both.
//!
//! What a start and a restore have in common is in `prepare`, what each does with it in `start` and `restore`.
//!
//! Launchers that restore sandboxes (see `restore`) are others, so that no start waits for a restore. Another one only gives
//! new spawners to sandboxes that have lost theirs.

mod child;
mod fixtures;
mod held;
mod ids;
mod pages;
mod prepare;
mod program;
mod progress;
mod restore;
mod root;
mod spawner;
mod start;
mod steps;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitCode;
use std::sync::LazyLock;

use rustix::fs::CWD;

use self::held::Launcher;
use self::steps::During;
use crate::cgroup::open::OpenTree;
use crate::files::write_at;
use crate::slot::Name;
use crate::wire::{self, Hello, Reply, Request, Work};
use crate::{archive, checkpoint, commit, rebase, schedule, seccomp, setup, sys};

/// Runs a launcher on the socket that is its standard input, until the platform closes it.
#[must_use]
pub fn main() -> ExitCode {
    let memory = program::in_memory();
    let socket = match rustix::io::fcntl_dupfd_cloexec(io::stdin(), setup::ABOVE_PLACES) {
        Ok(socket) => socket,
        Err(_) => return ExitCode::FAILURE,
    };
    match serve(&socket, memory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The platform, waiting for the first reply, includes this in its own error.
            let _ = wire::send_message(&socket, &Reply::Failed(error.to_string()), &[]);
            ExitCode::FAILURE
        }
    }
}

fn serve(socket: &OwnedFd, memory: Option<OwnedFd>) -> io::Result<()> {
    sys::ignore_children();
    // A new session: input on the platform's terminal is for the platform only, and a launcher ends when its socket
    // closes. Cannot fail: a new process does not lead a group.
    let _ = rustix::process::setsid();
    sys::hide_memory()?;
    // Where the kernel rejects it, starts are only slower.
    let _ = schedule::platform();
    // Attached are entries of the registry, which stay locked while this process lives.
    let Some((hello, _entries)) = wire::receive_message::<Hello>(socket)? else {
        return Ok(());
    };
    let in_cpuset = hello.tree.join_cpuset();
    let tree = OpenTree::open(&hello.tree, in_cpuset).during("open the cgroups")?;
    tree.join_v1().during("join the cgroups")?;
    LazyLock::force(&seccomp::PROGRAM);
    reset_oom_score().during("reset oom_score_adj")?;
    match hello.work {
        Work::Sandboxes | Work::Restores => {
            let mut launcher = Launcher::prepare(&hello, tree, in_cpuset, memory)?;
            serve_sandboxes(&mut launcher, socket)
        }
        Work::Spawners => spawner::serve(socket, &tree, hello.settings.open_files),
        Work::Commit => commit::serve(socket, &hello.settings.data_dir),
        Work::Rebase => rebase::serve(socket, &hello.settings.data_dir),
        Work::Dump => checkpoint::dump::serve(socket, &hello.tree),
        Work::Facts => {
            drop(tree);
            checkpoint::facts::serve(socket)
        }
        Work::Archive => {
            // The process keeps no directory of the host.
            drop(tree);
            archive::serve(socket, &hello.settings.data_dir)
        }
    }
}

/// Starts and restores sandboxes as the platform asks for it.
fn serve_sandboxes(launcher: &mut Launcher, socket: &OwnedFd) -> io::Result<()> {
    wire::send_message(socket, &Reply::Ready, &[])?;
    let mut disk_mb = None;
    loop {
        launcher.prepare_next(disk_mb.take(), socket);
        // The entries of the registry stay locked until processes show that the ids are in use.
        let Some((request, _entries)) = wire::receive_message::<Request>(socket)? else {
            return Ok(());
        };
        let Request::Start {
            name,
            base_id,
            rootfs,
            resources,
            on_kept_disk,
            processes,
        } = request
        else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        disk_mb = (!on_kept_disk).then_some(resources.disk_mb);
        let started = Name::parse(&name).ok_or(io::ErrorKind::InvalidInput.into());
        let started = started.and_then(|name| match &processes {
            None => launcher.start(&name, base_id, &rootfs, on_kept_disk, &resources, socket.as_fd()),
            Some(checkpoint) => launcher.restore(&name, base_id, &rootfs, &resources, checkpoint, socket.as_fd()),
        });
        let (reply, fds) = started.unwrap_or_else(|error| (Reply::Failed(error.to_string()), Vec::new()));
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        wire::send_message(socket, &reply, &fds)?;
    }
}

/// A service manager may have protected the platform from the OOM killer. Sandboxes must not inherit that, nor be able
/// to restore it.
fn reset_oom_score() -> io::Result<()> {
    const FILE: &str = "/proc/self/oom_score_adj";
    if std::fs::read_to_string(FILE)?.starts_with('-') {
        write_at(CWD, FILE, "0")
    } else {
        Ok(())
    }
}

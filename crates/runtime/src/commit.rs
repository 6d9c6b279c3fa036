//! The process that stores what a sandbox wrote as a layer.
//!
//! It is a process of its own, with one thread, for the same reason as launchers: it holds the mount of a disk that a
//! sandbox had, which nothing else may see, and which ends with it, with the loop device, however it ends. The mount is
//! attached to no mount tree. The platform kills it at its deadline; it ends by itself when the platform does, and the
//! next platform waits for that, because it holds the lock of launchers.
//!
//! The tree is hostile, but no longer changes: the disk is mounted read-only, and no sandbox has it.

pub(crate) mod budget;
pub(crate) mod copy;
pub(crate) mod failure;
pub(crate) mod tree;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use model::id::LayerId;
use rustix::fs::{Mode, OFlags};
use rustix::mount::MountPropagationFlags;

use self::budget::Budget;
use self::copy::Copy;
use self::failure::Failure;
use self::tree::Walk;
use crate::disk::{self, Loops};
use crate::files::{open_dir, open_dir_at};
use crate::layers::{BYTES, Layers};
use crate::sys;
use crate::wire::{self, Commit, Reply, Request};

/// Open files that the process may have: some for each level of directories and each layer.
pub(crate) const OPEN_FILES: u64 = 65_536;

/// Serves one request.
pub(crate) fn serve(socket: &OwnedFd, data_dir: &Path) -> io::Result<()> {
    sys::unshare(libc::CLONE_NEWNS)?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    sys::limit(libc::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)?;
    // Files get their modes when they are complete.
    rustix::process::umask(Mode::from_raw_mode(0o077));
    let data = open_dir(data_dir)?;
    let layers = open_dir(&Layers::path(data_dir))?;
    wire::send_message(socket, &Reply::Ready, &[])?;
    let request = wire::receive_message::<Request>(socket)?.map(|(request, _)| request);
    let Some(Request::Commit(order)) = request else {
        return Ok(());
    };
    let budget = Budget {
        platform: socket.as_fd(),
        layers: layers.as_fd(),
        keep_free_bytes: order.keep_free_bytes,
    };
    let reply = match commit(data.as_fd(), &order, &budget) {
        Ok((layer, bytes)) => Reply::Committed { layer, bytes },
        Err(failure) => failure.reply(),
    };
    wire::send_message(socket, &reply, &[])
}

fn commit(data: BorrowedFd<'_>, order: &Commit, budget: &Budget<'_>) -> Result<(LayerId, u64), Failure> {
    budget.check()?;
    let image = rustix::fs::openat(
        data,
        disk::path_of(&order.disk),
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mount = Loops::open(Path::new("/dev"))?.mount_to_read(image.as_fd())?;
    drop(image);
    store(mount.as_fd(), order, budget)
}

/// Copies sources below `mount` and the layers below them to a new directory, and writes it out.
fn store(mount: BorrowedFd<'_>, order: &Commit, budget: &Budget<'_>) -> Result<(LayerId, u64), Failure> {
    let mode = Mode::from_raw_mode(0o700);
    rustix::fs::mkdirat(budget.layers, &order.unfinished, mode)?;
    let layer = open_dir_at(budget.layers, &order.unfinished)?;
    let mut walk = Walk::begin(Copy::begin(layer.as_fd())?, budget, false);
    if order.has_processes {
        walk.leave_out_remaps();
    }
    for source in &order.sources {
        let part = source.part.as_str();
        let mut trees = vec![open_dir_at(mount, &format!("{}/upper", source.upper))?];
        for below in &source.layers {
            trees.push(open_dir_at(budget.layers, &format!("{below}/{part}"))?);
        }
        walk.tree(source.part, trees, source.has_below)?;
    }
    let (id, bytes, copy) = walk.finish();
    copy.finish()?;
    write_out(&layer, bytes)?;
    budget.check()?;
    Ok((id, bytes))
}

/// Writes the size of a layer into it, and all of it to the disk.
pub(crate) fn write_out(layer: &OwnedFd, bytes: u64) -> Result<(), Failure> {
    let size = rustix::fs::openat(
        layer,
        BYTES,
        OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::from_raw_mode(0o600),
    )?;
    io::Write::write_all(&mut std::fs::File::from(size), format!("{bytes}\n").as_bytes())?;
    // One call for all files: writing out each of them would take a multiple of the time.
    Ok(rustix::fs::syncfs(layer)?)
}

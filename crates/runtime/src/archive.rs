//! The processes that write a stored layer as an archive, and make a layer of one.
//!
//! An archive is a tar file that is compressed with zstd. It has what a layer has, in the order in which the layer is
//! hashed: owners, modes, attributes, hard links, whiteouts as devices 0:0, directories that hide what lies below with
//! the attribute of overlayfs. The same layer has the same archive.
//!
//! Archives are untrusted: they come from object stores, registries and files. They are read in a process of their own
//! that sees nothing of the host: its root is the new layer, it has no network, few capabilities, and the filter of
//! system calls that sandboxes have. Then the layer is read and hashed like one that is committed, and refused unless
//! it is the one that was asked for. What the hash does not cover are times.

mod pack;
mod tar;
mod unpack;
mod zstd;

use std::fs::File;
use std::io::{self, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use model::id::LayerId;
use rustix::fs::Mode;
use rustix::mount::MountPropagationFlags;

use self::pack::Archive;
use self::unpack::Unpack;
use self::zstd::{Decoder, Encoder};
use crate::commit::budget::Budget;
use crate::commit::copy::Copy;
use crate::commit::failure::Failure;
use crate::commit::tree::{Nothing, Sink, Walk};
use crate::commit::{OPEN_FILES, write_out};
use crate::files::{if_there, open_dir, open_dir_at};
use crate::layers::Layers;
use crate::rootfs::Part;
use crate::seccomp;
use crate::sys;
use crate::wire::{self, Reply, Request};

/// Size in which archives are read, in bytes.
const BUFFER: usize = 128 << 10;
/// Capabilities to write the files of a layer: CHOWN 0, DAC_OVERRIDE 1, FOWNER 3, FSETID 4, MKNOD 27, SETFCAP 31; and
/// SYS_ADMIN 21, which the attributes of overlayfs require. The filter refuses what else SYS_ADMIN would allow.
const CAPABILITIES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 21 | 1 << 27 | 1 << 31;

/// Serves one request.
pub(crate) fn serve(socket: &OwnedFd, data_dir: &Path) -> io::Result<()> {
    sys::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC)?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    sys::limit(libc::RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)?;
    rustix::process::umask(Mode::from_raw_mode(0o077));
    let layers = open_dir(&Layers::path(data_dir))?;
    wire::send_message(socket, &Reply::Ready, &[])?;
    let Some((request, stream)) = wire::receive_message::<Request>(socket)? else {
        return Ok(());
    };
    let stream = stream.into_iter().next();
    let done = match (request, stream) {
        (Request::Pack { layer }, Some(to)) => pack(socket, layers, &layer, to),
        (Request::Unpack(order), Some(from)) => unpack(socket, layers, &order, from),
        _ => return Ok(()),
    };
    let reply = match done {
        Ok(reply) => reply,
        Err(failure) => tar::of_stream(failure).reply(),
    };
    wire::send_message(socket, &reply, &[])
}

/// Makes a directory all that the process can see, and what works there all that it can do. Of its descriptors, none
/// other is a directory.
fn confine(layer: &OwnedFd) -> Result<(), Failure> {
    rustix::process::fchdir(layer)?;
    rustix::process::chroot(".")?;
    rustix::process::chdir("/")?;
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1)?;
    sys::install_seccomp(&seccomp::PROGRAM)?;
    Ok(sys::set_capabilities(CAPABILITIES)?)
}

fn pack(socket: &OwnedFd, layers: OwnedFd, id: &LayerId, to: OwnedFd) -> Result<Reply, Failure> {
    let layer = open_dir_at(layers.as_fd(), id.as_str())?;
    drop(layers);
    confine(&layer)?;
    let budget = Budget {
        platform: socket.as_fd(),
        layers: layer.as_fd(),
        keep_free_bytes: 0,
    };
    let to = Encoder::new(File::from(to));
    let (read, _, archive) = read_stored(&layer, Archive::new(to), &budget)?;
    if read != *id {
        let why = "its files have changed since it was stored, or an earlier version of the platform stored it";
        return Err(Failure::Refused(why.to_owned()));
    }
    archive.finish()?.finish()?.flush()?;
    Ok(Reply::Done)
}

fn unpack(socket: &OwnedFd, layers: OwnedFd, order: &wire::Unpack, from: OwnedFd) -> Result<Reply, Failure> {
    rustix::fs::mkdirat(&layers, &order.unfinished, Mode::from_raw_mode(0o700))?;
    let layer = open_dir_at(layers.as_fd(), &order.unfinished)?;
    drop(layers);
    confine(&layer)?;
    let budget = Budget {
        platform: socket.as_fd(),
        layers: layer.as_fd(),
        keep_free_bytes: order.keep_free_bytes,
    };
    budget.check()?;
    let archive = Decoder::new(BufReader::with_capacity(BUFFER, File::from(from)));
    let archive = BufReader::with_capacity(BUFFER, archive);
    Unpack::new(archive, Copy::begin(layer.as_fd())?, &budget, order.bytes).run()?;
    let (read, bytes, _) = read_stored(&layer, Nothing, &budget)?;
    if read != order.layer {
        return Err(Failure::Refused(format!("its content is that of layer {read}")));
    }
    write_out(&layer, bytes)?;
    budget.check()?;
    Ok(Reply::Committed { layer: read, bytes })
}

/// Reads a stored layer. Returns its id as it is now, and its size.
fn read_stored<S: Sink>(layer: &OwnedFd, sink: S, budget: &Budget<'_>) -> Result<(LayerId, u64, S), Failure> {
    let mut walk = Walk::begin(sink, budget, true);
    for part in [Part::Root, Part::Usr] {
        if let Some(tree) = if_there(open_dir_at(layer.as_fd(), part.as_str()))? {
            walk.tree(part, vec![tree], true)?;
        }
    }
    Ok(walk.finish())
}

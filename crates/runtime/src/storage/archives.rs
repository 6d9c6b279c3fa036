//! Layers that are made: of disks, and of archives, which they also become. Processes of their own do it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use model::id::LayerId;
use protocol::node::Committed;

use super::opened::Storage;
use crate::stored::{CommitRequest, LayerError, UnpackRequest};
use crate::wire::{Commit, Reply, Request, Unpack, Work};

/// How long a disk may take to be written out after its sandbox has ended, and to be copied.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// How long an archive of a layer may take to be read or written, its transfer included.
const ARCHIVE_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// Why a process has not done what it was asked for.
fn failure(reply: Reply) -> LayerError {
    match reply {
        Reply::Refused(why) => LayerError::Refused(why),
        Reply::Full(why) => LayerError::Full(why),
        Reply::Failed(why) => io::Error::other(why).into(),
        _ => io::Error::other("unexpected reply").into(),
    }
}

impl Storage {
    /// Stores what a sandbox that has ended wrote as a layer, or what is on a copy of a disk
    /// ([`Sandbox::copy_disk`](crate::driver::Sandbox::copy_disk)). The disk remains. Blocks for as long as it takes to
    /// copy, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`LayerError`] says whether the sandbox, the host or the platform is the reason. Nothing is left of the attempt.
    pub fn commit(&self, request: &CommitRequest, is_cancelled: &dyn Fn() -> bool) -> Result<Committed, LayerError> {
        let helpers = self.helpers()?;
        let deadline = Instant::now() + COMMIT_TIMEOUT;
        let sources = self.layers.rootfs_of(&request.disk)?.sources(request.merge);
        self.wait_for_disk(&request.disk, deadline, is_cancelled)?;
        let unfinished = self.layers.begin()?;
        let order = Request::Commit(Commit {
            disk: request.disk.clone(),
            sources,
            unfinished: unfinished.name().to_owned(),
            keep_free_bytes: request.keep_free_bytes,
            has_processes: request.has_processes,
        });
        match helpers.request_once(Work::Commit, order.alone(), deadline, is_cancelled)? {
            Reply::Committed { layer, bytes } => {
                let bytes = unfinished.finish(&layer, bytes)?;
                Ok(Committed { layer, bytes })
            }
            other => Err(failure(other)),
        }
    }

    /// Writes a layer as an archive to a pipe or file. Blocks until all is written, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`LayerError`] says why. What was written then is incomplete.
    pub fn pack_layer(&self, layer: &LayerId, to: OwnedFd, is_cancelled: &dyn Fn() -> bool) -> Result<(), LayerError> {
        if !self.layers.has(layer) {
            return Err(LayerError::NoLayer(layer.clone()));
        }
        let order = Request::Pack { layer: layer.clone() };
        match self.archive(&order, to, is_cancelled)? {
            Reply::Done => Ok(()),
            other => Err(failure(other)),
        }
    }

    /// Makes a layer of an archive, which is untrusted: nothing but the files of that layer can come of it. Returns the
    /// size of the layer. One that exists is kept. Blocks for as long as it takes to read, or until `is_cancelled`.
    ///
    /// # Errors
    /// [`LayerError`] says why. Nothing is left of the attempt.
    pub fn unpack_layer(
        &self,
        request: &UnpackRequest,
        from: OwnedFd,
        is_cancelled: &dyn Fn() -> bool,
    ) -> Result<u64, LayerError> {
        let unfinished = self.layers.begin()?;
        let order = Request::Unpack(Unpack {
            layer: request.layer.clone(),
            unfinished: unfinished.name().to_owned(),
            bytes: request.bytes,
            keep_free_bytes: request.keep_free_bytes,
        });
        match self.archive(&order, from, is_cancelled)? {
            Reply::Committed { layer, bytes } if layer == request.layer => Ok(unfinished.finish(&layer, bytes)?),
            other => Err(failure(other)),
        }
    }

    /// Runs a process that reads or writes an archive. Afterwards the only ends of a pipe are that of the process and that
    /// of the caller.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "it is closed here, so that the other end sees that it ends"
    )]
    fn archive(&self, order: &Request, stream: OwnedFd, is_cancelled: &dyn Fn() -> bool) -> io::Result<Reply> {
        let deadline = Instant::now() + ARCHIVE_TIMEOUT;
        let fds = [stream.as_fd()];
        self.helpers()?
            .request_once(Work::Archive, order.with(&fds), deadline, is_cancelled)
    }
}

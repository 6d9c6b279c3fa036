//! Archives of layers: written to whoever reads them, and read from anybody.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use model::id::LayerId;
use protocol::node::{Committed, Failure, LayerStream, NodeError};
use runtime::stored::{LayerError, UnpackRequest};
use tokio::io::{AsyncRead, AsyncReadExt as _, ReadBuf};
use tokio::net::unix::pipe;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use crate::shared::Shared;
use crate::work::{blocking, failed, layer_error};

/// Archives that are written or read at the same time. Each is a process that compresses or hashes.
pub(crate) const ARCHIVES: usize = 2;

/// An archive that is being written by a process.
#[derive(Debug)]
struct Export {
    pipe: pipe::Receiver,
    /// None once it has ended well.
    process: Option<JoinHandle<Result<(), LayerError>>>,
    _permit: OwnedSemaphorePermit,
}

impl AsyncRead for Export {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.pipe).poll_read(cx, buf))?;
        if buf.filled().len() > before || buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        // The process has closed its end, which says nothing about how it ended.
        if let Some(process) = &mut this.process {
            let ended = ready!(Pin::new(process).poll(cx)).map_err(io::Error::other)?;
            ended.map_err(io::Error::other)?;
            this.process = None;
        }
        Poll::Ready(Ok(()))
    }
}

/// Begins to write an archive. The process ends when the stream is dropped.
pub(crate) async fn export(shared: Arc<Shared>, layer: LayerId) -> Result<LayerStream, NodeError> {
    let permit = Arc::clone(&shared.archives).acquire_owned().await.map_err(failed)?;
    let (to, pipe) = pipe::pipe().map_err(failed)?;
    let to = to.into_blocking_fd().map_err(failed)?;
    let (driver, stop) = (Arc::clone(&shared.driver), shared.stop.clone());
    let process = tokio::task::spawn_blocking(move || driver.storage().pack_layer(&layer, to, &|| stop.is_cancelled()));
    let mut export = Export {
        pipe,
        process: Some(process),
        _permit: permit,
    };
    // A process that fails before it writes anything is an error of the call, and not of the stream.
    let mut first = [0; 1];
    let read = loop {
        export.pipe.readable().await.map_err(failed)?;
        match export.pipe.try_read(&mut first) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            read => break read.map_err(failed)?,
        }
    };
    if read == 0
        && let Some(process) = export.process.take()
    {
        process.await.map_err(failed)?.map_err(layer_error)?;
    }
    let first = io::Cursor::new(first[..read].to_vec());
    Ok(LayerStream::new(first.chain(export)))
}

/// Makes a layer of an archive. If the caller goes away, nothing is left of it.
pub(crate) async fn import(
    shared: &Shared,
    layer: &LayerId,
    bytes: u64,
    mut archive: LayerStream,
) -> Result<Committed, NodeError> {
    let _permit = shared.archives.acquire().await.map_err(failed)?;
    let request = UnpackRequest {
        layer: layer.clone(),
        bytes,
        // Space that is promised to sandboxes is not free, even if it is not written yet.
        keep_free_bytes: shared.keep_free_bytes(),
    };
    let (mut to, from) = pipe::pipe().map_err(failed)?;
    let from = from.into_blocking_fd().map_err(failed)?;
    let (driver, stop) = (Arc::clone(&shared.driver), shared.stop.clone());
    let unpack = blocking(move || driver.storage().unpack_layer(&request, from, &|| stop.is_cancelled()));
    let copy = async move {
        let copied = tokio::io::copy(&mut archive, &mut to).await;
        // The process finds the end of the archive.
        drop(to);
        copied
    };
    tokio::pin!(unpack, copy);
    let (unpacked, copied) = tokio::select! {
        unpacked = &mut unpack => (unpacked, Ok(0)),
        copied = &mut copy => (unpack.await, copied),
    };
    // A process that refuses an archive does not read the rest of it.
    if let Err(error) = copied
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        return Err(NodeError::Failed(Failure::during(
            "read the archive of a layer",
            &error,
        )));
    }
    let bytes = unpacked.map_err(failed)?.map_err(layer_error)?;
    Ok(Committed {
        layer: layer.clone(),
        bytes,
    })
}

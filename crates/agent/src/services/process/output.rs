//! What a process writes: read whether there are listeners or not, and handed to all of them.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use bytes::Bytes;
use tokio::io::unix::AsyncFd;

use super::stdio::{PIPE_CHUNK, Source};
use super::table::{Process, Table};

/// The most that is read after the end of a process was forced: what a pipe can hold.
const LAST_WORDS: usize = 64 * 1024;

/// Reads until the end of the output, or until the process was ended by force and what it left is read.
///
/// With `until_exit` it ends with the process and what was written before; the result is the output, if it is still open.
pub(super) async fn relay(
    table: Rc<Table>,
    file: Rc<AsyncFd<OwnedFd>>,
    source: Source,
    process: Rc<Process>,
    until_exit: bool,
) -> Option<Rc<AsyncFd<OwnedFd>>> {
    loop {
        let limit = source.chunk().min(table.event_limit());
        let bytes = tokio::select! {
            biased;
            // First, because others may never stop writing.
            () = process.reaped(), if until_exit => return rest(file, source, &process, limit).await,
            bytes = read(&file, limit) => bytes,
            () = process.cut() => break,
        };
        let event = source.event(bytes?);
        process.count(&event);
        tokio::select! {
            biased;
            () = process.publish(event) => {}
            () = process.cut() => break,
        }
    }
    let mut left = LAST_WORDS;
    while left > 0
        && let Ok(Some(bytes)) = read_now(file.get_ref(), source.chunk().min(left))
    {
        left -= bytes.len();
        let event = source.event(bytes);
        process.count(&event);
        process.publish_now(&event);
    }
    None
}

/// Reads what is in the pipe of a process that has ended, and nothing that is written later. The output, if it is still
/// open.
async fn rest(
    file: Rc<AsyncFd<OwnedFd>>,
    source: Source,
    process: &Process,
    limit: usize,
) -> Option<Rc<AsyncFd<OwnedFd>>> {
    let waiting = rustix::io::ioctl_fionread(file.get_ref()).unwrap_or(0);
    let mut left = usize::try_from(waiting).unwrap_or(usize::MAX);
    while left > 0 {
        let bytes = match read_now(file.get_ref(), limit.min(left)) {
            Ok(bytes) => bytes?,
            // Another process took it.
            Err(_) => break,
        };
        left -= bytes.len();
        let event = source.event(bytes);
        process.count(&event);
        tokio::select! {
            biased;
            () = process.publish(event) => {}
            () = process.cut() => break,
        }
    }
    Some(file)
}

/// Reads output that is for no client, so that those who write it do not wait.
pub(super) async fn discard(file: Rc<AsyncFd<OwnedFd>>) {
    while read(&file, PIPE_CHUNK).await.is_some() {
        // Others may never stop writing.
        tokio::task::yield_now().await;
    }
}

/// Reads some output; `None` at its end.
async fn read(file: &AsyncFd<OwnedFd>, limit: usize) -> Option<Bytes> {
    loop {
        let mut ready = file.readable().await.ok()?;
        if let Ok(result) = ready.try_io(|file| read_now(file.get_ref(), limit)) {
            return result.ok().flatten();
        }
    }
}

fn read_now(file: &OwnedFd, limit: usize) -> io::Result<Option<Bytes>> {
    // One buffer on the stack for all processes: a buffer in each reader would be memory that idle ones hold.
    let mut buffer = [0; PIPE_CHUNK];
    match rustix::io::read(file, &mut buffer[..limit]) {
        Ok(0) => Ok(None),
        Ok(length) => Ok(Some(Bytes::copy_from_slice(&buffer[..length]))),
        // How a terminal reports that no process has it open any more.
        Err(rustix::io::Errno::IO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

//! The methods that write to what a process reads: `SendInput`, `StreamInput` and `CloseStdin`.

use std::io;
use std::os::fd::OwnedFd;

use protocol::connect::{Code, Error};
use protocol::process::{CloseStdinRequest, Empty, ProcessInput, SendInputRequest, StreamInputRequest};
use tokio::io::unix::AsyncFd;

use super::input::Input;
use super::table::{Process, Table};
use crate::transport::rpc::Inbox;

/// Serves `SendInput`.
pub(super) async fn send(table: &Table, message: SendInputRequest) -> Result<Empty, Error> {
    let process = table.find_live(message.process.as_ref())?;
    write(&process, message.input.unwrap_or_default()).await?;
    Ok(Empty {})
}

/// Serves `StreamInput`. The next piece is not read before the process took the last, so a client that sends faster
/// than it reads has to wait.
pub(super) async fn stream(table: &Table, inbox: &mut Inbox) -> Result<Empty, Error> {
    let mut process = None;
    while let Some(received) = inbox.next::<StreamInputRequest>().await? {
        match &received.message {
            StreamInputRequest { start: Some(start), .. } => {
                process = Some(table.find_live(start.process.as_ref())?);
            }
            StreamInputRequest { data: Some(data), .. } => {
                let early = || Error::new(Code::InvalidArgument, "input before the process was named");
                let process = process.as_ref().ok_or_else(early)?;
                write(process, data.input.clone().unwrap_or_default()).await?;
            }
            StreamInputRequest {
                keepalive: Some(Empty {}),
                ..
            } => {}
            StreamInputRequest { .. } => {
                let message = "invalid event type: neither start nor data nor keepalive is set";
                return Err(Error::new(Code::Unimplemented, message));
            }
        }
    }
    Ok(Empty {})
}

/// Writes all of an input, once those before it are written.
async fn write(process: &Process, input: ProcessInput) -> Result<(), Error> {
    let written = match (&process.input, input) {
        (Input::Terminal(..), ProcessInput { stdin: Some(_), .. }) => Err((
            "stdin",
            "tty assigned to process — input should be written to the pty, not the stdin".to_owned(),
        )),
        (Input::Nothing, ProcessInput { stdin: Some(_), .. }) => Err(("stdin", CLOSED.to_owned())),
        (Input::Pipe(_, turn), ProcessInput { stdin: Some(bytes), .. }) => {
            let written = until_over(process, async {
                let _turn = turn.lock().await;
                match process.input.pipe() {
                    None => Ok(false),
                    Some(pipe) => write_all(&pipe, &bytes).await.map(|()| true),
                }
            });
            match written.await {
                Ok(true) => Ok(()),
                Ok(false) => Err(("stdin", CLOSED.to_owned())),
                Err(error) => {
                    let reason = format!("error writing to stdin of process '{}': {error}", process.pid);
                    Err(("stdin", reason))
                }
            }
        }
        (Input::Terminal(terminal, turn), ProcessInput { pty: Some(bytes), .. }) => {
            let written = until_over(process, async {
                let _turn = turn.lock().await;
                write_all(terminal, &bytes).await
            });
            written.await.map_err(|error| ("tty", error.to_string()))
        }
        (Input::Nothing | Input::Pipe(..), ProcessInput { pty: Some(_), .. }) => Err((
            "tty",
            "tty not assigned to process — input should be written to the stdin, not the tty".to_owned(),
        )),
        (_, ProcessInput { stdin: None, pty: None }) => {
            return Err(Error::new(
                Code::Unimplemented,
                "invalid input type: neither stdin nor pty is set",
            ));
        }
    };
    written.map_err(|(what, reason)| Error::new(Code::Internal, format!("error writing to {what}: {reason}")))
}

/// Runs a write, unless the process ends first: a descendant may hold its input open and never read it.
async fn until_over<T>(process: &Process, write: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::select! {
        biased;
        written = write => written,
        () = process.over() => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the process has ended")),
    }
}

const CLOSED: &str = "stdin not enabled or closed";

/// Serves `CloseStdin`.
pub(super) async fn close(table: &Table, message: CloseStdinRequest) -> Result<Empty, Error> {
    let process = table.find_live(message.process.as_ref())?;
    match &process.input {
        Input::Nothing => Ok(Empty {}),
        Input::Pipe(pipe, turn) => {
            let _turn = turn.lock().await;
            drop(pipe.take());
            Ok(Empty {})
        }
        Input::Terminal(..) => Err(Error::new(
            Code::Unknown,
            "error closing stdin: cannot close stdin for PTY process — send Ctrl+D (0x04) instead",
        )),
    }
}

async fn write_all(file: &AsyncFd<OwnedFd>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let mut ready = file.writable().await?;
        if let Ok(written) = ready.try_io(|file| Ok(rustix::io::write(file, bytes)?)) {
            bytes = &bytes[written?..];
        }
    }
    Ok(())
}

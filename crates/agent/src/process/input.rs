//! What a process reads: a pipe, a terminal, or nothing.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use protocol::connect::{Code, Error};
use protocol::process::{CloseStdinRequest, Empty, ProcessInput, SendInputRequest};
use tokio::io::AsyncWriteExt;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::Mutex;

use crate::rpc::Call;

/// The agent's end of a process's input.
pub(crate) enum Input {
    /// `/dev/null` from the start.
    Nothing,
    /// A pipe; none once it was closed. Writers queue here, so that inputs stay whole and in order.
    Pipe(Mutex<Option<pipe::Sender>>),
    /// The master side of a terminal. Writers queue as well.
    Terminal(Rc<AsyncFd<OwnedFd>>, Mutex<()>),
}

impl Input {
    /// The terminal, if it is one.
    pub(crate) fn terminal(&self) -> Option<&AsyncFd<OwnedFd>> {
        match self {
            Self::Terminal(terminal, _) => Some(terminal),
            Self::Nothing | Self::Pipe(_) => None,
        }
    }
}

/// `SendInput`.
pub(super) async fn send(call: &Call, message: SendInputRequest) -> Result<Empty, Error> {
    let process = call.agent.processes.find_live(message.process.as_ref())?;
    let input = message.input.unwrap_or_default();
    let written = match (&process.input, input) {
        (Input::Terminal(..), ProcessInput { stdin: Some(_), .. }) => Err((
            "stdin",
            "tty assigned to process — input should be written to the pty, not the stdin".to_owned(),
        )),
        (Input::Nothing, ProcessInput { stdin: Some(_), .. }) => Err(("stdin", CLOSED.to_owned())),
        (Input::Pipe(pipe), ProcessInput { stdin: Some(bytes), .. }) => {
            // A process that is over does not empty its pipe any more, though a descendant may hold it open.
            let mut pipe = pipe.lock().await;
            match &mut *pipe {
                None => Err(("stdin", CLOSED.to_owned())),
                Some(pipe) => {
                    let explain = |error| format!("error writing to stdin of process '{}': {error}", process.pid);
                    pipe.write_all(&bytes).await.map_err(|error| ("stdin", explain(error)))
                }
            }
        }
        (Input::Terminal(terminal, turn), ProcessInput { pty: Some(bytes), .. }) => {
            let _turn = turn.lock().await;
            write_all(terminal, &bytes)
                .await
                .map_err(|error| ("tty", error.to_string()))
        }
        (Input::Nothing | Input::Pipe(_), ProcessInput { pty: Some(_), .. }) => Err((
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
    match written {
        Ok(()) => Ok(Empty {}),
        Err((what, reason)) => Err(Error::new(Code::Internal, format!("error writing to {what}: {reason}"))),
    }
}

const CLOSED: &str = "stdin not enabled or closed";

/// `CloseStdin`.
pub(super) async fn close(call: &Call, message: CloseStdinRequest) -> Result<Empty, Error> {
    let process = call.agent.processes.find_live(message.process.as_ref())?;
    match &process.input {
        Input::Nothing => Ok(Empty {}),
        Input::Pipe(pipe) => {
            drop(pipe.lock().await.take());
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

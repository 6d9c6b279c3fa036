//! The service `process.Process`.
//!
//! A process has one record ([`table::Process`]) from its start to its end event. Its output is read whether there
//! are listeners or not; listeners get what comes after they joined, and the slowest of them slows the process down.
//!
//! Any caller past the token gate may act on any process: the user of a request only says as whom to start one.

mod events;
mod input;
pub(crate) mod memory_kills;
mod output;
mod program;
pub(crate) mod reaper;
pub(crate) mod start;
pub(crate) mod status;
mod stdio;
pub(crate) mod table;
mod write_input;

use std::rc::Rc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use protocol::connect::{Code, Error};
use protocol::process::{self as wire, Empty, signal};
use rustix::process::Signal;

use self::events::Events;
use self::start::Starter;
use self::table::{Found, Process, Table};
use crate::caller::Caller;
use crate::transport::http::Body;
use crate::transport::rpc::Rpc;

/// How long the answer to a SIGKILL waits for the end of the process. Usually that takes less than a millisecond.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// The process service.
pub(crate) struct ProcessService {
    pub(crate) rpc: Rpc,
    pub(crate) starter: Rc<Starter>,
    pub(crate) table: Rc<Table>,
}

impl ProcessService {
    /// Serves the method with this name; `None` when there is none.
    pub(crate) async fn serve(
        &self,
        caller: Caller,
        method: &str,
        request: Request<Incoming>,
    ) -> Option<Response<Body>> {
        let Self { rpc, starter, table } = self;
        Some(match method {
            "Start" => {
                rpc.stream(caller, request, async |call, writer, message| {
                    starter.start(call, writer, message).await
                })
                .await
            }
            "Connect" => {
                rpc.stream(caller, request, async |call, writer, message| {
                    connect(table, &message).map(|(process, events)| events::stream(process, events, call, writer))
                })
                .await
            }
            "List" => {
                rpc.unary(caller, request, async |_, wire::ListRequest {}| Ok(list(table)))
                    .await
            }
            "Update" => {
                rpc.unary(caller, request, async |_, message| update(table, &message))
                    .await
            }
            "SendInput" => {
                rpc.unary(caller, request, async |_, message| {
                    write_input::send(table, message).await
                })
                .await
            }
            "StreamInput" => {
                rpc.client_stream(caller, request, async |_, inbox| {
                    write_input::stream(table, inbox).await
                })
                .await
            }
            "SendSignal" => {
                rpc.unary(caller, request, async |_, message| send_signal(table, &message).await)
                    .await
            }
            "CloseStdin" => {
                rpc.unary(caller, request, async |_, message| {
                    write_input::close(table, message).await
                })
                .await
            }
            _ => return None,
        })
    }
}

fn list(table: &Table) -> wire::ListResponse {
    let processes = table.live();
    let describe = |process: Rc<Process>| wire::ProcessInfo {
        config: Some(process.config.clone()),
        pid: process.pid,
        tag: process.tag.clone(),
    };
    wire::ListResponse {
        processes: processes.into_iter().map(describe).collect(),
    }
}

fn connect(table: &Table, message: &wire::ConnectRequest) -> Result<(u32, Events), Error> {
    Ok(match table.find(message.process.as_ref())? {
        Found::Live(process) => (process.pid, Events::Live(process.subscribe(), process)),
        Found::Ended { pid, end } => (pid, Events::Ended(end)),
    })
}

fn update(table: &Table, message: &wire::UpdateRequest) -> Result<Empty, Error> {
    let process = table.find_live(message.process.as_ref())?;
    if let Some(pty) = message.pty {
        let terminal = process.input.terminal();
        let resized = terminal
            .ok_or_else(|| "tty not assigned to process".to_owned())
            .and_then(|terminal| {
                let size = stdio::window_size(pty.size.unwrap_or_default());
                rustix::termios::tcsetwinsize(terminal.get_ref(), size).map_err(|error| error.to_string())
            });
        resized.map_err(|reason| Error::new(Code::Internal, format!("error resizing tty: {reason}")))?;
    }
    Ok(Empty {})
}

async fn send_signal(table: &Table, message: &wire::SendSignalRequest) -> Result<Empty, Error> {
    let process = table.find_live(message.process.as_ref())?;
    let number = match message.signal {
        signal::KILL => Signal::KILL,
        signal::TERM => Signal::TERM,
        other => {
            let message = format!("invalid signal: {}", signal::name(other));
            return Err(Error::new(Code::Unimplemented, message));
        }
    };
    // A client that ends a process does not want to wait for what its descendants still hold open.
    process.waive_output();
    process
        .signal(number)
        .map_err(|error| Error::new(Code::Internal, format!("error sending signal: {error}")))?;
    if number == Signal::KILL {
        // Nothing can refuse this one, so the client expects the process to be gone: from the list, and from
        // what it held. A process that the kernel cannot end now, in the middle of some I/O, is not waited for.
        let _ = tokio::time::timeout(END_PATIENCE, process.over()).await;
    }
    Ok(Empty {})
}

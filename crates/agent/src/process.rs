//! The service `process.Process`.
//!
//! A process has one record ([`table::Process`]) from its start to its end event. Its output is read whether anybody
//! listens or not; listeners get what comes after they joined, and the slowest of them slows the process down.
//!
//! Any caller past the token gate may act on any process: the user of a request only says as whom to start one.

mod events;
mod input;
mod output;
mod program;
mod start;
pub(crate) mod status;
pub(crate) mod table;

use std::rc::Rc;

use http::{Request, Response};
use hyper::body::Incoming;
use protocol::connect::{Code, Error};
use protocol::process::{self as wire, Empty, signal};
use rustix::process::{Pid, Signal};

use crate::agent::{Agent, Caller};
use crate::http::Body;
use crate::rpc::{self, Call};
use events::Events;
use table::{Found, Process};

/// Serves the method of that name; `None` when there is none.
pub(crate) async fn serve(
    agent: &Rc<Agent>,
    caller: Caller,
    method: &str,
    request: Request<Incoming>,
) -> Option<Response<Body>> {
    Some(match method {
        "Start" => rpc::stream(agent, caller, request, start::start).await,
        "Connect" => {
            rpc::stream(agent, caller, request, async |call, writer, message| {
                connect(call, &message).map(|(process, events)| events::stream(process, events, call, writer))
            })
            .await
        }
        "List" => {
            rpc::unary(agent, caller, request, async |call, wire::ListRequest {}| {
                Ok(list(call))
            })
            .await
        }
        "Update" => rpc::unary(agent, caller, request, async |call, message| update(call, &message)).await,
        "SendInput" => rpc::unary(agent, caller, request, input::send).await,
        "StreamInput" => rpc::client_stream(agent, caller, request, input::stream).await,
        "SendSignal" => {
            rpc::unary(agent, caller, request, async |call, message| {
                send_signal(call, &message)
            })
            .await
        }
        "CloseStdin" => rpc::unary(agent, caller, request, input::close).await,
        _ => return None,
    })
}

fn list(call: &Call) -> wire::ListResponse {
    let processes = call.agent.processes.live();
    let describe = |process: Rc<Process>| wire::ProcessInfo {
        config: Some(process.config.clone()),
        pid: process.pid,
        tag: process.tag.clone(),
    };
    wire::ListResponse {
        processes: processes.into_iter().map(describe).collect(),
    }
}

fn connect(call: &Call, message: &wire::ConnectRequest) -> Result<(u32, Events), Error> {
    Ok(match call.agent.processes.find(message.process.as_ref())? {
        Found::Live(process) => (process.pid, Events::Live(process.subscribe(), process)),
        Found::Ended { pid, end } => (pid, Events::Ended(end)),
    })
}

fn update(call: &Call, message: &wire::UpdateRequest) -> Result<Empty, Error> {
    let process = call.agent.processes.find_live(message.process.as_ref())?;
    if let Some(pty) = message.pty {
        let terminal = process.input.terminal();
        let resized = terminal
            .ok_or_else(|| "tty not assigned to process".to_owned())
            .and_then(|terminal| {
                let size = start::window_size(pty.size.unwrap_or_default());
                rustix::termios::tcsetwinsize(terminal.get_ref(), size).map_err(|error| error.to_string())
            });
        resized.map_err(|reason| Error::new(Code::Internal, format!("error resizing tty: {reason}")))?;
    }
    Ok(Empty {})
}

fn send_signal(call: &Call, message: &wire::SendSignalRequest) -> Result<Empty, Error> {
    let process = call.agent.processes.find_live(message.process.as_ref())?;
    let number = match message.signal {
        signal::KILL => Signal::KILL,
        signal::TERM => Signal::TERM,
        other => {
            let message = format!("invalid signal: {}", signal::name(other));
            return Err(Error::new(Code::Unimplemented, message));
        }
    };
    // Whoever ends a process does not want to wait for what its descendants still hold open.
    process.waive_output();
    kill(&process, number).map_err(|error| Error::new(Code::Internal, format!("error sending signal: {error}")))?;
    Ok(Empty {})
}

/// Signals a process, and only it. Does nothing once it was reaped, because its pid may be another's by then.
fn kill(process: &Process, signal: Signal) -> rustix::io::Result<()> {
    if process.is_reaped() {
        return Ok(());
    }
    match i32::try_from(process.pid).ok().and_then(Pid::from_raw) {
        Some(pid) => rustix::process::kill_process(pid, signal),
        None => Err(rustix::io::Errno::SRCH),
    }
}

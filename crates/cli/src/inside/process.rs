//! A process in a sandbox: its start, what it writes, its end, and what is sent to it.

use std::io;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, bail};
use bytes::{Bytes, BytesMut};
use http::{Method, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use protocol::agent::{OUTPUT_HEADER, UNTIL_EXIT};
use protocol::connect::{self, Codec, EndOfStream, FLAG_END};
use protocol::process::{
    self, CloseStdinRequest, Empty, EndEvent, ProcessConfig, ProcessInput, ProcessSelector, Pty, PtySize,
    SendSignalRequest, StartRequest, StreamInputData, StreamInputRequest, StreamInputStart, StreamResponse,
    UpdateRequest, signal,
};
use tokio::sync::mpsc;

use super::agent::{self, Agent, CallError, PROTOCOL, RequestBody};
use super::entered::Inside;
use crate::requests;
use crate::signals::{BY_SIGNAL, Signal};

/// Largest message of a stream. Output arrives in smaller pieces.
const MESSAGE_MAX: usize = 4 << 20;
/// Largest error that is read.
const REFUSAL_MAX: usize = 64 << 10;
/// The exit code of a command that could not be started, as shells have it.
pub(super) const NOT_STARTED: u8 = 126;

/// What a process does.
#[derive(Debug)]
pub(super) enum CommandEvent {
    /// Bytes on its stdout, or on its terminal.
    Output(Bytes),
    /// Bytes on its stderr.
    Error(Bytes),
    /// The end of the process.
    End(EndEvent),
}

/// A process that was started, and its output.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) pid: u32,
    events: Events,
    _agent: Agent,
}

/// Why a process was not started.
#[derive(Debug)]
pub(super) enum StartError {
    /// The agent has refused to start it, such as a command that does not exist.
    Refused(String),
    /// The agent could not be asked.
    Failed(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for StartError {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

impl Running {
    /// Starts a process: in a terminal of this size, or with pipes.
    pub(super) async fn start(
        inside: &Inside<'_>,
        user: Option<&str>,
        config: ProcessConfig,
        terminal: Option<PtySize>,
        stdin: bool,
    ) -> Result<Self, StartError> {
        let mut agent = inside.agent(user).await?;
        let message = Codec::Proto.envelope(&StartRequest {
            process: Some(config),
            pty: terminal.map(|size| Pty { size: Some(size) }),
            stdin: Some(stdin),
            tag: None,
        });
        let headers = [PROTOCOL[0], (OUTPUT_HEADER, UNTIL_EXIT)];
        let method = format!("{}Start", process::SERVICE);
        let content_type = Codec::Proto.stream_content_type();
        let response = agent
            .send(Method::POST, &method, content_type, &headers, agent::whole(message))
            .await?;
        let status = response.status();
        if status != StatusCode::OK {
            let body = requests::whole(response.into_body(), REFUSAL_MAX).await?;
            return Err(agent::refusal(status, &body).into());
        }
        let mut events = Events {
            body: response.into_body(),
            buffer: BytesMut::new(),
        };
        loop {
            match events.next().await? {
                Next::Refused(error) => return Err(StartError::Refused(agent::shown(&error.message))),
                Next::Event(process::ProcessEvent {
                    start: Some(started), ..
                }) => {
                    return Ok(Self {
                        pid: started.pid,
                        events,
                        _agent: agent,
                    });
                }
                Next::Event(_) => {}
            }
        }
    }

    /// Waits for the next event. Can be cancelled and called again.
    ///
    /// # Errors
    /// When the stream ends before the process.
    pub(super) async fn next(&mut self) -> Result<CommandEvent> {
        loop {
            let event = match self.events.next().await? {
                Next::Refused(error) => bail!(agent::shown(&error.message)),
                Next::Event(event) => event,
            };
            if let Some(end) = event.end {
                return Ok(CommandEvent::End(end));
            }
            let Some(data) = event.data else { continue };
            if let Some(bytes) = data.stdout.or(data.pty) {
                return Ok(CommandEvent::Output(bytes));
            }
            if let Some(bytes) = data.stderr {
                return Ok(CommandEvent::Error(bytes));
            }
        }
    }
}

/// The messages of a stream.
#[derive(Debug)]
struct Events {
    body: Incoming,
    buffer: BytesMut,
}

enum Next {
    Event(process::ProcessEvent),
    Refused(connect::Error),
}

impl Events {
    async fn next(&mut self) -> Result<Next> {
        const LOST: &str =
            "the connection to the sandbox was lost: it has ended, was paused, or the platform was stopped";
        loop {
            if let Some((flags, payload)) = connect::take_envelope(&mut self.buffer, MESSAGE_MAX)? {
                if flags & FLAG_END != 0 {
                    let end: EndOfStream = serde_json::from_slice(&payload).unwrap_or_default();
                    return end
                        .error
                        .map(Next::Refused)
                        .context("the agent has ended the stream early");
                }
                let response: StreamResponse = Codec::Proto.decode(&payload)?;
                return Ok(Next::Event(response.event.unwrap_or_default()));
            }
            let frame = self.body.frame().await.ok_or_else(|| anyhow!(LOST))?;
            if let Ok(data) = frame.map_err(|_| anyhow!(LOST))?.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }
}

/// Where input goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// The pipe that is its stdin, which is closed at the end of the input.
    Stdin,
    /// Its terminal.
    Terminal,
}

/// Sends input to a process as it comes, until there is no more.
///
/// # Errors
/// When the process takes no more, or the connection is lost.
pub(super) async fn send_input(
    inside: &Inside<'_>,
    pid: u32,
    target: Target,
    input: mpsc::Receiver<Bytes>,
) -> Result<()> {
    let mut agent = inside.agent(None).await?;
    let content_type = Codec::Proto.stream_content_type();
    let method = format!("{}StreamInput", process::SERVICE);
    let body = input_body(pid, target, input);
    let response = agent.send(Method::POST, &method, content_type, PROTOCOL, body).await?;
    // A failure is told in the last envelope: the process has closed its stdin or has ended. There is nobody to be told.
    requests::whole(response.into_body(), REFUSAL_MAX).await?;
    if target == Target::Stdin {
        let request = CloseStdinRequest {
            process: Some(selector(pid)),
        };
        let method = format!("{}CloseStdin", process::SERVICE);
        let _: Empty = agent.call(&method, &request).await?;
    }
    Ok(())
}

/// The input as the messages of a stream.
fn input_body(pid: u32, target: Target, input: mpsc::Receiver<Bytes>) -> RequestBody {
    let first = Codec::Proto.envelope(&StreamInputRequest {
        start: Some(StreamInputStart {
            process: Some(selector(pid)),
        }),
        ..StreamInputRequest::default()
    });
    let messages = futures_util::stream::unfold((Some(first), input), move |(first, mut input)| async move {
        let message = match first {
            Some(first) => first,
            None => envelope(target, input.recv().await?),
        };
        Some((Ok::<_, io::Error>(Frame::data(message)), (None, input)))
    });
    StreamBody::new(messages).boxed_unsync()
}

fn envelope(target: Target, bytes: Bytes) -> Bytes {
    let input = match target {
        Target::Stdin => ProcessInput {
            stdin: Some(bytes),
            pty: None,
        },
        Target::Terminal => ProcessInput {
            stdin: None,
            pty: Some(bytes),
        },
    };
    Codec::Proto.envelope(&StreamInputRequest {
        data: Some(StreamInputData { input: Some(input) }),
        ..StreamInputRequest::default()
    })
}

fn selector(pid: u32) -> ProcessSelector {
    ProcessSelector {
        pid: Some(pid),
        tag: None,
    }
}

/// Changes the size of a terminal.
pub(super) async fn resize(inside: &Inside<'_>, pid: u32, size: PtySize) -> Result<()> {
    let request = UpdateRequest {
        process: Some(selector(pid)),
        pty: Some(Pty { size: Some(size) }),
    };
    let mut agent = inside.agent(None).await?;
    let _: Empty = agent.call(&format!("{}Update", process::SERVICE), &request).await?;
    Ok(())
}

/// Sends a signal to a process.
pub(super) async fn send_signal(inside: &Inside<'_>, pid: u32, signal: Signal, user: Option<&str>) -> Result<()> {
    let number = match signal {
        Signal::Kill => signal::KILL,
        Signal::Terminate => signal::TERM,
        // The agent knows only the two others.
        Signal::Hangup | Signal::Interrupt | Signal::Quit => {
            if kill_inside(inside, pid, signal, user).await.is_ok_and(|sent| sent) {
                return Ok(());
            }
            signal::TERM
        }
    };
    let request = SendSignalRequest {
        process: Some(selector(pid)),
        signal: number,
    };
    let mut agent = inside.agent(None).await?;
    let sent: Result<Empty, CallError> = agent.call(&format!("{}SendSignal", process::SERVICE), &request).await;
    match sent {
        // It has ended meanwhile.
        Ok(_) | Err(CallError::Refused(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Sends a signal with the shell of the sandbox, as the user of the process. False if that is not possible.
async fn kill_inside(inside: &Inside<'_>, pid: u32, signal: Signal, user: Option<&str>) -> Result<bool> {
    let config = ProcessConfig {
        cmd: "/bin/sh".to_owned(),
        args: vec!["-c".to_owned(), format!("kill -{} {pid}", signal.number())],
        ..ProcessConfig::default()
    };
    let Ok(mut shell) = Running::start(inside, user, config, None, false).await else {
        return Ok(false);
    };
    loop {
        if let CommandEvent::End(end) = shell.next().await? {
            return Ok(end.exited && end.exit_code == 0);
        }
    }
}

/// The exit code of this program for the end of a process.
pub(super) fn exit_code(end: &EndEvent) -> ExitCode {
    if end.exited {
        return ExitCode::from(u8::try_from(end.exit_code & 0xff).unwrap_or(u8::MAX));
    }
    ExitCode::from(BY_SIGNAL.saturating_add(signal_number(&end.status)))
}

/// The number of the signal in a status such as `signal: killed (core dumped)`.
fn signal_number(status: &str) -> u8 {
    const NAMES: [(&str, u8); 15] = [
        ("hangup", 1),
        ("interrupt", 2),
        ("quit", 3),
        ("illegal instruction", 4),
        ("trace/breakpoint trap", 5),
        ("aborted", 6),
        ("bus error", 7),
        ("killed", 9),
        ("user defined signal 1", 10),
        ("segmentation fault", 11),
        ("user defined signal 2", 12),
        ("broken pipe", 13),
        ("alarm clock", 14),
        ("terminated", 15),
        ("floating point exception", 8),
    ];
    let name = status.strip_prefix("signal: ").unwrap_or(status);
    let name = name.strip_suffix(" (core dumped)").unwrap_or(name);
    if let Some((_, number)) = NAMES.iter().find(|(known, _)| *known == name) {
        return *number;
    }
    let number = name.strip_prefix("signal ").and_then(|number| number.parse().ok());
    number.filter(|number| *number < BY_SIGNAL).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_numbers() {
        for (status, want) in [
            ("signal: killed", 9),
            ("signal: aborted (core dumped)", 6),
            ("signal: signal 34", 34),
            ("signal: signal 300", 0),
            ("nonsense", 0),
        ] {
            assert_eq!(signal_number(status), want, "{status}");
        }
    }
}

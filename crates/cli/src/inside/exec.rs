//! `ringfence sandbox exec`: a command with its streams, signals and exit code.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, anyhow};
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use protocol::process::EndEvent;

use super::entered::{self, Inside};
use super::process::{self, CommandEvent, NOT_STARTED, Running, StartError, Target};
use crate::args::ExecArgs;
use crate::data_dir::DataDir;
use crate::output;
use crate::signals::{AllSignals, BY_SIGNAL, Signal};
use crate::stdio::{self, Output};

/// The signal after which the command is killed.
const KILLED_AT: usize = 3;
/// SIGPIPE, which a program gets that writes to a pipe without a reader.
const PIPE: u8 = 13;
/// How long a command may take to end whose output nobody reads.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Runs the command.
///
/// # Errors
/// When the sandbox cannot be entered or the connection is lost.
pub(super) async fn run(dir: &DataDir, args: &ExecArgs) -> Result<ExitCode> {
    let config = entered::process_config(&args.process, &args.command)?;
    // Before the command is started, so that no signal is lost.
    let mut signals = AllSignals::listen()?;
    let inside = Inside::enter(dir, &args.id, "exec", args.process.enter.resume).await?;
    let user = args.process.enter.user.as_deref();
    let mut running = match Running::start(&inside, user, config, None, !args.no_stdin).await {
        Ok(running) => running,
        Err(StartError::Refused(why)) => {
            output::error(&anyhow!(why));
            return Ok(ExitCode::from(NOT_STARTED));
        }
        Err(StartError::Failed(error)) => return Err(error),
    };
    let pid = running.pid;
    let (stdout, stderr) = (Output::to(io::stdout())?, Output::to(io::stderr())?);
    let command = Command {
        inside: &inside,
        pid,
        user,
    };
    let input = async {
        if !args.no_stdin
            && let Ok(input) = stdio::read_stdin()
        {
            // A command that takes no input, or has ended, is no error.
            let _ = process::send_input(&inside, pid, Target::Stdin, input).await;
        }
        std::future::pending::<()>().await;
    };
    let relay = async {
        loop {
            let is_written = match running.next().await? {
                CommandEvent::Output(piece) => stdout.write(piece).await,
                CommandEvent::Error(piece) => stderr.write(piece).await,
                CommandEvent::End(end) => return Ok::<_, anyhow::Error>(Some(end)),
            };
            if !is_written {
                return Ok(None);
            }
        }
    };
    let end: Option<EndEvent> = tokio::select! {
        end = relay => end?,
        () = input => None,
        killed = command.forward(&mut signals) => return killed,
    };
    let Some(end) = end else {
        command.end(&mut running).await;
        // The reason, if it is another one than a reader that has gone away.
        stdout.finish().await?;
        return Ok(ExitCode::from(BY_SIGNAL + PIPE));
    };
    let written = tokio::select! {
        both = async { (stdout.finish().await, stderr.finish().await) } => both,
        signal = signals.next() => return Ok(signal.exit_code()),
    };
    if !(written.0? && written.1?) {
        return Ok(ExitCode::from(BY_SIGNAL + PIPE));
    }
    Ok(process::exit_code(&end))
}

/// The command that runs.
struct Command<'a> {
    inside: &'a Inside<'a>,
    pid: u32,
    user: Option<&'a str>,
}

impl Command<'_> {
    /// Passes signals on. Returns once the command was killed because it ends by none.
    async fn forward(&self, signals: &mut AllSignals) -> Result<ExitCode> {
        let mut sending = FuturesUnordered::new();
        let mut count = 0;
        loop {
            tokio::select! {
                signal = signals.next() => {
                    count += 1;
                    if count >= KILLED_AT {
                        let kill = process::send_signal(self.inside, self.pid, Signal::Kill, self.user);
                        // Whoever sends a third signal waits for little.
                        let _ = tokio::time::timeout(END_PATIENCE, kill).await;
                        return Ok(Signal::Kill.exit_code());
                    }
                    sending.push(process::send_signal(self.inside, self.pid, signal, self.user));
                }
                Some(sent) = sending.next() => {
                    if let Err(error) = sent {
                        output::error(&error.context("pass on a signal"));
                    }
                }
            }
        }
    }

    /// Ends a command whose output nobody reads.
    async fn end(&self, running: &mut Running) {
        let ended = async {
            process::send_signal(self.inside, self.pid, Signal::Terminate, self.user).await?;
            while !matches!(running.next().await?, CommandEvent::End(_)) {}
            Ok::<_, anyhow::Error>(())
        };
        if !matches!(tokio::time::timeout(END_PATIENCE, ended).await, Ok(Ok(()))) {
            let kill = process::send_signal(self.inside, self.pid, Signal::Kill, self.user);
            let _ = tokio::time::timeout(END_PATIENCE, kill).await;
        }
    }
}

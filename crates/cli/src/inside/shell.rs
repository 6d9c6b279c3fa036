//! `ringfence sandbox shell`: a terminal in a sandbox.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use bytes::Bytes;
use protocol::process::{ProcessConfig, PtySize};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use self::keys::{Keys, Pressed};
use super::entered::{self, Inside};
use super::process::{self, CommandEvent, NOT_STARTED, Running, StartError, Target};
use crate::args::ShellArgs;
use crate::config;
use crate::data_dir::DataDir;
use crate::output;
use crate::signals::{AllSignals, Signal};
use crate::stdio::{self, Output};
use crate::terminal::{self, Raw};

mod keys;

/// Shells that are tried, in this order.
const SHELLS: [&[&str]; 2] = [&["/bin/bash", "-i", "-l"], &["/bin/sh", "-i"]];
/// The kind of a terminal that does not say what it is.
const TERM: &str = "xterm-256color";
/// Pieces of input that wait.
const QUEUE: usize = 16;
/// How long ending the shell may take after the operator has disconnected.
const END_PATIENCE: Duration = Duration::from_secs(5);
/// What a program leaves behind that could not clean up: the alternate screen, a hidden cursor, mouse reports, brackets
/// around what is pasted, colours.
const CLEAN: &[u8] = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[0m\r\n";

/// How a session ends.
enum Ended {
    Shell(ExitCode),
    Disconnected,
    Signal(Signal),
    Lost(anyhow::Error),
}

/// Opens the terminal.
///
/// # Errors
/// When stdin or stdout is not a terminal, the sandbox cannot be entered, or the connection is lost.
pub(super) async fn run(dir: &DataDir, args: &ShellArgs) -> Result<ExitCode> {
    if !terminal::is_terminal(io::stdin()) || !terminal::is_terminal(io::stdout()) {
        bail!("shell needs a terminal as stdin and stdout: use `ringfence sandbox exec` without one");
    }
    let mut signals = AllSignals::listen()?;
    let inside = Inside::enter(dir, &args.id, "shell", args.process.enter.resume).await?;
    let mut running = match start(&inside, args).await {
        Ok(running) => running,
        Err(StartError::Refused(why)) => {
            output::error(&anyhow!(why));
            return Ok(ExitCode::from(NOT_STARTED));
        }
        Err(StartError::Failed(error)) => return Err(error),
    };
    output::line(&format!(
        "Connected to {}; Enter ~ . disconnects, Enter ~ ? shows all keys.",
        inside.id
    ))?;
    let raw = Raw::enter()?;
    let ended = session(&inside, &mut running, &mut signals, &raw).await;
    let is_clean = matches!(ended, Ok(Ended::Shell(_)));
    if !is_clean {
        let _ = io::stdout().write_all(CLEAN).and_then(|()| io::stdout().flush());
    }
    drop(raw);
    match ended? {
        Ended::Shell(code) => Ok(code),
        Ended::Disconnected => {
            kill(&inside, running.pid).await;
            output::line("Disconnected.")?;
            Ok(ExitCode::SUCCESS)
        }
        Ended::Signal(signal) => {
            kill(&inside, running.pid).await;
            Ok(signal.exit_code())
        }
        Ended::Lost(error) => Err(error),
    }
}

/// Starts the program that was asked for, or the first shell that there is.
async fn start(inside: &Inside<'_>, args: &ShellArgs) -> Result<Running, StartError> {
    let user = args.process.enter.user.as_deref();
    let mut refused = None;
    let asked: Vec<Vec<String>> = if args.command.is_empty() {
        let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        SHELLS.iter().map(|&words| owned(words)).collect()
    } else {
        vec![args.command.clone()]
    };
    for command in asked {
        let mut config: ProcessConfig = entered::process_config(&args.process, &command)?;
        let term = config::passed_on("TERM").filter(|term| !term.is_empty());
        config
            .envs
            .entry("TERM".to_owned())
            .or_insert(term.unwrap_or_else(|| TERM.to_owned()));
        match Running::start(inside, user, config, Some(size()), false).await {
            Err(StartError::Refused(why)) => refused = refused.or(Some(why)),
            other => return other,
        }
    }
    Err(StartError::Refused(refused.unwrap_or_default()))
}

fn size() -> PtySize {
    let (cols, rows) = terminal::size();
    PtySize {
        cols: u32::from(cols),
        rows: u32::from(rows),
    }
}

/// Relays until the shell ends, the operator disconnects, or a signal arrives.
async fn session(inside: &Inside<'_>, running: &mut Running, signals: &mut AllSignals, raw: &Raw) -> Result<Ended> {
    let pid = running.pid;
    let mut resized = signal(SignalKind::window_change()).context("listen for SIGWINCH")?;
    let mut continued =
        signal(SignalKind::from_raw(rustix::process::Signal::CONT.as_raw())).context("listen for SIGCONT")?;
    let stdout = Output::to(io::stdout())?;
    let (sender, receiver) = mpsc::channel(QUEUE);
    let input = async {
        // Its end is that of the shell, or of the connection, which the other stream tells.
        let _ = process::send_input(inside, pid, Target::Terminal, receiver).await;
        std::future::pending::<()>().await;
    };
    let keys = read_keys(&sender, &stdout);
    let sizes = async {
        loop {
            tokio::select! {
                _ = resized.recv() => {}
                _ = continued.recv() => raw.again()?,
            }
            // A size that is not known in time comes with the next one.
            let _ = process::resize(inside, pid, size()).await;
        }
    };
    let relay = async {
        loop {
            match running.next().await {
                Ok(CommandEvent::Output(piece) | CommandEvent::Error(piece)) => {
                    if !stdout.write(piece).await {
                        return Ended::Disconnected;
                    }
                }
                Ok(CommandEvent::End(end)) => return Ended::Shell(process::exit_code(&end)),
                Err(error) => return Ended::Lost(error),
            }
        }
    };
    let ended = tokio::select! {
        ended = relay => ended,
        () = input => Ended::Disconnected,
        disconnected = keys => { disconnected?; Ended::Disconnected }
        failed = sizes => { let failed: Result<()> = failed; failed?; Ended::Disconnected }
        signal = signals.next() => Ended::Signal(signal),
    };
    if matches!(ended, Ended::Shell(_)) {
        // What the shell wrote last.
        let _ = tokio::time::timeout(END_PATIENCE, stdout.finish()).await;
    }
    Ok(ended)
}

/// Reads keys and sends them, until the operator disconnects or the terminal is gone.
async fn read_keys(sender: &mpsc::Sender<Bytes>, stdout: &Output) -> Result<()> {
    let mut stdin = stdio::read_stdin()?;
    let mut keys = Keys::default();
    while let Some(piece) = stdin.recv().await {
        for pressed in keys.press(&piece) {
            match pressed {
                Pressed::Send(bytes) => {
                    if sender.send(bytes).await.is_err() {
                        // The shell is about to end.
                        std::future::pending::<()>().await;
                    }
                }
                Pressed::Help => {
                    stdout.write(Bytes::from_static(keys::HELP)).await;
                }
                Pressed::Disconnect => return Ok(()),
            }
        }
    }
    Ok(())
}

/// Ends a shell that the operator leaves. What runs in its foreground gets SIGHUP from the kernel.
async fn kill(inside: &Inside<'_>, pid: u32) {
    let kill = process::send_signal(inside, pid, Signal::Kill, None);
    let _ = tokio::time::timeout(END_PATIENCE, kill).await;
}

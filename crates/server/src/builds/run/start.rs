//! Start and ready commands, tried at the end of a build.

use std::time::Duration;

use model::log::Level;
use parking_lot::Mutex;
use protocol::node::Image;
use tokio::time::{Instant, sleep, timeout};

use super::super::context::BuildContext;
use super::super::recipe::{BuildFailure, Job, StartCommand};
use super::machine::Machine;
use crate::agent::EndsWith;

/// Name of the step.
const FINALIZE: &str = "finalize";
/// Delay between two attempts of the ready command.
const PAUSE: Duration = Duration::from_secs(2);
/// How long the sandbox may take to be ready.
const READY_BOUND: Duration = Duration::from_secs(600);
/// How long a start command without a ready command is watched.
const WATCHED: Duration = Duration::from_secs(20);
/// How long the log follows the start command after the sandbox is ready.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// When the log says for the first time why a sandbox is not ready; each time, twice as long passes until the next.
const FIRST_TOLD: Duration = Duration::from_secs(2);

/// Starts a sandbox from the finished image, runs the commands in it, and returns once it is ready.
pub(super) async fn check(
    context: &BuildContext,
    job: &Job,
    image: Image,
    start: &StartCommand,
) -> Result<(), BuildFailure> {
    let machine = Machine::start(context, job, FINALIZE, image).await?;
    let ready = async {
        match &start.ready {
            None => {
                sleep(WATCHED).await;
                Ok(())
            }
            Some(ready) => until_ready(context, &machine, start, ready).await,
        }
    };
    let result = match &start.command {
        None => ready.await,
        Some(started) => {
            // Clients look for these three lines.
            context.log(Level::Info, Some(FINALIZE), "Running start command");
            let run = async {
                let command = start.process(started);
                // What it has left in the background is what the template is about, and writes to the log as well.
                let ended = machine
                    .follow(&start.user, command, EndsWith::Output, "[start]")
                    .await?;
                match ended.code {
                    0 => Ok(()),
                    _ => Err(ended.failure(FINALIZE, "the start command")),
                }
            };
            tokio::pin!(ready, run);
            tokio::select! {
                biased;
                ended = &mut run => match ended {
                    Ok(()) => ready.await,
                    failed => failed,
                },
                result = &mut ready => {
                    // What was written before the sandbox was ready may still be on its way.
                    let _ = timeout(LAST_WORDS, &mut run).await;
                    result
                }
            }
        }
    };
    machine.end().await;
    result?;
    context.log(Level::Info, Some(FINALIZE), "Template is ready");
    Ok(())
}

/// Runs the ready command until it succeeds. While it does not, the log says why, at growing intervals.
async fn until_ready(
    context: &BuildContext,
    machine: &Machine<'_>,
    start: &StartCommand,
    ready: &str,
) -> Result<(), BuildFailure> {
    let log = |line: String| {
        context.log(Level::Info, Some(FINALIZE), line);
    };
    log(format!("Waiting for template to be ready: {ready}"));
    let begun = Instant::now();
    let mut told = FIRST_TOLD;
    let last = Mutex::new(None);
    let attempts = async {
        loop {
            let ran = machine.run_silently(&start.user, start.process(ready)).await?;
            if ran.code == 0 {
                for line in ran.last() {
                    context.log(Level::Debug, Some(FINALIZE), format!("[ready] {line}"));
                }
                return Ok(());
            }
            let waited = begun.elapsed();
            if waited >= told {
                told = waited * 2;
                let (seconds, code) = (waited.as_secs(), ran.code);
                log(format!("[ready] not ready after {seconds} s: exit code {code}"));
                for line in ran.last() {
                    log(format!("[ready] {line}"));
                }
            }
            *last.lock() = Some(ran);
            sleep(PAUSE).await;
        }
    };
    if let Ok(done) = timeout(READY_BOUND, attempts).await {
        return done;
    }
    let why = "the ready command did not succeed within 10 minutes";
    let why = match last.into_inner() {
        Some(ran) => {
            for line in ran.last() {
                log(format!("[ready] {line}"));
            }
            ran.told(format!("{why}; at last it ended with exit code {}", ran.code))
        }
        None => format!("{why}: it has not ended even once"),
    };
    Err(BuildFailure::at(FINALIZE, why))
}

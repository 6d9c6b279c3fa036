//! Start and ready commands, tried at the end of a build.

use std::time::Duration;

use model::log::Level;
use protocol::node::Image;
use tokio::time::{sleep, timeout};

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

/// Starts a sandbox from the finished image, runs the commands in it, and returns once it is ready.
pub(super) async fn check(
    context: &BuildContext,
    job: &Job,
    image: Image,
    start: &StartCommand,
) -> Result<(), BuildFailure> {
    let machine = Machine::start(context, job, FINALIZE, image).await?;
    let log = |line: &str| context.log(Level::Info, Some(FINALIZE), line);
    let ready = async {
        let Some(ready) = &start.ready else {
            sleep(WATCHED).await;
            return Ok(());
        };
        log("[finalize] waiting for the template to be ready");
        let attempts = async {
            loop {
                let ended = machine.run(&start.user, start.process(ready), "[ready]").await?;
                if ended.code == 0 {
                    return Ok(());
                }
                sleep(PAUSE).await;
            }
        };
        timeout(READY_BOUND, attempts).await.unwrap_or_else(|_| {
            let why = "the ready command did not succeed within 10 minutes";
            Err(BuildFailure::at(FINALIZE, why))
        })
    };
    let result = match &start.command {
        None => ready.await,
        Some(started) => {
            log("[finalize] running the start command");
            let run = async {
                let command = start.process(started);
                // What it has left in the background is what the template is about, and writes to the log as well.
                let ended = machine
                    .follow(&start.user, command, EndsWith::Output, "[start]")
                    .await?;
                match ended.code {
                    0 => Ok(()),
                    code => {
                        let why = format!("the start command ended with exit code {code}");
                        Err(BuildFailure::at(FINALIZE, why))
                    }
                }
            };
            tokio::pin!(ready);
            tokio::select! {
                biased;
                ended = run => match ended {
                    Ok(()) => ready.await,
                    failed => failed,
                },
                result = &mut ready => result,
            }
        }
    };
    machine.end().await;
    result?;
    log("[finalize] the template is ready");
    Ok(())
}

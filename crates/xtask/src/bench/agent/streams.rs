//! Many concurrent commands in one sandbox, each with continuous output and its own client.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures_util::future::{try_join, try_join_all};
use measure::client::Client;
use measure::process::{Command, ProcessEvent};
use measure::table;

use super::subject::{Subject, agent_of};
use crate::bench::host::{self, Watch};
use crate::bench::times;

/// Lines that each command prints …
const LINES: usize = 50;
/// … a tenth of a second apart. `read` waits without another process, so that what is measured is not `fork`.
const SCRIPT: &str = "for i in {1..50}; do echo line $i; read -r -t 0.1 _; done; exit 0";
/// Commands of which the time is taken while nothing else runs.
const IDLE_COMMANDS: usize = 200;

/// Measures streams: latency of short commands, and many streams at the same time.
pub(super) async fn measure(subject: &Subject, streams: usize) -> Result<String> {
    let agent = agent_of(subject).await?;
    let mut client = Client::new(subject.platform.clone());
    let mut idle = Vec::new();
    for _ in 0..IDLE_COMMANDS {
        idle.push(run_true(&mut client, subject).await?);
    }
    let watch = Watch::start(vec![agent, subject.server]);
    let begun = Instant::now();
    let (started, printing) = (Cell::new(0), Cell::new(true));
    let (started, printing) = (&started, &printing);
    let all = async {
        let firsts = try_join_all((0..streams).map(|_| print(subject, started))).await;
        printing.set(false);
        anyhow::Ok((firsts?, begun.elapsed()))
    };
    let meanwhile = async {
        let (mut starting, mut steady) = (Vec::new(), Vec::new());
        while printing.get() {
            let all_run = started.get() == streams;
            let took = run_true(&mut client, subject).await?;
            if all_run {
                steady.push(took);
            } else {
                starting.push(took);
            }
        }
        anyhow::Ok((starting, steady))
    };
    let ((firsts, took), (starting, steady)) = try_join(all, meanwhile).await?;
    let most = watch.stop()?;
    let rows = [
        times::row(&format!("first output of {streams} commands started at once"), firsts),
        times::row("`true` on a kept connection, nothing else", idle),
        times::row("`true` while the commands start", starting),
        times::row("`true` while all of them print", steady),
    ];
    let mut text = format!("\n{}", table::columns(&times::HEADER, rows));
    text.push_str(&format!(
        "all {streams} streams complete, {LINES} lines each, after {:.1} s\n\n",
        took.as_secs_f64()
    ));
    let rows = [
        ("agent, most meanwhile", agent),
        ("platform, most meanwhile", subject.server),
    ];
    let rows = rows.map(|(what, process)| most.get(&process).copied().unwrap_or_default().row(what));
    text.push_str(&table::columns(&host::HEADER, rows));
    Ok(text)
}

/// Runs a command that prints, and returns when its first output came. All of its output must come.
async fn print(subject: &Subject, started: &Cell<usize>) -> Result<Duration> {
    let begun = Instant::now();
    let command = Command {
        stdin: true,
        ..Command::new("/bin/bash", &["-c", SCRIPT])
    };
    let mut client = Client::new(subject.platform.clone());
    let mut events = client.start(&subject.sandbox, &command).await?;
    let (mut first, mut output, mut code) = (None, Vec::new(), None);
    while let Some(event) = events.next().await? {
        match event {
            ProcessEvent::Started => {}
            ProcessEvent::Output(bytes) => {
                if first.is_none() {
                    first = Some(begun.elapsed());
                    started.set(started.get() + 1);
                }
                output.extend_from_slice(&bytes);
            }
            ProcessEvent::Ended(ended) => code = Some(ended),
        }
    }
    let want: String = (1..=LINES).map(|n| format!("line {n}\n")).collect();
    if code != Some(0) || output != want.as_bytes() {
        bail!(
            "a stream ended with code {code:?} and {} of {} bytes",
            output.len(),
            want.len()
        );
    }
    first.context("a command printed nothing")
}

/// Runs `true` to its end.
async fn run_true(client: &mut Client, subject: &Subject) -> Result<Duration> {
    let begun = Instant::now();
    let mut events = client.start(&subject.sandbox, &Command::new("/bin/true", &[])).await?;
    let mut code = None;
    while let Some(event) = events.next().await? {
        if let ProcessEvent::Ended(ended) = event {
            code = Some(ended);
        }
    }
    match code {
        Some(0) => Ok(begun.elapsed()),
        other => bail!("`true` ended with {other:?}"),
    }
}

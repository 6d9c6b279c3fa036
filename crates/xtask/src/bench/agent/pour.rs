//! One command with a large output, with a fast and a slow reader: neither agent nor platform may buffer output that the
//! client has not read.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use measure::client::Client;
use measure::process::{Command, ProcessEvent};
use measure::table;
use protocol::connect::Codec;

use super::subject::{Subject, agent_of};
use crate::bench::host::{self, Watch};

/// Measures memory and rate while a command writes output to clients of different speeds.
pub(super) async fn measure(subject: &Subject, mb: u64, slow_mb_s: u64) -> Result<String> {
    let agent = agent_of(subject).await?;
    let mut lines = String::new();
    let mut rows = vec![
        agent.memory()?.row("agent before"),
        subject.server.memory()?.row("platform before"),
    ];
    for (what, codec, pace) in [
        ("fast client, binary", Codec::Proto, None),
        ("fast client, JSON", Codec::Json, None),
        ("slow client, JSON", Codec::Json, Some(slow_mb_s)),
    ] {
        let watch = Watch::start(vec![agent, subject.server]);
        let took = pour(subject, mb, codec, pace).await?;
        let most = watch.stop()?;
        let rate = mb as f64 / took.as_secs_f64();
        lines.push_str(&format!(
            "{mb} MB of output, {what}: {rate:.0} MB/s in {:.1} s\n",
            took.as_secs_f64()
        ));
        for (whose, process) in [("agent", agent), ("platform", subject.server)] {
            let memory = most.get(&process).copied().unwrap_or_default();
            rows.push(memory.row(&format!("{whose}, most, {what}")));
        }
    }
    Ok(format!("\n{lines}\n{}", table::columns(&host::HEADER, rows)))
}

/// Reads the whole output of a command, at most `pace` MB of it per second.
async fn pour(subject: &Subject, mb: u64, codec: Codec, pace: Option<u64>) -> Result<Duration> {
    let wanted = mb * 1_000_000;
    let count = wanted.to_string();
    let args = ["-c", count.as_str(), "/dev/zero"];
    let command = Command {
        codec,
        ..Command::new("/usr/bin/head", &args)
    };
    let mut client = Client::new(subject.platform.clone());
    let begun = Instant::now();
    let mut events = client.start(&subject.sandbox, &command).await?;
    let (mut got, mut code) = (0_u64, None);
    while let Some(event) = events.next().await? {
        match event {
            ProcessEvent::Started => {}
            ProcessEvent::Output(bytes) => {
                got += bytes.len() as u64;
                if let Some(pace) = pace {
                    let due = Duration::from_secs_f64(got as f64 / (pace as f64 * 1e6));
                    tokio::time::sleep(due.saturating_sub(begun.elapsed())).await;
                }
            }
            ProcessEvent::Ended(ended) => code = Some(ended),
        }
    }
    if code != Some(0) || got != wanted {
        bail!("the stream ended with code {code:?} after {got} of {wanted} bytes");
    }
    Ok(begun.elapsed())
}

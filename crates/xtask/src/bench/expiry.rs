//! `bench expiry`: delay between the deadline of a sandbox and the request to the node to kill it.
//!
//! Goal: p99 <= 250 ms with 1,000 sandboxes. Two cases: deadlines spread over some seconds, and all at one moment.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, bail};
use measure::table;

use super::platform::{self, BenchPlatform, Rows, SECOND_US};
use super::{conditions, times};

/// Flags of `bench expiry`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Sandboxes
    #[arg(long, value_name = "N", default_value_t = 1000)]
    sandboxes: usize,
    /// Seconds over which their deadlines are spread in the first case
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    spread: u32,
    /// Directory for the database; a file system in memory would distort the result
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
}

/// How long to wait for kills after the last deadline.
const PATIENCE: Duration = Duration::from_secs(10);

/// Runs the benchmark and returns its report.
///
/// # Errors
/// When the server cannot be started, or a kill is missing.
pub(super) fn run(args: &Args) -> Result<String> {
    let mut report = conditions::line();
    report.push_str(&format!(
        "SQLite in {}, {} sandboxes, a node that kills at once\n\n",
        args.dir.display(),
        args.sandboxes
    ));
    let server = platform::runtime()?;
    let mut rows = Vec::new();
    for (what, spread) in [
        (format!("deadlines spread over {} s", args.spread), args.spread),
        ("all deadlines at one moment".to_owned(), 0),
    ] {
        rows.push(times::row(&what, server.block_on(lateness(args, spread))?));
    }
    report.push_str(&table::columns(&times::HEADER, rows));
    Ok(report)
}

async fn lateness(args: &Args, spread_s: u32) -> Result<Vec<Duration>> {
    let rows = Rows::new(&args.dir).await?;
    // Far in the future while the rows are created, then moved into the near future.
    let started_us = platform::now_us();
    let mut ids = Vec::new();
    for n in 0..args.sandboxes {
        let id = rows.sandbox(n, true, started_us, started_us + 3600 * SECOND_US);
        ids.push(id.await?);
    }
    // Room for the moves themselves and for the start of the server.
    let first_us = platform::now_us() + 3 * SECOND_US + i64::try_from(args.sandboxes)? * 1000;
    let step_us = i64::from(spread_s) * SECOND_US / i64::try_from(args.sandboxes.max(1))?;
    let mut ends = Vec::new();
    for (n, id) in (0..).zip(&ids) {
        let end_us = first_us + n * step_us;
        let _ = rows.of_node().sandbox_set_end(id, None, end_us).await?;
        ends.push((id, end_us));
    }
    let platform = BenchPlatform::start(rows).await?;
    if platform::now_us() >= first_us {
        bail!("the first deadline had passed before the server ran: the machine is too busy");
    }
    let last_us = first_us + i64::from(spread_s) * SECOND_US;
    let give_up_us = last_us + i64::try_from(PATIENCE.as_micros())?;
    while platform.node.killed_at.lock().len() < ids.len() && platform::now_us() < give_up_us {
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    let kills = platform.node.killed_at.lock().clone();
    platform.stop().await;
    let late = ends
        .iter()
        .map(|(id, end_us)| Some(platform::unix_us(*kills.get(id)?)? - end_us));
    let Some(late) = late.collect::<Option<Vec<i64>>>() else {
        bail!("{} of {} sandboxes were killed", kills.len(), ids.len());
    };
    if late.iter().any(|late_us| *late_us < 0) {
        bail!("a sandbox was killed before its deadline");
    }
    Ok(late
        .iter()
        .map(|late_us| Duration::from_micros(late_us.unsigned_abs()))
        .collect())
}

//! `bench rest`: latency of lists and details of sandboxes over HTTP with many rows.
//!
//! Goals: a page of 100 p99 <= 10 ms, a detail p99 <= 2 ms, 5,000 details per second; client and server on the same
//! cores, everything (authentication, SQLite on disk, HTTP) included.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use futures_util::future::try_join_all;
use measure::client::{Client, Target};
use measure::stats::Distribution;
use measure::table;
use model::id::SandboxId;

use super::client::client_runtime;
use super::platform::{self, BenchPlatform, KEY, Rows, SECOND_US};
use super::{conditions, times};

/// Flags of `bench rest`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Sandboxes of the team that have ended
    #[arg(long, value_name = "N", default_value_t = 9000)]
    ended: usize,
    /// Sandboxes of the team that run
    #[arg(long, value_name = "N", default_value_t = 1000)]
    live: usize,
    /// Position of ended sandboxes in the order of lists
    #[arg(long, value_enum, default_value_t = Layout::Mixed)]
    layout: Layout,
    /// Requests of each kind, one after the other
    #[arg(long, value_name = "N", default_value_t = 2000)]
    requests: usize,
    /// Number of kept-alive connections for the rate
    #[arg(long, value_name = "N", default_value_t = 8)]
    connections: usize,
    /// Duration of the measurement of the rate
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    seconds: u64,
    /// Directory for the database; a file system in memory would distort the result
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Layout {
    /// Evenly between running sandboxes
    Mixed,
    /// Before all running sandboxes, the worst case for the first page
    First,
}

/// Runs the benchmark and returns its report.
///
/// # Errors
/// When the server cannot be started, or a response is not the expected one.
pub(super) fn run(args: &Args) -> Result<String> {
    let mut report = conditions::line();
    report.push_str(&format!(
        "SQLite in {}, {} rows that run, {} that have ended ({:?})\n\n",
        args.dir.display(),
        args.live,
        args.ended,
        args.layout
    ));
    let server = platform::runtime()?;
    let (platform, ids) = server.block_on(async {
        let rows = Rows::new(&args.dir).await?;
        let ids = fill(&rows, args).await?;
        anyhow::Ok((BenchPlatform::start(rows).await?, ids))
    })?;
    let client = client_runtime()?;
    let url = format!("http://{}", platform.address);
    let measured = client.block_on(measure(args, &url, &ids));
    server.block_on(platform.stop());
    report.push_str(&measured?);
    Ok(report)
}

/// Makes the rows, and returns the ids of those that run.
async fn fill(rows: &Rows, args: &Args) -> Result<Vec<SandboxId>> {
    let now_us = platform::now_us();
    let total = args.live + args.ended;
    let mut live = Vec::new();
    for n in 0..total {
        let runs = match args.layout {
            Layout::Mixed => (n + 1) * args.live / total > live.len(),
            Layout::First => n < args.live,
        };
        let started_us = now_us - i64::try_from(total - n)? * 1000;
        let id = rows.sandbox(n, runs, started_us, now_us + 3600 * SECOND_US).await?;
        if runs {
            live.push(id);
        }
    }
    Ok(live)
}

async fn measure(args: &Args, url: &str, ids: &[SandboxId]) -> Result<String> {
    let target = Target::find(url, KEY, "base".to_owned(), "rest".to_owned()).await?;
    let mut client = Client::new(target.clone());
    let page = "/v2/sandboxes?limit=100";
    let filtered = "/v2/sandboxes?limit=100&metadata=customer%3Dcustomer-5";
    let mut rows = Vec::new();
    for (what, path) in [
        ("list, first page of 100", page),
        ("list, filtered by metadata", filtered),
    ] {
        let mut times = Vec::new();
        for _ in 0..args.requests {
            times.push(client.get(path).await?.took);
        }
        rows.push(times::row(what, times));
    }
    rows.push(times::row(
        "list, later pages of 100",
        later_pages(&mut client, args, page).await?,
    ));
    let mut times = Vec::new();
    for id in ids.iter().cycle().take(args.requests) {
        times.push(client.get(&format!("/sandboxes/{id}")).await?.took);
    }
    rows.push(times::row("detail", times));

    let begun = Instant::now();
    let end = begun + Duration::from_secs(args.seconds);
    let clients = (0..args.connections).map(|first| details(target.clone(), ids, first, end));
    let times: Vec<Duration> = try_join_all(clients).await?.into_iter().flatten().collect();
    let rate = times.len() as f64 / begun.elapsed().as_secs_f64();
    if Distribution::of(times.clone()).is_none() {
        bail!("no detail was answered in {} s", args.seconds);
    }
    rows.push(times::row(&format!("detail, {} connections", args.connections), times));
    let mut text = table::columns(&times::HEADER, rows);
    text.push_str(&format!(
        "\ndetails per second over {} kept connections: {rate:.0}\n",
        args.connections
    ));
    Ok(text)
}

/// Pages after the first, from the first to the last over and over.
async fn later_pages(client: &mut Client, args: &Args, page: &str) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    let mut next: Option<String> = None;
    while times.len() < args.requests.min(args.live / 100 * 50) {
        let path = match &next {
            Some(token) => format!("{page}&nextToken={token}"),
            None => page.to_owned(),
        };
        let answer = client.get(&path).await?;
        if next.is_some() {
            times.push(answer.took);
        }
        let token = answer.headers.get("x-next-token");
        let token = token.map(|token| token.to_str().context("a token that is no text"));
        next = token.transpose()?.map(|token| token.replace('=', "%3D"));
    }
    Ok(times)
}

async fn details(target: Target, ids: &[SandboxId], first: usize, end: Instant) -> Result<Vec<Duration>> {
    let mut client = Client::new(target);
    let mut times = Vec::new();
    // Strides of a prime, so that the connections do not ask for the same one at the same time.
    let mut at = first * 101;
    while Instant::now() < end {
        let id = &ids[at % ids.len()];
        at += 1;
        times.push(client.get(&format!("/sandboxes/{id}")).await?.took);
    }
    Ok(times)
}

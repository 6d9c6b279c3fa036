//! `ringfence bench`: the performance of a running platform as a client sees it, no sample discarded.
//!
//! The benchmark is an ordinary client of the HTTP API and independent of the platform's internals. It finds the
//! platform in the credentials file of a data directory, or in the variables that the SDKs read.

mod cpuid;
mod memory;
mod report;
mod run;

use std::net::UdpSocket;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use measure::client::Target;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::report::{Conditions, Report};
use self::run::{Bench, Timed};
use crate::config::{Config, Sources};
use crate::credentials;
use crate::one_thread;
use crate::output::{self, Format};
use crate::signals::Signals;

/// Clients of the measurement of many at once.
const AT_ONCE: usize = 16;

/// One thing to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum What {
    /// From the create request to the response 201
    Create,
    /// From the create request to the first output of the first command
    FirstOutput,
    /// From the delete request to the response 204
    Delete,
    /// Sandboxes created and deleted per second
    Sustained,
    /// As sustained, with 16 clients at once
    Concurrent,
    /// Creates every 0.3 s, for which sandboxes can be kept ready
    Ready,
    /// From the pause request of an idle sandbox to the response 204
    Pause,
    /// From the connect request of an idle, paused sandbox to the response 201
    Connect,
    /// From the fork request of an idle sandbox to the response 201, if the host can fork
    Fork,
    /// Available memory lost per idle sandbox
    IdleMemory,
}

/// Flags of `bench`.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Base URL of the API [env: E2B_API_URL] [default: from <data-dir>/credentials.env]
    ///
    /// The API key is read from E2B_API_KEY or the credentials file, never from a flag. With --data-dir, the file
    /// there takes precedence over the environment.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Measurements to run, separated by commas
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "create,first-output,delete,sustained,concurrent,ready,pause,connect,fork,idle-memory"
    )]
    what: Vec<What>,
    /// Template of the created sandboxes
    #[arg(long, default_value = "base")]
    template: String,
    /// Number of concurrent clients [default: 1 for times, 2 per core for sustained and idle-memory; fork and ready always have 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    concurrency: Option<u16>,
    /// Number of sandboxes per measurement; for idle-memory, all of them run at the same time
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// Duration of the measurements sustained and concurrent, in seconds each
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    duration: u32,
    /// Output format
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
}

/// Runs the measurements and prints the report.
///
/// # Errors
/// When the address of the platform is unknown, or the report cannot be printed.
pub(crate) fn run(args: &BenchArgs, config: &Config, sources: &Sources) -> Result<ExitCode> {
    let (url, key) = credentials::endpoint(args.url.as_deref(), config, sources)?;
    let runtime = one_thread::runtime()?;
    let report = runtime.block_on(measure(args, url, &key))?;
    match args.format {
        Format::Text => output::text(&report.text())?,
        Format::Json => output::json(&report)?,
    }
    Ok(if report.errors == 0 && !report.interrupted {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn measure(args: &BenchArgs, url: String, key: &str) -> Result<Report> {
    let run = Uuid::new_v4().simple().to_string();
    let platform = Target::find(&url, key, args.template.clone(), run).await?;
    let same_machine = is_local(&platform);
    let conditions = conditions(args, url, same_machine)?;
    let cancelled = CancellationToken::new();
    let bench = Bench::new(platform, cancelled.clone());
    let work = async {
        let measured = all(args, &bench, conditions).await;
        bench.clean_up().await;
        measured
    };
    let twice = async {
        let mut signals = Signals::listen()?;
        signals.next().await;
        cancelled.cancel();
        let name = signals.next().await;
        bail!(
            "second {name}: {} sandboxes were not deleted; they end at their timeout",
            bench.left_over()
        )
    };
    let mut report = tokio::select! {
        measured = work => measured?,
        ended = twice => ended?,
    };
    let (errors, samples) = bench.failures();
    report.errors = errors;
    report.error_samples = samples;
    report.interrupted = bench.cancelled.is_cancelled();
    if bench.left_over() > 0 {
        tracing::error!(
            "{} sandboxes could not be deleted; they end at their timeout",
            bench.left_over()
        );
    }
    Ok(report)
}

/// Runs the selected measurements one after the other.
async fn all(args: &BenchArgs, bench: &Bench, conditions: Conditions) -> Result<Report> {
    let wants = |what| args.what.contains(&what);
    if wants(What::IdleMemory) && !conditions.same_machine {
        bail!("idle-memory requires a platform on this machine");
    }
    let count = args.count as usize;
    let parallel = args.concurrency.map_or(conditions.cpus * 2, usize::from);
    let mut report = Report {
        conditions,
        requests: Vec::new(),
        create_stages: Vec::new(),
        sustained: None,
        concurrent: None,
        notes: Vec::new(),
        idle_memory: None,
        errors: 0,
        error_samples: Vec::new(),
        interrupted: false,
    };
    let timed = Timed {
        create: wants(What::Create),
        first_output: wants(What::FirstOutput),
        delete: wants(What::Delete),
    };
    if timed.create || timed.first_output || timed.delete {
        let concurrency = args.concurrency.map_or(1, usize::from);
        (report.requests, report.create_stages) = bench.latencies(count, concurrency, timed).await;
    }
    if wants(What::Sustained) && !bench.cancelled.is_cancelled() {
        let duration = Duration::from_secs(args.duration.into());
        let (sustained, measures) = bench.sustained("sustained", duration, parallel).await;
        report.sustained = Some(sustained);
        report.requests.extend(measures);
    }
    if wants(What::Concurrent) && !bench.cancelled.is_cancelled() {
        let duration = Duration::from_secs(args.duration.into());
        let (concurrent, measures) = bench.sustained("16 at once", duration, AT_ONCE).await;
        report.concurrent = Some(concurrent);
        report.requests.extend(measures);
    }
    if wants(What::Ready) && !bench.cancelled.is_cancelled() {
        report.requests.push(bench.ready(count).await);
    }
    if (wants(What::Pause) || wants(What::Connect)) && !bench.cancelled.is_cancelled() {
        let concurrency = args.concurrency.map_or(1, usize::from);
        let [pause, connect] = bench.pauses(count, concurrency).await;
        report.requests.extend(wants(What::Pause).then_some(pause));
        report.requests.extend(wants(What::Connect).then_some(connect));
    }
    if wants(What::Fork) && !bench.cancelled.is_cancelled() {
        match bench.forks(count).await {
            Some(forks) => report.requests.push(forks),
            None => report
                .notes
                .push("fork: this platform cannot fork sandboxes (501)".to_owned()),
        }
    }
    if wants(What::IdleMemory) && !bench.cancelled.is_cancelled() {
        report.idle_memory = Some(bench.idle_memory(count, parallel).await?);
    }
    Ok(report)
}

fn conditions(args: &BenchArgs, url: String, same_machine: bool) -> Result<Conditions> {
    Ok(Conditions {
        ringfence: crate::version::text(),
        url,
        template: args.template.clone(),
        started_at: format!("{:.0}", crate::clock::now()),
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        memory_mb: memory::total_kb()? / 1024,
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        cpuid_us: cpuid::cost_us(),
        same_machine,
    })
}

/// Whether the platform's address is one of this machine: only then can a socket be bound to it.
fn is_local(platform: &Target) -> bool {
    UdpSocket::bind((platform.address.ip(), 0)).is_ok()
}

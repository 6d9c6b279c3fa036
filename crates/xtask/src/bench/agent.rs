//! `bench agent`: throughput and cost of the agent of a sandbox, through the port of the platform.
//!
//! Goals: `true` p50 <= 6 ms; files in and out >= 500 MB/s; private memory of an idle agent <= 1.5 MB, and with 100
//! processes and their listeners <= 20 MB; memory that stays flat however slowly a stream is read.

mod files;
mod memory;
mod pour;
pub(super) mod reference;
mod streams;
mod subject;

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use measure::client::{Client, Target};
use uuid::Uuid;

use self::subject::Subject;
use super::client::{client_runtime, credentials};
use super::{conditions, host};

/// Flags of `bench agent`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Data directory of the platform, which must run on this machine
    #[arg(long, value_name = "DIR", default_value = "/var/lib/ringfence")]
    data_dir: PathBuf,
    /// Measurements to run, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "memory,streams,pour,files")]
    what: Vec<What>,
    /// Number of concurrent streams
    #[arg(long, value_name = "N", default_value_t = 200)]
    streams: usize,
    /// Size of the long output stream, in MB
    #[arg(long, value_name = "MB", default_value_t = 1000)]
    pour_mb: u64,
    /// Read rate of the slow client, in MB/s
    #[arg(long, value_name = "MB", default_value_t = 25)]
    slow_mb_s: u64,
    /// File sizes in MB, separated by commas
    #[arg(long, value_name = "MB", value_delimiter = ',', default_value = "100,1000")]
    file_mb: Vec<u64>,
    /// Number of transfers of each kind
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeat: usize,
    /// Directory for the disk of the plain file server; for a fair comparison on the file system of the data directory
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// Memory of the agent, idle and with 100 processes
    Memory,
    /// Many concurrent streams, and `true` meanwhile
    Streams,
    /// One long stream, with a fast and a slow reader
    Pour,
    /// File transfers, compared with a plain file server
    Files,
}

/// Runs the sections of the benchmark and returns their report.
///
/// # Errors
/// When the platform is not running, or a request fails.
pub(super) fn run(args: &Args) -> Result<String> {
    let mut report = conditions::line();
    let (url, key) = credentials(&args.data_dir)?;
    report.push_str(&format!(
        "platform at {url}, template base, one sandbox per section; 1 MB is 1,000,000 bytes\n"
    ));
    let sections = client_runtime()?.block_on(measure(args, &url, &key))?;
    report.push_str(&sections);
    Ok(report)
}

async fn measure(args: &Args, url: &str, key: &str) -> Result<String> {
    let run = Uuid::new_v4().simple().to_string();
    let platform = Target::find(url, key, "base".to_owned(), run).await?;
    let server = host::listener(platform.address.port())
        .with_context(|| format!("no process of this machine listens at {}", platform.address))?;
    let mut text = String::new();
    for what in &args.what {
        let before = host::agents();
        let mut client = Client::new(platform.clone());
        let sandbox = client.create().await?.sandbox;
        let subject = Subject {
            platform: platform.clone(),
            sandbox,
            server,
        };
        let measured = match what {
            What::Memory => memory::measure(&subject, &before).await,
            What::Streams => streams::measure(&subject, args.streams).await,
            What::Pour => pour::measure(&subject, args.pour_mb, args.slow_mb_s).await,
            What::Files => files::measure(&subject, &args.file_mb, args.repeat, &args.dir).await,
        };
        // Also after errors; otherwise it would run until its timeout.
        let deleted = client.delete(&subject.sandbox.id).await;
        text.push_str(&measured?);
        deleted?;
    }
    Ok(text)
}

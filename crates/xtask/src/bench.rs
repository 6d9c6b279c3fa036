//! `bench`: performance figures, with the conditions of the run.

mod agent;
mod conditions;
mod docs;
mod expiry;
mod ingress;
mod platform;
mod rest;

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Subcommand;
use measure::stats::Distribution;
use tokio::runtime::Runtime;

/// What to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Bench {
    /// Streams, files and memory of the agent in a sandbox of a running platform
    Agent(agent::Args),
    /// Lists and details of sandboxes over HTTP, with many rows in SQLite
    Rest(rest::Args),
    /// Calls of the documentation endpoint over HTTP
    Docs(docs::Args),
    /// Delay between the deadline of a sandbox and the request to the node to kill it
    Expiry(expiry::Args),
    /// Requests and downloads through the platform to a server in a sandbox, compared with nginx before the same server
    Ingress(ingress::Args),
    /// The HTTP server behind both proxies of `ingress`
    #[command(hide = true)]
    ServeHttp(ingress::serve::Args),
    /// The file server that `agent` compares with
    #[command(hide = true)]
    PlainFiles(agent::reference::Args),
}

/// Runs the benchmark and prints the report.
///
/// # Errors
/// When something could not be measured.
pub(crate) fn run(bench: Bench) -> Result<()> {
    let report = match bench {
        Bench::PlainFiles(args) => return agent::reference::serve(&args),
        Bench::ServeHttp(args) => return ingress::serve::run(&args),
        Bench::Ingress(args) => ingress::run(&args),
        Bench::Agent(args) => agent::run(&args),
        Bench::Rest(args) => rest::run(&args),
        Bench::Docs(args) => docs::run(&args),
        Bench::Expiry(args) => expiry::run(&args),
    }?;
    std::io::stdout()
        .write_all(report.as_bytes())
        .context("print the report")
}

/// The runtime of the client: one thread, because client and platform share the cores.
fn client_runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the client's event loop")
}

/// The URL and the key of the platform with this data directory.
fn credentials(data_dir: &Path) -> Result<(String, String)> {
    let path = data_dir.join("credentials.env");
    let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let value = |name: &str| {
        let mut lines = text.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
    };
    match (value("E2B_API_URL"), value("E2B_API_KEY")) {
        (Some(url), Some(key)) => Ok((url, key)),
        _ => bail!("{} names no address or no key", path.display()),
    }
}

/// The columns of [`row`].
const HEADER: [&str; 7] = ["milliseconds", "p50", "p90", "p99", "max", "mean", "n"];

/// A row of times.
fn row(what: &str, times: Vec<Duration>) -> Vec<String> {
    let mut row = vec![what.to_owned()];
    match Distribution::of(times) {
        Some(t) => {
            row.extend([t.p50_ms, t.p90_ms, t.p99_ms, t.max_ms, t.mean_ms].map(|ms| format!("{ms:.2}")));
            row.push(t.n.to_string());
        }
        None => row.extend(["-", "-", "-", "-", "-", "0"].map(str::to_owned)),
    }
    row
}

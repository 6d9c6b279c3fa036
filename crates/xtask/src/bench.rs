//! `bench`: performance figures, with the conditions of the run.

mod agent;
mod client;
pub(crate) mod conditions;
mod docs;
mod expiry;
mod host;
mod ingress;
mod platform;
mod rest;
mod times;

use std::io::Write as _;

use anyhow::{Context as _, Result};
use clap::Subcommand;

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

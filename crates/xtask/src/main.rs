//! Development tasks: generated files, rules of the repository, and benchmarks for the figures in
//! SPECIFICATION.md. Never part of a release.
//!
//! `cargo run -p xtask -- openapi` writes `api/openapi.json` and the reference pages in `docs/api`; `cargo run -p xtask -- tidy` checks the repository's rules.
//!
//! Build benchmarks with `--release`, and run them on an idle machine; every report includes its conditions.
//!
//! ```text
//! # The REST interface over 10,000 rows, and how late deadlines are kept. They bring a platform of their own, with
//! # SQLite on disk and a fake node.
//! cargo run --release -p xtask -- bench rest
//! cargo run --release -p xtask -- bench expiry
//! # The documentation endpoint, with such a platform.
//! cargo run --release -p xtask -- bench docs
//!
//! # The agent, in a sandbox of a platform that runs on this machine; as root. `--what memory,streams,pour,files`
//! # chooses; take `memory` while no other sandbox runs.
//! cargo build --release -p cli
//! target/x86_64-unknown-linux-gnu/release/ringfence up --data-dir /tmp/bench &
//! cargo run --release -p xtask -- bench agent --data-dir /tmp/bench
//! # The ingress beside nginx (Debian: nginx-light), with the same server behind both.
//! cargo run --release -p xtask -- bench ingress --data-dir /tmp/bench
//! target/x86_64-unknown-linux-gnu/release/ringfence down --data-dir /tmp/bench
//!
//! # Three servers place 300,000 sandboxes on 1,000 fake nodes. `--seed` makes another run.
//! cargo run --release -p xtask -- simulate
//! ```

#![expect(
    clippy::disallowed_methods,
    reason = "a program of developers: it starts others, tells the time and drives connections"
)]

mod bench;
mod reference;
mod root;
mod simulate;
mod tidy;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};

use self::root::root;

/// Development tasks.
#[derive(Debug, Parser)]
#[command(name = "xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Write api/openapi.json, and the reference pages in docs/api
    Openapi,
    /// Check the rules of the repository
    Tidy,
    /// Run a benchmark
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Place many sandboxes on many fake nodes, and check that none gets more than it may
    Simulate(simulate::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Openapi => write_api(),
        Task::Tidy => tidy::run(&root()),
        Task::Bench(bench) => bench::run(bench),
        Task::Simulate(args) => simulate::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("xtask: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes the OpenAPI document and the pages that describe it.
fn write_api() -> Result<()> {
    write("api/openapi.json", &server::api::document())?;
    for (path, text) in reference::pages()? {
        write(&path, &text)?;
    }
    Ok(())
}

/// Writes a file of the repository.
fn write(path: &str, text: &str) -> Result<()> {
    std::fs::write(root().join(path), text).with_context(|| format!("write {path}"))
}

#[expect(clippy::print_stderr, reason = "this is where a developer's tool speaks")]
fn complain(text: &str) {
    eprintln!("{text}");
}

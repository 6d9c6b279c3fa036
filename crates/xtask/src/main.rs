//! What developers run: files that are generated, and benches whose figures stand in SPECIFICATION.md. Never part of a
//! release.
//!
//! `cargo run -p xtask -- openapi` writes `api/openapi.json`.
//!
//! For benches build with `--release`, on a machine that does nothing else; every report names its conditions.
//!
//! ```text
//! # The REST interface over 10,000 rows, and how late deadlines are kept. They bring a platform of their own, with
//! # SQLite on disk and a node that only pretends.
//! cargo run --release -p xtask -- bench rest
//! cargo run --release -p xtask -- bench expiry
//!
//! # The agent, in a sandbox of a platform that runs on this machine; as root. `--what memory,streams,pour,files`
//! # chooses; take `memory` while no other sandbox runs.
//! cargo build --release -p cli
//! target/x86_64-unknown-linux-gnu/release/ringfence up --data-dir /tmp/bench &
//! cargo run --release -p xtask -- bench agent --data-dir /tmp/bench
//! target/x86_64-unknown-linux-gnu/release/ringfence down --data-dir /tmp/bench
//! ```

mod bench;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};

/// Tasks of this repository's developers.
#[derive(Debug, Parser)]
#[command(name = "xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Write api/openapi.json
    Openapi,
    /// Measure
    #[command(subcommand)]
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Openapi => write("api/openapi.json", &server::api::openapi::document()),
        Task::Bench(bench) => bench::run(bench),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("xtask: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Writes a file of the repository.
fn write(path: &str, text: &str) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::write(root.join(path), text).with_context(|| format!("write {path}"))
}

#[expect(clippy::print_stderr, reason = "this is where a developer's tool speaks")]
fn complain(text: &str) {
    eprintln!("{text}");
}

//! Destination and format of log lines: stderr, as text or as one JSON object per line.

use std::io::{self, IsTerminal};

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use crate::config::{Config, LogFormat};

/// The level of `up` on a terminal: what needs the operator, and what becomes of the templates that `--with` asked for.
pub(crate) const LEVEL_ON_TERMINAL: &str = "warn,ringfence::up_with=info";

/// Whether a person reads the log on a terminal, beside what the command itself prints there. JSON is for a program.
pub(crate) fn is_on_terminal(config: &Config) -> bool {
    config.log_format == LogFormat::Text && io::stderr().is_terminal()
}

/// Initialises logging. `default_level` applies if no level is configured.
///
/// # Errors
/// When the filter is invalid, or logging was initialised before.
pub(crate) fn start(config: &Config, default_level: &str) -> Result<()> {
    let directives = config.log_level.as_deref().unwrap_or(default_level);
    let filter = EnvFilter::try_new(directives).context("log_level")?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // A line that cannot be written, because the log's disk is full, would be told of by a panic.
        .log_internal_errors(false)
        .with_writer(io::stderr);
    let started = match config.log_format {
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("start logging: {error}"))
}

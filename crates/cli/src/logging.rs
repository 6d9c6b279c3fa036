//! Where log lines go and how they look: stderr, as text or as one JSON object per line.

use std::io::{self, IsTerminal};

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, Settings};

/// Starts logging for the rest of the process. `default_level` counts where nothing is configured.
///
/// # Errors
/// When the filter is of no use, or logging was started before.
pub(crate) fn start(settings: &Settings, default_level: &str) -> Result<()> {
    let directives = settings.log_level.as_deref().unwrap_or(default_level);
    let filter = EnvFilter::try_new(directives).context("log_level")?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr);
    let started = match settings.log_format {
        LogFormat::Text => builder.with_ansi(io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("start logging: {error}"))
}

//! Settings of traces, and of the export of metrics.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow};
use server::settings::{Endpoint, TelemetrySettings, parse_headers};

use super::egress::upstream_roots;

/// Maximum size of the file of headers, in bytes.
const HEADERS_MAX: u64 = 64 << 10;

/// Where traces and metrics are sent, and how many traces.
#[derive(Debug, Clone)]
pub(crate) struct TelemetryConfig {
    pub(super) endpoint: Endpoint,
    pub(super) headers_file: Option<PathBuf>,
    pub(super) ca_file: Option<PathBuf>,
    pub(super) sampling_ratio: f64,
}

impl TelemetryConfig {
    /// The settings, with what is in files.
    ///
    /// # Errors
    /// When a file cannot be read, or contains something else. What is in the file of headers is not shown.
    pub(crate) fn load(&self) -> Result<TelemetrySettings> {
        let headers = self.headers_file.as_deref().map(read_headers).transpose();
        let authorities = self.ca_file.as_deref().map(upstream_roots).transpose();
        Ok(TelemetrySettings {
            endpoint: self.endpoint.clone(),
            headers: headers.context("telemetry.otlp_headers_file")?.unwrap_or_default(),
            authorities: authorities.context("telemetry.ca_file")?.unwrap_or_default(),
            sampling_ratio: self.sampling_ratio,
        })
    }
}

fn read_headers(path: &Path) -> Result<http::HeaderMap> {
    let shown = path.display();
    let size = std::fs::metadata(path).with_context(|| format!("read {shown}"))?.len();
    anyhow::ensure!(
        size <= HEADERS_MAX,
        "{shown} has {size} bytes: the maximum is {HEADERS_MAX}"
    );
    let text = std::fs::read_to_string(path).with_context(|| format!("read {shown}"))?;
    parse_headers(&text).map_err(|why| anyhow!("{shown}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_and_never_shown() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("headers");
        assert!(read_headers(&path).is_err());
        std::fs::write(&path, "authorization: Bearer secret\n").unwrap();
        assert_eq!(read_headers(&path).unwrap()["authorization"], "Bearer secret");
        for text in ["secret".to_owned(), "x: secret\n".repeat(10_000)] {
            std::fs::write(&path, text).unwrap();
            let why = format!("{:#}", read_headers(&path).unwrap_err());
            assert!(why.contains("headers") && !why.contains("secret"), "{why}");
        }
    }
}

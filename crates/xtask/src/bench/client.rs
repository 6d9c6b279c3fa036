//! What a client of a measurement needs: its runtime, and the address and key of a platform.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use tokio::runtime::Runtime;

/// The runtime of the client: one thread, because client and platform share the cores.
pub(super) fn client_runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start the client's event loop")
}

/// The URL and the key of the platform with this data directory.
pub(super) fn credentials(data_dir: &Path) -> Result<(String, String)> {
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

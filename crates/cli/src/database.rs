//! The database of the platform for commands.

use std::process::ExitCode;

use anyhow::{Context, Result};
use store::Store;

use crate::accounts;
use crate::config::Config;
use crate::data_dir::DataDir;
use crate::one_thread;

/// Runs a command on the database. It may be the first one on a data directory: keys can be made before the first
/// start of the platform.
pub(crate) fn with_store(settings: &Config, command: impl AsyncFnOnce(&Store) -> Result<()>) -> Result<ExitCode> {
    DataDir::prepare(&settings.data_dir)?;
    let runtime = one_thread::runtime()?;
    runtime.block_on(async {
        let store = open_store(settings).await?;
        accounts::default_account(&store).await?;
        let outcome = command(&store).await;
        store.close().await;
        outcome
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Opens the database. The address stays out of the error: it may hold a password.
pub(crate) async fn open_store(settings: &Config) -> Result<Store> {
    Store::open(settings.database_url.expose())
        .await
        .context("open the database (database_url)")
}

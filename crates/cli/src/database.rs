//! The database of the platform for commands.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use runtime::files::if_there;
use store::Store;

use crate::accounts;
use crate::config::Config;
use crate::data_dir::{DataDir, write_and_rename};
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

/// What the name of the file has at its end that says that the rows of a file of SQLite were copied to another database.
const MOVED: &str = ".moved";

/// The file that says that the rows of a file of SQLite were copied to another database.
pub(crate) fn moved_mark(database: &Path) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push(MOVED);
    path.into()
}

/// Whether the rows of a file of SQLite were copied to another database.
pub(crate) fn is_moved(database: &Path) -> bool {
    moved_mark(database).exists()
}

/// Keeps everything from starting on a file of SQLite: its rows are, or are about to be, in another database.
pub(crate) fn mark_moved(database: &Path) -> Result<()> {
    let path = moved_mark(database);
    let text = format!(
        "The rows of {} were copied to a PostgreSQL database by `ringfence split database`; repeat it if it was interrupted. \
         Nothing starts on the file while this one is here.\n{}\n",
        database.display(),
        what_to_do(&path)
    );
    write_and_rename(&path, 0o600, text.as_bytes()).with_context(|| format!("write {}", path.display()))
}

/// Undoes [`mark_moved`].
pub(crate) fn unmark_moved(database: &Path) -> Result<()> {
    let path = moved_mark(database);
    if_there(fs::remove_file(&path)).with_context(|| format!("remove {}", path.display()))?;
    Ok(())
}

fn what_to_do(mark: &Path) -> String {
    format!(
        "Name the PostgreSQL database with database_url, or RINGFENCE_DATABASE_URL in the unit of the service. To go back to the \
         file instead, remove {}, but only if nothing has run on the PostgreSQL database: the file knows nothing of what has \
         happened since, and sandboxes that it does not know are ended.",
        mark.display()
    )
}

/// Checks that the database is not a file whose rows are in another database by now.
///
/// # Errors
/// When it is, with what to do.
pub(crate) fn require_current(settings: &Config) -> Result<()> {
    match settings.database_url.file() {
        Some(file) if is_moved(&file) => bail!(
            "the rows of {} were copied to a PostgreSQL database. {}",
            file.display(),
            what_to_do(&moved_mark(&file))
        ),
        _ => Ok(()),
    }
}

/// Opens the database. The address stays out of the error: it may hold a password.
pub(crate) async fn open_store(settings: &Config) -> Result<Store> {
    require_current(settings)?;
    Store::open(settings.database_url.expose())
        .await
        .context("open the database (database_url)")
}

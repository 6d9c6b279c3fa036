//! `ringfence split`: the steps from a platform in one process to a server and its node. The platform is stopped meanwhile, and its
//! sandboxes go on.
//!
//! First the rows of the file of SQLite are copied to PostgreSQL, then the data directory becomes that of a node in place, where the
//! sandboxes are, and what belongs to the server goes to a directory of its own. Each step can be repeated after it was interrupted.

use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use link::{Address, Credentials};
use runtime::files::if_there;
use store::Store;

use crate::args::SplitCommand;
use crate::config::Config;
use crate::config::database_url::DatabaseUrl;
use crate::data_dir::{self, DataDir};
use crate::database::open_store;
use crate::master_key::MasterKey;
use crate::node_files::{self, Joined, Role};
use crate::{credentials, node_identity, one_thread, output};

/// Directories of a platform that are a server's.
const DIRECTORIES: [&str; 3] = ["tls", "builds", "blobs"];

/// Runs the command.
///
/// # Errors
/// When the data directory is in use or of another kind, or a step fails.
pub(crate) fn run(settings: &Config, command: &SplitCommand) -> Result<ExitCode> {
    let runtime = one_thread::runtime()?;
    runtime.block_on(async {
        match command {
            SplitCommand::Database => move_rows(settings).await,
            SplitCommand::Node { server_dir, servers } => separate(settings, server_dir, servers).await,
        }
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Copies the file of SQLite in the data directory to the database of the configuration.
async fn move_rows(settings: &Config) -> Result<()> {
    if settings.has_own_database() {
        bail!("set database_url to an empty PostgreSQL database, to which the rows are copied");
    }
    let dir = DataDir::existing(&settings.data_dir)?;
    node_files::require(&dir, Role::Platform)?;
    let _lock = dir.lock()?;
    let own = DatabaseUrl::within(&settings.data_dir);
    if !own.file().is_some_and(|file| file.exists()) {
        bail!("{} has no database of its own", dir.path().display());
    }
    let file = Store::open(own.expose())
        .await
        .context("open the database in the data directory")?;
    let store = open_store(settings).await?;
    let moved = store.fill_from(&file).await;
    file.close().await;
    store.close().await;
    let moved = moved.context("copy the rows")?;
    output::text(&format!(
        "copied {moved} rows; the file stays as it is, and is not used any more while database_url is set\n"
    ))?;
    Ok(())
}

/// Makes the data directory that of a node, and another one that of its server.
async fn separate(settings: &Config, server_dir: &Path, servers: &[String]) -> Result<()> {
    let servers = servers.iter().map(|server| server.parse().map_err(anyhow::Error::msg));
    let servers: Vec<Address> = servers.collect::<Result<_>>()?;
    if settings.has_own_database() {
        bail!("the database is in the data directory: copy it with `ringfence split database` first");
    }
    let dir = DataDir::existing(&settings.data_dir)?;
    if !dir.path().join(node_identity::FILE).exists() || dir.path().join(node_files::SERVER).exists() {
        bail!("{} is not the data directory of a platform", dir.path().display());
    }
    let _lock = dir.lock()?;
    let node = node_identity::node_of(&dir)?;
    let server = DataDir::prepare(server_dir)?;
    node_files::require(&server, Role::Server)?;
    let server_lock = server.lock()?;
    node_files::mark_server(&server)?;
    // Of what an earlier attempt has moved, only the copy is left.
    for name in [data_dir::MASTER_FILE, credentials::FILE, credentials::TLS_FILE] {
        if let Some(content) = dir.read(name)? {
            server.write_private(name, &content)?;
        }
    }
    let identity = node_identity::load(&server, &server_lock, false)?;
    let store = open_store(settings).await?;
    let separated = async {
        let master = MasterKey::of(&server, &settings.master_key)?;
        let authority = node_files::authority(&server, &store, &master).await?;
        let (name, now) = (node_identity::host_name(), crate::clock::now());
        let now_us = now.as_microsecond();
        store.node_separate(&node, &name, &identity.id, now_us).await?;
        let credentials = Credentials::issued_by(&authority, &node, SystemTime::from(now))?;
        node_files::keep(&dir, &Joined { servers, credentials })?;
        Ok::<_, anyhow::Error>(())
    };
    let separated = separated.await;
    store.close().await;
    separated?;
    for name in DIRECTORIES {
        move_directory(&dir.path().join(name), &server.path().join(name)).with_context(|| format!("move {name}"))?;
    }
    // The host of the node has no secrets of the platform from now on.
    for name in [data_dir::MASTER_FILE, credentials::FILE, credentials::TLS_FILE] {
        dir.remove(name)?;
    }
    // Last: until then, this can be repeated.
    dir.remove(node_identity::FILE)?;
    output::text(&format!(
        "{} is the data directory of node {node}, and {} that of its server\n",
        dir.path().display(),
        server.path().display()
    ))?;
    Ok(())
}

/// Moves a directory, on one file system or to another one.
fn move_directory(from: &Path, to: &Path) -> io::Result<()> {
    if if_there(fs::metadata(from))?.is_none() {
        return Ok(());
    }
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => {}
        moved => return moved,
    }
    copy_directory(from, to)?;
    fs::remove_dir_all(from)
}

/// Copies a directory of directories and plain files, each with its mode.
fn copy_directory(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    fs::set_permissions(to, fs::metadata(from)?.permissions())?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_directory(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}

//! `ringfence split`: the steps from a platform in one process to a server and its node. The platform is stopped meanwhile, and its
//! sandboxes go on.
//!
//! First the rows of the file of SQLite are copied to PostgreSQL, then the data directory becomes that of a node in place, where the
//! sandboxes are, and what belongs to the server goes to a directory of its own. Each step can be repeated after it was interrupted.

mod files;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use link::{Address, Credentials};
use store::Store;
use store::transfer::TransferError;

use crate::args::SplitCommand;
use crate::config::Config;
use crate::config::database_url::DatabaseUrl;
use crate::data_dir::{self, DataDir};
use crate::database::{self, open_store};
use crate::master_key::{self, MasterKey};
use crate::node_files::{self, Joined, Role};
use crate::{credentials, node_identity, one_thread, output};

/// Directories of a platform that are a server's.
const DIRECTORIES: [&str; 3] = ["tls", "builds", "blobs"];
/// Files of a platform that are a server's.
const FILES: [&str; 3] = [data_dir::MASTER_FILE, credentials::FILE, credentials::TLS_FILE];
/// What the names of the files of SQLite have at their end.
const OF_SQLITE: [&str; 3] = ["", "-wal", "-shm"];
/// Name of the file in the data directory of a server whose content is the id of the node, from when the server has the keys until
/// it has everything.
const UNFINISHED: &str = "split.unfinished";

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
    let Some(path) = own.file().filter(|file| file.exists()) else {
        bail!("{} has no database of its own", dir.path().display());
    };
    let file = Store::open(own.expose())
        .await
        .context("open the database in the data directory")?;
    let store = open_store(settings).await?;
    // First: from the moment on at which the rows are in the other database, nothing may start on the file.
    let is_marked = database::is_moved(&path);
    database::mark_moved(&path)?;
    let moved = store.fill_from(&file).await;
    file.close().await;
    store.close().await;
    // Whether the rows are there is not known of a database that has failed.
    if !is_marked
        && matches!(
            moved,
            Err(TransferError::Kind | TransferError::NotEmpty { .. } | TransferError::InUse)
        )
    {
        database::unmark_moved(&path)?;
    }
    let moved = moved.with_context(|| {
        if database::is_moved(&path) {
            format!("copy the rows (nothing starts on {} meanwhile)", path.display())
        } else {
            "copy the rows".to_owned()
        }
    })?;
    output::text(&format!(
        "copied {moved} rows; {} stays as it is, and nothing starts on it any more: {} says how to go back\n",
        path.display(),
        database::moved_mark(&path).display()
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
    let is_repeated = server
        .read_text(UNFINISHED)?
        .is_some_and(|of| of.trim() == node.as_str());
    check_targets(&dir, &server, is_repeated)?;
    node_files::mark_server(&server)?;
    // Of what an earlier attempt has moved, only the copy is left, or what the server has made of it since.
    for name in FILES {
        if let Some(content) = dir.read(name)?
            && server.read(name)?.is_none()
        {
            server.write_private(name, &content)?;
        }
    }
    server.write_private(UNFINISHED, node.as_str().as_bytes())?;
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
        files::move_directory(&dir.path().join(name), &server.path().join(name))
            .with_context(|| format!("move {name}"))?;
    }
    move_old_database(&dir, &server)?;
    // The data directory of the node has no secrets of the platform from now on.
    for name in FILES {
        dir.remove(name)?;
    }
    server.remove(UNFINISHED)?;
    for synced in [&server, &dir] {
        files::sync(synced.path()).context("write what was moved to disk")?;
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

/// Checks everything in the directory of a server that is in the way of what is moved there, before anything is. `is_repeated` says
/// that an earlier attempt has copied the keys.
fn check_targets(dir: &DataDir, server: &DataDir, is_repeated: bool) -> Result<()> {
    let [_, next] = master_key::files();
    for dir in [dir, server] {
        if dir.path().join(&next).exists() {
            bail!(
                "{} is left of a rotation of the master key that was interrupted: finish it first, with `ringfence master-key \
                 rotate`",
                dir.path().join(&next).display()
            );
        }
    }
    for name in FILES {
        // The server may have written its addresses since. Nothing in the database can be opened with another master key.
        if is_repeated && name != data_dir::MASTER_FILE {
            continue;
        }
        check_file(&dir.path().join(name), &server.path().join(name))?;
    }
    for (from, to) in old_database(dir, server) {
        check_file(&from, &to)?;
    }
    for name in DIRECTORIES {
        files::check_directory(&dir.path().join(name), &server.path().join(name))
            .with_context(|| format!("move {name}"))?;
    }
    Ok(())
}

fn check_file(from: &Path, to: &Path) -> Result<()> {
    let agree = files::agree(from, to).with_context(|| format!("compare {} with {}", to.display(), from.display()))?;
    if !agree {
        bail!(
            "{} has another content than {}, as if a server of another platform used the directory: name another one for the \
             server, or move that file away",
            to.display(),
            from.display()
        );
    }
    Ok(())
}

/// The files of the database that was in the data directory, and where they go.
fn old_database(dir: &DataDir, server: &DataDir) -> Vec<(PathBuf, PathBuf)> {
    let file = |dir: &DataDir| DatabaseUrl::within(dir.path()).file();
    let (Some(from), Some(to)) = (file(dir), file(server)) else {
        return Vec::new();
    };
    let of = |path: &Path, suffix| {
        let mut path = path.as_os_str().to_owned();
        path.push(suffix);
        PathBuf::from(path)
    };
    let files = OF_SQLITE.iter();
    files.map(|suffix| (of(&from, suffix), of(&to, suffix))).collect()
}

/// Moves the database that was in the data directory, which has hashes of keys and sealed secrets, to that of the server.
fn move_old_database(dir: &DataDir, server: &DataDir) -> Result<()> {
    let files = old_database(dir, server);
    let Some((from, to)) = files.first() else {
        return Ok(());
    };
    if from.exists() {
        // An earlier version may have copied it to PostgreSQL.
        database::mark_moved(to)?;
    }
    for (from, to) in &files {
        files::move_file(from, to).with_context(|| format!("move {}", from.display()))?;
    }
    database::unmark_moved(from)
}

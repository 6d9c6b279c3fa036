//! A PostgreSQL server for the suite: on a Unix socket in a temporary directory, without TCP, removed when dropped.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

/// A running server.
pub(crate) struct Server {
    child: Child,
    log: Option<JoinHandle<()>>,
    dir: TempDir,
}

impl Server {
    /// Starts a server and waits until it accepts connections.
    ///
    /// # Panics
    /// When PostgreSQL is not installed, or does not start.
    pub(crate) fn start() -> Self {
        let bin = binary_directory()
            .expect("PostgreSQL is not installed and the suite requires it: apt-get install postgresql");
        let dir = tempfile::Builder::new().prefix("store-pg-").tempdir().unwrap();
        let user = unprivileged_user();
        if let Some((uid, gid)) = user {
            chown(dir.path(), Some(uid), Some(gid)).unwrap();
        }
        let data = dir.path().join("data");
        let made = as_user(user, &bin.join("initdb"), dir.path())
            .args([
                "--no-sync",
                "--username=postgres",
                "--auth=trust",
                "--encoding=UTF8",
                "--locale=C",
                "-D",
            ])
            .arg(&data)
            .output()
            .unwrap();
        assert!(
            made.status.success(),
            "initdb: {}",
            String::from_utf8_lossy(&made.stderr)
        );
        let (child, log) = launch(dir.path());
        Self { child, log, dir }
    }

    /// Stops the server, as a crash would.
    pub(crate) fn stop(&mut self) {
        // SIGQUIT ends a server immediately and, unlike SIGKILL, releases its shared memory.
        let sent = kill_process(Pid::from_child(&self.child), Signal::QUIT);
        let ended = self.child.wait();
        if let Some(log) = self.log.take() {
            let _ = log.join();
        }
        if !std::thread::panicking() {
            sent.unwrap();
            ended.unwrap();
        }
    }

    /// Starts the server again after [`Self::stop`].
    pub(crate) fn start_again(&mut self) {
        (self.child, self.log) = launch(self.dir.path());
    }

    /// The address of a database of this server.
    pub(crate) fn url(&self, database: &str) -> String {
        format!(
            "postgres://postgres@localhost/{database}?host={}",
            self.dir.path().display()
        )
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts a server on its data and waits until it accepts connections.
fn launch(dir: &Path) -> (Child, Option<JoinHandle<()>>) {
    let bin = binary_directory().unwrap();
    let mut child = as_user(unprivileged_user(), &bin.join("postgres"), dir)
        .arg("-D")
        .arg(dir.join("data"))
        .args([
            "-c",
            "listen_addresses=",
            "-c",
            "fsync=off",
            "-c",
            "full_page_writes=off",
            "-c",
        ])
        .arg(format!("unix_socket_directories={}", dir.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut output = Vec::new();
    loop {
        let Some(Ok(line)) = lines.next() else {
            let _ = child.kill();
            let _ = child.wait();
            panic!("PostgreSQL did not start: {output:#?}");
        };
        if line.contains("ready to accept connections") {
            break;
        }
        output.push(line);
    }
    // The pipe must be read, or the server blocks once it is full.
    let log = std::thread::spawn(move || lines.for_each(drop));
    (child, Some(log))
}

/// The directory with `initdb` and `postgres`: Debian's newest, else one on the path.
fn binary_directory() -> Option<PathBuf> {
    let mut debian: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.flatten().map(|entry| entry.path().join("bin")).collect())
        .unwrap_or_default();
    debian.sort_by_key(|path| version_of(path));
    let path = std::env::var_os("PATH").unwrap_or_default();
    debian
        .into_iter()
        .rev()
        .chain(std::env::split_paths(&path))
        .find(|dir| dir.join("initdb").exists() && dir.join("postgres").exists())
}

fn version_of(bin: &Path) -> u32 {
    let version = bin.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    version.and_then(|name| name.parse().ok()).unwrap_or(0)
}

/// The user and group to run the server as when this runs as root, which PostgreSQL refuses.
fn unprivileged_user() -> Option<(u32, u32)> {
    if !geteuid().is_root() {
        return None;
    }
    let passwd = fs::read_to_string("/etc/passwd").unwrap();
    let find = |wanted: &str| {
        passwd.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            (fields.first() == Some(&wanted)).then(|| (fields[2].parse().unwrap(), fields[3].parse().unwrap()))
        })
    };
    Some(
        find("postgres")
            .or_else(|| find("nobody"))
            .expect("a user postgres or nobody"),
    )
}

/// A command as that user, which gets SIGQUIT when the thread that started it ends, so that killing the suite ends its
/// server.
fn as_user(user: Option<(u32, u32)>, program: &Path, dir: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "QUIT"]);
    if let Some((uid, gid)) = user {
        command.args([
            format!("--reuid={uid}"),
            format!("--regid={gid}"),
            "--clear-groups".to_owned(),
        ]);
    }
    command.arg(program).current_dir(dir).env("LC_ALL", "C");
    command
}

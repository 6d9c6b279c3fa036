//! The built binary as its operator meets it: arguments, exit codes, streams, files.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(
    clippy::disallowed_methods,
    reason = "a test starts the binary, without the environment of its own"
)]

mod accounts;
mod doctor;
mod install;
mod package;
mod platform;
#[path = "../../../store/tests/it/postgres.rs"]
mod postgres;
#[cfg(target_arch = "x86_64")]
mod spawner;
mod split;
mod usage;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

/// A place of its own for one test.
struct TestDir {
    temp: TempDir,
    /// The database, where it is not the one in the data directory.
    database_url: Option<String>,
}

impl TestDir {
    fn new() -> Self {
        Self {
            temp: tempfile::tempdir().unwrap(),
            database_url: None,
        }
    }

    /// Creates a test directory whose database others share.
    fn on(database_url: String) -> Self {
        Self {
            database_url: Some(database_url),
            ..Self::new()
        }
    }

    fn data_dir(&self) -> PathBuf {
        self.temp.path().join("data")
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.temp.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// A command of the binary on this data directory.
    fn ringfence(&self, arguments: &[&str]) -> Command {
        let mut command = command(Path::new(env!("CARGO_BIN_EXE_ringfence")));
        command.args(arguments).arg("--data-dir").arg(self.data_dir());
        // Tests count what there is of sandboxes on the host.
        command.env("RINGFENCE_POOL_BASE", "0");
        if let Some(url) = &self.database_url {
            command.env("RINGFENCE_DATABASE_URL", url);
        }
        command
    }

    fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(&mut self.ringfence(arguments))
    }
}

/// A command without anything of ours in its environment.
fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).current_dir("/");
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("RINGFENCE_") || name.starts_with("E2B_") {
            command.env_remove(name);
        }
    }
    // What is kept of a pause must not depend on the host.
    command.env("RINGFENCE_PAUSE_CRIU", "off");
    command
}

/// The result of a command.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn of(command: &mut Command) -> Self {
        command.output().unwrap().into()
    }

    /// Checks that the exit code is this.
    #[track_caller]
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }

    /// Checks that stderr names all of these.
    #[track_caller]
    fn complains_of(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(self.stderr.contains(part), "{part}: {self:?}");
        }
        self
    }

    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl From<Output> for Ran {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

//! The programs as a build uses them: a job file goes in, a file system and a result come out.
//!
//! Owners and modes need root, which also the programs have.

#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests start programs, and a failed step of a test is a failed test"
)]

mod archive;
mod copy;
mod fake;
mod hostile;
mod provision;
mod pull;
mod registry;
mod unpack;

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use image::Program;
use protocol::image::Progress;
use serde::Serialize;
use tempfile::TempDir;

/// Runs a program with a job. Lines of its log are collected in front of the result.
fn run(program: Program, job: &impl Serialize) -> Result<Progress, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("job.json");
    std::fs::write(&path, serde_json::to_vec(job).unwrap()).unwrap();
    let done = image::execute(program, &path, jiff::Timestamp::UNIX_EPOCH, &mut |_| Ok(()));
    assert!(!path.exists(), "the job is deleted");
    done.map_err(|error| format!("{error:#}"))
}

/// A root file system and directories beside it.
struct Root {
    directory: TempDir,
}

impl Root {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["root", "work"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        Self { directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("root")
    }

    fn work(&self) -> PathBuf {
        self.directory.path().join("work")
    }

    fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.path().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// `TYPE MODE UID:GID`, or "missing".
    fn state(&self, path: &str) -> String {
        state(&self.path().join(path))
    }

    /// All paths with their states, links with their targets.
    fn listing(&self) -> Vec<String> {
        let mut lines = Vec::new();
        list(&self.path(), "", &mut lines);
        lines
    }
}

fn state(path: &Path) -> String {
    let Ok(data) = path.symlink_metadata() else {
        return "missing".to_owned();
    };
    let kind = match data.file_type() {
        kind if kind.is_dir() => 'd',
        kind if kind.is_symlink() => 'l',
        kind if kind.is_file() => 'f',
        _ => '?',
    };
    let mode = data.permissions().mode() & 0o7777;
    format!("{kind} {mode:o} {}:{}", data.uid(), data.gid())
}

fn list(directory: &Path, above: &str, lines: &mut Vec<String>) {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap())
        .collect();
    names.sort_by_key(std::fs::DirEntry::file_name);
    for entry in names {
        let path = format!("{above}{}", entry.file_name().to_string_lossy());
        match std::fs::read_link(entry.path()) {
            Ok(target) => lines.push(format!("{path} -> {}", target.display())),
            Err(_) => lines.push(format!("{path} {}", state(&entry.path()))),
        }
        if entry.file_type().unwrap().is_dir() {
            list(&entry.path(), &format!("{path}/"), lines);
        }
    }
}

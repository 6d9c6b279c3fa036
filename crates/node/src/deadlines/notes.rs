//! The notes of deadlines on disk, which outlive the process of the node: one small file for each sandbox.
//!
//! A note of a sandbox that runs ends with the boot of the host, as the sandbox does, and need not survive a loss of power. That
//! the node has begun to end or pause a sandbox must: it is written out before.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use model::id::SandboxId;
use runtime::files::if_there;
use serde::{Deserialize, Serialize};

use super::queue::Note;

const UNFINISHED: &str = ".new";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A directory with notes.
#[derive(Debug)]
pub(super) struct Notes {
    dir: PathBuf,
    /// Which boot of the host this is.
    boot: String,
}

/// A note as it is stored.
#[derive(Serialize, Deserialize)]
struct Stored {
    boot: String,
    #[serde(flatten)]
    note: Note,
}

/// A note that was read.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) id: SandboxId,
    pub(super) note: Note,
    /// Whether it is of this boot of the host.
    pub(super) is_of_this_boot: bool,
}

impl Notes {
    /// Opens a directory, which is made if it is not there.
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        Ok(Self {
            dir: dir.to_owned(),
            boot: fs::read_to_string(BOOT_ID)?.trim_end().to_owned(),
        })
    }

    /// Every note. What cannot be read is removed: its server tells the deadline again.
    pub(super) fn read(&self) -> io::Result<Vec<Found>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let id = path.file_name().and_then(|name| name.to_str()?.parse().ok());
            let stored = fs::read(&path).ok();
            let stored = stored.and_then(|text| serde_json::from_slice::<Stored>(&text).ok());
            match (id, stored) {
                (Some(id), Some(Stored { boot, note })) => all.push(Found {
                    id,
                    note,
                    is_of_this_boot: boot == self.boot,
                }),
                _ => drop(if_there(fs::remove_file(&path))?),
            }
        }
        Ok(all)
    }

    /// Writes a note. One of what was begun survives a loss of power when this returns.
    pub(super) fn write(&self, id: &SandboxId, note: &Note) -> io::Result<()> {
        let path = self.dir.join(id.as_str());
        let unfinished = self.dir.join(format!("{id}{UNFINISHED}"));
        let text = serde_json::to_vec(&Stored {
            boot: self.boot.clone(),
            note: note.clone(),
        })?;
        let mut file = File::create(&unfinished)?;
        file.write_all(&text)?;
        if note.begun.is_some() {
            file.sync_all()?;
        }
        fs::rename(unfinished, path)?;
        if note.begun.is_some() {
            File::open(&self.dir)?.sync_all()?;
        }
        Ok(())
    }

    /// Removes a note, if it is there.
    pub(super) fn remove(&self, id: &SandboxId) -> io::Result<()> {
        if_there(fs::remove_file(self.dir.join(id.as_str()))).map(drop)
    }
}

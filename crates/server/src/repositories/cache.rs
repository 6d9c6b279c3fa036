//! Copies of repositories, per team, so that the next sandbox need not fetch everything again.
//!
//! A copy is a git bundle in a file, named by the digest of team and address, the digest of the references that it has,
//! and the time of the fetch:
//!
//! ```text
//! <key>.<references>.<seconds since 1970>.bundle
//! ```
//!
//! It is written under another name, synced and renamed, so a crash leaves either all of it or a file that the next start
//! removes. Copies that were not used for longest are removed first. The files are of one server; no git process of the
//! host ever reads them.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use model::id::TeamId;
use model::repository::RepositoryUrl;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::sync::mpsc;

use crate::agent::{Output, Pieces};
use crate::settings::RepositorySettings;

/// Digits of a digest in the name of a file: 128 bits.
const DIGITS: usize = 32;
/// Size of the pieces in which a copy is read.
const PIECE: usize = 256 << 10;
/// Suffix of a copy that is complete.
const SUFFIX: &str = ".bundle";
/// Suffix of one that is being written.
const PARTIAL: &str = ".partial";

/// Names the copies of a repository of a team.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct MirrorKey {
    team: String,
    repository: String,
}

impl MirrorKey {
    pub(super) fn new(team: &TeamId, url: &RepositoryUrl) -> Self {
        let team = digest(&[team.as_str().as_bytes()]);
        Self {
            repository: digest(&[team.as_bytes(), url.key().as_bytes()]),
            team: team[..8].to_owned(),
        }
    }

    /// How the names of its files begin.
    fn prefix(&self) -> String {
        format!("{}-{}", self.team, self.repository)
    }
}

fn digest(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
        hash.update([0]);
    }
    short(&hash.finalize())
}

/// The first digits of a digest.
pub(super) fn short(digest: &[u8]) -> String {
    hex::encode(&digest[..DIGITS / 2])
}

/// A copy of a repository in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mirror {
    path: PathBuf,
    references: String,
    fetched_s: u64,
    bytes: u64,
    /// Raised by each use of any copy.
    used: u64,
}

#[derive(Debug, Default)]
struct State {
    mirrors: HashMap<MirrorKey, Mirror>,
    uses: u64,
    /// Bytes of files that are being written.
    written: u64,
}

/// A copy that is open, so that it can be read even if it is removed.
#[derive(Debug)]
pub(super) struct OpenMirror {
    file: File,
    /// Size of the copy.
    pub(super) bytes: u64,
    /// The digest of its references.
    pub(super) references: String,
    /// When the copy was fetched, in seconds since 1970.
    pub(super) fetched_s: u64,
}

impl OpenMirror {
    /// Its content, read on another thread.
    pub(super) fn content(self) -> Pieces {
        let (sender, receiver) = mpsc::channel(2);
        let mut file = self.file;
        tokio::task::spawn_blocking(move || {
            loop {
                let mut piece = vec![0; PIECE];
                let read = match file.read(&mut piece) {
                    Ok(0) => return,
                    Ok(read) => {
                        piece.truncate(read);
                        Ok(Bytes::from(piece))
                    }
                    Err(error) => Err(error),
                };
                let failed = read.is_err();
                if sender.blocking_send(read).is_err() || failed {
                    return;
                }
            }
        });
        Pieces(receiver)
    }
}

/// The copies of one server.
#[derive(Debug)]
pub(super) struct MirrorCache {
    directory: PathBuf,
    settings: RepositorySettings,
    state: Mutex<State>,
}

impl MirrorCache {
    /// The copies in a directory, which is made if it does not exist. Incomplete files and all others are removed.
    pub(super) fn open(directory: &Path, settings: &RepositorySettings) -> io::Result<Self> {
        let made = DirBuilder::new().mode(0o700).create(directory);
        if let Err(error) = made
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            return Err(error);
        }
        let mut found: Vec<(MirrorKey, Mirror)> = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            let parsed = entry.file_name().to_str().and_then(parse_name);
            match (parsed, entry.metadata()) {
                (Some((key, references, fetched_s)), Ok(metadata)) if metadata.is_file() => {
                    let mirror = Mirror {
                        path: entry.path(),
                        references,
                        fetched_s,
                        bytes: metadata.len(),
                        used: 0,
                    };
                    found.push((key, mirror));
                }
                _ => drop(fs::remove_file(entry.path())),
            }
        }
        // How they were used is not stored; the last fetch is the best guess.
        found.sort_by_key(|(_, mirror)| mirror.fetched_s);
        let cache = Self {
            directory: directory.to_owned(),
            settings: settings.clone(),
            state: Mutex::default(),
        };
        for (key, mirror) in found {
            cache.insert(key, mirror);
        }
        Ok(cache)
    }

    /// The copy of a repository, if there is one that is not too old.
    pub(super) fn find(&self, key: &MirrorKey, now_s: u64) -> Option<OpenMirror> {
        let mut state = self.state.lock();
        state.uses += 1;
        let used = state.uses;
        let mirror = state.mirrors.get_mut(key)?;
        mirror.used = used;
        let hard = u64::from(self.settings.hard_age_s);
        if now_s.saturating_sub(mirror.fetched_s) > hard {
            return None;
        }
        match File::open(&mirror.path) {
            Ok(file) => Some(OpenMirror {
                file,
                bytes: mirror.bytes,
                references: mirror.references.clone(),
                fetched_s: mirror.fetched_s,
            }),
            Err(error) => {
                tracing::warn!("cannot read a copy of a repository: {error}");
                state.mirrors.remove(key);
                None
            }
        }
    }

    /// Begins to write a copy.
    pub(super) fn create(&self) -> io::Result<NewMirror> {
        let name = {
            let mut state = self.state.lock();
            state.written += 1;
            format!("{}{PARTIAL}", state.written)
        };
        let path = self.directory.join(name);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)?;
        Ok(NewMirror {
            file: Some(Arc::new(Mutex::new(file))),
            path,
            bytes: 0,
            limit: self.settings.bundle_bytes,
        })
    }

    /// Keeps a copy that was written completely, in place of the one before.
    pub(super) async fn keep(
        &self,
        key: &MirrorKey,
        mut new: NewMirror,
        references: &str,
        fetched_s: u64,
    ) -> io::Result<()> {
        let name = format!("{}.{references}.{fetched_s}{SUFFIX}", key.prefix());
        let path = self.directory.join(name);
        let (from, to, directory) = (new.path.clone(), path.clone(), self.directory.clone());
        let file = new.file.take();
        let synced = tokio::task::spawn_blocking(move || {
            if let Some(file) = file {
                file.lock().sync_all()?;
            }
            fs::rename(&from, &to)?;
            File::open(&directory)?.sync_all()
        });
        synced.await.unwrap_or_else(|error| Err(io::Error::other(error)))?;
        let bytes = new.bytes;
        new.path = PathBuf::new();
        let mirror = Mirror {
            path,
            references: references.to_owned(),
            fetched_s,
            bytes,
            used: 0,
        };
        self.insert(key.clone(), mirror);
        Ok(())
    }

    /// Adds a copy as the last one used, and removes others until all limits are kept.
    fn insert(&self, key: MirrorKey, mut mirror: Mirror) {
        let mut state = self.state.lock();
        state.uses += 1;
        mirror.used = state.uses;
        let path = mirror.path.clone();
        if let Some(before) = state.mirrors.insert(key, mirror)
            && before.path != path
        {
            remove(&before.path);
        }
        let RepositorySettings {
            team_bytes,
            total_bytes,
            mirrors,
            ..
        } = self.settings;
        loop {
            let all = || state.mirrors.iter();
            let oldest = |team: Option<&str>| {
                all()
                    .filter(|(key, _)| team.is_none_or(|team| key.team == team))
                    .min_by_key(|(_, mirror)| mirror.used)
                    .map(|(key, _)| key.clone())
            };
            let mut by_team: HashMap<&str, u64> = HashMap::new();
            for (key, mirror) in all() {
                *by_team.entry(&key.team).or_default() += mirror.bytes;
            }
            let over = by_team.iter().find(|(_, bytes)| **bytes > team_bytes);
            let victim = if let Some((team, _)) = over {
                oldest(Some(team))
            } else if by_team.values().sum::<u64>() > total_bytes || state.mirrors.len() > mirrors {
                oldest(None)
            } else {
                return;
            };
            let Some(removed) = victim.and_then(|key| state.mirrors.remove(&key)) else {
                return;
            };
            remove(&removed.path);
        }
    }

    /// How many copies there are, and their size in bytes.
    pub(super) fn size(&self) -> (usize, u64) {
        let state = self.state.lock();
        (
            state.mirrors.len(),
            state.mirrors.values().map(|mirror| mirror.bytes).sum(),
        )
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path) {
        tracing::warn!("cannot remove a copy of a repository: {error}");
    }
}

/// The parts of the name of a copy.
fn parse_name(name: &str) -> Option<(MirrorKey, String, u64)> {
    let is_hex = |text: &str| text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let mut parts = name.strip_suffix(SUFFIX)?.split('.');
    let (key, references, fetched) = (parts.next()?, parts.next()?, parts.next()?);
    let (team, repository) = key.split_once('-')?;
    let fits = team.len() == 8
        && repository.len() == DIGITS
        && references.len() == DIGITS
        && [team, repository, references].into_iter().all(is_hex)
        && parts.next().is_none();
    let key = MirrorKey {
        team: team.to_owned(),
        repository: repository.to_owned(),
    };
    fits.then_some((key, references.to_owned(), fetched.parse().ok()?))
}

/// A copy that is being written. Dropping it removes it.
#[derive(Debug)]
pub(super) struct NewMirror {
    file: Option<Arc<Mutex<File>>>,
    path: PathBuf,
    bytes: u64,
    limit: u64,
}

impl Output for NewMirror {
    async fn take(&mut self, piece: Bytes) -> io::Result<()> {
        self.bytes = self.bytes.saturating_add(piece.len() as u64);
        if self.bytes > self.limit {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "the copy is too large"));
        }
        let Some(file) = self.file.clone() else { return Ok(()) };
        let written = tokio::task::spawn_blocking(move || file.lock().write_all(&piece));
        written.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }
}

impl Drop for NewMirror {
    fn drop(&mut self) {
        if !self.path.as_os_str().is_empty() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests;

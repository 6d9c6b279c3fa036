//! Agent programs that checkpoints need: what is restored maps the file that it was started from, whichever version of the
//! platform restores it.
//!
//! A damaged program would make every sandbox that is restored with it run damaged code. So each is compared with its hash
//! before the first restore after a start of the platform, and is replaced when an agent that runs it is paused.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Seek as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

/// Directory of the programs, below the data directory.
pub(crate) const DIRECTORY: &str = "agents";

/// The agent programs of a data directory, by their hashes.
#[derive(Debug)]
pub(crate) struct Agents {
    dir: PathBuf,
    /// Hashes of files.
    known: Mutex<Hashes>,
}

type Hashes = HashMap<Identity, String>;

/// Which file it is. With the time when it was last written, because a file system that comes later may have the number of one
/// that is gone. Its rights change with every restore, which is no reason to read all of it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Identity {
    device: u64,
    inode: u64,
    written: (i64, i64),
}

impl Identity {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            written: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

impl Agents {
    /// The programs of agents in a data directory.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn open(data_dir: &Path) -> io::Result<Self> {
        let dir = data_dir.join(DIRECTORY);
        fs::DirBuilder::new().mode(0o700).recursive(true).create(&dir)?;
        Ok(Self {
            dir,
            known: Mutex::default(),
        })
    }

    /// Keeps the program of an agent that runs, and returns its hash. One that is kept and damaged is replaced. Reading and
    /// storing one takes a tenth of a second; one that is known takes nothing.
    ///
    /// # Errors
    /// When it cannot be read or stored.
    pub(crate) fn keep(&self, mut program: &File) -> io::Result<String> {
        // Held meanwhile, so that it is copied once.
        let mut known = self.known.lock();
        let hash = known_hash(&mut known, program)?;
        // What is restored runs a copy of one that is kept.
        if !self.is_whole(&mut known, &hash).unwrap_or(false) {
            let unfinished = self.dir.join("new");
            let mut copy = File::create(&unfinished)?;
            program.rewind()?;
            io::copy(&mut program, &mut copy)?;
            copy.set_permissions(fs::Permissions::from_mode(0o755))?;
            copy.sync_all()?;
            fs::rename(&unfinished, self.dir.join(&hash))?;
            File::open(&self.dir)?.sync_all()?;
            // With the time of this copy.
            known.insert(Identity::of(&copy)?, hash.clone());
        }
        Ok(hash)
    }

    /// Why the program with this hash cannot be run, if it cannot: it is damaged, or not there.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn obstacle(&self, hash: &str) -> io::Result<Option<String>> {
        let state = match self.is_whole(&mut self.known.lock(), hash) {
            Ok(true) => return Ok(None),
            Ok(false) => "damaged",
            Err(error) if error.kind() == io::ErrorKind::NotFound => "missing",
            Err(error) => return Err(error),
        };
        Ok(Some(format!(
            "the program of its agent is {state}: {DIRECTORY}/{hash} in the data directory"
        )))
    }

    fn is_whole(&self, known: &mut Hashes, hash: &str) -> io::Result<bool> {
        Ok(known_hash(known, &File::open(self.dir.join(hash))?)? == hash)
    }

    /// Removes all programs but those with these hashes.
    ///
    /// # Errors
    /// When the directory cannot be read or written.
    pub(crate) fn sweep(&self, needed: &[String]) -> io::Result<()> {
        let mut known = self.known.lock();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if !needed.iter().any(|hash| name == hash.as_str()) {
                fs::remove_file(entry.path())?;
            }
        }
        known.clear();
        Ok(())
    }
}

fn known_hash(known: &mut Hashes, file: &File) -> io::Result<String> {
    let identity = Identity::of(file)?;
    if let Some(hash) = known.get(&identity) {
        return Ok(hash.clone());
    }
    let hash = hash_of(file)?;
    known.insert(identity, hash.clone());
    Ok(hash)
}

fn hash_of(mut file: &File) -> io::Result<String> {
    file.rewind()?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match io::Read::read(&mut file, &mut buffer)? {
            0 => break,
            length => hasher.update(&buffer[..length]),
        }
    }
    Ok(hex::encode(hasher.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_kept_once() {
        let dir = tempfile::tempdir().unwrap();
        let agents = Agents::open(dir.path()).unwrap();
        let own = File::open("/proc/self/exe").unwrap();
        let hash = agents.keep(&own).unwrap();
        let path = dir.path().join(DIRECTORY).join(&hash);
        let exe = fs::read("/proc/self/exe").unwrap();
        assert!(fs::read(&path).unwrap() == exe);
        let inode = fs::metadata(&path).unwrap().ino();
        assert_eq!(agents.keep(&own).unwrap(), hash);
        // A restored agent runs a copy, which is another file.
        let copy = dir.path().join("copy");
        fs::copy("/proc/self/exe", &copy).unwrap();
        assert_eq!(agents.keep(&File::open(&copy).unwrap()).unwrap(), hash);
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        // Another program, in the place of one that is known.
        fs::write(&copy, "another").unwrap();
        let other = agents.keep(&File::open(&copy).unwrap()).unwrap();
        assert_eq!(fs::read(dir.path().join(DIRECTORY).join(other)).unwrap(), b"another");
        agents.sweep(std::slice::from_ref(&hash)).unwrap();
        assert!(path.exists());
        agents.sweep(&[]).unwrap();
        assert!(!path.exists());
        assert_eq!(agents.keep(&own).unwrap(), hash);
        assert!(path.exists());
    }

    #[test]
    fn a_damaged_program_is_noticed_and_replaced_when_it_is_kept_again() {
        let dir = tempfile::tempdir().unwrap();
        let own = File::open("/proc/self/exe").unwrap();
        let mut agents = Agents::open(dir.path()).unwrap();
        let hash = agents.keep(&own).unwrap();
        let path = dir.path().join(DIRECTORY).join(&hash);
        let whole = fs::read("/proc/self/exe").unwrap();
        assert_eq!(agents.obstacle(&hash).unwrap(), None);
        let mut flipped = whole.clone();
        flipped[whole.len() / 2] ^= 1;
        for damaged in [&flipped[..], &whole[1..], &[]] {
            for is_next_start in [false, true] {
                fs::write(&path, damaged).unwrap();
                if is_next_start {
                    agents = Agents::open(dir.path()).unwrap();
                }
                assert!(agents.obstacle(&hash).unwrap().unwrap().contains("is damaged"));
                assert_eq!(agents.keep(&own).unwrap(), hash);
                assert!(fs::read(&path).unwrap() == whole);
                assert_eq!(agents.obstacle(&hash).unwrap(), None);
            }
        }
        fs::remove_file(&path).unwrap();
        assert!(agents.obstacle(&hash).unwrap().unwrap().contains("is missing"));
    }

    #[test]
    fn one_whose_rights_change_is_not_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let agents = Agents::open(dir.path()).unwrap();
        let path = dir.path().join("agent");
        fs::write(&path, "program").unwrap();
        let hash = agents.keep(&File::open(&path).unwrap()).unwrap();
        let known = agents.known.lock().len();
        for mode in [0o751, 0o711, 0o751] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(agents.keep(&File::open(&path).unwrap()).unwrap(), hash);
        }
        assert_eq!(agents.known.lock().len(), known);
    }
}

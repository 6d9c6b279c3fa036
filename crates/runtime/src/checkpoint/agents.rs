//! Agent programs that images need: what is restored maps the file that it was started from, whichever version of the
//! platform restores it.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
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
    /// Hashes of files by device and inode.
    known: Mutex<HashMap<(u64, u64), String>>,
}

impl Agents {
    /// Those of a data directory.
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

    /// Keeps the program that a process runs, and returns its hash.
    ///
    /// # Errors
    /// When it cannot be read or stored.
    pub(crate) fn keep(&self, pid: i32) -> io::Result<String> {
        let mut program = File::open(format!("/proc/{pid}/exe"))?;
        let metadata = program.metadata()?;
        let file = (metadata.dev(), metadata.ino());
        // Held meanwhile, so that it is copied once.
        let mut known = self.known.lock();
        if let Some(hash) = known.get(&file)
            && self.dir.join(hash).exists()
        {
            return Ok(hash.clone());
        }
        let unfinished = self.dir.join("new");
        let mut copy = File::create(&unfinished)?;
        io::copy(&mut program, &mut copy)?;
        copy.set_permissions(fs::Permissions::from_mode(0o755))?;
        copy.sync_all()?;
        let hash = hash_of(&unfinished)?;
        fs::rename(&unfinished, self.dir.join(&hash))?;
        File::open(&self.dir)?.sync_all()?;
        known.insert(file, hash.clone());
        Ok(hash)
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

fn hash_of(path: &Path) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match io::Read::read(&mut file, &mut buffer)? {
            0 => break,
            length => hasher.update(&buffer[..length]),
        }
    }
    let mut text = String::new();
    for byte in hasher.finalize() {
        let _ = write!(text, "{byte:02x}");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_kept_once() {
        let dir = tempfile::tempdir().unwrap();
        let agents = Agents::open(dir.path()).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        let hash = agents.keep(own).unwrap();
        let path = dir.path().join(DIRECTORY).join(&hash);
        let exe = fs::read("/proc/self/exe").unwrap();
        assert!(fs::read(&path).unwrap() == exe);
        let inode = fs::metadata(&path).unwrap().ino();
        assert_eq!(agents.keep(own).unwrap(), hash);
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
        agents.sweep(std::slice::from_ref(&hash)).unwrap();
        assert!(path.exists());
        agents.sweep(&[]).unwrap();
        assert!(!path.exists());
        assert_eq!(agents.keep(own).unwrap(), hash);
        assert!(path.exists());
    }
}

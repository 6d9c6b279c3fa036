//! The uploads in parts that have not ended: a file each, with the object and the id of the upload.
//!
//! A file is written before the first part and removed once the upload is complete or aborted. What is there at a start is
//! of a platform that was killed.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

/// A directory of unfinished uploads.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    directory: PathBuf,
    /// The uploads of this process.
    own: Arc<Mutex<HashSet<PathBuf>>>,
}

/// An upload that has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) path: PathBuf,
    /// The whole name of the object.
    pub(crate) object: String,
    /// The id of the upload.
    pub(crate) upload: String,
}

impl Journal {
    pub(crate) fn open(directory: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        Ok(Self {
            directory,
            own: Arc::default(),
        })
    }

    /// Notes an upload.
    pub(crate) fn begin(&self, object: &str, upload: &str) -> io::Result<Entry> {
        use io::Write as _;
        // Held until the file is one of ours: who looks for what is left would take it for one of another process.
        let mut own = self.own.lock();
        for number in 0_u64.. {
            let path = self.directory.join(number.to_string());
            let opened = fs::OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path);
            match opened {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(mut file) => {
                    own.insert(path.clone());
                    // A line of its end, so that an incomplete file is noticed.
                    file.write_all(format!("{object}\n{upload}\n\n").as_bytes())?;
                    return Ok(Entry {
                        path,
                        object: object.to_owned(),
                        upload: upload.to_owned(),
                    });
                }
            }
        }
        Err(io::Error::other("no name is free"))
    }

    /// Forgets an upload that has ended.
    pub(crate) fn end(&self, entry: &Entry) {
        let _ = fs::remove_file(&entry.path);
        self.own.lock().remove(&entry.path);
    }

    /// Leaves an upload to [`Self::left`], because it could not be aborted.
    pub(crate) fn leave(&self, entry: &Entry) {
        self.own.lock().remove(&entry.path);
    }

    /// Lists uploads of processes that have ended, which no process continues.
    pub(crate) fn left(&self) -> io::Result<Vec<Entry>> {
        let mut left = Vec::new();
        for file in fs::read_dir(&self.directory)? {
            let path = file?.path();
            // Held until it is read: the name of one that has ended may be given to a new one.
            let own = self.own.lock();
            if own.contains(&path) {
                continue;
            }
            let text = match fs::read_to_string(&path) {
                // It ended in this moment.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                text => text?,
            };
            match text.split('\n').collect::<Vec<_>>()[..] {
                [object, upload, "", ""] => left.push(Entry {
                    object: object.to_owned(),
                    upload: upload.to_owned(),
                    path,
                }),
                // Cut while it was written.
                _ => match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                },
            }
        }
        Ok(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uploads_of_others_are_left_and_those_of_this_process_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let killed = Journal::open(directory.path().join("uploads")).unwrap();
        let first = killed.begin("p/layers/a", "id 1").unwrap();
        let journal = Journal::open(directory.path().join("uploads")).unwrap();
        let second = journal.begin("p/layers/b", "id 2").unwrap();
        assert_ne!(first.path, second.path);
        assert_eq!(journal.left().unwrap(), std::slice::from_ref(&first));
        journal.end(&first);
        assert_eq!(journal.left().unwrap(), []);
        journal.leave(&second);
        assert_eq!(journal.left().unwrap(), std::slice::from_ref(&second));
        fs::write(&second.path, "p/layers/b\ni").unwrap();
        assert_eq!(journal.left().unwrap(), []);
        assert!(!second.path.exists());
    }

    #[test]
    fn uploads_may_end_while_others_look_for_what_is_left() {
        let directory = tempfile::tempdir().unwrap();
        let journal = Journal::open(directory.path().join("uploads")).unwrap();
        std::thread::scope(|scope| {
            let uploads = scope.spawn(|| {
                for number in 0..3000 {
                    journal.end(&journal.begin("p/layers/a", &format!("id {number}")).unwrap());
                }
            });
            while !uploads.is_finished() {
                assert_eq!(journal.left().unwrap(), []);
            }
        });
    }
}

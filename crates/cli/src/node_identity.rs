//! The node id of a data directory, and the owner id as which its server holds the node.
//!
//! Both ids are in `node.json`. The node's stays for as long as the directory does: rows in the database name it. The
//! owner's stays for as long as the directory is in one place, that is the same file system, inode and boot. The lock of
//! a directory in one place is held by one process at a time, so its holder knows that the server before it is
//! gone, and has the right to its lease. A copy of the directory proves nothing of the kind: it gets an owner id of its
//! own, and its server waits until the lease is over. So does the first start after a restart of the machine, because a
//! snapshot of a disk that runs elsewhere cannot be told from it.
//!
//! With the database in the data directory nothing can wait for it: a copy of the directory has a copy of the lease, too.
//! The owner's id stays then, and so does the place in the file, so that a copy whose database is moved to a server that
//! others use is noticed at its next start.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result};
use model::id::{NodeId, OwnerId};
use serde::{Deserialize, Serialize};
use server::lease::NodeIdentity;
use uuid::Uuid;

use crate::data_dir::{DataDir, LOCK_FILE, Lock};

/// Name of the file in the data directory.
pub(crate) const FILE: &str = "node.json";

/// What the file holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    node: NodeId,
    owner: OwnerId,
    place: Location,
}

/// The place of a data directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Location {
    boot: String,
    device: u64,
    inode: u64,
}

impl Location {
    /// The place of a directory, which is that of its lock file: the only file in it that is never replaced.
    fn of(dir: &DataDir) -> io::Result<Self> {
        let lock = fs::metadata(dir.path().join(LOCK_FILE))?;
        Ok(Self {
            boot: fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
            device: lock.dev(),
            inode: lock.ino(),
        })
    }
}

/// The identity of the node of a data directory, made at its first start. The lock shows that this process has the
/// directory. `has_own_database` says that the database is in the directory.
///
/// # Errors
/// When the file cannot be read or written, or holds something else.
pub(crate) fn load(dir: &DataDir, _lock: &Lock, has_own_database: bool) -> Result<NodeIdentity> {
    let path = dir.path().join(FILE);
    let found = dir.read(FILE)?.map(|bytes| serde_json::from_slice(&bytes));
    let found: Option<Record> = found.transpose().with_context(|| format!("read {}", path.display()))?;
    let place = Location::of(dir).context("find out where the data directory is")?;
    let record = match found {
        Some(found) if has_own_database || found.place == place => found,
        found => {
            let record = Record {
                node: match found {
                    Some(found) => found.node,
                    None => new_uuid().parse().expect("a UUID in its usual form is a node's id"),
                },
                owner: new_uuid().parse().expect("a UUID in its usual form is an owner's id"),
                place,
            };
            // Before the lease is taken: otherwise a crash in between would make the next start wait for it.
            let text = serde_json::to_vec_pretty(&record).expect("ids and numbers are JSON");
            dir.write_private(FILE, &text)?;
            record
        }
    };
    Ok(NodeIdentity {
        id: record.node,
        name: host_name(),
        owner: record.owner,
    })
}

/// Reads the node id of a data directory.
///
/// # Errors
/// When the file cannot be read, or holds something else.
pub(crate) fn node_of(dir: &DataDir) -> Result<NodeId> {
    let path = dir.path().join(FILE);
    let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
    let record: Record = serde_json::from_slice(&text).with_context(|| format!("read {}", path.display()))?;
    Ok(record.node)
}

fn new_uuid() -> String {
    Uuid::new_v4().to_string()
}

/// The host's name, for people.
pub(crate) fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "unnamed".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(dir: &DataDir) -> NodeIdentity {
        load(dir, &dir.lock().unwrap(), false).unwrap()
    }

    #[test]
    fn a_directory_is_the_same_node_with_the_same_owner_at_every_start() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let first = started(&dir);
        assert_eq!(started(&dir), first);
        // Renamed, it is still in the same place; the machine may mount it anywhere.
        fs::rename(temp.path().join("data"), temp.path().join("moved")).unwrap();
        let moved = DataDir::existing(&temp.path().join("moved")).unwrap();
        assert_eq!(started(&moved), first);
    }

    #[test]
    fn a_copy_and_another_boot_have_another_owner() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        let first = started(&dir);
        let copy = temp.path().join("copy");
        fs::create_dir(&copy).unwrap();
        for name in [LOCK_FILE, FILE] {
            fs::copy(dir.path().join(name), copy.join(name)).unwrap();
        }
        let copy = started(&DataDir::existing(&copy).unwrap());
        assert_eq!(copy.id, first.id);
        assert_ne!(copy.owner, first.owner);

        let path = dir.path().join(FILE);
        let mut record: Record = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        record.place.boot = "another".to_owned();
        fs::write(&path, serde_json::to_vec(&record).unwrap()).unwrap();
        // No other server can have a database that is in the directory, however often the machine was restarted.
        assert_eq!(load(&dir, &dir.lock().unwrap(), true).unwrap(), first);
        let after = started(&dir);
        assert_eq!(after.id, first.id);
        assert_ne!(after.owner, first.owner);
        assert_eq!(started(&dir), after);
    }

    #[test]
    fn a_file_that_holds_something_else_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let dir = DataDir::prepare(&temp.path().join("data")).unwrap();
        fs::write(dir.path().join(FILE), "{}").unwrap();
        let error = load(&dir, &dir.lock().unwrap(), false).unwrap_err();
        assert!(error.to_string().contains(FILE), "{error}");
    }
}

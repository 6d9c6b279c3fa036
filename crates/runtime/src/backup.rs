//! The files of a data directory that a backup copies, as paths below it.
//!
//! Layers are not among them: their archives are what is copied of those.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use model::id::{BuildId, DiskId, SandboxId};

use crate::disk;
use crate::kept::KeptDisks;
use crate::layers::Layers;
use crate::memories::Memories;

/// The files of the memory of a snapshot: its checkpoint and its disk. None if there is no such memory.
///
/// # Errors
/// When the data directory cannot be read, or one of the files is missing.
pub fn files_of_memory(data_dir: &Path, build: &BuildId) -> io::Result<Option<Vec<PathBuf>>> {
    let Some(memory) = Memories::open(data_dir)?.find(build)? else {
        return Ok(None);
    };
    let mut files = files_of_disk(data_dir, &memory.disk)?;
    walk(data_dir, memory.path(), &mut files)?;
    Ok(Some(files))
}

/// The files of a sandbox that is paused on disk: its disk, and its checkpoint if there is one. None if its disk is not
/// kept, or not complete.
///
/// # Errors
/// When the data directory cannot be read, or one of the files is missing: it was started or removed meanwhile.
pub fn files_of_kept(data_dir: &Path, id: &SandboxId) -> io::Result<Option<Vec<PathBuf>>> {
    let kept = KeptDisks::open(data_dir)?;
    let found = kept.list()?.into_iter().find(|disk| disk.id == *id && disk.is_saved);
    let Some(found) = found else { return Ok(None) };
    let mut files = files_of_disk(data_dir, &found.disk)?;
    walk(data_dir, &kept.path(id, &found.disk), &mut files)?;
    Ok(Some(files))
}

fn files_of_disk(data_dir: &Path, disk: &DiskId) -> io::Result<Vec<PathBuf>> {
    let path = PathBuf::from(disk::path_of(disk));
    fs::metadata(data_dir.join(&path))?;
    let mut files = vec![path];
    // That of a sandbox of `base` has no record.
    let record = Layers::record_path(disk);
    if data_dir.join(&record).try_exists()? {
        files.push(record);
    }
    Ok(files)
}

/// All files below a directory, in the order of their names.
///
/// # Errors
/// When it cannot be read, or has something that is neither a file nor a directory.
pub fn walk(data_dir: &Path, directory: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    let mut entries = fs::read_dir(directory)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, kind) = (entry.path(), entry.file_type()?);
        if kind.is_dir() {
            walk(data_dir, &path, files)?;
        } else if kind.is_file() {
            files.extend(path.strip_prefix(data_dir).ok().map(Path::to_owned));
        } else {
            return Err(io::Error::other(format!("{} is not a regular file", path.display())));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_has_its_disk_its_record_and_its_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = dir.path();
        fs::create_dir(data_dir.join("disks")).unwrap();
        let (id, disk): (SandboxId, DiskId) = ("ione".parse().unwrap(), "d0123456789abcdefghij".parse().unwrap());
        assert_eq!(files_of_kept(data_dir, &id).unwrap(), None);
        let kept = KeptDisks::open(data_dir).unwrap();
        kept.keep(&id, &disk, Some("0123")).unwrap();
        // Not complete.
        assert_eq!(files_of_kept(data_dir, &id).unwrap(), None);
        kept.mark_saved(&id, &disk).unwrap();
        let lost = files_of_kept(data_dir, &id).unwrap_err();
        assert_eq!(lost.kind(), io::ErrorKind::NotFound);
        let base = format!("disks/{disk}");
        fs::write(data_dir.join(format!("{base}.img")), "disk").unwrap();
        fs::write(data_dir.join(format!("{base}.rootfs")), "{}").unwrap();
        fs::create_dir(kept.checkpoint(&id, &disk)).unwrap();
        fs::write(kept.checkpoint(&id, &disk).join("pages-1.img"), "memory").unwrap();
        let found = files_of_kept(data_dir, &id).unwrap().unwrap();
        let names: Vec<String> = found.iter().map(|path| path.display().to_string()).collect();
        let below = format!("kept/ione.{disk}");
        assert_eq!(
            names,
            [
                format!("{base}.img"),
                format!("{base}.rootfs"),
                format!("{below}/base"),
                format!("{below}/image/pages-1.img"),
                format!("{below}/saved"),
            ]
        );
    }

    #[test]
    fn a_memory_has_its_checkpoint_and_its_disk() {
        let dir = tempfile::tempdir().unwrap();
        let data_dir = dir.path();
        let build: BuildId = "11111111-2222-4333-8444-555555555555".parse().unwrap();
        assert_eq!(files_of_memory(data_dir, &build).unwrap(), None);
        fs::create_dir(data_dir.join("disks")).unwrap();
        fs::write(data_dir.join("disks/17.img"), "disk").unwrap();
        let memory = data_dir.join(format!("memories/{build}.17"));
        fs::create_dir_all(memory.join("image")).unwrap();
        fs::write(memory.join("image/core-1.img"), "processes").unwrap();
        let found = files_of_memory(data_dir, &build).unwrap().unwrap();
        let names: Vec<String> = found.iter().map(|path| path.display().to_string()).collect();
        assert_eq!(
            names,
            [
                "disks/17.img".to_owned(),
                format!("memories/{build}.17/image/core-1.img")
            ]
        );
    }
}

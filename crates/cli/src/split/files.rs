//! Moving files from a data directory to another one, on one file system or to another one, so that it can be repeated: a file that
//! arrives has all of its content, and what is moved is removed when its copy is on disk.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use runtime::files::if_there;

/// Bytes of files that are compared at a time.
const BLOCK: usize = 1 << 20;

/// Checks that a directory can be moved to a path, where there may be one already.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`], when a file is where a directory is to be, or the other way round.
pub(super) fn check_directory(from: &Path, to: &Path) -> io::Result<()> {
    let Some(entries) = if_there(fs::read_dir(from))? else {
        return Ok(());
    };
    let Some(there) = if_there(fs::symlink_metadata(to))? else {
        return Ok(());
    };
    if !there.is_dir() {
        return Err(in_the_way(to));
    }
    for entry in entries {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            check_directory(&entry.path(), &target)?;
        } else if if_there(fs::symlink_metadata(&target))?.is_some_and(|there| !there.is_file()) {
            return Err(in_the_way(&target));
        }
    }
    Ok(())
}

fn in_the_way(path: &Path) -> io::Error {
    io::Error::new(
        io::ErrorKind::AlreadyExists,
        format!("{} is in the way: remove it", path.display()),
    )
}

/// Moves a directory. Where there is one already, its files are replaced by those of the same name, and the others stay.
pub(super) fn move_directory(from: &Path, to: &Path) -> io::Result<()> {
    if if_there(fs::symlink_metadata(from))?.is_none() {
        return Ok(());
    }
    if if_there(fs::symlink_metadata(to))?.is_none() && renamed(from, to)? {
        return Ok(());
    }
    copy_directory(from, to)?;
    sync_parent(to)?;
    fs::remove_dir_all(from)
}

/// Moves a file, in place of one that is there.
pub(super) fn move_file(from: &Path, to: &Path) -> io::Result<()> {
    if if_there(fs::symlink_metadata(from))?.is_none() || renamed(from, to)? {
        return Ok(());
    }
    copy_file(from, to)?;
    sync_parent(to)?;
    fs::remove_file(from)
}

/// Renames a file or directory; `false` if the other path is on another file system.
fn renamed(from: &Path, to: &Path) -> io::Result<bool> {
    match fs::rename(from, to) {
        Ok(()) => sync_parent(to).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::CrossesDevices => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether a file has the same content as another one, or one of them is not there.
pub(super) fn agree(one: &Path, other: &Path) -> io::Result<bool> {
    let (Some(mut one), Some(mut other)) = (if_there(File::open(one))?, if_there(File::open(other))?) else {
        return Ok(true);
    };
    let mut blocks = [Vec::new(), Vec::new()];
    loop {
        for (file, block) in [&mut one, &mut other].into_iter().zip(&mut blocks) {
            block.clear();
            file.take(BLOCK as u64).read_to_end(block)?;
        }
        if blocks[0] != blocks[1] {
            return Ok(false);
        }
        if blocks[0].is_empty() {
            return Ok(true);
        }
    }
}

/// Copies a directory of directories and plain files to disk, each with its mode.
fn copy_directory(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    fs::set_permissions(to, fs::metadata(from)?.permissions())?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_directory(&entry.path(), &target)?;
        } else {
            copy_file(&entry.path(), &target)?;
        }
    }
    sync(to)
}

/// Copies a file to disk, under another name until it is complete.
fn copy_file(from: &Path, to: &Path) -> io::Result<()> {
    let temporary = beside(to)?;
    // One left over by a crash would keep its own mode.
    if_there(fs::remove_file(&temporary))?;
    fs::copy(from, &temporary)?;
    sync(&temporary)?;
    fs::rename(temporary, to)
}

fn beside(path: &Path) -> io::Result<PathBuf> {
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or(io::ErrorKind::InvalidFilename)?);
    name.push(".new");
    Ok(path.with_file_name(name))
}

/// Writes a file or directory to disk.
pub(super) fn sync(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn sync_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), sync)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_directory_is_moved_into_one_that_is_there() {
        let temp = tempfile::tempdir().unwrap();
        let (from, to) = (temp.path().join("from"), temp.path().join("to"));
        move_directory(&from, &to).unwrap();
        assert!(!to.exists());
        for round in ["first", "again"] {
            write(&from.join("a/both"), round);
            write(&from.join(round), round);
            check_directory(&from, &to).unwrap();
            move_directory(&from, &to).unwrap();
            assert!(!from.exists());
            assert_eq!(fs::read_to_string(to.join("a/both")).unwrap(), round);
        }
        let mut names: Vec<_> = fs::read_dir(&to)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["a", "again", "first"]);
    }

    #[test]
    fn what_is_in_the_way_is_named() {
        let temp = tempfile::tempdir().unwrap();
        let (from, to) = (temp.path().join("from"), temp.path().join("to"));
        write(&from.join("a/file"), "");
        write(&to.join("a"), "");
        let error = check_directory(&from, &to).unwrap_err().to_string();
        assert!(error.contains("to/a is in the way"), "{error}");
    }

    #[test]
    fn files_that_differ_are_told_apart() {
        let temp = tempfile::tempdir().unwrap();
        let paths = ["one", "same", "longer", "other"].map(|name| temp.path().join(name));
        let long = "x".repeat(BLOCK);
        for (path, text) in paths.iter().zip(["", "", "y", "z"]) {
            write(path, &format!("{long}{text}"));
        }
        let [one, same, longer, other] = &paths;
        assert!(agree(one, same).unwrap() && agree(one, &temp.path().join("absent")).unwrap());
        assert!(!agree(one, longer).unwrap() && !agree(longer, other).unwrap());
        move_file(longer, other).unwrap();
        assert!(!longer.exists() && fs::read_to_string(other).unwrap().ends_with('y'));
    }
}

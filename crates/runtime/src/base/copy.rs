//! Helpers for creating a skeleton: directories, files, and careful copies of the host's files.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::files::if_there;

/// Marker of files with private keys, in every text format.
const PRIVATE: &[u8] = b"PRIVATE KEY";

pub(super) fn create_dir(path: &Path, mode: u32) -> io::Result<()> {
    fs::create_dir_all(path)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Writes a file, replacing an existing one: a link is replaced, not followed.
pub(super) fn put(path: &Path, mode: u32, content: impl AsRef<[u8]>) -> io::Result<()> {
    if_there(fs::remove_file(path))?;
    fs::write(path, content)?;
    fs::set_permissions(path, Permissions::from_mode(mode))
}

/// Creates a link, replacing an existing file.
pub(super) fn put_link(target: impl AsRef<Path>, path: &Path) -> io::Result<()> {
    if_there(fs::remove_file(path))?;
    symlink(target, path)
}

/// The content of a file that is world-readable and contains no private key: some programs keep theirs in one file with
/// the certificate.
pub(super) fn read_public(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let metadata = match path.symlink_metadata() {
        Ok(metadata) => metadata,
        // The host's packages may change while it is copied.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if !metadata.is_file() || metadata.mode() & 0o004 == 0 {
        return Ok(None);
    }
    let content = fs::read(path)?;
    Ok(memchr::memmem::find(&content, PRIVATE).is_none().then_some(content))
}

/// Copies a file, a link as a link, or a directory with its contents; nothing of another type, and nothing that is not
/// world-readable.
pub(super) fn copy_public(from: &Path, to: &Path) -> io::Result<()> {
    let Ok(metadata) = from.symlink_metadata() else {
        return Ok(());
    };
    if metadata.is_symlink() {
        put_link(&fs::read_link(from)?, to)
    } else if metadata.is_dir() {
        if metadata.mode() & 0o005 != 0o005 {
            return Ok(());
        }
        create_dir(to, 0o755)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy_public(&entry.path(), &to.join(entry.file_name()))?;
        }
        Ok(())
    } else if let Some(content) = read_public(from)? {
        put(to, 0o644, content)
    } else {
        Ok(())
    }
}

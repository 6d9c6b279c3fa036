//! Directories that a file needs.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::Path;

use crate::users::User;

/// Makes `directory` and its ancestors, those that are missing, as the user's.
///
/// # Errors
/// `path is a file` for an ancestor that is one, and those of the system.
pub(super) fn directories(directory: &Path, user: &User) -> io::Result<()> {
    let mut ancestors: Vec<&Path> = directory
        .ancestors()
        .filter(|path| !path.as_os_str().is_empty())
        .collect();
    // Usually all are there, so look at the last one first.
    if fs::metadata(directory).is_ok_and(|metadata| metadata.is_dir()) {
        return Ok(());
    }
    ancestors.reverse();
    for path in ancestors {
        match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => continue,
            Ok(_) => {
                let message = format!("path is a file: {}", path.display());
                return Err(io::Error::new(io::ErrorKind::NotADirectory, message));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        match fs::DirBuilder::new().mode(0o755).create(path) {
            Ok(()) => chown(path, Some(user.uid), Some(user.gid))?,
            // Another request was faster.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ones_are_made() {
        let root = tempfile::tempdir().unwrap();
        let metadata = fs::metadata(root.path()).unwrap();
        use std::os::unix::fs::MetadataExt;
        let user = User {
            name: "me".to_owned(),
            uid: metadata.uid(),
            gid: metadata.gid(),
            home: root.path().to_owned(),
        };
        directories(&root.path().join("a/b/c"), &user).unwrap();
        directories(&root.path().join("a/b/c"), &user).unwrap();
        assert!(root.path().join("a/b/c").is_dir());
        fs::write(root.path().join("a/file"), "").unwrap();
        let error = directories(&root.path().join("a/file/x/y"), &user).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("path is a file: {}", root.path().join("a/file").display())
        );
    }
}

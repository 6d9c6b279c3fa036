//! Directories that a file or another directory needs.

use std::fs::{self, DirBuilder};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::Path;

use crate::users::User;

/// Makes `directory` and its ancestors, those that are missing, as the user's.
///
/// # Errors
/// `path is a file` for an ancestor that is one, and those of the system.
pub(crate) fn ensure(directory: &Path, user: &User) -> io::Result<()> {
    let is_directory = |path: &Path| fs::metadata(path).is_ok_and(|metadata| metadata.is_dir());
    // Usually all are there, so the last one is looked at first, and above it no further than needed.
    let ancestors = directory.ancestors().filter(|path| !path.as_os_str().is_empty());
    let missing: Vec<&Path> = ancestors.take_while(|path| !is_directory(path)).collect();
    for path in missing.into_iter().rev() {
        match DirBuilder::new().mode(0o755).create(path) {
            Ok(()) => chown(path, Some(user.uid), Some(user.gid))?,
            // Another request was faster.
            Err(_) if is_directory(path) => {}
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let message = format!("path is a file: {}", path.display());
                return Err(io::Error::new(ErrorKind::NotADirectory, message));
            }
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
            has_one_group: false,
        };
        ensure(&root.path().join("a/b/c"), &user).unwrap();
        ensure(&root.path().join("a/b/c"), &user).unwrap();
        assert!(root.path().join("a/b/c").is_dir());
        fs::write(root.path().join("a/file"), "").unwrap();
        let error = ensure(&root.path().join("a/file/x/y"), &user).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("path is a file: {}", root.path().join("a/file").display())
        );
    }
}

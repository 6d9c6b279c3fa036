//! What is used up when the system reports that no space is left: its error is the same for bytes and for inodes.

use std::io;
use std::path::Path;

use std::os::unix::fs::MetadataExt as _;

/// What was to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// More bytes for a file that exists.
    Bytes,
    /// A new file or directory.
    Entry,
}

/// What is used up at `path`, in words; none when `error` has another cause.
pub(crate) fn shortage(error: &io::Error, path: &Path, wanted: Wanted) -> Option<String> {
    if !matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) {
        return None;
    }
    let directory = path.ancestors().find(|directory| directory.is_dir())?;
    let device = |path: &Path| std::fs::metadata(path).ok().map(|metadata| metadata.dev());
    let place = if device(directory) == device(Path::new("/")) {
        "the sandbox's disk".to_owned()
    } else {
        format!("the file system of '{}'", directory.display())
    };
    // A file system that counts no inodes has as many as it has bytes for.
    let inodes_left = rustix::fs::statvfs(directory).map_or(1, |room| if room.f_files == 0 { 1 } else { room.f_ffree });
    Some(if wanted == Wanted::Entry && inodes_left == 0 {
        format!("not enough inodes available: {place} holds as many files as it can")
    } else {
        format!("not enough disk space available: no space left on {place}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_missing_where_inodes_are_left() {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        let root = shortage(&full, Path::new("/nothing/below"), Wanted::Entry);
        assert_eq!(
            root.as_deref(),
            Some("not enough disk space available: no space left on the sandbox's disk")
        );
        let quota = io::Error::from_raw_os_error(libc::EDQUOT);
        let proc = shortage(&quota, Path::new("/proc/x"), Wanted::Bytes);
        assert_eq!(
            proc.as_deref(),
            Some("not enough disk space available: no space left on the file system of '/proc'")
        );
        let other = io::Error::from_raw_os_error(libc::EACCES);
        assert_eq!(shortage(&other, Path::new("/"), Wanted::Entry), None);
    }
}

//! What is known about one entry of the file system.
//!
//! Names that are not UTF-8 are shown with U+FFFD in place of what cannot be read: clients then see that something is
//! there, although they cannot name it.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use protocol::filesystem::{EntryInfo, Timestamp, file_type};

use crate::attributes::Subject;
use crate::users::Names;

/// The entry at `path`, called `shown`.
///
/// # Errors
/// Those of lstat.
pub(super) fn read(path: &Path, shown: &Path, names: &Names) -> io::Result<EntryInfo> {
    let own = fs::symlink_metadata(path)?;
    let link = own.file_type().is_symlink();
    let target = if link { fs::metadata(path).ok() } else { None };
    let subject = if link { target.as_ref() } else { Some(&own) };
    let modified = (own.mtime(), i32::try_from(own.mtime_nsec()).unwrap_or_default());
    Ok(EntryInfo {
        name: base(shown),
        kind: subject.map_or(file_type::UNSPECIFIED, kind),
        path: text(shown),
        size: i64::try_from(own.size()).unwrap_or(i64::MAX),
        mode: subject.map_or(0, |subject| subject.mode() & 0o777),
        permissions: permissions(own.mode()),
        owner: names.user(own.uid()),
        group: names.group(own.gid()),
        // Files that were given no time at all have none.
        modified_time: if modified == (0, 0) {
            None
        } else {
            Timestamp::new(modified.0, modified.1)
        },
        symlink_target: link.then(|| fs::canonicalize(path).map_or_else(|_| text(shown), |target| text(&target))),
        metadata: match subject {
            Some(subject) if subject.is_file() || subject.is_dir() => Subject::At(path).metadata(),
            _ => BTreeMap::new(),
        },
    })
}

/// A path as text for clients.
pub(super) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The last part of a path as it is written, `..` included.
fn base(path: &Path) -> String {
    let text = path.to_string_lossy();
    match text.trim_end_matches('/').rsplit('/').next() {
        Some("") | None => "/".to_owned(),
        Some(name) => name.to_owned(),
    }
}

fn kind(metadata: &Metadata) -> i32 {
    if metadata.is_file() {
        file_type::FILE
    } else if metadata.is_dir() {
        file_type::DIRECTORY
    } else {
        file_type::UNSPECIFIED
    }
}

/// Mode as the text that clients know: letters for the type and the special bits, then three times three.
fn permissions(mode: u32) -> String {
    let kind = mode & libc::S_IFMT;
    let letters = [
        ('d', kind == libc::S_IFDIR),
        ('L', kind == libc::S_IFLNK),
        ('D', kind == libc::S_IFBLK || kind == libc::S_IFCHR),
        ('p', kind == libc::S_IFIFO),
        ('S', kind == libc::S_IFSOCK),
        ('u', mode & libc::S_ISUID != 0),
        ('g', mode & libc::S_ISGID != 0),
        ('c', kind == libc::S_IFCHR),
        ('t', mode & libc::S_ISVTX != 0),
    ];
    let mut out: String = letters
        .iter()
        .filter(|(_, is)| *is)
        .map(|(letter, _)| *letter)
        .collect();
    if out.is_empty() {
        out.push('-');
    }
    for (at, letter) in "rwxrwxrwx".chars().enumerate() {
        out.push(if mode & (0o400 >> at) != 0 { letter } else { '-' });
    }
    out
}

/// Bytes that the entry takes in JSON, about, which is the longer of the two encodings.
pub(super) fn weight(entry: &EntryInfo) -> usize {
    /// Field names, punctuation, numbers and the time.
    const FIXED: usize = 220;
    let metadata = entry
        .metadata
        .iter()
        .map(|(key, value)| quoted(key) + quoted(value) + 6);
    FIXED
        + quoted(&entry.name)
        + quoted(&entry.path)
        + quoted(&entry.owner)
        + quoted(&entry.group)
        + entry.symlink_target.as_deref().map_or(0, quoted)
        + metadata.sum::<usize>()
}

/// Bytes of a text in JSON, where quotes need two and control characters six.
pub(super) fn quoted(text: &str) -> usize {
    let width = |byte| match byte {
        b'"' | b'\\' => 2,
        0..=0x1f => 6,
        _ => 1,
    };
    text.bytes().map(width).sum()
}

/// The old form: name, type and path alone.
pub(super) fn legacy(entry: EntryInfo) -> EntryInfo {
    EntryInfo {
        name: entry.name,
        kind: entry.kind,
        path: entry.path,
        ..EntryInfo::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_are_written_in_letters() {
        for (mode, expect) in [
            (0o100_644, "-rw-r--r--"),
            (0o040_755, "drwxr-xr-x"),
            (0o120_777, "Lrwxrwxrwx"),
            (0o041_777, "dtrwxrwxrwx"),
            (0o104_755, "urwxr-xr-x"),
            (0o102_755, "grwxr-xr-x"),
            (0o020_620, "Dcrw--w----"),
            (0o060_660, "Drw-rw----"),
            (0o010_600, "prw-------"),
            (0o140_000, "S---------"),
            (0o107_000, "ugt---------"),
        ] {
            assert_eq!(permissions(mode), expect, "{mode:o}");
        }
    }

    #[test]
    fn names_are_the_last_part() {
        for (path, expect) in [("/a/b", "b"), ("/a/b/", "b"), ("/", "/"), ("/a/..", ".."), ("//", "/")] {
            assert_eq!(base(Path::new(path)), expect, "{path}");
        }
    }

    #[test]
    fn weights_cover_the_encodings() {
        let entry = EntryInfo {
            name: "\u{1}\"".to_owned(),
            kind: file_type::DIRECTORY,
            path: "/\u{1}\"".repeat(50),
            size: i64::MAX,
            mode: 0o777,
            permissions: "dugtrwxrwxrwx".to_owned(),
            owner: "4294967294".to_owned(),
            group: "4294967294".to_owned(),
            modified_time: Timestamp::new(1, 1),
            symlink_target: Some("\\".to_owned()),
            metadata: BTreeMap::from([("k".to_owned(), "\n".to_owned())]),
        };
        let json = protocol::connect::Codec::Json.encode(&entry).len();
        let weight = weight(&entry);
        assert!(json <= weight && weight <= json + 64, "{json} {weight}");
    }
}

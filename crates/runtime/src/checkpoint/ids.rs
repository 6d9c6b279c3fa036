//! The ids of the host in a checkpoint.
//!
//! A sandbox is restored in any slot, and must have the ids of that one: its file systems are mapped to them, and the ids
//! of the slot that it was written in may belong to another sandbox by now. In a checkpoint, all ids are those that the
//! sandbox sees, except in one file: the map of its user namespace.
//!
//! ```text
//!   8 bytes that name the kind of file │ length, 4 bytes │ a message:
//!   userns_entry   { repeated uid_gid_extent uid_map = 1, gid_map = 2 }
//!   uid_gid_extent { uint32 first = 1, lower_first = 2, count = 3 }
//! ```

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::slot::IDS_PER_SLOT;

/// How the name of the file begins. What follows is a number that CRIU chooses.
const NAME: &str = "userns-";
/// Length of what names the kind of file.
const KIND: usize = 8;

/// The file of a checkpoint with the map.
///
/// # Errors
/// When there is none, or more than one: a user namespace of a program inside cannot be restored.
pub(crate) fn file(checkpoint: &Path) -> io::Result<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(checkpoint)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(NAME.as_bytes()) {
            found.push(entry.path());
        }
    }
    let invalid = |found: Vec<_>| {
        let why = format!("the checkpoint has {} maps of ids instead of one", found.len());
        io::Error::new(io::ErrorKind::InvalidData, why)
    };
    let [file] = <[PathBuf; 1]>::try_from(found).map_err(invalid)?;
    Ok(file)
}

/// The content of that file for a sandbox whose ids begin at `base_id`.
///
/// # Errors
/// When `written` is not such a file.
pub(crate) fn mapped(written: &[u8], base_id: u32) -> io::Result<Vec<u8>> {
    let kind = written.get(..KIND).ok_or(io::ErrorKind::InvalidData)?;
    let mut extent = Vec::new();
    for (field, number) in [(1, 0), (2, base_id), (3, IDS_PER_SLOT)] {
        extent.push(field << 3);
        put(&mut extent, number);
    }
    let mut message = Vec::new();
    for field in [1, 2] {
        message.push(field << 3 | 2);
        message.push(u8::try_from(extent.len()).unwrap_or_default());
        message.extend(&extent);
    }
    let length = u32::try_from(message.len()).unwrap_or_default();
    Ok([kind, &length.to_le_bytes()[..], &message].concat())
}

/// Appends a number with seven bits in each byte, the lowest first.
fn put(bytes: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        let [low, ..] = number.to_le_bytes();
        bytes.push(low | 0x80);
        number >>= 7;
    }
    let [last, ..] = number.to_le_bytes();
    bytes.push(last);
}

/// Checks that a process has the ids that begin at `base_id`, and no others.
///
/// # Errors
/// When it has not.
pub(crate) fn check(pid: i32, base_id: u32) -> io::Result<()> {
    let want = ["0".to_owned(), base_id.to_string(), IDS_PER_SLOT.to_string()];
    for file in ["uid_map", "gid_map"] {
        let map = fs::read_to_string(format!("/proc/{pid}/{file}"))?;
        if !map.split_whitespace().eq(&want) {
            let why = format!(
                "CRIU has restored it with other ids than those of its slot: {}",
                map.trim()
            );
            return Err(io::Error::other(why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What CRIU wrote for a sandbox whose ids begin at 0x7000_0000.
    const WRITTEN: &[u8] = b"\x19\x43\x56\x54\x06\x49\x47\x55\x1c\x00\x00\x00\
        \x0a\x0c\x08\x00\x10\x80\x80\x80\x80\x07\x18\x80\x80\x04\
        \x12\x0c\x08\x00\x10\x80\x80\x80\x80\x07\x18\x80\x80\x04";

    #[test]
    fn the_map_is_as_criu_writes_it() {
        assert_eq!(mapped(WRITTEN, 0x7000_0000).unwrap(), WRITTEN);
        let other = mapped(WRITTEN, 0x7001_0000).unwrap();
        assert_eq!(other.len(), WRITTEN.len());
        assert_ne!(other, WRITTEN);
        mapped(&WRITTEN[..4], 0).unwrap_err();
    }

    #[test]
    fn a_checkpoint_has_one_map() {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path()).unwrap_err();
        fs::write(dir.path().join("userns-9.img"), WRITTEN).unwrap();
        assert_eq!(file(dir.path()).unwrap(), dir.path().join("userns-9.img"));
        fs::write(dir.path().join("userns-10.img"), WRITTEN).unwrap();
        file(dir.path()).unwrap_err();
    }
}

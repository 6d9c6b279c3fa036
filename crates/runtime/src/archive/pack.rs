//! Writes a stored layer as an archive.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

use formats::tar::{BLOCK, padding};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::tar::{Entry, Kind};
use crate::commit::failure::Failure;
use crate::commit::tree::{Content, Metadata, Sink};

/// Holes that are smaller are written as zeros, in bytes: the map of a file stays small.
const HOLE_MIN: u64 = 64 << 10;
/// Size in which files are read, in bytes.
const BUFFER: usize = 256 << 10;
/// Maximum size of the paths that are remembered for other names of their files, in bytes. Beyond it, hard links have no
/// target for other programs.
const TARGETS_MAX: usize = 64 << 20;

/// An archive that is being written.
pub(super) struct Archive<W> {
    to: W,
    path: Vec<u8>,
    /// Paths of files with several names, by their numbers.
    targets: HashMap<u64, Vec<u8>>,
    targets_size: usize,
    buffer: Vec<u8>,
}

impl<W: Write> Archive<W> {
    pub(super) fn new(to: W) -> Self {
        Self {
            to,
            path: Vec::new(),
            targets: HashMap::new(),
            targets_size: 0,
            buffer: vec![0; BUFFER],
        }
    }

    /// Writes the end of the archive.
    pub(super) fn finish(mut self) -> Result<W, Failure> {
        self.to.write_all(&[0; 2 * BLOCK])?;
        Ok(self.to)
    }

    fn path(&self, name: &CStr) -> Vec<u8> {
        if self.path.is_empty() {
            name.to_bytes().to_vec()
        } else {
            [&self.path, &b"/"[..], name.to_bytes()].concat()
        }
    }

    fn contents(&mut self, entry: &mut Entry, file: &File, size: u64) -> Result<(), Failure> {
        let data = data_of(file, size)?;
        let map = match data[..] {
            [(0, length)] if length == size => Vec::new(),
            [] if size == 0 => Vec::new(),
            _ => map(&data, size),
        };
        if !map.is_empty() {
            entry.sparse = Some(size);
        }
        entry.size = map.len() as u64 + data.iter().map(|(_, length)| length).sum::<u64>();
        entry.write(&mut self.to)?;
        self.to.write_all(&map)?;
        for (start, length) in data {
            let (mut at, end) = (start, start + length);
            while at < end {
                let count = usize::try_from(end - at).unwrap_or(BUFFER).min(BUFFER);
                file.read_exact_at(&mut self.buffer[..count], at)?;
                self.to.write_all(&self.buffer[..count])?;
                at += count as u64;
            }
        }
        Ok(self.to.write_all(&[0; BLOCK][..padding(entry.size)])?)
    }
}

/// Where a file has data: offsets and lengths.
fn data_of(file: &File, size: u64) -> Result<Vec<(u64, u64)>, Failure> {
    let mut data: Vec<(u64, u64)> = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            // Not every file system can say.
            Err(Errno::INVAL) => return Ok(vec![(0, size)]),
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file, SeekFrom::Hole(start))?.min(size);
        match data.last_mut() {
            Some((last, length)) if start - (*last + *length) < HOLE_MIN => *length = end - *last,
            None if start < HOLE_MIN => data.push((0, end)),
            _ => data.push((start, end - start)),
        }
        at = end;
    }
    // The same for a hole at the end.
    if let Some((start, length)) = data.last_mut()
        && size - (*start + *length) < HOLE_MIN
    {
        *length = size - *start;
    }
    Ok(data)
}

/// The map of a sparse file. The last part ends where the file does.
fn map(data: &[(u64, u64)], size: u64) -> Vec<u8> {
    let mut parts = data.to_vec();
    if parts.last().is_none_or(|(start, length)| start + length < size) {
        parts.push((size, 0));
    }
    let mut map = format!("{}\n", parts.len()).into_bytes();
    for (start, length) in parts {
        map.extend_from_slice(format!("{start}\n{length}\n").as_bytes());
    }
    map.resize(map.len() + padding(map.len() as u64), 0);
    map
}

fn copied(metadata: &Metadata) -> Metadata {
    Metadata {
        attributes: metadata.attributes.clone(),
        ..*metadata
    }
}

/// For entries without metadata of their own.
fn no_metadata() -> Metadata {
    Metadata {
        is_link: false,
        mode: 0,
        uid: 0,
        gid: 0,
        modified: (0, 0),
        attributes: Vec::new(),
    }
}

impl<W: Write> Sink for Archive<W> {
    fn enter(&mut self, name: &CStr, metadata: &Metadata) -> Result<(), Failure> {
        self.path = self.path(name);
        Entry::new(Kind::Directory, &self.path, copied(metadata)).write(&mut self.to)
    }

    fn leave(&mut self, _: &Metadata) -> Result<(), Failure> {
        let parent = self.path.iter().rposition(|byte| *byte == b'/');
        self.path.truncate(parent.unwrap_or(0));
        Ok(())
    }

    fn whiteout(&mut self, name: &CStr) -> Result<(), Failure> {
        Entry::new(Kind::Whiteout, &self.path(name), no_metadata()).write(&mut self.to)
    }

    fn file(
        &mut self,
        name: &CStr,
        file: &Content<'_>,
        metadata: &Metadata,
        number: Option<u64>,
    ) -> Result<(), Failure> {
        let path = self.path(name);
        let mut entry = Entry::new(Kind::File, &path, copied(metadata));
        entry.number = number;
        if let Some(number) = number
            && self.targets_size + path.len() <= TARGETS_MAX
        {
            self.targets_size += path.len();
            self.targets.insert(number, path);
        }
        match file {
            Content::Regular { file, size } => return self.contents(&mut entry, file, *size),
            Content::Symlink(target) => {
                entry.kind = Kind::Symlink;
                entry.target = target.to_bytes().to_vec();
            }
            Content::Fifo => entry.kind = Kind::Fifo,
        }
        entry.write(&mut self.to)
    }

    fn data(&mut self, _: &[u8], _: u64) -> Result<(), Failure> {
        Ok(())
    }

    fn file_end(&mut self, _: &CStr, _: &Metadata, _: Option<u64>) -> Result<(), Failure> {
        Ok(())
    }

    fn link(&mut self, name: &CStr, number: u64) -> Result<(), Failure> {
        let mut entry = Entry::new(Kind::Link, &self.path(name), no_metadata());
        entry.number = Some(number);
        entry.target = self.targets.get(&number).cloned().unwrap_or_default();
        entry.write(&mut self.to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_found_and_small_ones_filled() {
        let file = tempfile::tempfile().unwrap();
        let data = |size| {
            file.set_len(size).unwrap();
            data_of(&file, size).unwrap()
        };
        assert_eq!(data(0), []);
        assert_eq!(data(10 << 20), []);
        file.write_all_at(&[1; 4096], 1 << 20).unwrap();
        file.write_all_at(&[1; 4096], (1 << 20) + 8192).unwrap();
        file.write_all_at(&[1; 4096], 5 << 20).unwrap();
        assert_eq!(data(10 << 20), [(1 << 20, 12288), (5 << 20, 4096)]);
        assert_eq!(data((5 << 20) + 5000), [(1 << 20, 12288), (5 << 20, 5000)]);
        file.write_all_at(&[1; 1], 4096).unwrap();
        assert_eq!(data(2 << 20), [(0, 8192), (1 << 20, 12288)]);
    }

    #[test]
    fn the_map_ends_where_the_file_does() {
        let text = |data: &[(u64, u64)], size| {
            let map = map(data, size);
            assert_eq!(map.len() % BLOCK, 0);
            String::from_utf8(map).unwrap().trim_end_matches('\0').to_owned()
        };
        assert_eq!(text(&[], 7), "1\n7\n0\n");
        assert_eq!(text(&[(3, 4)], 7), "1\n3\n4\n");
        assert_eq!(text(&[(0, 4)], 7), "2\n0\n4\n7\n0\n");
    }
}

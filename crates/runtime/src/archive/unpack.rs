//! Writes the contents of an untrusted archive to a directory.
//!
//! Entries are in the order in which a layer is read: a directory, then what is in it. Each name is made in a directory
//! that was made for this archive, which is open, so no link is ever followed. Whether the result is what it should be
//! says its hash, which is computed from the files afterwards.

use std::ffi::CString;
use std::io::Read;

use formats::tar::{BLOCK, padding};

use super::tar::{Entry, Kind, decimal, invalid};
use crate::commit::budget::Budget;
use crate::commit::copy::Copy;
use crate::commit::failure::Failure;
use crate::commit::tree::{Content, DEPTH_MAX, Metadata, OPAQUE, Sink};
use crate::rootfs::Part;
use crate::slot::IDS_PER_SLOT;

/// Size in which data is read, in bytes.
const BUFFER: usize = 64 << 10;
/// Maximum number of parts of a sparse file.
const PARTS_MAX: u64 = 4 << 20;
/// What a file takes besides its data, in bytes, at least.
const FILE: u64 = 4096;
/// The limits are checked after as many bytes.
const CHECK_AFTER: u64 = 16 << 20;

/// Files that are made from an archive.
pub(super) struct Unpack<'a, R> {
    from: R,
    copy: Copy,
    /// The directories that are open.
    path: Vec<(Vec<u8>, Metadata)>,
    budget: &'a Budget<'a>,
    left: u64,
    unchecked: u64,
    buffer: Vec<u8>,
}

impl<'a, R: Read> Unpack<'a, R> {
    /// At most `bytes` are written, as they are counted here.
    pub(super) fn new(from: R, copy: Copy, budget: &'a Budget<'a>, bytes: u64) -> Self {
        Self {
            from,
            copy,
            path: Vec::new(),
            budget,
            left: bytes,
            unchecked: 0,
            buffer: vec![0; BUFFER],
        }
    }

    pub(super) fn run(mut self) -> Result<(), Failure> {
        while let Some(entry) = Entry::read(&mut self.from)? {
            self.entry(entry)?;
        }
        self.leave_to(0)?;
        self.copy.finish()
    }

    fn spend(&mut self, bytes: u64) -> Result<(), Failure> {
        self.left = self
            .left
            .checked_sub(bytes)
            .ok_or_else(|| Failure::Refused("the layer is larger than allowed".to_owned()))?;
        self.unchecked += bytes;
        if self.unchecked >= CHECK_AFTER {
            self.unchecked = 0;
            self.budget.check()?;
        }
        Ok(())
    }

    fn leave_to(&mut self, depth: usize) -> Result<(), Failure> {
        while self.path.len() > depth {
            if let Some((_, metadata)) = self.path.pop() {
                self.copy.leave(&metadata)?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, entry: Entry) -> Result<(), Failure> {
        self.spend(FILE)?;
        let names: Vec<&[u8]> = entry.path.split(|byte| *byte == b'/').collect();
        let is_name = |name: &&[u8]| !matches!(**name, [] | [b'.'] | [b'.', b'.']);
        let Some((name, parents)) = names.split_last().filter(|_| names.iter().all(is_name)) else {
            return Err(invalid("a path is not relative and plain"));
        };
        self.leave_to(parents.len())?;
        let is_next = parents.len() == self.path.len();
        if !is_next || parents.iter().zip(&self.path).any(|(name, (open, _))| *name != open) {
            return Err(invalid("an entry is not in the directory before it"));
        }
        if parents.len() >= DEPTH_MAX {
            return Err(invalid("more directories in each other than a layer has"));
        }
        let is_part = [Part::Root, Part::Usr]
            .iter()
            .any(|part| part.as_str().as_bytes() == *name);
        let is_opaque = |metadata: &Metadata| metadata.attributes.iter().any(|(name, _)| **name == *OPAQUE);
        if parents.is_empty() && (!is_part || entry.kind != Kind::Directory || is_opaque(&entry.metadata)) {
            return Err(invalid("a name is not one of a layer"));
        }
        if entry.metadata.uid >= IDS_PER_SLOT || entry.metadata.gid >= IDS_PER_SLOT {
            return Err(invalid("an owner is not a user of a sandbox"));
        }
        let name = CString::new(*name).map_err(|_| invalid("a name contains a NUL"))?;
        if entry
            .number
            .is_some_and(|number| (entry.kind == Kind::Link) != (number < self.copy.links()))
        {
            return Err(invalid("a hard link has no file"));
        }
        if entry.kind != Kind::Link && entry.number.is_some_and(|number| number != self.copy.links()) {
            return Err(invalid("the numbers of files with several names are not in order"));
        }
        match (entry.kind, entry.number) {
            (Kind::Directory, _) => {
                self.copy.enter(&name, &entry.metadata)?;
                self.path.push((name.into_bytes(), entry.metadata));
                return Ok(());
            }
            (Kind::Whiteout, _) => return self.copy.whiteout(&name),
            (Kind::Link, Some(number)) => return self.copy.link(&name, number),
            (Kind::Link, None) => return Err(invalid("a hard link has no file")),
            (Kind::File, _) => self.data(&name, &entry)?,
            (Kind::Fifo, number) => self.copy.file(&name, &Content::Fifo, &entry.metadata, number)?,
            (Kind::Symlink, number) => {
                let target = CString::new(entry.target.as_slice()).map_err(|_| invalid("a name contains a NUL"))?;
                if target.is_empty() {
                    return Err(invalid("a link has no target"));
                }
                self.copy
                    .file(&name, &Content::Symlink(target), &entry.metadata, number)?;
            }
        }
        self.copy.file_end(&name, &entry.metadata, entry.number)
    }

    /// Copies the data of a regular file.
    fn data(&mut self, name: &CString, entry: &Entry) -> Result<(), Failure> {
        let Some(size) = entry.sparse else {
            self.copy.regular(name, entry.size)?;
            self.part(0, entry.size)?;
            return self.skip(padding(entry.size));
        };
        self.copy.regular(name, size)?;
        let (parts, mut length) = self.map()?;
        let mut end = 0;
        for (start, count) in parts {
            let next = start.checked_add(count).filter(|next| start >= end && *next <= size);
            end = next.ok_or_else(|| invalid("the map of a sparse file is invalid"))?;
            length += count;
            if length > entry.size {
                return Err(invalid("the map of a sparse file is invalid"));
            }
            self.part(start, count)?;
        }
        if length == entry.size {
            self.skip(padding(entry.size))
        } else {
            Err(invalid("the map of a sparse file is invalid"))
        }
    }

    /// The parts of a sparse file, and the size of the map itself.
    fn map(&mut self) -> Result<(Vec<(u64, u64)>, u64), Failure> {
        let mut block = Vec::new();
        let mut size = 0_u64;
        let mut number = || -> Result<u64, Failure> {
            let mut digits = Vec::new();
            loop {
                if block.is_empty() {
                    block = vec![0; BLOCK];
                    self.from.read_exact(&mut block)?;
                    block.reverse();
                    size += BLOCK as u64;
                }
                match block.pop() {
                    Some(b'\n') => return decimal(&digits),
                    Some(digit) if digits.len() < 20 => digits.push(digit),
                    _ => return Err(invalid("the map of a sparse file is invalid")),
                }
            }
        };
        let count = number()?;
        if count > PARTS_MAX {
            return Err(invalid("the map of a sparse file is too large"));
        }
        let mut parts = Vec::new();
        for _ in 0..count {
            parts.push((number()?, number()?));
        }
        Ok((parts, size))
    }

    /// Copies data to a place in the file.
    fn part(&mut self, start: u64, length: u64) -> Result<(), Failure> {
        let end = start + length;
        let mut at = start;
        while at < end {
            let count = usize::try_from(end - at).unwrap_or(BUFFER).min(BUFFER);
            self.spend(count as u64)?;
            self.from.read_exact(&mut self.buffer[..count])?;
            let data = &self.buffer[..count];
            // An archive cannot make a file take more than a layer would.
            if data.iter().any(|byte| *byte != 0) {
                self.copy.data(data, at)?;
            }
            at += count as u64;
        }
        Ok(())
    }

    fn skip(&mut self, padding: usize) -> Result<(), Failure> {
        Ok(self.from.read_exact(&mut [0; BLOCK][..padding])?)
    }
}

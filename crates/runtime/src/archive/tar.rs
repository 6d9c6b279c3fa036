//! The entries of archives: a subset of pax, so that common programs can read them, too.
//!
//! What is read is untrusted. All lengths are bounded, and what [`Entry::write`] does not write is refused.

use std::ffi::CString;
use std::io::{self, Read, Write};

use crate::commit::failure::Failure;
use crate::commit::tree::{Metadata, OPAQUE, is_kept};

/// Size of a header, and the unit to which contents are padded.
pub(super) const BLOCK: usize = 512;
/// Maximum length of a path, as programs that unpack archives expect it, and of the target of a link.
pub(super) const PATH_MAX: usize = 4096;
/// Maximum length of a pax header, which has the attributes.
const PAX_MAX: usize = 4 << 20;
/// Prefix of the keys of extended attributes.
const ATTRIBUTE: &str = "SCHILY.xattr.";
/// Key of the number of a file with several names.
const LINK: &str = "RINGFENCE.link";

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Link,
    Symlink,
    Whiteout,
    Directory,
    Fifo,
}

impl Kind {
    const ALL: [(Self, u8); 6] = [
        (Self::File, b'0'),
        (Self::Link, b'1'),
        (Self::Symlink, b'2'),
        (Self::Whiteout, b'3'),
        (Self::Directory, b'5'),
        (Self::Fifo, b'6'),
    ];
}

/// One entry.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) kind: Kind,
    /// Without a slash at its end.
    pub(super) path: Vec<u8>,
    /// Target of a symbolic link, or path of the first name of a hard link, which is only for other programs.
    pub(super) target: Vec<u8>,
    pub(super) metadata: Metadata,
    /// Bytes that follow.
    pub(super) size: u64,
    /// Size of the file if what follows is a map of its data, and the data.
    pub(super) sparse: Option<u64>,
    /// Number of a file with several names.
    pub(super) number: Option<u64>,
}

impl Entry {
    pub(super) fn new(kind: Kind, path: &[u8], metadata: Metadata) -> Self {
        Self {
            kind,
            path: path.to_vec(),
            target: Vec::new(),
            metadata,
            size: 0,
            sparse: None,
            number: None,
        }
    }

    /// Writes what is before the contents.
    pub(super) fn write(&self, to: &mut impl Write) -> Result<(), Failure> {
        if self.path.len() >= PATH_MAX || self.target.len() > PATH_MAX {
            return Err(Failure::Refused("its path is too long for an archive".to_owned()));
        }
        let mut path = self.path.clone();
        if self.kind == Kind::Directory {
            path.push(b'/');
        }
        let mut pax = Vec::new();
        let (seconds, nanoseconds) = self.metadata.modified;
        let time = u64::try_from(seconds)
            .ok()
            .filter(|time| nanoseconds == 0 && *time < 1 << 33);
        if path.len() > 100 {
            record(&mut pax, "path", &path);
        }
        if self.target.len() > 100 {
            record(&mut pax, "linkpath", &self.target);
        }
        if self.size >= 1 << 33 {
            record(&mut pax, "size", self.size.to_string().as_bytes());
        }
        if time.is_none() {
            // Nanoseconds count forward, also before 1970.
            record(&mut pax, "mtime", format!("{seconds}.{nanoseconds:09}").as_bytes());
        }
        if let Some(size) = self.sparse {
            record(&mut pax, "GNU.sparse.major", b"1");
            record(&mut pax, "GNU.sparse.minor", b"0");
            record(&mut pax, "GNU.sparse.name", &path);
            record(&mut pax, "GNU.sparse.realsize", size.to_string().as_bytes());
        }
        for (name, value) in &self.metadata.attributes {
            let key = [ATTRIBUTE.as_bytes(), name.to_bytes()].concat();
            if key.contains(&b'=') {
                return Err(Failure::Refused("the name of an attribute contains a =".to_owned()));
            }
            record_bytes(&mut pax, &key, value);
        }
        if let Some(number) = self.number {
            record(&mut pax, LINK, number.to_string().as_bytes());
        }
        if pax.len() > PAX_MAX {
            return Err(Failure::Refused(
                "its attributes are too large for an archive".to_owned(),
            ));
        }
        if !pax.is_empty() {
            let length = pax.len() as u64;
            to.write_all(&header(
                b'x',
                b"pax",
                b"",
                &Numbers {
                    size: length,
                    ..Numbers::default()
                },
            ))?;
            to.write_all(&pax)?;
            to.write_all(&[0; BLOCK][..padding(length)])?;
        }
        let kind = Kind::ALL.iter().find(|(kind, _)| *kind == self.kind);
        let numbers = Numbers {
            mode: self.metadata.mode,
            uid: self.metadata.uid,
            gid: self.metadata.gid,
            size: if self.size >= 1 << 33 { 0 } else { self.size },
            time: time.unwrap_or(0),
        };
        let (path, target) = (short(&path), short(&self.target));
        Ok(to.write_all(&header(kind.map_or(b'0', |(_, flag)| *flag), path, target, &numbers))?)
    }

    /// Reads the next entry; none at the end of the archive, after which nothing follows.
    pub(super) fn read(from: &mut impl Read) -> Result<Option<Self>, Failure> {
        let mut block = next_block(from)?;
        if block.iter().all(|byte| *byte == 0) {
            let second = next_block(from)?;
            let more = from.read(&mut [0])?;
            return if second.iter().all(|byte| *byte == 0) && more == 0 {
                Ok(None)
            } else {
                Err(invalid("something follows its end"))
            };
        }
        check(&block)?;
        let mut pax = Vec::new();
        if block[156] == b'x' {
            let length = octal(&block[124..136])?;
            let length = usize::try_from(length).ok().filter(|length| *length <= PAX_MAX);
            let length = length.ok_or_else(|| invalid("an extended header is too large"))?;
            pax = vec![0; length];
            from.read_exact(&mut pax)?;
            from.read_exact(&mut [0; BLOCK][..padding(length as u64)])?;
            block = next_block(from)?;
            check(&block)?;
        }
        let flag = block[156];
        let kind = Kind::ALL
            .iter()
            .find(|(_, known)| *known == flag)
            .map(|(kind, _)| *kind);
        let kind = kind.ok_or_else(|| invalid("an entry has an unknown type"))?;
        let number = |range: std::ops::Range<usize>| {
            let number = octal(&block[range])?;
            u32::try_from(number).map_err(|_| invalid("a number is too large"))
        };
        let time = octal(&block[136..148])?;
        let metadata = Metadata {
            is_link: kind == Kind::Symlink,
            mode: number(100..108)?,
            uid: number(108..116)?,
            gid: number(116..124)?,
            modified: (i64::try_from(time).unwrap_or(0), 0),
            attributes: Vec::new(),
        };
        let mut entry = Self {
            kind,
            path: text(&block[..100]).to_vec(),
            target: text(&block[157..257]).to_vec(),
            metadata,
            size: octal(&block[124..136])?,
            sparse: None,
            number: None,
        };
        entry.extend(&pax)?;
        entry.check()?;
        Ok(Some(entry))
    }

    /// Takes over the records of an extended header.
    fn extend(&mut self, mut pax: &[u8]) -> Result<(), Failure> {
        while !pax.is_empty() {
            let bad = || invalid("an extended header is damaged");
            let space = pax.iter().take(20).position(|byte| *byte == b' ').ok_or_else(bad)?;
            let length = usize::try_from(decimal(&pax[..space])?).map_err(|_| bad())?;
            if length <= space + 2 || length > pax.len() || pax[length - 1] != b'\n' {
                return Err(bad());
            }
            let record = &pax[space + 1..length - 1];
            pax = &pax[length..];
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(bad)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" | b"GNU.sparse.name" => self.path = value.to_vec(),
                b"linkpath" => self.target = value.to_vec(),
                b"size" => self.size = decimal(value)?,
                b"mtime" => self.metadata.modified = time(value).ok_or_else(bad)?,
                b"GNU.sparse.major" if value == b"1" => {}
                b"GNU.sparse.minor" if value == b"0" => {}
                b"GNU.sparse.realsize" => self.sparse = Some(decimal(value)?),
                _ if key == LINK.as_bytes() => self.number = Some(decimal(value)?),
                _ => {
                    let name = key
                        .strip_prefix(ATTRIBUTE.as_bytes())
                        .ok_or_else(|| invalid("an extended header is unknown"))?;
                    let name = CString::new(name).map_err(|_| bad())?;
                    let is_opaque = *name == *OPAQUE && value == b"y" && self.kind == Kind::Directory;
                    if !is_opaque && !is_kept(name.to_bytes()) {
                        return Err(invalid("an entry has an attribute that layers do not have"));
                    }
                    self.metadata.attributes.push((name, value.to_vec()));
                }
            }
        }
        Ok(())
    }

    fn check(&mut self) -> Result<(), Failure> {
        if self.kind == Kind::Directory && self.path.pop() != Some(b'/') {
            return Err(invalid("the name of a directory does not end with a slash"));
        }
        let is_file = self.kind == Kind::File;
        let has_contents = self.size > 0 || self.sparse.is_some();
        let has_number = self.number.is_some() && matches!(self.kind, Kind::Directory | Kind::Whiteout);
        let has_attributes = !self.metadata.attributes.is_empty();
        let is_bare = matches!(self.kind, Kind::Link | Kind::Symlink | Kind::Whiteout);
        if (has_contents && !is_file) || has_number || (has_attributes && is_bare) {
            return Err(invalid("an entry has what its type cannot have"));
        }
        if self.size >= 1 << 62 || self.sparse.is_some_and(|size| size >= 1 << 62) {
            return Err(invalid("a file is too large"));
        }
        if self.path.len() >= PATH_MAX || self.target.len() > PATH_MAX || self.metadata.mode > 0o7777 {
            return Err(invalid("a value of an entry is too large"));
        }
        if self.path.contains(&0) || self.target.contains(&0) {
            return Err(invalid("a name contains a NUL"));
        }
        Ok(())
    }
}

/// What to say about an archive that this program did not write.
pub(super) fn invalid(why: &str) -> Failure {
    Failure::Refused(format!("invalid archive: {why}"))
}

/// Zeros up to the next block.
pub(super) fn padding(size: u64) -> usize {
    usize::try_from(size.wrapping_neg() % BLOCK as u64).unwrap_or(0)
}

/// What the header itself has of a text: all of it, or its beginning.
fn short(text: &[u8]) -> &[u8] {
    &text[..text.len().min(100)]
}

fn record(pax: &mut Vec<u8>, key: &str, value: &[u8]) {
    record_bytes(pax, key.as_bytes(), value);
}

/// Adds `LENGTH KEY=VALUE\n`, where the length includes itself.
fn record_bytes(pax: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length.to_string().len() + rest != length {
        length = length.to_string().len() + rest;
    }
    pax.extend_from_slice(length.to_string().as_bytes());
    pax.push(b' ');
    pax.extend_from_slice(key);
    pax.push(b'=');
    pax.extend_from_slice(value);
    pax.push(b'\n');
}

#[derive(Debug, Default)]
struct Numbers {
    mode: u32,
    uid: u32,
    gid: u32,
    size: u64,
    time: u64,
}

fn header(flag: u8, path: &[u8], target: &[u8], numbers: &Numbers) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    block[..path.len()].copy_from_slice(path);
    block[157..157 + target.len()].copy_from_slice(target);
    let mut number = |at: usize, digits: usize, value: u64| {
        let text = format!("{value:0digits$o}");
        block[at..at + digits].copy_from_slice(text.as_bytes());
    };
    number(100, 7, numbers.mode.into());
    number(108, 7, numbers.uid.into());
    number(116, 7, numbers.gid.into());
    number(124, 11, numbers.size);
    number(136, 11, numbers.time);
    block[156] = flag;
    block[257..265].copy_from_slice(b"ustar\x0000");
    if flag == b'3' {
        block[329..336].copy_from_slice(b"0000000");
        block[337..344].copy_from_slice(b"0000000");
    }
    let sum = checksum(&block);
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    block
}

/// The sum of all bytes, where those of the sum itself count as spaces.
fn checksum(block: &[u8; BLOCK]) -> u64 {
    let bytes = block.iter().enumerate();
    bytes
        .map(|(at, byte)| if (148..156).contains(&at) { 32 } else { u64::from(*byte) })
        .sum()
}

fn next_block(from: &mut impl Read) -> Result<[u8; BLOCK], Failure> {
    let mut block = [0; BLOCK];
    from.read_exact(&mut block)?;
    Ok(block)
}

fn check(block: &[u8; BLOCK]) -> Result<(), Failure> {
    let is_device =
        block[156] == b'3' && (text(&block[329..337]) != b"0000000" || text(&block[337..345]) != b"0000000");
    if &block[257..265] != b"ustar\x0000" || is_device || block[345..].iter().any(|byte| *byte != 0) {
        return Err(invalid("an entry is not one of a layer"));
    }
    if octal(&block[148..156])? == checksum(block) {
        Ok(())
    } else {
        Err(invalid("a checksum is wrong"))
    }
}

fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    &field[..end]
}

fn octal(field: &[u8]) -> Result<u64, Failure> {
    let digits = str::from_utf8(text(field))
        .ok()
        .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let number = digits.and_then(|digits| u64::from_str_radix(digits, 8).ok());
    number.ok_or_else(|| invalid("a number is not one"))
}

/// A number of decimal digits alone.
pub(super) fn decimal(digits: &[u8]) -> Result<u64, Failure> {
    let digits = str::from_utf8(digits)
        .ok()
        .filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let number = digits.and_then(|digits| digits.parse().ok());
    number.ok_or_else(|| invalid("a number is not one"))
}

/// Seconds with nine digits of nanoseconds.
fn time(value: &[u8]) -> Option<(i64, u32)> {
    let (seconds, nanoseconds) = str::from_utf8(value).ok()?.split_once('.')?;
    let is_complete = nanoseconds.len() == 9 && nanoseconds.bytes().all(|byte| byte.is_ascii_digit());
    is_complete.then_some((seconds.parse().ok()?, nanoseconds.parse().ok()?))
}

/// An error of the stream that is read is one of the archive.
pub(super) fn of_stream(failure: Failure) -> Failure {
    match failure {
        Failure::Failed(error) if error.kind() == io::ErrorKind::UnexpectedEof => invalid("it is truncated"),
        Failure::Failed(error) if error.kind() == io::ErrorKind::InvalidData => invalid(&error.to_string()),
        failure => failure,
    }
}

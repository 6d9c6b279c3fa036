//! The entries of archives: a subset of pax, so that common programs can read them, too.
//!
//! What is read is untrusted. All lengths are bounded, and what [`Entry::write`] does not write is refused.

use std::ffi::CString;
use std::io::{self, Read, Write};

use formats::tar::{self, BLOCK, EXTENDED, Header, NUMBER_END, OWNER_END, TEXT_MAX, add_record, field, padding, text};

use crate::commit::failure::Failure;
use crate::commit::tree::{Metadata, OPAQUE, is_kept};

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
        if self.metadata.uid >= OWNER_END || self.metadata.gid >= OWNER_END {
            return Err(Failure::Refused("its owner is not one of a sandbox".to_owned()));
        }
        let mut path = self.path.clone();
        if self.kind == Kind::Directory {
            path.push(b'/');
        }
        let mut pax = Vec::new();
        let mut record = |key: &str, value: &[u8]| add_record(&mut pax, key.as_bytes(), value);
        let (seconds, nanoseconds) = self.metadata.modified;
        let time = u64::try_from(seconds)
            .ok()
            .filter(|time| nanoseconds == 0 && *time < NUMBER_END);
        if path.len() > TEXT_MAX {
            record("path", &path);
        }
        if self.target.len() > TEXT_MAX {
            record("linkpath", &self.target);
        }
        if self.size >= NUMBER_END {
            record("size", self.size.to_string().as_bytes());
        }
        if time.is_none() {
            // Nanoseconds count forward, also before 1970.
            record("mtime", format!("{seconds}.{nanoseconds:09}").as_bytes());
        }
        if let Some(size) = self.sparse {
            record("GNU.sparse.major", b"1");
            record("GNU.sparse.minor", b"0");
            record("GNU.sparse.name", &path);
            record("GNU.sparse.realsize", size.to_string().as_bytes());
        }
        for (name, value) in &self.metadata.attributes {
            let key = [ATTRIBUTE.as_bytes(), name.to_bytes()].concat();
            if key.contains(&b'=') {
                return Err(Failure::Refused("the name of an attribute contains a =".to_owned()));
            }
            add_record(&mut pax, &key, value);
        }
        if let Some(number) = self.number {
            add_record(&mut pax, LINK.as_bytes(), number.to_string().as_bytes());
        }
        if pax.len() > PAX_MAX {
            return Err(Failure::Refused(
                "its attributes are too large for an archive".to_owned(),
            ));
        }
        tar::write_records(to, &pax)?;
        let kind = Kind::ALL.iter().find(|(kind, _)| *kind == self.kind);
        let header = Header {
            kind: kind.map_or(b'0', |(_, flag)| *flag),
            path: &path,
            link: &self.target,
            mode: self.metadata.mode,
            uid: self.metadata.uid,
            gid: self.metadata.gid,
            size: self.size,
            mtime: time.unwrap_or(0),
        };
        Ok(to.write_all(&header.block())?)
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
        if block[field::KIND] == EXTENDED {
            let length = octal(&block[field::SIZE])?;
            let length = usize::try_from(length).ok().filter(|length| *length <= PAX_MAX);
            let length = length.ok_or_else(|| invalid("an extended header is too large"))?;
            pax = vec![0; length];
            from.read_exact(&mut pax)?;
            from.read_exact(&mut [0; BLOCK][..padding(length as u64)])?;
            block = next_block(from)?;
            check(&block)?;
        }
        let flag = block[field::KIND];
        let kind = Kind::ALL
            .iter()
            .find(|(_, known)| *known == flag)
            .map(|(kind, _)| *kind);
        let kind = kind.ok_or_else(|| invalid("an entry has an unknown type"))?;
        let number = |range: std::ops::Range<usize>| {
            let number = octal(&block[range])?;
            u32::try_from(number).map_err(|_| invalid("a number is too large"))
        };
        let time = octal(&block[field::MTIME])?;
        let metadata = Metadata {
            is_link: kind == Kind::Symlink,
            mode: number(field::MODE)?,
            uid: number(field::UID)?,
            gid: number(field::GID)?,
            modified: (i64::try_from(time).unwrap_or(0), 0),
            attributes: Vec::new(),
        };
        let mut entry = Self {
            kind,
            path: text(&block[field::PATH]).to_vec(),
            target: text(&block[field::LINK]).to_vec(),
            metadata,
            size: octal(&block[field::SIZE])?,
            sparse: None,
            number: None,
        };
        entry.extend(&pax)?;
        entry.check()?;
        Ok(Some(entry))
    }

    /// Takes over the records of an extended header.
    fn extend(&mut self, pax: &[u8]) -> Result<(), Failure> {
        let bad = || invalid("an extended header is damaged");
        for record in tar::records(pax) {
            let (key, value) = record.map_err(|_| bad())?;
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

fn next_block(from: &mut impl Read) -> Result<[u8; BLOCK], Failure> {
    let mut block = [0; BLOCK];
    from.read_exact(&mut block)?;
    Ok(block)
}

fn check(block: &[u8; BLOCK]) -> Result<(), Failure> {
    let has_number = |number: std::ops::Range<usize>| text(&block[number]) != b"0000000";
    let is_device = block[field::KIND] == b'3' && field::DEVICE.into_iter().any(has_number);
    let has_more = block[field::PREFIX.start..].iter().any(|byte| *byte != 0);
    if block[field::MAGIC] != *tar::USTAR || is_device || has_more {
        return Err(invalid("an entry is not one of a layer"));
    }
    if octal(&block[field::CHECKSUM])? != tar::checksum(block) {
        return Err(invalid("a checksum is wrong"));
    }
    Ok(())
}

fn octal(field: &[u8]) -> Result<u64, Failure> {
    tar::octal(field).ok_or_else(|| invalid("a number is not one"))
}

/// A number of decimal digits alone.
pub(super) fn decimal(digits: &[u8]) -> Result<u64, Failure> {
    tar::decimal(digits).ok_or_else(|| invalid("a number is not one"))
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

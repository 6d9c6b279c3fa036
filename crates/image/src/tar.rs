//! A reader of tar archives: ustar, GNU long names and pax headers, as a stream, in constant memory.
//!
//! Nothing of an archive is trusted: every length is bounded, numbers are checked, and what is not understood is an
//! error and not a guess. What paths and links mean is for the caller to decide.

mod pax;

use std::io::{self, Read};

use anyhow::{Context, Result, bail, ensure};
use formats::tar::{self, BLOCK, field, text};

use self::pax::Pax;
use crate::message::show;

/// Maximum length of a GNU long name. The kernel takes no path above 4096 bytes.
const NAME_MAX: u64 = 8192;
/// Maximum length of a pax header, which may have extended attributes of 64 KiB each.
const PAX_MAX: u64 = 1 << 20;
/// Maximum number of headers that belong to one entry.
const HEADERS_MAX: usize = 16;

/// Type of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    HardLink,
    Symlink,
    Directory,
    Fifo,
    /// A character or block device.
    Device,
}

/// One entry. Its contents, if it is a file, are what [`Reader::read`] gives next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Path of the entry in the archive: not checked, except that it has no NUL.
    pub(crate) path: Vec<u8>,
    /// Target of a link; also not checked.
    pub(crate) link: Vec<u8>,
    pub(crate) kind: Kind,
    /// Permission bits with set-user-id, set-group-id and sticky bit.
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    /// Seconds and nanoseconds.
    pub(crate) mtime: (i64, u32),
    pub(crate) size: u64,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Reads an archive.
#[derive(Debug)]
pub(crate) struct Reader<R> {
    inner: R,
    /// Bytes of the current entry that are not read yet, and those of padding behind them.
    left: u64,
    padding: u64,
    /// Entries so far, for messages.
    count: u64,
    ended: bool,
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self {
            inner,
            left: 0,
            padding: 0,
            count: 0,
            ended: false,
        }
    }

    /// The next entry; none at the end of the archive.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>> {
        if self.ended {
            return Ok(None);
        }
        let number = self.count + 1;
        let entry = self.find().with_context(|| format!("entry {number} of the archive"))?;
        self.count = number;
        self.ended = entry.is_none();
        Ok(entry)
    }

    /// Reads the remaining bytes, so that a reader below sees the end of its stream.
    pub(crate) fn drain(mut self) -> Result<()> {
        io::copy(&mut self.inner, &mut io::sink()).context("read the end of the archive")?;
        Ok(())
    }

    fn find(&mut self) -> Result<Option<Entry>> {
        let mut path = None;
        let mut link = None;
        let mut pax = Pax::default();
        for _ in 0..HEADERS_MAX {
            let header = if self.skip()? { self.header()? } else { None };
            let Some(header) = header else {
                ensure!(
                    path.is_none() && link.is_none() && pax.is_empty(),
                    "the archive ends after an extended header"
                );
                return Ok(None);
            };
            let size = number(&header[field::SIZE]).context("invalid size")?;
            match header[field::KIND] {
                b'L' => path = Some(self.text(size)?),
                b'K' => link = Some(self.text(size)?),
                b'x' => pax = Pax::parse(&self.extended(size)?)?,
                // Defaults for all following entries: comments in practice.
                b'g' => drop(self.extended(size)?),
                _ => return self.entry(&header, size, path, link, pax).map(Some),
            }
        }
        bail!("too many extended headers");
    }

    /// Ends with the previous entry. False if nothing can follow: some programs leave out the padding of the last one.
    fn skip(&mut self) -> Result<bool> {
        let rest = io::copy(&mut (&mut self.inner).take(self.left), &mut io::sink())?;
        ensure!(rest == self.left, "the archive is truncated");
        let padding = io::copy(&mut (&mut self.inner).take(self.padding), &mut io::sink())?;
        let is_complete = padding == self.padding;
        self.left = 0;
        self.padding = 0;
        Ok(is_complete)
    }

    /// The next header; none at the end of the archive.
    fn header(&mut self) -> Result<Option<[u8; BLOCK]>> {
        let mut block = [0; BLOCK];
        let mut filled = 0;
        while filled < BLOCK {
            match self.inner.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => bail!("the archive is truncated"),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let stored = number(&block[field::CHECKSUM]).context("not a tar archive")?;
        let (unsigned, signed) = (tar::checksum(&block), tar::signed_checksum(&block));
        ensure!(
            stored == unsigned || i64::try_from(stored) == Ok(signed),
            "not a tar archive, or damaged: wrong checksum of a header"
        );
        Ok(Some(block))
    }

    /// Contents of an extended header.
    fn extended(&mut self, size: u64) -> Result<Vec<u8>> {
        self.contents(size, PAX_MAX)
    }

    /// A GNU long name.
    fn text(&mut self, size: u64) -> Result<Vec<u8>> {
        let mut text = self.contents(size, NAME_MAX)?;
        while text.last() == Some(&0) {
            text.pop();
        }
        Ok(text)
    }

    fn contents(&mut self, size: u64, max: u64) -> Result<Vec<u8>> {
        ensure!(size <= max, "an extended header of {size} bytes; the maximum is {max}");
        self.begin(size);
        let mut contents = Vec::new();
        self.read_to_end(&mut contents)?;
        ensure!(self.left == 0, "the archive is truncated");
        Ok(contents)
    }

    fn begin(&mut self, size: u64) {
        self.left = size;
        self.padding = tar::padding(size) as u64;
    }

    fn entry(
        &mut self,
        header: &[u8; BLOCK],
        size: u64,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
        pax: Pax,
    ) -> Result<Entry> {
        let is_ustar = &header[257..263] == b"ustar\0";
        let mut path = long_path.unwrap_or_else(|| {
            let name = text(&header[field::PATH]);
            let prefix = if is_ustar { text(&header[field::PREFIX]) } else { b"" };
            if prefix.is_empty() {
                name.to_vec()
            } else {
                [prefix, b"/", name].concat()
            }
        });
        let mut link = long_link.unwrap_or_else(|| text(&header[field::LINK]).to_vec());
        path = pax.path.unwrap_or(path);
        link = pax.link.unwrap_or(link);
        for text in [&path, &link] {
            ensure!(!text.contains(&0), "a name contains a NUL");
        }
        let kind = match header[field::KIND] {
            0 | b'0' | b'7' if path.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' | b'4' => Kind::Device,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            b'S' => bail!("{}: sparse files are not supported", show(&path)),
            other => bail!("{}: unknown type of entry {other:#04x}", show(&path)),
        };
        ensure!(!pax.sparse, "{}: sparse files are not supported", show(&path));
        let size = if kind == Kind::File {
            pax.size.unwrap_or(size)
        } else {
            0
        };
        // Nothing above could be padded without an overflow.
        ensure!(size < 1 << 62, "{}: invalid size", show(&path));
        self.begin(size);
        let number_of = |range: std::ops::Range<usize>, name: &str| {
            number(&header[range]).with_context(|| format!("{}: invalid {name}", show(&path)))
        };
        let mode = number_of(field::MODE, "mode")? & 0o7777;
        let mtime = match pax.mtime {
            Some(mtime) => mtime,
            None => (tar::number(&header[field::MTIME]).context("invalid time")?, 0),
        };
        Ok(Entry {
            kind,
            mode: u32::try_from(mode)?,
            uid: pax.uid.map_or_else(|| number_of(field::UID, "user id"), Ok)?,
            gid: pax.gid.map_or_else(|| number_of(field::GID, "group id"), Ok)?,
            mtime,
            size,
            xattrs: pax.xattrs,
            path,
            link,
        })
    }
}

impl<R: Read> Read for Reader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let count = self.inner.read(&mut buffer[..most])?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive is truncated"));
        }
        self.left -= count as u64;
        Ok(count)
    }
}

/// A number that is not negative.
fn number(field: &[u8]) -> Result<u64> {
    u64::try_from(tar::number(field)?).context("a negative number")
}

//! The blocks of tar archives: headers of ustar with what GNU tar added, and the records of extended headers (pax).
//!
//! This is what all archives have in common. Which of them are accepted is decided by who reads them: an archive of an image
//! may come from any program, one of a layer must be as this platform writes it.

use std::io::{self, Write};
use std::iter;

/// Size of a header, and the unit to which contents are padded.
pub const BLOCK: usize = 512;
/// The most bytes of a path or a target that a header has.
pub const TEXT_MAX: usize = 100;
/// The first number that the field of a size or a time cannot have in octal digits.
pub const NUMBER_END: u64 = 1 << 33;
/// The first number that the field of an owner cannot have.
pub const OWNER_END: u32 = 1 << 21;
/// The kind of an extended header, which belongs to the entry after it.
pub const EXTENDED: u8 = b'x';
/// Most characters of the length of a record.
const LENGTH_MAX: usize = 20;

/// Where the fields of a header are.
pub mod field {
    use std::ops::Range;

    /// The path, or its beginning.
    pub const PATH: Range<usize> = 0..100;
    /// Permission bits.
    pub const MODE: Range<usize> = 100..108;
    /// The id of the owner.
    pub const UID: Range<usize> = 108..116;
    /// The id of the group.
    pub const GID: Range<usize> = 116..124;
    /// Bytes that follow.
    pub const SIZE: Range<usize> = 124..136;
    /// Time of the last change, in seconds.
    pub const MTIME: Range<usize> = 136..148;
    /// The sum of all bytes.
    pub const CHECKSUM: Range<usize> = 148..156;
    /// What the entry is.
    pub const KIND: usize = 156;
    /// The target of a link, or its beginning.
    pub const LINK: Range<usize> = 157..257;
    /// Name and version of the format.
    pub const MAGIC: Range<usize> = 257..265;
    /// First and second number of a device.
    pub const DEVICE: [Range<usize>; 2] = [329..337, 337..345];
    /// What comes before the path, in archives of other programs.
    pub const PREFIX: Range<usize> = 345..500;
}

/// The format that is written.
pub const USTAR: &[u8; 8] = b"ustar\x0000";

/// A header that is to be written.
#[derive(Debug, Clone, Copy, Default)]
pub struct Header<'a> {
    /// What the entry is.
    pub kind: u8,
    /// The header has its first [`TEXT_MAX`] bytes: the rest belongs in a record.
    pub path: &'a [u8],
    /// The target of a link, as the path.
    pub link: &'a [u8],
    /// Permission bits.
    pub mode: u32,
    /// Below [`OWNER_END`].
    pub uid: u32,
    /// Below [`OWNER_END`].
    pub gid: u32,
    /// The header has 0 from [`NUMBER_END`] on: the number belongs in a record.
    pub size: u64,
    /// As the size.
    pub mtime: u64,
}

impl Header<'_> {
    /// The block of the header.
    #[must_use]
    pub fn block(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        let mut put = |at: usize, text: &[u8]| block[at..at + text.len()].copy_from_slice(text);
        let short = |text: &[u8]| text.len().min(TEXT_MAX);
        let large = |number: u64| if number < NUMBER_END { number } else { 0 };
        let small = |id: u32| if id < OWNER_END { id } else { 0 };
        put(field::PATH.start, &self.path[..short(self.path)]);
        put(field::MODE.start, format!("{:07o}", self.mode & 0o7777).as_bytes());
        put(field::UID.start, format!("{:07o}", small(self.uid)).as_bytes());
        put(field::GID.start, format!("{:07o}", small(self.gid)).as_bytes());
        put(field::SIZE.start, format!("{:011o}", large(self.size)).as_bytes());
        put(field::MTIME.start, format!("{:011o}", large(self.mtime)).as_bytes());
        block[field::KIND] = self.kind;
        let mut put = |at: usize, text: &[u8]| block[at..at + text.len()].copy_from_slice(text);
        put(field::LINK.start, &self.link[..short(self.link)]);
        put(field::MAGIC.start, USTAR);
        if matches!(self.kind, b'3' | b'4') {
            for number in field::DEVICE {
                put(number.start, b"0000000");
            }
        }
        seal(&mut block);
        block
    }
}

/// Writes the checksum of a header.
pub fn seal(block: &mut [u8; BLOCK]) {
    let sum = format!("{:06o}\0 ", checksum(block));
    block[field::CHECKSUM].copy_from_slice(sum.as_bytes());
}

/// The sum of all bytes of a header, where those of the sum itself count as spaces.
#[must_use]
pub fn checksum(block: &[u8; BLOCK]) -> u64 {
    summed(block).map(u64::from).sum()
}

/// The checksum of a header as some old programs wrote it, with signed bytes.
#[must_use]
pub fn signed_checksum(block: &[u8; BLOCK]) -> i64 {
    summed(block).map(|byte| i64::from(byte.cast_signed())).sum()
}

fn summed(block: &[u8; BLOCK]) -> impl Iterator<Item = u8> {
    let bytes = block.iter().enumerate();
    bytes.map(|(at, byte)| if field::CHECKSUM.contains(&at) { b' ' } else { *byte })
}

/// How many zeros follow contents of a size.
#[must_use]
pub fn padding(size: u64) -> usize {
    usize::try_from(size.wrapping_neg() % BLOCK as u64).unwrap_or(0)
}

/// A field up to its first NUL.
#[must_use]
pub fn text(field: &[u8]) -> &[u8] {
    let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    &field[..end]
}

/// A number of octal digits alone, as this platform writes them.
#[must_use]
pub fn octal(field: &[u8]) -> Option<u64> {
    u64::from_str_radix(digits(text(field))?, 8).ok()
}

/// A number of decimal digits alone.
#[must_use]
pub fn decimal(digits_of: &[u8]) -> Option<u64> {
    digits(digits_of)?.parse().ok()
}

fn digits(text: &[u8]) -> Option<&str> {
    let digits = std::str::from_utf8(text).ok()?;
    digits.bytes().all(|byte| byte.is_ascii_digit()).then_some(digits)
}

/// Why a field of a header is not a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotANumber {
    /// The field has characters other than octal digits.
    #[error("not an octal number")]
    Digits,
    /// The number does not fit.
    #[error("a number is too large")]
    Range,
}

/// A number as any program writes it: octal digits between spaces, or base 256.
///
/// # Errors
/// When it is no such number.
pub fn number(field: &[u8]) -> Result<i64, NotANumber> {
    let Some((first, rest)) = field.split_first() else {
        return Ok(0);
    };
    if first & 0x80 != 0 {
        // Two's complement, of which the first bit is the mark.
        let is_negative = first & 0x40 != 0;
        let top = i128::from(first & 0x3f) | if is_negative { !0x3f } else { 0 };
        let value = rest.iter().fold(top, |value, byte| {
            value.saturating_mul(256).saturating_add(i128::from(*byte))
        });
        return i64::try_from(value).map_err(|_| NotANumber::Range);
    }
    let is_blank = |byte: &&u8| matches!(**byte, b' ' | 0);
    let digits = field.iter().skip_while(is_blank).take_while(|byte| !is_blank(byte));
    digits.copied().try_fold(0_i64, |value, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 8);
        let digit = digit.ok_or(NotANumber::Digits)?;
        let value = value.checked_mul(8).and_then(|value| value.checked_add(digit.into()));
        value.ok_or(NotANumber::Range)
    })
}

/// Adds a record `LENGTH KEY=VALUE\n`, of which the length counts its own digits. The key must have no `=`.
pub fn add_record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length.to_string().len() + rest != length {
        length = length.to_string().len() + rest;
    }
    for part in [length.to_string().as_bytes(), b" ", key, b"=", value, b"\n"] {
        records.extend_from_slice(part);
    }
}

/// Writes an extended header with records, unless there are none.
///
/// # Errors
/// When writing fails.
pub fn write_records(to: &mut impl Write, records: &[u8]) -> io::Result<()> {
    if records.is_empty() {
        return Ok(());
    }
    let header = Header {
        kind: EXTENDED,
        path: b"pax",
        size: records.len() as u64,
        ..Header::default()
    };
    to.write_all(&header.block())?;
    to.write_all(records)?;
    to.write_all(&[0; BLOCK][..padding(header.size)])
}

/// A record that is not one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a record is damaged")]
pub struct BadRecord;

/// Keys and values of the records of an extended header. Nothing follows an error.
pub fn records(mut records: &[u8]) -> impl Iterator<Item = Result<(&[u8], &[u8]), BadRecord>> {
    iter::from_fn(move || {
        if records.is_empty() {
            return None;
        }
        let found = split_record(records);
        records = found.map_or(&[], |(_, _, rest)| rest);
        Some(found.map(|(key, value, _)| (key, value)).ok_or(BadRecord))
    })
}

/// Key and value of the first record, and the others.
fn split_record(records: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = records.iter().take(LENGTH_MAX).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(&records[..space])?).ok()?;
    if length <= space + 1 || length > records.len() {
        return None;
    }
    let (record, rest) = records.split_at(length);
    let pair = record[space + 1..].strip_suffix(b"\n")?;
    let equals = pair.iter().position(|byte| *byte == b'=')?;
    (equals > 0).then(|| (&pair[..equals], &pair[equals + 1..], rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_what_fits() {
        let header = Header {
            kind: b'0',
            path: &[b'p'; 101],
            link: b"target",
            mode: 0o4755,
            uid: OWNER_END - 1,
            gid: 7,
            size: NUMBER_END - 1,
            mtime: NUMBER_END,
        };
        let block = header.block();
        assert_eq!(text(&block[field::PATH]), [b'p'; 100]);
        assert_eq!(text(&block[field::LINK]), b"target");
        for (field, want) in [
            (field::MODE, 0o4755),
            (field::UID, 0o7_777_777),
            (field::GID, 7),
            (field::SIZE, NUMBER_END - 1),
            (field::MTIME, 0),
            (field::CHECKSUM, checksum(&block)),
        ] {
            assert_eq!(octal(&block[field.clone()]), Some(want), "{field:?}");
            assert_eq!(number(&block[field.clone()]), Ok(want.cast_signed()), "{field:?}");
        }
        assert_eq!(block[field::KIND], b'0');
        assert!(block[field::PREFIX.start - 16..].iter().all(|byte| *byte == 0));
        let device = Header { kind: b'3', ..header }.block();
        assert_eq!(octal(&device[field::DEVICE[1].clone()]), Some(0));
        assert_eq!(text(&device[field::DEVICE[1].clone()]), b"0000000");
    }

    #[test]
    fn numbers_of_other_programs_are_read() {
        for (field, want) in [
            (&b"0000644\0"[..], Ok(0o644)),
            (b"   644 \0", Ok(0o644)),
            (b"\0\0\0", Ok(0)),
            (b"", Ok(0)),
            (b"77777777", Ok(0o77_777_777)),
            (b"\x80\0\0\0\0\0\0\0\x01\0\0\0", Ok(1 << 24)),
            (b"\xff\xff\xff\xff", Ok(-1)),
            (b"\x80\xff\xff\xff\xff\xff\xff\xff\xff", Err(NotANumber::Range)),
            (&[0xff; 40], Ok(-1)),
            (&[0xbf; 40], Err(NotANumber::Range)),
            (&[b'7'; 30], Err(NotANumber::Range)),
            (b"8", Err(NotANumber::Digits)),
            (b"-1", Err(NotANumber::Digits)),
            (b"12x", Err(NotANumber::Digits)),
        ] {
            assert_eq!(number(field), want, "{field:?}");
        }
        for strict in [&b"644 "[..], b" 644", b"+644", b"\x80\0\x01", b"8", b""] {
            assert_eq!(octal(strict), None, "{strict:?}");
        }
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let values = [
            (&b"path"[..], vec![b'n'; 101]),
            (b"a", vec![]),
            (b"b", b"x=\n".to_vec()),
            (b"c", vec![0; 990]),
        ];
        let mut bytes = Vec::new();
        for (key, value) in &values {
            add_record(&mut bytes, key, value);
        }
        assert!(bytes.starts_with(b"111 path=nnn"));
        let read: Result<Vec<_>, _> = records(&bytes).collect();
        let want: Vec<_> = values.iter().map(|(key, value)| (*key, value.as_slice())).collect();
        assert_eq!(read, Ok(want));
        let mut written = Vec::new();
        write_records(&mut written, &bytes).unwrap();
        assert_eq!(written.len(), BLOCK + bytes.len() + padding(bytes.len() as u64));
        assert_eq!(&written[BLOCK..BLOCK + bytes.len()], bytes);
        let mut none = Vec::new();
        write_records(&mut none, b"").unwrap();
        assert!(none.is_empty());
    }

    #[test]
    fn nothing_follows_a_record_that_is_not_one() {
        for bad in [
            "a=b\n",
            "5 a=b\n",
            "7 a=b\n",
            "99 a=b\n",
            "0 a=b\n",
            "+6 a=b\n",
            "5 =b\n",
            "5 ab\n",
            "2 \n",
            "3 \n",
            " 6 a=b\n",
            "000000000000000000006 a=b\n",
            "18446744073709551616 a=b\n",
        ] {
            let read: Vec<_> = records(bad.as_bytes()).collect();
            assert_eq!(read, [Err(BadRecord)], "{bad:?}");
        }
        assert_eq!(
            records(b"6 a=b\n6 a=b").collect::<Vec<_>>(),
            [Ok((&b"a"[..], &b"b"[..])), Err(BadRecord)]
        );
    }

    #[test]
    fn contents_are_padded_to_blocks() {
        for (size, zeros) in [(0, 0), (1, 511), (511, 1), (512, 0), (u64::MAX, 1)] {
            assert_eq!(padding(size), zeros, "{size}");
        }
    }
}

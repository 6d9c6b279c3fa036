//! Tar archives, right and wrong ones.

use std::io::Write;

/// One member.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: u8,
    pub(crate) link: Vec<u8>,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) mtime: u64,
    pub(crate) data: Vec<u8>,
    /// A size in the header that differs from that of the data.
    pub(crate) size: Option<u64>,
    pub(crate) pax: Vec<(String, Vec<u8>)>,
}

pub(crate) fn member(kind: u8, path: &str) -> Member {
    Member {
        path: path.as_bytes().to_vec(),
        kind,
        link: Vec::new(),
        mode: 0o644,
        uid: 0,
        gid: 0,
        mtime: 1_700_000_000,
        data: Vec::new(),
        size: None,
        pax: Vec::new(),
    }
}

pub(crate) fn file(path: &str, data: &str) -> Member {
    Member {
        data: data.as_bytes().to_vec(),
        ..member(b'0', path)
    }
}

pub(crate) fn dir(path: &str) -> Member {
    Member {
        mode: 0o755,
        ..member(b'5', path)
    }
}

pub(crate) fn symlink(path: &str, target: &str) -> Member {
    Member {
        link: target.as_bytes().to_vec(),
        mode: 0o777,
        ..member(b'2', path)
    }
}

pub(crate) fn hard_link(path: &str, target: &str) -> Member {
    Member {
        link: target.as_bytes().to_vec(),
        ..member(b'1', path)
    }
}

impl Member {
    pub(crate) fn mode(self, mode: u32) -> Self {
        Self { mode, ..self }
    }

    pub(crate) fn owner(self, uid: u64, gid: u64) -> Self {
        Self { uid, gid, ..self }
    }

    pub(crate) fn pax(mut self, key: &str, value: &[u8]) -> Self {
        self.pax.push((key.to_owned(), value.to_vec()));
        self
    }

    pub(crate) fn size(self, size: u64) -> Self {
        Self {
            size: Some(size),
            ..self
        }
    }

    /// Header, contents and padding; extended headers before where they are needed.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if !self.pax.is_empty() {
            let mut records = Vec::new();
            for (key, value) in &self.pax {
                records.extend(record(key.as_bytes(), value));
            }
            bytes.extend(raw(b'x', b"pax", &records));
        }
        if self.path.len() > 100 {
            bytes.extend(raw(b'L', b"long", &[&self.path[..], b"\0"].concat()));
        }
        if self.link.len() > 100 {
            bytes.extend(raw(b'K', b"long", &[&self.link[..], b"\0"].concat()));
        }
        let mut header = header(self.kind, &self.path);
        field(&mut header, 100, 8, u64::from(self.mode));
        field(&mut header, 108, 8, self.uid);
        field(&mut header, 116, 8, self.gid);
        field(&mut header, 124, 12, self.size.unwrap_or(self.data.len() as u64));
        field(&mut header, 136, 12, self.mtime);
        let length = self.link.len().min(100);
        header[157..157 + length].copy_from_slice(&self.link[..length]);
        checksum(&mut header);
        bytes.extend(header);
        bytes.extend(&self.data);
        pad(&mut bytes);
        bytes
    }
}

/// A record of a pax header.
pub(crate) fn record(key: &[u8], value: &[u8]) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    [length.to_string().as_bytes(), b" ", key, b"=", value, b"\n"].concat()
}

/// A member with contents and nothing else.
pub(crate) fn raw(kind: u8, path: &[u8], data: &[u8]) -> Vec<u8> {
    let mut header = header(kind, path);
    field(&mut header, 124, 12, data.len() as u64);
    checksum(&mut header);
    let mut bytes = header.to_vec();
    bytes.extend(data);
    pad(&mut bytes);
    bytes
}

pub(crate) fn header(kind: u8, path: &[u8]) -> [u8; 512] {
    let mut header = [0; 512];
    let length = path.len().min(100);
    header[..length].copy_from_slice(&path[..length]);
    header[156] = kind;
    header[257..265].copy_from_slice(b"ustar\x0000");
    header
}

/// A number in octal digits, or in base 256 if it is too large for them.
pub(crate) fn field(header: &mut [u8; 512], at: usize, length: usize, value: u64) {
    let digits = format!("{value:0width$o}", width = length - 1);
    if digits.len() < length {
        header[at..at + digits.len()].copy_from_slice(digits.as_bytes());
        return;
    }
    header[at..at + length].fill(0);
    header[at] = 0x80;
    let bytes = value.to_be_bytes();
    let count = bytes.len().min(length - 1);
    header[at + length - count..at + length].copy_from_slice(&bytes[bytes.len() - count..]);
}

pub(crate) fn checksum(header: &mut [u8; 512]) {
    header[148..156].fill(b' ');
    let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
    header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(512), 0);
}

/// An archive.
pub(crate) fn tar(members: &[Member]) -> Vec<u8> {
    let mut bytes: Vec<u8> = members.iter().flat_map(Member::bytes).collect();
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// One frame of zstd.
pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

//! The files of `/proc` that the agent serves, and the part of FUSE that this needs.
//!
//! `/proc/meminfo` and similar files must show the current values of the sandbox. So they are on a small FUSE file
//! system per sandbox, which the host mounts and the agent serves: a read is a request to the agent, and without
//! readers there is nothing to do. The host looks up the files before the agent runs, so it answers the first requests
//! ([`answer`]); the agent answers opens and reads.
//!
//! The layouts are those of protocol 7.31 (`linux/fuse.h`), which every kernel since 5.4 supports.

/// File descriptor in the agent on which it receives the kernel's requests.
pub const FIGURES_FD: i32 = 5;
/// The files, by their names in `/proc`.
pub const FILES: [&str; 5] = ["meminfo", "stat", "uptime", "loadavg", "vmstat"];
/// Minimum buffer size for a read of the descriptor, in bytes.
pub const REQUEST_MAX: usize = 8192;

/// Node id of the root directory.
const ROOT: u64 = 1;
/// Node id of the first of [`FILES`].
const FIRST: u64 = 2;
/// How long the kernel may cache names and attributes, in seconds: neither ever changes.
const VALID: u64 = u32::MAX as u64;
/// Length of the header of a request, and of a response.
const HEADER: usize = 40;
const RESPONSE_HEADER: usize = 16;
/// Maximum number of background requests in progress. Closing a file is one; with a lower limit, closes would pile up
/// in the kernel behind the opens of a program that opens and closes files in a tight loop.
const BACKGROUND_MAX: u16 = u16::MAX;
/// The kernel requires at least a page, although nothing is ever written.
const WRITE_MAX: u32 = 4096;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const STATFS: u32 = 17;
const RELEASE: u32 = 18;
const INIT: u32 = 26;
const BATCH_FORGET: u32 = 42;

const ENOENT: i32 = 2;
const ENOSYS: i32 = 38;

/// A request from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    operation: u32,
    unique: u64,
    node: u64,
    body: &'a [u8],
}

/// The operation of a request, as far as the agent distinguishes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// A file is opened.
    Open,
    /// Bytes of an open file are read.
    Read {
        /// Index in [`FILES`] of the file that is read.
        file: usize,
        /// The handle that the open returned.
        handle: u64,
        /// Offset of the first byte.
        offset: u64,
        /// Maximum number of bytes to return.
        size: usize,
    },
    /// An open file was closed.
    Release {
        /// The handle that the open returned.
        handle: u64,
    },
    /// Any operation that [`answer`] handles.
    Other,
}

impl<'a> Request<'a> {
    /// Parses one request.
    #[must_use]
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        Some(Self {
            operation: number32(bytes, 4)?,
            unique: number64(bytes, 8)?,
            node: number64(bytes, 16)?,
            body: bytes.get(HEADER..)?,
        })
    }

    /// The operation of the request.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.known().unwrap_or(Operation::Other)
    }

    fn known(&self) -> Option<Operation> {
        let file = || {
            let index = usize::try_from(self.node.checked_sub(FIRST)?).ok()?;
            (index < FILES.len()).then_some(index)
        };
        match self.operation {
            OPEN => file().map(|_| Operation::Open),
            READ => Some(Operation::Read {
                file: file()?,
                handle: number64(self.body, 0)?,
                offset: number64(self.body, 8)?,
                size: number32(self.body, 16)? as usize,
            }),
            RELEASE => Some(Operation::Release {
                handle: number64(self.body, 0)?,
            }),
            _ => None,
        }
    }

    /// The response to an open: `handle` is part of every later read. Reads always reach the agent because nothing is
    /// kept in the page cache, and closing needs no response.
    #[must_use]
    pub fn opened(&self, handle: u64) -> Vec<u8> {
        const DIRECT_IO: u32 = 1 << 0;
        const NO_FLUSH: u32 = 1 << 5;
        let mut body = handle.to_le_bytes().to_vec();
        body.extend((DIRECT_IO | NO_FLUSH).to_le_bytes());
        body.extend([0; 4]);
        self.reply(0, &body)
    }

    /// A successful response with these bytes.
    #[must_use]
    pub fn data(&self, bytes: &[u8]) -> Vec<u8> {
        self.reply(0, bytes)
    }

    fn reply(&self, error: i32, body: &[u8]) -> Vec<u8> {
        let length = RESPONSE_HEADER + body.len();
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend((-error).to_le_bytes());
        bytes.extend(self.unique.to_le_bytes());
        bytes.extend(body);
        bytes
    }
}

/// The response to anything but [`Operation::Open`] and [`Operation::Read`]; `None` where the kernel expects none.
/// `now`, in Unix seconds, becomes the modification time of the files.
#[must_use]
pub fn answer(request: &Request<'_>, now: u64) -> Option<Vec<u8>> {
    let body = match request.operation {
        FORGET | BATCH_FORGET => return None,
        RELEASE => Vec::new(),
        INIT => init(),
        STATFS => size(),
        GETATTR => {
            let mut body = VALID.to_le_bytes().to_vec();
            body.extend([0; 8]);
            body.extend(attributes(request.node, now));
            body
        }
        LOOKUP => {
            let name = request.body.split(|byte| *byte == 0).next().unwrap_or_default();
            let Some(node) = (FIRST..).zip(FILES).find(|(_, file)| file.as_bytes() == name) else {
                return Some(request.reply(ENOENT, &[]));
            };
            let mut body = node.0.to_le_bytes().to_vec();
            body.extend([0; 8]);
            body.extend(VALID.to_le_bytes());
            body.extend(VALID.to_le_bytes());
            body.extend([0; 8]);
            body.extend(attributes(node.0, now));
            body
        }
        // The kernel then handles the operation itself, or does not send it again.
        _ => return Some(request.reply(ENOSYS, &[])),
    };
    Some(request.reply(0, &body))
}

fn init() -> Vec<u8> {
    let mut body = Vec::with_capacity(64);
    for number in [7u32, 31, 0, 0] {
        body.extend(number.to_le_bytes());
    }
    body.extend(BACKGROUND_MAX.to_le_bytes());
    body.extend(BACKGROUND_MAX.to_le_bytes());
    body.extend(WRITE_MAX.to_le_bytes());
    body.extend(1u32.to_le_bytes());
    body.resize(64, 0);
    body
}

/// Statistics of a file system without space, like `/proc`: `df` skips it.
fn size() -> Vec<u8> {
    const BLOCK: u32 = 4096;
    const NAME_MAX: u32 = 255;
    let mut body = vec![0; 40];
    for number in [BLOCK, NAME_MAX, BLOCK] {
        body.extend(number.to_le_bytes());
    }
    body.resize(80, 0);
    body
}

/// Attributes as in `/proc`: world-readable files without a size.
fn attributes(node: u64, now: u64) -> Vec<u8> {
    const DIRECTORY: u32 = 0o040_555;
    const FILE: u32 = 0o100_444;
    let (mode, links) = if node == ROOT { (DIRECTORY, 2u32) } else { (FILE, 1) };
    let mut body = Vec::with_capacity(88);
    for number in [node, 0, 0, now, now, now] {
        body.extend(number.to_le_bytes());
    }
    body.extend([0; 12]);
    body.extend(mode.to_le_bytes());
    body.extend(links.to_le_bytes());
    body.resize(88, 0);
    // Block size, the last but one field.
    body[80..84].copy_from_slice(&1024u32.to_le_bytes());
    body
}

fn number32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

fn number64(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(operation: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[4..8].copy_from_slice(&operation.to_le_bytes());
        bytes[8..16].copy_from_slice(&7u64.to_le_bytes());
        bytes[16..24].copy_from_slice(&node.to_le_bytes());
        bytes.extend(body);
        bytes
    }

    fn length_and_error(answer: &[u8]) -> (usize, i32) {
        let error = number32(answer, 4).unwrap().cast_signed();
        assert_eq!(number32(answer, 0).unwrap() as usize, answer.len());
        assert_eq!(number64(answer, 8), Some(7));
        (answer.len() - RESPONSE_HEADER, error)
    }

    #[test]
    fn responses_have_the_sizes_of_the_kernel_structures() {
        let answered = |bytes: &[u8]| answer(&Request::parse(bytes).unwrap(), 5);
        let answered = |operation, node, body: &[u8]| answered(&request(operation, node, body));
        for (operation, node, body, want) in [
            (INIT, 0, [0; 16].as_slice(), (64, 0)),
            (GETATTR, ROOT, &[0; 16], (104, 0)),
            (LOOKUP, ROOT, b"stat\0", (128, 0)),
            (LOOKUP, ROOT, b"stats\0", (0, -ENOENT)),
            (RELEASE, FIRST, &[0; 24], (0, 0)),
            (STATFS, FIRST, &[], (80, 0)),
            (9999, FIRST, &[], (0, -ENOSYS)),
        ] {
            assert_eq!(
                length_and_error(&answered(operation, node, body).unwrap()),
                want,
                "{operation}"
            );
        }
        for silent in [FORGET, BATCH_FORGET] {
            assert_eq!(answered(silent, FIRST, &[0; 8]), None);
        }
        assert_eq!(attributes(FIRST, 0).len(), 88);
    }

    #[test]
    fn requests_are_parsed() {
        let mut body = 9u64.to_le_bytes().to_vec();
        body.extend(100u64.to_le_bytes());
        body.extend(4096u32.to_le_bytes());
        let of = |operation, node, body: &[u8]| Request::parse(&request(operation, node, body)).unwrap().operation();
        assert_eq!(of(OPEN, FIRST + 3, &[0; 8]), Operation::Open);
        let read = Operation::Read {
            file: 1,
            handle: 9,
            offset: 100,
            size: 4096,
        };
        assert_eq!(of(READ, FIRST + 1, &body), read);
        assert_eq!(of(RELEASE, FIRST, &body), Operation::Release { handle: 9 });
        for (operation, node, body) in [
            (OPEN, ROOT, body.as_slice()),
            (OPEN, FIRST + 5, &body),
            (READ, 0, &body),
            (READ, FIRST, &body[..19]),
            (GETATTR, FIRST, &body),
        ] {
            assert_eq!(of(operation, node, body), Operation::Other);
        }
        assert_eq!(Request::parse(&[0; HEADER - 1]), None);
        let opened = Request::parse(&request(OPEN, FIRST, &[])).unwrap().opened(3);
        assert_eq!(length_and_error(&opened), (16, 0));
    }
}

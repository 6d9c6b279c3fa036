//! The server name in a TLS ClientHello (RFC 8446 section 4.1.2, RFC 6066 section 3).

use super::name::{End, name};

/// Type of the records that carry a handshake; the first byte of every connection with TLS.
pub(super) const HANDSHAKE: u8 = 22;

/// Type, version, length.
pub(super) const RECORD_HEADER: usize = 5;

/// Type, length.
pub(super) const HANDSHAKE_HEADER: usize = 4;

/// Longest ClientHello, without its header: more than twice the largest that is known, whose key shares are post-quantum.
pub(super) const MAX_HELLO: usize = 16 << 10;

/// Most TLS records of one ClientHello. Clients use one or two; fragments of fewer than 256 bytes on average only serve to
/// hide the name.
pub(super) const MAX_RECORDS: usize = 64;

/// Longest content of a record that is not encrypted.
const MAX_RECORD: usize = 1 << 14;

const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: usize = 0;
const HOST_NAME: usize = 0;

/// The server name of the ClientHello at the start of `bytes`.
pub(super) fn server_name(bytes: &[u8]) -> Result<String, End> {
    let hello = handshake(bytes)?;
    parse(&hello)
}

/// The body of the first handshake message, put together from its records.
fn handshake(bytes: &[u8]) -> Result<Vec<u8>, End> {
    let mut message = Vec::new();
    let mut rest = bytes;
    for _ in 0..MAX_RECORDS {
        if rest.first().is_some_and(|kind| *kind != HANDSHAKE) || rest.get(1).is_some_and(|major| *major != 3) {
            return Err(End::NoName);
        }
        let (header, after) = rest.split_at_checked(RECORD_HEADER).ok_or(End::Incomplete)?;
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if length == 0 || length > MAX_RECORD {
            return Err(End::NoName);
        }
        let available = length.min(after.len());
        message.extend_from_slice(&after[..available]);
        let wanted = message_length(&message)?;
        // A ClientHello ends with its record.
        if wanted.is_some_and(|wanted| message.len() - available + length > wanted) {
            return Err(End::NoName);
        }
        if available < length {
            return Err(End::Incomplete);
        }
        if wanted == Some(message.len()) {
            return Ok(message.split_off(HANDSHAKE_HEADER));
        }
        rest = &after[length..];
    }
    Err(End::NoName)
}

/// The length of a message with its header, as soon as its header is complete.
fn message_length(message: &[u8]) -> Result<Option<usize>, End> {
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Err(End::NoName);
    }
    let Some((header, _)) = message.split_first_chunk::<HANDSHAKE_HEADER>() else {
        return Ok(None);
    };
    let length = usize::from(header[1]) << 16 | usize::from(header[2]) << 8 | usize::from(header[3]);
    match length {
        0..=MAX_HELLO => Ok(Some(HANDSHAKE_HEADER + length)),
        _ => Err(End::NoName),
    }
}

fn parse(hello: &[u8]) -> Result<String, End> {
    let mut hello = Reader(hello);
    hello.take(2 + 32)?; // version, random
    hello.vector(1)?; // session id
    hello.vector(2)?; // cipher suites
    hello.vector(1)?; // compression methods
    let mut extensions = Reader(hello.vector(2)?);
    hello.end()?;
    let mut found = None;
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)?;
        let content = extensions.vector(2)?;
        if kind == SERVER_NAME && found.replace(content).is_some() {
            return Err(End::NoName);
        }
    }
    let mut extension = Reader(found.ok_or(End::NoName)?);
    let mut names = Reader(extension.vector(2)?);
    extension.end()?;
    // Only host names are defined, and at most one of them is allowed.
    if names.number(1)? != HOST_NAME {
        return Err(End::NoName);
    }
    let host = names.vector(2)?;
    names.end()?;
    name(host)
}

/// Reads a complete message: what is missing is malformed.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], End> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(End::NoName)?;
        self.0 = rest;
        Ok(taken)
    }

    /// A big-endian number of `size` bytes, 1 or 2.
    fn number(&mut self, size: usize) -> Result<usize, End> {
        let bytes = self.take(size)?;
        Ok(bytes.iter().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    /// Bytes after their length, which has `size` bytes.
    fn vector(&mut self, size: usize) -> Result<&'a [u8], End> {
        let length = self.number(size)?;
        self.take(length)
    }

    fn end(&self) -> Result<(), End> {
        if self.0.is_empty() { Ok(()) } else { Err(End::NoName) }
    }
}

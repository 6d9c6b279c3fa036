//! A reader of `multipart/form-data` that keeps no more than a part's head or a piece of its content.
//!
//! Bytes are pushed in as they come and events are taken out, so the caller decides about pace and memory. A
//! delimiter may be cut anywhere between two pushes.

use bytes::{Buf, Bytes, BytesMut};
use formats::percent::{self, Plus};
use memchr::memmem;

/// The longest head of a part. It carries a file name, which the system limits at 4 KiB.
const HEAD_LIMIT: usize = 16 * 1024;
/// The longest boundary that the standard allows is 70 bytes.
const BOUNDARY_LIMIT: usize = 70;

/// What comes next in the body.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FormEvent {
    /// A part begins.
    Part(Head),
    /// Some of its content.
    Data(Bytes),
    /// The part is complete.
    PartEnd,
    /// The form is complete.
    End,
}

/// What a part says about itself.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) name: String,
    pub(super) file_name: Option<String>,
}

/// Why the body is not such a form.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("no multipart boundary param in Content-Type")]
    NoBoundary,
    #[error("multipart: expected CRLF after the delimiter")]
    Delimiter,
    #[error("multipart: part header is too long")]
    LongHead,
    #[error("multipart: part header is malformed")]
    Head,
    #[error("multipart: unexpected end of the form")]
    Truncated,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Preamble,
    AfterDelimiter,
    Head,
    Content,
    Done,
}

/// Reads one form.
#[derive(Debug)]
pub(super) struct Reader {
    buffer: BytesMut,
    /// Line end, two dashes, boundary.
    delimiter: memmem::Finder<'static>,
    state: State,
}

impl Reader {
    /// Creates a reader for a body with this content type.
    pub(super) fn new(content_type: &str) -> Result<Self, Malformed> {
        let boundary = parameter(content_type, "boundary").filter(|boundary| !boundary.is_empty());
        let boundary = boundary
            .filter(|boundary| boundary.len() <= BOUNDARY_LIMIT)
            .ok_or(Malformed::NoBoundary)?;
        let delimiter = [b"\r\n--", boundary.as_bytes()].concat();
        Ok(Self {
            // The first delimiter needs no line end before it; with this it has one.
            buffer: BytesMut::from(b"\r\n".as_slice()),
            delimiter: memmem::Finder::new(&delimiter).into_owned(),
            state: State::Preamble,
        })
    }

    /// Takes in more of the body.
    pub(super) fn push(&mut self, bytes: Bytes) {
        if self.buffer.is_empty() {
            // Content usually is the whole frame, which is then not copied.
            self.buffer = BytesMut::from(bytes);
        } else {
            self.buffer.extend_from_slice(&bytes);
        }
    }

    /// The next event; `None` when more of the body is needed.
    ///
    /// # Errors
    /// [`Malformed`], after which the reader is of no use.
    pub(super) fn next(&mut self) -> Result<Option<FormEvent>, Malformed> {
        loop {
            match self.state {
                State::Preamble => match self.content() {
                    Content::Delimiter => self.state = State::AfterDelimiter,
                    Content::Data(_) => {}
                    Content::NeedMore => return Ok(None),
                },
                State::AfterDelimiter => {
                    if self.buffer.starts_with(b"--") {
                        self.state = State::Done;
                        continue;
                    }
                    // Blanks may follow a boundary.
                    let blanks = self
                        .buffer
                        .iter()
                        .take_while(|byte| matches!(byte, b' ' | b'\t'))
                        .count();
                    match self.buffer.get(blanks..blanks + 2) {
                        Some(b"\r\n") => {
                            // The line end stays: a head ends at an empty line, also one that has no lines.
                            self.buffer.advance(blanks);
                            self.state = State::Head;
                        }
                        Some(_) => return Err(Malformed::Delimiter),
                        None if blanks > HEAD_LIMIT => return Err(Malformed::Delimiter),
                        None => return Ok(None),
                    }
                }
                State::Head => {
                    let window = &self.buffer[..self.buffer.len().min(HEAD_LIMIT)];
                    let Some(end) = memmem::find(window, b"\r\n\r\n") else {
                        return if window.len() == HEAD_LIMIT {
                            Err(Malformed::LongHead)
                        } else {
                            Ok(None)
                        };
                    };
                    let head = Head::parse(&self.buffer[..end])?;
                    self.buffer.advance(end + 4);
                    self.state = State::Content;
                    return Ok(Some(FormEvent::Part(head)));
                }
                State::Content => {
                    return Ok(match self.content() {
                        Content::Delimiter => {
                            self.state = State::AfterDelimiter;
                            Some(FormEvent::PartEnd)
                        }
                        Content::Data(data) => Some(FormEvent::Data(data)),
                        Content::NeedMore => None,
                    });
                }
                // What follows the last delimiter means nothing.
                State::Done => {
                    self.buffer.clear();
                    return Ok(Some(FormEvent::End));
                }
            }
        }
    }

    /// The bytes before the next delimiter, or the delimiter itself when it comes first.
    fn content(&mut self) -> Content {
        let needle = self.delimiter.needle();
        let length = match self.delimiter.find(&self.buffer) {
            Some(0) => {
                self.buffer.advance(needle.len());
                return Content::Delimiter;
            }
            Some(at) => at,
            None => {
                // A tail that may be the beginning of a delimiter has to wait for what follows.
                let tail = (1..needle.len())
                    .rev()
                    .find(|length| self.buffer.ends_with(&needle[..*length]));
                self.buffer.len() - tail.unwrap_or(0)
            }
        };
        if length == 0 {
            Content::NeedMore
        } else {
            Content::Data(self.buffer.split_to(length).freeze())
        }
    }
}

enum Content {
    Delimiter,
    Data(Bytes),
    NeedMore,
}

impl Head {
    fn parse(lines: &[u8]) -> Result<Self, Malformed> {
        let text = std::str::from_utf8(lines).map_err(|_| Malformed::Head)?;
        let mut head = Self::default();
        for line in text.split("\r\n").filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':').ok_or(Malformed::Head)?;
            if name.trim().eq_ignore_ascii_case("content-disposition") {
                head.name = parameter(value, "name").unwrap_or_default();
                head.file_name = parameter(value, "filename*").and_then(|value| extended(&value));
                head.file_name = head.file_name.or_else(|| parameter(value, "filename"));
            }
        }
        Ok(head)
    }
}

/// A parameter of a header value such as `form-data; name="file"`.
fn parameter(value: &str, wanted: &str) -> Option<String> {
    let mut rest = value.split_once(';')?.1;
    loop {
        let (name, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let (text, following) = match after.strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let end = after.find(';').unwrap_or(after.len());
                (after[..end].trim_end().to_owned(), &after[end..])
            }
        };
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(text);
        }
        rest = following.split_once(';')?.1;
    }
}

/// The text up to the closing quote, and what follows it. A backslash only escapes a quote or a backslash, because
/// some clients send the paths of their own system as they are.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut characters = quoted.char_indices().peekable();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((text, &quoted[at + 1..])),
            '\\' => match characters.next_if(|(_, next)| matches!(next, '"' | '\\')) {
                Some((_, escaped)) => text.push(escaped),
                None => text.push('\\'),
            },
            other => text.push(other),
        }
    }
    None
}

/// The text of an extended parameter: `utf-8''` and percent-encoded bytes.
fn extended(value: &str) -> Option<String> {
    let (charset, rest) = value.split_once('\'')?;
    let (_, encoded) = rest.split_once('\'')?;
    if !charset.eq_ignore_ascii_case("utf-8") {
        return None;
    }
    // Here a plus is a plus, unlike in a query.
    percent::decode(encoded, Plus::Plus).ok()
}

#[cfg(test)]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=\"xYz\"";

    /// The parts of a body that comes in pieces of this size.
    fn read(body: &[u8], piece: usize) -> Result<Vec<(Head, Vec<u8>)>, Malformed> {
        let mut reader = Reader::new(TYPE)?;
        let mut pieces = body.chunks(piece);
        let mut parts: Vec<(Head, Vec<u8>)> = Vec::new();
        loop {
            match reader.next()? {
                Some(FormEvent::Part(head)) => parts.push((head, Vec::new())),
                Some(FormEvent::Data(data)) => parts.last_mut().unwrap().1.extend_from_slice(&data),
                Some(FormEvent::PartEnd) => {}
                Some(FormEvent::End) => return Ok(parts),
                None => reader.push(Bytes::copy_from_slice(pieces.next().ok_or(Malformed::Truncated)?)),
            }
        }
    }

    fn head(name: &str, file_name: Option<&str>) -> Head {
        Head {
            name: name.to_owned(),
            file_name: file_name.map(str::to_owned),
        }
    }

    #[test]
    fn parts_however_the_body_is_cut() {
        let body = b"preamble\r\n--xYz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/a/b;c.txt\"\r\n\
            Content-Type: text/plain\r\n\r\nhello\r\n--xY not yet\r\n\r\n--xYz \t\r\ncontent-disposition:form-data;name=file\r\n\r\n\r\n\
            --xYz\r\n\r\nno head\r\n--xYz--\r\nepilogue --xYz";
        for piece in 1..body.len() {
            let parts = read(body, piece).unwrap();
            assert_eq!(parts.len(), 3, "{piece}");
            assert_eq!(
                parts[0],
                (head("file", Some("/a/b;c.txt")), b"hello\r\n--xY not yet\r\n".to_vec())
            );
            assert_eq!(parts[1], (head("file", None), Vec::new()));
            assert_eq!(parts[2], (head("", None), b"no head".to_vec()));
        }
    }

    #[test]
    fn what_is_no_form() {
        assert_eq!(read(b"--xYz--", 3).unwrap(), []);
        assert_eq!(read(b"", 1), Err(Malformed::Truncated));
        assert_eq!(read(b"--xYz\r\nname: x\r\n\r\nhalf", 5), Err(Malformed::Truncated));
        assert_eq!(read(b"--xYzz\r\n\r\n\r\n--xYz--", 5), Err(Malformed::Delimiter));
        assert_eq!(read(b"--xYz\r\nnonsense\r\n\r\n\r\n--xYz--", 5), Err(Malformed::Head));
        assert_eq!(read(b"--xYz\r\nx: \xff\r\n\r\n\r\n--xYz--", 5), Err(Malformed::Head));
        let long = [
            b"--xYz\r\nx: ".as_slice(),
            &vec![b'y'; HEAD_LIMIT],
            b"\r\n\r\n\r\n--xYz--",
        ]
        .concat();
        assert_eq!(read(&long, 1000), Err(Malformed::LongHead));
        let blanks = [b"--xYz".as_slice(), &vec![b' '; 2 * HEAD_LIMIT]].concat();
        assert_eq!(read(&blanks, 1000), Err(Malformed::Delimiter));
        for no in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; charset=x",
        ] {
            assert_eq!(Reader::new(no).err(), Some(Malformed::NoBoundary), "{no}");
        }
        let boundary = "b".repeat(71);
        assert!(Reader::new(&format!("multipart/form-data; boundary={boundary}")).is_err());
    }

    #[test]
    fn parameters() {
        let check = |value: &str, name: &str, expect: Option<&str>| {
            assert_eq!(parameter(value, name).as_deref(), expect, "{value}");
        };
        check(
            "form-data; name=\"a\\\"b\"; filename=\"C:\\x\\\\y\"",
            "name",
            Some("a\"b"),
        );
        check(
            "form-data; name=\"a\"; filename=\"C:\\x\\\\y\"",
            "filename",
            Some("C:\\x\\y"),
        );
        check("form-data; Name = plain ; x=y", "name", Some("plain"));
        check("form-data; name=\"open", "name", None);
        check("form-data", "name", None);
        check("form-data; filename*=UTF-8''a", "filename", None);
        let head =
            Head::parse(b"Content-Disposition: form-data; name=f; filename=x; filename*=UTF-8''%C3%BC+1").unwrap();
        assert_eq!(head.file_name.as_deref(), Some("ü+1"));
    }
}

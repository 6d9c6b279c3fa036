//! The host of an HTTP/1 request (RFC 9112, RFC 9110 section 7.2).
//!
//! Stricter than servers must be: a line ends with CRLF, no empty line comes first, no header is folded, and `Host` occurs
//! once. HTTP/2 without TLS begins with a request line of another version and has no name here.

use super::name::{End, name};

/// Longest method: those that are registered have at most 17 characters. Ends the wait for a request line of other
/// protocols early.
const MAX_METHOD: usize = 32;

/// The host of the request at the start of `bytes`, once its headers are complete.
pub(super) fn host(bytes: &[u8]) -> Result<String, End> {
    let method_end = bytes.iter().position(|byte| !is_token(*byte));
    match method_end {
        None if bytes.len() <= MAX_METHOD => return Err(End::Incomplete),
        Some(end @ 1..=MAX_METHOD) if bytes[end] == b' ' => {}
        _ => return Err(End::NoName),
    }
    let mut lines = Lines(bytes);
    let authority = request_line(lines.next()?)?;
    let mut host = None;
    loop {
        let line = lines.next()?;
        if line.is_empty() {
            break;
        }
        let (field, value) = field(line)?;
        if field.eq_ignore_ascii_case(b"host") && host.replace(value).is_some() {
            return Err(End::NoName);
        }
    }
    let host = host_of(host.ok_or(End::NoName)?)?;
    match authority {
        Some(authority) if host_of(authority)? != host => Err(End::NoName),
        _ => Ok(host),
    }
}

/// The authority of the target, if the target is a URI.
fn request_line(line: &[u8]) -> Result<Option<&[u8]>, End> {
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(End::NoName);
    };
    let is_version = version.len() == 8 && version.starts_with(b"HTTP/1.") && version[7].is_ascii_digit();
    if !is_version || method == b"CONNECT" {
        return Err(End::NoName);
    }
    if target.iter().any(|byte| byte.is_ascii_control()) {
        return Err(End::NoName);
    }
    if target.starts_with(b"/") || (target == b"*" && method == b"OPTIONS") {
        return Ok(None);
    }
    let rest = ["http://", "https://"].iter().find_map(|scheme| {
        let (start, rest) = target.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme.as_bytes()).then_some(rest)
    });
    let authority = rest.and_then(|rest| rest.split(|byte| matches!(byte, b'/' | b'?' | b'#')).next());
    authority.map(Some).ok_or(End::NoName)
}

/// Name and value of a header. The value without surrounding white space.
fn field(line: &[u8]) -> Result<(&[u8], &[u8]), End> {
    let colon = line.iter().position(|byte| *byte == b':').ok_or(End::NoName)?;
    let (name, value) = (&line[..colon], &line[colon + 1..]);
    // Also refuses folded lines and white space before the colon.
    if name.is_empty() || !name.iter().all(|byte| is_token(*byte)) {
        return Err(End::NoName);
    }
    if value.iter().any(|byte| byte.is_ascii_control() && *byte != b'\t') {
        return Err(End::NoName);
    }
    Ok((name, value.trim_ascii()))
}

/// The name in `host` or `host:port`.
fn host_of(authority: &[u8]) -> Result<String, End> {
    let (host, port) = match authority.iter().position(|byte| *byte == b':') {
        Some(colon) => (&authority[..colon], &authority[colon + 1..]),
        None => (authority, &[][..]),
    };
    if port.len() > 5 || !port.iter().all(u8::is_ascii_digit) {
        return Err(End::NoName);
    }
    name(host)
}

/// Lines without their ends.
struct Lines<'a>(&'a [u8]);

impl<'a> Lines<'a> {
    fn next(&mut self) -> Result<&'a [u8], End> {
        let end = self.0.iter().position(|byte| matches!(byte, b'\r' | b'\n' | 0));
        let end = end.ok_or(End::Incomplete)?;
        match &self.0[end..] {
            [b'\r', b'\n', rest @ ..] => {
                let line = &self.0[..end];
                self.0 = rest;
                Ok(line)
            }
            [b'\r'] => Err(End::Incomplete),
            _ => Err(End::NoName),
        }
    }
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

//! What clients attach to a file: headers at upload, extended attributes on disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;

use http::HeaderMap;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::attributes::{PREFIX, Subject};

/// Prefix of the headers.
const HEADER: &str = "x-metadata-";
/// The longest key: attribute names end at 255 bytes, the prefix included.
const KEY_LIMIT: usize = 246;
/// What prefix, keys and values may come to: an ext4 inode keeps attributes in one block.
const TOTAL_LIMIT: usize = 4096;

/// The metadata in a request's headers; the first value of a repeated one counts.
///
/// # Errors
/// Why it cannot be stored.
pub(super) fn of_headers(headers: &HeaderMap) -> Result<BTreeMap<String, String>, String> {
    let mut metadata = BTreeMap::new();
    let mut total = 0;
    for name in headers.keys() {
        let Some(key) = name.as_str().strip_prefix(HEADER) else {
            continue;
        };
        let Some(value) = headers.get(name) else { continue };
        if key.is_empty() || key.len() > KEY_LIMIT {
            return Err(format!("key must have 1 to {KEY_LIMIT} bytes"));
        }
        let value = value
            .to_str()
            .ok()
            .filter(|value| value.bytes().all(|byte| matches!(byte, 0x20..=0x7e)));
        let value = value.ok_or_else(|| format!("value of '{key}' must be printable ASCII"))?;
        total += PREFIX.len() + key.len() + value.len();
        if total > TOTAL_LIMIT {
            return Err(format!("metadata must not be larger than {TOTAL_LIMIT} bytes"));
        }
        metadata.insert(key.to_owned(), value.to_owned());
    }
    Ok(metadata)
}

/// Makes this the file's whole metadata. Where the filesystem has no attributes, nothing happens.
///
/// # Errors
/// ENOSPC and EDQUOT.
pub(super) fn replace(file: &File, metadata: &BTreeMap<String, String>) -> io::Result<()> {
    let full = |error: Errno| matches!(error, Errno::NOSPC | Errno::DQUOT);
    for key in Subject::Open(file).keys() {
        if !metadata.contains_key(&key) {
            let _ = rustix::fs::fremovexattr(file, format!("{PREFIX}{key}"));
        }
    }
    for (key, value) in metadata {
        match rustix::fs::fsetxattr(file, format!("{PREFIX}{key}"), value.as_bytes(), XattrFlags::empty()) {
            Err(error) if full(error) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    #[test]
    fn limits() {
        let headers = |pairs: &[(&str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.append(
                    name.parse::<HeaderName>().unwrap(),
                    HeaderValue::from_str(value).unwrap(),
                );
            }
            of_headers(&headers)
        };
        assert_eq!(
            headers(&[
                ("X-Metadata-Author", "me"),
                ("X-Metadata-author", "you"),
                ("X-Other", "x")
            ]),
            Ok(BTreeMap::from([("author".to_owned(), "me".to_owned())]))
        );
        let long_key = format!("x-metadata-{}", "k".repeat(247));
        assert!(headers(&[(&long_key, "v")]).is_err());
        let long_value = "v".repeat(4096 - 9);
        assert!(headers(&[("x-metadata-k", &long_value)]).is_err());
        assert!(headers(&[("x-metadata-k", &long_value[1..])]).is_ok());
        assert!(headers(&[("x-metadata-", "v")]).is_err());
        assert!(headers(&[("x-metadata-k", "a\tb")]).is_err());
    }
}

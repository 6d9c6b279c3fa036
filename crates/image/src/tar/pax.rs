//! Extended headers of POSIX: records `LENGTH KEY=VALUE\n`.

use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};

use crate::message::show;

/// Prefix of the keys of extended attributes, as Docker and GNU tar write them.
const XATTR: &[u8] = b"SCHILY.xattr.";

/// What a header says about the next entry.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Pax {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u64>,
    pub(super) gid: Option<u64>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) sparse: bool,
}

impl Pax {
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn parse(mut records: &[u8]) -> Result<Self> {
        let mut pax = Self::default();
        while !records.is_empty() {
            let (key, value, rest) = record(records).context("invalid pax header")?;
            pax.set(key, value)
                .with_context(|| format!("pax header {}", show(key)))?;
            records = rest;
        }
        Ok(pax)
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        // An empty value stands for that of the entry itself.
        let text = (!value.is_empty()).then(|| value.to_vec());
        match key {
            b"path" => self.path = text,
            b"linkpath" => self.link = text,
            b"size" => self.size = decimal(value)?,
            b"uid" => self.uid = decimal(value)?,
            b"gid" => self.gid = decimal(value)?,
            b"mtime" => self.mtime = if value.is_empty() { None } else { Some(time(value)?) },
            _ if key.starts_with(b"GNU.sparse.") => self.sparse = true,
            _ if key.starts_with(XATTR) => {
                let name = &key[XATTR.len()..];
                ensure!(
                    !name.is_empty() && !name.contains(&0),
                    "invalid name of an extended attribute"
                );
                self.xattrs.retain(|(other, _)| other != name);
                self.xattrs.push((name.to_vec(), value.to_vec()));
            }
            // Names of owners, times of access, comments, character sets.
            _ => {}
        }
        Ok(())
    }
}

/// Splits the first record off: its key and value, and the others.
fn record(records: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let blank = records.iter().take(20).position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&records[..blank]).ok()?.parse().ok()?;
    if length <= blank + 1 || length > records.len() {
        return None;
    }
    let (record, rest) = records.split_at(length);
    let pair = record[blank + 1..].strip_suffix(b"\n")?;
    let equals = pair.iter().position(|byte| *byte == b'=')?;
    (equals > 0).then(|| (&pair[..equals], &pair[equals + 1..], rest))
}

fn decimal(value: &[u8]) -> Result<Option<u64>> {
    if value.is_empty() {
        return Ok(None);
    }
    Ok(Some(parse(value)?))
}

/// Seconds with an optional fraction, which the sign includes.
fn time(value: &[u8]) -> Result<(i64, u32)> {
    let (whole, fraction) = match value.iter().position(|byte| *byte == b'.') {
        Some(point) => (&value[..point], &value[point + 1..]),
        None => (value, &b""[..]),
    };
    let seconds: i64 = parse(whole)?;
    let mut nanoseconds = 0;
    for index in 0..9 {
        let digit = fraction.get(index).copied().unwrap_or(b'0');
        if !digit.is_ascii_digit() {
            bail!("not a number");
        }
        nanoseconds = nanoseconds * 10 + u32::from(digit - b'0');
    }
    if whole.starts_with(b"-") && nanoseconds > 0 {
        return Ok((seconds.saturating_sub(1), 1_000_000_000 - nanoseconds));
    }
    Ok((seconds, nanoseconds))
}

fn parse<N: FromStr>(value: &[u8]) -> Result<N> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
        .context("not a number")
}

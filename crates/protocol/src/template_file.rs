//! A finished template as one file: a tar archive of `manifest.json`, and then of each layer as `layers/<id>.tar.zst`, in
//! the order of the manifest.
//!
//! Only what is needed for that is written and read: plain files with short names. What is read is untrusted.

use std::ops::Range;

use formats::tar::{self, BLOCK, field};
use model::id::LayerId;
use serde::{Deserialize, Serialize};

/// Version of the format.
pub const FORMAT: u32 = 1;
/// Name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// Maximum size of a manifest, in bytes.
pub const MANIFEST_MAX: u64 = 4 << 20;
/// Where a size is that octal digits cannot express.
const BINARY: Range<usize> = 128..136;

/// What a template consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest<C> {
    /// Version of the format of the file: [`FORMAT`].
    pub format: u32,
    /// The name that the template had.
    pub name: String,
    /// Cores of the template's sandboxes.
    pub cpu_count: u32,
    /// Memory of the template's sandboxes, in MiB.
    pub memory_mb: u32,
    /// Disk of the template's sandboxes, in MiB.
    pub disk_mb: u32,
    /// What sandboxes are started with, start and ready command included.
    pub config: C,
    /// The `base` that the layers lie above; none if they are the whole file system.
    pub base: Option<BaseVersion>,
    /// The layers, lowest first.
    pub layers: Vec<ManifestLayer>,
}

/// A layer of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ManifestLayer {
    /// Id of the layer: the hash of its files.
    pub id: LayerId,
    /// Space that the layer takes on a node, in bytes.
    pub bytes: u64,
}

/// What `base` is on a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseVersion {
    /// Distribution, version and architecture, such as `debian-12-x86_64`.
    pub system: String,
    /// A hash of the names and versions of the installed packages.
    pub packages: String,
}

/// Name of the file of a layer.
#[must_use]
pub fn layer_name(id: &LayerId) -> String {
    format!("layers/{id}.tar.zst")
}

/// The header of a file with a name of at most 100 bytes.
#[must_use]
pub fn header(name: &str, size: u64) -> [u8; BLOCK] {
    let header = tar::Header {
        kind: b'0',
        path: name.as_bytes(),
        mode: 0o644,
        size,
        ..tar::Header::default()
    };
    let mut block = header.block();
    if size >= tar::NUMBER_END {
        // Larger numbers are binary, as GNU tar writes them.
        block[field::SIZE].fill(0);
        block[field::SIZE.start] = 0x80;
        block[BINARY].copy_from_slice(&size.to_be_bytes());
        tar::seal(&mut block);
    }
    block
}

/// Name and size of the file after a header; none at the end of the archive.
///
/// # Errors
/// When it is not a header as [`header`] writes it.
pub fn parse_header(block: &[u8; BLOCK]) -> Result<Option<(String, u64)>, InvalidFile> {
    if block.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let is_file = block[field::KIND] == b'0'
        && block[field::MAGIC] == *tar::USTAR
        && block[field::PREFIX.start..].iter().all(|byte| *byte == 0);
    if !is_file || tar::octal(&block[field::CHECKSUM]) != Some(tar::checksum(block)) {
        return Err(InvalidFile);
    }
    let is_binary = block[field::SIZE.start..BINARY.start] == [0x80, 0, 0, 0];
    let size = if is_binary {
        block[BINARY].try_into().ok().map(u64::from_be_bytes)
    } else {
        tar::octal(&block[field::SIZE])
    };
    let name = str::from_utf8(tar::text(&block[field::PATH])).map_err(|_| InvalidFile)?;
    let size = size.filter(|size| *size < 1 << 62).ok_or(InvalidFile)?;
    Ok(Some((name.to_owned(), size)))
}

/// The file is not one of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the file is not one of a template, or damaged")]
pub struct InvalidFile;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_they_were_written() {
        for size in [0, 1, 511, 512, (1 << 33) - 1, 1 << 33, (1 << 62) - 1] {
            let name = layer_name(&LayerId::from_hash(&[7; 32]));
            let header = header(&name, size);
            assert_eq!(parse_header(&header), Ok(Some((name, size))));
        }
        assert_eq!(parse_header(&[0; BLOCK]), Ok(None));
    }

    #[test]
    fn other_headers_are_refused() {
        let good = header(MANIFEST, 100);
        for at in 0..BLOCK {
            let mut bad = good;
            bad[at] ^= 0x08;
            // The last two bytes of the checksum are not part of its number.
            if !(154..156).contains(&at) {
                assert_eq!(parse_header(&bad), Err(InvalidFile), "{at}");
            }
        }
        assert_eq!(parse_header(&header("x", 1 << 62)), Err(InvalidFile));
    }
}

//! A finished template as one file: a tar archive of `manifest.json`, and then of each layer as `layers/<id>.tar.zst`, in
//! the order of the manifest.
//!
//! Only what is needed for that is written and read: plain files with short names. What is read is untrusted.

use model::id::LayerId;
use serde::{Deserialize, Serialize};

/// Version of the format.
pub const FORMAT: u32 = 1;
/// Name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// Maximum size of a manifest, in bytes.
pub const MANIFEST_MAX: u64 = 4 << 20;
/// Size of a header, and the unit to which files are padded.
pub const BLOCK: usize = 512;

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

/// Number of zeros after a file of this size in an archive.
#[must_use]
pub fn padding(size: u64) -> usize {
    usize::try_from(size.wrapping_neg() % BLOCK as u64).unwrap_or(0)
}

/// The header of a file with a name of at most 100 bytes.
#[must_use]
pub fn header(name: &str, size: u64) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    let length = name.len().min(100);
    block[..length].copy_from_slice(&name.as_bytes()[..length]);
    block[100..108].copy_from_slice(b"0000644\0");
    block[108..116].copy_from_slice(b"0000000\0");
    block[116..124].copy_from_slice(b"0000000\0");
    if size < 1 << 33 {
        block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    } else {
        // Larger numbers are binary, as GNU tar writes them.
        block[124] = 0x80;
        block[128..136].copy_from_slice(&size.to_be_bytes());
    }
    block[136..148].copy_from_slice(b"00000000000\0");
    block[156] = b'0';
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum = checksum(&block);
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
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
    let text = |field: &[u8]| {
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
        str::from_utf8(&field[..end])
            .map(str::to_owned)
            .map_err(|_| InvalidFile)
    };
    let octal = |field: &[u8]| u64::from_str_radix(&text(field)?, 8).map_err(|_| InvalidFile);
    let is_file =
        block[156] == b'0' && &block[257..265] == b"ustar\x0000" && block[345..].iter().all(|byte| *byte == 0);
    if !is_file || octal(&block[148..156])? != checksum(block) {
        return Err(InvalidFile);
    }
    let size = match block[124..128] {
        [0x80, 0, 0, 0] => {
            let size: [u8; 8] = block[128..136].try_into().map_err(|_| InvalidFile)?;
            u64::from_be_bytes(size)
        }
        _ => octal(&block[124..136])?,
    };
    if size < 1 << 62 {
        Ok(Some((text(&block[..100])?, size)))
    } else {
        Err(InvalidFile)
    }
}

/// The file is not one of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the file is not one of a template, or damaged")]
pub struct InvalidFile;

fn checksum(block: &[u8; BLOCK]) -> u64 {
    let bytes = block.iter().enumerate();
    bytes
        .map(|(at, byte)| match at {
            148..156 => 32,
            _ => u64::from(*byte),
        })
        .sum()
}

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
        assert_eq!(padding(0) + padding(512), 0);
        assert_eq!(padding(1), 511);
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

//! Settings of the blob store.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use blobs::S3Settings;
use model::secret::Secret;

use super::egress::upstream_roots;

/// The environment variable of the secret key.
pub(crate) const KEY_ENV: &str = "RINGFENCE_BLOBS_SECRET_ACCESS_KEY";
/// Most bytes of the file of a secret key.
const KEY_MAX: usize = 4096;

/// Where the secret key comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BlobKey {
    /// A file of the operator.
    File(PathBuf),
    /// The environment.
    Environment(Secret),
}

/// The bucket that layers and uploaded files are kept in. The journal is in the data directory.
#[derive(Debug, Clone)]
pub(crate) struct BlobConfig {
    pub(super) settings: S3Settings,
    pub(super) key: BlobKey,
    pub(super) ca_file: Option<PathBuf>,
    /// How long an object that nothing refers to is kept, in seconds.
    pub(crate) grace_s: u32,
    /// Maximum size of the layers in the data directory, in MiB.
    pub(crate) cache_mb: Option<u32>,
}

impl BlobConfig {
    /// The settings, with what is in files.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub(crate) fn load(&self, journal: PathBuf) -> Result<S3Settings> {
        let secret_access_key = match &self.key {
            BlobKey::Environment(key) => key.clone(),
            BlobKey::File(path) => read_key(path).context("blobs.secret_access_key_file")?,
        };
        let authority = self.ca_file.as_ref().map(|path| {
            upstream_roots(path).context("blobs.ca_file")?;
            fs::read_to_string(path).with_context(|| format!("read {}", path.display()))
        });
        Ok(S3Settings {
            secret_access_key,
            authority: authority.transpose()?,
            journal,
            ..self.settings.clone()
        })
    }
}

fn read_key(path: &Path) -> Result<Secret> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let key = text.trim();
    if key.is_empty() || key.len() > KEY_MAX || key.contains(char::is_whitespace) {
        bail!("{} must contain the secret access key and nothing else", path.display());
    }
    Ok(Secret::new(key.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_one_word_of_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        assert!(read_key(&path).is_err());
        for (text, want) in [("k/e+y\n", Some("k/e+y")), ("", None), ("two words", None)] {
            fs::write(&path, text).unwrap();
            let read = read_key(&path).ok();
            assert_eq!(read.as_ref().map(Secret::expose), want);
        }
        fs::write(&path, "k".repeat(KEY_MAX + 1)).unwrap();
        assert!(read_key(&path).is_err());
    }
}

//! The keys of the blob store, which depend on each other.

use std::path::PathBuf;

use blobs::S3Settings;
use model::secret::Secret;

use super::blobs::{BlobConfig, BlobKey, KEY_ENV};
use super::error::{ConfigError, Source};
use super::keys;
use super::sources::Given;
use super::values::{boolean, file, integer};

/// How long an object that nothing refers to is kept by default, in seconds.
const GRACE_S: u32 = 24 * 60 * 60;
impl Given<'_> {
    /// The bucket; none if layers and files are kept in the data directory only.
    pub(super) fn blobs(&self) -> Result<Option<BlobConfig>, ConfigError> {
        let is_s3 = self.parse(keys::BLOBS_STORE, store)?.unwrap_or(false);
        let text = |key| self.parse(key, word);
        let required = |key: &'static keys::Key| {
            text(key)?.ok_or(ConfigError::Requires {
                key: "blobs.store = \"s3\"",
                other: key.name,
            })
        };
        if !is_s3 {
            return match text(keys::BLOBS_BUCKET)? {
                Some(_) => Err(ConfigError::Requires {
                    key: keys::BLOBS_BUCKET.name,
                    other: "blobs.store = \"s3\"",
                }),
                None => Ok(None),
            };
        }
        let endpoint = self.parse(keys::BLOBS_ENDPOINT, endpoint)?;
        let allow_http = self.parse(keys::BLOBS_ALLOW_HTTP, boolean)?.unwrap_or(false);
        if !allow_http
            && endpoint
                .as_ref()
                .is_some_and(|endpoint| endpoint.starts_with("http://"))
        {
            return Err(ConfigError::Requires {
                key: "blobs.endpoint with http://",
                other: "blobs.allow_http = true, which shows the content of layers to the network",
            });
        }
        let path = self.parse(keys::BLOBS_SECRET_ACCESS_KEY_FILE, file)?;
        let key = match (self.sources.env.get(KEY_ENV), path) {
            (Some(_), Some(_)) => {
                return Err(ConfigError::Excludes {
                    key: KEY_ENV,
                    other: keys::BLOBS_SECRET_ACCESS_KEY_FILE.name,
                });
            }
            (Some(key), None) if key.trim().is_empty() || key.trim().contains(char::is_whitespace) => {
                return Err(ConfigError::Value {
                    key: "secret access key".to_owned(),
                    why: "must be one word".to_owned(),
                    source_of: Source::Env(KEY_ENV.to_owned()),
                });
            }
            (Some(key), None) => BlobKey::Environment(Secret::new(key.trim().to_owned())),
            (None, Some(path)) => BlobKey::File(path),
            (None, None) => {
                return Err(ConfigError::Requires {
                    key: "blobs.store = \"s3\"",
                    other: keys::BLOBS_SECRET_ACCESS_KEY_FILE.name,
                });
            }
        };
        let path_style = self.parse(keys::BLOBS_PATH_STYLE, boolean)?;
        Ok(Some(BlobConfig {
            settings: S3Settings {
                bucket: required(keys::BLOBS_BUCKET)?,
                region: text(keys::BLOBS_REGION)?.unwrap_or_else(|| "us-east-1".to_owned()),
                prefix: self
                    .parse(keys::BLOBS_PREFIX, S3Settings::check_prefix)?
                    .unwrap_or_else(|| "ringfence".to_owned()),
                access_key_id: required(keys::BLOBS_ACCESS_KEY_ID)?,
                // These are in files: see `load`.
                secret_access_key: Secret::new(String::new()),
                authority: None,
                journal: PathBuf::new(),
                allow_http,
                path_style: path_style.unwrap_or(endpoint.is_some()),
                endpoint,
            },
            key,
            ca_file: self.parse(keys::BLOBS_CA_FILE, file)?,
            cache_mb: self.parse(keys::BLOBS_CACHE_MB, |text| integer(text, 0, u32::MAX))?,
            grace_s: self
                .parse(keys::BLOBS_GRACE_S, |text| integer(text, 0, 365 * 24 * 60 * 60))?
                .unwrap_or(GRACE_S),
        }))
    }
}

/// Whether it is a bucket.
fn store(text: &str) -> Result<bool, String> {
    match text {
        "local" => Ok(false),
        "s3" => Ok(true),
        _ => Err("must be local or s3".to_owned()),
    }
}

fn word(text: &str) -> Result<String, String> {
    let is_word =
        !text.is_empty() && text.len() <= 256 && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    if is_word {
        Ok(text.to_owned())
    } else {
        Err("must be 1 to 256 characters of ASCII without spaces and slashes".to_owned())
    }
}

fn endpoint(text: &str) -> Result<String, String> {
    let why =
        || "must be http:// or https:// and a host, with a port if it is another one, and nothing else".to_owned();
    let text = text.strip_suffix('/').unwrap_or(text);
    let address: http::Uri = text.parse().map_err(|_| why())?;
    let is_scheme = matches!(address.scheme_str(), Some("http" | "https"));
    // Of an address with a password, the error shows nothing.
    let is_host = address.authority().is_some_and(|host| !host.as_str().contains('@'));
    if is_scheme && is_host && address.path() == "/" && address.query().is_none() {
        Ok(text.to_owned())
    } else {
        Err(why())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_checked() {
        for (text, want) in [
            ("https://s3.example", "https://s3.example"),
            ("http://127.0.0.1:7070/", "http://127.0.0.1:7070"),
            ("http://[::1]:7070", "http://[::1]:7070"),
        ] {
            assert_eq!(endpoint(text).as_deref(), Ok(want));
        }
        for text in [
            "s3.example",
            "ftp://a",
            "https://",
            "https://u:p@a",
            "https://a/b",
            "https://a?b=c",
        ] {
            let why = endpoint(text).unwrap_err();
            assert!(!why.contains("u:p"), "{why}");
        }
    }
}

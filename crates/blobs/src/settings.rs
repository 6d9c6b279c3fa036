//! Where the bucket is, and with which credentials.

use std::fmt;
use std::path::PathBuf;

use model::secret::Secret;

/// How the client reaches a bucket. `Debug` shows no credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct S3Settings {
    /// Name of the bucket.
    pub bucket: String,
    /// Address of the server, if it is not that of the region.
    pub endpoint: Option<String>,
    /// Region of the bucket.
    pub region: String,
    /// What the names of objects begin with, without a slash at its end; may be empty.
    pub prefix: String,
    /// Name of the key.
    pub access_key_id: String,
    /// The secret access key.
    pub secret_access_key: Secret,
    /// Whether an endpoint without TLS may be used.
    pub allow_http: bool,
    /// Whether the bucket is in the path of addresses, and not in their host name.
    pub path_style: bool,
    /// Certificates in PEM that are trusted besides those of the host.
    pub authority: Option<String>,
    /// Directory with the ids of unfinished uploads. It is created.
    pub journal: PathBuf,
}

impl S3Settings {
    /// The address of the bucket at an endpoint, with the bucket in the name of the host; the endpoint itself if it is
    /// there already.
    pub(crate) fn address_of_bucket(&self, endpoint: &str) -> Result<String, String> {
        let bucket = &self.bucket;
        let (scheme, host) = endpoint.split_once("://").unwrap_or(("https", endpoint));
        if host.strip_prefix(bucket).is_some_and(|rest| rest.starts_with('.')) {
            return Ok(endpoint.to_owned());
        }
        let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
        if name.starts_with('[') || name.parse::<std::net::IpAddr>().is_ok() {
            return Err("blobs.path_style = false requires a blobs.endpoint with the name of a host".to_owned());
        }
        Ok(format!("{scheme}://{bucket}.{host}"))
    }

    /// Checks a prefix of objects, and returns it without slashes at its ends: words of letters, digits, `.`, `_` and
    /// `-` with `/` between them, none of them `.` or `..`, and at most 256 characters.
    ///
    /// # Errors
    /// When it is another text.
    pub fn check_prefix(text: &str) -> Result<String, String> {
        let prefix = text.trim_matches('/');
        let is_word = |word: &str| {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
            !word.is_empty() && word != "." && word != ".." && word.bytes().all(allowed)
        };
        if prefix.is_empty() || (prefix.len() <= 256 && prefix.split('/').all(is_word)) {
            Ok(prefix.to_owned())
        } else {
            Err(
                "must be words of letters, digits, '.', '_' and '-' with '/' between them, at most 256 characters"
                    .to_owned(),
            )
        }
    }

    /// Names the bucket and its endpoint, for messages.
    pub(crate) fn place(&self) -> String {
        let at = match &self.endpoint {
            Some(endpoint) => format!(" at {endpoint}"),
            None => format!(" in region {}", self.region),
        };
        format!("bucket {:?}{at}", self.bucket)
    }
}

impl fmt::Debug for S3Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Settings")
            .field("bucket", &self.bucket)
            .field("endpoint", &self.endpoint)
            .field("region", &self.region)
            .field("prefix", &self.prefix)
            .field("allow_http", &self.allow_http)
            .field("path_style", &self.path_style)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_checked() {
        for (text, want) in [
            ("", ""),
            ("a", "a"),
            ("/a/b.c/", "a/b.c"),
            (&"a".repeat(256), &"a".repeat(256)),
        ] {
            assert_eq!(S3Settings::check_prefix(text).as_deref(), Ok(want));
        }
        for text in ["a//b", "..", "a/../b", "a b", "ä", &"a".repeat(257)] {
            assert!(S3Settings::check_prefix(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_bucket_is_in_the_name_of_the_host() {
        let settings = settings();
        let address = |endpoint| settings.address_of_bucket(endpoint);
        for (endpoint, want) in [
            ("https://s3.test", "https://b.s3.test"),
            ("http://s3.test:9000", "http://b.s3.test:9000"),
            // It is there already.
            ("https://b.s3.test:9000", "https://b.s3.test:9000"),
            ("https://bb.s3.test", "https://b.bb.s3.test"),
            ("https://b", "https://b.b"),
        ] {
            assert_eq!(address(endpoint).as_deref(), Ok(want));
        }
        for endpoint in [
            "https://127.0.0.1",
            "https://127.0.0.1:9000",
            "https://[::1]:9000",
            "https://[::1]",
        ] {
            assert!(address(endpoint).is_err(), "{endpoint}");
        }
    }

    #[test]
    fn debug_shows_no_credentials() {
        let settings = settings();
        let shown = format!("{settings:?}");
        assert!(!shown.contains("the-name") && !shown.contains("the-key"), "{shown}");
    }

    fn settings() -> S3Settings {
        S3Settings {
            bucket: "b".to_owned(),
            endpoint: None,
            region: "r".to_owned(),
            prefix: String::new(),
            access_key_id: "the-name".to_owned(),
            secret_access_key: Secret::new("the-key".to_owned()),
            allow_http: false,
            path_style: true,
            authority: None,
            journal: PathBuf::new(),
        }
    }
}

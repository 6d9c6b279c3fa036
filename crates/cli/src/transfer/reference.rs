//! Names of artifacts, `oci://host[:port]/repository[:tag][@digest]`.

use std::fmt;

use anyhow::{Context as _, Result, ensure};
use registry::name::{check_host, check_repository, check_tag, is_digest};

/// What tells the name of an artifact from the path of a file.
pub(crate) const SCHEME: &str = "oci://";

/// The name of an artifact. Unlike names of images, it always has a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reference {
    /// `host` or `host:port`.
    pub(super) host: String,
    pub(super) repository: String,
    pub(super) tag: Option<String>,
    pub(super) digest: Option<String>,
}

impl Reference {
    pub(super) fn parse(text: &str) -> Result<Self> {
        Self::split(text).with_context(|| format!("{text:?} is not the name of an artifact"))
    }

    fn split(text: &str) -> Result<Self> {
        let rest = text.strip_prefix(SCHEME).context("it must begin with oci://")?;
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest)),
            None => (rest, None),
        };
        let (host, path) = rest.split_once('/').context("expected oci://host/repository:tag")?;
        let (repository, tag) = match path.split_once(':') {
            Some((repository, tag)) => (repository, Some(tag)),
            None => (path, None),
        };
        check_host(host)?;
        check_repository(repository)?;
        tag.map(check_tag).transpose()?;
        ensure!(
            digest.is_none_or(is_digest),
            "invalid digest: expected sha256: and 64 hexadecimal digits"
        );
        Ok(Self {
            host: host.to_owned(),
            repository: repository.to_owned(),
            tag: match (tag, digest) {
                (None, None) => Some("latest".to_owned()),
                (tag, _) => tag.map(str::to_owned),
            },
            digest: digest.map(str::to_owned),
        })
    }

    /// What the registry is asked for: the digest, if there is one.
    pub(super) fn target(&self) -> &str {
        self.digest.as_deref().or(self.tag.as_deref()).unwrap_or_default()
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.host, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_a_registry() {
        let digest = format!("sha256:{}", "a1".repeat(32));
        let pinned = format!("oci://h.example/a@{digest}");
        let both = format!("oci://h.example/a:v1@{digest}");
        for (text, shown, target) in [
            ("oci://localhost:5000/a/b:v1", "oci://localhost:5000/a/b:v1", "v1"),
            ("oci://h.example/a", "oci://h.example/a:latest", "latest"),
            ("oci://[::1]:5000/a.b_c:V-1.x", "oci://[::1]:5000/a.b_c:V-1.x", "V-1.x"),
            (&pinned, &pinned, &digest),
            (&both, &both, &digest),
        ] {
            let reference = Reference::parse(text).unwrap();
            assert_eq!((reference.to_string().as_str(), reference.target()), (shown, target));
        }
        let long = format!("oci://h/{}", "a".repeat(256));
        let tag = format!("oci://h/a:{}", "t".repeat(129));
        for bad in [
            "",
            "h/a",
            "oci://",
            "oci://h",
            "oci://h/",
            "oci:///a",
            "oci://h/A",
            "oci://h/a//b",
            "oci://h/../b",
            "oci://h/a:",
            "oci://h/a:-x",
            "oci://h/a:b:c",
            "oci://h/a@sha256:12",
            "oci://user@h/a",
            "oci://h a/b",
            "oci://h/a?x",
            &long,
            &tag,
        ] {
            assert!(Reference::parse(bad).is_err(), "{bad}");
        }
        assert!(Reference::parse(&long[..long.len() - 1]).is_ok());
        assert!(Reference::parse(&tag[..tag.len() - 1]).is_ok());
    }
}

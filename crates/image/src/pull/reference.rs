//! Names of images, as Docker understands them.

use std::fmt;

use anyhow::{Context, Result, ensure};
use registry::name::{check_host, check_repository, check_tag};

use crate::manifest::Digest;

/// The registry of names that have no host.
const DOCKER_HUB: &str = "docker.io";

/// A name of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Registry as `host` or `host:port`, in the form that users write.
    pub(crate) registry: String,
    pub(crate) repository: String,
    pub(crate) tag: Option<String>,
    pub(crate) digest: Option<Digest>,
}

/// The name of a registry that users write; Docker Hub has several.
fn known_as(registry: &str) -> &str {
    match registry {
        "index.docker.io" | "registry-1.docker.io" | "registry.hub.docker.com" => DOCKER_HUB,
        other => other,
    }
}

impl Reference {
    /// Whether it is of the registry at this `host` or `host:port`.
    pub(crate) fn is_of(&self, host: &str) -> bool {
        self.registry.eq_ignore_ascii_case(known_as(host))
    }

    /// Parses `[host[:port]/]path[:tag][@digest]`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        Self::split(text).with_context(|| format!("invalid image name {}", crate::message::show(text.as_bytes())))
    }

    fn split(text: &str) -> Result<Self> {
        ensure!(
            !text.contains("://"),
            "expected a name without a scheme, such as ghcr.io/owner/name:tag"
        );
        let (name, digest) = match text.split_once('@') {
            Some((name, digest)) => (name, Some(Digest::parse(digest)?)),
            None => (text, None),
        };
        let (name, tag) = match name.rsplit_once(':') {
            Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
            _ => (name, None),
        };
        if let Some(tag) = tag {
            check_tag(tag)?;
        }
        let is_host = |first: &str| {
            first.contains(['.', ':']) || first == "localhost" || first.chars().any(|c| c.is_ascii_uppercase())
        };
        let (registry, path) = match name.split_once('/') {
            Some((first, path)) if is_host(first) => (first, path),
            _ => (DOCKER_HUB, name),
        };
        check_host(registry)?;
        let registry = known_as(registry);
        let is_short = registry == DOCKER_HUB && !path.contains('/');
        let repository = if is_short {
            format!("library/{path}")
        } else {
            path.to_owned()
        };
        check_repository(&repository)?;
        Ok(Self {
            registry: registry.to_owned(),
            repository,
            // A digest says all; with neither, it is the tag that Docker means.
            tag: match (tag, &digest) {
                (Some(tag), _) => Some(tag.to_owned()),
                (None, Some(_)) => None,
                (None, None) => Some("latest".to_owned()),
            },
            digest,
        })
    }

    /// What the registry is asked for: the digest if there is one.
    pub(crate) fn target(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => "latest".to_owned(),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
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
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_completed() {
        let hex = "0123456789abcdef".repeat(4);
        for (text, expect) in [
            ("debian", "docker.io/library/debian:latest"),
            ("debian:12", "docker.io/library/debian:12"),
            ("oven/bun:latest", "docker.io/oven/bun:latest"),
            ("docker.io/debian", "docker.io/library/debian:latest"),
            ("index.docker.io/a/b", "docker.io/a/b:latest"),
            ("localhost/a", "localhost/a:latest"),
            ("localhost:5000/a/b/c:t", "localhost:5000/a/b/c:t"),
            ("127.0.0.1:5000/a", "127.0.0.1:5000/a:latest"),
            ("[::1]:5000/a", "[::1]:5000/a:latest"),
            ("ghcr.io/o-w/n__a.b:V1.2-x_", "ghcr.io/o-w/n__a.b:V1.2-x_"),
            ("HOST/a", "HOST/a:latest"),
            (&format!("a@sha256:{hex}"), &format!("docker.io/library/a@sha256:{hex}")),
            (&format!("h.io/a:t@sha256:{hex}"), &format!("h.io/a:t@sha256:{hex}")),
        ] {
            let reference = Reference::parse(text).unwrap();
            assert_eq!(reference.to_string(), expect);
            assert_eq!(Reference::parse(&reference.to_string()).unwrap(), reference);
        }
        let long = "a".repeat(256);
        for text in [
            "",
            ":",
            "@",
            "/",
            "a/",
            "/a",
            "a//b",
            "A",
            "a:",
            "a:-x",
            "a b",
            "a@b",
            "a@sha256:12",
            "a@md5:1",
            "https://a.io/b",
            "a.io/",
            "a.io:0/b",
            "a.io:99999/b",
            "a.io:x/b",
            "-a",
            "a-",
            "a..b",
            "a___b",
            "a/../b",
            "[::g]/a",
            "[::1]x/a",
            "a:t/b:u:v",
            "-.io/b",
            "a\n",
            "ü",
            &long,
        ] {
            assert!(Reference::parse(text).is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_has_one_meaning(text in "[a-zA-Z0-9:/@._\\[\\]-]{0,40}") {
            if let Ok(reference) = Reference::parse(&text) {
                prop_assert_eq!(Reference::parse(&reference.to_string()).unwrap(), reference);
            }
        }

        #[test]
        fn nothing_panics(text in ".*") {
            let _ = Reference::parse(&text);
        }
    }
}

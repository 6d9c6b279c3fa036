//! Manifests and indexes of OCI and of Docker, version 2 schema 2.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Result, anyhow, bail, ensure};
use registry::name::is_digest;
use serde::Deserialize;
use sha2::Sha256;

/// Media types that requests accept.
pub(crate) const ACCEPTED: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json";
/// Maximum number of indexes above a manifest.
pub(crate) const DEPTH_MAX: usize = 3;
/// Maximum number of layers. Docker has 127.
pub(crate) const LAYERS_MAX: usize = 512;
/// Annotation with the tag of an image in an archive.
const NAME: &str = "org.opencontainers.image.ref.name";

/// A SHA-256 of an object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Digest(String);

impl Digest {
    pub(crate) fn parse(text: &str) -> Result<Self> {
        ensure!(is_digest(text), "invalid digest: expected sha256: and 64 hex digits");
        Ok(Self(text.to_owned()))
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self::from_hash(&<Sha256 as sha2::Digest>::digest(bytes))
    }

    pub(crate) fn from_hash(hash: &[u8]) -> Self {
        Self(format!("sha256:{}", hex::encode(hash)))
    }

    pub(crate) fn hex(&self) -> &str {
        self.0.strip_prefix("sha256:").unwrap_or(&self.0)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Digest of a file.
pub(crate) fn hash(path: &Path) -> Result<Digest> {
    use sha2::Digest as _;
    let mut file = std::fs::File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 128 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(Digest::from_hash(&hasher.finalize())),
            Ok(count) => hasher.update(&buffer[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The architecture that is asked for, or that of this program.
pub(crate) fn architecture(asked: Option<&str>) -> String {
    let arch = asked.unwrap_or(match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    });
    arch.to_owned()
}

/// An object that another one names.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Descriptor {
    media_type: String,
    digest: String,
    pub(crate) size: u64,
    platform: Option<ImagePlatform>,
    annotations: Option<std::collections::BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct ImagePlatform {
    architecture: String,
    os: String,
    variant: Option<String>,
}

impl Descriptor {
    pub(crate) fn digest(&self) -> Result<Digest> {
        Digest::parse(&self.digest)
    }

    fn is_named(&self, name: &str) -> bool {
        let tag = name.rsplit_once(':').map_or(name, |(_, tag)| tag);
        let names = self
            .annotations
            .iter()
            .flatten()
            .filter(|(key, _)| key.as_str() == NAME || key.as_str() == "io.containerd.image.name");
        names.into_iter().any(|(_, value)| value == name || value == tag)
    }
}

/// A list of manifests.
#[derive(Debug)]
pub(crate) struct Index(Vec<Descriptor>);

impl Index {
    /// The manifest for an architecture, of the image with a name if one is given and names are there.
    pub(crate) fn select(&self, arch: &str, name: Option<&str>) -> Result<Digest> {
        let named = |descriptor: &&Descriptor| name.is_none_or(|name| descriptor.is_named(name));
        let is_fit = |descriptor: &&Descriptor| match &descriptor.platform {
            Some(platform) => platform.os == "linux" && platform.architecture == arch,
            // As in archives with one image. Its configuration is checked later.
            None => true,
        };
        let has_names = self
            .0
            .iter()
            .any(|descriptor| descriptor.annotations.iter().flatten().any(|(key, _)| key == NAME));
        let candidates: Vec<_> = self.0.iter().filter(|one| !has_names || named(one)).collect();
        // Newer variants have instructions that older machines lack.
        let rank = |descriptor: &&&Descriptor| {
            let variant = descriptor
                .platform
                .as_ref()
                .and_then(|platform| platform.variant.as_deref());
            match variant {
                None | Some("" | "v8" | "v7" | "v1") => 0,
                Some(_) => 1,
            }
        };
        match candidates.iter().filter(|one| is_fit(one)).min_by_key(rank) {
            Some(descriptor) => descriptor.digest(),
            None if candidates.is_empty() => bail!("no manifest"),
            None => {
                let platforms = candidates.iter().filter_map(|one| one.platform.as_ref());
                let known = platforms.filter(|platform| platform.os != "unknown");
                let list: Vec<String> = known
                    .map(|one| shown(&format!("{}/{}", one.os, one.architecture)))
                    .take(20)
                    .collect();
                bail!(
                    "wrong architecture: it is for {}, and linux/{arch} is required",
                    list.join(", ")
                )
            }
        }
    }
}

/// What an image consists of.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) config: Descriptor,
    pub(crate) layers: Vec<Descriptor>,
}

#[derive(Debug)]
pub(crate) enum Manifest {
    Index(Index),
    Image(Image),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Parsed {
    schema_version: u64,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

impl Manifest {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        // The reason may contain values of the manifest.
        let invalid = |error: serde_json::Error| anyhow!("invalid manifest: {}", shown(&error.to_string()));
        let parsed: Parsed = serde_json::from_slice(bytes).map_err(invalid)?;
        ensure!(
            parsed.schema_version == 2,
            "a manifest of version {}; only version 2 is supported",
            parsed.schema_version
        );
        match parsed {
            Parsed {
                manifests: Some(manifests),
                config: None,
                layers: None,
                ..
            } => Ok(Self::Index(Index(manifests))),
            Parsed {
                manifests: None,
                config: Some(config),
                layers: Some(layers),
                ..
            } => {
                ensure!(layers.len() <= LAYERS_MAX, "more than {LAYERS_MAX} layers");
                let is_config =
                    config.media_type.contains("image.config") || config.media_type.contains("container.image");
                ensure!(
                    is_config,
                    "not an image: its configuration is \"{}\"",
                    shown(&config.media_type)
                );
                for layer in layers.iter().chain([&config]) {
                    layer.digest()?;
                    let is_foreign = layer.media_type.contains("foreign") || layer.media_type.contains("encrypted");
                    ensure!(
                        !is_foreign,
                        "layers of type \"{}\" are not supported",
                        shown(&layer.media_type)
                    );
                }
                Ok(Self::Image(Image { config, layers }))
            }
            _ => bail!("neither a manifest of an image nor a list of them"),
        }
    }
}

/// A text of a registry in a message: short, and without control characters.
fn shown(text: &str) -> String {
    crate::message::show(text.as_bytes())
}

#[cfg(test)]
mod hostile;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn index(platforms: &[(&str, &str, Option<&str>)]) -> Vec<u8> {
        let manifests: Vec<_> = platforms
            .iter()
            .enumerate()
            .map(|(number, (os, architecture, variant))| {
                json!({"digest": format!("sha256:{number:064}"), "size": 1,
                    "platform": {"os": os, "architecture": architecture, "variant": variant}})
            })
            .collect();
        json!({"schemaVersion": 2, "manifests": manifests})
            .to_string()
            .into_bytes()
    }

    #[test]
    fn the_platform_is_selected() {
        let Manifest::Index(index) = Manifest::parse(&index(&[
            ("unknown", "unknown", None),
            ("linux", "arm64", Some("v9")),
            ("linux", "arm64", Some("v8")),
            ("windows", "amd64", None),
            ("linux", "amd64", Some("v3")),
            ("linux", "amd64", None),
        ]))
        .unwrap() else {
            panic!("an index")
        };
        for (arch, expect) in [("amd64", 5), ("arm64", 2)] {
            assert_eq!(
                index.select(arch, None).unwrap().to_string(),
                format!("sha256:{expect:064}")
            );
        }
        let error = index.select("s390x", None).unwrap_err().to_string();
        assert!(
            error.contains("wrong architecture") && error.contains("linux/arm64"),
            "{error}"
        );
        assert!(!error.contains("unknown"));
    }

    #[test]
    fn other_documents_are_refused() {
        let zero = format!("sha256:{:064}", 0);
        let config = |kind: &str| json!({"mediaType": kind, "digest": zero, "size": 1});
        let good = config("application/vnd.oci.image.config.v1+json");
        for (text, words) in [
            ("[]".to_owned(), "version 0"),
            ("{}".to_owned(), "version 0"),
            (json!({"schemaVersion": 1, "fsLayers": []}).to_string(), "version 1"),
            (json!({"schemaVersion": 2}).to_string(), "neither"),
            (json!({"schemaVersion": 2, "manifests": [], "config": good, "layers": []}).to_string(), "neither"),
            (json!({"schemaVersion": 2, "config": config("application/vnd.cncf.helm.config.v1+json"), "layers": []}).to_string(), "not an image"),
            (json!({"schemaVersion": 2, "config": good, "layers": [{"digest": "sha256:x"}]}).to_string(), "digest"),
            (json!({"schemaVersion": 2, "config": good, "layers": [{"digest": zero, "size": -1}]}).to_string(), "invalid"),
            (json!({"schemaVersion": 2, "config": good, "layers": vec![good.clone(); 513]}).to_string(), "layers"),
            (json!({"schemaVersion": 2, "config": good, "layers": [{"digest": zero, "mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"}]}).to_string(), "not supported"),
        ] {
            let error = format!("{:#}", Manifest::parse(text.as_bytes()).unwrap_err());
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Manifest::parse(&bytes);
        }
    }
}

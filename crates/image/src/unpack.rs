//! Images in files: archives of `docker save`, OCI archives, and tarballs of a root file system.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use protocol::image::{ImageReport, LayerReport, UnpackJob, UnpackLimits};
use serde::Deserialize;

use crate::layers::{Config, Layers, WorkDir};
use crate::manifest::{self, Digest, Manifest};
use crate::message::show;
use crate::tar::{Kind, Reader};
use crate::{decompress, files};

/// Maximum size of a file of JSON in an archive.
const JSON_MAX: u64 = 4 << 20;
/// Maximum number of files in an archive of an image: each layer has up to three.
const FILES_MAX: usize = 4096;

/// Runs a job of `image-unpack`.
pub(crate) fn run(job: &UnpackJob) -> Result<ImageReport> {
    let name = job.archive.display();
    let contents = classify(&job.archive, job.limits).with_context(|| format!("image {name}"))?;
    let mut layers = Layers::new(&job.target, job.limits)?;
    let done = match contents {
        Contents::Rootfs => {
            let bytes = job.archive.metadata()?.len();
            let layer = LayerReport {
                digest: String::new(),
                bytes,
            };
            layers.apply(&job.archive).map(|()| ImageReport {
                layers: vec![layer],
                ..ImageReport::default()
            })
        }
        Contents::Image => image(job, &mut layers),
    };
    let report = done.with_context(|| format!("image {name}"))?;
    Ok(layers.report(report))
}

enum Contents {
    /// Files of an image with `manifest.json` or `index.json`.
    Image,
    Rootfs,
}

/// Reads names until it is known what the archive is: a root file system has no manifest at its top.
fn classify(archive: &Path, limits: UnpackLimits) -> Result<Contents> {
    let file = File::open(archive).with_context(|| format!("open {}", archive.display()))?;
    let mut reader = Reader::new(decompress::open(file)?);
    let mut is_layout = false;
    let mut left = limits;
    while let Some(entry) = reader.next_entry()? {
        left.bytes = left
            .bytes
            .checked_sub(entry.size)
            .context("too large: the limit is reached")?;
        left.entries = left
            .entries
            .checked_sub(1)
            .with_context(|| format!("too large: more than {} files", limits.entries))?;
        match files::clean(&entry.path).as_deref() {
            Some(b"manifest.json") if entry.kind == Kind::File => return Ok(Contents::Image),
            Some(b"oci-layout") if entry.kind == Kind::File => is_layout = true,
            Some(b"index.json") if entry.kind == Kind::File && is_layout => return Ok(Contents::Image),
            _ => {}
        }
    }
    Ok(if is_layout { Contents::Image } else { Contents::Rootfs })
}

/// An archive, unpacked into files whose names are numbers, by their paths in it.
struct Files {
    work: WorkDir,
    paths: BTreeMap<Vec<u8>, PathBuf>,
    links: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Files {
    fn unpack(archive: &Path, work: &Path, limits: UnpackLimits) -> Result<Self> {
        let mut unpacked = Self {
            work: WorkDir::make(work, "unpack")?,
            paths: BTreeMap::new(),
            links: BTreeMap::new(),
        };
        let mut reader = Reader::new(decompress::open(File::open(archive)?)?);
        let mut left = limits.bytes;
        while let Some(entry) = reader.next_entry()? {
            let path = files::clean(&entry.path).with_context(|| format!("{}: leads out", show(&entry.path)))?;
            let number = unpacked.paths.len() + unpacked.links.len();
            ensure!(number < FILES_MAX, "too large: more than {FILES_MAX} files of an image");
            match entry.kind {
                Kind::File => {
                    left = left.checked_sub(entry.size).context("too large")?;
                    let target = unpacked.work.path().join(number.to_string());
                    let mut file = File::create_new(&target)?;
                    let written = std::io::copy(&mut reader, &mut file)?;
                    ensure!(written == entry.size, "the archive is truncated");
                    unpacked.paths.insert(path, target);
                }
                // Old versions of Docker have each layer once, and links to it.
                Kind::Symlink => {
                    let (above, _) = files::split(&path);
                    let joined = resolve(above, &entry.link).context("a link out of the archive")?;
                    unpacked.links.insert(path, joined);
                }
                Kind::HardLink => {
                    let target = files::clean(&entry.link).context("a link out of the archive")?;
                    unpacked.links.insert(path, target);
                }
                Kind::Directory => {}
                Kind::Fifo | Kind::Device => bail!("{}: a special file", show(&path)),
            }
        }
        reader.drain()?;
        Ok(unpacked)
    }

    fn find(&self, path: &str) -> Result<&Path> {
        let mut path = files::clean(path.as_bytes()).with_context(|| format!("{path:?} leads out"))?;
        for _ in 0..8 {
            if let Some(file) = self.paths.get(&path) {
                return Ok(file);
            }
            match self.links.get(&path) {
                Some(target) => path = target.clone(),
                None => break,
            }
        }
        bail!("{} is not in the archive", show(&path));
    }

    fn json(&self, path: &str) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        File::open(self.find(path)?)?
            .take(JSON_MAX + 1)
            .read_to_end(&mut bytes)?;
        ensure!(bytes.len() as u64 <= JSON_MAX, "{path}: larger than {JSON_MAX} bytes");
        Ok(bytes)
    }

    /// An object of an OCI layout. It must have its digest.
    fn blob(&self, digest: &Digest) -> Result<Vec<u8>> {
        let bytes = self.json(&blob_path(digest))?;
        ensure!(Digest::of(&bytes) == *digest, "{digest}: wrong contents");
        Ok(bytes)
    }
}

fn blob_path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// The target of a link in a directory; none if it leads out.
fn resolve(directory: &[u8], link: &[u8]) -> Option<Vec<u8>> {
    let mut path: Vec<&[u8]> = directory
        .split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty())
        .collect();
    if link.starts_with(b"/") {
        return None;
    }
    for component in link.split(|byte| *byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => drop(path.pop()?),
            name => path.push(name),
        }
    }
    Some(path.join(&b'/'))
}

/// An image of `manifest.json`, which `docker save` writes.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

fn image(job: &UnpackJob, layers: &mut Layers) -> Result<ImageReport> {
    let files = Files::unpack(&job.archive, &job.work, job.limits)?;
    if files.find("index.json").is_ok() {
        return layout(job, &files, layers);
    }
    let saved: Vec<Saved> = serde_json::from_slice(&files.json("manifest.json")?).context("manifest.json")?;
    let tags: Vec<&str> = saved
        .iter()
        .flat_map(|image| image.repo_tags.iter().flatten())
        .map(String::as_str)
        .collect();
    let has_tag = |image: &&Saved, tag: &String| image.repo_tags.iter().flatten().any(|other| other == tag);
    let image = match &job.reference {
        Some(tag) => saved.iter().find(|image| has_tag(image, tag)),
        None if saved.len() > 1 => bail!("has several images, name one of them: {}", tags.join(", ")),
        None => saved.first(),
    };
    let image = image.with_context(|| format!("has no such image; it has: {}", tags.join(", ")))?;
    let config = Config::parse(&files.json(&image.config)?)?;
    config.check(&manifest::architecture(job.arch.as_deref()))?;
    ensure!(
        image.layers.len() <= manifest::LAYERS_MAX,
        "more than {} layers",
        manifest::LAYERS_MAX
    );
    let mut report = config.report();
    for layer in &image.layers {
        let path = files.find(layer)?;
        layers.apply(path).with_context(|| format!("layer {layer}"))?;
        report.layers.push(LayerReport {
            digest: layer.clone(),
            bytes: path.metadata()?.len(),
        });
    }
    Ok(report)
}

/// An OCI layout.
fn layout(job: &UnpackJob, files: &Files, layers: &mut Layers) -> Result<ImageReport> {
    let arch = manifest::architecture(job.arch.as_deref());
    let mut manifest = Manifest::parse(&files.json("index.json")?).context("index.json")?;
    let mut digest = None;
    for _ in 0..=manifest::DEPTH_MAX {
        let Manifest::Index(index) = &manifest else { break };
        let next = index.select(&arch, job.reference.as_deref())?;
        manifest = Manifest::parse(&files.blob(&next)?).context("manifest")?;
        digest = Some(next);
    }
    let Manifest::Image(image) = manifest else {
        bail!("too many levels of indexes")
    };
    let config = Config::parse(&files.blob(&image.config.digest()?)?)?;
    config.check(&arch)?;
    let mut report = config.report();
    report.digest = digest.map(|digest| digest.to_string());
    for layer in &image.layers {
        let digest = layer.digest()?;
        let path = files.find(&blob_path(&digest))?;
        ensure!(manifest::hash(path)? == digest, "{digest}: wrong contents");
        layers.apply(path).with_context(|| format!("layer {digest}"))?;
        report.layers.push(LayerReport {
            digest: digest.to_string(),
            bytes: layer.size,
        });
    }
    Ok(report)
}

//! Layers that are unpacked over each other, and the configuration of their image.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use protocol::image::{ImageReport, UnpackLimits};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use serde::Deserialize;

use crate::tar::Reader;
use crate::tree::{Policy, Tree};
use crate::{decompress, files};

/// The directory into which layers are unpacked.
pub(crate) struct Layers {
    tree: Tree,
    count: usize,
}

impl Layers {
    pub(crate) fn new(target: &Path, limits: UnpackLimits) -> Result<Self> {
        Ok(Self {
            tree: Tree::open(target, Policy::Image, limits)?,
            count: 0,
        })
    }

    /// Unpacks the next layer. It is read twice: first what it deletes, because its order is not that of the changes.
    pub(crate) fn apply(&mut self, layer: &Path) -> Result<()> {
        let open = || -> Result<_> {
            let file = File::open(layer).with_context(|| format!("open {}", layer.display()))?;
            Ok(Reader::new(decompress::open(file)?))
        };
        if self.count > 0 {
            self.tree.whiteouts(&mut open()?)?;
        }
        let mut reader = open()?;
        self.tree.unpack(&mut reader)?;
        // Checksums of compressed streams are at their ends.
        reader.drain()?;
        self.count += 1;
        Ok(())
    }

    /// The report with what was unpacked.
    pub(crate) fn report(self, report: ImageReport) -> ImageReport {
        ImageReport {
            bytes: self.tree.bytes,
            entries: self.tree.entries,
            skipped: self.tree.skipped,
            ..report
        }
    }
}

/// A directory for the time of a job.
pub(crate) struct WorkDir(PathBuf);

impl WorkDir {
    pub(crate) fn make(below: &Path, purpose: &str) -> Result<Self> {
        for number in 0..1000 {
            let path = below.join(format!("ringfence-{purpose}-{}-{number}", std::process::id()));
            match rustix::fs::mkdirat(CWD, &path, Mode::RWXU) {
                Err(Errno::EXIST) => {}
                // An image need not have any directory.
                Err(Errno::NOENT) if number == 0 => {
                    std::fs::create_dir_all(below).with_context(|| format!("make directory {}", below.display()))?;
                }
                other => {
                    other.with_context(|| format!("make a directory in {}", below.display()))?;
                    return Ok(Self(path));
                }
            }
        }
        bail!("no free name in {}", below.display());
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        if let (Some(parent), Some(name)) = (self.0.parent(), self.0.file_name())
            && let Ok(parent) = rustix::fs::open(parent, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())
        {
            let _ = files::remove(parent, name.as_encoded_bytes());
        }
    }
}

/// The configuration of an image, as far as it is used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Config {
    architecture: String,
    os: String,
    config: Option<RunConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct RunConfig {
    env: Option<Vec<String>>,
    user: Option<String>,
    working_dir: Option<String>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
}

impl Config {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).context("invalid configuration of the image")
    }

    /// Programs of another architecture would not run.
    pub(crate) fn check(&self, arch: &str) -> Result<()> {
        let Self { os, architecture, .. } = self;
        ensure!(
            os == "linux" && architecture == arch,
            "wrong architecture: it is for {os}/{architecture}, and linux/{arch} is required"
        );
        Ok(())
    }

    pub(crate) fn report(self) -> ImageReport {
        let run = self.config.unwrap_or_default();
        let text = |text: Option<String>| text.filter(|text| !text.is_empty());
        let pair = |entry: String| {
            let (name, value) = entry.split_once('=')?;
            (!name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
        };
        ImageReport {
            arch: Some(self.architecture),
            env: run.env.unwrap_or_default().into_iter().filter_map(pair).collect(),
            user: text(run.user),
            workdir: text(run.working_dir),
            entrypoint: run.entrypoint.unwrap_or_default(),
            cmd: run.cmd.unwrap_or_default(),
            ..ImageReport::default()
        }
    }
}

//! Finished templates as files: what one consists of, and templates that are made of what another platform wrote.
//!
//! A file is untrusted. Its layers are what their ids say, because the node checks that; the rest of it says how
//! sandboxes are started, which is checked like the request of a client.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use formats::tar::{BLOCK, padding};
use model::id::{BuildId, LayerId, TeamId, TemplateId};
use model::resources::Resources;
use protocol::agent;
use protocol::node::{Image, LayerStream, NodeError};
use protocol::template_file::{
    self, BaseVersion, FORMAT, InvalidFile, MANIFEST, MANIFEST_MAX, ManifestLayer, layer_name,
};
use store::builds::{BuildRequested, BuildRow, BuildTarget, DEFAULT_TAG, NewBuild};
use store::error::StoreError;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use uuid::Uuid;

use super::Builds;
use super::context::Pins;
use super::objects::ObjectError;
use super::recipe::{BuildSpec, layers_of};
use crate::ids::new_template_id;
use crate::layers::LAYER_MAX;
use crate::templates::{TemplateName, new_tag};

/// A template of a file.
pub(crate) type Manifest = template_file::Manifest<BuildSpec>;

/// Maximum sizes of a template, which are far above those of any host.
const MOST: Resources = Resources {
    cpu_count: 1024,
    memory_mb: 16 << 20,
    disk_mb: 64 << 20,
    pids: 0,
};
/// Data on its way from a file to the node, in bytes.
const BUFFER: usize = 256 << 10;

/// Why a template was not written or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TransferError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("layer {layer} of the file")]
    Layer {
        layer: LayerId,
        #[source]
        error: NodeError,
    },
    #[error("the node failed")]
    Node(#[source] NodeError),
    #[error("the layers cannot be stored in the blob store")]
    Objects(#[from] ObjectError),
    #[error("the file cannot be read")]
    Read(#[from] std::io::Error),
    #[error(transparent)]
    Invalid(#[from] InvalidFile),
    #[error("{0}")]
    Refused(String),
}

fn refused<T>(why: impl Into<String>) -> Result<T, TransferError> {
    Err(TransferError::Refused(why.into()))
}

/// A template that was made of a file.
#[derive(Debug)]
pub(crate) struct Imported {
    pub(crate) template: TemplateId,
    pub(crate) build: BuildId,
    pub(crate) warning: Option<String>,
}

/// Where a template of a file goes.
#[derive(Debug)]
pub(crate) struct Destination {
    pub(crate) team: TeamId,
    /// Instead of the name in the file.
    pub(crate) name: Option<TemplateName>,
    /// Whether another `base` than that of this host is accepted.
    pub(crate) any_base: bool,
}

/// Layers that stay while a file is read, or a snapshot made.
pub(super) struct Pinned<'a> {
    builds: &'a Builds,
    pub(super) pins: Pins,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        self.builds.imports.lock().retain(|pins| !Arc::ptr_eq(pins, &self.pins));
    }
}

impl Builds {
    /// What a template consists of.
    pub(crate) async fn manifest(&self, name: String, build: &BuildRow) -> Result<Manifest, TransferError> {
        let Some(config) = BuildSpec::of(build) else {
            return refused("the template has no files: it is not finished, or an earlier version built it");
        };
        let wanted = layers_of(&config.image);
        // Whoever reads a template as a file is the operator.
        self.node
            .fetch_missing(&None, wanted)
            .await
            .map_err(TransferError::Node)?;
        let known = self.node.layers().await.map_err(TransferError::Node)?;
        let mut layers = Vec::new();
        for id in wanted {
            let Some(layer) = known.iter().find(|layer| layer.id == *id) else {
                return refused(format!("layer {id} of the template is not on this node"));
            };
            layers.push(ManifestLayer {
                id: id.clone(),
                bytes: layer.bytes,
            });
        }
        let has_base = !matches!(config.image, Image::Layers { base: false, .. });
        let base = if has_base {
            Some(self.node.base_version().await.map_err(TransferError::Node)?)
        } else {
            None
        };
        Ok(Manifest {
            format: FORMAT,
            name,
            cpu_count: build.cpu_count,
            memory_mb: build.memory_mb,
            disk_mb: build.disk_mb,
            config: BuildSpec {
                layer_bytes: BTreeMap::new(),
                ..config.without_memory()
            },
            base,
            layers,
        })
    }

    /// A layer as an archive.
    pub(crate) async fn export_layer(&self, layer: &LayerId) -> Result<LayerStream, NodeError> {
        self.node.export_layer(layer).await
    }

    /// Makes a template of a file, or another build of the template that has its name.
    pub(crate) async fn import(
        &self,
        to: Destination,
        mut file: impl AsyncRead + Send + Unpin,
    ) -> Result<Imported, TransferError> {
        let text = read_manifest(&mut file).await?;
        let manifest = parse(&text)?;
        let name = match to.name {
            Some(name) => name,
            None => TemplateName::new(&manifest.name)
                .or_else(|_| refused("the name in the file is not one of a template: give another one"))?,
        };
        let tag = name.tag.as_deref().unwrap_or(DEFAULT_TAG);
        let tag = new_tag(tag).or_else(|error| refused(error.to_string()))?;
        if !name.is_own(self.rows.store(), &to.team).await? {
            return refused("the namespace is not that of the team");
        }
        let warning = self.check_base(manifest.base.as_ref(), to.any_base).await?;
        let pinned = self.pin_import(&manifest).await;
        self.read_layers(&manifest, &mut file).await?;
        self.keep_layers(layers_of(&manifest.config.image)).await?;
        // What the file says of their space is not believed.
        let known = self.node.layers().await.map_err(TransferError::Node)?;
        let own = layers_of(&manifest.config.image);
        let own = known.into_iter().filter(|layer| own.contains(&layer.id));
        let spec = BuildSpec {
            layer_bytes: own.map(|layer| (layer.id, layer.bytes)).collect(),
            ..manifest.config.clone().without_memory()
        };
        let spec_json =
            serde_json::to_string(&spec).or_else(|_| refused("the configuration in the file cannot be stored"))?;

        let template = new_template_id().map_err(std::io::Error::other)?;
        let build = BuildId::try_from(Uuid::new_v4().to_string()).map_err(std::io::Error::other)?;
        let now_us = self.clock.now_us();
        let new = NewBuild {
            team: to.team,
            target: BuildTarget::Alias(template),
            alias: Some(name.name),
            tags: vec![tag],
            build: build.clone(),
            cpu_count: manifest.cpu_count,
            memory_mb: manifest.memory_mb,
            disk_mb: manifest.disk_mb,
            request_json: None,
            // The operator is not limited.
            limit: u32::MAX,
            now_us,
        };
        let template = match self.rows.store().build_request(&new).await? {
            BuildRequested::Accepted { template, superseded } => {
                self.cancel(&superseded);
                template
            }
            BuildRequested::AliasIsId => return refused("the name is the id of a template: give another one"),
            BuildRequested::TooManyTags => return refused("the template has too many tags: remove some first"),
            BuildRequested::AliasTaken | BuildRequested::NoTemplate | BuildRequested::TooMany => {
                return refused("the template was changed or deleted meanwhile: try again");
            }
        };
        let is_ready = self
            .rows
            .build_import(&build, &spec_json, agent::VERSION, now_us)
            .await?;
        drop(pinned);
        if !is_ready {
            return refused("a newer build of the template was requested meanwhile");
        }
        tracing::info!(template.id = %template, build.id = %build, "made a template of a file");
        Ok(Imported {
            template,
            build,
            warning,
        })
    }

    /// Compares the `base` of a file with that of this host.
    async fn check_base(&self, of_file: Option<&BaseVersion>, any: bool) -> Result<Option<String>, TransferError> {
        let Some(of_file) = of_file else {
            return Ok(None);
        };
        let own = self.node.base_version().await.map_err(TransferError::Node)?;
        let systems = format!("{:?}, and that of this host is {:?}", of_file.system, own.system);
        match (own.system == of_file.system, own.packages == of_file.packages) {
            (true, true) => Ok(None),
            (true, false) => Ok(Some(
                "the template lies above `base` with other packages than this host has: what it runs may need them"
                    .to_owned(),
            )),
            (false, _) if any => Ok(Some(format!("the system below the template was {systems}"))),
            (false, _) => refused(format!(
                "the system below the template was {systems}: its programs and libraries would not fit together. \
                 `--any-base` pulls it nevertheless"
            )),
        }
    }

    async fn pin_import(&self, manifest: &Manifest) -> Pinned<'_> {
        self.pin_layers(manifest.layers.iter().map(|layer| layer.id.clone()).collect())
            .await
    }

    /// Keeps layers from being removed.
    pub(super) async fn pin_layers(&self, layers: HashSet<LayerId>) -> Pinned<'_> {
        let pins = Pins::default();
        *pins.lock() = layers;
        // What is being removed now is gone afterwards, and made anew.
        let _removal = self.removal.read().await;
        self.imports.lock().push(Arc::clone(&pins));
        Pinned { builds: self, pins }
    }

    /// Reads the layers of a file, those that the node has already included.
    async fn read_layers(
        &self,
        manifest: &Manifest,
        file: &mut (impl AsyncRead + Send + Unpin),
    ) -> Result<(), TransferError> {
        let known: HashSet<LayerId> = {
            let known = self.node.layers().await.map_err(TransferError::Node)?;
            known.into_iter().map(|layer| layer.id).collect()
        };
        for ManifestLayer { id, .. } in &manifest.layers {
            let Some((name, size)) = next_file(file).await? else {
                return refused(format!("layer {id} is missing: the file is truncated"));
            };
            if name != layer_name(id) {
                return Err(InvalidFile.into());
            }
            if known.contains(id) {
                skip(file, size).await?;
            } else {
                self.read_layer(id, file, size).await?;
            }
            skip(file, padding(size) as u64).await?;
        }
        match next_file(file).await? {
            None => {
                // The second block of the end, and what programs fill up with.
                let left = tokio::io::copy(&mut file.take(1 << 20), &mut tokio::io::sink()).await?;
                if left < 1 << 20 {
                    Ok(())
                } else {
                    Err(InvalidFile.into())
                }
            }
            Some(_) => Err(InvalidFile.into()),
        }
    }

    async fn read_layer(
        &self,
        id: &LayerId,
        file: &mut (impl AsyncRead + Send + Unpin),
        size: u64,
    ) -> Result<(), TransferError> {
        let (mut to, from) = tokio::io::duplex(BUFFER);
        let mut part = file.take(size);
        let copy = async move {
            let copied = tokio::io::copy(&mut part, &mut to).await;
            drop(to);
            copied
        };
        let import = self.node.import_layer(id, LAYER_MAX, LayerStream::new(from));
        tokio::pin!(copy, import);
        let (copied, imported) = tokio::select! {
            copied = &mut copy => (Some(copied), import.await),
            imported = &mut import => (None, imported),
        };
        if let Some(Ok(copied)) = &copied
            && *copied < size
        {
            return refused("the file is truncated");
        }
        imported.map_err(|error| TransferError::Layer {
            layer: id.clone(),
            error,
        })?;
        // A layer that is complete before its file is read has more in its file than it should.
        match copied {
            Some(copied) => copied.map(|_| ()).map_err(TransferError::Read),
            None => {
                let copied = copy.await.map_err(TransferError::Read)?;
                if copied == size {
                    Ok(())
                } else {
                    refused("the file is truncated")
                }
            }
        }
    }
}

async fn read_manifest(file: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, TransferError> {
    match next_file(file).await? {
        Some((name, size)) if name == MANIFEST && size <= MANIFEST_MAX => {
            let mut text = vec![0; usize::try_from(size).unwrap_or(0)];
            read_all(file, &mut text).await?;
            skip(file, padding(size) as u64).await?;
            Ok(text)
        }
        _ => Err(InvalidFile.into()),
    }
}

/// Checks what a file says about its template.
fn parse(text: &[u8]) -> Result<Manifest, TransferError> {
    #[derive(serde::Deserialize)]
    struct Version {
        format: u32,
    }
    let version: Version = serde_json::from_slice(text).or(Err(InvalidFile))?;
    if version.format != FORMAT {
        return refused(format!(
            "the file has format {}, and this version of the platform reads {FORMAT}",
            version.format
        ));
    }
    let manifest: Manifest = serde_json::from_slice(text)
        .or_else(|error| refused(format!("the manifest in the file is invalid: {error}")))?;
    let Image::Layers { base, layers } = &manifest.config.image else {
        return refused("the file is not of a template with layers");
    };
    let same = layers.iter().eq(manifest.layers.iter().map(|layer| &layer.id));
    if !same || *base != manifest.base.is_some() || layers.is_empty() || layers.len() > Image::LAYERS_MAX {
        return refused("the layers in the file do not fit together");
    }
    let sizes = [
        (manifest.cpu_count, MOST.cpu_count),
        (manifest.memory_mb, MOST.memory_mb),
        (manifest.disk_mb, MOST.disk_mb),
    ];
    if sizes.iter().any(|(size, most)| *size == 0 || size > most) {
        return refused("the sizes in the file are out of range");
    }
    Ok(manifest)
}

/// Name and size of the next file; none at the end.
async fn next_file(file: &mut (impl AsyncRead + Unpin)) -> Result<Option<(String, u64)>, TransferError> {
    let mut block = [0; BLOCK];
    read_all(file, &mut block).await?;
    Ok(template_file::parse_header(&block)?)
}

async fn read_all(file: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> Result<(), TransferError> {
    match file.read_exact(buffer).await {
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => refused("the file is truncated"),
        read => Ok(read.map(|_| ())?),
    }
}

async fn skip(file: &mut (impl AsyncRead + Unpin), size: u64) -> Result<(), TransferError> {
    let skipped = tokio::io::copy(&mut file.take(size), &mut tokio::io::sink()).await?;
    if skipped == size {
        Ok(())
    } else {
        refused("the file is truncated")
    }
}

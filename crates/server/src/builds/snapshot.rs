//! Builds that are made of a sandbox: its template's layers with one more, of what it has written.

use std::collections::HashSet;

use model::id::{BuildId, LayerId, SandboxId, TeamId, TemplateId};
use model::log::Level;
use protocol::agent;
use protocol::node::{CommittedCopy, CopiedDisk, CopiedMemory, Image, NodeError};
use store::builds::BuildLogRow;
use store::error::StoreError;
use store::snapshots::{MemoryOrigin, NameUse, NewSnapshot, SnapshotStored};

use super::Builds;
use super::objects::ObjectError;
use super::recipe::{BuildSpec, SnapshotMemory, layers_of};
use crate::chain::Chain;
use crate::ids::new_template_id;
use crate::node::NodeHandle;

/// A snapshot to make of a copied disk.
#[derive(Debug)]
pub(crate) struct SnapshotSource {
    /// The build that it becomes.
    pub(crate) build: BuildId,
    /// What a copy of its memory needs, if it has memory and there is to be a copy.
    pub(crate) origin: Option<MemoryOrigin>,
    /// The node on which the copy is.
    pub(crate) node: NodeHandle,
    /// The copied disk.
    pub(crate) copied: CopiedDisk,
    /// What the sandbox was started with.
    pub(crate) spec: BuildSpec,
    pub(crate) sandbox: SandboxId,
    /// The sandbox whose certificate authority its processes trust.
    pub(crate) authority: SandboxId,
    pub(crate) team: TeamId,
    pub(crate) cpu_count: u32,
    pub(crate) memory_mb: u32,
    pub(crate) disk_mb: u32,
    /// The name of the snapshot in the team.
    pub(crate) alias: Option<String>,
    pub(crate) tag: String,
    /// When the disk was copied, in microseconds since the Unix epoch.
    pub(crate) started_us: i64,
}

/// Why a copied disk did not become a snapshot.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SnapshotBuildError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error("the layers cannot be stored in the blob store")]
    Objects(#[from] ObjectError),
    #[error("the name of the snapshot is taken")]
    NameTaken(NameUse),
    #[error("the template has too many tags")]
    TooManyTags,
    #[error("no id for a template")]
    Random(#[from] getrandom::Error),
    #[error("the snapshot cannot be stored")]
    Invalid,
}

impl Builds {
    /// Makes a snapshot of a copied disk, which is removed in any case unless it is kept as the memory of the snapshot. Returns
    /// its template, and whether it has memory.
    pub(crate) async fn snapshot(
        &self,
        source: SnapshotSource,
    ) -> Result<(TemplateId, CopiedMemory), SnapshotBuildError> {
        let image = &source.copied.image;
        let below = layers_of(image);
        let merge = below.len() >= Image::LAYERS_MAX;
        let build = source.build;
        // Its sandbox may end, and its template be deleted, before the snapshot refers to them.
        let pinned = self.pin_layers(below.iter().cloned().collect()).await;
        let (wanted, _pending) = match source.copied.memory {
            CopiedMemory::Copied => (Some(&build), Some(self.expect_memory(&build))),
            CopiedMemory::Unwanted | CopiedMemory::Missing(_) => (None, None),
        };
        let CommittedCopy { layer, memory_bytes } = {
            let _removal = self.removal.read().await;
            let committed = source.node.commit_copy(&source.copied.disk, merge, wanted).await?;
            pinned.pins.lock().insert(committed.layer.layer.clone());
            committed
        };
        let memory = match (source.copied.memory.clone(), memory_bytes) {
            (CopiedMemory::Copied, None) => {
                CopiedMemory::Missing("the host could not write the processes to its disk".to_owned())
            }
            (copied, _) => copied,
        };
        let mut layers = if merge { Vec::new() } else { below.to_vec() };
        layers.push(layer.layer.clone());
        let named: HashSet<&LayerId> = layers.iter().chain(below).collect();
        let mut layer_bytes = source.spec.layer_bytes.clone();
        layer_bytes.insert(layer.layer, layer.bytes);
        layer_bytes.retain(|layer, _| named.contains(layer));
        if layer_bytes.len() < named.len() {
            // The sandbox is of a build of an earlier version.
            let known = source.node.layers().await.unwrap_or_default().into_iter();
            let known = known.filter(|layer| named.contains(&layer.id));
            layer_bytes.extend(known.map(|layer| (layer.id, layer.bytes)));
        }
        let base = !matches!(image, Image::Layers { base: false, .. });
        let spec = BuildSpec {
            image: Image::Layers { base, layers },
            memory: memory_bytes.map(|bytes| {
                Box::new(SnapshotMemory {
                    build: build.clone(),
                    image: image.clone(),
                    authority: source.authority,
                    bytes: Some(bytes),
                })
            }),
            layer_bytes,
            ..source.spec
        };
        self.keep_layers(layers_of(&spec.image)).await?;

        let new = NewSnapshot {
            team: source.team,
            template: new_template_id()?,
            alias: source.alias,
            tag: source.tag,
            build,
            sandbox: source.sandbox,
            cpu_count: source.cpu_count,
            memory_mb: source.memory_mb,
            disk_mb: source.disk_mb,
            spec_json: serde_json::to_string(&spec).map_err(|_| SnapshotBuildError::Invalid)?,
            agent_version: agent::VERSION.to_owned(),
            memory: source.origin.filter(|_| memory_bytes.is_some()),
            started_us: source.started_us,
            now_us: self.clock.now_us(),
        };
        match self.rows.snapshot_insert(&new).await? {
            SnapshotStored::Stored(template) => {
                let bytes = layer.bytes;
                tracing::info!(template.id = %template, build.id = %new.build, bytes, memory_bytes, "made a snapshot of a sandbox");
                self.log_memory(&new.build, &memory).await;
                Ok((template, memory))
            }
            SnapshotStored::NameTaken(taken) => Err(SnapshotBuildError::NameTaken(taken)),
            SnapshotStored::TooManyTags => Err(SnapshotBuildError::TooManyTags),
        }
    }

    /// Writes into the log of a build what is kept of the sandbox. The snapshot is complete without it.
    async fn log_memory(&self, build: &BuildId, memory: &CopiedMemory) {
        let (level, message) = match memory {
            CopiedMemory::Unwanted => return,
            CopiedMemory::Copied => (
                Level::Info,
                "the snapshot has the files, the memory and the processes of the sandbox".to_owned(),
            ),
            CopiedMemory::Missing(why) => (
                Level::Warn,
                format!("the snapshot has the files of the sandbox alone, because its memory could not be kept: {why}"),
            ),
        };
        let row = BuildLogRow {
            seq: 1,
            at_us: self.clock.now_us(),
            level,
            step: None,
            message,
        };
        if let Err(error) = self.rows.store().build_log_append(build, &[row]).await {
            tracing::warn!(build.id = %build, error = %Chain(&error), "cannot write the log of a snapshot");
        }
    }
}

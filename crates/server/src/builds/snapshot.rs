//! Builds that are made of a sandbox: its template's layers with one more, of what it has written.

use model::id::{BuildId, DiskId, SandboxId, TeamId, TemplateId};
use protocol::agent;
use protocol::node::{Committed, Image, NodeError};
use store::error::StoreError;
use store::snapshots::{NameUse, NewSnapshot, SnapshotStored};
use uuid::Uuid;

use super::Builds;
use super::objects::ObjectError;
use super::recipe::{BuildSpec, layers_of};

/// A snapshot to make of a copied disk.
#[derive(Debug)]
pub(crate) struct SnapshotSource {
    /// The copy.
    pub(crate) disk: DiskId,
    /// What the sandbox was started with.
    pub(crate) spec: BuildSpec,
    pub(crate) sandbox: SandboxId,
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
    /// Makes a snapshot of a copied disk, which is removed in any case. Returns its template.
    pub(crate) async fn snapshot(&self, source: SnapshotSource) -> Result<TemplateId, SnapshotBuildError> {
        let below = layers_of(&source.spec.image);
        let merge = below.len() >= Image::LAYERS_MAX;
        // Its sandbox may end, and its template be deleted, before the snapshot refers to them.
        let pinned = self.pin_layers(below.iter().cloned().collect()).await;
        let Committed { layer, bytes } = {
            let _removal = self.removal.read().await;
            let committed = self.node.commit_copy(&source.disk, merge).await?;
            pinned.pins.lock().insert(committed.layer.clone());
            committed
        };
        let mut layers = match merge {
            true => Vec::new(),
            false => below.to_vec(),
        };
        layers.push(layer);
        let base = !matches!(source.spec.image, Image::Layers { base: false, .. });
        let spec = BuildSpec {
            image: Image::Layers { base, layers },
            ..source.spec
        };
        self.keep_layers(layers_of(&spec.image)).await?;

        let mut random = [0; 20];
        getrandom::fill(&mut random)?;
        let new = NewSnapshot {
            team: source.team,
            template: TemplateId::from_random(&random),
            alias: source.alias,
            tag: source.tag,
            build: BuildId::try_from(Uuid::new_v4().to_string()).map_err(|_| SnapshotBuildError::Invalid)?,
            sandbox: source.sandbox,
            cpu_count: source.cpu_count,
            memory_mb: source.memory_mb,
            disk_mb: source.disk_mb,
            spec_json: serde_json::to_string(&spec).map_err(|_| SnapshotBuildError::Invalid)?,
            agent_version: agent::VERSION.to_owned(),
            started_us: source.started_us,
            now_us: self.clock.now_us(),
        };
        match self.rows.snapshot_insert(&new).await? {
            SnapshotStored::Stored(template) => {
                tracing::info!(template.id = %template, build.id = %new.build, bytes, "made a snapshot of a sandbox");
                Ok(template)
            }
            SnapshotStored::NameTaken(taken) => Err(SnapshotBuildError::NameTaken(taken)),
            SnapshotStored::TooManyTags => Err(SnapshotBuildError::TooManyTags),
        }
    }
}

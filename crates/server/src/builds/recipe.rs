//! The recipe of a build, and its result.

use std::collections::BTreeMap;

use model::id::{BuildId, LayerId, SandboxId, TemplateId};
use model::secret::Secret;
use protocol::node::Image;
use protocol::process::ProcessConfig;
use serde::{Deserialize, Serialize};
use store::builds::BuildRow;

use crate::agent::login_shell;

/// A recipe: what a client asks a build to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Recipe {
    /// What the build begins with.
    pub(crate) source: Source,
    /// Steps of the build, in order.
    pub(crate) steps: Vec<Step>,
    /// What sandboxes run from their start on; an empty text is as good as none.
    pub(crate) start_cmd: Option<String>,
    /// What says that the sandbox is ready by ending with 0.
    pub(crate) ready_cmd: Option<String>,
    /// Whether nothing is taken from the cache.
    pub(crate) force: bool,
    /// Whether steps run as root unless they say otherwise, and sandboxes have the default user whatever the steps say:
    /// what SDKs before 2.3.0 expect.
    pub(crate) steps_as_root: bool,
}

/// What a build begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    /// The built-in `base`.
    Base,
    /// A build of a template, which was resolved when this build was started.
    Template {
        /// Id of the build.
        build: BuildId,
        /// Contents of the build.
        spec: BuildSpec,
    },
    /// An image of an OCI registry.
    Image {
        /// Name of the image, as the client sent it.
        reference: String,
        /// The credentials for its registry. They are never stored with the recipe.
        #[serde(skip)]
        registry: Option<Registry>,
    },
    /// An image, or the files of a file system, in an archive that the team uploaded under this hash.
    Archive {
        /// The hash.
        hash: String,
    },
    /// An empty file system.
    Scratch,
    /// The stages of a Dockerfile.
    Dockerfile(DockerfileSource),
}

/// Names of the image that SDKs take if a client names none. This platform has it built in.
const BASE_IMAGES: [&str; 4] = [
    "e2bdev/base",
    "e2bdev/base:latest",
    "docker.io/e2bdev/base",
    "docker.io/e2bdev/base:latest",
];

impl Source {
    /// The credentials of the source in the form in which they are sealed; none if there are none.
    pub(crate) fn to_seal(&self) -> Option<serde_json::Result<String>> {
        match self {
            Self::Image {
                registry: Some(registry),
                ..
            } => Some(serde_json::to_string(registry)),
            Self::Dockerfile(file) if !file.registries.is_empty() => Some(serde_json::to_string(&file.registries)),
            Self::Base
            | Self::Template { .. }
            | Self::Image { .. }
            | Self::Archive { .. }
            | Self::Scratch
            | Self::Dockerfile(_) => None,
        }
    }

    /// Puts the credentials back that [`Self::to_seal`] gave.
    pub(crate) fn unsealed(&mut self, text: &str) -> serde_json::Result<()> {
        match self {
            Self::Image { registry, .. } => *registry = Some(serde_json::from_str(text)?),
            Self::Dockerfile(file) => file.registries = serde_json::from_str(text)?,
            Self::Base | Self::Template { .. } | Self::Archive { .. } | Self::Scratch => {}
        }
        Ok(())
    }

    /// Creates the source of an image with this name.
    pub(crate) fn image(reference: &str, registry: Option<Registry>) -> Self {
        if BASE_IMAGES.contains(&reference) {
            Self::Base
        } else {
            Self::Image {
                reference: reference.to_owned(),
                registry,
            }
        }
    }
}

/// A Dockerfile with what its build needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DockerfileSource {
    /// The Dockerfile.
    pub(crate) text: String,
    /// Arguments of the build.
    #[serde(default)]
    pub(crate) args: BTreeMap<String, String>,
    /// The stage to build; none for the last one.
    #[serde(default)]
    pub(crate) target: Option<String>,
    /// The hashes of uploaded archives with the files of COPY and ADD, by the line of the instruction.
    #[serde(default)]
    pub(crate) files: BTreeMap<usize, String>,
    /// The credentials for the registries of its images, by host. They are never stored with the recipe.
    #[serde(skip)]
    pub(crate) registries: Logins,
}

/// Credentials for registries, by `host` or `host:port`.
pub(crate) type Logins = BTreeMap<String, Registry>;

impl DockerfileSource {
    /// Parses the Dockerfile for this host.
    pub(crate) fn plan(&self) -> Result<dockerfile::Plan, dockerfile::Refusal> {
        let arch = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        dockerfile::Plan::parse(&self.text, self.target.as_deref(), &self.args, &format!("linux/{arch}"))
    }
}

/// The credentials for a registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Registry {
    /// A user of the registry.
    Basic { username: String, password: Secret },
    /// A key of Amazon, with which a password of ECR is requested.
    Aws {
        access_key_id: String,
        secret_access_key: Secret,
        region: String,
    },
    /// A key of a service account of Google.
    Gcp {
        /// Key of the service account, in JSON.
        service_account: Secret,
    },
}

/// One step of a build, as the client sent it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Step {
    /// Kind of the step, in either case and unchecked: `RUN`, `COPY` and so on.
    pub(crate) kind: String,
    pub(crate) args: Vec<String>,
    /// The uploaded archive that the step copies from.
    pub(crate) files_hash: Option<String>,
    /// Whether this step and all later ones take nothing from the cache.
    pub(crate) force: bool,
}

/// What sandboxes of a build are started with. It is stored with the build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BuildSpec {
    /// File system of the sandboxes.
    pub(crate) image: Image,
    /// The environment that steps have set, for later builds that begin with this one. Commands of clients do not get
    /// it.
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
    /// The user of commands and files unless a request names another one; none for the usual.
    #[serde(default)]
    pub(crate) user: Option<String>,
    /// Where commands run unless a request says otherwise; none for the home of their user.
    #[serde(default)]
    pub(crate) workdir: Option<String>,
    /// What runs from the start on.
    #[serde(default)]
    pub(crate) start: Option<StartCommand>,
    /// The processes of a snapshot, with which they go on instead. Of this build on its node alone, so nothing else that is
    /// made of it has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) memory: Option<Box<SnapshotMemory>>,
    /// Space that its layers took when they were made, in bytes: a server may not be connected to a node that has them. Builds of
    /// earlier versions do not say it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) layer_bytes: BTreeMap<LayerId, u64>,
}

/// The memory of a snapshot, which its node keeps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotMemory {
    /// The build of the snapshot.
    pub(crate) build: BuildId,
    /// The image that its disk lies above. Another one than that of the snapshot, whose layers include what is on that disk.
    pub(crate) image: Image,
    /// The sandbox whose certificate authority the processes trust.
    pub(crate) authority: SandboxId,
    /// Space that the memory took when it was made, in bytes. Snapshots of earlier versions do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bytes: Option<u64>,
}

impl BuildSpec {
    /// Reads the spec of a stored build; none if it cannot be read.
    pub(crate) fn of(build: &BuildRow) -> Option<Self> {
        match (&build.spec_json, &build.node_id) {
            (Some(json), _) => serde_json::from_str(json).ok(),
            // Builds of `base`, which every node has.
            (None, None) => Some(Self::base()),
            (None, Some(_)) => None,
        }
    }

    /// The spec of the built-in `base`.
    pub(crate) fn base() -> Self {
        Self {
            image: Image::Base,
            env: BTreeMap::new(),
            user: None,
            workdir: None,
            start: None,
            memory: None,
            layer_bytes: BTreeMap::new(),
        }
    }

    /// The spec without the memory of a snapshot, for what is made of it.
    pub(crate) fn without_memory(self) -> Self {
        Self { memory: None, ..self }
    }
}

/// What sandboxes run from their start on, and in which context.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StartCommand {
    /// The command, which goes on running; none if only readiness is waited for.
    pub(crate) command: Option<String>,
    /// What says that the sandbox is ready by ending with 0.
    pub(crate) ready: Option<String>,
    pub(crate) user: String,
    /// None for the home of the user.
    pub(crate) workdir: Option<String>,
    pub(crate) env: BTreeMap<String, String>,
}

impl StartCommand {
    /// One of its commands, as a process.
    pub(crate) fn process(&self, command: &str) -> ProcessConfig {
        login_shell(command, self.env.clone(), self.workdir.clone())
    }
}

/// A build to run.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) template: TemplateId,
    pub(crate) recipe: Recipe,
    /// Disk of the sandboxes of the build, in MiB.
    pub(crate) disk_mb: u32,
}

/// What comes of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BuildResult {
    /// What its sandboxes are started with.
    pub(crate) spec: BuildSpec,
    /// Disk of the sandboxes, in MiB.
    pub(crate) disk_mb: u32,
}

/// Why a build failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub(crate) struct BuildFailure {
    /// Message for the user who started the build.
    pub(crate) message: String,
    /// The step that failed: `base`, a number from 1, or `finalize`; none if no step did.
    pub(crate) step: Option<String>,
}

impl BuildFailure {
    /// A failure of a step.
    pub(crate) fn at(step: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            message: message.into(),
            step: Some(step.into()),
        }
    }

    /// A failure that is not the client's fault and has no details for it; the cause is in the log of the platform.
    pub(crate) fn internal() -> Self {
        Self {
            message: "the build failed because of an internal error of the platform: try again, or ask its operator"
                .to_owned(),
            step: None,
        }
    }
}

/// The layers of an image.
pub(crate) fn layers_of(image: &Image) -> &[LayerId] {
    match image {
        Image::Layers { layers, .. } => layers,
        Image::Base | Image::Import | Image::Copy { .. } => &[],
    }
}

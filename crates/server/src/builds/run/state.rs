//! What one step of a build leaves to the next.

use std::collections::BTreeMap;

use model::id::LayerId;
use protocol::node::{Image, LayerStack};
use protocol::process::ProcessConfig;
use serde::{Deserialize, Serialize};

use crate::agent::login_shell;

/// The user of sandboxes, who exists in every template.
pub(super) const USER: &str = "user";
/// Directories that a login shell must have in its path.
pub(super) const PATHS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What a step leaves to the next one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    /// Whether the layers lie above `base`.
    pub(super) base: bool,
    /// The layers, lowest first.
    pub(super) layers: Vec<LayerId>,
    pub(super) env: BTreeMap<String, String>,
    pub(super) user: String,
    pub(super) workdir: Option<String>,
    /// The entry point of the image that it began with, for Dockerfiles.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) entrypoint: Vec<String>,
}

impl State {
    pub(super) fn image(&self) -> Image {
        if self.base && self.layers.is_empty() {
            Image::Base
        } else {
            Image::Layers {
                base: self.base,
                layers: self.layers.clone(),
            }
        }
    }

    /// The layers, as what is copied from or to.
    pub(super) fn stack(&self) -> LayerStack {
        LayerStack {
            base: self.base,
            layers: self.layers.clone(),
        }
    }

    /// The environment of commands.
    pub(super) fn envs(&self) -> BTreeMap<String, String> {
        let mut envs = self.env.clone();
        if let Some(path) = envs.get_mut("PATH") {
            let missing = PATHS
                .split(':')
                .filter(|directory| !path.split(':').any(|have| have == *directory));
            let missing: Vec<&str> = missing.collect();
            if !missing.is_empty() {
                *path = format!("{path}:{}", missing.join(":"));
            }
        }
        envs
    }

    /// A command of the login shell in this state.
    pub(super) fn shell(&self, command: &str) -> ProcessConfig {
        login_shell(command, self.envs(), self.workdir.clone())
    }
}

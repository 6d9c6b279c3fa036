//! The specification of a sandbox.

mod network;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use self::network::{HostMask, InvalidHostMask, InvalidNetwork, NetworkSpec};
use crate::id::{BuildId, TemplateId};
use crate::lifecycle::Kept;

/// The specification of a sandbox: template, lifetime, resources and network. Its id and its owner are not part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxSpec {
    /// The template that the sandbox is created from.
    pub template: TemplateId,
    /// The build of the template.
    pub build: BuildId,
    /// The name of the template that clients are shown.
    pub alias: Option<String>,
    /// Cores.
    pub cpu_count: u32,
    /// Memory, in MiB.
    pub memory_mb: u32,
    /// Disk, in MiB.
    pub disk_mb: u32,
    /// The expected version of its agent, until the agent reports its own.
    pub agent_version: String,
    /// Time from the start until the deadline, in seconds, unless the deadline is changed.
    pub timeout_s: u32,
    /// Longest time from the start to the deadline after any change, in seconds.
    pub max_lifetime_s: u32,
    /// Labels that the client chose.
    pub metadata: BTreeMap<String, String>,
    /// Environment variables of its processes.
    pub env_vars: EnvVars,
    /// Whether its agent requires a token.
    pub secure: bool,
    /// The requested internet access; none when the request did not set it.
    pub allow_internet_access: Option<bool>,
    /// The requested network settings; none when the request had none.
    pub network: Option<NetworkSpec>,
    /// What happens at its deadline.
    pub lifecycle: LifecycleSpec,
}

/// What happens to a sandbox at its deadline, and on traffic while it is paused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LifecycleSpec {
    /// The sandbox is paused at its deadline, and not killed.
    pub auto_pause: bool,
    /// Its processes are given up when it is paused at its deadline, and only its disk is kept.
    #[serde(default)]
    pub auto_pause_discards: bool,
    /// Traffic to the sandbox resumes it.
    pub auto_resume: bool,
    /// A client has paused it and wanted its disk alone, which traffic does not resume.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub paused_for_files: bool,
    /// The requested time from the start until the deadline, in seconds, which a resume by traffic uses again.
    pub timeout_s: u32,
}

impl LifecycleSpec {
    /// What is kept of it when it is paused at its deadline.
    #[must_use]
    pub fn keep(&self) -> Kept {
        if self.auto_pause_discards {
            Kept::Filesystem
        } else {
            Kept::Memory
        }
    }
}

/// Environment variables. Their values may be secrets, so they are not logged, and stored only encrypted.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct EnvVars(BTreeMap<String, String>);

impl EnvVars {
    /// Environment variables from a map; none when a name is empty or contains `=`, or a name or a value contains NUL:
    /// no process can have such a variable.
    #[must_use]
    pub fn new(variables: BTreeMap<String, String>) -> Option<Self> {
        let is_variable = |(name, value): (&String, &String)| {
            !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0')
        };
        variables.iter().all(is_variable).then_some(Self(variables))
    }

    /// The variables, by name.
    #[must_use]
    pub fn into_map(self) -> BTreeMap<String, String> {
        self.0
    }
}

impl fmt::Debug for EnvVars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EnvVars({})", self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_environment_variables_are_refused() {
        let one = |name: &str, value: &str| EnvVars::new([(name.to_owned(), value.to_owned())].into());
        assert!(EnvVars::new(BTreeMap::new()).is_some());
        assert!(one("A", "a=b").is_some() && one("A", "").is_some() && one("é ", "\n").is_some());
        for (name, value) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0y")] {
            assert!(one(name, value).is_none(), "{name:?}={value:?}");
        }
    }

    #[test]
    fn debug_output_shows_no_value() {
        let vars = EnvVars::new([("TOKEN".to_owned(), "a secret".to_owned())].into()).expect("a variable");
        assert_eq!(format!("{vars:?}"), "EnvVars(1)");
    }
}

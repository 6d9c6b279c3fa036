//! What a sandbox is to be.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::{BuildId, TemplateId};

/// What a sandbox is to be: what it is made of, how long it lives, what it may use, and how it is reached. Whoever asks
/// for it, and which id it gets, is not part of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxSpec {
    /// The template it is made of.
    pub template: TemplateId,
    /// The build of that template.
    pub build: BuildId,
    /// The name of the template that is shown for it.
    pub alias: Option<String>,
    /// Cores.
    pub cpu_count: u32,
    /// Memory, in MiB.
    pub memory_mb: u32,
    /// Disk, in MiB.
    pub disk_mb: u32,
    /// The version of its agent, as far as it is known before the agent answers.
    pub agent_version: String,
    /// Seconds from the moment it runs until it ends, unless that is changed.
    pub timeout_s: u32,
    /// Seconds from its start that no change of its end may exceed.
    pub max_lifetime_s: u32,
    /// Labels.
    pub metadata: BTreeMap<String, String>,
    /// Environment of its processes.
    pub env_vars: EnvVars,
    /// Whether its agent asks for a token.
    pub secure: bool,
    /// What was asked for about the internet, if anything was.
    pub allow_internet_access: Option<bool>,
    /// How it is reached, if anything was asked for.
    pub network: Option<NetworkSpec>,
}

/// How a sandbox is reached. A column stores it as JSON, and clients are shown that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// Whether its ports answer without a token.
    pub allow_public_traffic: bool,
}

/// Environment variables, whose values no log shows and no row holds: they may be secrets.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct EnvVars(BTreeMap<String, String>);

impl EnvVars {
    /// The variables of a map; none when a name is empty or has an `=`, or a NUL is in a name or a value, for no process
    /// can have such a variable.
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
    fn what_no_process_can_have_is_no_variable() {
        let one = |name: &str, value: &str| EnvVars::new([(name.to_owned(), value.to_owned())].into());
        assert!(EnvVars::new(BTreeMap::new()).is_some());
        assert!(one("A", "a=b").is_some() && one("A", "").is_some() && one("é ", "\n").is_some());
        for (name, value) in [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0y")] {
            assert!(one(name, value).is_none(), "{name:?}={value:?}");
        }
    }

    #[test]
    fn no_value_is_printed() {
        let vars = EnvVars::new([("TOKEN".to_owned(), "a secret".to_owned())].into()).expect("a variable");
        assert_eq!(format!("{vars:?}"), "EnvVars(1)");
    }
}

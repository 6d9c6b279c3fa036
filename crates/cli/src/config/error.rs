//! What is wrong with a configuration, and where the value came from.

use std::fmt;

/// An error in the configuration. The operator has to correct it, so the exit code is that of a usage error.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// An invalid value.
    #[error("{key}: {why} ({source_of})")]
    Value {
        /// The key, with the team's name where it is a team's.
        key: String,
        /// What is wrong with the value.
        why: String,
        /// Where the value came from.
        source_of: Source,
    },
    /// A key that requires another one.
    #[error("{key}: requires {other}")]
    Requires {
        /// The key.
        key: &'static str,
        /// The key that is not set.
        other: &'static str,
    },
    /// A key that excludes another one.
    #[error("{key}: cannot be set together with {other}")]
    Excludes {
        /// The key.
        key: &'static str,
        /// The other key that is set.
        other: &'static str,
    },
    /// A key that does not exist.
    #[error("unknown key {name} in {file}{}", .meant.map(|key| format!("; did you mean {key}?")).unwrap_or_default())]
    Unknown {
        /// The key as written.
        name: String,
        /// The file.
        file: String,
        /// A key with a similar name.
        meant: Option<&'static str>,
    },
    /// A configuration file that cannot be read.
    #[error("configuration file {file}: {why}")]
    File {
        /// The file.
        file: String,
        /// What the system or the parser said.
        why: String,
    },
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// A flag.
    Flag(&'static str),
    /// An environment variable.
    Env(String),
    /// The configuration file.
    File(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => write!(f, "from the flag {flag}"),
            Self::Env(name) => write!(f, "from the environment variable {name}"),
            Self::File(path) => write!(f, "from {path}"),
        }
    }
}

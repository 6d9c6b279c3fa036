//! Severity of log entries of a sandbox.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Severity of a log entry of a sandbox, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// For debugging the platform.
    Debug,
    /// Reports about normal operation.
    Info,
    /// A problem that was handled, or that could cause a later failure.
    Warn,
    /// Reports about a failure.
    Error,
}

/// The error for a text that is not the name of a [`Level`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be debug, info, warn or error")]
pub struct UnknownLevel;

impl Level {
    /// Every level, in ascending order.
    pub const ALL: [Self; 4] = [Self::Debug, Self::Info, Self::Warn, Self::Error];

    /// The name on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Level {
    type Err = UnknownLevel;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|level| level.as_str() == text)
            .ok_or(UnknownLevel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_round_trip_and_are_ordered() {
        for level in Level::ALL {
            assert_eq!(level.as_str().parse(), Ok(level));
            assert_eq!(serde_json::to_value(level).unwrap(), level.as_str());
        }
        assert!(Level::ALL.is_sorted());
        for unknown in ["", "INFO", "warning", "fatal", "info "] {
            assert_eq!(unknown.parse::<Level>(), Err(UnknownLevel), "{unknown}");
        }
    }
}

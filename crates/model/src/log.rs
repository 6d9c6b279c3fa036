//! Severity of what a sandbox's log tells.

use std::fmt;
use std::str::FromStr;

/// Severity of an entry in a sandbox's log, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// For whoever looks into the platform itself.
    Debug,
    /// What is to be expected.
    Info,
    /// Something that was mended, or could be the reason of a later failure.
    Warn,
    /// Something that failed.
    Error,
}

/// A word that names no [`Level`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a level is debug, info, warn or error")]
pub struct UnknownLevel;

impl Level {
    /// Every level, least first.
    pub const ALL: [Self; 4] = [Self::Debug, Self::Info, Self::Warn, Self::Error];

    /// The word for it on the wire.
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
    fn levels_are_read_back_and_ordered() {
        for level in Level::ALL {
            assert_eq!(level.as_str().parse(), Ok(level));
        }
        assert!(Level::ALL.is_sorted());
        for unknown in ["", "INFO", "warning", "fatal", "info "] {
            assert_eq!(unknown.parse::<Level>(), Err(UnknownLevel), "{unknown}");
        }
    }
}

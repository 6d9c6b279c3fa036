//! The ways to isolate sandboxes that there are: the one list of drivers. Whoever needs a driver, or wants to know what
//! the host lacks for one, asks here and knows no driver by its type.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;

use crate::container::ContainerDriver;
use crate::driver::Driver;
use crate::probe::{self, Check};
use crate::settings::DriverSettings;

/// A way to isolate sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Isolation {
    /// Containers: namespaces, control groups and a filter of system calls, on the kernel of the host.
    #[default]
    Container,
}

impl Isolation {
    /// Every one of them.
    pub const ALL: &[Self] = &[Self::Container];

    /// The name by which an operator chooses it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
        }
    }

    /// Opens its driver. Blocks for seconds when `base` has to be made.
    ///
    /// # Errors
    /// When the host lacks something or the data directory cannot be used.
    pub fn open(self, settings: &DriverSettings) -> io::Result<Arc<dyn Driver>> {
        match self {
            Self::Container => Ok(ContainerDriver::open(settings)?),
        }
    }

    /// Checks what the host has of what its driver needs. Changes nothing, and needs no open driver.
    #[must_use]
    pub fn probe(self, settings: &DriverSettings) -> Vec<Check> {
        match self {
            Self::Container => probe::containers(settings),
        }
    }
}

impl fmt::Display for Isolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isolation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|isolation| isolation.name() == text);
        found.copied().ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|isolation| isolation.name()).collect();
            format!("{text:?} is unknown: must be {}", names.join(" or "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_isolation_is_refused_with_what_there_is() {
        for isolation in Isolation::ALL {
            assert_eq!(isolation.to_string().parse(), Ok(*isolation));
        }
        let why = "microvm".parse::<Isolation>().unwrap_err();
        assert_eq!(why, r#""microvm" is unknown: must be container"#);
    }
}

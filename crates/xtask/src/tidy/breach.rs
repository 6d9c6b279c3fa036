//! A place where a rule is broken.

use std::fmt;

/// One place where a rule is broken.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Breach {
    /// The rule's name, by which exceptions refer to it.
    pub(super) rule: &'static str,
    /// The file, relative to the repository, or the crate or package.
    pub(super) subject: String,
    /// What is wrong and what to do.
    pub(super) message: String,
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.rule, self.subject, self.message)
    }
}

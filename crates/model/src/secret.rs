//! A text that must not be shown.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A password, a key, or another text that must not be shown. `Debug` hides it. It serializes as the text itself, for
/// messages to a node; what is stored or answered must not contain it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Creates a secret of this text.
    #[must_use]
    pub fn new(text: String) -> Self {
        Self(text)
    }

    /// The text, which must not be shown.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(hidden)")
    }
}

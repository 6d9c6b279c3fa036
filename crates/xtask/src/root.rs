//! Path of the repository.

use std::path::{Path, PathBuf};

/// Returns the path of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

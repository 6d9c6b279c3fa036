//! The address of the database, which may hold a password.

use std::fmt;
use std::path::{Path, PathBuf};

/// The address of the database. Its `Debug` shows the kind only: the address may hold a password.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct DatabaseUrl(String);

impl DatabaseUrl {
    /// The database in a data directory.
    pub(crate) fn within(data_dir: &Path) -> Self {
        Self(format!("sqlite:{}/ringfence.db", data_dir.display()))
    }

    /// The file, if it is one.
    pub(crate) fn file(&self) -> Option<PathBuf> {
        let path = self.0.strip_prefix("sqlite:")?;
        Some(PathBuf::from(path.strip_prefix("//").unwrap_or(path)))
    }

    /// The address, to be passed to the store only.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.0.split(':').next().unwrap_or_default();
        write!(f, "DatabaseUrl({kind}:…)")
    }
}

/// Never quotes the value: it may hold a password.
pub(super) fn database(text: &str) -> Result<DatabaseUrl, &'static str> {
    let known = ["sqlite:", "postgres://", "postgresql://"];
    if !known.iter().any(|scheme| text.starts_with(scheme)) {
        return Err("must begin with sqlite: or postgres://");
    }
    Ok(DatabaseUrl(text.to_owned()))
}

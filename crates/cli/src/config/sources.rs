//! The values that are given, by source, and which of them counts.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::error::{ConfigError, Source};
use super::file::File;
use super::keys::{Key, Set};

/// The environment, as far as it may configure anything: `RINGFENCE_*` and the two variables that `bench` reads.
#[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
pub(crate) fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, value)| {
            (name.starts_with("RINGFENCE_") || name == "E2B_API_KEY" || name == "E2B_API_URL") && !value.is_empty()
        })
        .collect()
}

/// A variable that is for a program elsewhere and configures nothing here: one that the command line names, or the kind of the
/// terminal.
#[expect(clippy::disallowed_methods, reason = "beside the place that reads the environment")]
pub(crate) fn passed_on(name: &str) -> Option<String> {
    std::env::var_os(name)?.into_string().ok()
}

/// The unresolved values, by source.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    /// Flags that were given: the key's name and the value.
    pub(crate) flags: Vec<(&'static Key, String)>,
    /// The file named by `--config`.
    pub(crate) config: Option<PathBuf>,
    /// The environment, see [`environment`].
    pub(crate) env: BTreeMap<String, String>,
}

impl Sources {
    /// The configuration file, if there is one.
    pub(crate) fn file_path(&self) -> Option<PathBuf> {
        let of_env = || self.env.get("RINGFENCE_CONFIG").map(PathBuf::from);
        self.config.clone().or_else(of_env)
    }
}

/// All sources together.
pub(super) struct Given<'a> {
    pub(super) sources: &'a Sources,
    pub(super) file: File,
}

impl Given<'_> {
    /// The value of a key and its source, of those that have it the one with the highest precedence.
    pub(super) fn source(&self, key: &'static Key) -> Option<(&str, Source)> {
        let flag = self.sources.flags.iter().find(|(given, _)| given.name == key.name);
        if let Some((key, text)) = flag {
            Some((text, Source::Flag(key.flag.unwrap_or(key.name))))
        } else if let Some(text) = self.sources.env.get(&key.env()) {
            Some((text, Source::Env(key.env())))
        } else {
            let text = self.file.values.get(key.name)?;
            Some((text, Source::File(self.file.path.clone())))
        }
    }

    /// The parsed value of a key from the source with the highest precedence; none if it is not set.
    pub(super) fn parse<T>(
        &self,
        key: &'static Key,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        let Some((text, source_of)) = self.source(key) else {
            return Ok(None);
        };
        parse(text).map(Some).map_err(|why| ConfigError::Value {
            key: key.name.to_owned(),
            why,
            source_of,
        })
    }

    /// Sets what a key means, if it is given.
    pub(super) fn set<T>(&self, key: &'static Key, set: Set<T>, to: &mut T) -> Result<(), ConfigError> {
        self.parse(key, |text| set(to, text)).map(drop)
    }
}

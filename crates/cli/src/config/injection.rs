//! The master key, and the providers of injection rules.

use model::injection::provider::{OwnProvider, Providers};
use model::secret::Secret;

use super::error::{ConfigError, Source};
use super::keys;
use super::sources::Given;
use super::values::file;
use crate::master_key::{self, KeySource, MASTER_ENV};

impl Given<'_> {
    /// Where the master key comes from.
    pub(super) fn master_key(&self) -> Result<KeySource, ConfigError> {
        let path = self.parse(keys::MASTER_KEY_FILE, file)?;
        let Some(key) = self.sources.env.get(MASTER_ENV) else {
            return Ok(path.map_or(KeySource::DataDir, KeySource::File));
        };
        if path.is_some() {
            return Err(ConfigError::Excludes {
                key: MASTER_ENV,
                other: keys::MASTER_KEY_FILE.name,
            });
        }
        if master_key::parse(key).is_none() {
            return Err(ConfigError::Value {
                key: "master key".to_owned(),
                why: "must be exactly 64 hexadecimal characters".to_owned(),
                source_of: Source::Env(MASTER_ENV.to_owned()),
            });
        }
        Ok(KeySource::Environment(Secret::new(key.clone())))
    }

    /// The built-in providers and those of the file.
    pub(super) fn providers(&self) -> Result<Providers, ConfigError> {
        let mut providers = Providers::default();
        for (name, table) in &self.file.providers {
            let invalid = |why: String| ConfigError::Value {
                key: format!("{}.{name}", keys::PROVIDER),
                why,
                source_of: Source::File(self.file.path.clone()),
            };
            let text = |key: &str| {
                let value = table.get(key).and_then(toml::Value::as_str);
                value.ok_or_else(|| invalid(format!("{key} must be a string in quotes")))
            };
            let hosts: Vec<&str> = text("host")?.split(',').map(str::trim).collect();
            let own = OwnProvider {
                name,
                hosts: &hosts,
                header: text("header")?,
                value: text("value")?,
            };
            providers.add(&own).map_err(|error| invalid(error.to_string()))?;
        }
        Ok(providers)
    }
}

//! The master key, and settings of injection rules.

use model::secret::Secret;

use super::{ConfigError, Given, Source, file, keys};
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
}

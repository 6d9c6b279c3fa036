//! Configuration: resolves flags, environment, file and defaults into a validated [`Config`].
//!
//! Precedence: flag, then environment, then file, then default. Every error names the key and where its value came
//! from, and no error shows the value of a key that may hold a secret. An environment variable that is set but empty
//! counts as unset, because container tools pass on variables that nobody filled.
//!
//! Invariant: this is the only module of the platform that reads the environment.

pub(crate) mod blobs;
mod bucket;
pub(crate) mod builds;
pub(crate) mod database_url;
pub(crate) mod egress;
mod error;
mod file;
mod https;
mod injection;
mod key;
pub(crate) mod keys;
mod limits;
mod mcp;
mod receiver;
pub(crate) mod reference;
mod resolved;
mod sources;
mod suggest;
mod teams;
pub(crate) mod telemetry;
mod values;

#[cfg(test)]
mod tests;

use std::path::PathBuf;

use self::database_url::{DatabaseUrl, database};
pub(crate) use self::error::ConfigError;
use self::file::File;
pub(crate) use self::resolved::Config;
use self::sources::Given;
pub(crate) use self::sources::{Sources, environment, passed_on};
pub(crate) use self::suggest::similar_variable;
pub(crate) use self::values::LogFormat;
use crate::master_key::MASTER_ENV;

/// Variables with our prefix that are no configuration keys: the first is the master key itself, the credentials file
/// defines the next two, one is read before any key, and the last is how our own test suites name the program under test.
const OTHER_ENV: [&str; 6] = [
    MASTER_ENV,
    blobs::KEY_ENV,
    "RINGFENCE_ACCESS_KEY",
    "RINGFENCE_SECRET_KEY",
    "RINGFENCE_CONFIG",
    "RINGFENCE_BIN",
];

impl Sources {
    /// Resolves every key.
    ///
    /// # Errors
    /// At the first invalid value.
    pub(crate) fn resolve(&self) -> Result<Config, ConfigError> {
        let file = self
            .file_path()
            .map(|path| File::read(&path))
            .transpose()?
            .unwrap_or_default();
        let given = Given { sources: self, file };
        let mut config = Config::new(PathBuf::from(keys::DATA_DIR.default));
        for key in keys::ALL {
            if let Some(set) = key.set {
                given.set(key, set, &mut config)?;
            }
        }
        // What depends on more than one key.
        let database_url = given.parse(keys::DATABASE_URL, |text| database(text).map_err(str::to_owned))?;
        config.database_url = database_url.unwrap_or_else(|| DatabaseUrl::within(&config.data_dir));
        config.https = given.https()?;
        config.providers = given.providers()?;
        config.master_key = given.master_key()?;
        config.limits = given.limits()?;
        config.blobs = given.blobs()?;
        config.telemetry = given.telemetry()?;
        config.node.driver.data_dir.clone_from(&config.data_dir);
        config.node.driver.disks_mb = vec![config.resources.disk_mb];
        config.node.disk_floor_mb = config.capacity.disk_floor_mb;
        if config.node.driver.reserve_disks {
            config.capacity.disk_per_sandbox_mb = config.resources.disk_mb;
        }
        config.node.capacity = config.capacity.bounds();
        let names = self.env.keys().filter(|name| name.starts_with("RINGFENCE_"));
        let is_known = |name: &str| OTHER_ENV.contains(&name) || keys::ALL.iter().any(|key| key.env() == name);
        config.unknown_env = names.filter(|name| !is_known(name)).cloned().collect();
        Ok(config)
    }
}

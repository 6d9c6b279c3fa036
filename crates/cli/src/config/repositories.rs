//! Settings of the repositories that sandboxes get.

use server::settings::RepositorySettings;

use super::error::ConfigError;
use super::keys;
use super::sources::Given;
use super::values::integer;

impl Given<'_> {
    /// All but the directory of the copies, which is in the data directory.
    pub(super) fn repositories(&self) -> Result<RepositorySettings, ConfigError> {
        let default = RepositorySettings::default();
        let number = |key, min, max, default: u32| -> Result<u32, ConfigError> {
            Ok(self.parse(key, |text| integer(text, min, max))?.unwrap_or(default))
        };
        let bytes = |key, default: u64| -> Result<u64, ConfigError> {
            let given = self.parse(key, |text| integer(text, 0, u32::MAX))?;
            Ok(given.map_or(default, |mb| u64::from(mb) << 20))
        };
        Ok(RepositorySettings {
            clone_timeout_s: number(
                keys::REPOSITORIES_CLONE_TIMEOUT_S,
                1,
                RepositorySettings::CLONE_TIMEOUT_MAX_S,
                default.clone_timeout_s,
            )?,
            soft_age_s: number(keys::REPOSITORIES_SOFT_AGE_S, 0, u32::MAX, default.soft_age_s)?,
            hard_age_s: number(keys::REPOSITORIES_HARD_AGE_S, 0, u32::MAX, default.hard_age_s)?,
            bundle_bytes: bytes(keys::REPOSITORIES_COPY_MB, default.bundle_bytes)?,
            team_bytes: bytes(keys::REPOSITORIES_TEAM_MB, default.team_bytes)?,
            total_bytes: bytes(keys::REPOSITORIES_TOTAL_MB, default.total_bytes)?,
            ..default
        })
    }
}

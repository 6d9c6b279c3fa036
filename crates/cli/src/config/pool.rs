//! Settings of what the host keeps free, of the warm pool, and of paused sandboxes.

use std::path::PathBuf;
use std::time::Duration;

use server::settings::{CapacitySettings, PauseSettings, PoolSettings};

use super::error::ConfigError;
use super::keys;
use super::sources::Given;
use super::values::{self, boolean, integer, limit};

/// How long processes are written to disk when the platform is stopped. It has 75 s in all, of which files alone need the rest.
const IMAGES_AT_SHUTDOWN_WITHIN: Duration = Duration::from_secs(45);

impl Given<'_> {
    /// `disk_mb` is the disk space that each sandbox preallocates, if any.
    pub(super) fn capacity(&self, disk_mb: Option<u32>) -> Result<CapacitySettings, ConfigError> {
        let number = |key, default: u32| -> Result<u32, ConfigError> {
            Ok(self.parse(key, |text| integer(text, 0, u32::MAX))?.unwrap_or(default))
        };
        Ok(CapacitySettings {
            memory_floor_mb: number(keys::CAPACITY_MEMORY_FLOOR_MB, CapacitySettings::MEMORY_FLOOR_MB)?,
            disk_floor_mb: number(keys::CAPACITY_DISK_FLOOR_MB, CapacitySettings::DISK_FLOOR_MB)?,
            disk_per_sandbox_mb: disk_mb.unwrap_or(0),
            max_sandboxes: self
                .parse(keys::CAPACITY_MAX_SANDBOXES, |text| limit(text, u32::MAX))?
                .flatten(),
        })
    }

    pub(super) fn pause(&self) -> Result<PauseSettings, ConfigError> {
        Ok(PauseSettings {
            retention_s: self
                .parse(keys::PAUSE_RETENTION_S, |text| limit(text, u32::MAX))?
                .flatten(),
            at_shutdown: self.parse(keys::PAUSE_AT_SHUTDOWN, boolean)?.unwrap_or(false),
            images_at_shutdown_within: IMAGES_AT_SHUTDOWN_WITHIN,
            processes_on_disk: self.criu()?.is_some(),
            answer: self
                .parse(keys::PAUSE_ANSWER, values::pause_answer)?
                .unwrap_or_default(),
        })
    }

    /// The program that writes the processes of paused sandboxes to disk.
    pub(super) fn criu(&self) -> Result<Option<PathBuf>, ConfigError> {
        self.parse(keys::PAUSE_CRIU, values::file)
    }

    /// Whether the memory of sandboxes that are paused in memory is moved to swap.
    pub(super) fn page_out(&self) -> Result<bool, ConfigError> {
        Ok(self.parse(keys::PAUSE_PAGE_OUT, boolean)?.unwrap_or(true))
    }

    pub(super) fn pool(&self) -> Result<PoolSettings, ConfigError> {
        let default = PoolSettings::default();
        let number = |key, default: u32| -> Result<u32, ConfigError> {
            Ok(self.parse(key, |text| integer(text, 0, u32::MAX))?.unwrap_or(default))
        };
        Ok(PoolSettings {
            base: number(keys::POOL_BASE, default.base)?,
            per_template: number(keys::POOL_PER_TEMPLATE, default.per_template)?,
            total: number(keys::POOL_TOTAL, default.total)?,
            memory_mb: number(keys::POOL_MEMORY_MB, default.memory_mb)?,
            ..default
        })
    }
}

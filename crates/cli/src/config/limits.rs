//! The limits of teams, of which each can be set for all teams and for single ones.

use server::settings::{Limits, TeamLimits};

use super::error::{ConfigError, Source};
use super::keys;
use super::sources::Given;
use super::teams::TEAM_LIMITS;

impl Given<'_> {
    /// The limits of teams: those for all teams, and those of the tables of single teams.
    pub(super) fn limits(&self) -> Result<Limits, ConfigError> {
        let mut default = TeamLimits::default();
        // A key with a field of its own is a default that is not a limit.
        for (key, set) in TEAM_LIMITS.iter().filter(|(key, _)| key.set.is_none()) {
            self.set(key, *set, &mut default)?;
        }
        let teams = self.file.teams.iter().map(|(team, values)| {
            let mut own = default;
            for (key, set) in TEAM_LIMITS {
                if let Some(text) = values.get(key.name) {
                    set(&mut own, text).map_err(|why| ConfigError::Value {
                        key: format!("{}.{team}.{}", keys::TEAM, key.name),
                        why,
                        source_of: Source::File(self.file.path.clone()),
                    })?;
                }
            }
            Ok((team.clone(), own))
        });
        Ok(Limits {
            default,
            teams: teams.collect::<Result<_, ConfigError>>()?,
        })
    }
}

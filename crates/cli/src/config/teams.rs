//! The keys that can be set per team, and which limit each of them sets.

use server::settings::{BUCKET_MAX, TeamLimits};

use super::egress;
use super::keys::{self, Key, Set};
use super::values::{MAX, limit, number, some};

macro_rules! per_team {
    ($($constant:ident: $field:ident = $read:expr),+ $(,)?) => {
        /// Keys that can also be set per team: `limits.sandboxes` of the team `research` is
        /// `team.research.limits.sandboxes`. These have no flag and no environment variable.
        pub(crate) const PER_TEAM: &[&Key] = &[$(keys::$constant),+];

        /// What each of them sets, in the same order.
        pub(crate) const TEAM_LIMITS: &[(&Key, Set<TeamLimits>)] = &[$((
            keys::$constant,
            |to, text| {
                to.$field = ($read)(text)?;
                Ok(())
            },
        )),+];
    };
}

per_team! {
    SANDBOX_MAX_LIFETIME_S: max_lifetime_s = number(1, MAX),
    LIMITS_SANDBOXES: sandboxes = limit(MAX),
    LIMITS_CPU_COUNT: cpu_count = limit(MAX),
    LIMITS_MEMORY_MB: memory_mb = limit(MAX),
    LIMITS_CREATES_PER_MINUTE: creates_per_minute = limit(BUCKET_MAX),
    LIMITS_REQUESTS_PER_SECOND: requests_per_second = limit(BUCKET_MAX),
    LIMITS_PAUSED_SANDBOXES: paused_sandboxes = number(0, MAX),
    LIMITS_PAUSED_DISK_MB: paused_disk_mb = limit(MAX),
    LIMITS_BUILDS: builds = number(0, MAX),
    LIMITS_TEMPLATE_CPU_COUNT: template_cpu_count = number(0, MAX),
    LIMITS_TEMPLATE_MEMORY_MB: template_memory_mb = number(0, MAX),
    LIMITS_TEMPLATE_DISK_MB: template_disk_mb = limit(MAX),
    EGRESS_DEFAULT: egress_default_allow = some(egress::is_allow),
}

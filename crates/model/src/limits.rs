//! Limits of the API, each with where it comes from.

/// Lifetime of a sandbox made by `POST /sandboxes` without `timeout`, in seconds (API contract).
pub const DEFAULT_TIMEOUT_V1_S: u32 = 15;
/// Lifetime of a sandbox made by `POST /v2/sandboxes`, or connected to by the v2 path, without `timeout`, in
/// seconds (what the SDKs that call those paths document).
pub const DEFAULT_TIMEOUT_V2_S: u32 = 300;
/// Shortest effective `duration` of a refresh, in seconds: less, or none, counts as this.
pub const REFRESH_FLOOR_S: u32 = 15;
/// Longest `duration` of a refresh, in seconds (API contract).
pub const REFRESH_MAX_S: u32 = 3600;
/// Smallest and largest page of a list (API contract).
pub const LIST_LIMIT: std::ops::RangeInclusive<u32> = 1..=100;
/// Largest number of `injections` and of `resources` on a create (API contract).
pub const ATTACHMENTS_MAX: usize = 20;
/// Largest body of an API request, in bytes (16 MiB, what the existing platform accepts).
pub const BODY_MAX_BYTES: usize = 16 * 1024 * 1024;
/// Longest life of a sandbox from its start, in seconds, unless the configuration says otherwise (24 h).
pub const DEFAULT_MAX_LIFETIME_S: u32 = 24 * 3600;
/// Longest name of a team, a key or a token, in characters: they stand in tables and logs.
pub const NAME_MAX: usize = 64;

/// Whether a text can be the name of a team, a key or a token: 1 to [`NAME_MAX`] characters, none of them a control
/// character or outer space.
#[must_use]
pub fn is_name(text: &str) -> bool {
    (1..=NAME_MAX).contains(&text.chars().count()) && !text.chars().any(char::is_control) && text.trim() == text
}

/// How long the log of a sandbox is kept after its end, in seconds, unless the operator says otherwise (API contract).
pub const DEFAULT_LOG_RETENTION_S: u32 = 7 * 24 * 3600;

/// Most entries of one sandbox's log, unless the operator says otherwise. It is also the most that one answer holds.
pub const DEFAULT_LOG_ENTRIES: u32 = 10_000;

/// How long a sample of what a sandbox uses is kept, in seconds, unless the operator says otherwise. Sandboxes live for
/// a day at most by default.
pub const DEFAULT_METRIC_RETENTION_S: u32 = 24 * 3600;

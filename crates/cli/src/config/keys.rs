//! The table of configuration keys: names, types, defaults, meanings, and the field that each key sets.
//!
//! Help texts, the reference, environment variables, the check of the configuration file and the configuration itself are
//! all derived from this table, so a key cannot be undocumented or spelt differently in two places. Defaults are those of
//! the settings of the crate that uses a value; a test compares them with the table.

pub(crate) use super::key::{Key, Kind, Set};

macro_rules! keys {
    ($($constant:ident = {
        $name:literal, $flag:expr, $kind:ident, $default:literal,
        $meaning:literal $(, $($field:ident).+ = $read:expr)? $(,)?
    }),+ $(,)?) => {
        $(pub(crate) const $constant: &Key = &Key {
            name: $name,
            flag: $flag,
            kind: Kind::$kind,
            default: $default,
            meaning: $meaning,
            set: set!($($($field).+ = $read)?),
        };)+

        /// The keys of this part, in the order in which the reference shows them.
        pub(super) const ALL: &[&Key] = &[$($constant),+];
    };
}

mod contents;
mod egress;
mod records;
mod sandboxes;
mod service;

pub(crate) use self::contents::*;
pub(crate) use self::egress::*;
pub(crate) use self::records::*;
pub(crate) use self::sandboxes::*;
pub(crate) use self::service::*;

/// The parts, in the order in which the reference shows them.
const PARTS: [&[&Key]; 5] = [service::ALL, contents::ALL, sandboxes::ALL, records::ALL, egress::ALL];

/// Every key, in the order in which the reference shows them.
pub(crate) const ALL: &[&Key] = &joined::<{ number_of_keys() }>();

const fn number_of_keys() -> usize {
    let (mut part, mut count) = (0, 0);
    while part < PARTS.len() {
        count += PARTS[part].len();
        part += 1;
    }
    count
}

const fn joined<const COUNT: usize>() -> [&'static Key; COUNT] {
    let mut all = [PARTS[0][0]; COUNT];
    let (mut part, mut at, mut next) = (0, 0, 0);
    while part < PARTS.len() {
        while at < PARTS[part].len() {
            all[next] = PARTS[part][at];
            (at, next) = (at + 1, next + 1);
        }
        (part, at) = (part + 1, 0);
    }
    all
}

/// The table that contains one table per provider of injections.
pub(crate) const PROVIDER: &str = "provider";

/// The table that contains one table per team.
pub(crate) const TEAM: &str = "team";

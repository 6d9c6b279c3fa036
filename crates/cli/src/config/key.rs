//! What a configuration key is: its name, its type, its default and the field that it sets.

use super::resolved::Config;

/// The type of a key. A configuration file must use the same type, so that `launchers = "two"` is an error of the file
/// and not of the code that uses the value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A string.
    Text,
    /// An integer.
    Integer,
    /// A number, with a fraction or without.
    Number,
    /// `true` or `false`.
    Boolean,
    /// A table of names with an address or a list of addresses each. Outside of the file `name=address,name=address`.
    Hosts,
}

impl Kind {
    /// The type as an error message names it.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Text => "a string in quotes",
            Self::Integer => "an integer",
            Self::Number => "a number",
            Self::Boolean => "true or false",
            Self::Hosts => "a table of names, each with an address or a list of addresses in quotes",
        }
    }
}

/// Reads a value into a field, if the key has one.
macro_rules! set {
    () => { None };
    ($($field:ident).+ = $read:expr) => {
        Some(|to, text| {
            to.$($field).+ = ($read)(text)?;
            Ok(())
        })
    };
}
pub(super) use set;

/// One configuration key.
#[derive(Debug)]
pub(crate) struct Key {
    /// The name in the configuration file; a dot stands for a table.
    pub(crate) name: &'static str,
    /// The flag of the command line, where there is one. Secrets have none: a process list shows flags.
    pub(crate) flag: Option<&'static str>,
    /// The type.
    pub(crate) kind: Kind,
    /// The default, as a value or a description.
    pub(crate) default: &'static str,
    /// The meaning, in one sentence or two.
    pub(crate) meaning: &'static str,
    /// How its value is read, and which field of the configuration it becomes; none where that depends on other keys.
    pub(crate) set: Option<Set<Config>>,
}

/// Reads the value of a key, and sets what it means. Errors say what is expected.
pub(crate) type Set<T> = fn(&mut T, &str) -> Result<(), String>;

impl Key {
    /// The environment variable that sets it.
    pub(crate) fn env(&self) -> String {
        format!("RINGFENCE_{}", self.name.replace('.', "_").to_uppercase())
    }
}

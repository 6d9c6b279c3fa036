//! The configuration file: its tables as the texts that environment variables would have, by key.

use std::collections::BTreeMap;
use std::path::Path;

use super::error::{ConfigError, Source};
use super::keys::{self, Key, Kind};
use super::suggest::{similar, unquoted};
use super::teams::PER_TEAM;

/// The values of one table of the file and the tables in it, flattened: `[sandbox] pids` is `sandbox.pids`.
pub(super) type Values = BTreeMap<&'static str, String>;

/// The configuration file.
#[derive(Default)]
pub(super) struct File {
    pub(super) path: String,
    pub(super) values: Values,
    /// The tables of providers of injections, by their names.
    pub(super) providers: BTreeMap<String, toml::Table>,
    /// The tables of single teams, by their names.
    pub(super) teams: BTreeMap<String, Values>,
}

impl File {
    pub(super) fn read(path: &Path) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| ConfigError::File {
            file: file.clone(),
            why: error.to_string(),
        })?;
        Self::parse(file, &text)
    }

    fn parse(path: String, text: &str) -> Result<Self, ConfigError> {
        let table: toml::Table = toml::from_str(text).map_err(|error| {
            // Only the message and the line: the parser would quote the line, and it may hold a password.
            let why = match error.span() {
                None => error.message().to_owned(),
                Some(span) => {
                    let before = text.as_bytes().iter().take(span.start);
                    let line = before.filter(|byte| **byte == b'\n').count() + 1;
                    let why = unquoted(text, line).unwrap_or_else(|| error.message().to_owned());
                    format!("line {line}: {why}")
                }
            };
            ConfigError::File {
                file: path.clone(),
                why,
            }
        })?;
        let mut file = Self {
            path,
            ..Self::default()
        };
        let mut table = table;
        file.providers = take_providers(&file, &mut table)?;
        let teams = match table.remove(keys::TEAM) {
            None => toml::Table::new(),
            Some(toml::Value::Table(teams)) => teams,
            Some(_) => return Err(file.unknown(keys::TEAM.to_owned())),
        };
        for (team, value) in teams {
            let at = format!("{}.{team}", keys::TEAM);
            let toml::Value::Table(own) = value else {
                return Err(file.unknown(at));
            };
            let mut values = Values::new();
            file.flatten(PER_TEAM, &format!("{at}."), "", &own, &mut values)?;
            file.teams.insert(team, values);
        }
        let mut values = Values::new();
        file.flatten(keys::ALL, "", "", &table, &mut values)?;
        file.values = values;
        Ok(file)
    }

    /// Takes the values of `known` keys out of a table. `at` is where the table with them begins, `prefix` where in
    /// that one `table` is.
    fn flatten(
        &self,
        known: &[&'static Key],
        at: &str,
        prefix: &str,
        table: &toml::Table,
        values: &mut Values,
    ) -> Result<(), ConfigError> {
        for (word, value) in table {
            let name = format!("{prefix}{word}");
            let is_table = known.iter().any(|key| key.name.starts_with(&format!("{name}.")));
            match (known.iter().find(|key| key.name == name), value) {
                (None, toml::Value::Table(inner)) if is_table => {
                    self.flatten(known, at, &format!("{name}."), inner, values)?;
                }
                (None, _) => return Err(self.unknown(format!("{at}{name}"))),
                (Some(key), value) => {
                    let text = scalar(key.kind, value).ok_or_else(|| ConfigError::Value {
                        key: format!("{at}{name}"),
                        why: format!("must be {}", key.kind.describe()),
                        source_of: Source::File(self.path.clone()),
                    })?;
                    values.insert(key.name, text);
                }
            }
        }
        Ok(())
    }

    fn unknown(&self, name: String) -> ConfigError {
        ConfigError::Unknown {
            meant: similar(&name),
            name,
            file: self.path.clone(),
        }
    }
}

fn scalar(kind: Kind, value: &toml::Value) -> Option<String> {
    match (kind, value) {
        (Kind::Text, toml::Value::String(text)) => Some(text.clone()),
        (Kind::Integer, toml::Value::Integer(number)) => Some(number.to_string()),
        (Kind::Number, toml::Value::Integer(number)) => Some(number.to_string()),
        (Kind::Number, toml::Value::Float(number)) => Some(number.to_string()),
        (Kind::Boolean, toml::Value::Boolean(flag)) => Some(flag.to_string()),
        (Kind::Hosts, table @ toml::Value::Table(_)) => hosts_text(table),
        _ => None,
    }
}

/// Takes the tables of providers out of the file.
fn take_providers(file: &File, table: &mut toml::Table) -> Result<BTreeMap<String, toml::Table>, ConfigError> {
    let providers = match table.remove(keys::PROVIDER) {
        None => return Ok(BTreeMap::new()),
        Some(toml::Value::Table(providers)) => providers,
        Some(_) => return Err(file.unknown(keys::PROVIDER.to_owned())),
    };
    let tables = providers.into_iter().map(|(name, value)| {
        let at = format!("{}.{name}", keys::PROVIDER);
        let toml::Value::Table(own) = value else {
            return Err(file.unknown(at));
        };
        match own
            .keys()
            .find(|key| !["host", "header", "value"].contains(&key.as_str()))
        {
            Some(key) => Err(file.unknown(format!("{at}.{key}"))),
            None => Ok((name, own)),
        }
    });
    tables.collect()
}

/// A table of names with an address or a list of addresses each, as an environment variable has it; none if it is
/// something else. A dot in a name without quotes makes a table in a table.
fn hosts_text(value: &toml::Value) -> Option<String> {
    let mut entries = Vec::new();
    collect(value, "", &mut entries)?;
    Some(entries.join(","))
}

fn collect(value: &toml::Value, name: &str, entries: &mut Vec<String>) -> Option<()> {
    match value {
        toml::Value::Table(table) => table.iter().try_for_each(|(word, value)| {
            let separator = if name.is_empty() { "" } else { "." };
            collect(value, &format!("{name}{separator}{word}"), entries)
        }),
        toml::Value::String(address) if !name.is_empty() => {
            entries.push(format!("{name}={address}"));
            Some(())
        }
        toml::Value::Array(addresses) if !name.is_empty() && !addresses.is_empty() => {
            for address in addresses {
                entries.push(format!("{name}={}", address.as_str()?));
            }
            Some(())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_hosts_become_text() {
        let text = |file: &str| hosts_text(&toml::Value::Table(toml::from_str(file).expect("TOML")));
        for (file, want) in [
            (
                "a = '10.0.0.1'\nb = ['10.0.0.2', '10.0.0.3']",
                Some("a=10.0.0.1,b=10.0.0.2,b=10.0.0.3"),
            ),
            ("'db.internal' = '10.0.0.1'", Some("db.internal=10.0.0.1")),
            ("db.internal = '10.0.0.1'", Some("db.internal=10.0.0.1")),
            ("", Some("")),
            ("a = 1", None),
            ("a = []", None),
            ("a = ['10.0.0.1', 1]", None),
            ("a = [['10.0.0.1']]", None),
        ] {
            assert_eq!(text(file).as_deref(), want, "{file}");
        }
        assert_eq!(hosts_text(&toml::Value::String("a=10.0.0.1".to_owned())), None);
    }
}

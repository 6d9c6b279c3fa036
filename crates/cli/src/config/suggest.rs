//! What an operator meant by a key that does not exist, or by a value without quotes.

use strsim::osa_distance;

use super::keys::{self, Key, Kind};

/// A known key, or a table of keys, with a similar name.
pub(super) fn similar(name: &str) -> Option<&'static str> {
    let name = name.replace('-', "_");
    let (table, last) = split(&name);
    let all = || keys::ALL.iter().copied();
    let names = |key: &&'static Key| split(key.name).1 == last;
    let in_table = |key: &&'static Key| split(key.name).0 == table;
    let tables = all()
        .map(|key| split(key.name).0)
        .filter(|known| table.is_empty() && !known.is_empty());
    let of_key = |key: &'static Key| key.name;
    all()
        .find(names)
        .map(of_key)
        // A typo, where it is looked for first.
        .or_else(|| closest(last, all().filter(in_table).map(|key| (split(key.name).1, key.name))))
        .or_else(|| closest(&name, tables.map(|table| (table, table))))
        .or_else(|| closest(last, all().map(|key| (split(key.name).1, key.name))))
        .or_else(|| {
            let found = all().find(|key| last.len() > 2 && split(key.name).1.contains(last));
            found.map(of_key)
        })
        .or_else(|| all().find(|key| last.contains(split(key.name).1)).map(of_key))
}

/// An environment variable with a similar name.
pub(crate) fn similar_variable(name: &str) -> Option<String> {
    const PREFIX: &str = "RINGFENCE_";
    let variables: Vec<String> = keys::ALL.iter().map(|key| key.env()).collect();
    let words = variables
        .iter()
        .filter_map(|variable| Some((variable.strip_prefix(PREFIX)?, variable)));
    closest(name.strip_prefix(PREFIX)?, words).cloned()
}

/// The table of a key, empty if it is in none, and its last word.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

/// What has the word that differs least from this one, if that is what a typo may be.
fn closest<'a, T>(word: &str, known: impl Iterator<Item = (&'a str, T)>) -> Option<T> {
    let most = (word.len() / 3).max(1);
    known
        .map(|(other, found)| (osa_distance(word, other), found))
        .filter(|(distance, _)| (1..=most).contains(distance))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, found)| found)
}

/// What is wrong with a line that the parser refuses, if it is a value that lacks its quotes. The value is not part of it:
/// it may be a password.
pub(super) fn unquoted(text: &str, line: usize) -> Option<String> {
    let mut lines = text.lines().take(line).collect::<Vec<_>>();
    let (word, value) = lines.pop()?.split_once('=')?;
    let (word, value) = (word.trim(), value.trim());
    if value.is_empty() || value.starts_with(['"', '\'', '[', '{']) {
        return None;
    }
    let table = lines.iter().rev().find_map(|line| {
        let rest = line.trim().strip_prefix('[')?;
        rest.split_once(']').map(|(table, _)| table.trim())
    });
    let name = match table {
        Some(table) => format!("{table}.{word}"),
        None => word.to_owned(),
    };
    // Those of single teams are in tables of their own.
    let is_named = |known: &str| name == known || name.ends_with(&format!(".{known}"));
    let known = keys::ALL.iter().find(|key| is_named(key.name));
    Some(match known.map(|key| key.kind) {
        Some(kind @ (Kind::Integer | Kind::Boolean)) => format!("{name} must be {}", kind.describe()),
        _ => format!("the value of {name} must be in quotes: {word} = \"…\""),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typos_have_suggestions() {
        for (written, meant) in [
            ("listn", Some("listen")),
            ("lsiten", Some("listen")),
            ("crui", Some("pause.criu")),
            ("pause.crui", Some("pause.criu")),
            ("limits.sandbox", Some("limits.sandboxes")),
            ("sandbx", Some("sandbox")),
            ("limts", Some("limits")),
            ("sandbox.memory-mb", Some("sandbox.memory_mb")),
            ("sandbox.memory", Some("sandbox.memory_mb")),
            ("memory_mb", Some("sandbox.memory_mb")),
            ("team.a.sandboxes", Some("limits.sandboxes")),
            ("team.a.limits.sandboxs", Some("limits.sandboxes")),
            ("completely_different", None),
        ] {
            assert_eq!(similar(written), meant, "{written}");
        }
        assert_eq!(similar_variable("RINGFENCE_LISTN").as_deref(), Some("RINGFENCE_LISTEN"));
        assert_eq!(similar_variable("RINGFENCE_COLOUR"), None);
    }

    #[test]
    fn a_distance_counts_changes() {
        for (from, to, changes) in [
            ("", "", 0),
            ("a", "", 1),
            ("", "ab", 2),
            ("crui", "criu", 1),
            ("listn", "listen", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(
                (osa_distance(from, to), osa_distance(to, from)),
                (changes, changes),
                "{from} {to}"
            );
        }
    }
}

//! The page for operators has every kind of entry in the log of a sandbox, and no other.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result};

use super::breach::Breach;
use super::tree::Tree;

const RULE: &str = "entries";
const PAGE: &str = "docs/operations.md";
/// The heading above the table.
const HEADING: &str = "### Entries";
/// Where entries are written.
const WRITERS: [&str; 2] = ["crates/node/src/", "crates/server/src/"];
/// The field with the kind of an entry, as a literal.
const FIELD: &str = "\"event_type\"";

pub(super) fn check(tree: &Tree) -> Result<Vec<Breach>> {
    let page = tree.text(PAGE).with_context(|| format!("no {PAGE}"))?;
    let (listed, written) = (listed(page), written(tree));
    let breach = |message| Breach {
        rule: RULE,
        subject: PAGE.to_owned(),
        message,
    };
    let missing = written
        .difference(&listed)
        .map(|kind| format!("has no row for `{kind}`"));
    let gone = listed
        .difference(&written)
        .map(|kind| format!("no code writes `{kind}`"));
    Ok(missing.chain(gone).map(breach).collect())
}

/// The names in the first column of the table.
fn listed(page: &str) -> BTreeSet<&str> {
    let section = page.lines().skip_while(|line| *line != HEADING).skip(1);
    section
        .take_while(|line| !line.starts_with('#'))
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .filter(|name| is_kind(name))
        .collect()
}

/// The kinds that code names: behind the field, or as the last of level, message and kind.
fn written(tree: &Tree) -> BTreeSet<&str> {
    let files = tree.with_endings(&["rs"]);
    let files = files.filter(|(path, _)| WRITERS.iter().any(|place| path.starts_with(place)));
    files
        .flat_map(|(_, text)| text.lines())
        .filter_map(|line| behind_field(line).or_else(|| behind_level(line)))
        .filter(|name| is_kind(name))
        .collect()
}

fn behind_field(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once(FIELD)?;
    let rest = rest.strip_prefix(".to_owned()").unwrap_or(rest);
    rest.strip_prefix(", \"")?.split('"').next()
}

fn behind_level(line: &str) -> Option<&str> {
    if !line.contains("(Level::") && !line.contains("(level, ") {
        return None;
    }
    let line = line.trim_end_matches(',').strip_suffix("\")")?;
    line.rsplit('"').next()
}

/// Whether a name is that of a kind: several words.
fn is_kind(name: &str) -> bool {
    name.contains('_') && name != "event_type" && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_without_a_row_and_rows_without_code_are_told() {
        let page = "| `no_row` | x |\n### Entries\n\n| `event_type` | Level |\n|---|---|\n\
                    | `disk_full`, `disk_freed` | warn | `left_mb` |\n| `long_gone` | info | x |\n## Next\n| `not_here` | x |\n";
        let node = "let fields = [(\"event_type\", \"disk_full\".to_owned())];\n\
                    field(\"event_type\".to_owned(), \"disk_freed\".to_owned());\nfields[\"event_type\"];\n";
        let server = "Self::Made => (Level::Info, \"it was made\", \"box_made\"),\n\
                      (level, message, \"box_ending\")\n(Level::Warn, \"a text\", more)\n";
        let tree = Tree::of(&[
            (PAGE, page),
            ("crates/node/src/disk.rs", node),
            ("crates/server/src/log.rs", server),
            ("crates/agent/src/log.rs", "(\"event_type\", \"other_thing\")"),
        ]);
        let told: Vec<String> = check(&tree)
            .expect("check")
            .into_iter()
            .map(|breach| breach.message)
            .collect();
        assert_eq!(
            told,
            [
                "has no row for `box_ending`",
                "has no row for `box_made`",
                "no code writes `long_gone`"
            ]
        );
    }
}

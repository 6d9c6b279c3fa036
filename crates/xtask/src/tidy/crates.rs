//! The crates depend on each other as the table in ARCHITECTURE.md says, and on nothing more.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use super::breach::Breach;
use super::tree::Tree;

const RULE: &str = "edges";
const PAGE: &str = "ARCHITECTURE.md";

/// The crates of this workspace that each crate depends on.
type Edges = BTreeMap<String, BTreeSet<String>>;

/// Crates that no other may depend on, in tests neither.
const TOPS: [&str; 2] = ["cli", "xtask"];

pub(super) fn check(root: &Path, tree: &Tree) -> Result<Vec<Breach>> {
    let page = tree.text(PAGE).with_context(|| format!("no {PAGE}"))?;
    let (built, tested) = declared(&metadata(root)?)?;
    let mut breaches = compare(&table(page), &built);
    for (name, needed) in &tested {
        for top in TOPS.iter().filter(|top| needed.contains(**top)) {
            breaches.push(breach(
                name,
                format!("depends on `{top}` in tests, which is above every other crate"),
            ));
        }
    }
    Ok(breaches)
}

/// Where the table and the manifests differ.
fn compare(table: &Edges, built: &Edges) -> Vec<Breach> {
    let mut breaches = Vec::new();
    for (name, needed) in built {
        let Some(allowed) = table.get(name) else {
            breaches.push(breach(name, format!("is missing in the table of crates in {PAGE}")));
            continue;
        };
        for other in needed.difference(allowed) {
            breaches.push(breach(
                name,
                format!("depends on `{other}`, which {PAGE} does not allow"),
            ));
        }
        for other in allowed.difference(needed) {
            breaches.push(breach(
                name,
                format!("does not depend on `{other}` any more: take it out of {PAGE}"),
            ));
        }
    }
    for name in table.keys().filter(|name| !built.contains_key(*name)) {
        breaches.push(breach(name, format!("is in the table of {PAGE} and nowhere else")));
    }
    breaches
}

fn breach(name: &str, message: String) -> Breach {
    Breach {
        rule: RULE,
        subject: name.to_owned(),
        message,
    }
}

/// Reads the table: the row of a crate begins with its name, and the column "Depends on" names crates in backticks.
fn table(page: &str) -> Edges {
    let cells = |line: &str| {
        line.trim_matches('|')
            .split('|')
            .map(|cell| cell.trim().to_owned())
            .collect::<Vec<_>>()
    };
    let mut lines = page.lines().skip_while(|line| !line.starts_with("| Crate |"));
    let header = cells(lines.next().unwrap_or_default());
    let Some(column) = header.iter().position(|cell| cell == "Depends on") else {
        return Edges::new();
    };
    lines
        .skip(1)
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| {
            let cells = cells(line);
            let name = cells.first()?.trim_matches('`').to_owned();
            Some((name, quoted(cells.get(column)?)))
        })
        .collect()
}

/// Every word in backticks.
fn quoted(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// What the manifests say: for the build, and for tests only.
fn declared(metadata: &Value) -> Result<(Edges, Edges)> {
    let mut edges = (Edges::new(), Edges::new());
    for package in metadata["packages"].as_array().context("no packages")? {
        let name = package["name"].as_str().context("a package without a name")?.to_owned();
        edges.0.entry(name.clone()).or_default();
        for dependency in package["dependencies"].as_array().context("no dependencies")? {
            // Crates of the workspace are found by path, all others by a registry.
            if dependency["path"].is_null() {
                continue;
            }
            let other = dependency["name"]
                .as_str()
                .context("a dependency without a name")?
                .to_owned();
            let side = if dependency["kind"] == "dev" {
                &mut edges.1
            } else {
                &mut edges.0
            };
            side.entry(name.clone()).or_default().insert(other);
        }
    }
    Ok(edges)
}

fn metadata(root: &Path) -> Result<Value> {
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    serde_json::from_str(&cargo(root, &arguments)?).context("read what cargo tells")
}

/// What cargo prints, asked at the root of the repository.
pub(super) fn cargo(root: &Path, arguments: &[&str]) -> Result<String> {
    let command = arguments.join(" ");
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(root)
        .output()
        .with_context(|| format!("run cargo {command}"))?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo {command}: {complaint}");
    String::from_utf8(output.stdout).with_context(|| format!("read cargo {command}"))
}

#[cfg(test)]
mod tests {
    use super::{Edges, compare, table};

    const PAGE: &str = "\
# Crates

| Crate | What it is | Depends on | What it must never do |
|---|---|---|---|
| `top` | all | `middle`, `low` | think |
| `middle` | some | `low` | |
| `low` | little | | |

| Looking for | Look in |
|---|---|
| `other` | `low` |
";

    fn edges(of: &[(&str, &[&str])]) -> Edges {
        of.iter()
            .map(|(name, others)| {
                (
                    (*name).to_owned(),
                    others.iter().map(|other| (*other).to_owned()).collect(),
                )
            })
            .collect()
    }

    #[test]
    fn the_table_is_read() {
        assert_eq!(
            table(PAGE),
            edges(&[("top", &["middle", "low"]), ("middle", &["low"]), ("low", &[])])
        );
    }

    #[test]
    fn each_difference_is_told() {
        let check = |built: &[(&str, &[&str])]| -> Vec<String> {
            compare(&table(PAGE), &edges(built))
                .into_iter()
                .map(|breach| breach.to_string())
                .collect()
        };
        assert_eq!(
            check(&[("top", &["middle", "low"]), ("middle", &["low"]), ("low", &[])]),
            Vec::<String>::new()
        );
        assert_eq!(
            check(&[
                ("top", &["middle", "low"]),
                ("middle", &[]),
                ("low", &["top"]),
                ("new", &[])
            ]),
            [
                "edges: low: depends on `top`, which ARCHITECTURE.md does not allow",
                "edges: middle: does not depend on `low` any more: take it out of ARCHITECTURE.md",
                "edges: new: is missing in the table of crates in ARCHITECTURE.md",
            ]
        );
        assert_eq!(
            check(&[("top", &["middle", "low"]), ("middle", &["low"])]),
            ["edges: low: is in the table of ARCHITECTURE.md and nowhere else"]
        );
    }
}

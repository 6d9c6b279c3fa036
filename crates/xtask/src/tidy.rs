//! The rules of this repository that no compiler holds, each as a check over the files.
//!
//! `cargo run -p xtask -- tidy` lists every breach; the same checks are an ordinary test, so nothing depends on a person
//! remembering to run them. A breach that has to stay for a while is in [`exceptions`], and an exception that nothing
//! needs any more is a breach itself, so that the list only shrinks.

mod breach;
mod circles;
mod comments;
mod crates;
mod documents;
mod entries;
mod exceptions;
mod glossary;
mod licences;
mod modules;
mod rules;
mod tokens;
mod tree;
mod up;
mod words;

use std::path::Path;

use anyhow::{Result, bail};

use self::breach::Breach;
use self::exceptions::Exceptions;
use self::tree::Tree;
use crate::reference;

/// The crates in which no file may use itself by way of others: all.
const CRATES: [&str; 19] = [
    "agent",
    "blobs",
    "cli",
    "dockerfile",
    "docs",
    "formats",
    "image",
    "measure",
    "model",
    "node",
    "protocol",
    "proxy",
    "recipes",
    "registry",
    "runtime",
    "server",
    "store",
    "testkit",
    "xtask",
];

/// Checks the repository.
pub(crate) fn run(root: &Path) -> Result<()> {
    let breaches = check(root)?;
    if breaches.is_empty() {
        return Ok(());
    }
    let lines: Vec<String> = breaches.iter().map(ToString::to_string).collect();
    bail!("{} breaches\n{}", lines.len(), lines.join("\n"))
}

/// Every breach that no exception covers, and every exception that covers nothing.
fn check(root: &Path) -> Result<Vec<Breach>> {
    let tree = Tree::read(root)?;
    let mut breaches = Vec::new();
    rules::check(&tree, &mut breaches)?;
    for name in CRATES {
        breaches.extend(circles::check(&tree, name)?);
    }
    for name in up::CRATES {
        breaches.extend(up::check(&tree, name)?);
    }
    breaches.extend(crates::check(root, &tree)?);
    breaches.extend(licences::check(root)?);
    breaches.extend(generated(&tree)?);
    let refused = glossary::refused(&tree)?;
    breaches.extend(words::check(&tree, &refused)?);
    breaches.extend(comments::check(&tree, &refused)?);
    breaches.extend(documents::check(&tree));
    breaches.extend(entries::check(&tree)?);
    let mut exceptions = Exceptions::of_today();
    breaches.retain(|breach| !exceptions.covers(breach));
    breaches.extend(exceptions.unused());
    breaches.sort();
    Ok(breaches)
}

/// Files that a program writes are what it would write now.
fn generated(tree: &Tree) -> Result<Vec<Breach>> {
    let mut files = reference::pages()?;
    files.push(("api/openapi.json".to_owned(), server::api::document()));
    let stale = files
        .into_iter()
        .filter(|(path, now)| tree.text(path) != Some(now.as_str()));
    let breaches = stale.map(|(subject, _)| Breach {
        rule: "generated",
        subject,
        message: "is not what the code describes: run `cargo run -p xtask -- openapi` and commit the file".to_owned(),
    });
    Ok(breaches.collect())
}

#[cfg(test)]
mod tests;

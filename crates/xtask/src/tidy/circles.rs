//! No circle of imports between the files of a crate.
//!
//! In a circle no file can be understood, tested or moved without all the others of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use anyhow::Result;

use super::breach::Breach;
use super::modules::{self, Uses};
use super::tree::Tree;

/// One breach for each file of the crate that is in a circle.
pub(super) fn check(tree: &Tree, name: &str) -> Result<Vec<Breach>> {
    let uses = modules::uses(tree, name)?;
    let mut breaches = Vec::new();
    for file in uses.keys() {
        if let Some(circle) = shortest(&uses, file) {
            breaches.push(Breach {
                rule: "circle",
                subject: format!("crates/{name}/src/{file}"),
                message: format!("uses itself by way of others: {}", told(&uses, &circle)),
            });
        }
    }
    Ok(breaches)
}

/// The shortest way from a file back to it, if there is one, with the file at both ends.
fn shortest(uses: &Uses, from: &str) -> Option<Vec<String>> {
    let empty = BTreeMap::new();
    let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let mut next = VecDeque::from([from]);
    while let Some(file) = next.pop_front() {
        for target in uses.get(file).unwrap_or(&empty).keys() {
            if target == from {
                let mut way = vec![from.to_owned(), file.to_owned()];
                let mut at = file;
                while at != from {
                    at = came_from[at];
                    way.push(at.to_owned());
                }
                way.reverse();
                return Some(way);
            }
            if seen.insert(target.as_str()) {
                came_from.insert(target, file);
                next.push_back(target);
            }
        }
    }
    None
}

fn told(uses: &Uses, circle: &[String]) -> String {
    let steps: Vec<String> = circle
        .windows(2)
        .map(|step| format!("{}:{} uses {}", step[0], uses[&step[0]][&step[1]], step[1]))
        .collect();
    steps.join(", ")
}

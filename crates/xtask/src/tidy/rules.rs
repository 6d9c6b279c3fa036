//! Rules about one file at a time: its length, and what only some files may contain.

use anyhow::Result;

use super::breach::Breach;
use super::tokens::{self, Kind};
use super::tree::Tree;

/// Lines beyond which nobody reads a file from top to bottom.
const LINES_MAX: usize = 700;

/// How statements begin. Their words are in upper case everywhere in this tree, so prose is not taken for one.
const STATEMENTS: [&str; 14] = [
    "ALTER TABLE ",
    "BEGIN IMMEDIATE",
    "CREATE INDEX ",
    "CREATE TABLE ",
    "CREATE UNIQUE ",
    "DELETE FROM ",
    "DROP INDEX ",
    "DROP TABLE ",
    "INSERT INTO ",
    "INSERT OR ",
    "PRAGMA ",
    "SELECT ",
    "UPDATE ",
    "WITH ",
];

/// Where the server decides: what it decides there holds for any protocol, so it names none.
const DOMAIN: [&str; 10] = [
    "crates/server/src/admission",
    "crates/server/src/builds",
    "crates/server/src/creation",
    "crates/server/src/injections",
    "crates/server/src/nodes",
    "crates/server/src/pool",
    "crates/server/src/records",
    "crates/server/src/repositories",
    "crates/server/src/sandboxes",
    "crates/server/src/templates",
];
/// Crates of the HTTP front end, which the domain does not use.
const PROTOCOL: [&str; 5] = ["axum", "http", "http_body_util", "hyper", "utoipa"];

/// Whether a file is of the server's domain.
fn is_domain(path: &str) -> bool {
    let mut rests = DOMAIN.iter().filter_map(|module| path.strip_prefix(module));
    rests.any(|rest| rest.starts_with(['/', '.']))
}

pub(super) fn check(tree: &Tree, breaches: &mut Vec<Breach>) -> Result<()> {
    let mut breach = |rule, path: &str, message: String| {
        breaches.push(Breach {
            rule,
            subject: path.to_owned(),
            message,
        });
    };
    for (path, text) in tree.with_endings(&["rs", "py"]) {
        let lines = text.lines().count();
        if lines > LINES_MAX {
            breach(
                "lines",
                path,
                format!("has {lines} lines: split it, {LINES_MAX} are the most"),
            );
        }
    }
    for (path, text) in tree.with_endings(&["rs"]) {
        let name = path.rsplit('/').next().unwrap_or(path);
        if name == "mod.rs" {
            breach(
                "module",
                path,
                "a module `foo` is in `foo.rs` beside the directory `foo`".to_owned(),
            );
        }
        let tokens = tokens::all(path, text)?;
        let unsafe_word = tokens.iter().find(|token| token.is("unsafe"));
        if let Some(token) = unsafe_word.filter(|_| name != "sys.rs") {
            breach(
                "unsafe",
                path,
                format!("line {}: `unsafe` belongs in a `sys.rs`", token.line),
            );
        }
        let mut pairs = tokens.windows(2).filter(|_| is_domain(path));
        let named = pairs.find(|pair| PROTOCOL.iter().any(|name| pair[0].is(name)) && pair[1].punct(':'));
        if let Some(pair) = named {
            let message = format!(
                "line {}: the server's domain does not depend on HTTP: translate in `api`",
                pair[0].line
            );
            breach("domain", path, message);
        }
        let statement = tokens
            .iter()
            .find(|token| matches!(&token.kind, Kind::Literal(text) if is_statement(text)));
        if let Some(token) =
            statement.filter(|_| !path.starts_with("crates/store/") && !path.ends_with("tidy/rules.rs"))
        {
            breach("sql", path, format!("line {}: SQL belongs in `store`", token.line));
        }
    }
    for (path, _) in tree.with_endings(&["sql"]) {
        if !path.starts_with("crates/store/") {
            breach("sql", path, "SQL belongs in `store`".to_owned());
        }
    }
    Ok(())
}

/// Whether a literal, as it is written, is an SQL statement.
fn is_statement(literal: &str) -> bool {
    let Some((_, inside)) = literal.split_once('"') else {
        return false;
    };
    let inside = inside.trim_start_matches(|c: char| c.is_whitespace() || c == '\\');
    STATEMENTS.iter().any(|start| inside.starts_with(start))
}

//! Words that were replaced by the usual ones of the field and must not come back. `docs/dev/glossary.md` has the terms
//! to use instead.

use anyhow::Result;

use super::breach::Breach;
use super::tokens::{self, Kind};
use super::tree::Tree;

const RULE: &str = "words";

/// The page with the terms. Its last section is the table of words that are not used.
const GLOSSARY: &str = "docs/dev/glossary.md";
const GLOSSARY_TABLE: &str = "## Words we do not use";

/// Phrases of code, messages and pages, in lower case, each with what to write instead.
const PHRASES: &[(&str, &str)] = &[
    ("only pretends", "fake"),
    ("holds what it must not", "invalid value in column ..."),
    ("unavailable while it was to", "unavailable: OPERATION"),
    ("a character that cannot be stored", "contains an unsupported character"),
    ("is to stay free", "is reserved"),
    ("are to stay free", "are reserved"),
    ("as many as may", "limit reached (N of N)"),
    ("nobody is known", "invalid access token"),
    ("for want of", "without"),
    ("whomever", "name the client, caller or operator"),
    ("something else happened", "unknown agent event"),
    ("something else than", "expected ..."),
    ("what lies where", "data directory layout"),
    ("see the module.", "what it is for"),
    ("to die of", "killed by"),
    ("broke off", "panicked or was cancelled"),
    ("means nothing to ringfence", "unknown variable, ignored"),
    ("not looked at", "skipped"),
    ("somebody", "another process, another user"),
    ("sandboxes belong to root", "must run as root"),
    ("is no url", "is not a URL"),
];

/// Names of types, each with the better one.
const TYPES: &[(&str, &str)] = &[
    ("LiveTable", "Registry"),
    ("Seat", "CapacityPermit"),
    ("Happened", "LifecycleEvent"),
    ("Moment", "Snapshot"),
    ("Site", "Gateway"),
    ("Wish", "CreateRequest"),
    ("Live", "SandboxEntry"),
    ("Place", "say of what: Location, CapacityPermit, ..."),
    ("Settings", "qualified: ServerSettings, NodeSettings, ..."),
    ("Event", "qualified: LifecycleEvent, AgentEvent, ..."),
    ("Platform", "qualified: BenchPlatform, TestPlatform"),
];

/// Names of functions, each with the better one.
const FUNCTIONS: &[(&str, &str)] = &[("attend", "follow_events"), ("reach", "connect_control")];

pub(super) fn check(tree: &Tree) -> Result<Vec<Breach>> {
    let mut breaches = Vec::new();
    let mut breach = |path: &str, line: usize, word: &str, better: &str| {
        let message = format!("line {line}: {word:?} should be {better:?}");
        breaches.push(Breach {
            rule: RULE,
            subject: path.to_owned(),
            message,
        });
    };
    // A released migration cannot change.
    let exempt = |path: &str| path.ends_with("tidy/words.rs") || path.ends_with(".sql");
    for (path, text) in tree.files().filter(|(path, _)| !exempt(path)) {
        let text = match text.split_once(GLOSSARY_TABLE) {
            Some((before, _)) if path == GLOSSARY => before,
            _ => text,
        };
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.to_lowercase();
            for (phrase, better) in PHRASES.iter().filter(|(phrase, _)| content.contains(phrase)) {
                breach(path, line, phrase, better);
            }
        }
    }
    for (path, text) in tree.with_endings(&["rs"]) {
        let tokens = tokens::all(path, text)?;
        for pair in tokens.windows(2) {
            let Kind::Ident(name) = &pair[1].kind else { continue };
            let declares = ["struct", "enum", "trait", "type"].iter().any(|word| pair[0].is(word));
            let names: &[(&str, &str)] = match declares {
                true => TYPES,
                false if pair[0].is("fn") => FUNCTIONS,
                false => continue,
            };
            for (word, better) in names.iter().filter(|(word, _)| word == name) {
                breach(path, pair[1].line, word, better);
            }
        }
    }
    Ok(breaches)
}

#[cfg(test)]
mod tests {
    use super::super::tree::Tree;
    use super::check;

    #[test]
    fn phrases_and_declarations_are_found() {
        let found = |path: &str, text: &str| -> Vec<String> {
            let breaches = check(&Tree::of(&[(path, text)])).expect("check");
            breaches.into_iter().map(|breach| breach.to_string()).collect()
        };
        let none: [&str; 0] = [];
        assert_eq!(found("a.md", "A fake node."), none);
        assert_eq!(
            found("a.md", "\nIt Only pretends."),
            ["words: a.md: line 2: \"only pretends\" should be \"fake\""]
        );
        let table = "Terms.\n## Words we do not use\n| what lies where |";
        assert_eq!(found("docs/dev/glossary.md", table), none);
        assert_eq!(found("docs/dev/other.md", table).len(), 1);
        assert_eq!(
            found("a.rs", "struct Site;"),
            ["words: a.rs: line 1: \"Site\" should be \"Gateway\""]
        );
        assert_eq!(
            found("a.rs", "fn attend() {}"),
            ["words: a.rs: line 1: \"attend\" should be \"follow_events\""]
        );
        assert_eq!(found("a.rs", "fn f(site: other::Site) { attend() }"), none);
    }
}

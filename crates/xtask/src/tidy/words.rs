//! Words that were replaced by the usual ones of the field and must not come back. The glossary lists them.

use anyhow::Result;

use super::breach::Breach;
use super::glossary::{self, Refused, Use};
use super::tokens::{self, Kind};
use super::tree::Tree;

const RULE: &str = "words";

pub(super) fn check(tree: &Tree, refused: &[Refused]) -> Result<Vec<Breach>> {
    let mut breaches = Vec::new();
    let mut breach = |path: &str, line: usize, refused: &Refused| {
        let message = format!("line {line}: {:?} should be {:?}", refused.word, refused.better);
        breaches.push(Breach {
            rule: RULE,
            subject: path.to_owned(),
            message,
        });
    };
    let of = |use_: Use| refused.iter().filter(move |refused| refused.use_ == use_);
    // A released migration cannot change.
    for (path, text) in tree.files().filter(|(path, _)| !path.ends_with(".sql")) {
        let text = if path == glossary::PAGE {
            glossary::before_refused(text)
        } else {
            text
        };
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.to_lowercase();
            for refused in of(Use::Text).filter(|refused| content.contains(&refused.word)) {
                breach(path, line, refused);
            }
        }
    }
    for (path, text) in tree.with_endings(&["rs"]) {
        let tokens = tokens::all(path, text)?;
        for pair in tokens.windows(2) {
            let Kind::Ident(name) = &pair[1].kind else { continue };
            let declares = ["struct", "enum", "trait", "type"].iter().any(|word| pair[0].is(word));
            let use_ = if declares {
                Use::Type
            } else if pair[0].is("fn") {
                Use::Function
            } else {
                continue;
            };
            for refused in of(use_).filter(|refused| refused.word == *name) {
                breach(path, pair[1].line, refused);
            }
        }
    }
    Ok(breaches)
}

#[cfg(test)]
mod tests {
    use super::super::glossary::{Refused, Use};
    use super::super::tree::Tree;
    use super::check;

    #[test]
    fn phrases_and_declarations_are_found() {
        let refused = |word: &str, better: &str, use_| Refused {
            word: word.to_owned(),
            better: better.to_owned(),
            use_,
        };
        let refused = [
            refused("lo and behold", "note", Use::Text),
            refused("Site", "Gateway", Use::Type),
            refused("attend", "follow_events", Use::Function),
            refused("It", "the noun", Use::Comment),
        ];
        let found = |path: &str, text: &str| -> Vec<String> {
            let breaches = check(&Tree::of(&[(path, text)]), &refused).expect("check");
            breaches.into_iter().map(|breach| breach.to_string()).collect()
        };
        let none: [&str; 0] = [];
        assert_eq!(found("a.md", "It is a fake node."), none);
        assert_eq!(
            found("a.md", "\nLo and behold."),
            ["words: a.md: line 2: \"lo and behold\" should be \"note\""]
        );
        let table = "Terms.\n## Words we do not use\n| lo and behold |";
        assert_eq!(found("docs/dev/glossary.md", table), none);
        assert_eq!(found("docs/dev/other.md", table).len(), 1);
        assert_eq!(found("a.sql", table), none);
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

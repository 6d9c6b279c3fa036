//! Doc comments begin with a sentence that has a subject.
//!
//! Such a sentence is often all that a reader sees of an item: in a list, in a tooltip, or after jumping there. "It was
//! not asked for" or "Sets that" refer to something that is not there.

use anyhow::Result;

use super::breach::Breach;
use super::glossary::{Refused, Use};
use super::tokens::{self, Kind, Token};
use super::tree::Tree;

const RULE: &str = "comments";

/// Words that stand for a noun, at the end of a sentence that is too short to have it.
const PRONOUNS: [&str; 6] = ["it", "so", "that", "them", "this", "those"];

/// Words of a sentence that may be a verb, perhaps with an adverb, and a pronoun.
const SHORT: usize = 3;

pub(super) fn check(tree: &Tree, refused: &[Refused]) -> Result<Vec<Breach>> {
    let openings: Vec<&Refused> = refused.iter().filter(|refused| refused.use_ == Use::Comment).collect();
    let mut breaches = Vec::new();
    for (path, text) in tree.with_endings(&["rs"]) {
        let tokens = tokens::all(path, text)?;
        for (line, text) in doc_comments(&tokens) {
            let Some(message) = problem(&text, &openings) else {
                continue;
            };
            breaches.push(Breach {
                rule: RULE,
                subject: path.to_owned(),
                message: format!("line {line}: {message}"),
            });
        }
    }
    Ok(breaches)
}

/// What is wrong with the beginning of a comment, if anything.
fn problem(text: &str, openings: &[&Refused]) -> Option<String> {
    let opening = openings.iter().find(|refused| {
        let rest = text.strip_prefix(refused.word.as_str());
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
    });
    if let Some(refused) = opening {
        let Refused { word, better, .. } = refused;
        return Some(format!("begins with {word:?}: begin with {better}"));
    }
    let end = text.find(['.', ':', ';']).unwrap_or(text.len());
    let words: Vec<&str> = text[..end].split_whitespace().collect();
    let last = words.last().filter(|_| (2..=SHORT).contains(&words.len()))?;
    PRONOUNS
        .contains(last)
        .then(|| format!("{:?} does not say what is meant: name it", &text[..end]))
}

/// The doc comments of a file, each with its first line. The compiler turns every line of one into an attribute.
fn doc_comments(tokens: &[Token]) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut next = None;
    let mut at = 0;
    while at < tokens.len() {
        let Some((text, length)) = doc_line(&tokens[at..]) else {
            at += 1;
            continue;
        };
        let line = tokens[at].line;
        match found.last_mut().filter(|_| next == Some((line, at))) {
            Some((_, comment)) => {
                comment.push(' ');
                comment.push_str(text.trim());
            }
            None => found.push((line, text.trim().to_owned())),
        }
        at += length;
        next = Some((line + 1, at));
    }
    found
}

/// The text of a doc comment's line at the beginning of tokens, and how many of them it takes.
fn doc_line(tokens: &[Token]) -> Option<(&str, usize)> {
    let is_inner = tokens.get(1).is_some_and(|token| token.punct('!'));
    let length = if is_inner { 7 } else { 6 };
    let line = tokens.get(..length)?;
    let [open, doc, equals, text, _] = &line[length - 5..] else {
        return None;
    };
    let Kind::Literal(text) = &text.kind else { return None };
    let is_doc = line[0].punct('#') && open.open('[') && doc.is("doc") && equals.punct('=');
    let (_, text) = text.split_once('"').filter(|_| is_doc)?;
    Some((text.rsplit_once('"')?.0, length))
}

#[cfg(test)]
mod tests {
    use super::super::glossary::{Refused, Use};
    use super::super::tree::Tree;
    use super::check;

    fn found(text: &str) -> Vec<String> {
        let refused = ["That", "It", "The same"].map(|word| Refused {
            word: word.to_owned(),
            better: "the noun".to_owned(),
            use_: Use::Comment,
        });
        let breaches = check(&Tree::of(&[("a.rs", text)]), &refused).expect("check");
        breaches.into_iter().map(|breach| breach.message).collect()
    }

    const NONE: [&str; 0] = [];

    #[test]
    fn comments_with_a_subject() {
        for text in [
            "//! Items.\n\n/// Its name.\nstruct A;",
            "/// Iteration of a build.\nstruct A;",
            "/// Sets how long\n/// that\n/// is kept. It stays.\nfn f() {}",
            // A comment of one item is not continued by that of the next.
            "/// First.\nstruct A;\n/// Second.\nstruct B;",
            "// It is no doc comment.\nstruct A;",
            "const TEXT: &str = \"\n/// It was done.\n\";",
            "/// Whether the client wants that.\nstruct A;",
            "/// That\u{e9} is a word.\nstruct A;",
        ] {
            assert_eq!(found(text), NONE, "{text}");
        }
    }

    #[test]
    fn comments_without_a_subject() {
        assert_eq!(
            found("//! It says \"no\".\n\nstruct A {\n    /// That, in bytes.\n    #[serde(default)]\n    a: u8,\n}"),
            [
                "line 1: begins with \"It\": begin with the noun",
                "line 4: begins with \"That\": begin with the noun"
            ]
        );
        assert_eq!(
            found("struct A;\n/// The\n/// same.\nfn f() {}"),
            ["line 2: begins with \"The same\": begin with the noun"]
        );
        for text in ["Sets that.", "Really does so.", "Ends it: the task stops."] {
            let problems = found(&format!("/// {text}\nfn f() {{}}"));
            assert_eq!(problems.len(), 1, "{text}");
            assert!(problems[0].contains("does not say what is meant"), "{problems:?}");
        }
    }
}

//! Words of texts and queries: how they are found, reduced to stems, and related to each other.

use std::collections::HashMap;

use rust_stemmers::{Algorithm, Stemmer};

/// Words without a meaning of their own, which do not count in a query beside others.
const EMPTY: &[&str] = &[
    "a", "about", "all", "also", "am", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can",
    "could", "d", "did", "do", "does", "doing", "for", "from", "get", "had", "has", "have", "how", "i", "if", "in",
    "into", "is", "it", "its", "ll", "me", "my", "need", "of", "on", "or", "our", "out", "please", "s", "should", "so",
    "some", "t", "than", "that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to",
    "use", "using", "ve", "via", "was", "we", "were", "what", "when", "where", "which", "who", "why", "will", "with",
    "would", "you", "your",
];

/// Words of the field that people use for the same thing. Each counts for the others of its group, but less.
const RELATED: &[&[&str]] = &[
    &["delete", "kill", "remove", "terminate", "end", "stop"],
    &["expire", "timeout", "lifetime"],
    &["internet", "outbound", "egress"],
    &["block", "deny", "forbid", "refuse", "restrict"],
    &["reach", "connect", "access"],
    &["postgres", "postgresql"],
    &["environment", "env", "variable"],
    &["requirement", "require", "prerequisite"],
    &["setup", "install", "configure"],
    &["error", "message", "troubleshooting"],
    &["unauthorized", "unauthenticated"],
    &["untrusted", "unreviewed", "hostile"],
    &["js", "javascript", "node", "typescript"],
    &["cli", "terminal"],
    &["https", "tls", "certificate", "ssl"],
    &["ram", "memory", "oom"],
    &["cpu", "core"],
    &["upgrade", "update"],
    &["daemon", "systemd", "service"],
    &["mcp", "agent", "documentation"],
];

/// Weight of a related word, and of a word that is only similar.
const RELATED_WEIGHT: f32 = 0.35;
const SIMILAR_WEIGHT: f32 = 0.5;
/// Words of a query for which similar ones are searched, and how many are taken: this is the expensive part.
const SIMILAR_WORDS: usize = 4;
const SIMILAR_TERMS: usize = 3;
/// Longest word that is compared.
const SIMILAR_MAX: usize = 24;

/// A word in a text: the term, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) term: u32,
    pub(super) begin: usize,
    pub(super) end: usize,
}

/// All terms of the index: stems, and compounds such as `egress.allow_private` as they are.
pub(super) struct Vocabulary {
    terms: HashMap<String, u32>,
    /// Every word as it is spelt, in lower case, with its term.
    spellings: HashMap<String, u32>,
    stemmer: Stemmer,
    /// The stems of [`RELATED`].
    related: Vec<Vec<String>>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary")
            .field("terms", &self.terms.len())
            .finish_non_exhaustive()
    }
}

impl Default for Vocabulary {
    fn default() -> Self {
        let mut vocabulary = Self {
            terms: HashMap::new(),
            spellings: HashMap::new(),
            stemmer: Stemmer::create(Algorithm::English),
            related: Vec::new(),
        };
        let stems = |group: &&[&str]| group.iter().map(|word| vocabulary.stem((*word).to_owned())).collect();
        vocabulary.related = RELATED.iter().map(stems).collect();
        vocabulary
    }
}

impl Vocabulary {
    pub(super) fn len(&self) -> usize {
        self.terms.len()
    }

    /// The words of a text that is indexed, in order.
    pub(super) fn add(&mut self, text: &str) -> Vec<Word> {
        let mut words = Vec::new();
        for (token, begin, end) in tokens(text) {
            let next = u32::try_from(self.terms.len()).unwrap_or(u32::MAX);
            let term = match self.spellings.get(&token) {
                Some(term) => *term,
                None => {
                    let term = *self.terms.entry(self.stem(token.clone())).or_insert(next);
                    self.spellings.insert(token, term);
                    term
                }
            };
            words.push(Word { term, begin, end });
        }
        words
    }

    fn stem(&self, token: String) -> String {
        // Names and numbers are not English.
        if token.bytes().all(|byte| byte.is_ascii_lowercase()) {
            self.stemmer.stem(&token).into_owned()
        } else {
            token
        }
    }

    /// The terms of a query with their weights, without repetitions: at most four for each of the first `most` words.
    pub(super) fn query(&self, text: &str, most: usize) -> Vec<(u32, f32)> {
        let tokens: Vec<String> = tokens(text).map(|(token, ..)| token).take(most).collect();
        let meant: Vec<&String> = tokens.iter().filter(|token| !EMPTY.contains(&token.as_str())).collect();
        let meant = if meant.is_empty() {
            tokens.iter().collect()
        } else {
            meant
        };
        let mut terms: Vec<(u32, f32)> = Vec::new();
        let mut add = |term: u32, weight: f32| match terms.iter_mut().find(|(other, _)| *other == term) {
            Some((_, other)) => *other = other.max(weight),
            None => terms.push((term, weight)),
        };
        let mut similar = SIMILAR_WORDS;
        for token in meant {
            let stem = self.stem(token.clone());
            if let Some(term) = self.terms.get(&stem) {
                add(*term, 1.0);
            } else if similar > 0 && (4..=SIMILAR_MAX).contains(&token.len()) {
                similar -= 1;
                for term in self.similar(token) {
                    add(term, SIMILAR_WEIGHT);
                }
            }
            let groups = self.related.iter().filter(|group| group.contains(&stem));
            for related in groups.flatten().filter_map(|word| self.terms.get(word)) {
                add(*related, RELATED_WEIGHT);
            }
        }
        terms
    }

    /// Terms of words that begin with an unknown word, or that differ from it by one letter.
    fn similar(&self, word: &str) -> Vec<u32> {
        let near = |term: &str| term.starts_with(word) || one_edit_apart(word.as_bytes(), term.as_bytes());
        let mut found: Vec<(&String, u32)> = self
            .spellings
            .iter()
            .filter(|(term, _)| term.len().abs_diff(word.len()) <= 4 && near(term))
            .map(|(term, id)| (term, *id))
            .collect();
        // The map has no order of its own.
        found.sort_unstable_by_key(|(term, _)| (term.len().abs_diff(word.len()), *term));
        found.into_iter().take(SIMILAR_TERMS).map(|(_, id)| id).collect()
    }
}

/// Whether one letter is changed, inserted, left out or swapped with the next.
fn one_edit_apart(one: &[u8], other: &[u8]) -> bool {
    if one.len().abs_diff(other.len()) > 1 {
        return false;
    }
    let same = one.iter().zip(other).take_while(|(a, b)| a == b).count();
    let (rest, other_rest) = (&one[same..], &other[same..]);
    let swapped = || {
        rest.len() > 1
            && other_rest.len() > 1
            && (rest[0], rest[1]) == (other_rest[1], other_rest[0])
            && rest[2..] == other_rest[2..]
    };
    match rest.len().cmp(&other_rest.len()) {
        std::cmp::Ordering::Equal => rest.get(1..) == other_rest.get(1..) || swapped(),
        std::cmp::Ordering::Less => Some(rest) == other_rest.get(1..),
        std::cmp::Ordering::Greater => rest.get(1..) == Some(other_rest),
    }
}

/// The words of a text in lower case, with their positions. A compound such as `X-API-Key`, `e2b.dev` or `allowOut`
/// is followed by its parts.
fn tokens(text: &str) -> impl Iterator<Item = (String, usize, usize)> + '_ {
    let is_inner = |char: char| char.is_alphanumeric() || matches!(char, '_' | '-' | '.' | '/' | ':');
    let mut rest = 0;
    std::iter::from_fn(move || {
        let begin = rest + text[rest..].find(char::is_alphanumeric)?;
        let length = text[begin..].find(|char| !is_inner(char)).unwrap_or(text.len() - begin);
        rest = begin + length;
        let compound = text[begin..rest].trim_end_matches(|char: char| !char.is_alphanumeric());
        Some((compound, begin))
    })
    .flat_map(|(compound, begin)| {
        let parts = parts(compound);
        let whole = (parts.len() > 1).then(|| (compound.to_lowercase(), begin, begin + compound.len()));
        let parts = parts
            .into_iter()
            .map(move |(part, at)| (part.to_lowercase(), begin + at, begin + at + part.len()));
        whole.into_iter().chain(parts)
    })
}

/// The parts of a compound: between other characters than letters and digits, and before a capital after a small letter.
fn parts(compound: &str) -> Vec<(&str, usize)> {
    let mut parts = Vec::new();
    let mut begin = None;
    let mut before = ' ';
    for (at, char) in compound.char_indices() {
        let is_end = !char.is_alphanumeric() || (before.is_lowercase() && char.is_uppercase());
        if is_end && let Some(from) = begin.take() {
            parts.push((&compound[from..at], from));
        }
        if begin.is_none() && char.is_alphanumeric() {
            begin = Some(at);
        }
        before = char;
    }
    if let Some(from) = begin {
        parts.push((&compound[from..], from));
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::{one_edit_apart, tokens};

    #[test]
    fn words_and_compounds() {
        let found = |text: &str| -> Vec<String> { tokens(text).map(|(token, ..)| token).collect() };
        assert_eq!(found("Kill it, now."), ["kill", "it", "now"]);
        assert_eq!(found("`X-API-Key`"), ["x-api-key", "x", "api", "key"]);
        assert_eq!(found("e2b.dev?"), ["e2b.dev", "e2b", "dev"]);
        assert_eq!(
            found("allowOut E2B_API_KEY"),
            ["allowout", "allow", "out", "e2b_api_key", "e2b", "api", "key"]
        );
        assert_eq!(found("é— Ünï"), ["é", "ünï"]);
        assert!(found(" ... ").is_empty());
        for (token, begin, end) in tokens("Über e2b.dev, allowOut") {
            assert_eq!("Über e2b.dev, allowOut"[begin..end].to_lowercase(), token);
        }
    }

    #[test]
    fn similar_words() {
        for (one, other, near) in [
            ("metadata", "metadata", true),
            ("metdata", "metadata", true),
            ("metaddata", "metadata", true),
            ("metedata", "metadata", true),
            ("emtadata", "metadata", true),
            ("mtadaat", "metadata", false),
            ("meta", "metadata", false),
            ("", "a", true),
        ] {
            assert_eq!(one_edit_apart(one.as_bytes(), other.as_bytes()), near, "{one} {other}");
            assert_eq!(one_edit_apart(other.as_bytes(), one.as_bytes()), near, "{other} {one}");
        }
    }
}

//! Words of texts and queries: how they are found, reduced to stems, and related to each other.

use std::collections::HashMap;

use rust_stemmers::{Algorithm, Stemmer};

/// Words without a meaning of their own, which do not count in a query beside others.
const EMPTY: &[&str] = &[
    "a",
    "able",
    "about",
    "actually",
    "all",
    "also",
    "always",
    "am",
    "an",
    "and",
    "any",
    "are",
    "as",
    "at",
    "be",
    "because",
    "been",
    "but",
    "by",
    "can",
    "cannot",
    "could",
    "d",
    "did",
    "do",
    "does",
    "doing",
    "don",
    "each",
    "ever",
    "few",
    "for",
    "from",
    "get",
    "gets",
    "give",
    "go",
    "got",
    "had",
    "happen",
    "happens",
    "has",
    "have",
    "how",
    "i",
    "if",
    "in",
    "into",
    "is",
    "isn",
    "it",
    "its",
    "just",
    "let",
    "ll",
    "many",
    "may",
    "me",
    "more",
    "much",
    "my",
    "need",
    "no",
    "not",
    "of",
    "on",
    "or",
    "our",
    "out",
    "own",
    "per",
    "please",
    "possible",
    "re",
    "ringfence",
    "s",
    "should",
    "so",
    "some",
    "something",
    "such",
    "t",
    "than",
    "that",
    "the",
    "their",
    "them",
    "then",
    "there",
    "these",
    "they",
    "this",
    "those",
    "to",
    "too",
    "us",
    "use",
    "used",
    "using",
    "ve",
    "very",
    "via",
    "want",
    "was",
    "way",
    "we",
    "were",
    "what",
    "when",
    "where",
    "which",
    "while",
    "who",
    "why",
    "will",
    "with",
    "won",
    "work",
    "works",
    "would",
    "you",
    "your",
];

/// Words of the field that people use for the same thing. Each counts for the others of its group, but less.
const RELATED: &[&[&str]] = &[
    &["delete", "kill", "remove", "terminate", "end", "stop", "destroy"],
    &["uninstall", "remove", "purge"],
    &["expire", "timeout", "lifetime", "deadline"],
    &["disappear", "vanish", "gone", "die", "kill", "end", "timeout"],
    &[
        "longer", "minute", "hour", "day", "alive", "extend", "timeout", "lifetime",
    ],
    &["internet", "outbound", "egress"],
    &["internet", "network"],
    &["block", "deny", "forbid", "refuse", "restrict", "disable", "prevent"],
    &["reach", "connect", "access", "expose"],
    &["limit", "quota", "maximum", "cap"],
    &["user", "team", "tenant", "customer"],
    &["machine", "host", "vm", "computer", "vps"],
    &["another", "other", "remote", "remotely"],
    &["clone", "duplicate", "fork"],
    &["reset", "rotate", "forgotten", "lost", "lose"],
    &["environment", "env", "variable"],
    &["requirement", "require", "prerequisite"],
    &["setup", "install", "configure"],
    &["deploy", "deployment", "production", "install"],
    &["error", "message", "troubleshooting"],
    &["unauthorized", "unauthenticated"],
    &["untrusted", "unreviewed", "hostile"],
    &["javascript", "node", "typescript"],
    &["cli", "terminal"],
    &["https", "tls", "certificate", "ssl"],
    &["ram", "memory", "oom"],
    &["cpu", "core"],
    &["upgrade", "update"],
    &["daemon", "systemd", "service"],
    &["mcp", "agent", "documentation"],
    &["framework", "library", "integration", "integrate"],
    &["llm", "ai", "agent"],
    &["jupyter", "notebook", "interpreter", "ipython"],
    &["docker", "container", "podman"],
    &["kubernetes", "helm"],
    &["gpu", "cuda", "nvidia"],
    &["windows", "macos", "mac", "wsl"],
    &["aws", "ec2", "gcp", "azure", "cloud"],
    &["hosted", "saas", "managed", "cloud"],
    &["migrate", "migration", "switch"],
    &[
        "compare",
        "comparison",
        "alternative",
        "versus",
        "vs",
        "difference",
        "different",
    ],
    &["price", "pricing", "cost", "free", "license"],
    &["suspend", "hibernate", "pause"],
    &["persist", "persistent", "persistence", "keep", "save"],
    &["directory", "folder"],
    &["proxy", "nginx", "caddy"],
];

/// Other spellings of words, which are the same word.
const SAME: &[(&str, &str)] = &[
    ("aarch64", "arm"),
    ("arm64", "arm"),
    ("k8s", "kubernetes"),
    ("js", "javascript"),
    ("postgres", "postgresql"),
    ("licence", "license"),
];

/// Weight of a word that is related to one that no page has, or to one that pages have, and of a word that is only similar.
const RELATED_WEIGHT: f32 = 0.35;
const RELATED_TO_KNOWN: f32 = 0.2;
const SIMILAR_WEIGHT: f32 = 0.5;
/// What a related or similar word counts for the part of a query that a page answers.
const MEANT: f32 = 0.8;
/// What a number counts there: "5 minutes" is about minutes.
const NUMBER: f32 = 0.25;
/// Words of a query for which similar ones are searched, and how many are taken: this is the expensive part.
const SIMILAR_WORDS: usize = 4;
const SIMILAR_TERMS: usize = 3;
/// Longest word that is compared.
const SIMILAR_MAX: usize = 24;
/// From this length on, words that differ in a letter are taken as one: among short ones, most of them are two words.
const MISSPELT_MIN: usize = 6;

/// A word in a text: the term, and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) term: u32,
    pub(super) begin: usize,
    pub(super) end: usize,
}

/// A word of a query.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Asked {
    /// The word of the query, in lower case.
    pub(super) text: String,
    /// The term of the word itself, where a page has it.
    pub(super) exact: Option<u32>,
    /// The terms that are searched for the word: what each adds to a score, and what it counts for what is answered.
    /// None if no page has anything like it.
    pub(super) terms: Vec<(u32, f32, f32)>,
    /// The spellings that were taken for a word that no page has.
    pub(super) taken: Vec<String>,
    /// How much it counts for what is answered, compared to other words that are as rare.
    pub(super) counts: f32,
}

impl Asked {
    fn add(&mut self, term: u32, weight: f32, answered: f32) {
        if !self.terms.iter().any(|(other, ..)| *other == term) {
            self.terms.push((term, weight, answered));
        }
    }
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
        for Token {
            text: token,
            begin,
            end,
            ..
        } in tokens(text)
        {
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
        let token = match SAME.iter().find(|(other, _)| *other == token) {
            Some((_, same)) => (*same).to_owned(),
            None => token,
        };
        // Names and numbers are not English.
        if token.bytes().all(|byte| byte.is_ascii_lowercase()) {
            self.stemmer.stem(&token).into_owned()
        } else {
            token
        }
    }

    /// The words of a query without repetitions: of the first `most`, those with a meaning.
    pub(super) fn query(&self, text: &str, most: usize) -> Vec<Asked> {
        let tokens: Vec<(String, bool)> = tokens(text)
            .take(most)
            .map(|token| (token.text, token.is_whole))
            .collect();
        let meant: Vec<&(String, bool)> = tokens
            .iter()
            .filter(|token| !EMPTY.contains(&token.0.as_str()))
            .collect();
        let meant = if meant.is_empty() {
            tokens.iter().collect()
        } else {
            meant
        };
        let mut words: Vec<Asked> = Vec::new();
        let mut similar = SIMILAR_WORDS;
        for (token, is_whole) in meant {
            if words.iter().any(|word| word.text == *token) {
                continue;
            }
            let stem = self.stem(token.clone());
            let mut word = Asked {
                text: token.clone(),
                counts: if token.bytes().all(|byte| byte.is_ascii_digit()) {
                    NUMBER
                } else {
                    1.0
                },
                ..Asked::default()
            };
            if let Some(term) = self.terms.get(&stem) {
                word.exact = Some(*term);
                word.add(*term, 1.0, 1.0);
            }
            let related_weight = if word.exact.is_some() {
                RELATED_TO_KNOWN
            } else {
                RELATED_WEIGHT
            };
            let groups = self.related.iter().filter(|group| group.contains(&stem));
            for related in groups.flatten().filter_map(|word| self.terms.get(word)) {
                word.add(*related, related_weight, MEANT);
            }
            if word.terms.is_empty() && similar > 0 && (4..=SIMILAR_MAX).contains(&token.len()) {
                similar -= 1;
                for (spelling, term) in self.similar(token) {
                    word.add(term, SIMILAR_WEIGHT, MEANT);
                    word.taken.push(spelling);
                }
            }
            // The parts of a compound follow it, and say as much.
            if *is_whole && word.exact.is_none() {
                continue;
            }
            words.push(word);
        }
        words
    }

    /// Words that begin with an unknown one, or that differ from it by one letter, with their terms.
    fn similar(&self, word: &str) -> Vec<(String, u32)> {
        let is_misspelt = |term: &str| {
            term.len().max(word.len()) >= MISSPELT_MIN
                && term.as_bytes().first() == word.as_bytes().first()
                && one_edit_apart(word.as_bytes(), term.as_bytes())
        };
        let near = |term: &str| term.starts_with(word) || is_misspelt(term);
        let mut found: Vec<(&String, u32)> = self
            .spellings
            .iter()
            .filter(|(term, _)| term.len().abs_diff(word.len()) <= 4 && near(term))
            .map(|(term, id)| (term, *id))
            .collect();
        // The map has no order of its own.
        found.sort_unstable_by_key(|(term, _)| (term.len().abs_diff(word.len()), *term));
        found.truncate(SIMILAR_TERMS);
        found.into_iter().map(|(term, id)| (term.clone(), id)).collect()
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

/// A word of a text, in lower case, and where it is.
#[derive(Debug)]
struct Token {
    text: String,
    begin: usize,
    end: usize,
    /// Whether the token is a compound, whose parts follow.
    is_whole: bool,
}

/// The words of a text. A compound such as `X-API-Key`, `e2b.dev` or `allowOut` is followed by its parts.
fn tokens(text: &str) -> impl Iterator<Item = Token> + '_ {
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
        let token = move |part: &str, at: usize, is_whole| Token {
            text: part.to_lowercase(),
            begin: begin + at,
            end: begin + at + part.len(),
            is_whole,
        };
        let parts = parts(compound);
        let whole = (parts.len() > 1).then(|| token(compound, 0, true));
        let parts = parts.into_iter().map(move |(part, at)| token(part, at, false));
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
        let found = |text: &str| -> Vec<String> { tokens(text).map(|token| token.text).collect() };
        assert_eq!(found("Kill it, now."), ["kill", "it", "now"]);
        assert_eq!(found("`X-API-Key`"), ["x-api-key", "x", "api", "key"]);
        assert_eq!(found("e2b.dev?"), ["e2b.dev", "e2b", "dev"]);
        assert_eq!(
            found("allowOut E2B_API_KEY"),
            ["allowout", "allow", "out", "e2b_api_key", "e2b", "api", "key"]
        );
        assert_eq!(found("é— Ünï"), ["é", "ünï"]);
        assert!(found(" ... ").is_empty());
        for token in tokens("Über e2b.dev, allowOut") {
            assert_eq!(
                "Über e2b.dev, allowOut"[token.begin..token.end].to_lowercase(),
                token.text
            );
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

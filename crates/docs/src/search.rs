//! Full-text search: BM25 over sections, with more weight for titles and headings.
//!
//! Each section and each page is a document. A page is ranked by its best section and by itself as a whole: a question
//! may be answered by one paragraph, or by several that each have a part of its words. Scores of postings are computed
//! when the index is built, so a query adds numbers. The engine is our own because it is a few pages of code for a few
//! hundred sections; the alternatives are a segmented on-disk index, or SQL in memory behind the store.

mod words;

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::LazyLock;

use self::words::{Asked, Vocabulary, Word};
use crate::catalogue::{Catalogue, Page, catalogue};
use crate::markdown::{self, anchor};

/// Maximum length of a query, in bytes.
pub const QUERY_MAX_BYTES: usize = 1024;
/// Words of a query that count.
const WORDS_MAX: usize = 32;
/// Words in a snippet.
const SNIPPET_WORDS: usize = 36;

/// Parameters of BM25: saturation of repeated words, and how much long documents are penalised.
const SATURATION: f32 = 1.2;
const LENGTH: f32 = 0.6;
/// How often a word in a field counts, compared to one in the text.
const TITLE: f32 = 4.0;
const DESCRIPTION: f32 = 1.5;
const HEADING: f32 = 3.0;
const HEADING_ABOVE: f32 = 1.0;
/// Weight of the score of the page as a whole, compared to that of its best section.
const WHOLE: f32 = 0.6;
/// The part of a query that a page must answer, by how rare its words are, and how much of the score depends on it.
/// Without a bar, whatever nobody wrote about is answered with pages that have its commonest words.
const ANSWERED_MIN: f32 = 0.45;
const ANSWERED: f32 = 0.6;
/// How much more a page counts whose title has all that was asked, and how much a page of the reference, because guides say
/// the same in more words.
const TITLED: f32 = 0.5;
const REFERENCE: f32 = 0.8;
/// The rarity of a word that no page has: less than that of a word of one page, so that a long question may have some.
const UNKNOWN: f32 = 3.0;

/// Words that a note names, and how much of each.
const NOTE_WORDS: usize = 5;
const NOTE_WORD: usize = 40;

/// A page that matches a query.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    /// The page.
    pub page: &'static Page,
    /// The headings of the best section, outermost first; empty for the text below the title.
    pub headings: Vec<String>,
    /// The fragment of that section in the address of the page.
    pub anchor: Option<String>,
    /// The words around the matches, on one line.
    pub snippet: String,
    /// The score, comparable within one result only.
    pub score: f32,
}

/// A word of a query that is on no page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// The word, in lower case.
    pub word: String,
    /// The words of pages that were taken for it, because it may be a part of them or misspelt.
    pub taken: Vec<String>,
}

/// What a search found.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// The pages that match best, best first.
    pub hits: Vec<Hit>,
    /// The words that no page has, in the order of the query.
    pub missing: Vec<Missing>,
}

impl Answer {
    /// A note about the words of the query that are on no page; none if all are on some.
    #[must_use]
    pub fn note(&self) -> Option<String> {
        let quoted = |words: Vec<&str>| {
            let short = |word: &str| word.chars().take(NOTE_WORD).collect::<String>();
            let words = words.into_iter().take(NOTE_WORDS);
            words
                .map(|word| format!("“{}”", short(word)))
                .collect::<Vec<_>>()
                .join(" or ")
        };
        let words: Vec<&str> = self.missing.iter().map(|missing| missing.word.as_str()).collect();
        let taken = self.missing.iter().flat_map(|missing| &missing.taken);
        let taken: Vec<&str> = taken.map(String::as_str).collect();
        if words.is_empty() {
            return None;
        }
        let what = if self.hits.is_empty() {
            ""
        } else if taken.is_empty() {
            " These match the other words."
        } else {
            return Some(format!(
                "No page mentions {}. These match {}.",
                quoted(words),
                quoted(taken)
            ));
        };
        Some(format!("No page mentions {}.{what}", quoted(words)))
    }
}

/// A document with the words that its section has in order, for snippets.
#[derive(Debug)]
struct Section {
    page: usize,
    path: Vec<String>,
    text: String,
    /// The words of the text and where each begins and ends.
    words: Vec<Word>,
}

/// A document and what a term adds to its score.
type Posting = (u32, f32);

/// Postings of all terms over one kind of document, and how rare each term is.
#[derive(Debug, Default)]
struct Postings {
    of: Vec<Vec<Posting>>,
    rarity: Vec<f32>,
}

/// The index.
#[derive(Debug)]
pub struct SearchIndex {
    pages: &'static [Page],
    /// The terms of their titles.
    titles: Vec<Vec<u32>>,
    sections: Vec<Section>,
    vocabulary: Vocabulary,
    of_sections: Postings,
    of_pages: Postings,
}

/// The words of one document, weighted by field.
#[derive(Debug, Default)]
struct Document {
    /// Number of words of the text, and how often each occurs.
    length: usize,
    text: HashMap<u32, f32>,
    /// Words of its own headings, weighted.
    headings: HashMap<u32, f32>,
    /// Words of the page and the headings that the section is part of, weighted. They do not count for how rare a word
    /// is.
    inherited: HashMap<u32, f32>,
}

impl Document {
    fn add_text(&mut self, words: &[Word]) {
        self.length += words.len();
        for word in words {
            *self.text.entry(word.term).or_default() += 1.0;
        }
    }

    fn add_heading(&mut self, words: &[Word], weight: f32) {
        for word in words {
            *self.headings.entry(word.term).or_default() += weight;
        }
    }

    fn add_inherited(&mut self, words: &[Word], weight: f32) {
        for word in words {
            *self.inherited.entry(word.term).or_default() += weight;
        }
    }
}

impl Postings {
    fn of(documents: &[Document], terms: usize) -> Self {
        let total: f32 = documents.iter().map(|document| number(document.length)).sum();
        let average = (total / number(documents.len())).max(1.0);
        let mut postings: Vec<Vec<Posting>> = vec![Vec::new(); terms];
        let mut with = vec![0; terms];
        for (id, document) in (0..).zip(documents) {
            let shorter = 1.0 - LENGTH + LENGTH * number(document.length) / average;
            let mut frequencies = document.headings.clone();
            for (term, count) in &document.text {
                *frequencies.entry(*term).or_default() += count / shorter;
            }
            for term in frequencies.keys() {
                with[*term as usize] += 1;
            }
            for (term, weight) in &document.inherited {
                *frequencies.entry(*term).or_default() += weight;
            }
            for (term, frequency) in frequencies {
                let saturated = frequency * (SATURATION + 1.0) / (frequency + SATURATION);
                postings[term as usize].push((id, saturated));
            }
        }
        let all = number(documents.len());
        let rarity = |with: usize| (1.0 + (all - number(with) + 0.5) / (number(with) + 0.5)).ln();
        let rarity: Vec<f32> = with.into_iter().map(rarity).collect();
        for (found, rarity) in postings.iter_mut().zip(&rarity) {
            for posting in found {
                posting.1 *= rarity;
            }
        }
        Self { of: postings, rarity }
    }

    /// The score of every document for weighted terms.
    fn scores(&self, terms: &[(u32, f32)], documents: usize) -> Vec<f32> {
        let mut scores = vec![0.0; documents];
        for (term, weight) in terms {
            for (document, score) in &self.of[*term as usize] {
                scores[*document as usize] += weight * score;
            }
        }
        scores
    }

    /// How much a word counts for what is answered.
    fn counts(&self, word: &Asked) -> f32 {
        word.exact.map_or(UNKNOWN, |term| self.rarity[term as usize]) * word.counts
    }

    /// The part of a query that each document answers, from 0 to 1: its words, weighted by how rare they are.
    fn answered(&self, words: &[Asked], documents: usize) -> Vec<f32> {
        let mut answered = vec![0.0; documents];
        let mut all = 0.0;
        for word in words {
            let rarity = self.counts(word);
            all += rarity;
            let mut best: Vec<f32> = vec![0.0; documents];
            for (term, _, part) in &word.terms {
                for (document, _) in &self.of[*term as usize] {
                    let best = &mut best[*document as usize];
                    *best = best.max(*part);
                }
            }
            for (answered, best) in answered.iter_mut().zip(best) {
                *answered += rarity * best;
            }
        }
        for answered in &mut answered {
            *answered /= f32::max(all, f32::MIN_POSITIVE);
        }
        answered
    }
}

/// The index of the documentation of this version, built at the first use: a server that is not asked does not need it.
#[must_use]
pub fn search_index() -> &'static SearchIndex {
    static INDEX: LazyLock<SearchIndex> = LazyLock::new(|| SearchIndex::new(catalogue()));
    &INDEX
}

impl SearchIndex {
    /// Indexes all pages.
    fn new(catalogue: &Catalogue) -> Self {
        let pages = catalogue.pages();
        let mut vocabulary = Vocabulary::default();
        let (mut sections, mut titles) = (Vec::new(), Vec::new());
        let (mut of_sections, mut of_pages) = (Vec::new(), Vec::new());
        for (page, number) in pages.iter().zip(0..) {
            let title = vocabulary.add(page.title);
            let description = vocabulary.add(page.description);
            let mut whole = Document::default();
            whole.add_heading(&title, TITLE);
            whole.add_heading(&description, DESCRIPTION);
            for markdown::Section { path, text } in markdown::sections(page.body) {
                let words = vocabulary.add(&text);
                let mut document = Document::default();
                document.add_inherited(&title, TITLE / 2.0);
                document.add_inherited(&description, DESCRIPTION / 2.0);
                document.add_text(&words);
                whole.add_text(&words);
                if let Some((own, above)) = path.split_last() {
                    let own = vocabulary.add(own);
                    document.add_heading(&own, HEADING);
                    whole.add_heading(&own, HEADING / 2.0);
                    for heading in above {
                        document.add_inherited(&vocabulary.add(heading), HEADING_ABOVE);
                    }
                }
                of_sections.push(document);
                sections.push(Section {
                    page: number,
                    path,
                    text,
                    words,
                });
            }
            of_pages.push(whole);
            titles.push(title.iter().map(|word| word.term).collect());
        }
        let terms = vocabulary.len();
        Self {
            pages,
            titles,
            sections,
            vocabulary,
            of_sections: Postings::of(&of_sections, terms),
            of_pages: Postings::of(&of_pages, terms),
        }
    }

    /// The pages that match best, at most `limit`. Only the first words of the query count; words without a meaning of
    /// their own do not count beside others. A page that has too little of what was asked is not among them.
    #[must_use]
    pub fn search(&self, query: &str, limit: usize) -> Answer {
        let words = self.vocabulary.query(query, WORDS_MAX);
        let mut terms: Vec<(u32, f32)> = Vec::new();
        for (term, weight, _) in words.iter().flat_map(|word| &word.terms) {
            match terms.iter_mut().find(|(other, _)| other == term) {
                Some((_, other)) => *other = other.max(*weight),
                None => terms.push((*term, *weight)),
            }
        }
        let answered = self.of_pages.answered(&words, self.pages.len());
        let asked: f32 = words.iter().map(|word| self.of_pages.counts(word)).sum();
        let titled = |page: usize| {
            let has = |word: &&Asked| word.exact.is_some_and(|term| self.titles[page].contains(&term));
            let counts: f32 = words.iter().filter(has).map(|word| self.of_pages.counts(word)).sum();
            counts / asked.max(f32::MIN_POSITIVE)
        };
        let weights: Vec<f32> = (0..self.pages.len())
            .map(|page| {
                let kind = if self.pages[page].route.starts_with("/api") {
                    REFERENCE
                } else {
                    1.0
                };
                kind * (1.0 + TITLED * titled(page)) * (1.0 - ANSWERED + ANSWERED * answered[page])
            })
            .collect();
        let missing = words.into_iter().filter(|word| word.exact.is_none());
        let missing = missing.filter(|word| word.terms.is_empty() || !word.taken.is_empty());
        let missing = missing
            .map(|word| Missing {
                word: word.text,
                taken: word.taken,
            })
            .collect();
        let scores = self.of_sections.scores(&terms, self.sections.len());
        let mut ranked: Vec<(usize, f32)> = self
            .of_pages
            .scores(&terms, self.pages.len())
            .into_iter()
            .map(|score| score * WHOLE)
            .enumerate()
            .collect();
        let mut best: Vec<Option<usize>> = vec![None; self.pages.len()];
        for (section, score) in scores.iter().enumerate() {
            let page = self.sections[section].page;
            if *score > best[page].map_or(0.0, |other| scores[other]) {
                best[page] = Some(section);
            }
        }
        for (page, score) in &mut ranked {
            *score += best[*page].map_or(0.0, |section| scores[section]);
            *score *= weights[*page];
        }
        ranked.retain(|(page, score)| *score > 0.0 && best[*page].is_some() && answered[*page] >= ANSWERED_MIN);
        // The order of the catalogue decides between equals.
        ranked.sort_by(|one, other| other.1.partial_cmp(&one.1).unwrap_or(Ordering::Equal));
        ranked.truncate(limit);
        let mut of_terms = vec![0.0; self.vocabulary.len()];
        for (term, weight) in terms {
            of_terms[term as usize] = weight;
        }
        let hits = ranked
            .into_iter()
            .filter_map(|(page, score)| {
                let section = &self.sections[best[page]?];
                Some(Hit {
                    page: &self.pages[page],
                    headings: section.path.clone(),
                    anchor: section.path.last().map(|heading| anchor(heading)),
                    snippet: section.snippet(&of_terms),
                    score,
                })
            })
            .collect();
        Answer { hits, missing }
    }
}

impl Section {
    /// The part of the text with the most different words of the query, given the weight of each term.
    fn snippet(&self, weights: &[f32]) -> String {
        let weight = |word: &Word| weights[word.term as usize];
        let starts = (0..self.words.len()).filter(|start| *start == 0 || weight(&self.words[*start]) > 0.0);
        let (mut begin, mut highest) = (0, -1.0);
        for start in starts {
            let window = &self.words[start..(start + SNIPPET_WORDS).min(self.words.len())];
            let mut score = 0.0;
            for (at, word) in window.iter().enumerate().filter(|(_, word)| weight(word) > 0.0) {
                if !window[..at].iter().any(|before| before.term == word.term) {
                    score += weight(word);
                }
            }
            if score > highest {
                (begin, highest) = (start, score);
            }
        }
        // Some words before the first match are context.
        let begin = begin.saturating_sub(SNIPPET_WORDS / 6);
        let end = (begin + SNIPPET_WORDS).min(self.words.len());
        let (Some(first), Some(last)) = (self.words.get(begin), self.words[..end].last()) else {
            return String::new();
        };
        let from = if begin == 0 { 0 } else { first.begin };
        let to = if end == self.words.len() {
            self.text.len()
        } else {
            last.end
        };
        let before = if from == 0 { "" } else { "… " };
        let after = if to == self.text.len() { "" } else { " …" };
        format!("{before}{}{after}", &self.text[from..to])
    }
}

fn number(count: usize) -> f32 {
    count as f32
}

#[cfg(test)]
mod tests;

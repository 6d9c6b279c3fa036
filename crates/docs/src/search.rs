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

use self::words::{Vocabulary, Word};
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

/// Postings of all terms over one kind of document.
#[derive(Debug, Default)]
struct Postings(Vec<Vec<Posting>>);

/// The index.
#[derive(Debug)]
pub struct SearchIndex {
    pages: &'static [Page],
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
    /// Words of what it is part of, weighted. They do not count for how rare a word is.
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
        for (found, with) in postings.iter_mut().zip(with) {
            let (all, with) = (number(documents.len()), number(with));
            let rarity = (1.0 + (all - with + 0.5) / (with + 0.5)).ln();
            for posting in found {
                posting.1 *= rarity;
            }
        }
        Self(postings)
    }

    /// The score of every document for weighted terms.
    fn scores(&self, terms: &[(u32, f32)], documents: usize) -> Vec<f32> {
        let mut scores = vec![0.0; documents];
        for (term, weight) in terms {
            for (document, score) in &self.0[*term as usize] {
                scores[*document as usize] += weight * score;
            }
        }
        scores
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
        let mut sections = Vec::new();
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
        }
        let terms = vocabulary.len();
        Self {
            pages,
            sections,
            vocabulary,
            of_sections: Postings::of(&of_sections, terms),
            of_pages: Postings::of(&of_pages, terms),
        }
    }

    /// The pages that match best, at most `limit`. Only the first words of the query count; words without a meaning of
    /// their own do not count beside others.
    #[must_use]
    pub fn search(&self, query: &str, limit: usize) -> Vec<Hit> {
        let terms = self.vocabulary.query(query, WORDS_MAX);
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
        }
        ranked.retain(|(page, score)| *score > 0.0 && best[*page].is_some());
        // The order of the catalogue decides between equals.
        ranked.sort_by(|one, other| other.1.partial_cmp(&one.1).unwrap_or(Ordering::Equal));
        ranked.truncate(limit);
        let mut weights = vec![0.0; self.vocabulary.len()];
        for (term, weight) in terms {
            weights[term as usize] = weight;
        }
        ranked
            .into_iter()
            .filter_map(|(page, score)| {
                let section = &self.sections[best[page]?];
                Some(Hit {
                    page: &self.pages[page],
                    headings: section.path.clone(),
                    anchor: section.path.last().map(|heading| anchor(heading)),
                    snippet: section.snippet(&weights),
                    score,
                })
            })
            .collect()
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

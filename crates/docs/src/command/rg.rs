//! `rg`, by the libraries of ripgrep: the same patterns, and the same lines as `rg --line-number --with-filename
//! --sort path` prints.
//!
//! Patterns are matched in linear time, and their compiled size is bounded. What remains is the product of pattern and
//! text, so the deadline is checked before each line, and lines are searched one by one for that.

use std::fmt;
use std::io;

use grep_matcher::{Match, Matcher, NoCaptures};
use grep_printer::{StandardBuilder, SummaryBuilder, SummaryKind};
use grep_regex::{RegexMatcher, RegexMatcherBuilder};
use grep_searcher::{BinaryDetection, SearcherBuilder};

use super::arguments::{Argument, Arguments};
use super::error::CommandError;
use super::files::{Entry, Files};
use super::output::OUTPUT_MAX_BYTES;
use crate::catalogue::Page;

const USAGE: &str = "usage: rg [-C N] <pattern> [path]; also -A N, -B N, -c, -e PATTERN, -F, -i, -l, -m N, -o, -S, -v, \
                     -w and -x";
/// Maximum size of a compiled pattern, and of the cache of states built while searching, in bytes.
const PATTERN_MAX_BYTES: usize = 1024 * 1024;
/// Maximum nesting of groups.
const NESTING_MAX: u32 = 64;

#[derive(Debug, Default)]
struct Options {
    patterns: Vec<String>,
    paths: Vec<String>,
    before: usize,
    after: usize,
    most: Option<u64>,
    ignore_case: bool,
    smart_case: bool,
    fixed: bool,
    word: bool,
    line: bool,
    invert: bool,
    only_matching: bool,
    files: bool,
    count: bool,
}

fn options(arguments: &[String]) -> Result<Options, CommandError> {
    let mut parsed = Arguments::new("rg", arguments, USAGE);
    let mut options = Options::default();
    let (mut before, mut after, mut around) = (None, None, None);
    let mut has_pattern = false;
    let mut positional = Vec::new();
    while let Some(argument) = parsed.next() {
        match argument {
            Argument::Positional(word) => positional.push(word),
            Argument::Short('A') | Argument::Long("after-context") => after = Some(parsed.number("-A", 0)?),
            Argument::Short('B') | Argument::Long("before-context") => before = Some(parsed.number("-B", 0)?),
            Argument::Short('C') | Argument::Long("context") => around = Some(parsed.number("-C", 0)?),
            Argument::Short('m') | Argument::Long("max-count") => {
                options.most = Some(parsed.number("-m", 1)? as u64);
            }
            Argument::Short('e') | Argument::Long("regexp") => {
                has_pattern = true;
                options.patterns.push(parsed.value("-e")?);
            }
            Argument::Short('F') | Argument::Long("fixed-strings") => options.fixed = true,
            Argument::Short('i') | Argument::Long("ignore-case") => {
                (options.ignore_case, options.smart_case) = (true, false);
            }
            Argument::Short('S') | Argument::Long("smart-case") => {
                (options.ignore_case, options.smart_case) = (false, true);
            }
            Argument::Short('s') | Argument::Long("case-sensitive") => {
                (options.ignore_case, options.smart_case) = (false, false);
            }
            Argument::Short('w') | Argument::Long("word-regexp") => (options.word, options.line) = (true, false),
            Argument::Short('x') | Argument::Long("line-regexp") => (options.word, options.line) = (false, true),
            Argument::Short('v') | Argument::Long("invert-match") => options.invert = true,
            Argument::Short('o') | Argument::Long("only-matching") => options.only_matching = true,
            Argument::Short('l') | Argument::Long("files-with-matches") => options.files = true,
            Argument::Short('c') | Argument::Long("count") => options.count = true,
            // Both are always on.
            Argument::Short('n' | 'H') | Argument::Long("line-number" | "with-filename") => {}
            other => return Err(parsed.unknown(&other)),
        }
    }
    let mut positional = positional.into_iter();
    if !has_pattern {
        let pattern = positional.next();
        options
            .patterns
            .push(pattern.ok_or_else(|| CommandError::new(format!("rg: no pattern; {USAGE}")))?);
    }
    options.paths = positional.collect();
    options.before = before.or(around).unwrap_or(0);
    options.after = after.or(around).unwrap_or(0);
    Ok(options)
}

pub(super) fn run(files: &Files, arguments: &[String], is_late: &dyn Fn() -> bool) -> Result<String, CommandError> {
    let options = options(arguments)?;
    let paths = if options.paths.is_empty() {
        vec!["/".to_owned()]
    } else {
        options.paths.clone()
    };
    let mut pages: Vec<&'static Page> = Vec::new();
    for path in &paths {
        match files.find("rg", path)? {
            Entry::File(page) => pages.push(page),
            Entry::Directory(directory) => pages.extend(files.below(&directory)),
        }
    }
    let matcher = BoundedMatcher {
        regex: matcher(&options)?,
        is_late,
    };
    let mut output = Bounded(Vec::new());
    let ended = search(&options, &matcher, &pages, &mut output);
    let found = String::from_utf8_lossy(&output.0).into_owned();
    match ended {
        Ok(()) if found.is_empty() => Ok("(no matches)\n".to_owned()),
        // What is too long is cut by the caller.
        Ok(()) => Ok(found),
        Err(_) if output.0.len() > OUTPUT_MAX_BYTES => Ok(found),
        Err(_) => Err(CommandError::new(
            "rg: the search took too long and was stopped: use a simpler pattern, or name a file",
        )),
    }
}

fn matcher(options: &Options) -> Result<RegexMatcher, CommandError> {
    let mut builder = RegexMatcherBuilder::new();
    builder
        .multi_line(true)
        .unicode(true)
        .octal(false)
        .case_insensitive(options.ignore_case)
        .case_smart(options.smart_case)
        .fixed_strings(options.fixed)
        .whole_line(options.line)
        .word(options.word)
        .line_terminator(Some(b'\n'))
        .dot_matches_new_line(false)
        .size_limit(PATTERN_MAX_BYTES)
        .dfa_size_limit(PATTERN_MAX_BYTES)
        .nest_limit(NESTING_MAX);
    builder.build_many(&options.patterns).map_err(|error| {
        let why: String = error.to_string().chars().take(500).collect();
        CommandError::new(format!("rg: invalid pattern: {why}"))
    })
}

fn search(
    options: &Options,
    matcher: &BoundedMatcher<'_>,
    pages: &[&'static Page],
    output: &mut Bounded,
) -> io::Result<()> {
    let mut searcher = SearcherBuilder::new()
        .line_number(true)
        .invert_match(options.invert)
        .before_context(options.before)
        .after_context(options.after)
        .max_matches(options.most)
        .binary_detection(BinaryDetection::none())
        .build();
    if options.files || options.count {
        let kind = if options.files {
            SummaryKind::PathWithMatch
        } else {
            SummaryKind::Count
        };
        let mut printer = SummaryBuilder::new().kind(kind).build_no_color(output);
        for page in pages {
            let sink = printer.sink_with_path(matcher, page.file);
            searcher.search_slice(matcher, page.body.as_bytes(), sink)?;
        }
    } else {
        let has_context = options.before > 0 || options.after > 0;
        let mut printer = StandardBuilder::new()
            .only_matching(options.only_matching)
            .separator_search(has_context.then(|| b"--".to_vec()))
            .build_no_color(output);
        for page in pages {
            let sink = printer.sink_with_path(matcher, page.file);
            searcher.search_slice(matcher, page.body.as_bytes(), sink)?;
        }
    }
    Ok(())
}

/// Output that fails once it is too long, which ends the search.
#[derive(Debug)]
struct Bounded(Vec<u8>);

impl io::Write for &mut Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() > OUTPUT_MAX_BYTES {
            return Err(io::Error::other("the output is too long"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The time for a search is over.
#[derive(Debug, Clone, Copy)]
struct Late;

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the search took too long")
    }
}

/// A pattern that stops when the time is over. It has no line terminator, so a searcher asks it for every line.
struct BoundedMatcher<'a> {
    regex: RegexMatcher,
    is_late: &'a dyn Fn() -> bool,
}

impl Matcher for BoundedMatcher<'_> {
    type Captures = NoCaptures;
    type Error = Late;

    fn find_at(&self, haystack: &[u8], at: usize) -> Result<Option<Match>, Late> {
        if (self.is_late)() {
            return Err(Late);
        }
        Ok(self.regex.find_at(haystack, at).unwrap_or_default())
    }

    fn shortest_match_at(&self, haystack: &[u8], at: usize) -> Result<Option<usize>, Late> {
        if (self.is_late)() {
            return Err(Late);
        }
        Ok(self.regex.shortest_match_at(haystack, at).unwrap_or_default())
    }

    fn new_captures(&self) -> Result<NoCaptures, Late> {
        Ok(NoCaptures::new())
    }
}

//! Rust source as a flat list of tokens, without comments and without what is compiled for tests only.

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// One token; a group is its brackets and what is between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Ident(String),
    Punct(char),
    Literal(String),
    Open(char),
    Close(char),
}

/// A token and the line it is on.
#[derive(Debug, Clone)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) line: usize,
}

impl Token {
    pub(super) fn is(&self, word: &str) -> bool {
        matches!(&self.kind, Kind::Ident(ident) if ident == word)
    }

    pub(super) fn punct(&self, wanted: char) -> bool {
        matches!(self.kind, Kind::Punct(found) if found == wanted)
    }

    pub(super) fn open(&self, wanted: char) -> bool {
        matches!(self.kind, Kind::Open(found) if found == wanted)
    }

    pub(super) fn ident(&self) -> Option<&str> {
        match &self.kind {
            Kind::Ident(ident) => Some(ident),
            _ => None,
        }
    }
}

/// All tokens of a file.
pub(super) fn all(path: &str, text: &str) -> Result<Vec<Token>> {
    // A line of its own at the top is for a shell, not for the compiler.
    let text = if text.starts_with("#!/") {
        text.split_once('\n').unwrap_or_default().1
    } else {
        text
    };
    let stream: TokenStream = text.parse().map_err(|error| anyhow!("read {path} as Rust: {error}"))?;
    let mut tokens = Vec::new();
    flatten(stream, &mut tokens);
    Ok(tokens)
}

/// The tokens of a file without its attributes `#[cfg(test)]` and the items under them.
pub(super) fn for_release(path: &str, text: &str) -> Result<Vec<Token>> {
    let tokens = all(path, text)?;
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        match test_attribute(&tokens[at..]) {
            Some(length) => at = item_end(&tokens, at + length),
            None => {
                kept.push(tokens[at].clone());
                at += 1;
            }
        }
    }
    Ok(kept)
}

fn flatten(stream: TokenStream, into: &mut Vec<Token>) {
    for tree in stream {
        let line = tree.span().start().line;
        let kind = match tree {
            TokenTree::Ident(ident) => Kind::Ident(ident.to_string()),
            TokenTree::Punct(punct) => Kind::Punct(punct.as_char()),
            TokenTree::Literal(literal) => Kind::Literal(literal.to_string()),
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ('(', ')'),
                    Delimiter::Brace => ('{', '}'),
                    Delimiter::Bracket | Delimiter::None => ('[', ']'),
                };
                into.push(Token {
                    kind: Kind::Open(open),
                    line,
                });
                flatten(group.stream(), into);
                let line = group.span_close().start().line;
                into.push(Token {
                    kind: Kind::Close(close),
                    line,
                });
                continue;
            }
        };
        into.push(Token { kind, line });
    }
}

/// How many tokens an attribute at the start takes, if it keeps what follows out of releases.
fn test_attribute(tokens: &[Token]) -> Option<usize> {
    let [hash, bracket, cfg, ..] = tokens else { return None };
    if !(hash.punct('#') && bracket.open('[') && cfg.is("cfg")) {
        return None;
    }
    let end = group_end(tokens, 1);
    let inside = &tokens[..end];
    let test = inside.iter().any(|token| token.is("test"));
    let other = inside.iter().any(|token| token.is("not") || token.is("any"));
    (test && !other).then_some(end)
}

/// The place after the group that opens at `at`.
pub(super) fn group_end(tokens: &[Token], at: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(at) {
        match token.kind {
            Kind::Open(_) => depth += 1,
            Kind::Close(_) => {
                depth -= 1;
                if depth == 0 {
                    return index + 1;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

/// The place after the item, field or statement that begins at `at`, with the attributes before it.
fn item_end(tokens: &[Token], mut at: usize) -> usize {
    while at + 1 < tokens.len() && tokens[at].punct('#') && tokens[at + 1].open('[') {
        at = group_end(tokens, at + 1);
    }
    let block = |token: &Token| {
        ["fn", "mod", "impl", "struct", "enum", "trait", "union", "macro_rules"]
            .iter()
            .any(|word| token.is(word))
    };
    // `pub(crate) const fn`, `unsafe impl`, …: the first word that decides is among the first few.
    let ends_with_block = tokens[at..]
        .iter()
        .take_while(|token| !token.punct('=') && !token.punct(';'))
        .take(8)
        .any(block);
    while at < tokens.len() {
        match &tokens[at].kind {
            Kind::Punct(';') => return at + 1,
            Kind::Punct(',') if !ends_with_block => return at + 1,
            Kind::Open('{') if ends_with_block => return group_end(tokens, at),
            Kind::Open(_) => at = group_end(tokens, at),
            Kind::Close(_) => return at,
            _ => at += 1,
        }
    }
    at
}

//! The words that `docs/dev/glossary.md` says are not used. The page is their only list.

use anyhow::{Context as _, Result, bail, ensure};

use super::tree::Tree;

/// The page with the terms.
pub(super) const PAGE: &str = "docs/dev/glossary.md";

/// The last section of the page, which may name the words that it refuses. Its first table is read.
const SECTION: &str = "## Words we do not use";

/// What a refused word must not be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// Part of any text, in lower or upper case.
    Text,
    /// The name of a type.
    Type,
    /// The name of a function.
    Function,
    /// The beginning of a doc comment.
    Comment,
}

/// A word or phrase of the table.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// The word or phrase.
    pub(super) word: String,
    /// What to write instead.
    pub(super) better: String,
    /// Where the word is refused.
    pub(super) use_: Use,
}

/// Part of the page before the section with refused words.
pub(super) fn before_refused(page: &str) -> &str {
    page.split_once(SECTION).map_or(page, |(before, _)| before)
}

/// Reads the table.
///
/// # Errors
/// When the page has no such table, or a row has another form.
pub(super) fn refused(tree: &Tree) -> Result<Vec<Refused>> {
    let page = tree.text(PAGE).context("there is no glossary")?;
    let (_, section) = page
        .split_once(SECTION)
        .with_context(|| format!("{PAGE} has no section {SECTION:?}"))?;
    let table = section.lines().skip_while(|line| !line.starts_with('|'));
    let rows = table.take_while(|line| line.starts_with('|')).skip(2);
    let mut found = Vec::new();
    for row in rows {
        read_row(row, &mut found).with_context(|| format!("{PAGE}: row {row:?}"))?;
    }
    ensure!(!found.is_empty(), "{PAGE} has no refused words");
    Ok(found)
}

/// Reads the words of one row: in backticks in the first cell.
fn read_row(row: &str, found: &mut Vec<Refused>) -> Result<()> {
    let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
    let [words, better, use_] = cells.as_slice() else {
        bail!("must have three cells");
    };
    let use_ = match *use_ {
        "text" => Use::Text,
        "type" => Use::Type,
        "function" => Use::Function,
        "comment" => Use::Comment,
        other => bail!("{other:?} must be text, type, function or comment"),
    };
    let words: Vec<&str> = words.split('`').skip(1).step_by(2).collect();
    ensure!(!words.is_empty(), "has no word in backticks");
    found.extend(words.into_iter().map(|word| Refused {
        word: if use_ == Use::Text {
            word.to_lowercase()
        } else {
            word.to_owned()
        },
        better: better.replace('`', ""),
        use_,
    }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tree::Tree;
    use super::{PAGE, Refused, Use, before_refused, refused};

    fn read(rows: &str) -> Result<Vec<Refused>, String> {
        let page =
            format!("A term.\n## Words we do not use\n\nText.\n\n| Refused | Better | As |\n|---|---|---|\n{rows}\n");
        refused(&Tree::of(&[(PAGE, &page)])).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn the_first_table_is_read() {
        let refused = |word: &str, better: &str, use_| Refused {
            word: word.to_owned(),
            better: better.to_owned(),
            use_,
        };
        let rows = "| `One Word`, `two` | another | text |\n| `Site` | `Gateway` | type |\n\n| Not | But |\n|---|---|\n| a | b |";
        assert_eq!(
            read(rows),
            Ok(vec![
                refused("one word", "another", Use::Text),
                refused("two", "another", Use::Text),
                refused("Site", "Gateway", Use::Type),
            ])
        );
        assert_eq!(before_refused("A term.\n## Words we do not use\nx"), "A term.\n");
    }

    #[test]
    fn other_tables_are_errors() {
        for rows in ["", "| a | b | text |", "| `a` | b |", "| `a` | b | word |"] {
            assert!(read(rows).is_err(), "{rows}");
        }
        assert!(refused(&Tree::of(&[])).is_err());
        assert!(refused(&Tree::of(&[(PAGE, "A term.")])).is_err());
    }
}
